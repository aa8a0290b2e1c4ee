"""A training script that counts the tokens of every chunk that count in the loss, and those that pass the output layer."""

import functools
import json
import os
import sys
from pathlib import Path

from megatron_epp.mcore import entry


def run(flags):
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        from megatron_epp.mcore.model import gpt
        from megatron_epp.runtime.loss import token_blocks
        from tests.support.mcore.consumed_batches import record_consumed

        counts = record_consumed(lambda arrays: (int(arrays.loss_mask.sum()), len(arrays.tokens)))
        multiplied = []

        def recording(function, note):
            @functools.wraps(function)
            def recorded(*args, **kwargs):
                found = function(*args, **kwargs)
                note(found, *args, **kwargs)
                return found

            return recorded

        def note_output(found, layer, input_, *rest, **named):
            if "runtime_gather_output" in named:  # which only the output layer is given
                note_rows(found, input_)

        def note_rows(found, x, *rest):
            if counts():  # not when costs are measured at start-up
                multiplied.append(len(x))

        ColumnParallelLinear.forward = recording(ColumnParallelLinear.forward, note_output)
        token_blocks._summary = recording(token_blocks._summary, note_rows)
        sys.argv = [sys.argv[0], *flags]
        gpt.pretrain()
        trained, tokens = zip(*counts(), strict=True)
        figures = {"trained": trained, "tokens": tokens, "multiplied": multiplied}
        Path(os.environ["RECORD_TO"], "rows.json").write_text(json.dumps(figures))
