"""Pretrain a GPT with Megatron's own training loop: `torchrun ... -m megatron_epp.mcore.pretrain_gpt <flags>`.

Checkpoint writers start helper processes that import this module again, so it imports nothing slow by itself.
"""

import functools
import gc
import importlib
import sys
from typing import Any

from megatron_epp.mcore import entry

_LATE = (  # what training imports when it is under way
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron_epp.mcore.iteration.document_schedule",
    "megatron_epp.mcore.model.gpt",
    "torch._dynamo",
)


def main() -> None:
    """Train with the flags of this process's command line."""
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron_epp.mcore.model import gpt

        gpt.pretrain()


def preload() -> None:
    """Import and patch everything that a training needs, so that processes forked later inherit it."""
    from megatron_epp.mcore.patches import fingerprints, patching
    from megatron_epp.port import forked

    with entry.errors_in_one_line():
        entry.prepare()
    for module in _LATE:
        importlib.import_module(module)
    _read_settings_once()
    _parse_flags_once()
    patching.unknown(fingerprints.RELIED_ON)  # reads their sources, whose fingerprints are then known
    # Forked processes have what is imported here; spawned ones would import Megatron again, seconds for each.
    _fork_managers()
    forked.fork_workers()
    gc.freeze()  # what is there now stays, and need not be looked through after every training


def _read_settings_once() -> None:
    """Cache the flag descriptions, which Megatron parses from its settings' sources again for a training's second parser."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    read, known = ArgumentGroupFactory._get_field_docstrings, {}

    def read_once(self: Any, settings: type) -> dict[str, str]:
        if settings not in known:
            known[settings] = read(self, settings)
        return known[settings]

    ArgumentGroupFactory._get_field_docstrings = read_once
    entry.megatron_parser()


def _parse_flags_once() -> None:
    """Skip the set-up of Megatron's fault tolerance unless its flags are given: it parses all flags only to find that out."""
    from megatron.training import ft_integration

    setup, own = ft_integration.setup, {"--enable-ft-package", "--yaml-cfg"}

    def setup_if_asked(*arguments: Any) -> None:
        if own & set(sys.argv):
            setup(*arguments)

    ft_integration.setup = setup_if_asked


def _fork_managers() -> None:
    """Fork the process through which checkpoint writers report; a spawned one would import everything again."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    queue = filesystem_async.get_write_results_queue
    filesystem_async.get_write_results_queue = functools.partial(queue, mp_mode="fork")


if __name__ == "__main__":
    main()
