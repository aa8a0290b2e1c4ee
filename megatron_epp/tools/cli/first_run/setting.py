"""State that the steps of a first run share: machine, launch command and lengths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_epp.tools.cli.first_run.launch import StockLaunch
from megatron_epp.tools.formulas.library import Cluster


@dataclass(frozen=True, slots=True)
class Setting:
    """State of a first run.

    Attributes:
        folder: where logs and reports go.
        machine: name of this machine's GPUs or processor.
        num_gpus: GPUs of this machine.
        is_reduced: everything is tiny, as on a CPU.
        num_ranks: ranks of the steps that exchange messages.
        launch: the user's launch command, as it is today.
        has_launch: the user has given it; otherwise it is an example.
        cluster: kind of machine that plans are for.
        lengths_from: source of the lengths, a value of ``--lengths``.
    """

    folder: Path
    machine: str
    num_gpus: int
    is_reduced: bool
    num_ranks: int
    launch: StockLaunch
    has_launch: bool
    cluster: Cluster
    lengths_from: str

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return "cuda" if self.num_gpus else "cpu"
