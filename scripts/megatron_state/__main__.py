"""Lists the state that Megatron's functions keep: `python -m scripts.megatron_state FOLDER...`, for any number of releases.

Each folder holds a release's `megatron/`: `pip install --no-deps --target FOLDER megatron-core==VERSION` makes one. Nothing of
it is imported or run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.megatron_state.known import DATA, PAGE, PLANS, known, page, rows_of, said
from scripts.megatron_state.state import states
from scripts.tables import table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.megatron_state", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="*", help="folder with a release's megatron/, named after the release")
    parser.add_argument("--new", action="store_true", help=f"only what {DATA.name} lacks")
    parser.add_argument("--write", action="store_true", help=f"write the tables of docs/{PAGE.name} from {DATA.name}")
    args, data = parser.parse_args(), known()
    if args.write:
        PAGE.write_text(page(), encoding="utf-8")
    rows = []
    for state in states({folder.name: folder for folder in args.folder}, data["outside"]):
        reached, unreached = rows_of(state.name, data["reached"]), rows_of(state.name, data["unreached"])
        if args.new and (reached or unreached):
            continue
        verdicts = [said(reached[0], plans) if reached else "outside of forwards" if unreached else "?" for plans in PLANS]
        lines = [f"{file}:{line}" for file, line in [*state.lines.values()][-1]]
        rows.append((state.name, ", ".join(lines), ", ".join(state.lines), ", ".join(state.changed_by), *verdicts))
    if args.folder:
        titles = "state", "changed at, in the last of its releases", "releases", "changed by", *PLANS
        print(table(titles, rows))


if __name__ == "__main__":
    main()
