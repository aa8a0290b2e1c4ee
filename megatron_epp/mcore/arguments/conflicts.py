"""Tables of Megatron's flags: those of which plans can honour no other value, and those that change nothing with `--epp`."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron_epp.plan.errors import as_setting
from megatron_epp.plan.flags import flag_of

OUT = "leave it out"


class Door(enum.Flag):
    """Source of settings, which says their names, and which of them are refused.

    Attributes:
        STOCK: the command line of a training by Megatron's own schedule.
        DOCUMENTS: that of a training on documents.
        USER: that of a script with its own microbatches.
        MODEL: the configuration of a model, or of its data parallelism, whose microbatches `megatron_epp.wrap` plans.
        WRAP: what `megatron_epp.wrap` is called with.
        SLICED_MODEL: the configuration of a model that runs in slices: of a training on documents, or of
            `megatron_epp.wrap_samples`, for which MODEL is asked, too.
    """

    STOCK = enum.auto()
    DOCUMENTS = enum.auto()
    USER = enum.auto()
    MODEL = enum.auto()
    WRAP = enum.auto()
    SLICED_MODEL = enum.auto()
    SLICES = DOCUMENTS | SLICED_MODEL
    MICROBATCHES = USER | MODEL
    ALL = DOCUMENTS | MICROBATCHES

    @property
    def has_flags(self) -> bool:
        """True where settings are flags; else they are keywords, and fields of a configuration."""
        return self not in Door.MODEL | Door.WRAP | Door.SLICED_MODEL

    @property
    def cannot(self) -> str:
        """Begin of the refusal of settings that plans cannot honour."""
        return "--epp cannot honour" if self.has_flags else "a plan cannot honour"

    def name_of(self, attribute: str) -> str:
        """Return the name of a setting, of which parsed flags have this attribute."""
        return flag_of(attribute) if self.has_flags else attribute.removeprefix("epp_")

    def with_value(self, attribute: str, value: object) -> str:
        """Format a setting, of which parsed flags have this attribute, with its value."""
        return as_setting(self.name_of(attribute), value)


class MegatronFlag(NamedTuple):
    """A flag of Megatron that a plan cannot honour, or that has no effect; and the values at which it asks for nothing."""

    flag: str
    allowed: tuple[Any, ...] = (None, False)
    advice: str = OUT
    dest: str = ""
    doors: Door = Door.DOCUMENTS

    @property
    def attribute(self) -> str:
        return self.dest or self.flag[2:].replace("-", "_")

    def is_given(self, args: object) -> bool:
        """Return True if this Megatron has the flag and its value asks for something."""
        return hasattr(args, self.attribute) and getattr(args, self.attribute) not in self.allowed

    def text(self, settings: object, door: Door = Door.DOCUMENTS) -> str:
        """Format the flag with its value and the advice."""
        name = self.flag if door.has_flags else self.attribute
        return f"{as_setting(name, getattr(settings, self.attribute))} ({self.advice})"


def given_flags(rows: Iterable[MegatronFlag], args: object) -> str:
    """Return the names of the flags that are given, with commas between; empty if none is."""
    return ", ".join(row.flag for row in rows if row.is_given(args))


def _flags(names: str, advice: str = OUT, doors: Door = Door.DOCUMENTS) -> tuple[MegatronFlag, ...]:
    """Return a row for each of several flags that are refused for one reason."""
    return tuple(MegatronFlag(name, advice=advice, doors=doors) for name in names.split())


_ORDER = "leave it out: it belongs to Megatron's own schedules"
_REPLICAS = "leave it out: its collectives join replicas, which have plans of their own"
_SHAPES = "leave it out: graphs are recorded for the order of Megatron's own schedules"
_IN_TURN = "leave it out: it takes microbatches in the order in which they run, and counts again what runs again"
_STORAGE = "leave it out: plans count weights by their storage, which FP8 weights lack"
_ONE_SEQUENCE = "set it to 1: a microbatch is one sequence"
NO_RESTART = MegatronFlag(
    "--inprocess-restart", advice="leave it out: the watchdog of the run that failed goes on, and would end the restarted one"
)
# Rows without doors are for documents only.
OF_MODELS = (
    NO_RESTART,
    MegatronFlag("--cp-comm-type", (None, ["p2p"], ["a2a"]), "leave it out: heads are exchanged for tokens, as a2a does"),
    *_flags("--hierarchical-context-parallel-sizes"),
    MegatronFlag("--micro-batch-size", (None, 1), _ONE_SEQUENCE),
    MegatronFlag("--eval-micro-batch-size", (None, 1), _ONE_SEQUENCE),
    *_flags("--mock-data", "give real documents with --data-path"),
    *_flags("--sft", "leave it out, and make documents and their mask with `megatron-epp prepare --chat`"),
    *_flags(
        "--recompute-granularity --recompute-activations",
        "leave it out: plans choose what is recomputed (--epp-recompute changes how much)",
    ),
    MegatronFlag("--cuda-graph-impl", ("none", None), "set it to none: shapes change every iteration"),
    MegatronFlag("--cuda-graph-impl", ("none", None), _SHAPES, doors=Door.MICROBATCHES),
    *_flags("--enable-cuda-graph --external-cuda-graph", _SHAPES, Door.ALL),
    MegatronFlag("--dataloader-type", (None, "external"), "leave it out: documents are sampled by this package"),
    *_flags("--fp8-param-gather", _STORAGE, Door.ALL),
    *_flags("--fp8-param", _STORAGE, Door.MODEL),
    *_flags("--fp8-dot-product-attention --fp8-multi-head-attention", "leave it out: attention is not in FP8", Door.ALL),
    *_flags("--fp8-output-proj", "leave it out: the output layer multiplies in the type of the weights", Door.SLICES),
    MegatronFlag("--fp4-format", advice="leave it out: its casts are rounded at random", dest="fp4", doors=Door.ALL),
    *_flags("--check-for-spiky-loss", "leave it out: a chunk's loss is as large as the chunk"),
    *_flags("--log-straggler", "leave it out: it times the script's forward steps, of which plans run none"),
    MegatronFlag("--iterations-to-skip", ([], None)),
    MegatronFlag("--cpu-offloading-num-layers", (0, None), doors=Door.SLICES),
    *_flags("--tp-comm-overlap", "leave it out: its buffers have one size, chunks have many", Door.SLICES),
    MegatronFlag(
        "--num-distributed-optimizer-instances",
        (None, 1),
        "leave it out: Megatron reduces gradients again whose reduction a schedule has started",
        doors=Door.ALL,
    ),
    # What keeps state by the order of running (docs/megatron-state.md).
    *_flags("--moe-routing-trace-path --save-activations-interval --save-dgrads-interval", _IN_TURN, Door.ALL),
    *_flags("--save-tokens-per-expert-interval --logits-save-dir --logits-load-dir", _IN_TURN, Door.ALL),
    *_flags("--defer-embedding-wgrad-compute --fine-grained-activation-offloading --moe-paged-stash", _ORDER, Door.ALL),
    *_flags("--overlap-moe-expert-parallel-comm --delay-wgrad-compute", _ORDER, Door.MICROBATCHES),
    *_flags("--num-microbatches-with-partial-activation-checkpoints", _ORDER, Door.MICROBATCHES),
    *_flags("--enable-mhc-connections", "leave it out: messages of plans have --hidden-size values a token", Door.ALL),
    MegatronFlag(
        "--dsa-indexer-topk-freq",
        (None, 1),
        "set it to 1: a layer that runs again would find another microbatch's",
        doors=Door.MICROBATCHES,
    ),
    *_flags("--use-megatron-fsdp --use-torch-fsdp2", doors=Door.ALL),
    *_flags("--hybrid-context-parallel --dynamic-context-parallel", _REPLICAS, Door.ALL),
    *_flags("--fim-data --use-varlen-dataset --use-legacy-models --sequence-packing-scheduler"),
    *_flags("--overlap-param-gather-with-optimizer-step --heterogeneous-layers-config-path"),
    *_flags("--heterogeneous-layers-config-encoded-json --rampup-batch-size --step-batch-size-schedule"),
    *_flags("--phase-transition-iterations --full-validation --multiple-validation-sets --perform-rl-step"),
    *_flags("--output-logit-dtype"),
)
"""Flags of which plans can honour no other value, whatever kinds of layers a model has, by who gives them."""
QUEUES = "microbatches must run in their own order"
REPLAYS = _flags(
    # Megatron's, in ms-swift, NeMo-RL and recent verl; a field that verl adds to the model's configuration; slime's
    "--moe-enable-routing-replay --enable-routing-replay --use-routing-replay --use-rollout-routing-replay",
    QUEUES,
)
"""Router replay, which takes the routes of microbatches from queues, in the order in which these run."""
OF_VOCABULARY = (
    MegatronFlag("--fp16", advice="use --bf16: small probabilities would leave the range of fp16"),
    MegatronFlag("--init-model-with-meta-device", advice="leave it out: the first weights are divided over ranks"),
    MegatronFlag("--logits-save-top-k", advice="leave it out: no rank has all logits of a token"),
    MegatronFlag("--label-smoothing", (None, 0, 0.0), "set it to 0"),
    *_flags("--hybrid-layer-pattern --hybrid-override-pattern", "train a GPTModel"),
    MegatronFlag("--mtp-num-layers", advice="leave it out: its predictions need the whole output layer on one rank"),
    MegatronFlag("--defer-embedding-wgrad-compute", advice="leave it out: T defers it"),
)
"""Flags that do not go with an output layer that is divided over pipeline ranks."""
_IN_ITERATIONS = "use its kin in iterations: a batch has as many samples as fit --epp-batch-tokens"
COUNTING = (
    *_flags("--train-samples --lr-decay-samples", _IN_ITERATIONS),
    MegatronFlag("--lr-warmup-samples", (None, 0), _IN_ITERATIONS),
    MegatronFlag("--override-ckpt-iteration", advice="leave it out: iterations do not tell how many samples were consumed"),
)
"""Flags for which every batch has --global-batch-size samples."""
PARTING = _flags("--reset-position-ids --reset-attention-mask --dataloader-inter-document-masking")
"""Flags with which documents of a sample do not see each other."""
IMPLIED = (
    *PARTING,
    MegatronFlag("--no-create-attention-mask-in-dataloader", (True,), dest="create_attention_mask_in_dataloader"),
)
OF_SAMPLES = (
    *_flags("--data-cache-path --allow-ambiguous-pad-tokens"),
    MegatronFlag("--num-dataset-builder-threads", (1,)),
    MegatronFlag("--mid-level-dataset-surplus", (0.005,)),
)
"""Flags of `IDLE` that have an effect on Megatron's own samples, with `--epp-documents stream`."""
IDLE = (
    *OF_SAMPLES,
    *_flags("--per-dataset-sequences-path --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap"),
    *_flags("--exit-signal-handler-for-dataloader --object-storage-cache-path"),
    MegatronFlag("--num-workers", (2,)),
)
EOD = MegatronFlag("--eod-mask-loss")
