"""Counts the files of the package that name an optional feature outside the feature's own files.

    python -m scripts.features                 a line per feature
    python -m scripts.features --files shards  the files that name it, most names first

A feature that is absent should be an absent row, not a condition: the fewer files ask for it, the fewer break when it
changes. Names in code count: identifiers, and texts of one word; comments, messages and docstrings may explain. A feature's own
files have it in their path.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_epp"

FEATURES = {
    "half layers": (r"(^|_)hal(f|ves)|[a-z]Half|HalfLayer|first_mlp", r"half"),
    "shards": (r"shard", r"shard|vocabulary"),
    "split weights": (
        r"^W$|(?i:split_w|splits_w|is_split|split_off|weight_(us|bytes|gradients?)$|_weight_us|saved_by_split|apart)",
        r"weight|split",
    ),
    "offload": (r"(?i:offload)", r"offload|copy_slots|copy_positions|copies"),
    "KV offload": (r"(?i:kv_?offload)", r"kv_offload"),
    "forward-only": (r"(?i:forward_?only)", r"forward_only"),
    "lockstep": (r"(?i:lockstep)", r"lockstep|replica"),
}
"""Patterns of each feature: of its names, and of the paths that are its own."""


def names_of(source: str) -> Iterator[str]:
    """Yield every identifier in a file's code, and every text that is one word: a key, or an attribute's name."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                yield name
            case ast.Constant(value=str() as text) if text.isidentifier():
                yield text


def files_of(feature: str) -> Counter[str]:
    """Count the names of a feature in every file of the package that is not its own and has any."""
    pattern, own = map(re.compile, FEATURES[feature])
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    names_by_file = {name: names_of(path.read_text()) for name, path in paths.items() if not own.search(name)}
    return +Counter(
        {name: sum(bool(pattern.search(name_in_file)) for name_in_file in names) for name, names in names_by_file.items()}
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", choices=FEATURES, help="list the files of this feature")
    args = parser.parse_args(argv)
    if args.files:
        for name, count in files_of(args.files).most_common():
            print(f"{count:5} {name}")
        return 0
    print(f"{'feature':15} {'files':>5} {'names':>6}   files by folder")
    for feature in FEATURES:
        counts = files_of(feature)
        folders = Counter(name.split("/")[0] for name in counts)
        by_folder = ", ".join(f"{folder} {count}" for folder, count in folders.most_common())
        print(f"{feature:15} {len(counts):5} {counts.total():6}   {by_folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
