"""Lists the benchmarks: `python -m scripts.bench`. Each is run by its own name, and says more with `--help`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]


def benches() -> Iterator[tuple[str, str]]:
    """Yield the command of every benchmark and the first line of its docstring, from the source: some need torch or a GPU."""
    for path in sorted(SCRIPTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\nBENCH = Bench(" in text:
            is_command = '\nif __name__ == "__main__":' in text and path.stem != "__main__"
            module = path.with_suffix("") if is_command else path.parent
            name = ".".join(module.relative_to(SCRIPTS.parent).parts)
            several = "" if is_command else (path.parent / "__main__.py").read_text(encoding="utf-8")
            parts = re.findall(rf'"(\w+)": {path.stem}\.BENCH', several)  # where one command has several benchmarks
            about = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            yield " ".join(["python -m", name, *parts]), about


if __name__ == "__main__":
    for command, about in benches():
        print(f"{command:45} {about}")
