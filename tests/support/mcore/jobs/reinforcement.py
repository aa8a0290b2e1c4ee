"""Loops of reinforcement learning around Megatron's schedules: frameworks' iterators, and replicas that share experts.

Jobs of `test_user_microbatches.py`, in the manner of `frameworks`.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_epp
from tests.support.mcore.jobs import frameworks
from tests.support.mcore.jobs.frameworks import RUNS, apart, batches, begin, megatrons_schedule, outputs

UNLIKE = ((24, 8, 32, 16, 12, 36), (8, 40, 16, 20, 24, 12))
"""Lengths of the microbatches of two replicas that share experts."""


def _noting(data: Iterator[Any], ran: list[int]) -> Iterator[Any]:
    for item in data:
        ran.append((item["tokens"] if isinstance(item, dict) else item.tokens).shape[1])
        yield item


def shared_experts() -> list[dict[str, Any]]:
    """Train two replicas that share experts and have microbatches of other lengths.

    Returns the largest relative difference of this rank's gradients from those of Megatron's own schedule in every call, and
    the order in which its microbatches ran.
    """
    loop = begin(UNLIKE[0], 2, replicas=2, expert_parallel=2, num_experts=4, moe_router_topk=2, add_bias_linear=False)
    from megatron.core import parallel_state

    replica = parallel_state.get_data_parallel_rank()
    loop.batches = partial(batches, UNLIKE[replica], seed=5 + replica)
    _, expected = loop.run(megatrons_schedule())
    schedule, found = megatron_epp.wrap(), []
    ran: list[int] = []
    step = loop.forward_step
    loop.forward_step = lambda data, model: step(_noting(data, ran), model)
    for _ in range(RUNS):
        ran.clear()
        _, gradients = loop.run(schedule)
        found.append({"rank": dist.get_rank(), "worst": apart(gradients, expected), "lengths": list(ran)})
    return found


PADDED = 8
"""Tokens to a multiple of which `Reader` pads each microbatch."""


class Reader:
    """Columns of microbatches of two samples each, padded together, and read one after the other from `offset` on; a caller
    reads a second time with other keys.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        made = torch.Generator().manual_seed(7)
        samples = [[length // 4, length - length // 4 - 3] for length in lengths]
        tokens = [torch.randint(64, (1, sum(of) + 3), generator=made) for of in samples]
        pairs = enumerate(zip(samples, tokens, strict=True))
        self.columns = [{"total_lengths": of, "tokens": own, "rewards": 1.0 + number} for number, (of, own) in pairs]
        self.offset = 0

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        self.offset += 1
        return {key: self.columns[self.offset - 1][key] for key in keys}


def read_by_get_next(stages: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Learn by reinforcement from microbatches of several samples, read by `get_next(keys)`; the loss gets their number.

    Plans are switched on as slime switches them on: by an environment variable and the hook that it calls.

    Returns for each run of a plan the largest relative difference of gradients from stock's, the results, and where iterators
    stand; and what a forward pass collects.
    """
    loop = begin(lengths, stages)
    from megatron_epp.callers import VARIABLE, slime

    for model in loop.models:
        model.parallel_output = False
    readers: list[Reader] = []

    def read() -> Reader:
        readers.append(Reader(lengths))
        return readers[-1]

    loop.batches, loop.forward_step = read, partial(rewarded_step, len(lengths))
    more = {"decoder_seq_length": 1}
    wanted = loop.run(megatrons_schedule(), **more)
    with torch.no_grad():
        by_stock = loop.run(megatrons_schedule(), forward_only=True, collect_non_loss_data=True, **more)[0]
    os.environ[VARIABLE] = "1"
    slime.init(Namespace(tensor_model_parallel_size=1, data_pad_size_multiplier=PADDED))
    planned = megatrons_schedule()
    runs = []
    for _ in range(RUNS):
        readers.clear()
        results, gradients = loop.run(planned, **more)
        offsets = [reader.offset for reader in readers]
        runs.append({"worst": apart(gradients, wanted[1]), "results": results, "offsets": offsets})
    with torch.no_grad():
        by_plans = loop.run(planned, forward_only=True, collect_non_loss_data=True, **more)[0]
    return {"runs": runs, "stock": wanted[0], "samples": by_plans, "samples by stock": by_stock}


def rewarded_step(num_microbatches: int, data_iterator: Reader, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    batch = data_iterator.get_next(["tokens", "total_lengths", "rewards"])
    return outputs(model, batch["tokens"]), partial(rewarded_loss, batch, num_microbatches)


def rewarded_loss(batch: dict[str, Any], num_microbatches: int, logits: Tensor, non_loss_data: bool = False) -> Any:
    """Return minus the rewarded log-probability of each sample, as Megatron divides by the number of microbatches."""
    chosen = torch.log_softmax(logits.float(), -1).gather(-1, batch["tokens"][..., None]).squeeze()
    of_samples = torch.stack([one.mean() for one in chosen[: sum(batch["total_lengths"])].split(batch["total_lengths"])])
    if non_loss_data:
        return of_samples.tolist()
    value = -batch["rewards"] * of_samples.mean() * num_microbatches
    return value, torch.tensor(1, dtype=torch.int), {"reward": batch["rewards"], "loss": float(value)}


@dataclass(frozen=True)
class Processed:
    """A microbatch of packed samples as a generator of NeMo-RL's gives it: an object, whose samples are padded one by one."""

    tokens: Tensor
    lengths: list[int]
    cu_seqlens_padded: Tensor


def processed(lengths: Sequence[int]) -> Iterator[Processed]:
    """Yield microbatches of two samples, each padded to a multiple of 4."""
    made = torch.Generator().manual_seed(9)
    for length in lengths:
        of = [length // 4 - 1, length - length // 4 - 2]
        sizes = [-(-one // 4) * 4 for one in of]
        ends = torch.tensor([0, sizes[0], sum(sizes)], dtype=torch.int32)
        yield Processed(torch.randint(64, (1, sum(sizes)), generator=made), of, ends)


def processed_step(data: Iterator[Processed], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    item = next(data)

    def loss_of(logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
        chosen = torch.log_softmax(logits.float(), -1).gather(-1, item.tokens[..., None]).squeeze()
        starts = item.cu_seqlens_padded.tolist()
        of = [chosen[start : start + length] for start, length in zip(starts, item.lengths, strict=False)]
        return -torch.cat(of).mean(), {"logprobs": [one.tolist() for one in of]}

    return outputs(model, item.tokens), loss_of


def of_processed(lengths: Sequence[int]) -> dict[str, Any]:
    """Train and evaluate a model that is in no list on the items of a generator, whose lengths only the items know.

    Returns for each run of a plan the largest relative difference of gradients from those of Megatron's own schedule, and the
    results in the caller's order; and the tokens of microbatches in the order in which they ran.
    """
    loop = begin(lengths)
    (model,), ran = loop.models, list[int]()
    model.parallel_output = False

    loop.batches = partial(processed, lengths)
    loop.forward_step = lambda data, given: processed_step(_noting(data, ran), given)
    wanted = loop.run(megatrons_schedule())
    frameworks.with_fixed_times({"forward": 100.0, "backward": 200.0})
    megatron_epp.install()
    runs = []
    for _ in range(RUNS):
        ran.clear()
        results, gradients = loop.run(megatrons_schedule())
        runs.append({"worst": apart(gradients, wanted[1]), "results": results, "ran": list(ran)})
    with torch.no_grad():
        evaluated = loop.run(megatrons_schedule(), forward_only=True)[0]
    return {"runs": runs, "stock": wanted[0], "evaluated": evaluated}
