"""Buffer of the flex dispatcher, by which ranks exchange the tokens of experts with DeepEP or HybridEP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_epp.mcore.arguments.layout import token_shards
from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.mcore.model.kinds import flex_backend

if TYPE_CHECKING:
    from megatron_epp.data.batch import GlobalBatch
    from megatron_epp.mcore.iteration.base_run import Run


class ExchangeBuffer:
    """The buffer by which all layers of experts in this rank's model chunks exchange tokens with DeepEP or HybridEP."""

    def __init__(self, models: Iterable[torch.nn.Module], device: torch.device) -> None:
        layers = (module for model in models for module in model.modules() if flex_backend(getattr(module, "config", None)))
        dispatchers = (getattr(layer, "token_dispatcher", None) for layer in layers)
        self._managers: dict[str, Any] = {flex_backend(d.config): d._comm_manager for d in dispatchers if d is not None}
        self._num_tokens, self._device = 0, device

    @property
    def follows_chunks(self) -> bool:
        """True if its size follows from the largest chunk: HybridEP's."""
        return "hybridep" in self._managers

    def allocate(self) -> None:
        """Allocate DeepEP's buffer, whose size follows from the hidden size alone. A collective call of ranks that exchange."""
        if (manager := self._managers.get("deepep")) is None:
            return
        from megatron.core.transformer.moe import fused_a2a

        config = manager.config
        token = torch.empty(1, config.moe_latent_size or config.hidden_size, dtype=config.params_dtype, device="meta")
        fused_a2a.get_buffer(manager.group, fused_a2a.get_hidden_bytes(token))

    def reserve(self, num_tokens: int, spare_bytes: int) -> None:
        """Allocate the buffer ahead of an iteration that needs a larger one, or whose plan has no room for a larger earlier
        one.

        A collective call of the ranks that exchange: in an exchange it would grow while chunks are in flight whose handles are
        of the smaller one. It holds the largest `num_tokens` of a rank's chunks. `spare_bytes` are of the cap, and never filled
        by a plan.
        """
        manager = self._managers["hybridep"]
        from megatron.core.transformer.moe import fused_a2a

        config, most = manager.config, torch.tensor([num_tokens, -spare_bytes], device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX, manager.group)
        num_tokens, spare_bytes = int(most[0]), -int(most[1])
        num_tokens += -num_tokens % fused_a2a.HYBRIDEP_TOKEN_ALIGNMENT
        token_bytes = manager.group.size() * (config.moe_latent_size or config.hidden_size) * config.params_dtype.itemsize
        if 0 <= (self._num_tokens - num_tokens) * token_bytes <= spare_bytes:
            return
        self._num_tokens = num_tokens
        fused_a2a.reset_hybrid_ep_buffer()  # ahead of its successor, so that both are never there at once
        fused_a2a.init_hybrid_ep_buffer(
            manager.group,
            config.moe_latent_size or config.hidden_size,
            num_tokens,
            manager.num_local_experts,
            config.moe_flex_dispatcher_num_sms,
            config.moe_flex_dispatcher_num_sms,
            config.moe_hybridep_num_blocks_permute,
            config.moe_hybridep_num_blocks_unpermute,
            num_sms_preprocessing_api=config.moe_hybridep_num_sms_preprocessing,
        )


class RunExchanges(RunFeature):
    """The exchange buffer of a run, which follows the largest chunk of each plan."""

    def __init__(self, run: Run) -> None:
        self._run, self._shards = run, token_shards(run.args)
        self._buffer = ExchangeBuffer((stage.model for stage in run.stages.values()), run.device)

    def allocate(self) -> None:
        self._buffer.allocate()

    def before(self, batch: GlobalBatch) -> None:
        plan, rank = batch.plan, self._run.rank
        if plan is None or not self._buffer.follows_chunks:
            return
        largest = max(plan.padded_tokens(chunk) for chunk in range(len(plan.chunks)))
        with self._run.watching("waits for the largest chunk of ranks that share experts"):
            self._buffer.reserve(largest // self._shards, plan.cap_bytes[rank] - plan.predicted.peak_bytes[rank])
