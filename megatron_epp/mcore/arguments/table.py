"""One table of settings, from which parsers, names in errors, the planner's `Options` and docs/flags.md follow."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from megatron_epp.cost.casts import RECIPES
from megatron_epp.cost.memory import DEVICE_SHARE, SETUP_MARGIN_BYTES
from megatron_epp.cost.optimizer import DTYPE_BYTES, KINDS
from megatron_epp.data.indexed_documents import DOCUMENTS
from megatron_epp.mcore.arguments import flag
from megatron_epp.mcore.arguments.flag import AMOUNT, BLOCK, COUNT, GIVEN, LAYERS, SEQUENCES, SHARE, SWITCH, Flag, Number
from megatron_epp.plan.errors import Names
from megatron_epp.plan.flags import AUTO, DISPATCHERS, KERNELS, MACHINES, flag_of
from megatron_epp.plan.shape_classes import WARM_UPS
from megatron_epp.plan.sizing import FP32_CHOICES, MOST_ROUNDED_SLICES
from megatron_epp.plan.yaml_files import shipped

PLANNER_NAMES = "a name that `megatron-epp schedules` lists, or module:function"
_SWITCHED: Any = {"choices": (AUTO, "on", "off"), "default": AUTO, "alone": "on", "field": lambda value: value in (True, "on")}


def _layers(value: str | int) -> str | int:
    return value if value == AUTO else int(value)


_PLANNING = (
    Flag("epp", "--epp", "", SWITCH, "Plan every iteration from the lengths of its sequences and run the plan."),
    Flag("schedule", "--epp-schedule", choices=("elastic", "stock", "whole", "padded", "packed"), default="elastic").described(
        "elastic: plans. The others run Megatron's own schedule on the same documents, to compare. stock: a sequence per "
        "microbatch, with Megatron's attention; whole: the same with ours; padded: sequences padded to --seq-length; packed: "
        "packed up to it (default: elastic)."
    ),
    Flag("planner", "--epp-planner", "--planner", flag.planner, default="greedy", metavar="NAME").described(
        "Who plans: a name that `megatron-epp schedules` lists, or module:function (default: greedy)."
    ),
    Flag("plan_limit_s", "", "--plan-limit-seconds", AMOUNT, metavar="S").described(
        "With --planner milp, time for which the solver looks for a better plan (default: 10)."
    ),
    Flag("seed", "", "--seed", flag.SEED, default=0, metavar="S").described(
        "Seed of the planner's search, and of lengths that are drawn (default: 0)."
    ),
)
_BATCH = (
    Flag("microbatches", "--epp-microbatches", choices=("plan", "user"), default="plan").described(
        "plan: documents are cut and packed into chunks. user: the script's own microbatches run whole, with its data, forward "
        "step, loss and model; the plan gives their order (default: plan)."
    ),
    Flag("order", "--epp-order", choices=("planned", GIVEN), default="planned").described(
        "Order of a script's own microbatches. planned: the fastest. given: the script's, of forwards and backwards on every "
        "stage, where a layer recomputes for all microbatches or for none; router replay and other queues inside of a model "
        "need it (default: planned)."
    ),
    Flag("documents", "--epp-documents", "--documents", choices=DOCUMENTS, default="split").described(
        "What becomes of documents. split: one longer than {context} is several sequences with positions from 0, each of "
        "which begins with the last label of the one before; truncate: what is beyond {context} is left out, and a warning "
        "counts it; stream: Megatron's own samples, documents one after the other cut every {context} tokens (default: "
        "split)."
    ),
    Flag("context", "--seq-length", "--context", COUNT, "The most tokens of a sequence (default: the longest length)."),
    Flag.same("global_batch_size", "Sequences of a batch (default: %(default)s).", SEQUENCES, default=512),
    Flag("batch_tokens", "--epp-batch-tokens", "", COUNT).described(
        "Most tokens of a training batch, over all replicas: sequences are taken in order until the next would exceed it, at "
        "least one per replica. --global-batch-size is then for evaluation alone (default: a batch has --global-batch-size "
        "sequences)."
    ),
    Flag("samples", "--epp-samples", "", metavar="FILE", takes_several=True).described(
        "JSONL or Parquet to train and evaluate on, in place of --data-path. A row has a list `tokens`, a list `trained` of 0 "
        "and 1 if not all are trained, and what --epp-loss reads, a number for every token as a label or one for all "
        "(default: none)."
    ),
    Flag("loss", "--epp-loss", "", metavar="MODULE:NAME").described(
        "Loss of --epp-samples: one of megatron_epp.losses, as megatron_epp.losses:ClippedRatio, or one of your own "
        "(default: cross entropy of the next token)."
    ),
    Flag("shares", "--epp-share-prefixes", "", **_SWITCHED).described(
        "Run once what sequences of a batch begin with in common and do not train, as samples and conversations with masks do; "
        "of a script's own packed microbatches also what they train. auto: where the model allows it and plans are faster with "
        "it; on: also where they are not (default: auto)."
    ),
    Flag("forward_only", "", "--forward-only", SWITCH, "Plan an evaluation, without backward."),
)
_MEMORY = (
    Flag("cap_bytes", "--epp-memory-cap-gb", "--memory-cap-gb --memory-gb", AMOUNT, metavar="GB").described(
        f"Memory one rank may hold, in 2^30 bytes, weights and optimizer included (default: {100 * DEVICE_SHARE:.0f}%% of the "
        "device's, none on CPU; on a GPU never more than is left when libraries and communicators are set up, less "
        f"{SETUP_MARGIN_BYTES >> 30} GiB).",
        "memory one rank may hold, in 2^30 bytes, weights and optimizer included "
        f"(default: {100 * DEVICE_SHARE:.0f}%% of the --cluster's device memory; no cap without)",
    ),
    Flag("fragmentation_share", "--epp-fragmentation-share", "--fragmentation-share", SHARE, metavar="SHARE").described(
        "Gaps between an allocator's blocks that plans allow for, as a share of what chunks hold (default: 0.05; 0 on CPU)."
    ),
    Flag("chunk_tokens", "--epp-chunk-tokens", "--chunk-tokens", COUNT, "Most tokens of a chunk (default: no limit)."),
    Flag("slices", "--epp-slices", "--slices", COUNT, "Slices of the longest sequence (default: the planner chooses)."),
    Flag(
        "recompute", "--epp-recompute", "--recompute", flag.RECOMPUTED, default=AUTO, metavar="auto|N", field=_layers
    ).described(
        "Layers per stage that recompute in backward: a number, or auto, as few as the cap allows for each stage and chunk "
        "(default: auto)."
    ),
    Flag("recompute_modes", "--epp-recompute-modes", "--recompute-modes", choices=("all", "full"), default="all").described(
        "What a layer that recomputes runs again, with {recompute} auto. all: whichever is cheapest, all of it (full), all "
        "but core attention (selective; Megatron's runs core attention alone), or its MLP or experts and norms (mlp); full: "
        "always all of it (default: all)."
    ),
    Flag("offload", "--epp-offload", "--offload", **_SWITCHED).described(
        "Copy activations to host memory between forward and backward where that takes less time than recompute, with greedy "
        "and orders of papers; with greedy also keys and values of sliced sequences (KV offload). auto: with "
        "{host_cap_bytes}, and in trainings on GPUs (default: auto)."
    ),
    Flag("host_cap_bytes", "--epp-host-memory-gb", "--host-memory-gb", AMOUNT, metavar="GB").described(
        "Host memory of a rank for {offload}, in 2^30 bytes (default: 80%% of the machine's, or of what the control group "
        "allows, shared by the machine's ranks).",
        "host memory of a rank for {offload}, in 2^30 bytes (default: no limit)",
    ),
)
_RUNNING = (
    Flag("placement", "--epp-placement", choices=("looped", "v")).described(
        "Where stages go when a rank has several. looped: rank after rank, and again from the first; v: and back, so that the "
        "first rank has the first and the last of two on each (default: the faster with --epp-layout auto, else looped)."
    ),
    Flag("layout", "--epp-layout", "--layout", metavar="auto|even|balanced|FILE|N,N,...").described(
        "Layers of every stage, as ``8,7,9``; or a file with them and the ranks of the stages. even: as Megatron's flags "
        "divide layers, by default as many on each; balanced: ranks take equally long for the run's sequences; auto: what "
        "takes least time for its first batches, with several stages on a rank where that is faster, found by planning some "
        "of them and kept with the checkpoints (default: auto, unless flags of Megatron's divide layers).",
        "layers of every stage, as ``8,7,9``, behind v: or looped: where ranks have several; a file that `plan --layout-out` "
        "wrote; even; balanced: ranks take equally long; or auto: what takes least time for batches like these, with several "
        "stages on a rank where that is faster (default: auto, and balanced with planners of papers)",
    ),
    Flag("vocab_parallel", "--epp-vocab-parallel", "--vocab-parallel", **_SWITCHED).described(
        "Divide the output layer over the pipeline ranks. auto: where plans are faster with it (default: auto)."
    ),
    Flag("split_weight", "--epp-split-weight-gradient", "--split-weight", **_SWITCHED).described(
        "Compute the gradient of linear layers' weights as an action of its own (W), where a stage would wait. auto: where "
        "plans are faster with it (default: auto)."
    ),
    Flag("overlap_exchanges", "--epp-overlap-exchanges", "--overlap-exchanges", SWITCH).described(
        "With the planner greedy, run a backward and the next forward in one step where that is faster: each computes while "
        "the other exchanges activations between tensor-parallel ranks."
    ),
    Flag("costs", "--epp-costs", default="analytic", metavar="analytic|learn|FILE").described(
        "Where predicted times come from. analytic: formulas; learn: the first iterations, as always with --epp-microbatches "
        "user, kept with the checkpoints; or a file of `megatron-epp profile`, or of a run that has learnt them (default: "
        "analytic)."
    ),
    Flag("fp32_kv_gradients", "--epp-fp32-kv-gradients", choices=FP32_CHOICES, default=AUTO, alone="on").described(
        "Add up the gradients of a sliced sequence's keys and values in fp32, with twice the memory: in bf16 and fp16 every "
        f"slice rounds the sum. auto: above {MOST_ROUNDED_SLICES} slices (default: auto)."
    ),
    Flag("latents", "--epp-latents", "--latents", **_SWITCHED).described(
        "What slices of latent attention hand on. on: latents, of which every slice makes the keys and values of its prefix "
        "anew; off: keys and values; auto: whichever plans faster (default: auto)."
    ),
    Flag(
        "loss_block_tokens", "--epp-loss-block-tokens", "--loss-block-tokens", BLOCK, default=AUTO, metavar="auto|N|0"
    ).described(
        "Compute logits and loss by blocks of at most N tokens, again in backward, so that a chunk's logits are never whole. "
        "0: as Megatron does; auto: blocks of 1 GiB of fp32 logits where the longest sequence has more than 2 GiB on a rank "
        "and plans with a searched layout are not faster without, else 0 (default: auto)."
    ),
    Flag("warm_up", "--epp-warm-up", choices=WARM_UPS, default=AUTO, alone="on").described(
        "Before an iteration run attention once for every new class of shapes, so that all ranks build kernel plans at once; "
        "before the first for all classes up to --seq-length. auto: where the kernel builds plans, as cuDNN does (default: "
        "auto)."
    ),
    Flag.ours("lookahead", "Iterations to plan ahead of training (default: 2).", COUNT, default=2),
    Flag("wait_limit_seconds", "--epp-wait-limit-seconds", "", AMOUNT, default=600.0, metavar="S").described(
        "End the run, naming the action, when an action, message or collective takes longer; while ranks measure costs, for "
        "every step of the slowest (default: 600)."
    ),
    Flag("save_limit_seconds", "--epp-save-limit-seconds", "", AMOUNT, default=1800.0, metavar="S").described(
        "End the run when saving a checkpoint takes longer (default: 1800)."
    ),
    Flag.ours("report_dir", "Write each iteration's planned and measured figures here (default: do not).", str, metavar="DIR"),
    Flag("trace", "--epp-trace", "", COUNT, metavar="I", takes_several=True).described(
        "Write iteration I to --epp-report-dir: plan.json, measured.json with the times of actions, copies and waits, and "
        "trace.json for ui.perfetto.dev; of several as plan-I.json and so on (default: none)."
    ),
    Flag("checkpoint_fallback", "--epp-checkpoint-fallback", "", SWITCH).described(
        "Where the newest checkpoint of --load is damaged, go on from the one before, with a warning (default: refuse to "
        "start)."
    ),
    Flag.ours("measure_memory", "Count the bytes autograd keeps, per rank. Costs a little time.", SWITCH),
    Flag.ours("allow_unknown_megatron", "Patch a Megatron whose code is not known to work.", SWITCH),
)
_PIPELINE = (
    Flag(
        "num_stages", "--pipeline-model-parallel-size", "--stages --pipeline-size --pipeline-parallel", flag.STAGES, default=4
    ).described("Pipeline stages, one per rank (default: 4)."),
    Flag("token_multiple", "", "--token-multiple", COUNT).described(
        "Pad chunks to a multiple of this many tokens (default: as in training, by the ranks that share tokens)."
    ),
    Flag("tensor_parallel", "--tensor-model-parallel-size", "--tensor-parallel", COUNT).described(
        "Tensor-parallel ranks, which share a layer (default: 1)."
    ),
    Flag("sequence_parallel", "", "--sequence-parallel", SWITCH).described(
        "Tensor-parallel ranks also share the tokens between matrix products."
    ),
    Flag("context_parallel", "--context-parallel-size", "--context-parallel", COUNT).described(
        "Context-parallel ranks, which share the tokens (default: 1)."
    ),
    Flag("expert_parallel", "--expert-model-parallel-size", "--expert-parallel", COUNT).described(
        "Expert-parallel ranks, which share the experts (default: 1)."
    ),
    Flag("expert_tensor_parallel", "--expert-tensor-parallel-size", "--expert-tensor-parallel", COUNT).described(
        "Ranks that share an expert; with 1, expert-parallel ranks are neighbours (default: as many as tensor-parallel ones)."
    ),
    Flag("expert_dispatcher", "", "--expert-dispatcher", choices=DISPATCHERS).described(
        "How tokens reach their experts; with deepep and hybridep a node gets a token once (default: as Megatron's flags in "
        "the model's file, or alltoall)."
    ),
    Flag(
        "pipeline_parallel", "--pipeline-model-parallel-size", "--stages --pipeline-parallel --pipeline-size", COUNT
    ).described("Pipeline ranks, which share the layers (default: 1)."),
    Flag("virtual_stages", "--num-virtual-stages-per-pipeline-rank", "--virtual-stages", COUNT).described(
        "Stages on each rank (default: 1)."
    ),
    Flag("data_parallel", "", "--data-parallel", COUNT, default=1).described(
        "Replicas, which share the optimizer's state, together with context-parallel ranks (default: 1)."
    ),
)
SHAPE = (
    Flag("num_layers", "--num-layers", "--layers", LAYERS, "Transformer layers (default: 32)."),
    Flag("hidden_size", "--hidden-size", "--hidden", COUNT, "Width of the residual stream (default: 4096)."),
    Flag("ffn_hidden_size", "--ffn-hidden-size", "--ffn", COUNT, "Width inside the MLP, or inside an expert (default: 14336)."),
    Flag("num_attention_heads", "--num-attention-heads", "--heads", COUNT, "Query heads (default: 32)."),
    Flag("num_query_groups", "--num-query-groups", "--kv-heads", COUNT, "Key and value heads (default: 8)."),
    Flag("vocab_size", "--vocab-size", "--vocab", COUNT, "Vocabulary size (default: 128256)."),
    Flag("gated_mlp", "", "--no-gated-mlp", SWITCH, "The MLP has one input projection, not two (SwiGLU)."),
    Flag("num_experts", "--num-experts", "--experts", COUNT, "Experts per layer (default: none)."),
    Flag("experts_per_token", "--moe-router-topk", "--experts-per-token", COUNT, "Experts a token passes (default: 2)."),
    Flag("bytes_per_value", "", "--bytes-per-value", COUNT, "Bytes of an activation: 2 for bf16, 4 for fp32 (default: 2)."),
)
"""Flags of a model's shape."""
FP8 = (
    Flag.same("fp8_format", "Linear layers multiply in FP8 (default: in the type of the weights).", choices=("e4m3", "hybrid")),
    Flag("fp8_recipe", "--fp8-recipe", "--fp8-recipe", choices=tuple(RECIPES)).described(
        "How FP8 is scaled; needed with --fp8-format, as Megatron's default is refused."
    ),
)
"""Flags of Megatron that cast linear layers to FP8."""
_DTYPES = tuple(DTYPE_BYTES)
OPTIMIZER = (
    Flag("optimizer", "--optimizer", "--optimizer", choices=KINDS).described(
        "muon, dist_muon: Muon for the matrices of layers, Adam for the rest; sgd: with momentum, not sharded (default: adam, "
        "sharded by the distributed optimizer)."
    ),
    Flag.same(
        "use_precision_aware_optimizer",
        "Adam has its copy of the weights and its moments in the types that follow (needs Transformer Engine).",
        SWITCH,
    ),
    Flag.same("main_grads_dtype", "Type of accumulated gradients (default: fp32).", choices=("fp32", "bf16")),
    Flag("main_params_dtype", "--main-params-dtype", "--main-params-dtype", choices=("fp32", "fp16")).described(
        "Type of the optimizer's copy of the weights; of fp32 it stores the 2 bytes that bf16 weights lack (default: fp32)."
    ),
    Flag.same("exp_avg_dtype", "Type of the first moment (default: fp32).", choices=_DTYPES),
    Flag.same("exp_avg_sq_dtype", "Type of the second moment (default: fp32).", choices=_DTYPES),
    Flag.same("optimizer_cpu_offload", "Adam's states are in host memory, in fp32.", SWITCH),
    Flag.same("optimizer_offload_fraction", "Share of the states that are there, 0 to 1 (default: 1).", SHARE, metavar="SHARE"),
)
"""Flags of Megatron's optimizer that change its bytes, by the names that they have in training."""
_COSTS = (
    Flag("model", "", "--model", metavar="NAME|FILE").described(
        f"YAML of Megatron's flags, or a Hugging Face config.json, or its folder; shipped: {', '.join(shipped('models'))} "
        "(default: like llama3-8b)."
    ),
    Flag("cluster", "", "--cluster", metavar="NAME|FILE").described(
        f"YAML of a machine; shipped: {', '.join(shipped('clusters'))} (default: --rates)."
    ),
    Flag("devices", "", "--devices", flag.DEVICES).described(
        "Devices of the run, in all: if one node of the --cluster has so many, stages are in it too; if ranks of several "
        "nodes share a layer, a part of their exchanges is slower (default: a node for each stage)."
    ),
    Flag("attention_kernel", "", "--attention-kernel", choices=KERNELS).described(
        "Attention kernel whose published rates on an H100 plans take (default: the cluster's)."
    ),
    Flag("rates", "", "--rates", str, "The machine the formulas assume (default: h100).", choices=tuple(sorted(MACHINES))),
    Flag("trained_parameters", "--epp-trained-parameters", "--trained-parameters", Number(1, 10**14), metavar="N").described(
        "Parameters that train, where others are frozen, as next to adapters; they alone have gradients and optimizer states. "
        "A training needs it for layers that it chooses before there is a model, and else counts by itself (default: all)."
    ),
    Flag("costs_file", "", "--costs", metavar="FILE").described(
        "What `megatron-epp profile` wrote, or a training run with learnt costs (default: formulas)."
    ),
)
_DATA = tuple(Flag(name, flag_of(name)) for name in ("eod_mask_loss", "tokenizer_type", "tokenizer_model"))

TABLE = (*_PLANNING, *_BATCH, *_MEMORY, *_RUNNING, *_PIPELINE, *SHAPE, *FP8, *OPTIMIZER, *_COSTS, *_DATA)

EVERYDAY = (
    *("epp", "schedule", "cap_bytes", "costs", "layout", "offload", "recompute", "vocab_parallel", "chunk_tokens", "planner"),
    *("documents", "batch_tokens", "microbatches", "report_dir", "trace"),
)
"""Settings of a training run that most users meet, in the order in which help lists them before all others."""
ROWS = {row.setting: row for row in TABLE}  # the rows by their settings
TRAINING: Names = {row.setting: row.training for row in TABLE if row.training}
"""The flag of each setting in a training run, for errors."""
_OF_BATCHES = {"context": "the length of the longest sequence", "global_batch_size": "the number of samples"}
"""Words for a loop of a program's own, which has no flags for documents."""


def names_in_loop(settings: Collection[str]) -> Names:
    """Return the names of settings for a loop of a program's own: keywords, its configuration's fields, words, or empty."""
    names = {row.setting: row.dest.removeprefix("epp_") for row in TABLE if row.training}
    unknown = {row.setting: "" for row in TABLE if row.is_ours and names.get(row.setting) not in settings}
    return names | unknown | _OF_BATCHES


def names_of(args: argparse.Namespace) -> Names:
    """Return the names of settings for who started a run: flags, or those of `names_in_loop`."""
    names: Names = getattr(args, "epp_names", TRAINING)
    return names
