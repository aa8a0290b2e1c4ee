"""The search over configurations: candidates, rough plans of all, exact plans of the best, and Megatron's own 1F1B."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from megatron_epp.plan import EppError, InfeasibleError
from megatron_epp.plan.problem import Share
from megatron_epp.plan.units import format_gib
from megatron_epp.tools.advice import judge
from megatron_epp.tools.advice.causes import Gain, Steps
from megatron_epp.tools.advice.judge import Baseline, Judged, Misfit, misfit
from megatron_epp.tools.advice.question import Configuration, Question
from megatron_epp.tools.layouts.layout_choice import choose, least_gain_of_split

SEARCHED = 6  # number of configurations for whose sizes a layout is searched: the ones with the best rough plans
PLANNED = 12  # number of configurations that are evaluated exactly
COMPARED = 6  # number of configurations at which layers and virtual stages are searched for Megatron's own 1F1B
TIE = 0.03  # share by which Megatron's own 1F1B may be slower than the best configuration and still be called as good
CLOSE = 0.02
"""Share of the fastest time by which another may be slower and still be called as good; the simplest of these leads."""
_MOST_TIMES = 8  # largest factor by which more devices are proposed where nothing fits
_NEAR = 8  # number of refused configurations among which the one nearest to fitting is searched


def candidates(question: Question) -> tuple[list[Configuration], list[Misfit]]:
    """Return configurations of even layers on one stage per rank, TP and CP powers of two, TP in a node; and refusals."""
    configs, refused = list[Configuration](), dict[str, str]()
    is_open = question.flags.get("multi_latent_attention") and question.flags.get("epp_latents") not in ("on", "off")
    latents = ("off", "on") if is_open else ("",)
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
            configs += [replace(sizes, latents=choice) for sizes in even for choice in latents]
    return configs, [Misfit(name, why) for name, why in refused.items()]


def _grid(question: Question) -> Iterator[Configuration]:
    """Yield sizes whose product is the number of devices, or less where they do not divide it."""
    for tensor in _sizes(question, "tensor", _powers(question.devices)):
        for context in _sizes(question, "context", _powers(question.devices // tensor)):
            rest = max(1, question.devices // (tensor * context))
            for pipeline in _sizes(question, "pipeline", [size for size in range(1, rest + 1) if rest % size == 0]):
                yield Configuration(tensor, context, pipeline, question.devices // (tensor * context * pipeline))


def _refusals(question: Question, config: Configuration) -> Iterator[tuple[str, str]]:
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
    own, replicas = config.ranks, config.data
    # Ranks of a replica share experts among themselves, or all of them share with whole other replicas.
    shared = ((size, size * sharing) for size in sizes)
    whole = [size for size, each in shared if own % each == 0 or (each % own == 0 and replicas % (each // own) == 0)]
    return [replace(config, expert=size, expert_tensor=sharing) for size in whole]


def _sizes(question: Question, name: str, usual: list[int]) -> list[int]:
    return [question.fixed[name]] if name in question.fixed else usual


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(max(1, most).bit_length())]


def check_devices(question: Question) -> None:
    """Raise `EppError` if the devices are not whole nodes, or fixed sizes do not divide their number."""
    node, devices = question.cluster.devices_per_node, question.devices
    if devices > node and devices % node:
        less, of_node = devices // node * node, f"the devices of a node of {question.cluster.name}"
        todo = f"give {less} or {less + node}, or a cluster file with another devices_per_node"
        raise EppError(f"--devices {devices} is not a multiple of {node}, {of_node}: {todo}")
    fixed = {name: size for name, size in question.fixed.items() if name in ("tensor", "context", "pipeline")}
    if devices % (ranks := math.prod(fixed.values())):
        sizes = " x ".join(f"--{name}-parallel {size}" for name, size in fixed.items())
        raise EppError(f"--devices {devices} do not divide by {sizes}: a replica takes {ranks}, so give a multiple of {ranks}")


@dataclass(frozen=True, slots=True)
class Advice:
    question: Question  # input of the search
    best: tuple[Judged, ...]  # configurations evaluated exactly, the best first; never empty
    slower: tuple[Judged, ...]  # configurations ruled out by a rough plan, the best first
    # Configurations that cannot run, the nearest to fitting first, then the sizes that were ruled out
    refused: tuple[Misfit, ...]
    plain: Baseline | None  # Megatron's own 1F1B at its best configuration; None if it fits no configuration
    gain: Gain  # of the best over 1F1B, divided by cause

    @property
    def plain_is_as_good(self) -> bool:
        return self.plain is not None and self.plain.stock.step_us <= (1 + TIE) * self.best[0].parts.step_us

    def tokens_per_s(self, step_us: float) -> float:
        return self.question.tokens / (step_us * 1e-6)


class NothingFitsError(InfeasibleError):
    """No configuration fits. The message names the smallest changes with which one would fit."""


def advise(question: Question, say: Callable[[str], object] = str) -> Advice:
    """Search deterministically, by rough plans without offload where anything fits without. Raises `NothingFitsError`."""
    configs, refused = candidates(question)
    search = _Search(replace(question, options=replace(question.options, offload=False)), say)
    search.look_at(configs, "configurations")
    if question.options.offload and not search.entries:
        search = _Search(question, say)
        search.look_at(configs, "configurations with offload")
    search.search_layouts()
    search.plan_best(question)
    if not search.exact:
        raise _nothing_fits(search.question, [*refused, *search.refused])
    question = search.with_weights(question)
    ranked = _simplest_first(search.exact)
    plain, gain = search.compare(question, ranked)
    planned = {entry.config for entry in search.exact}
    slower = sorted((entry for entry in search.entries if entry.config not in planned), key=_speed)
    refusals = *sorted(search.refused, key=lambda refusal: refusal.needed_bytes), *refused
    return Advice(question, tuple(ranked), tuple(slower), refusals, plain, gain)


class _Search:
    def __init__(self, question: Question, say: Callable[[str], object]) -> None:
        self.question, self.say = question, say
        self.entries, self.exact, self.refused = list[Judged](), list[Judged](), list[Misfit]()
        self.steps, self._shares = dict[Configuration, Steps](), dict[int, tuple[Share, ...]]()

    def look_at(self, configs: Sequence[Configuration], what: str) -> None:
        for number, config in enumerate(configs):
            self.say(f"{number} of {len(configs)} {what}")
            if (refusal := misfit(self.question, config)) is not None:
                self.refused.append(refusal)
                continue
            if config.data not in self._shares:
                self._shares[config.data] = judge.shares_by_work(self.question, config)
            shares = self._shares[config.data]
            try:
                self.entries.append(judge.roughly(self.question, config, shares))
            except InfeasibleError as error:
                self._refuse(config, error)
            if config.virtual == 1 and config.latents != "on":
                self.steps[_bare(config)] = judge.choices_of(self.question, config, shares).steps(even_only=True)

    def search_layouts(self) -> None:
        """Search for the layout of the best configurations, as `--layout auto` does, and evaluate what is found."""
        known, num_layers = {entry.config for entry in self.entries}, int(self.question.flags["num_layers"])
        chunks = self.question.fixed.get("virtual", 1)
        ranked = [entry.config for entry in sorted(self.entries, key=_speed)]
        best = [config for config in ranked if 2 <= config.pipeline <= num_layers // chunks][:SEARCHED]
        for number, config in enumerate(best):
            self.say(f"layouts of {number} of {len(best)} configurations searched")
            with suppress(InfeasibleError):
                searched = config.with_layout(choose(self.question.sample(config, self._shares[config.data][0])).layout)
                self.look_at([searched] if searched not in known else [], "searched layouts")

    def plan_best(self, question: Question) -> None:
        """Evaluate the best configurations exactly, with the question's offload; if one does not fit, the next replaces it."""
        for entry in sorted(self.entries, key=_speed):
            if len(self.exact) == PLANNED:
                break
            self.say(f"{len(self.exact)} of {PLANNED} configurations planned")
            try:
                self.exact.append(judge.exactly(question, entry.config))
            except InfeasibleError as error:
                self.entries.remove(entry)
                self._refuse(entry.config, error)

    def with_weights(self, question: Question) -> Question:
        """Split weight gradients off in the best, if a run would; return the question with the options of its plan."""
        best = _simplest_first(self.exact)[0]
        if not question.may_split_weights or question.options.split_weight or best.config.pipeline == 1:
            return question
        asked = replace(question, options=replace(question.options, split_weight=True))
        with suppress(InfeasibleError):
            split = judge.exactly(asked, best.config)
            whole_us, split_us = (judged.plan.predicted.makespan_us for judged in (best, split))
            if split_us < (1 - least_gain_of_split(best.config.tensor)) * whole_us:
                self.exact = [split if entry is best else entry for entry in self.exact]
                return asked
        return question

    def compare(self, question: Question, ranked: list[Judged]) -> tuple[Baseline | None, Gain]:
        """Search for the best of Megatron's own 1F1B, where plans are fastest and even layers come nearest; divide the gain."""
        best = ranked[0]
        near = sorted(self.steps, key=lambda sizes: (_packed_us(self.steps[sizes]), sizes))
        if any(math.isfinite(_packed_us(steps)) for steps in self.steps.values()):
            near = near[:COMPARED]  # otherwise other layers may fit anywhere
        near = list(dict.fromkeys((_bare(best.config), *near)))
        tried: list[tuple[Configuration, Steps]] = [*self.steps.items()]
        for number, sizes in enumerate(near):
            self.say(f"Megatron's own schedule at {number} of {len(near)} sizes searched")
            layouts = (entry.config.stages for entry in ranked if _bare(entry.config) == sizes)
            setting = judge.choices_of(question, sizes, self._shares[sizes.data], layouts)
            tried.append((sizes, setting.steps()))
        firsts = []
        for number in range(3):  # the fastest of all steps with so many causes
            each = [Baseline(own.with_layout(step.layout), step) for own, steps in tried if (step := steps[number]) is not None]
            firsts.append(min(each, key=lambda baseline: (baseline.stock.step_us, baseline.config), default=None))
        packed = firsts[-1]
        again = [packed]
        for sizes in dict.fromkeys((best.config, *([packed.config] if packed else []))):
            setting = judge.choices_of(question, sizes, self._shares[sizes.data], [sizes.stages])
            own = packed.stock if packed and _bare(packed.config) == _bare(sizes) else None
            if (stock := setting.by_chunk(own)) is not None:
                again.append(Baseline(sizes.with_layout(stock.layout), stock))
        by_chunk = min(filter(None, again), key=lambda each: each.stock.step_us, default=None)
        stocks = [None if each is None else each.stock for each in (*firsts, by_chunk)]
        alone = [replace(question, borrowed=())] * bool(question.borrowed)
        plans_us = judge.step_without_shards_us(question, best), *(judge.least_step_us(each, [best.config]) for each in alone)
        return packed, Gain.of(stocks, *plans_us, best.parts.step_us)

    def _refuse(self, config: Configuration, error: InfeasibleError) -> None:
        needed, cap = error.least_cap_bytes, self.question.cap_bytes
        of_cap = f"a replica's share of this batch needs {format_gib(needed, cap)} of {format_gib(cap, needed)}"
        self.refused.append(Misfit(config.name, of_cap if needed else error.message.rstrip(), needed, config))


def _bare(config: Configuration) -> Configuration:
    return replace(config, virtual=1, placement="looped", layers=(), shards_vocabulary=False, latents="")


def _packed_us(steps: Steps) -> float:
    return math.inf if steps[-1] is None else steps[-1].step_us


def _speed(entry: Judged) -> tuple[float, Configuration]:
    return entry.parts.step_us, entry.config


def _simplest_first(entries: list[Judged]) -> list[Judged]:
    """Sort entries by time, but first put the simplest of all that are at most `CLOSE` slower than the fastest."""
    ranked = sorted(entries, key=_speed)
    close = [entry for entry in ranked if entry.parts.step_us <= (1 + CLOSE) * ranked[0].parts.step_us]
    simplest = min(close, key=lambda entry: (entry.config.kinds, _speed(entry)))
    return [simplest, *(entry for entry in ranked if entry is not simplest)]


def _nothing_fits(question: Question, refused: list[Misfit]) -> NothingFitsError:
    sized = (refusal for refusal in refused if refusal.config is not None)
    tight = sorted(sized, key=lambda refusal: (refusal.needed_bytes, refusal.name))
    if not tight:
        lines = "; ".join(f"{refusal.name}: {refusal.why}" for refusal in refused[:3])
        return NothingFitsError(f"no configuration of {question.devices} devices can run. {lines}")
    cap, _, nearest = min((_enough_bytes(question, refusal), refusal.name, refusal) for refusal in tight[:_NEAR])
    assert nearest.config is not None
    gb, device_gb = -(-cap // 2**30), question.cluster.device_memory_gb
    changes = [f"--memory-cap-gb {gb}"] if device_gb is None or gb <= device_gb else []
    if (context := _context_that_fits(question, nearest.config)) is not None:
        changes.append(f"--context {context}")
    if (devices := _enough_devices(question)) is not None:
        changes.append(f"--devices {devices}")
    return NothingFitsError(
        f"nothing fits {format_gib(question.cap_bytes)} per device on {question.devices} devices. Nearest is {nearest.name}: "
        f"{nearest.why}.\nAny of these would do: {', or '.join(changes) or f'devices of {gb} GiB or more'}",
        least_cap_bytes=cap,
    )


def _enough_bytes(question: Question, refused: Misfit) -> int:
    """Smallest memory cap under which a refused configuration fits, of those that it was refused with."""
    assert refused.config is not None
    cap = max(refused.needed_bytes, question.cap_bytes + 1)
    while (again := misfit(replace(question, cap_bytes=cap), refused.config)) is not None:
        cap = max(again.needed_bytes, cap + 1)
    return cap


def _context_that_fits(question: Question, config: Configuration) -> int | None:
    """Largest context, halved repeatedly, with which a configuration fits; None if there is none."""
    context = question.context
    while (context := context // 2) >= config.tensor * config.context:
        shorter = replace(question, context=context, lengths=tuple(min(length, context) for length in question.lengths))
        if misfit(shorter, config) is None:
            return context
    return None


def _enough_devices(question: Question) -> int | None:
    """Smallest multiple of the devices, up to `_MOST_TIMES`, for which a configuration fits; None if there is none."""
    node = question.cluster.devices_per_node
    multiples = (times * question.devices for times in range(2, _MOST_TIMES + 1))
    for devices in (devices for devices in multiples if devices <= node or devices % node == 0):
        more = replace(question, devices=devices)
        if any(misfit(more, config) is None for config in reversed(candidates(more)[0])):
            return devices
    return None
