"""Layers of multi-token prediction, on the last stage."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from megatron_epp.mcore.arguments.flag import MegatronFlag
from megatron_epp.mcore.model.kinds.kind import LayerKind


def _problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what a model with multi-token prediction cannot be trained with."""
    depths, ranks = getattr(args, "mtp_num_layers", None), args.pipeline_model_parallel_size
    if not depths or not args.save:
        return
    if not args.untie_embeddings_and_output_weights and ranks > 1 and args.epp_placement == "looped":
        yield (
            f"--mtp-num-layers {depths}, an output layer tied to the embedding and --pipeline-model-parallel-size {ranks} make "
            "a model that Megatron cannot save: add --untie-embeddings-and-output-weights, or leave --save out"
        )


PREDICTION = LayerKind(
    name="multi-token prediction",
    carries="keys and values of its attention",
    flags=(MegatronFlag("--mtp-detach-heads", advice="leave it out: it was never tried with slices"),),
    problems=_problems,
)
"""Chunks bring the tokens ahead of them along (`data.batch.AheadArrays`), so the embeddings there need nothing of other slices;
`predictions` weighs the losses.
"""
