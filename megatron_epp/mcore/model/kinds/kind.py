"""Row of the table of kinds of Megatron's layers, and the kinds that need no change of the layers that Megatron has built."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_epp.mcore.arguments.layout import AHEAD
from megatron_epp.mcore.arguments.rule import Door, Rule

if TYPE_CHECKING:
    from megatron_epp.runtime.context import ChunkContext


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """A kind of layers that runs in slices.

    Attributes:
        carries: what slices of a sequence hand on in such a layer; empty for nothing.
        symbol: in hybrid patterns; empty for none.
        flags: of Megatron's that plans cannot honour with such layers; `problems` are others, a line each.
        modules: function that returns Megatron's classes that mix tokens without core attention, and that `adopt` changes.
        adopt: changes such layers of a model chunk that Megatron has built, ahead of data parallelism.
    """

    name: str
    carries: str = ""
    symbol: str = ""
    flags: tuple[Rule, ...] = ()
    modules: Callable[[], tuple[type, ...]] = tuple
    problems: Callable[[argparse.Namespace], Iterable[str]] = lambda args: ()
    adopt: Callable[[Any, argparse.Namespace], None] = lambda model, args: None


def run_chunks(model: Any, types: tuple[type, ...], forward: Callable[[Any, int, Any, ChunkContext], Any]) -> None:
    """Have modules of exactly these types run by `forward` where they get a chunk, and by their own forward otherwise.

    `forward` takes a module, a number that is unique among modules and depths of multi-token prediction, hidden states
    ``[tokens, 1, hidden]`` and the chunk's context, and returns what the module's own does.
    """
    from megatron_epp.mcore.model.replaced import put

    modules = [*model.modules()]
    repeated = {part for block in modules if getattr(block, "mtp_use_repeated_layer", False) for part in block.modules()}
    for number, module in enumerate(modules):
        if type(module) in types:
            stride = len(modules) * (module in repeated)
            put(module, "forward", functools.partial(_of_chunk, module, number, stride, forward, module.forward), wraps=False)


def _of_chunk(
    module: Any,
    number: int,
    stride: int,
    forward: Callable[[Any, int, Any, ChunkContext], Any],
    original: Callable[..., Any],
    hidden_states: Any,
    *rest: Any,
    packed_seq_params: Any = None,
    **named: Any,
) -> Any:
    from megatron_epp.mcore.model.core_attention import ChunkParams

    if isinstance(packed_seq_params, ChunkParams):
        number += stride and stride * (packed_seq_params.ahead.depth - 1)
        return forward(module, number, hidden_states, packed_seq_params.context)
    return original(hidden_states, *rest, packed_seq_params=packed_seq_params, **named)


def _attention_problems(args: argparse.Namespace) -> Iterator[str]:
    window, softmax = getattr(args, "window_size", None), getattr(args, "softmax_type", "vanilla")
    if window and (window[0] < 1 or window[1] != 0):
        yield f"--window-size {window[0]},{window[1]}: a window is N,0, of at least one token ahead of a token and none behind"
    if getattr(args, "multi_latent_attention", False) and (window or softmax != "vanilla"):
        flag = f"--window-size {window[0]},{window[1]}" if window else f"--softmax-type {softmax}"
        yield f"{flag} with --multi-latent-attention was never tried with slices: leave one of them out"


ATTENTION = LayerKind(
    name="attention",
    carries="keys and values, of a window alone where a layer has one",
    symbol="*",
    flags=(
        Rule("--attention-dropout", use="set it to 0", doors=Door.SLICES, allowed=(0.0,)),
        Rule("--qk-clip", doors=Door.SLICES),
        Rule("--log-max-attention-logit", doors=Door.SLICES),
        Rule(
            "--position-embedding-type",
            use="use rope: angles are by position; positions of three axes come with samples (wrap_samples)",
            allowed=(None, "learned_absolute", "rope", "yarn", "none"),
        ),
    ),
    problems=_attention_problems,
)
"""Core attention is `core_attention.RelayAttention`, which `adopt` puts into every layer's spec."""

MLP = LayerKind(name="an MLP", symbol="-")


def _prediction_problems(args: argparse.Namespace) -> Iterator[str]:
    depths, ranks = getattr(args, "mtp_num_layers", None), args.pipeline_model_parallel_size
    if not depths or not args.save:
        return
    if not args.untie_embeddings_and_output_weights and ranks > 1 and args.epp_placement != "v":
        yield (
            f"--mtp-num-layers {depths}, an output layer tied to the embedding and --pipeline-model-parallel-size {ranks} make "
            "a model that Megatron cannot save: add --untie-embeddings-and-output-weights, or leave --save out"
        )


PREDICTION = LayerKind(
    name="multi-token prediction",
    carries="what its layers do",
    symbol=AHEAD,
    flags=(Rule("--mtp-detach-heads", use="leave it out: it was never tried with slices"),),
    problems=_prediction_problems,
)
"""Chunks bring the tokens ahead of them along (`data.batch.AheadArrays`), so the embeddings there need nothing of other slices;
`predictions` weighs the losses.
"""
