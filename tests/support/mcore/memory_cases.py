"""Settings in which planned and measured memory are compared, per pipeline size."""

import shlex

from megatron_epp.tools.formulas import ModelShape
from scripts.parity.cells import MODELS
from tests.support.mcore.launch import PLANNED

LENGTHS = (500, 37, 12, 260, 90, 5, 150, 21, 420, 60, 8, 33, 310, 14, 75, 110, 44, 3, 230, 18, 66, 9, 130, 27)
VOCABULARY = 95
ITERATIONS = 2

COMMON = PLANNED + shlex.split(
    "--num-layers 8 --hidden-size 64 --seq-length 512 --max-position-embeddings 512 --log-interval 1000 "
    f"--train-iters {ITERATIONS} --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32 --epp-measure-memory --epp-trace 1"
)
SIZES = {"num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4, "vocab_size": VOCABULARY}
SHAPE = ModelShape(**SIZES, bytes_per_value=2)
LLAMA = MODELS["llama"]
GROUPED = f"{LLAMA} --group-query-attention --num-query-groups 2"
LATENT = f"{LLAMA} --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
LATENT += "--v-head-dim 20 --rope-type rope --no-rope-fusion"
DELTA = f"{LLAMA} --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 16 "
DELTA += "--linear-conv-kernel-dim 4 --hybrid-layer-pattern GG|GG --spec tests.support.mcore.delta_hybrid stack_spec"
MAMBA = f"{LLAMA} --mamba-num-heads 8 --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16 "
MAMBA += "--hybrid-layer-pattern MMM|MMM --spec tests.support.mcore.mamba_hybrid stack_spec"
OF_TWO_KINDS = MAMBA.replace("MMM|MMM", "M*|*M")
WINDOWS = f"{GROUPED} --window-size 300,0 --window-attn-skip-freq 2 --softmax-type learnable"
SMALL = "--num-layers 4 --global-batch-size 4"  # of what takes long
TWO_PER_RANK = "--num-virtual-stages-per-pipeline-rank 2"

CAPPED = "capped"
SHARDS = "a large vocabulary in shards"
FREE = "three slices"
BLOCKS = "three slices, loss by blocks"
OFFLOADED = "offloaded"
FAST_HOST = "FAST_HOST"
"""Stands for a file: a profile of a machine that computes slowly and copies fast, in bf16 while the run is in fp32."""
TOKENS_SHARED = "one stage on two ranks that share tokens and have the same keys"

PIPELINES = {
    2: {
        FREE: f"{LLAMA} --epp-slices 3",
        BLOCKS: f"{LLAMA} --epp-slices 3 --epp-loss-block-tokens 32",
        "twelve slices in bf16, all in bf16": f"{LLAMA} {SMALL} --bf16 --epp-slices 12 --epp-fp32-kv-gradients off",
        CAPPED: f"{LLAMA} --epp-slices 3 --epp-memory-cap-gb 0.0085",
        "uneven layers, some recompute": f"{LLAMA} --epp-slices 3 --epp-recompute 1 --epp-layout 5,3",
        "latents, seven slices, some recompute": f"{LATENT} {SMALL} --epp-latents on --epp-slices 7 --epp-recompute 1",
        "multi-token prediction, seven slices, some recompute": f"{LLAMA} --mtp-num-layers 2 --epp-slices 7 --epp-recompute 2",
        "gated delta nets, seven slices, some recompute": f"{DELTA} {SMALL} --epp-slices 7 --epp-recompute 1",
        "Mamba-2, seven slices, some recompute": f"{MAMBA} --epp-slices 7 --epp-recompute 2",
        "Mamba-2 and attention, seven slices, one of two recomputes": f"{OF_TWO_KINDS} --epp-slices 7 --epp-recompute 1",
        "windows longer than slices, sinks, some recompute": f"{WINDOWS} {SMALL} --epp-slices 7 --epp-recompute 1",
        TOKENS_SHARED: f"{LLAMA} {SMALL} --group-query-attention --num-query-groups 1 --epp-slices 3 --context-parallel-size 2 "
        "--pipeline-model-parallel-size 1",
    },
    4: {
        SHARDS: f"{LLAMA} --epp-slices 3 --epp-vocab-parallel on --make-vocab-size-divisible-by 4096 --epp-memory-cap-gb 0.02",
        OFFLOADED: f"{LLAMA} --epp-memory-cap-gb 0.0045 --epp-offload --epp-costs {FAST_HOST}",
    },
}
MORE = {
    "windows shorter than slices": f"{GROUPED} --window-size 20,0 --epp-slices 7",
    "the first of two layers without a window, one recomputes": f"{GROUPED} --num-layers 4 --window-size 20,0 "
    "--window-attn-skip-freq [0,1,0,1] --epp-slices 7 --epp-recompute 1",
    "a window in two of three layers, all recompute": f"{GROUPED} --window-size 20,0 --window-attn-skip-freq 3 --epp-slices 7 "
    "--epp-recompute 4",
    "experts in every other layer, some recompute": f"{GROUPED} --num-experts 4 --moe-layer-freq 2 --epp-slices 7 "
    "--epp-recompute 3",
    "a window in every layer, weights apart": f"{GROUPED} --window-size 9,0 --epp-slices 3 --epp-split-weight-gradient",
    "twelve slices in bf16, whose sums are in fp32": f"{GROUPED} --bf16 --epp-slices 12",
    "latent attention, seven slices, some recompute": f"{LATENT} --epp-slices 7 --epp-recompute 2",
    "latents, weights apart": f"{LATENT} --epp-latents on --epp-slices 3 --epp-split-weight-gradient",
    "latents in bf16, whose sums are in fp32": f"{LATENT} --bf16 --epp-latents on --epp-slices 12",
    "latent attention, weights apart": f"{LATENT} --epp-slices 3 --epp-split-weight-gradient",
    "multi-token prediction, 1F1B": f"{LLAMA} --mtp-num-layers 2 --epp-slices 7 --epp-recompute 2 --epp-planner seq1f1b",
    "multi-token prediction, weights apart": f"{LLAMA} --mtp-num-layers 2 --epp-slices 3 --epp-split-weight-gradient",
    "multi-token prediction, by blocks": f"{LLAMA} --mtp-num-layers 1 --epp-slices 3 --epp-loss-block-tokens 32",
    "two stages per rank, some recompute": f"{GROUPED} --epp-slices 3 {TWO_PER_RANK} --epp-recompute 1",
}
"""More of two ranks, in the set `slow`, besides plans of random batches (`jobs.batches`)."""
