"""Features: what a run can do besides slices. The core knows this table, and imports no feature.

A rank imports the functions that a feature's row in `FEATURES` names if the run wants it. Flags, costs, layouts and operations
are the core's, also where one feature alone needs them: the planner's part of vocabulary shards is in the rows of
`plan.vocabulary_operations`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, NamedTuple

from megatron_epp.plan.plan import Plan
from megatron_epp.plan.planners import PLANNERS
from megatron_epp.plan.problem import Options, Problem


class Asked(NamedTuple):
    """Wishes of a user: flags, a loss of theirs, and whether chunks are microbatches of theirs, which run whole."""

    args: Namespace
    loss: Any = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Feature:
    """A row, of what a run can do, of what the planner can, or of both. Targets are ``module:function``."""

    name: str
    gain: str  # a figure with its command or page, or the models that need the feature
    # Reads what a user asked of a run, and imports nothing of the feature; `planned` what a planner is asked
    wanted: Callable[[Asked], bool] = lambda asked: False
    planned: Callable[[Problem, Options], bool] = lambda problem, options: False
    adopt: str = ""  # from a model chunk, flags and virtual stage; changes the chunk before data parallelism wraps it
    # From all model chunks that another program has built for a rank, and flags, of which it settles what is left open; changes
    # the chunks. A collective call of all ranks.
    built: str = ""
    # Reads a plan or a planner's problem. Of those, `choice` is from a problem to the plan that runs, `work` is of chunks
    # (`cost.work.work_of`), and `layouts` from a plan to those of its chunks (`runtime.context.chunk_layouts`).
    batched: Callable[[Plan | Problem], bool] = lambda batch: False
    choice: str = ""
    divisible: str = ""  # from a problem of the whole batch and a number of replicas to one that they can share
    work: str = ""
    cut: str = ""  # from a chunker, the sequences of a run, its chunks' shares of its time and least tokens to chunks
    groups: str = ""  # from a table and a problem to groups in the order of backwards (`planner.order.runs_of`)
    in_turn: str = ""  # from a table of whole microbatches and a problem to one in which they can run
    whole: str = ""  # from a problem of whole microbatches, costs and options to a plan, in the place of `planner.plan`
    layouts: str = ""
    head: str = ""  # from a run, its model chunks and `mcore.model.stage.HeadSettings`; changes how the last stage is made
    run: str = ""  # from a run whose ranks are connected to its `RunFeature`, or None where this model needs none
    orders: str = ""  # from a problem to the orders that a search tries (`planner.settings.Orders`)
    candidates: str = ""  # candidates (`planner.candidates`) with copies, if a recipe has some
    search: str = ""  # walks on behind a search, from its candidates, its best and the fastest free of caps
    fit: str = ""  # from an order, the same with whole backwards, tables and a problem to copies under the caps, or None
    split: str = ""  # splits weight gradients off an order (`planner.orders.completion.Splitting`)
    finish: str = ""  # from candidates and the best of them to one no slower; not where replicas run in lockstep


def _by_plans(asked: Asked) -> bool:
    return asked.whole or getattr(asked.args, "epp_schedule", "stock") == "elastic"


_HERE = "megatron_epp.features."
FEATURES = (
    Feature(
        "losses of the user's",
        "1.41 to 1.94 times as fast as verl's microbatches: python -m scripts.bench.rl",
        wanted=lambda asked: asked.loss is not None or getattr(asked.args, "epp_loss", None) is not None,
        adopt=f"{_HERE}losses.value_head:put_head",
        head=f"{_HERE}losses.stage_loss:compute",
        run=f"{_HERE}losses.stage_loss:sample_loss",
    ),
    Feature(
        "vocabulary shards",
        "471.6 -> 436.5 ms: megatron-epp plan --lengths 9000,4000,2000 --stages 4, with --vocab-parallel off and on",
        wanted=lambda asked: getattr(asked.args, "epp_vocab_parallel", "off") == "on",
        adopt=f"{_HERE}vocabulary.vocabulary_shard:divide_output_layer",
        head=f"{_HERE}vocabulary.rank_vocabulary:end_without_head",
        run=f"{_HERE}vocabulary.rank_vocabulary:rank_vocabulary",
    ),
    Feature(
        "split weight gradients",
        "3.7 % less time: megatron-epp plan --split-weight on --model llama3-8b --cluster h100x8 --stages 4 --layout even "
        "--vocab-parallel off --lengths 32768,16384,8192,8192,4096,4096,2048,2048",
        # Also for ``auto``, which is settled before documents train, and by `built` for a program's models.
        wanted=lambda asked: _by_plans(asked) and getattr(asked.args, "epp_split_weight_gradient", "") in (True, "on", "auto"),
        adopt=f"{_HERE}split_weights.linear_layers:split_weight_gradients",
        built=f"{_HERE}split_weights.linear_layers:split_built",
        run=f"{_HERE}split_weights.linear_layers:SplitWeights",
        planned=lambda problem, options: options.split_weight,
        split=f"{_HERE}split_weights.split_orders:with_split_weights",
    ),
    Feature(
        "offload",
        "longest context of an 8B model on 8 GPUs 512K -> 2,048K: python -m scripts.bench.long --longest",
        wanted=lambda asked: resolve_name("megatron_epp.mcore.training.caps:offloads")(asked.args),
        run=f"{_HERE}offload.rank_offload:RankOffload",
        planned=lambda problem, options: options.offload,
        candidates=f"{_HERE}copies.copied:copied",
        search=f"{_HERE}copies.copied:with_copies",
        fit=f"{_HERE}copies.fit_copies:copied_to_fit",
    ),
    Feature(
        "local search",
        "a plan of few chunks takes up to 5 % less time: tests/pure/test_planner_quality.py",
        # It keeps the forwards of a run ahead of all its backwards, which branches do not unless losses join them.
        planned=lambda problem, options: options.steps != 0 and bool(problem.loss_groups or not problem.borrowed),
        finish=f"{_HERE}local_search.improvement:finish",
    ),
    Feature(
        "steps of two actions",
        "17 % less time at TP 8, 3 % at TP 2, by formula: docs/schedules.md, stp",
        wanted=lambda asked: (
            getattr(asked.args, "epp_overlap_exchanges", False)
            or getattr(PLANNERS.entry(getattr(asked.args, "epp_planner", "greedy")), "joins", False)
        ),
        run="megatron_epp.contrib.overlap.exchanges:Overlap",
        planned=lambda problem, options: options.overlap_exchanges,
        finish="megatron_epp.contrib.overlap.pairing:finish",
    ),
    Feature(
        "attention on other ranks",
        "0.84 of the time of 1F1B with whole sequences of 128K, by formula: docs/schedules.md, HelixPipe",
        wanted=lambda asked: getattr(asked.args, "epp_planner", None) == "helixpipe",
        adopt="megatron_epp.contrib.helix.cut_layers:cut_layer",
        run="megatron_epp.contrib.helix.separate_attention:SeparateAttention",
    ),
    Feature(
        "context groups",
        "11 % less time than one context-parallel degree on four nodes, by formula: docs/schedules.md, flexsp",
        wanted=lambda asked: getattr(asked.args, "epp_planner", "greedy") == "flexsp",
        run="megatron_epp.contrib.flexsp.group_run:GroupRun",
    ),
    Feature(
        "exchange buffers",
        "models with experts that exchange tokens by DeepEP or HybridEP",
        wanted=lambda asked: getattr(asked.args, "moe_token_dispatcher_type", None) == "flex",
        run=f"{_HERE}exchanges.exchange_buffer:RunExchanges",
    ),
    Feature(
        "warm-up of attention",
        "models whose attention runs in cuDNN, which takes seconds for a first shape; ranks would wait for each other",
        wanted=lambda asked: getattr(asked.args, "epp_warm_up", "off") != "off",
        run=f"{_HERE}warm_up.kernel_warm_up:attention_warm_up",
    ),
    Feature(
        "files of reports",
        "times of 1 iteration or more, planned and measured, which `megatron-epp show` draws: docs/reading-a-plan.md",
        wanted=lambda asked: getattr(asked.args, "epp_report_dir", None) is not None,
        run=f"{_HERE}report_files.report_folder:report_folder",
    ),
    Feature(
        "hint to other layers",
        "makespan of even layers 1.173, of balanced ones 1.098 of that of chosen layouts: python -m scripts.bench.defaults",
        wanted=lambda asked: not asked.whole and _by_plans(asked),
        run=f"{_HERE}layer_hint.hint_of_batches:layer_hint",
    ),
    Feature(
        "learnt costs",
        "planned over measured time 0.96 to 0.98, by formula 0.73 to 0.80: docs/comparison.md; needed by whole microbatches",
        wanted=lambda asked: asked.whole or (_by_plans(asked) and asked.args.epp_costs == "learn"),
        run=f"{_HERE}learnt_costs.learn_costs:CostLearning",
    ),
    Feature(
        "slow stages",
        "a rank that takes 1.25 times its planned time, for which all others wait, is named: docs/troubleshooting.md",
        wanted=lambda asked: asked.whole or (_by_plans(asked) and asked.args.epp_costs != "analytic"),
        run=f"{_HERE}slow_stages.stage_watch:stage_watch",
    ),
    Feature(
        "shared prefixes",
        "groups of 8 responses of 1,000 tokens to prompts of 4,000 take 2.5 times less: tests/pure/test_planner_trees.py",
        wanted=lambda asked: not asked.whole and _by_plans(asked) and asked.args.epp_share_prefixes != "off",
        run=f"{_HERE}trees.sharing:share",
        batched=lambda batch: bool(batch.borrowed),
        choice=f"{_HERE}trees.choice:faster",
        divisible=f"{_HERE}trees.choice:divisible",
        work=f"{_HERE}trees.tree_work:work_of_tree",
        cut=f"{_HERE}trees.tree_cuts:cut_trees",
        groups=f"{_HERE}trees.readers:groups_of",
        in_turn=f"{_HERE}microbatch_prefixes.whole_plans:lenders_first",
        whole=f"{_HERE}microbatch_prefixes.whole_plans:plan_whole",
    ),
    Feature(
        "one attention call on rows in common",
        "9 and 35 % less time of a layer on a CPU for groups and agents: python -m scripts.bench.prefixes",
        batched=lambda batch: bool(batch.borrowed),
        layouts=f"{_HERE}cascade.tree_layouts:tree_layouts",
    ),
    Feature(
        "shared prefixes of microbatches",
        "microbatches of groups take 1.16 to 2.11 times as long without: python -m scripts.bench.microbatch_prefixes",
        wanted=lambda asked: asked.whole and asked.args.epp_share_prefixes != "off",
        run=f"{_HERE}microbatch_prefixes.prefix_model:share",
    ),
    Feature(
        "several stages per rank",
        "1.307 -> 1.298 s for the first batch of docs/comparison.md, by megatron-epp plan with --layout 8,8,8,8 and auto",
        planned=lambda problem, options: not problem.has_one_stage_per_rank,
        orders=f"{_HERE}stages.stage_orders:orders_of",
    ),
)
"""All features, in the order in which every rank asks them."""


def targets(asked: Asked, kind: str) -> Iterator[Callable[..., Any]]:
    """Return the functions of a kind (`adopt`, `built`, `head`, `run`) of the features that are wanted."""
    return (resolve_name(target) for row in FEATURES if (target := getattr(row, kind)) and row.wanted(asked))


def batch_target(batch: Plan | Problem, kind: str) -> Callable[..., Any] | None:
    """Return the function of a kind (`choice` to `layouts`) of the feature that a batch needs; None where it needs none."""
    named = (getattr(feature, kind) for feature in FEATURES if feature.batched(batch))
    return next(map(resolve_name, filter(None, named)), None)


def plan_targets(problem: Problem, options: Options, kind: str) -> Iterator[Callable[..., Any]]:
    """Return the functions of a kind (`orders` to `finish`) of the features that a planner is asked for."""
    return (resolve_name(target) for row in FEATURES if (target := getattr(row, kind)) and row.planned(problem, options))
