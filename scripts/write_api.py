"""Writes docs/api.md from signatures and docstrings: `python scripts/write_api.py`. A test checks that the file is current."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

from megatron_epp.mcore.arguments.table import ROWS

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "api.md"
HEAD = """\
<!-- Written by scripts/write_api.py from docstrings: change those, and run it again. -->

# API

Three functions train, `wrap_samples`, `wrap` and `install`, and one plans, `plan`: all else here is what they take or return.
Whatever cannot be done raises an `EppError` of `megatron_epp.plan`, whose text says what to change: `InfeasibleError` where no
plan fits the caps, `PlanError` where the arguments make none. [Your loop](your-loop.md) shows training, [a schedule of your
own](your-own-schedule.md) planning; [flags](flags.md) have the settings of both. Names that are not here may change.
"""
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Training": {
        "features/losses/sample_schedule.py": ("megatron_epp.wrap_samples", "SampleSchedule.__call__"),
        "features/losses/sample_report.py": ("SampleReport",),
        "mcore/iteration/wrap.py": ("megatron_epp.wrap", "megatron_epp.install"),
    },
    "Losses, of megatron_epp.losses": {
        "losses/loss.py": ("Loss", "Rows", "Scope", "Average", "NextToken"),
        "losses/policy.py": ("ClippedRatio", "SequenceRatio", "ClippedValue"),
        "losses/distillation.py": ("Distillation",),
        "losses/preference.py": ("Preference", "Reward"),
    },
    "Planning": {
        "planner/__init__.py": ("megatron_epp.planner.plan",),
        "plan/problem.py": ("megatron_epp.planner.Problem", "megatron_epp.planner.Options"),
        "tools/formulas/analytic.py": ("megatron_epp.tools.formulas.analytic_costs",),
        "tools/formulas/library.py": ("megatron_epp.tools.formulas.library.load_costs",),
        "plan/proof/__init__.py": ("megatron_epp.plan.check",),
        "plan/simulation.py": ("megatron_epp.plan.simulate",),
        "plan/serialize.py": ("megatron_epp.plan.save", "megatron_epp.plan.load"),
    },
}
"""By section and file: the names with the modules from which they are imported."""
OF_FLAGS = "Options"
"""The class whose fields are settings of commands: those with a flag are said there."""
BRIEF = "check", "simulate"
"""Functions of whose rules `how-it-works.md` has more."""
Definition = ast.FunctionDef | ast.ClassDef


def document() -> str:
    """The whole file."""
    parts = HEAD
    for title, files in SECTIONS.items():
        texts = (text_of(ROOT / "megatron_epp" / file, name) for file, names in files.items() for name in names)
        parts += "\n".join([f"\n## {title}\n", *texts])
    return parts


def text_of(path: Path, full_name: str) -> str:
    """Return the section of a name: its signature and docstring."""
    module, _, name = full_name.rpartition(".")
    node: ast.Module | Definition = ast.parse(path.read_text(encoding="utf-8"))
    for part in (module, name) if name == "__call__" else (name,):
        (node,) = (child for child in node.body if isinstance(child, Definition) and child.name == part)
    assert isinstance(node, Definition)
    parameters = dict(parameters_of(node))
    parts = [f"### {full_name}"]
    if isinstance(node, ast.FunctionDef):
        returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        parts.append(f"```python\n{name}({ast.unparse(node.args).removeprefix('self, ')}){returned}\n```")
    docstring = ast.get_docstring(node) or ""
    if name == OF_FLAGS:
        docstring = re.sub(r"(?m)^    (\w+): .*(?:\n     .*)*", with_flag, docstring)
    parts += paragraphs_of(docstring, parameters, name in BRIEF)
    if members := "\n".join(members_of(node)):
        parts.append(members)
    return "\n\n".join(parts) + "\n"


def with_flag(attribute: re.Match[str]) -> str:
    """Return what a docstring says of an attribute: of a setting of commands only the flag."""
    row = ROWS.get(attribute[1])
    return f"    {row.setting}: `{row.short.split()[0]}`." if row and row.short else attribute[0]


def parameters_of(node: Definition) -> Iterator[tuple[str, str]]:
    """Yield the fields of a class with their defaults; with their types where these do not say them."""
    for field in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(field, ast.AnnAssign) and not (kind := ast.unparse(field.annotation)).startswith("ClassVar"):
            name, default = ast.unparse(field.target), f" = {ast.unparse(field.value)}" if field.value else ""
            yield name, name + f": {kind}" * (default in ("", " = None", " = ()")) + default


def members_of(node: Definition) -> Iterator[str]:
    """Yield an item for every member of an enumeration, with what the text behind it says."""
    for member, text in pairwise([*node.body, ast.Pass()]):
        if isinstance(node, ast.ClassDef) and isinstance(member, ast.Assign):
            about = text.value.value if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) else ""
            yield f"- `{ast.unparse(member.targets[0])}`" + (f": {about}" if about else "")


def paragraphs_of(docstring: str, parameters: dict[str, str], is_brief: bool) -> Iterator[str]:
    """Yield a docstring in Markdown: what is said of each argument is an item of a list, errors are left out.

    Args:
        is_brief: only the first paragraph, arguments and what is returned.
    """

    def item(names: re.Match[str]) -> str:
        return f"- {', '.join(f'`{parameters.get(name, name)}`' for name in names[1].split(', '))}:"

    about, *sections = re.split(r"\n\n(?=(?:Args|Attributes|Raises|Returns):\n)", docstring.replace("``", "`"))
    yield about.partition("\n\n")[0] if is_brief else about
    for section in sections:
        title, text = section.split(":\n", 1)
        text = dedent(text)
        if title == "Returns":
            yield f"Returns {text}"
        elif title != "Raises":
            yield re.sub(r"(?m)^(\w[\w, ]*):(?= )", item, text).replace("    ", "  ")


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
