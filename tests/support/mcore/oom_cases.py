"""Training runs, in one of which a rank runs out of memory."""

import shlex
from typing import NamedTuple

LENGTHS = (60, 9, 33, 4, 21, 50, 2, 17, 41, 12, 7, 28)
VOCABULARY = 95
ITERATIONS = 3
FAULT_ITERATION = 2
LIMIT_MINUTES = 3

COMMON = shlex.split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    f"--transformer-impl local --micro-batch-size 1 --global-batch-size 8 --train-iters {ITERATIONS} --lr 1e-3 "
    f"--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32 "
    "--position-embedding-type learned_absolute --attention-dropout 0 --split 80,20,0 --eval-iters 1 --eval-interval 3 "
    "--log-interval 1 --calculate-per-token-loss --epp --epp-measure-memory "
    f"--distributed-timeout-minutes {LIMIT_MINUTES}"
)
PIPELINE = (
    "--pipeline-model-parallel-size 2 --epp-planner seq1f1b --epp-chunk-tokens 16 --hidden-dropout 0.1 "
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall "
    "--no-bias-gelu-fusion --disable-bias-linear"
)
REPLICAS = "--overlap-grad-reduce --use-distributed-optimizer --epp-slices 3 --hidden-dropout 0"


class Case(NamedTuple):
    """Flags of a run, and the rank that runs out."""

    flags: str
    fails: int | None = None


CASES = {
    "pipeline": Case(PIPELINE),
    "replicas": Case(REPLICAS),
    "ends": Case(PIPELINE, fails=1),
}
