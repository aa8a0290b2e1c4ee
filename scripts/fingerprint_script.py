"""Prints the fingerprints of a training script's functions: `python scripts/fingerprint_script.py Megatron-LM/pretrain_gpt.py`.

A line for each function and constant that the forward step, the dataset provider and the choice of embedding ranks reach in the
script, and whether it is known. For a new release of Megatron, look at what changed in those that are unknown; where the
difference changes nothing that plans replace, add them to `SCRIPTS` in `megatron_epp/mcore/patches/fingerprints.py`.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from megatron_epp.mcore.patches.fingerprints import SCRIPTS, digest, fingerprint
from megatron_epp.mcore.patches.stock_functions import ROLES


def fingerprints_of(text: str) -> dict[str, str]:
    """The fingerprint of every function and literal of a script that `ROLES` reach, by name."""
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    literals = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                literals[node.targets[0].id] = digest(ascii(ast.literal_eval(node.value)))
            except ValueError:  # no literal
                continue
    fingerprints: dict[str, str] = {}
    waiting = [name for name in ROLES if name in functions]
    while waiting:
        name = waiting.pop(0)
        if name in fingerprints:
            continue
        if name in functions:
            fingerprints[name] = fingerprint(functions[name])
            waiting += [node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name)]
        elif name in literals:
            fingerprints[name] = literals[name]
    return fingerprints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("script", type=Path, nargs="+")
    for script in parser.parse_args().script:
        print(script)
        for name, function_digest in fingerprints_of(script.read_text()).items():
            print(f"  {name:<36} {function_digest}  {'known' if function_digest in SCRIPTS.get(name, ()) else 'unknown'}")


if __name__ == "__main__":
    main()
