"""Training steps of ms-swift and of Megatron-Bridge: the same batches by Megatron's own schedule and by plans.

Jobs of `tests/callers`: the functions `swift` and `bridge`. The frameworks' folders have to be there (`scripts/callers.sh`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.mcore import entry
from scripts.demo_rl import engine
from tests.support.mcore.absent_packages import stand_ins
from tests.support.mcore.jobs.frameworks import apart, with_fixed_times

MICROBATCHES = 8
"""Of a replica."""
SEQUENCES = 4
"""Of a microbatch, packed."""
BATCHES = 8
"""Each is trained once by either schedule; costs are learnt in the first four."""
US_PER_TOKEN = {"forward": 100.0, "backward": 200.0}
COMMON = 40
"""Tokens of the prompts of groups: enough to be shared."""
PLUGIN = Path("megatron_epp/callers/plugin.py")
ForwardStep = Callable[..., Any]


@dataclass
class Trainer:
    """A framework on one rank: its training step, which returns the losses that it reports, the chunks of its model, and the
    tokens of microbatches in the order in which forward steps have taken them.
    """

    step: Callable[[Iterator[dict[str, Any]]], list[float]]
    models: list[Any]
    ran: list[int]

    def run(self, batch: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what a training step reports, the gradients, and the order in which its microbatches ran."""
        self.ran.clear()
        losses = self.step(iter([dict(one) for one in batch]))  # the forward steps take columns out of their microbatches
        gradients = [one.main_grad.clone() for model in self.models for one in model.parameters() if one.requires_grad]
        return {"losses": losses, "gradients": gradients, "order": list(self.ran)}


def compared(trainer: Trainer, batches: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Take training steps by plans, which a plugin has installed, then by Megatron's own schedule, without an update.

    Returns for every batch the largest relative difference of gradients, what was reported by both, and the tokens of
    microbatches in the order in which both ran them; whether plans had been installed; and whether the rank reports losses.
    """
    from megatron.core import parallel_state

    from megatron_epp.mcore.iteration.wrap import _installed, uninstall

    was_installed = bool(_installed)
    planned = [trainer.run(batch) for batch in batches]
    uninstall()
    pairs = zip(planned, [trainer.run(batch) for batch in batches], strict=True)
    batches = []
    for ours, theirs in pairs:
        told = {name: (ours[name], theirs[name]) for name in ("losses", "order")}
        batches.append({"gradients": apart(ours["gradients"], theirs["gradients"])} | told)
    return {"installed": was_installed, "reports": parallel_state.is_pipeline_last_stage(), "batches": batches}


def begun(
    stages: int, expert_parallel: int, *, loss_per_token: bool = True, change: Callable[[Any], object] | None = None
) -> tuple[engine.Size, Any]:
    """Prepare Megatron on this rank; return the sizes of a model and this rank's stage of it. For fine-tuning the loss of both
    is a sum over tokens.
    """
    entry.prepare()
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages, expert_model_parallel_size=expert_parallel)
    model_parallel_cuda_manual_seed(1)
    with_fixed_times(US_PER_TOKEN)
    shared = {"experts": 4, "expert_parallel": expert_parallel} if expert_parallel > 1 else {}
    size = engine.Size(stages=stages, **shared)
    return size, engine.pipeline_stage(size, change, calculate_per_token_loss=loss_per_token)


def filled(model: Any) -> None:
    """Fill what trains of a model with numbers, since adapters begin with a matrix of zeros, and all but it is frozen."""
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    assert names
    assert all("adapter" in name or "lora" in name for name in names)
    random = torch.Generator().manual_seed(3)
    for one in model.parameters():
        if one.requires_grad:
            one.data.normal_(0.0, 0.05, generator=random)


def noted(step: ForwardStep, ran: list[int]) -> ForwardStep:
    def forward_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> Any:
        item = next(data_iterator)
        ran.append(next(item[name].numel() for name in ("tokens", "input_ids") if name in item))
        return step(iter([item]), model)

    return forward_step


def packed(size: engine.Size, replica: int, replicas: int, group: int = 1) -> Iterator[list[tuple[list[int], Tensor]]]:
    """Yield this replica's batches: lengths and tokens of packed microbatches, so many sequences with the same prompt."""
    for seed in range(BATCHES):
        count = MICROBATCHES * SEQUENCES * replicas
        tokens = engine.drawn(count, size.longest, size.vocabulary, seed).part(replica, replicas).tokens
        tokens = [*engine.in_groups(tokens, group)]
        parts = [tokens[first : first + SEQUENCES] for first in range(0, len(tokens), SEQUENCES)]
        yield [([len(one) for one in part], torch.cat(part)[None]) for part in parts]


def positions(lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def replica_of_all() -> tuple[int, int]:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


def with_swifts_adapters(model: Any) -> None:
    """Put ms-swift's adapters beside all matrices of a model's layers, and freeze the rest, by its own function."""
    with of_swift():
        from mcore_bridge.tuners import lora, patcher
        from swift.megatron.utils.utils import prepare_adapter
    from megatron.core.tensor_parallel import ColumnParallelLinear

    # As where Megatron's own layers are in the place of Transformer Engine's, which it has for Ascend's devices.
    lora.is_torch_npu_available = patcher.is_torch_npu_available = lambda: True
    for module in (lora, patcher):
        for name in [name for name, one in vars(module).items() if name.startswith("TE") and not isinstance(one, type)]:
            setattr(module, name, type(name, (), {}))
    lora.TEColumnParallelLinear = ColumnParallelLinear
    model.prepare_inputs_for_generation = None  # which models of mcore-bridge have
    prepare_adapter(SimpleNamespace(**OF_ADAPTERS), model)
    filled(model)


OF_ADAPTERS = {
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "modules_to_save": [],
    "task_type": "causal_lm", "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_bias": "none", "lora_dtype": None,
    "use_rslora": False, "mcore_ref_adapter": None, "ref_adapters": [],
}  # fmt: skip


def of_swift() -> AbstractContextManager[None]:
    engine.reachable("swift")
    return stand_ins("transformer_engine", "einops", "aiohttp", extensions=True)


def swift(
    stages: int, expert_parallel: int = 1, has_preferences: bool = False, has_adapters: bool = False, group: int = 1
) -> dict[str, Any]:
    """Train by the step of ms-swift's trainer, with its data of packed sequences and its loss (with preferences that of DPO,
    and another model of reference in each stage); see `compared`.
    """
    import megatron_epp
    from megatron_epp.mcore import cpu

    change = with_swifts_adapters if has_adapters else None
    if group > 1:
        engine.PROMPT = COMMON
    size, model = begun(stages, expert_parallel, loss_per_token=not has_preferences, change=change)
    with of_swift():
        from swift.megatron.trainers.dpo_trainer import DummyDPOTrainer, MegatronDPOTrainer
        from swift.megatron.trainers.trainer import MegatronTrainer
        from swift.utils import import_external_file
    replica, replicas = replica_of_all()
    kind = MegatronDPOTrainer if has_preferences else MegatronTrainer
    trainer = kind.__new__(kind)  # whose constructor would load weights
    trainer.args = SimpleNamespace(
        task_type="causal_lm",
        num_microbatches=MICROBATCHES,
        seq_length=size.longest,
        micro_batch_size=1,
        global_batch_size=MICROBATCHES * replicas,
        pipeline_model_parallel_size=stages,
        context_parallel_size=1,
        padding_free=True,
        enable_dft_loss=False,
        enable_channel_loss=False,
        **OF_PREFERENCES,
    )
    trainer.wrapped_models, trainer.optimizer = [model], engine.GradientsKept()
    trainer.opt_param_scheduler = SimpleNamespace(step=lambda increment: None)
    trainer.enable_routing_replay = False
    if has_preferences:
        trainer.dummy_dpo_trainer = DummyDPOTrainer(trainer.args)
        trainer.ref_models = [engine.pipeline_stage(size).module.requires_grad_(False).eval()]
        trainer._all_reduce_metric = partial(cpu._averaging_by_sums, trainer._all_reduce_metric)
        model.module.get_input_tensor = lambda: model.module.decoder.input_tensor  # as models of mcore-bridge have it
        megatron_epp.install(shape_of=lambda item: 2 * item["seq_lens"])
    else:
        import_external_file(str(PLUGIN))  # as `--external_plugins` does
    ran: list[int] = []
    trainer.forward_step = noted(trainer.forward_step, ran)

    def step(batch: Iterator[dict[str, Any]]) -> list[float]:
        metrics, _, was_updated = trainer.train_step(batch)
        assert was_updated
        reported: dict[str, Any] = {}
        trainer._aggregated_metrics(metrics, reported)
        of_step = reported["loss"].tolist() if metrics else []
        # That of a microbatch is in DPO a mean with those which other replicas run in the same turn.
        return of_step + [value for one in metrics if not has_preferences for value in one["loss"].tolist()]

    def columns(lengths: list[int], tokens: Tensor) -> dict[str, Any]:
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(positions(lengths) < engine.PROMPT, -100),
            "loss_scale": torch.linspace(0.5, 1.5, tokens.shape[1])[None],
            "position_ids": positions(lengths),
            "seq_lens": lengths,
        }

    batches = [[columns(*one) for one in batch] for batch in packed(size, replica, replicas, group)]
    return compared(Trainer(step, [model], ran), batches)


OF_PREFERENCES = {
    "tuner_type": "full", "mcore_ref_adapter": None, "ref_adapters": [], "reference_free": False, "label_smoothing": 0.0,
    "f_divergence_type": "reverse_kl", "loss_type": ["sigmoid"], "beta": 0.1, "rpo_alpha": None,
}  # fmt: skip


def with_bridges_adapters(model: Any) -> None:
    """Put Megatron-Bridge's adapters beside all matrices of a model's layers, and freeze the rest, by its own class."""
    with of_bridge():
        from megatron.bridge.peft import utils
        from megatron.bridge.peft.lora import LoRA
    utils.HAVE_TE = False  # which it takes from names that Megatron has without it, too
    LoRA(dim=4, alpha=8)(model, training=True)
    filled(model)


def of_bridge() -> AbstractContextManager[None]:
    engine.reachable("bridge", "megatron.bridge")
    absent = ("transformer_engine", "modelopt", "megatron.energon", "einops", "tensorboard")
    return stand_ins(*absent, "transformers.modeling_attn_mask_utils")


def bridge(stages: int, expert_parallel: int = 1, has_adapters: bool = False) -> dict[str, Any]:
    """Train by Megatron-Bridge's step, with its forward step for packed sequences and its loss; see `compared`."""
    size, model = begun(stages, expert_parallel, change=with_bridges_adapters if has_adapters else None)
    with of_bridge():
        from megatron.bridge.training import config, gpt_step, train
        from megatron.bridge.training.initialize import init_rerun_state
        from megatron.bridge.training.state import GlobalState
        from megatron.bridge.training.utils.train_utils import prepare_forward_step_func
    train.get_tensor_shapes_adjust_fn_for_distillation = lambda *rest, **named: None  # modelopt's, without distillation
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    import megatron_epp.callers.plugin  # noqa: F401 - as in a script that trains

    replica, replicas = replica_of_all()
    everything = MICROBATCHES * replicas
    init_num_microbatches_calculator(dist.get_rank(), None, everything, 1, replicas)
    state = GlobalState()
    state.cfg = SimpleNamespace(
        train=config.TrainingConfig(micro_batch_size=1, global_batch_size=everything),
        optimizer=config.OptimizerConfig(),
        ddp=SimpleNamespace(overlap_param_gather=False),
        model=SimpleNamespace(seq_length=size.longest),
        dataset=SimpleNamespace(dataloader_type="external", enable_in_batch_packing=True),
        dist=config.DistributedInitConfig(),
        rerun_state_machine=config.RerunStateMachineConfig(),
        logger=config.LoggerConfig(),
        data_parallel_size=replicas,
    )
    init_rerun_state(state.cfg.rerun_state_machine)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    messages = P2PCommunicator(pp_group=groups.pp, config=model.config)
    ran: list[int] = []
    forward_step = noted(prepare_forward_step_func(gpt_step.forward_step, state), ran)
    scheduler = SimpleNamespace(step=lambda increment: None)

    def step(batch: Iterator[dict[str, Any]]) -> list[float]:
        schedule = get_forward_backward_func(pp_size=stages, vp_size=None)
        optimizer = engine.GradientsKept()
        told = train.train_step(forward_step, batch, [model], optimizer, scheduler, state, groups, schedule, messages)
        losses, was_skipped, *_ = told
        assert not was_skipped
        return [float(losses["lm loss"])] if losses else []

    def columns(lengths: list[int], tokens: Tensor) -> dict[str, Any]:
        ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
        return {
            "tokens": tokens,
            "labels": tokens.roll(-1, dims=-1),
            "loss_mask": (positions(lengths) >= engine.PROMPT).float(),
            "attention_mask": None,
            "position_ids": positions(lengths),
            "cu_seqlens_q": ends[None],
            "cu_seqlens_kv": ends[None],
            "max_seqlen_q": torch.tensor(max(lengths)),
            "max_seqlen_kv": torch.tensor(max(lengths)),
        }

    batches = [[columns(*one) for one in batch] for batch in packed(size, replica, replicas)]
    return compared(Trainer(step, [model], ran), batches)
