"""A Megatron model as a pipeline stage, on which the executor runs chunks forward and backward, and snapshots of its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.data.batch import AheadArrays, InputArrays, LossColumns, TrainedTokens
from megatron_epp.mcore.arguments.layout import recipe, row_multiple
from megatron_epp.mcore.model.block_loss import OF_LABELS, AskedOfLogits, BlockLoss, FusedLoss, shard_logits
from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.mcore.model.language_model import axes_of, inside_of, language_model_of, own_positions
from megatron_epp.mcore.model.layer_recompute import begin_graphs, recompute_by_mode
from megatron_epp.mcore.model.losses import check_loss, scale_added_losses, summed_loss
from megatron_epp.mcore.model.replaced import mark, marked, problems
from megatron_epp.mcore.model.trained_rows import rows_to_compute, trained_rows
from megatron_epp.mcore.releases import logged_prediction_losses, logged_router_losses
from megatron_epp.plan import EppError
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.context import ChunkContext

if TYPE_CHECKING:
    from megatron_epp.mcore.model.own_inputs import OwnInputs


_ROUTES, _ROUTERS = "megatron_epp.mcore.model.replayed_routes", "megatron_epp.mcore.patches.routers"
CASTS = "_fp8_workspaces"
"""Attribute of Transformer Engine's layers, a dictionary, in which they keep the casts of their weights (2.0 to 2.20)."""


def add_to_gradients(model: Any, in_fp8: bool) -> None:
    """Make layers add to gradient buffers, which are zero when an iteration begins.

    Transformer Engine's layers with fused accumulation would overwrite them in the backward of the first forward, not of the
    first backward. Raises `EppError` if in FP8 they would then keep casts of other weights for ever.
    """
    for module in model.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = False
            if in_fp8 and not hasattr(module, CASTS):
                raise EppError(f"{type(module).__name__} keeps its weights in FP8 where plans cannot renew them: leave out FP8")


def forget_casts(model: Any) -> None:
    """Make layers cast their weights to FP8 anew in this iteration.

    Transformer Engine's layers renew casts in a first microbatch by themselves, but would then overwrite gradients, too.
    """
    for module in model.modules():
        if casts := getattr(module, CASTS, None):
            casts.clear()


class ChunkInputs(NamedTuple):
    """Inputs of a rank's stages for one chunk: its context-parallel part, on the device. None where no stage reads it."""

    # tokens, position_ids: int64 ``[1, tokens / ranks]``, see `ChunkArrays`; several axes of positions come first
    tokens: Tensor | None = None
    position_ids: Tensor | None = None
    labels: Tensor | None = None  # int64 ``[1, tokens / ranks]``; `loss_mask` likewise, float32
    loss_mask: Tensor | None = None
    rows: Tensor | None = None  # int64 ``[rows]``, the tokens that pass the output layer; None for all
    ahead: AheadArrays | None = None  # ``[depths, 1, tokens / ranks]`` each, inputs of multi-token prediction
    of_loss: TrainedTokens | None = None  # inputs of a loss of the user's for the trained tokens that it gets
    of_inputs: InputArrays | None = None  # inputs of a caller's function that makes input rows, of all tokens of the chunk
    # Int16 ``[experts per token, rows]`` by number of layer: what routers replay, for the rows that they get; of all layers in
    # one tensor while they are uploaded
    routes: Mapping[int, Tensor] | Tensor | None = None

    @property
    def output_share(self) -> float:
        """Share of the chunk's tokens that pass the output layer, known without waiting for the device."""
        assert self.labels is not None  # the rank has the output layer, or a shard of it
        return 1.0 if self.rows is None else self.rows.numel() / self.labels.numel()


@dataclass(slots=True)
class HeadSettings:
    """Settings that features change before `make` makes the last stage.

    With `has_head` that computes logits, all or by blocks; `asked` has the properties of its loss.
    """

    make: Callable[..., MegatronStage]
    has_head: bool = True
    asked: AskedOfLogits = OF_LABELS


class ModelStage:
    """One model chunk of this rank, as Megatron built and wrapped it, the language model of which is `inside`.

    `shards` ranks share the tokens of the hidden states, by sequence and context parallelism.
    """

    has_gradient = True

    def __init__(self, model: torch.nn.Module, inside: Any, config: Any, shards: int) -> None:
        self.model, self.config, self._shards, self._device = model, config, shards, own_device()
        self.weights: Any = getattr(inside, "weight_gradients", None)
        """Weight gradients that backwards leave to other actions (`features.split_weights`); None if they are not split."""
        self.before_last_gradient: Callable[[], None] = lambda: None
        self.reduce_gradients: Callable[[], None] = lambda: None
        begin_graphs(model)
        self._in_fp8 = bool(recipe(config))
        add_to_gradients(model, self._in_fp8)

    def enter(self, before_last_gradient: Callable[[], None], reduce_gradients: Callable[[], None]) -> None:
        """Start an iteration, given methods of `runtime.context.Stage`."""
        self.before_last_gradient, self.reduce_gradients = before_last_gradient, reduce_gradients
        if self.weights is not None:
            self.weights.in_plan = True
        if self._in_fp8:
            forget_casts(self.model)

    def end(self) -> None:
        if self.weights is not None:
            self.weights.in_plan = False

    def release_output(self, output: Tensor) -> None:
        """Free the storage of an output that has been sent, which autograd does not need."""
        deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def message(self, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        """Return shape, dtype and device of hidden states, flattened over the rows of a microbatch."""
        shape = (num_tokens // self._shards, 1, self.config.hidden_size)
        return shape, self.config.pipeline_dtype or torch.float32, self._device


class MegatronStage(ModelStage):
    """A stage of slices. Implements `runtime.context.Stage`.

    A first stage holds the embedding, and `own_inputs` may make its input rows. A last stage computes the loss, by `block_loss`
    or with all logits of a chunk at once, and has `depths` of multi-token prediction. Chunks run the language model in a
    multimodal `model`. `fp32_kv_gradients` is as in `SlicedKVCache`.
    """

    problem = ""
    """Problem of the last iteration's loss; empty for none."""
    asks: LossColumns | None = None
    """Columns of trained tokens that a loss of the user's reads; None for Megatron's loss."""
    gives_values = False
    """True if the model's outputs are values, of which the loss is, and not losses of labels."""
    more_weights: tuple[Tensor, ...] = ()
    """Tensors that the chunk uses like parameters without owning them: the embedding, if shards hold it."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: Any,
        is_first: bool,
        is_last: bool,
        tp_size: int,
        fp32_kv_gradients: str = "auto",
        block_loss: BlockLoss | FusedLoss | None = None,
        own_inputs: OwnInputs | None = None,
    ) -> None:
        self.language_model: Any = language_model_of(model)
        self._called = model if self.language_model is unwrap_model(model) else self.language_model
        self._sequence_shards = tp_size if config.sequence_parallel else 1
        super().__init__(model, self.language_model, config, self._sequence_shards * config.context_parallel_size)
        self.axes, self.own_inputs = axes_of(self.language_model), own_inputs
        self.is_first, self.is_last, self.block_loss = is_first, is_last, block_loss
        if self.has_loss:
            shard_logits(self.language_model)
        of_logits = self.has_loss and not self.gives_values
        self._loss_of_rows = block_loss if block_loss is not None or not of_logits else trained_rows(self.language_model)
        self._of_all_rows = nullcontext if self._loss_of_rows is None else self._loss_of_rows.whole
        self.depths: int = (config.mtp_num_layers or 0) if getattr(self.language_model, "mtp_process", False) else 0
        self.kv_cache = SlicedKVCache(fp32_gradients=fp32_kv_gradients)
        self.loss_report: Tensor | None = None
        self.total_tokens: Tensor | None = None
        self._inputs: Callable[[int], ChunkInputs] | None = None
        self.routed_layers: tuple[int, ...] = ()
        self._routed_chunk: Callable[..., AbstractContextManager[None]] = _plain_chunk
        if getattr(config, "num_moe_experts", None) is not None:
            self.routed_layers = resolve_name(f"{_ROUTES}:routed_layers")(self.decoder)
            self._routed_chunk = resolve_name(f"{_ROUTERS}:chunk_of")
        layers = self.decoder.layers
        # Each layer by itself: `TransformerBlock` recomputes by one setting for all microbatches, plans by chunk and layer.
        recompute_by_mode(layers)
        if own_inputs is not None:
            own_inputs.check(len(layers))
        outside: Any = model
        while self._called is not model and outside is not self.language_model:  # what is around it never runs
            mark(outside, ())
            outside = inside_of(outside)
        if self.token_multiple > 1 and self._routed_chunk is not _plain_chunk:
            resolve_name(f"{_ROUTERS}:need_routing")(model)
        if self.depths:
            resolve_name("megatron_epp.mcore.model.predictions:need_embedding")(model)
        self._replaced = marked(model)
        if obstacle := self.obstacle:
            raise EppError(obstacle)

    @property
    def has_loss(self) -> bool:
        """True if the forward returns a loss, not hidden states."""
        return self.is_last

    @property
    def decoder(self) -> Any:
        """Block of transformer layers."""
        return self.language_model.decoder

    @property
    def obstacle(self) -> str:
        """Problem with what a program has attached or assigned to modules, and plans would not run; empty for none."""
        of_loss = "" if self._loss_of_rows is None else self._loss_of_rows.obstacle
        obstacle = of_loss or next(problems(self.model, self._replaced), "")
        if self.routed_layers and not obstacle:
            return str(resolve_name(f"{_ROUTES}:acting_replay")(self.decoder))
        return obstacle

    @property
    def token_multiple(self) -> int:
        """Multiple of a chunk's tokens: every rank that shares them has as many rows as its products need."""
        return self._shards * row_multiple(self.config)

    @property
    def num_layers(self) -> int:
        """Number of its transformer layers."""
        return len(self.decoder.layers)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """All parameters that the chunk computes with: its own, and weights that another chunk of this rank holds."""
        model = self.language_model
        tied = [model.shared_embedding_or_output_weight()] if self.is_last and model.share_embeddings_and_output_weights else []
        read = [*vars(model)["embedding"].parameters()] if "embedding" in vars(model) else []  # another chunk's (`tie`)
        return (*self.model.parameters(), *tied, *read, *self.more_weights)

    def begin(
        self,
        inputs: Callable[[int], ChunkInputs],
        before_last_gradient: Callable[[], None] = lambda: None,
        reduce_gradients: Callable[[], None] = lambda: None,
    ) -> None:
        """Start an iteration. `inputs` gives a chunk's inputs; the others are methods of `Stage`. Raises `EppError` if
        something is attached to the model that plans would not run (`obstacle`).
        """
        if obstacle := self.obstacle:
            raise EppError(obstacle)
        self._inputs = inputs
        self.loss_report, self.total_tokens = None, None
        self.enter(before_last_gradient, reduce_gradients)

    def forward(self, context: ChunkContext, hidden: Tensor | None) -> Tensor:
        """Return a chunk's hidden states ``[tokens / shards, 1, hidden]``, or on a stage with the loss its sum."""
        assert self._inputs is not None
        inputs = self._inputs(context.chunk)
        self.language_model.set_input_tensor(hidden)
        loss = nullcontext() if self._loss_of_rows is None else self._loss_of_rows.instead(inputs.rows)
        routes = None
        if inputs.routes is not None:
            routes = resolve_name(f"{_ROUTES}:ChunkRoutes")({layer: inputs.routes[layer] for layer in self.routed_layers})
        of_chunk = self._routed_chunk(context.table, self.config, routes)
        ahead = None
        if inputs.ahead is not None:
            from megatron_epp.mcore.model.predictions import ChunkPredictions

            ahead = ChunkPredictions(inputs.ahead, self._of_all_rows)
        params = ChunkParams(context, ahead)
        positions: AbstractContextManager[None] = nullcontext()
        if self.axes > 1:
            positions = own_positions(self.language_model)
            # Some of Megatron-Bridge's attentions rotate what is packed by these being there.
            params.cu_seqlens_q, params.cu_seqlens_kv = context.table.cu_seqlens(self._device)
        forward = timed(self.config.timers, "forward-compute")
        has_autocast = self.config.enable_autocast
        cast = torch.autocast("cuda", self.config.autocast_dtype) if has_autocast else torch.autocast("cpu", enabled=False)
        with forward, cast, loss, of_chunk, positions, self._rows(inputs) as rows:
            arguments = self.arguments(inputs) | ({} if rows is None else {"decoder_input": rows})
            output = self._called(**arguments, attention_mask=None, packed_seq_params=params)
        self.language_model.set_input_tensor(None)  # or it would hold the last one
        # The scale is one for the class, and each backward reads it then: it is the same for all chunks.
        scale_added_losses(self.config, output)
        return self.loss_of(context, inputs, output) if self.has_loss else output

    def loss_of(self, context: ChunkContext, inputs: ChunkInputs, output: Tensor) -> Tensor:
        """Sum the losses of a chunk's tokens as Megatron does, given the model's output."""
        assert inputs.loss_mask is not None  # on the last stage
        return self._loss(output, inputs.loss_mask)

    def start_of_backward(self, context: ChunkContext, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return where a last stage's backward starts, scaled as Megatron scales losses, and the gradient there; None for 1."""
        scale = self.config.grad_scale_func
        return output if scale is None else scale(output), None

    def backward(self, context: ChunkContext, output: Tensor, grad: Tensor | None) -> None:
        """Run a chunk's backward, given ``[tokens / shards, 1, hidden]``."""
        if grad is None:
            output, grad = self.start_of_backward(context, output)
        weights = nullcontext() if self.weights is None else self.weights.backward_of(context.chunk)
        with timed(self.config.timers, "backward-compute"), weights:
            # `release_output` has dropped its storage, and torch compares the shapes of output and gradient; Megatron's
            # function calls the engine without that.
            if grad is not None and output.shape != grad.shape:
                custom_backward(output, grad)
            else:
                torch.autograd.backward(output, grad)

    def arguments(self, inputs: ChunkInputs) -> dict[str, Tensor | None]:
        """Return the inputs of a chunk as arguments of the model; None where this stage does not need them."""
        is_end = self.is_first or self.is_last
        return {
            "input_ids": inputs.tokens if is_end else None,
            "position_ids": inputs.position_ids if is_end or self.axes > 1 else None,
            "labels": inputs.labels if self.is_last and not self.gives_values else None,
            "loss_mask": inputs.loss_mask if self.is_last else None,
        }

    def _rows(self, inputs: ChunkInputs) -> AbstractContextManager[Tensor | None]:
        if inputs.of_inputs is None or self.own_inputs is None:
            return nullcontext()
        return self.own_inputs.entering(inputs.of_inputs, unwrap_model(self.model), self.language_model)

    def rows(self, loss_mask: Tensor) -> Tensor | None:
        """Return the tokens that a last stage multiplies with the output layer, given their mask on the CPU; None for all."""
        if not self.has_loss or self._loss_of_rows is None:
            return None
        layer: Any = self.language_model.output_layer
        return rows_to_compute(loss_mask, layer.output_size_per_partition, layer.input_size)

    def _loss(self, losses: Tensor, loss_mask: Tensor) -> Tensor:
        loss, num_tokens, values = summed_loss(loss_mask, losses)
        self._report(values, num_tokens)
        return loss

    def _report(self, values: Tensor, num_tokens: Tensor) -> None:
        self.loss_report = values if self.loss_report is None else self.loss_report + values
        self.total_tokens = num_tokens if self.total_tokens is None else self.total_tokens + num_tokens

    def end(self) -> None:
        """Release the iteration's inputs, and check its loss once, since a check of every chunk would make the host wait."""
        self._inputs = None
        super().end()
        if self.loss_report is not None:
            check_loss(self.loss_report[0], "this iteration")


def _plain_chunk(*_: Any) -> AbstractContextManager[None]:
    """Return the context of a chunk in a model without routers."""
    return nullcontext()


def own_device() -> torch.device:
    """Return the device on which this process computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


@contextmanager
def timed(timers: Any, name: str, log_level: int = 2, **start: Any) -> Iterator[None]:
    """Run a block under one of Megatron's timers, if given, logged from `log_level` on, which goes on if the block fails."""
    if timers is not None:
        timers(name, log_level=log_level).start(**start)
    yield
    if timers is not None:
        timers(name).stop()


class Snapshot:
    """Copy of random states, models' buffers and sums of losses. Gradients, as large as the model, are zeroed instead."""

    def __init__(self, models: Sequence[Any]) -> None:
        self._models = models
        # Megatron's wrapper has its own `buffers`.
        self._buffers = [(buffer, buffer.clone()) for model in models for buffer in torch.nn.Module.buffers(model)]
        self._logged = {key: values.clone() for key, values in _logged().items()}
        self._cpu, self._tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Restore the copied state and zero gradients. Call it outside the models' `no_sync`, which zeroing ends."""
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for key, values in _logged().items():
            values.copy_(self._logged.get(key, torch.zeros_like(values)))
        for model in self._models:
            if hasattr(model, "zero_grad_buffer"):
                model.zero_grad_buffer()
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        get_cuda_rng_tracker().set_states(self._tracked)


def _logged() -> dict[Any, Tensor]:
    return {**logged_router_losses(), **logged_prediction_losses()}
