"""Inspection of the installed Megatron for `megatron-epp doctor`: the patches that fit it, and the code that is known."""

from __future__ import annotations

import logging
import warnings
from typing import NamedTuple

from megatron_epp.mcore import cpu
from megatron_epp.mcore.patches import compat, dataset_helpers, fingerprints, install, patching, plain_torch
from megatron_epp.plan.errors import EppError


class Fit(NamedTuple):
    """Result of comparing one of Megatron's functions with what our code expects.

    Attributes:
        target: name of the function, as in `patching.Patch`.
        fits: True if the function can be patched, or is the tested code.
        what: short description: the purpose of the patch, or the problem.
        needed: True if training with `--epp` refuses to start where the function does not fit.
    """

    target: str
    fits: bool
    what: str
    needed: bool


def fits() -> list[Fit]:
    """Check every patch for the installed release, and every function that our schedule relies on. Imports Megatron."""
    logging.getLogger("megatron_epp").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_cpu = cpu.activate()
        patches = [*install.PATCHES, *plain_torch.patches(), *dataset_helpers.patches()]
        patches += cpu.patches() if on_cpu else ()
        version = compat.installed_version()
        found = [_of_patch(patch) for patch in patches if compat.matches(version, patch.versions)]
        strange = set(patching.unknown(fingerprints.RELIED_ON))
    return found + [
        Fit(
            target,
            target not in strange,
            "is not the code megatron-epp is tested with" if target in strange else "known",
            False,
        )
        for target in fingerprints.RELIED_ON
    ]


def _of_patch(patch: patching.Patch) -> Fit:
    try:
        patching.check(patch)
    except EppError as error:
        return Fit(patch.target, False, str(error), True)
    return Fit(patch.target, True, patch.reason, True)
