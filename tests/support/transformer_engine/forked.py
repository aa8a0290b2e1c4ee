"""A process that has imported Megatron with Transformer Engine's layers, from which ranks of a test file are forked."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from megatron_epp.contrib.demos.forked_ranks import Forks
from tests.support import ROOT
from tests.support.mcore import forked, worker
from tests.support.mcore.launch import ENVIRONMENT

FOLDER, VERSION = "EPP_TE", "EPP_TE_VERSION"
"""Environment variables: the folder of all versions, and the one that a process imports."""
VERSIONS = tuple(Path(__file__).with_name("versions.txt").read_text().split())
"""The newest, and one of which much has changed since."""


def folder_of(version: str) -> Path:
    return Path(os.environ.get(FOLDER) or ROOT / ".te") / version


def is_installed(version: str) -> bool:
    return (folder_of(version) / ".complete").exists()


@contextlib.contextmanager
def ranks_with_engine(version: str) -> Iterator[None]:
    """Have ranks forked from a process that has imported Megatron with a version of Transformer Engine."""
    worker.end()
    forks = Forks(ENVIRONMENT | {VERSION: version}, (__name__, "preload"))
    try:
        with mock.patch.object(forked, "forks", return_value=forks):
            yield
            worker.end()
    finally:
        forks.close()


def preload() -> None:
    """Prepare Megatron as for other tests, with Transformer Engine to be found."""
    from megatron_epp.mcore import cpu

    cpu.activate()
    from tests.support.mcore import fla_stand_in
    from tests.support.transformer_engine.loading import load

    load(folder_of(os.environ[VERSION]))
    forked.preload()
    fla_stand_in.install()
