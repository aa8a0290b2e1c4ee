"""The package, its scripts, settings and pages use the words of `docs/glossary.md`: retired ones stay out, and docstrings begin
with a verb or a noun.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = {".py", ".md", ".yaml", ".sh", ".sbatch"}
ELSEWHERE = {"glossary.md", "flags.md"}
"""Pages that explain the words, or are written from the parsers."""


class Retired(NamedTuple):
    """A word that is no longer used.

    Attributes:
        names_only: the word is fine in prose.
        allowed: pattern of lines in which it may stand.
    """

    pattern: str
    instead: str
    names_only: bool = False
    allowed: str = r"(?!)"


WORDS = [
    Retired(r"(?i)(?<![a-z])host(ed|ing)(?![a-z])", "KV offload"),
    Retired(r"at_host", "kv_offload"),
    Retired(r"LEVELS|recompute_levels?\b|(?i:levels? of recompute|recompute levels?\b)", "recompute modes"),
    Retired(r"(?i)(?<![a-z])(ladder|rungs?|climb(ed|s)?)(?![a-z])", "recompute frontier, frontier step"),
    Retired(r"Stairs|(?<![a-z_])slope", "warm-up window, lead"),
    Retired(r"\bListing\b|\bLISTED\b", "list scheduling"),
    Retired(r"(check|plan)_matched|(?i:matched plans)|(?<![a-z])in_step|(run|stay|being) in step|fit_alike|ALIKE", "lockstep"),
    Retired(r"\balike\b", "equal", names_only=True),
    Retired(r"(?i)(?<![a-z])teams?(?![a-z])", "lockstep group"),
    Retired(
        r"(?<![a-z])(surge|risen)(?![a-z])|backward_(passed|net|throughout)",
        "layer peak, release per layer, residual, constant",
    ),
    Retired(r"fresh_bytes|plan\.fresh", "transient KV gradients"),
    Retired(r"(?i)(?<![a-z])levers?(?![a-z])", "features"),
    Retired(r"truth_|_truth", "fidelity"),
    Retired(r"(?<![a-z])meet(ing)?(?![a-z])", "rendezvous", names_only=True),
    Retired(r"\bwriters\b", "loggers", names_only=True),
    Retired(r"(?<![a-z])straight(?![a-z])", "one stage per rank", names_only=True),
    Retired(r"(?i)(?<![a-z])beside(?![a-z])", "overlapped with, next to", allowed="longest_sequence_beside"),
    Retired(
        r"(?<![a-z])apart(?![a-z])", "split, boundary, stride", names_only=True, allowed=r"apart_(attended_)?bytes_per_token"
    ),
    Retired(r"\b[Pp]laces?\b", "position, rank, assign", names_only=True),
    Retired(r"(?i)\b(nobody|nowhere|whoever)\b", "a passive, or the thing itself"),
]


@cache
def files() -> list[Path]:
    folders = ("megatron_epp", "scripts", "configs", "docs")
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    return [path for path in (*found, ROOT / "README.md") if path.name not in ELSEWHERE]


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def lines(path: Path) -> tuple[list[str], list[tuple[int, str]]]:
    """Return a file's lines, and the names in its code with the numbers of their lines."""
    text = path.read_text()
    names = []
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        names = [(token.start[0], token.string) for token in tokens if token.type == tokenize.NAME]
    return text.splitlines(), names


def uses(word: Retired) -> list[str]:
    found = []
    for path in files():
        text, names = lines(path)
        if not re.search(word.pattern, "\n".join(text)):
            continue
        candidates = names if word.names_only else enumerate(text, 1)
        for number, part in candidates:
            if re.search(word.pattern, part) and not re.search(word.allowed, text[number - 1]):
                found.append(f"{path.relative_to(ROOT)}:{number}: {text[number - 1].strip()[:100]}")
    return found


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.pattern)
def test_retired_words_stay_out(word: Retired) -> None:
    found = uses(word)
    assert not found, f"say {word.instead} (docs/glossary.md):\n" + "\n".join(found)


GENERIC = {"found", "one", "made", "given", "kept", "told"}
"""Names that say how a value came about, and not what it is. Fields of records may have them: files and reports show these."""


def bound(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the names that a file gives, but for the fields of its records, with their lines."""
    fields = {
        entry.target for node in nodes(path) if isinstance(node, ast.ClassDef) for entry in node.body
        if isinstance(entry, ast.AnnAssign)
    }  # fmt: skip
    for node in nodes(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler) and node.name:
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield 1, node.asname


def test_variables_are_named_for_what_they_hold() -> None:
    sources = [path for path in files() if path.suffix == ".py"]
    bad = [f"{path.relative_to(ROOT)}:{line}: {name}" for path in sources for line, name in bound(path) if name in GENERIC]
    assert not bad, "\n".join(bad)


FRAGMENT = re.compile(
    r"(Of|What|As|Which|Whose|Who|Whether|How|Where|When|That|Those|It|They|So|Like|If|From|For|By|With|Without|About"
    r"|The same)\b"
)


def summaries(path: Path) -> list[tuple[int, str]]:
    """Return the first lines of a file's docstrings, of classes, functions and what stands above them."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            found.append((getattr(node, "lineno", 1), text.splitlines()[0]))
    return found


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    every = [
        (path, *one) for path in files() if path.suffix == ".py" and "megatron_epp" in path.parts for one in summaries(path)
    ]
    bad = [f"{path.relative_to(ROOT)}:{number}: {text}" for path, number, text in every if FRAGMENT.match(text)]
    assert not bad, "\n".join(bad)


SAYS_MORE_THAN_A_NAME = re.compile(
    r"[\d`\[]|byte|second|\b(None|True|if|not|per|may|counts?|must)\b|where|which|at (most|least)|each|every|only|without"
    r"|(other|like)wise|else|until|while|once|unless|empty|zero|infinity|range|fraction|share|default|nothing|in (place|order)"
    r"|falling|ascending|longest|deterministic|unique|multiple|either|called|updated|overwritten|removed|decisions that"
)
"""A unit, a shape, a limit, what a missing value means, or what is done with an argument."""
SHORT = 48


def arguments(text: str) -> Iterator[str]:
    """Yield what a docstring says of each argument."""
    if section := re.search(r"^Args:\n((?:    .*\n?)+)", text, re.MULTILINE):
        for entry in re.split(r"\n(?=    \S)", section[1].rstrip()):
            yield re.sub(r"\s+", " ", entry.strip()).partition(": ")[2]


def test_docstrings_say_of_an_argument_what_its_name_and_type_do_not() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{node.name}: {text}"
        for path in files()
        if path.suffix == ".py"
        for node in nodes(path)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        for text in arguments(ast.get_docstring(node) or "")
        if len(text) <= SHORT and not SAYS_MORE_THAN_A_NAME.search(text)
    ]
    assert not bad, "\n".join(bad)


FILLERS = re.compile(
    r"(a|an|and|any|all|are|as|at|be|by|each|every|for|from|has|in|into|is|it|its|of|on|or|return|the|to|with|yield)$"
)


def stems(text: str) -> set[str]:
    """Return the words of a text or a name, without endings."""
    words = re.findall(r"[A-Za-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text.replace("_", " ")))
    return {re.sub(r"(ings?|ed|es|s|e)$", "", word.lower()) for word in words if not FILLERS.match(word.lower())}


def repeats_its_name(function: ast.FunctionDef, module: str) -> bool:
    """Return True for a docstring of one line that has no word beyond the function's name, arguments, types and module."""
    text = ast.get_docstring(function) or ""
    signature = f"{module} {function.name} {ast.unparse(function.args)} {ast.unparse(function.returns or function.args)}"
    return bool(text) and "\n" not in text and len(function.body) > 1 and "`" not in text and stems(text) <= stems(signature)


def test_docstrings_are_more_than_the_name_in_another_order() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}: {ast.get_docstring(node)}"
        for path in files()
        if path.suffix == ".py"
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and repeats_its_name(node, path.stem)
    ]
    assert not bad, "\n".join(bad)


OUTSIDE = {"megatron", "scipy", "scripts", "torch"}
"""Other packages whose modules docstrings and comments name."""
DOTTED = re.compile(r"(?<!`)`((?!\w+\.py`)[a-z_]\w*(?:\.\w+)+)`(?!`)")


@cache
def names_in(path: Path) -> set[str]:
    keys = ("id", "attr", "arg", "name", "asname")
    return {name for node in nodes(path) for key in keys if (name := getattr(node, key, None))}


@cache
def modules() -> dict[str, list[Path]]:
    """Return the package's modules by the ends of their dotted names, as `loss.kernels` for one in `runtime`."""
    found: dict[str, list[Path]] = {}
    for path in (ROOT / "megatron_epp").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if path.stem == "__init__" else parts
        for at in range(len(parts)):
            found.setdefault(".".join(parts[at:]), []).append(path)
    return found


def leads_somewhere(reference: str, path: Path) -> bool:
    """Return True if what a file names is one of the package's modules or a name in one, begins with a name of the file's own,
    or is outside the package.
    """
    parts = reference.split(".")
    if parts[0] in names_in(path) | OUTSIDE:
        return True
    return any(
        at == len(parts) or parts[at] in names_in(module)
        for at in range(1, len(parts) + 1)
        for module in modules().get(".".join(parts[:at]), ())
    )


def test_dotted_names_in_docstrings_and_comments_lead_somewhere() -> None:
    bad = []
    for path in files():
        if path.suffix == ".py" and "megatron_epp" in path.parts:
            for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
                if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""')):
                    missing = [name for name in DOTTED.findall(token.string) if not leads_somewhere(name, path)]
                    bad += [f"{path.relative_to(ROOT)}:{token.start[0]}: {name}" for name in missing]
    assert not bad, "\n".join(bad)
    assert not leads_somewhere("cost.kernels", ROOT / "megatron_epp" / "cost" / "work.py")


def test_the_glossary_is_in_alphabetical_order() -> None:
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")][1:]
    terms = [row.split("|")[1].strip().strip("`").casefold() for row in rows]
    assert terms == sorted(terms)
    assert all(len(row.split(" | ")) == 4 for row in rows)
