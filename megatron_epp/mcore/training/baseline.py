"""Megatron's own schedules on the same documents, for comparison: `--epp-schedule stock|whole|padded|packed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from megatron_epp.mcore.arguments.layout import token_multiple
from megatron_epp.mcore.iteration import sliced_run
from megatron_epp.mcore.iteration.report import IterationReport, count_tokens
from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.mcore.model.losses import token_loss
from megatron_epp.mcore.model.predictions import ChunkPredictions
from megatron_epp.mcore.model.stage import ChunkInputs
from megatron_epp.mcore.patches.routers import chunk_of
from megatron_epp.mcore.patches.stock_functions import FORWARD_STEP, require_stock
from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.first_fit import pack_whole
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.context import ChunkContext


def microbatches(lengths: tuple[int, ...], schedule: str, seq_length: int) -> Sequence[Chunk]:
    """Divide a batch into microbatches of whole documents: one each, or ``packed`` up to `seq_length` tokens by first fit."""
    if schedule != "packed":
        return [Chunk((Segment(i, 0, n),)) for i, n in enumerate(lengths)]
    return pack_whole(lengths, seq_length)


def baseline_schedule(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of Megatron's schedule functions so that it draws documents from our iterators."""

    def forward_backward(**call: Any) -> Any:
        require_stock({FORWARD_STEP: call["forward_step_func"]})
        run = sliced_run.current()
        args = run.args
        models = call["model"] if isinstance(call["model"], list) else [call["model"]]
        iterators = call["data_iterator"]
        config = get_model_config(models[0])
        run.attach(models, config)
        batch = next(iterators[0] if isinstance(iterators, list) else iterators)
        chunks = microbatches(batch.lengths, args.epp_schedule, args.seq_length)
        fixed = args.epp_schedule in ("padded", "packed")
        # Megatron sets this flag to False whatever the user says, and reads it at every message.
        # On the model's config, which schedules read; in its constructor it is refused with the default dispatcher of experts.
        config.variable_seq_lengths = not fixed
        if len(models) > 1 and not torch.cuda.is_initialized():
            # Megatron's interleaved schedule frees a message while it is on its way, which only NCCL has waited for.
            config.deallocate_pipeline_outputs = False
        if args.epp_recompute not in ("auto", "0"):
            for own in map(get_model_config, models):
                own.recompute_granularity, own.recompute_method = "full", "block"
                own.recompute_num_layers = int(args.epp_recompute)
        multiple = args.seq_length if fixed else token_multiple(args)
        tables = [SegmentTable.build(chunk, chunk.padded_tokens(multiple)) for chunk in chunks]
        assert run.inputs is not None  # since `attach`
        depths = 0 if args.epp_schedule == "stock" else run.inputs.depths  # Megatron looks ahead in a sequence by itself
        arrays = (batch.chunk_of(chunk.segments, multiple, depths) for chunk in chunks)
        inputs = run.inputs.upload(arrays, batch.lengths, tables)
        inputs.upload.wait()
        if not call["forward_only"]:
            count_tokens(inputs)
        report = IterationReport.begin(run, batch, call["forward_only"])
        data = [((table, inputs.chunk(number)) for number, table in enumerate(tables)) for _ in models]
        call |= {
            "forward_step_func": forward_step,
            "data_iterator": data if len(data) > 1 else data[0],
            "num_microbatches": len(chunks),
        }
        report.count_saved_tensors(inputs.upload.buffer, call["forward_only"])
        with report.saved or nullcontext():
            losses = stock(**call)
        report.log_previous_and_begin(sum(entry["lm loss"] for entry in losses) if losses else None)
        return losses

    return forward_backward


def forward_step(
    data_iterator: Iterator[tuple[SegmentTable, ChunkInputs]], model: torch.nn.Module
) -> tuple[Tensor, Callable[..., Any]]:
    """Run one microbatch through this stage, as a forward step function of Megatron's schedules."""
    run = sliced_run.current()
    stage = run.placement.stages(run.rank)[get_attr_wrapped_model(model, "vp_stage") or 0]
    table, inputs = next(data_iterator)
    ahead = None if inputs.ahead is None else ChunkPredictions(inputs.ahead)
    params = None if run.args.epp_schedule == "stock" else ChunkParams(ChunkContext(0, table, SlicedKVCache()), ahead)
    with chunk_of(table, get_model_config(model)):
        output = model(**run.stages[stage].arguments(inputs), attention_mask=None, packed_seq_params=params)
    loss_mask: Any = inputs.loss_mask  # which the last stage has, where Megatron calls the loss
    return output, partial(token_loss, loss_mask)
