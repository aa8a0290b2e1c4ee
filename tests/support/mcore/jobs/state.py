"""Three microbatches by Megatron's own schedule, and by a plan that runs forwards and backwards in other orders and recomputes
unevenly: prints how far gradients are apart, and what the forwards and backwards have left behind in layers and trackers.
"""

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

import megatron_epp
from megatron_epp.mcore import entry
from megatron_epp.mcore.iteration.microbatch_run import MicrobatchPlan, MicrobatchRun
from megatron_epp.mcore.releases import logged_router_losses
from megatron_epp.plan import Op, Recompute
from megatron_epp.plan.lowering import lower
from tests.support.mcore.figures import record_figures
from tests.support.mcore.jobs.frameworks import batches, megatrons_schedule, outputs

LENGTHS = 24, 8, 16
LAYERS = 3
FORWARDS, BACKWARDS = (2, 0, 1), (0, 2, 1)
RECOMPUTED = 1, 0, 3
"""Layers of each microbatch."""
LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [1e-2, 1e-2],
    "moe_z_loss_coeff": 1e-3, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "mtp_num_layers": 1,
}  # fmt: skip
MODELS = {
    "losses, biases, multi-token prediction": LOSSES,
    "quantiles": {"moe_router_load_balancing_type": "quantile_balancing", "moe_aux_loss_coeff": 0.0},
    "dropout, jitter": LOSSES | {"hidden_dropout": 0.1, "moe_input_jitter_eps": 0.1},
}


def run():
    entry.prepare()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    for name, settings in MODELS.items():
        model = build(**settings)
        found = {"stock": called(megatrons_schedule(), model)}
        planned = megatron_epp.wrap()
        for variant, recomputed in (("in other orders", (0, 0, 0)), ("with recompute", RECOMPUTED)):
            plan_by(recomputed)
            found[variant] = called(planned, model)
        record_figures({"model": name} | {variant: state for variant, (_, state) in found.items()} | apart(found))


def build(**settings):
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_dropout_fusion": False, "masked_softmax_fusion": False}
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
    sizes = {"num_layers": LAYERS, "hidden_size": 16, "num_attention_heads": 2, "variable_seq_lengths": True}
    config = TransformerConfig(**sizes | plain | experts | settings)
    config.grad_scale_func = lambda loss: 512.0 * loss
    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    predictor = gpt_layer_specs.get_gpt_mtp_block_spec if config.mtp_num_layers else lambda *_, **__: None
    more = predictor(config, block, use_transformer_engine=False)
    return GPTModel(config, block, 64, 64, position_embedding_type="rope", mtp_block_spec=more)


def plan_by(recomputed):
    """Let plans have forwards and backwards in the orders above, and so many layers of each microbatch recompute."""

    def plan_of_call(self, agreed, forward_only):
        packed, chunks = self._make(agreed, forward_only)
        made = packed.plan()
        (steps,) = made.ranks
        by_action = {(step.action.op, step.action.chunk): step for step in steps}
        order = [*((Op.F, chunk) for chunk in FORWARDS), *((Op.B, chunk) for chunk in BACKWARDS)]
        recompute = (tuple(Recompute(full=count) for count in recomputed),)
        plan = replace(made, ranks=(tuple(by_action[action] for action in order),), recompute=recompute)
        return MicrobatchPlan(plan, chunks, lower(plan)[0], "", 0.0)

    MicrobatchRun.plan_of_call = plan_of_call


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    return outputs(model, batch["tokens"], batch["labels"]), lambda losses: (losses.mean(), {"loss": float(losses.mean())})


def called(schedule, model):
    model.zero_grad()
    counters = {name: buffer for name, buffer in model.named_buffers() if "tokens_per" in name or "qb_beta_" in name}
    for sums in (*counters.values(), *logged_router_losses().values()):
        sums.zero_()
    MTPLossLoggingHelper.tracker.clear()
    torch.manual_seed(7)
    sizes = {"num_microbatches": len(LENGTHS), "seq_length": 1, "micro_batch_size": 1}
    schedule(forward_step_func=forward_step, data_iterator=batches(LENGTHS), model=model, **sizes)
    more = {name: value for name, value in MTPLossLoggingHelper.tracker.items() if torch.is_tensor(value)}
    state = {f"buffer {name}": value for name, value in counters.items()}
    state |= {f"router {name}": value for name, value in logged_router_losses().items()}
    state |= {f"prediction {name}": value for name, value in more.items()}
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients, {name: value.flatten().tolist() for name, value in state.items()}


def apart(found):
    """How far gradients of the plans are from stock's, and from each other, by the norm of each tensor."""

    def worst(ours, theirs):
        pairs = zip(found[ours][0], found[theirs][0], strict=True)
        return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)

    gradients = found["with recompute"][0]
    assert all(math.isfinite(float(one.norm())) for one in gradients)
    worsts = {"from stock": worst("with recompute", "stock"), "by recompute": worst("with recompute", "in other orders")}
    return worsts | {"gradients": sum(bool(one.any()) for one in gradients)}
