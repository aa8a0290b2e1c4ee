"""The training run of the soak."""

import shlex

LONGEST, VOCABULARY = 64, 95
ITERATIONS, WINDOW = 150, 10
EARLY, LATE = range(11, 11 + WINDOW), range(ITERATIONS - WINDOW + 1, ITERATIONS + 1)

FLAGS = shlex.split(
    f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {LONGEST} --max-position-embeddings {LONGEST} "
    f"--transformer-impl local --micro-batch-size 1 --global-batch-size 2 --train-iters {ITERATIONS} --lr 1e-3 "
    f"--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32 "
    "--attention-dropout 0 --hidden-dropout 0 --split 100,0,0 --eval-iters 0 --eval-interval 1000 --log-interval 1000 "
    "--epp --epp-slices 2"
)
