"""A training script that writes what every rank's chunks had: tokens, labels, which of these counted, and positions."""

import functools
import json
import os
from pathlib import Path

from megatron_epp.mcore import entry


def recording(chunk_of, rows):
    @functools.wraps(chunk_of)
    def recorded(*args, **kwargs):
        arrays = chunk_of(*args, **kwargs)
        columns = (arrays.tokens, arrays.labels, arrays.loss_mask, arrays.position_ids)
        rows.extend(zip(*(column.tolist() for column in columns), strict=True))
        return arrays

    return recorded


def main():
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron_epp.data.batch import GlobalBatch
        from megatron_epp.mcore.model import gpt

        rows = []
        GlobalBatch.chunk_of = recording(GlobalBatch.chunk_of, rows)
        gpt.pretrain()
        Path(os.environ["RECORD_TO"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
