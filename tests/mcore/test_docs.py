"""The documentation keeps to the code: its commands run, its quotes are what the code says, its links lead somewhere."""

import argparse
import ast
import difflib
import os
import re
import runpy
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from megatron_epp.mcore.arguments.parser import add_epp_args
from megatron_epp.tools.cli import main as cli
from scripts import write_tables

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md", "patches/README.md"))]
WITH_COMMANDS = [*PAGES, *sorted((ROOT / "configs").rglob("*.yaml")), *sorted((ROOT / "scripts").glob("train.*"))]
LAPTOP = "laptop"
"""Mark of a shell block that runs here. The others need a GPU, a cluster, or time."""


def blocks(page, language):
    pattern = rf"^```{language} ?(\w*)\n(.*?)^```"
    return [(mark, body) for mark, body in re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)]


def name(page):
    return str(page.relative_to(ROOT))


WRITER = runpy.run_path(str(ROOT / "scripts" / "write_flags.py"))


def test_the_flags_are_written_from_the_parsers():
    written, current = (text.splitlines() for text in ((ROOT / "docs" / "flags.md").read_text(), WRITER["document"]()))
    difference = "\n".join(difflib.unified_diff(written, current, "docs/flags.md", "the parsers", n=0, lineterm=""))
    assert not difference, f"run: python scripts/write_flags.py\n{difference}"


def test_pages_have_the_tables_of_the_code():
    for page, text in write_tables.pages().items():
        assert page.read_text() == text, "run: python -m scripts.write_tables"


PARSERS = WRITER["commands"]() | {"pretrain_gpt.py": add_epp_args(argparse.ArgumentParser())}


@pytest.mark.parametrize("command", PARSERS)
def test_every_value_that_may_be_left_out_has_its_default_stated(command):
    values = [a for a in PARSERS[command]._actions if a.option_strings and a.nargs != 0 and not a.required]
    assert [a.option_strings[0] for a in values if not re.search(r"(?i)default|%\(|Without it", a.help or "")] == []


def _is_long(block):
    """Whether a block searches for a layout, or needs Megatron's parser, as those of the README do that run by default."""
    return "megatron-epp advise" in block or all("--dry-run" in line for line in block.splitlines())


RUNNABLE = [(page, body) for page in DOCS for mark, body in blocks(page, "bash") if mark == LAPTOP]


@pytest.fixture(scope="module")
def anywhere(tmp_path_factory):
    """A folder with what blocks look for in a checkout, so that they leave nothing behind in this one."""
    folder = tmp_path_factory.mktemp("checkout")
    for needed in ("configs", "docs", "scripts", "megatron_epp"):
        (folder / needed).symlink_to(ROOT / needed)
    (folder / "bin").mkdir()
    for command, module in {"megatron-epp": "-m megatron_epp.tools.cli.main", "python": ""}.items():
        start = f'PYTHONPATH="{ROOT}:$PYTHONPATH" exec {sys.executable} {module} "$@"'
        (folder / "bin" / command).write_text(f"#!/bin/sh\n{start}\n")
        (folder / "bin" / command).chmod(0o755)
    return folder


def _marks(page, body):
    return () if page.stem == "first-hour" and not _is_long(body) else pytest.mark.slow


@pytest.mark.parametrize(
    ("page", "block"),
    [pytest.param(page, body, id=f"{page.stem}: {body.splitlines()[0]}", marks=_marks(page, body)) for page, body in RUNNABLE],
)
def test_a_block_for_a_laptop_runs(page, block, anywhere, monkeypatch):
    shell, plain = _parts(block)
    path = os.pathsep.join([str(anywhere / "bin"), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = ["bash", "-euo", "pipefail", "-c", shell]
    done = subprocess.run(command, cwd=anywhere, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, f"{name(page)}\n{(done.stdout + done.stderr)[-5000:]}"
    monkeypatch.chdir(anywhere)
    for line in plain:
        assert cli.main(shlex.split(line)[1:]) == 0, f"{name(page)}\n{line}"


def _parts(block):
    """Divide a block into what a shell runs and the commands of ours behind it. These run in this process where nothing but
    their words is for the shell, and none of them becomes another program.
    """
    lines = block.splitlines(keepends=True)
    first = next((at for at, line in enumerate(lines) if line.startswith("megatron-epp ")), len(lines))
    plain = [line.partition("#")[0].strip() for line in lines[first:]]
    are_ours = all(line.startswith("megatron-epp ") and not re.search(r"[|<>$&;\\*]| train ", line) for line in plain)
    if "cd " not in "".join(lines[:first]) and are_ours:
        return "".join(lines[:first]), plain
    return block, []


def commands(page):
    """Lines with a command of ours, continued lines joined; out of comments, too."""
    text = page.read_text()
    if page.suffix == ".md":
        text = "".join(body for _, body in blocks(page, "bash"))
    lines = (line.lstrip("# ").strip() for line in text.replace("\\\n", " ").splitlines())
    return [line.partition("| ")[0] for line in lines if line.startswith("megatron-epp ")]


COMMANDS = [(page, line) for page in WITH_COMMANDS for line in commands(page)]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page.name}: {line}" for page, line in COMMANDS])
def test_every_command_has_the_flags_it_is_given(page, line, capsys):
    code = 0
    try:
        cli._parser().parse_args(shlex.split(line, comments=True)[1:])
    except SystemExit as end:
        code = end.code
    assert not code, capsys.readouterr().err


@cache
def literals():
    """For every module of the package the text in it, docstrings left out."""
    found = {}
    for path in [*(ROOT / "megatron_epp").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in alone)
        found[path] = [" ".join(node.value.split()) for node in texts if isinstance(node.value, str)]
    return found


def missing(quote):
    """Parts of a quoted message, between what it leaves open (…), that no module has all together: of the one that has most."""
    parts = [part for part in (" ".join(piece.split()).strip(" ();:,") for piece in quote.split("…")) if len(part) > 3]
    assert parts, f"{quote!r} quotes nothing"
    return min(([p for p in parts if not any(p in text for text in texts)] for texts in literals().values()), key=len)


QUOTES = [(page, body) for page in DOCS for mark, body in blocks(page, "text") if mark == "message"]
HELP = ROOT / "docs" / "troubleshooting.md"
QUOTES += [(HELP, words) for words in re.findall(r"(?<!\*)\*([^*]+)\*", HELP.read_text()) if len(words.split()) > 2]


@pytest.mark.parametrize(("page", "quote"), QUOTES, ids=[f"{page.stem}: {body[:60].strip()}" for page, body in QUOTES])
def test_a_quoted_message_is_what_the_code_says(page, quote):
    assert not missing(quote), name(page)


def test_a_message_that_the_code_does_not_say_would_be_noticed():
    assert missing("--seq-length … is too long for …") == ["is too long for"]
    assert not missing("--seq-length … is too short for … slices of at least")


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if heading:
            assert heading in {anchor(line.lstrip("# ")) for line in found.read_text().splitlines() if line.startswith("#")}
