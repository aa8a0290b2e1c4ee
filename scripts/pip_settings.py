"""Prints where pip looks for packages, as arguments of `uv pip install`, one a line. uv does not read pip's settings.

python scripts/pip_settings.py
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator

FLAGS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
FILES, ENVIRONMENT = "global", ":env:"
"""Sections of pip's settings that hold for an installation; `install` does too."""


def arguments(lines: Iterable[str]) -> Iterator[str]:
    """Convert lines of `pip config list`, such as ``global.index-url='https://example.org/simple'``.

    As in pip, a setting of the command goes before one of all commands, and the environment before both.
    """
    settings: dict[str, dict[str, str]] = {}
    for line in lines:
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if name in FLAGS and section in (FILES, "install", ENVIRONMENT):
            settings.setdefault(name, {})[section] = str(ast.literal_eval(value))
    for name, values in settings.items():
        chosen = next(values[section] for section in (ENVIRONMENT, "install", FILES) if section in values)
        for choice in chosen.split():
            yield from (FLAGS[name], choice)


def main() -> None:
    """Print the arguments."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    for argument in arguments(listed.stdout.splitlines()):
        print(argument)


if __name__ == "__main__":
    main()
