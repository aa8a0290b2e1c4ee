"""Candidate configurations, and the sizes that are ruled out before any planning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_epp.plan import EppError
from megatron_epp.tools.advice.judge import Misfit
from megatron_epp.tools.advice.question import Configuration, Question


def candidates(question: Question) -> tuple[list[Configuration], list[Misfit]]:
    """Return all configurations of even layers on one stage per rank, and the sizes that were refused.

    Tensor- and context-parallel sizes are powers of two, tensor parallelism stays inside a node.
    """
    configs: list[Configuration] = []
    refused: dict[str, str] = {}
    for config in _grid(question):
        if named := next(_refusals(question, config), None):
            refused.setdefault(*named)
        elif config.devices == question.devices:
            spread = _with_experts(question, config)
            known = [sizes for sizes in spread if not question.measured or sizes.sharing in question.measured]
            if len(known) < len(spread):
                refused.setdefault("other TP, CP or EP", "no profile of --costs was measured with them")
            shards = question.vocabulary[0] and config.pipeline > 1
            even = [replace(sizes, layers=question.even_layers(sizes), shards_vocabulary=shards) for sizes in known]
            configs += [replace(sizes, latents=choice) for sizes in even for choice in question.open_latents]
    return configs, [Misfit(name, why) for name, why in refused.items()]


def _grid(question: Question) -> Iterator[Configuration]:
    """Yield sizes whose product is the number of devices, or less where they do not divide it."""
    for tensor in _sizes(question, "tensor", _powers(question.devices)):
        for context in _sizes(question, "context", _powers(question.devices // tensor)):
            rest = max(1, question.devices // (tensor * context))
            for pipeline in _sizes(question, "pipeline", [size for size in range(1, rest + 1) if rest % size == 0]):
                yield Configuration(tensor, context, pipeline, question.devices // (tensor * context * pipeline))


def _refusals(question: Question, config: Configuration) -> Iterator[tuple[str, str]]:
    """Yield the sizes that rule a configuration out, each with the reason."""
    node, groups = question.cluster.devices_per_node, question.flags.get("num_query_groups")
    heads, num_layers = int(question.flags["num_attention_heads"]), int(question.flags["num_layers"])
    tensor, batch, nets = config.tensor, len(question.lengths), question.shape(Configuration(1, 1, 1, 1)).delta
    if tensor > node:
        yield f"TP above {node}", f"the exchanges of every layer would leave a node of {node} devices"
    if heads % tensor:
        yield f"TP {tensor}", f"{tensor} ranks cannot share attention heads ({heads})"
    if question.flags.get("group_query_attention") and groups and groups % tensor:
        yield f"TP {tensor}", f"{tensor} ranks cannot share key and value heads ({groups})"
    if nets is not None and nets.key_heads % config.ranks:
        yield "TP x CP", f"{config.ranks} ranks cannot share key heads of gated delta nets ({nets.key_heads})"
    if config.devices == question.devices and config.pipeline > num_layers:
        yield f"PP above {num_layers}", f"there are {num_layers} layers only"
    if config.devices == question.devices and batch % config.data:
        yield f"DP {config.data}", f"a global batch of {batch} does not divide over {config.data} replicas"


def _with_experts(question: Question, config: Configuration) -> list[Configuration]:
    """Return the configuration with every expert-parallel size that shares experts among ranks of one node."""
    experts = question.flags.get("num_experts")
    if not experts:
        return [config]
    (sharing,) = _sizes(question, "expert_tensor", [1])
    room = min(question.cluster.devices_per_node, config.tensor * config.context * config.data) // sharing
    sizes = _sizes(question, "expert", [size for size in _powers(room) if experts % size == 0])
    return [replace(config, expert=size, expert_tensor=sharing) for size in sizes if _in_whole_groups(config, size * sharing)]


def _in_whole_groups(config: Configuration, ranks: int) -> bool:
    """True if so many ranks of a replica share experts among themselves, or all of them share with whole other replicas."""
    return config.ranks % ranks == 0 or (ranks % config.ranks == 0 and config.data % (ranks // config.ranks) == 0)


def _sizes(question: Question, name: str, usual: list[int]) -> list[int]:
    return [question.fixed[name]] if name in question.fixed else usual


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(max(1, most).bit_length())]


def check_devices(question: Question) -> None:
    """Raise `EppError` if the devices are not whole nodes, or fixed sizes do not divide their number."""
    node, devices = question.cluster.devices_per_node, question.devices
    if devices > node and devices % node:
        less = devices // node * node
        raise EppError(
            f"--devices {devices} is not a multiple of {node}, the devices of a node of {question.cluster.name}: give {less} "
            f"or {less + node}, or a cluster file with another devices_per_node"
        )
    fixed = {name: size for name, size in question.fixed.items() if name in ("tensor", "context", "pipeline")}
    if devices % (ranks := math.prod(fixed.values())):
        sizes = " x ".join(f"--{name}-parallel {size}" for name, size in fixed.items())
        raise EppError(f"--devices {devices} do not divide by {sizes}: a replica takes {ranks}, so give a multiple of {ranks}")
