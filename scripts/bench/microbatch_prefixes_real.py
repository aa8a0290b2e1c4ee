"""Trains packed microbatches of groups of samples by Megatron's 1F1B and by plans, with and without shared prefixes, in turn.

    taskset -c 0,1 python -m scripts.bench.microbatch_prefixes_real

Two ranks run a small GPT of Megatron's on a core of their own each, all schedules in the same processes. Losses read the logits
of responses. Costs are learnt. Times are of whole calls of a batch whose plan is known, and the median of all rounds counts.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.contrib.demos.rounds import turns
from megatron_epp.mcore.pinned import pin
from megatron_epp.runtime.links.processes import run_ranks
from scripts.bench.frame import Bench, Figures
from scripts.bench.microbatch_prefixes import balanced
from scripts.bench.trees_real import HEADS, HIDDEN, LAYERS, VOCABULARY, Groups, groups
from scripts.demo_rl.engine import packed_attention
from scripts.tables import table
from scripts.tiny_stage import config_of, stage_of

SCHEDULES = "1F1B", "separate", "shared"
LEARNING = 6
"""Calls of each schedule before the first that counts, from which plans learn costs."""
BUDGET = 1024
"""Most tokens of a microbatch."""
CASES = {"GRPO, 8 groups of 8": groups(8, 8, 96, 192), "GRPO, long prompts": groups(4, 8, 512, 192)}

Item = dict[str, Any]


def run(rank: int, batch: Groups, rounds: int) -> dict[str, Any]:
    """Train a batch by each schedule, `rounds` times after those that learn costs; return the seconds and the mean losses of
    each, and planned makespans.
    """
    pin(rank)
    import megatron_epp
    from megatron_epp.mcore import entry

    entry.prepare()
    logging.getLogger("megatron_epp").setLevel(logging.WARNING)
    model, items = _stage(), _items(batch)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    plans = {name: megatron_epp.wrap(unread_of=_unread, share_prefixes=name == "shared") for name in SCHEDULES[1:]}
    schedules: dict[str, Callable[..., Any]] = {SCHEDULES[0]: get_forward_backward_func(), **plans}
    times_s: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    losses: dict[str, float] = {}
    for order in turns(SCHEDULES, LEARNING + rounds):
        for name in order:
            model.zero_grad()
            dist.barrier()
            start_s = time.perf_counter()
            results = schedules[name](
                forward_step_func=_step,
                data_iterator=iter(items),
                model=model,
                num_microbatches=len(items),
                seq_length=1,
                micro_batch_size=1,
            )
            dist.barrier()
            times_s[name].append(time.perf_counter() - start_s)
            losses[name] = sum(result["loss"] for result in results)
    planned = {name: schedule._runs[0]._last[1].plan.predicted.makespan_us / 1e6 for name, schedule in plans.items()}
    return {"times_s": {name: median(own[LEARNING:]) for name, own in times_s.items()}, "losses": losses, "planned": planned}


def _stage() -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    DotProductAttention.forward = packed_attention
    config = config_of(LAYERS, HIDDEN, HEADS, apply_rope_fusion=False, deallocate_pipeline_outputs=True)
    return stage_of(config, get_gpt_layer_local_spec(), VOCABULARY, 4096, position_embedding_type="rope")


def _items(batch: Groups) -> list[Item]:
    draw, samples = torch.Generator().manual_seed(3), list[tuple[int, Tensor]]()
    for prompt, responses in batch:
        first = torch.randint(VOCABULARY, (prompt,), generator=draw)
        samples += [(prompt, torch.cat([first, torch.randint(VOCABULARY, (size,), generator=draw)])) for size in responses]
    items = list[Item]()
    for members in balanced([len(tokens) for _, tokens in samples], BUDGET):
        own = [samples[q] for q in members]
        ends = torch.tensor([0, *(len(tokens) for _, tokens in own)]).cumsum(0).int()
        items.append(
            {"tokens": torch.cat([tokens for _, tokens in own])[None], "cu_seqlens": ends, "prompts": [p for p, _ in own]}
        )
    return items


def _unread(item: Item) -> list[int]:
    return [prompt - 1 for prompt in item["prompts"]]


def _step(iterator: Iterator[Item], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    from megatron.core.packed_seq_params import PackedSeqParams

    item = next(iterator)
    tokens, ends = item["tokens"], item["cu_seqlens"]
    longest = int(ends.diff().max())
    output = model(
        tokens, None, None, packed_seq_params=PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    )
    return output, partial(_loss, tokens[0], ends.tolist(), item["prompts"])


def _loss(tokens: Tensor, ends: Sequence[int], prompts: Sequence[int], logits: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Return the mean cross entropy of the tokens of responses."""
    rows = torch.cat(
        [torch.arange(start + prompt - 1, end - 1) for start, end, prompt in zip(ends, ends[1:], prompts, strict=False)]
    )
    loss = torch.nn.functional.cross_entropy(logits[0, rows], tokens[rows + 1])
    return loss, {"loss": float(loss.detach())}


def row(args: Namespace, batch: Groups) -> Figures:
    ranks: list[dict[str, Any]] = run_ranks(run, 2, batch, args.rounds)
    return {"times_s": ranks[0]["times_s"], "planned": ranks[0]["planned"], "losses": ranks[-1]["losses"]}


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    lines = []
    for each in rows:
        own, planned, losses = each["times_s"], each["planned"], each["losses"]
        ratios = own["1F1B"] / own["shared"], own["separate"] / own["shared"], planned["separate"] / planned["shared"]
        differs = max(abs(losses[name] / losses["1F1B"] - 1) for name in losses)
        lines.append(
            [each["case"], *(f"{own[name]:.3f}" for name in SCHEDULES), *(f"{ratio:.2f}" for ratio in ratios), f"{differs:.1e}"]
        )
    columns = *(f"{name}, s" for name in SCHEDULES), "1F1B / shared", "separate / shared", "planned", "losses differ by"
    return table(["batch", *columns], lines)


BENCH = Bench(
    about=__doc__,
    cases=lambda args: CASES,
    row=row,
    text=text,
    flags={"rounds": {"type": int, "default": 10, "help": "times that every schedule trains every batch (default 10)"}},
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
