"""A training script that writes what every rank's chunks had: tokens, labels, which of these counted, and positions."""

import json
import os
import sys
from itertools import chain
from pathlib import Path

from megatron_epp.mcore import entry


def rows_of(arrays):
    columns = (arrays.tokens, arrays.labels, arrays.loss_mask, arrays.position_ids)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def run(flags):
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron_epp.mcore.model import gpt
        from tests.support.mcore.consumed_batches import record_consumed

        rows = record_consumed(rows_of)
        sys.argv = [sys.argv[0], *flags]
        gpt.pretrain()
        Path(os.environ["RECORD_TO"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(list(chain(*rows()))))
