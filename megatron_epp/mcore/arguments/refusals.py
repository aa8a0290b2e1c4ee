"""The table of refusals: what settings cannot be, or not together, and what to do instead.

The launcher, the training script and `megatron_epp.wrap` ask `refuse` before plans run a model. A row is read at a glance; what
has several lines, or counts something, is a function of `setting_checks`. `start.validate` asks what Megatron asserts itself.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial

from megatron_epp.mcore.arguments import ArgumentError, layout, setting_checks
from megatron_epp.mcore.arguments.flag import GIVEN
from megatron_epp.mcore.arguments.layout import PER_RANK, PER_STAGE, VOCABULARY_FLAG, is_divided, is_open, shards_vocabulary
from megatron_epp.mcore.arguments.rule import BOTH, Check, Door, Rule, Rules, flags, problems_of
from megatron_epp.mcore.arguments.setting_checks import virtual
from megatron_epp.mcore.model.kinds import KINDS, of_experts
from megatron_epp.plan.flags import AUTO
from megatron_epp.plan.planners import PLANNERS, begins_with_greedy

# ---- flags of which plans can honour no other value -------------------------------------------------------------------

_ORDER = "leave it out: it belongs to Megatron's own schedules"
_SHAPES = "leave it out: graphs are recorded for the order of Megatron's own schedules"
_IN_TURN = "leave it out: it takes microbatches in the order in which they run, and counts again what runs again"
_STORAGE = "leave it out: plans count weights by their storage, which FP8 weights lack"
_ONE = (None, 1)
NO_RESTART = Rule("--inprocess-restart", use="leave it out: the watchdog of the failed run would end the restarted one")
# Rows without doors are for documents only.
OF_MODELS = (
    NO_RESTART,
    Rule("--cp-comm-type", use="leave it out: heads are exchanged for tokens, as a2a does", allowed=(None, ["p2p"], ["a2a"])),
    *flags("--micro-batch-size --eval-micro-batch-size", "set it to 1: a microbatch is one sequence", allowed=_ONE),
    *flags("--mock-data", "give real documents with --data-path"),
    *flags("--sft", "leave it out, and make documents and their mask with `megatron-epp prepare --chat`"),
    *flags(
        "--recompute-granularity --recompute-activations",
        "leave it out: plans choose what is recomputed (--epp-recompute changes how much)",
    ),
    Rule("--cuda-graph-impl", use="set it to none: shapes change every iteration", allowed=("none", None)),
    Rule("--cuda-graph-impl", use=_SHAPES, doors=Door.MICROBATCHES, allowed=("none", None)),
    *flags("--enable-cuda-graph --external-cuda-graph", _SHAPES, Door.ALL),
    Rule("--dataloader-type", use="leave it out: documents are sampled by this package", allowed=(None, "external")),
    *flags("--fp8-param-gather", _STORAGE, Door.ALL),
    *flags("--fp8-param", _STORAGE, Door.MODEL),
    *flags("--fp8-dot-product-attention --fp8-multi-head-attention", "leave it out: attention is not in FP8", Door.ALL),
    *flags("--fp8-output-proj", "leave it out: the output layer multiplies in the type of the weights", Door.SLICES),
    Rule("--fp4-format", use="leave it out: its casts are rounded at random", doors=Door.ALL, dest="fp4"),
    *flags("--check-for-spiky-loss", "leave it out: a chunk's loss is as large as the chunk"),
    *flags("--log-straggler", "leave it out: it times the script's forward steps, of which plans run none"),
    *flags("--cpu-offloading-num-layers", doors=Door.SLICES),
    *flags("--tp-comm-overlap", "leave it out: its buffers have one size, chunks have many", Door.SLICES),
    *flags("--num-distributed-optimizer-instances", "leave it out: it reduces gradients twice", Door.ALL, allowed=_ONE),
    # What keeps state by the order of running (docs/megatron-state.md).
    *flags("--moe-routing-trace-path --save-activations-interval --save-dgrads-interval", _IN_TURN, Door.ALL),
    *flags("--save-tokens-per-expert-interval --logits-save-dir --logits-load-dir", _IN_TURN, Door.ALL),
    *flags("--defer-embedding-wgrad-compute --fine-grained-activation-offloading --moe-paged-stash", _ORDER, Door.ALL),
    *flags("--overlap-moe-expert-parallel-comm --delay-wgrad-compute", _ORDER, Door.MICROBATCHES),
    *flags("--num-microbatches-with-partial-activation-checkpoints", _ORDER, Door.MICROBATCHES),
    *flags("--enable-mhc-connections", "leave it out: messages of plans have --hidden-size values a token", Door.ALL),
    *flags("--dsa-indexer-topk-freq", "set it to 1: recompute finds another microbatch's", Door.MICROBATCHES, allowed=_ONE),
    *flags("--use-megatron-fsdp --use-torch-fsdp2", doors=Door.ALL),
    *flags("--hybrid-context-parallel --dynamic-context-parallel", "leave it out: replicas have own plans", Door.ALL),
    *flags("--iterations-to-skip", allowed=([], None)),
    *flags("--hierarchical-context-parallel-sizes --fim-data --use-varlen-dataset --use-legacy-models --output-logit-dtype"),
    *flags("--overlap-param-gather-with-optimizer-step --heterogeneous-layers-config-path --sequence-packing-scheduler"),
    *flags("--heterogeneous-layers-config-encoded-json --rampup-batch-size --step-batch-size-schedule --perform-rl-step"),
    *flags("--phase-transition-iterations --full-validation --multiple-validation-sets"),
)
"""Flags of which plans can honour no other value, whatever kinds of layers a model has, by who gives them."""
CONFLICTS = (*OF_MODELS, *(flag for kind in KINDS for flag in kind.flags))
"""Flags of Megatron that are refused whatever else is given."""
OF_DOCUMENTS = tuple(row for row in CONFLICTS if Door.DOCUMENTS in row.doors)

# ---- flags of Megatron that do not go with ours -----------------------------------------------------------------------

PARTING = flags(
    "--reset-position-ids --reset-attention-mask --dataloader-inter-document-masking",
    when=lambda a: a.epp_documents == "stream",
    say="does not go with {epp_documents}, which runs samples across documents",
)
"""Flags with which documents of a sample do not see each other."""
COUNTING = flags(
    "--train-samples --lr-decay-samples --lr-warmup-samples --override-ckpt-iteration",
    "count iterations, since a batch has as many samples as fit --epp-batch-tokens",
    when=lambda a: a.epp_batch_tokens is not None,
    say="does not go with --epp-batch-tokens",
)
"""Flags for which every batch has --global-batch-size samples."""
_ON = f"does not go with {VOCABULARY_FLAG} on"
OF_VOCABULARY = (
    *flags("--fp16", "use --bf16: small probabilities would leave the range of fp16", say=_ON),
    *flags("--init-model-with-meta-device", "leave it out: the first weights are divided over ranks", say=_ON),
    *flags("--logits-save-top-k", "leave it out: no rank has all logits of a token", say=_ON),
    *flags("--label-smoothing", "set it to 0", say=_ON),
    *flags("--hybrid-layer-pattern --hybrid-override-pattern", "train a GPTModel", say=_ON),
    *flags("--mtp-num-layers", "leave it out: its predictions need the whole output layer on one rank", say=_ON),
    *flags("--defer-embedding-wgrad-compute", "leave it out: T defers it", say=_ON),
    *flags("--epp-loss", "leave it out: it needs the output layer on the last stage", say=_ON),
)
"""Flags that do not go with an output layer that is divided over pipeline ranks."""


def _lacks_entries(args: Namespace) -> bool:
    entries = getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None) or sys.maxsize
    return bool(entries < args.tensor_model_parallel_size * args.pipeline_model_parallel_size)


_LEAVE = f"leave out {VOCABULARY_FLAG} on"
_RANKS, _IS_OTHER = "--pipeline-model-parallel-size", lambda a: getattr(a, "ckpt_format", "torch_dist") != "torch_dist"
VOCABULARY = (
    Rule(_RANKS, lambda a: a.pipeline_model_parallel_size < 2, f"leaves nothing to divide: {_LEAVE}", ""),
    *flags("--epp-schedule", "use elastic, or leave one of them out", say=_ON, allowed=("elastic",)),
    *OF_VOCABULARY,
    Rule(_RANKS, _lacks_entries, f"x {{tensor_model_parallel_size}} is more than the vocabulary has entries: {_LEAVE}", ""),
    *flags("--save --load", "use --ckpt-format torch_dist, which can divide a weight over stages", when=_IS_OTHER, say=_ON),
)
"""Rows on an output layer that is divided over pipeline ranks; the first that applies is why it is not by default."""


def _has_engine(args: Namespace) -> bool:
    return bool(args.transformer_impl == "transformer_engine")


def splits_weights(args: Namespace) -> bool:
    """Return True for a run whose plans compute weight gradients as actions of their own."""
    return args.epp_split_weight_gradient in (True, "on") and args.epp_schedule == "elastic"


def delays_weights(args: Namespace) -> bool:
    """Return True if Transformer Engine's layers, and the hooks of data parallelism, wait for split weight gradients."""
    return splits_weights(args) and _has_engine(args)


def _holds_gradients(args: Namespace) -> bool:
    return _has_engine(args) and not args.gradient_accumulation_fusion  # of all experts, for every chunk


WEIGHTS_TOGETHER = (
    *flags("--epp-schedule", "", say="is asked for", allowed=("elastic",)),
    *flags("--epp-planner", "", when=lambda a: not begins_with_greedy(a.epp_planner), say="is asked for"),
    *flags("--hybrid-layer-pattern --hybrid-override-pattern", "", say="describes the layers"),
    *flags("--add-bias-linear --add-qkv-bias", "", when=_has_engine, say="comes with every weight of Transformer Engine"),
    *flags("--moe-grouped-gemm", "", when=_holds_gradients, say="needs --gradient-accumulation-fusion to split weights"),
)
"""Why weight gradients are computed with their backwards where no flag asks for more."""


def _is_packed(args: Namespace) -> bool:
    return args.epp_schedule == "packed" and virtual(args)  # Megatron's interleaved pipeline cannot run the batches


def _asks_offload(args: Namespace) -> bool:
    return args.epp_offload == "on" or (args.epp_host_memory_gb is not None and args.epp_offload != "off")


def _cannot_offload(args: Namespace) -> bool:
    entry = PLANNERS.entry(args.epp_planner)
    return _asks_offload(args) and entry is not None and not entry.may_offload


def _has_rest(args: Namespace) -> bool:
    """Return True if whole layers do not divide over stages, and no flag says how else they are divided."""
    stages = args.pipeline_model_parallel_size * (getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1)
    return args.num_layers % stages != 0 and args.epp_layout is None and not is_open(args) and not is_divided(args)


def _trains_nothing(args: Namespace) -> bool:
    return not (args.train_iters or args.train_samples or args.skip_train)


def _only_warms_up(args: Namespace) -> bool:
    decay = args.lr_decay_iters or args.train_iters
    return bool(decay and args.lr_warmup_fraction is None and args.lr_warmup_iters >= decay)


def _lacks_decay(args: Namespace) -> bool:
    return args.lr_decay_style == "WSD" and not (args.lr_wsd_decay_iters or args.lr_wsd_decay_samples)


# ---- the table -------------------------------------------------------------------------------------------------------

_ELASTIC, _OWN = "is for --epp-schedule elastic, not {epp_schedule}", Door.USER | Door.WRAP
_OURS, _OFFLOAD = Door.DOCUMENTS | _OWN, "--epp-offload and --epp-host-memory-gb"
_DIVIDE = "make it one, or give --decoder-first-pipeline-num-layers or --pipeline-model-parallel-layout"
_DATA = "--data-path --train-data-path --data-args-path --per-split-data-args-path"
_NO_V = ("looped", None)
RULES: Rules = (
    *CONFLICTS,
    Check(setting_checks.forgotten, Door.STOCK),
    # a script's own microbatches, with flags or `megatron_epp.wrap`
    Check(setting_checks.replay, Door.MICROBATCHES),
    *flags(
        "--moe-router-load-balancing-type",
        "use aux_loss or seq_aux_loss: replicas have plans of their own, and their routers would wait for each other",
        Door.MICROBATCHES,
        lambda a: "global_aux_loss" in a.moe_router_load_balancing_type,
    ),
    Check(setting_checks.weight_shards, Door.ALL),
    Check(setting_checks.fp8_recipe, Door.ALL),
    Check(setting_checks.without_effect, _OWN),
    *flags(
        "--epp-offload --epp-host-memory-gb --epp-split-weight-gradient",
        doors=_OWN,
        when=lambda a: a.epp_order == GIVEN,
        say="does not go with {epp_order}, which frees memory by recompute alone",
        allowed=(AUTO, None, False, "off"),
    ),
    Rule("--epp-host-memory-gb", lambda a: a.epp_offload == "off", "does not go with {epp_offload}", BOTH, _OURS),
    # sizes and stages
    Check(setting_checks.sizes),
    Check(setting_checks.numbers),
    *flags(
        "--context-parallel-size",
        "use --epp-schedule whole",
        when=lambda a: a.epp_schedule == "stock",
        say="does not go with {epp_schedule}, in which Megatron's own attention shares out tokens in another order",
        allowed=(1,),
    ),
    Check(layout.layout_problems),
    Rule(PER_RANK, lambda a: a.num_virtual_stages_per_pipeline_rank < 1, "is no number", "give 1 or more", allowed=(None,)),
    Rule(PER_STAGE, lambda a: a.num_layers_per_virtual_pipeline_stage < 1, "is no number", "give 1 or more", allowed=(None,)),
    Rule("--num-layers", _has_rest, "is no multiple of the stages of {pipeline_model_parallel_size}", _DIVIDE),
    Rule("--epp-placement", lambda a: not virtual(a), "needs several stages on a rank", f"add {PER_RANK} 2", allowed=_NO_V),
    *flags("--epp-placement", "leave it out", when=lambda a: a.epp_schedule != "elastic", say=_ELASTIC, allowed=_NO_V),
    Rule("--epp-schedule", _is_packed, "makes another number of microbatches of every batch", "put one stage on a rank"),
    # batches, samples and losses
    Rule("--epp-batch-tokens", lambda a: a.epp_schedule != "elastic", _ELASTIC, BOTH),
    Rule("--epp-batch-tokens", lambda a: a.epp_documents == "stream", "is not for {epp_documents}", "use --global-batch-size"),
    *COUNTING,
    *PARTING,
    *flags(_DATA, BOTH, when=lambda a: a.epp_samples is not None, say="and --epp-samples are both data", allowed=(None, [])),
    Rule("--epp-loss", lambda a: a.epp_samples is None, "needs samples", "add --epp-samples FILE"),
    Rule("--epp-samples", lambda a: len(a.epp_samples) > 2, "are too many", "give a file for training and one for evaluation"),
    Rule("--epp-samples", lambda a: a.epp_schedule != "elastic", _ELASTIC, BOTH),
    Rule("--mtp-num-layers", lambda a: a.epp_loss is not None, "is not for --epp-loss, which trains no multi-token prediction"),
    Check(setting_checks.of_loss),
    # plans
    Rule("--epp-planner", _cannot_offload, f"is not for {_OFFLOAD}", "use --epp-planner greedy"),
    *flags("--epp-recompute", "leave it at auto", when=_asks_offload, say=f"is not for {_OFFLOAD}", allowed=("auto",)),
    Check(setting_checks.of_planner),
    Rule("--epp-order", lambda a: a.epp_order == GIVEN, "is for --epp-microbatches user: documents are cut by the plan"),
    Rule("--epp-costs", lambda a: a.epp_costs == "measure", "has gone", "use learn, or a file of `megatron-epp profile`"),
    Rule("--epp-trace", lambda a: a.epp_report_dir is None, "needs a folder to write to", "add --epp-report-dir"),
    # It makes Transformer Engine, and Megatron's data parallelism with it, delay weight gradients, as plans with W need.
    Rule("--delay-wgrad-compute", lambda a: not splits_weights(a), "is set by --epp-split-weight-gradient", "leave it out"),
    Check(lambda a, door: problems_of(a, door, VOCABULARY) if shards_vocabulary(a) else ()),
    Check(setting_checks.layers),
    Check(partial(of_experts, "chunk_problems"), Door.SLICED_MODEL),
)

_LOOP = Door.STOCK | Door.DOCUMENTS
START: Rules = (
    Rule("--wandb-project", lambda a: not a.wandb_exp_name, "needs --wandb-exp-name", "add it", _LOOP | Door.USER),
    Rule("--eval-iters", lambda a: not a.eval_interval, "needs --eval-interval", "add it, or pass --eval-iters 0", _LOOP),
    Rule("--train-iters", _trains_nothing, "is missing", "say for how many iterations to train", _LOOP, ()),
    Rule("--lr", lambda a: a.lr is None and not a.skip_train, "is missing", "pass a learning rate, as --lr 1e-4", _LOOP, ()),
    Rule("--lr-warmup-iters", _only_warms_up, "is not below {lr_decay_iters}, by default {train_iters}", "lower it", _LOOP),
    Rule("--lr-decay-style", _lacks_decay, "needs --lr-wsd-decay-iters", "add it", _LOOP),
    Rule("--seed", lambda a: a.seed <= 0, "must be 1 or more", "raise it", _LOOP, ()),
)
"""Requirements that Megatron tells only after it has started. A run that is only described does without.

A script with its own microbatches may run another loop than Megatron's.
"""


def refuse(settings: object, door: Door, rules: Rules = RULES) -> None:
    if problems := [*problems_of(settings, door, rules)]:
        raise ArgumentError("\n".join(problems))
