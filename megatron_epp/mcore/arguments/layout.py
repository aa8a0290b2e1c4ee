"""Layers, output layer and tokens of ranks: what flags ask for, checked against Megatron's flags, and passed on to these."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_epp.cost.casts import RECIPES, recipe_of
from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.rule import Door, Rule, flags, problems_of
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import flag_of
from megatron_epp.plan.layout import Layout, even_layers, layers_text, layout_flag, parse_layers
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.planners import begins_with_greedy
from megatron_epp.plan.reading import naming_file, read_text

logger = logging.getLogger(__name__)

REPLICA_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Parallel sizes whose product is the number of ranks of one data-parallel replica."""
LAYOUT_FLAG = "--epp-layout"
SEARCHED = ("auto", "balanced")
"""Values of the flag for which the run's data decide, when it is set up (`training.layout_search`); even layers until then."""
VOCABULARY_FLAG = "--epp-vocab-parallel"
_MULTIPLES = (64, 8)  # numbers of rows by whose multiples a large vocabulary is divided, since matrix products are faster then
_EVENNESS = 64
"""Smallest shard for which this is done, in multiples, so that shards differ by about a 64th at most. Not measured."""
HYBRID_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Names of a hybrid model's pattern of layers: Megatron's present flag, and the flag of older releases."""
EVEN = "even"
BETWEEN_STAGES, AHEAD = "|", "/"
"""Signs in a hybrid model's pattern: between stages, and ahead of the layers of a depth of multi-token prediction."""
PER_RANK, PER_STAGE = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
_OTHERS = flags(
    f"--pipeline-model-parallel-layout {PER_STAGE} --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    "",
    say="says which layers a stage has",
)
"""Flags of Megatron that divide layers over stages, too."""
_DIVISIONS = (*flags("--hybrid-layer-pattern --hybrid-override-pattern", "", say="says which layers a stage has"), *_OTHERS)
KEEPING_LAYERS = (
    *_DIVISIONS,
    *flags(
        "--save --load",
        "",
        when=lambda a: getattr(a, "ckpt_format", "torch_dist") != "torch_dist",
        say="with {ckpt_format} cannot keep others",
    ),
    Rule("--epp-planner", lambda a: not begins_with_greedy(a.epp_planner), "is asked for", ""),
)
"""Why layers stay as Megatron divides them where no flag asks for others."""


def is_divided(args: argparse.Namespace) -> bool:
    """Return True if a flag of Megatron's divides layers over stages."""
    return any(row.is_given(args) for row in _DIVISIONS)


def is_open(args: argparse.Namespace) -> bool:
    """Return True if no flag says how layers are divided, and the run's data may: as with `--epp-layout auto`."""
    ranks = args.pipeline_model_parallel_size
    return args.epp_layout is None and ranks > 1 and not any(problems_of(args, Door.DOCUMENTS, KEEPING_LAYERS))


def asked_layout(args: argparse.Namespace) -> Layout | None:
    """Return the layout that `--epp-layout` asks for, even layers until the run's data have decided; None if it is not given.

    Raises `EppError` if it is no file and no list of whole layers, or its stages do not divide over the pipeline's ranks.
    """
    text = getattr(args, "epp_layout", None)
    if text is None:
        return None
    layers, ranks = parse_layers(text), args.pipeline_model_parallel_size
    if text in (EVEN, *SEARCHED):
        chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or args.num_virtual_stages_per_pipeline_rank
        chunks = chunks or (2 if args.epp_placement == "v" else 1)
        placement = Placement(args.epp_placement, ranks, chunks)
        return Layout(even_layers(args.num_layers or placement.num_stages, placement.num_stages), placement)
    if layers is None:
        if not Path(text).is_file():
            raise EppError("it is neither auto, even, balanced, a file, nor layers of every stage, such as 8,7,9")
        with naming_file(text):
            return Layout.from_json(read_text(text))
    chunks, remainder = divmod(len(layers), ranks)
    if remainder:
        raise EppError(f"it has {len(layers)} stages, which is not a multiple of --pipeline-model-parallel-size {ranks}")
    return Layout(layers, Placement(args.epp_placement, ranks, chunks))


def token_multiple(args: argparse.Namespace) -> int:
    """Multiple to which chunks' token counts are padded: as many rows on each rank as products in FP8 need, 1 without."""
    return token_shards(args) * row_multiple(args)


def token_shards(args: argparse.Namespace) -> int:
    """Return the number of ranks that share a chunk's tokens."""
    return args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)


def recipe(settings: object) -> str:
    """Return the name of the recipe by which layers multiply, from flags or a model's configuration; empty without FP8."""
    return recipe_of({name: getattr(settings, name, None) for name in ("fp8", "fp8_recipe")})


def row_multiple(settings: object) -> int:
    """Return the multiple of rows that products need on every rank; 1 without FP8."""
    casts = RECIPES.get(recipe(settings))
    return 1 if casts is None else casts.rows


def placement_of(args: argparse.Namespace) -> Placement:
    ranks, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    return Placement(args.epp_placement, ranks, chunks)


def hybrid_pattern(args: argparse.Namespace) -> str | None:
    """Return the pattern of a hybrid model's layers, whose flag older releases name differently; None for another model."""
    return next((pattern for name in HYBRID_PATTERNS if (pattern := getattr(args, name, None))), None)


def layout_problems(args: argparse.Namespace, _: Door = Door.DOCUMENTS) -> Iterator[str]:
    """Yield what is wrong with `--epp-layout`, a line each, with the flags and figures."""
    if getattr(args, "epp_layout", None) is None or (args.epp_layout == EVEN and is_divided(args)):
        return
    setting = f"{LAYOUT_FLAG} {args.epp_layout}"
    if hybrid_pattern(args):
        yield f"{setting} is for GPTModel: a hybrid model's stages begin where its --hybrid-layer-pattern has a |"
        return
    try:
        layout = asked_layout(args)
        assert layout is not None
        if args.num_layers is not None:
            layout.check(args.num_layers, args.pipeline_model_parallel_size)
    except EppError as error:
        yield f"{setting}: {error}"
        return
    yield from (f"{row.text(args)}, and so does {setting}: give one of them" for row in _OTHERS if row.is_given(args))
    chunks, placement = layout.placement.num_chunks, layout.placement
    virtual = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    if virtual not in (None, chunks):
        yield f"{setting} puts {chunks} stages on a rank, and {PER_RANK} says {virtual}: leave that out"
    if args.epp_placement == "v" and placement.kind != "v":
        yield f"{setting} goes round the ranks, and --epp-placement is v: leave that out"


def apply_layout(args: argparse.Namespace) -> None:
    """Tell Megatron the stages of a checked `--epp-layout`.

    Its own layout says all of a looped one. For any other it says how many stages there are; their layers
    follow when the model is configured (`model_chunks.assign_stages`). The flag becomes a list, so that no file is read again.
    """
    layout = asked_layout(args)
    if layout is None:
        return
    if layout.shards_vocabulary and args.epp_vocab_parallel == "off" and args.rank == 0:
        logger.warning("the layout of %s divides the output layer over the ranks: add --epp-vocab-parallel on", args.epp_layout)
    if args.epp_layout not in SEARCHED:
        args.epp_layout = layers_text(layout.layers, ",")
    args.epp_placement = layout.placement.kind
    args.num_virtual_stages_per_pipeline_rank = None
    if layout.placement.num_stages > 1:
        args.pipeline_model_parallel_layout = layout_flag(layout.layers, getattr(args, "mtp_num_layers", None) or 0)


def world_of(megatron: Mapping[str, Any]) -> int:
    """Number of ranks of one data-parallel replica. Raises EppError for a size below 1."""
    sizes = {name: 1 if megatron.get(name) is None else megatron[name] for name in REPLICA_SIZES}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise EppError(f"{flag_of(name)} is {size!r}; it must be a whole number from 1")
    return math.prod(sizes.values())


def shards_vocabulary(args: argparse.Namespace) -> bool:
    """Return True if a run's output layer is divided over its pipeline ranks, which is settled before the model is built."""
    return getattr(args, "epp_vocab_parallel", "off") == "on"


def vocabulary_rows(entries: int, num_ranks: int) -> tuple[range, ...]:
    """Divide the rows of one tensor-parallel rank over the pipeline ranks. Raises `ArgumentError` if there are too few."""
    if entries < num_ranks:
        what = f"{VOCABULARY_FLAG} on divides a vocabulary of {entries} entries on each tensor-parallel rank"
        ranks = f"--pipeline-model-parallel-size {num_ranks} ranks, some of which would have none"
        raise ArgumentError(f"{what} over {ranks}: set it to off")
    multiple = next((m for m in _MULTIPLES if entries // num_ranks >= _EVENNESS * m), 1)
    bounds = [*(entries * rank // num_ranks // multiple * multiple for rank in range(num_ranks)), entries]
    return tuple(range(start, end) for start, end in pairwise(bounds))


def vocabulary_shares(args: argparse.Namespace) -> tuple[float, ...]:
    """Return the share of the output layer on each pipeline rank; empty if the last stage has all of it."""
    if not shards_vocabulary(args):
        return ()
    entries = args.padded_vocab_size // args.tensor_model_parallel_size
    return tuple(len(rows) / entries for rows in vocabulary_rows(entries, args.pipeline_model_parallel_size))
