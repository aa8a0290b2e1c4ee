"""Settings of optimizers whose bytes are compared with what is planned, for two ranks without a pipeline."""

SETTINGS = {
    "adam, shared by replicas": "--bf16 --use-distributed-optimizer",
    "adam, shared by context-parallel ranks": "--bf16 --use-distributed-optimizer --context-parallel-size 2",
    "adam in fp32, shared": "--use-distributed-optimizer",
    "adam, whole": "--bf16",
    "adam, whole, gradients in bf16": "--bf16 --grad-reduce-in-bf16",
    "sgd": "--bf16 --optimizer sgd",
    "adam, experts with few holders": "--bf16 --use-distributed-optimizer --num-experts 4 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall",
}
"""Flags by a name."""
