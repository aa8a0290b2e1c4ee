"""Routers of experts count and add up a chunk's tokens as if its padding were not there."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import mpu
from megatron.core.transformer.moe import moe_logging, moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_epp.mcore import releases
from megatron_epp.mcore.model.replaced import problems
from megatron_epp.mcore.model.replayed_routes import ChunkRoutes
from megatron_epp.mcore.patches import install, patching
from megatron_epp.mcore.patches.routers import RealTokens, need_routing
from megatron_epp.mcore.patches.running_chunk import chunk, keep_chunk, running
from megatron_epp.plan import Chunk, EppError, Segment
from megatron_epp.runtime.attention.segments import SegmentTable

EXPERTS, WIDTH = 4, 8


class Group:
    def __init__(self, size=1):
        self.size = lambda: size


@pytest.fixture(scope="module", autouse=True)
def patched():
    before = patching.applied()
    patching.apply(install.patches())
    yield
    patching.revert([patch for patch in patching.applied() if patch not in before])


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A log of its own, and collectives of one rank."""
    monkeypatch.setattr(moe_logging, "_MOE_METRICS_TRACKER", moe_logging.MoEMetricsTracker())
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.ones(1))
    monkeypatch.setattr(moe_utils, "reduce_from_tensor_model_parallel_region", lambda counts, group: counts)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def router_of(ranks=1, is_ahead=False, **settings):
    usual = {"moe_router_topk": 2, "moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        add_bias_linear=False,
        calculate_per_token_loss=True,
        **(usual | settings),
    )
    groups = SimpleNamespace(**{name: Group(ranks) for name in ("tp", "cp", "tp_cp", "tp_dp_cp")})
    torch.manual_seed(1)
    router = TopKRouter(config, groups, **({"is_mtp_layer": True} if is_ahead else {}))
    router.set_layer_number(1)
    return router


def routed(router, tokens, real):
    tokens = tokens.clone().requires_grad_()
    for buffer in router.buffers():
        buffer.zero_()
    router.weight.grad = None
    with chunk(None if real is None else RealTokens(real, real, len(tokens))):
        probs, routing_map = router(tokens)
    (probs[:real] * torch.arange(1.0, 1 + EXPERTS)).sum().backward()
    logged = {name: values.clone() for name, values in releases.logged_router_losses().items()}
    for values in releases.logged_router_losses().values():
        values.zero_()
    bias = router.local_tokens_per_expert
    return {
        "probs": probs[:real].detach(),
        "map": routing_map[:real],
        "gradient": tokens.grad[:real],
        "weight": router.weight.grad,
        "bias": torch.zeros(0) if bias is None else bias.clone(),
        **logged,
    }, (probs[real:], routing_map[real:], tokens.grad[real:])


STATISTICS = {
    "auxiliary loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5},
    "auxiliary loss of sequences": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5},
    "z loss": {"moe_z_loss_coeff": 0.1},
    "bias": {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.5,
    },
    "capacity by probability": {"moe_expert_capacity_factor": 0.7},
    "capacity by position": {"moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": "position"},
    "Sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
}


@pytest.mark.parametrize("name", STATISTICS)
def test_padding_is_invisible_to(name):
    router = router_of(**STATISTICS[name])
    torch.manual_seed(2)
    tokens = torch.randn(12, 1, WIDTH)
    tokens[7:] = 200 * router.weight[0].detach()  # all of one expert
    bare, _ = routed(router, tokens[:7], 7)
    padded, (probs, routing_map, gradient) = routed(router, tokens, 7)
    assert padded.keys() == bare.keys()
    for figure, wanted in bare.items():
        torch.testing.assert_close(padded[figure], wanted, rtol=1e-6, atol=1e-7, msg=lambda text, figure=figure: figure + text)
    assert not gradient.any()
    if "capacity" in name:
        assert not routing_map.any()
        assert not probs.any()
    else:  # dispatchers without a capacity count on it
        assert routing_map.sum(dim=1).tolist() == [router.topk] * 5


@pytest.mark.parametrize("name", STATISTICS)
def test_a_rank_that_has_only_padding_adds_nothing(name):
    router = router_of(ranks=2, **STATISTICS[name])
    with chunk(RealTokens(5, 0, 6)):
        probs, routing_map = router(tokens := torch.randn(6, 1, WIDTH, requires_grad=True))
    (probs * 0).sum().backward()
    assert torch.isfinite(probs).all()
    assert not tokens.grad.any()
    assert router.local_tokens_per_expert is None or not router.local_tokens_per_expert.any()
    assert not any(values.any() for values in releases.logged_router_losses().values())
    assert routing_map.any() == ("capacity" not in name)


@pytest.mark.parametrize("ahead", [{}, {"mtp_num_layers": 1}, {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}])
def test_a_chunk_without_padding_is_routed_as_megatron_routes_it(ahead):
    settings = {"is_ahead": bool(ahead), **STATISTICS["auxiliary loss"], **STATISTICS["z loss"], **ahead}
    tokens = torch.randn(8, 1, WIDTH)
    ours, _ = routed(router_of(**settings), tokens, 8)
    stock, _ = routed(router_of(**settings), tokens, None)
    for figure, wanted in stock.items():
        torch.testing.assert_close(ours[figure], wanted)


def test_a_recomputed_forward_sees_the_chunk_of_its_first_run():
    seen, kept = [], []

    def checkpoint(function, *args):
        kept.append(function)
        return function(*args)

    real = RealTokens(5, 5, 6)
    with chunk(real):
        keep_chunk(checkpoint, lambda x: seen.append((x, running.real)), 1)
    kept[0](2)
    assert seen == [(1, real), (2, real)]
    assert running.real is None
    assert [patch.replacement for patch in install.patches() if patch.target.endswith(":checkpoint")] == [keep_chunk]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax before the choice"])
def test_a_router_takes_the_experts_of_its_chunk_with_probabilities_of_its_own(score):
    router = router_of(moe_router_score_function=score.split()[0], moe_router_pre_softmax=" " in score)
    tokens = torch.randn(6, 1, WIDTH)
    experts = torch.rand(6, EXPERTS).argsort(dim=1)[:, : router.topk]
    routes = ChunkRoutes({0: experts.T.to(torch.int16)})
    with chunk(RealTokens(6, 6, 6), routes):
        probs, routing_map = router(tokens)
        _, again = router(tokens)  # as a recomputed layer calls it
    routes.check()
    assert torch.equal(routing_map, torch.zeros(6, EXPERTS).scatter(1, experts, 1).bool())
    assert torch.equal(again, routing_map)
    logits = router.gating(tokens)[:, 0].gather(1, experts)
    wanted = {
        "softmax": logits.softmax(dim=1),
        "sigmoid": logits.sigmoid() / logits.sigmoid().sum(dim=1, keepdim=True),
        "softmax before the choice": router.gating(tokens)[:, 0].softmax(dim=1).gather(1, experts),
    }
    torch.testing.assert_close(probs.gather(1, experts), wanted[score])


def test_a_router_that_does_not_take_the_routes_of_its_chunk_is_an_error():
    routes = ChunkRoutes({0: torch.zeros(2, 6, dtype=torch.int16), 4: torch.zeros(2, 6, dtype=torch.int16)})
    routes.replayed.add(0)
    with pytest.raises(EppError, match="the router of layer 4, counted from 0, has not replayed the routes of samples"):
        routes.check()


@pytest.mark.parametrize(("sequence_parallel", "on_ranks"), [(False, [4, 4, 1, 1]), (True, [2, 2, 1, 0])])
def test_ranks_have_the_first_tokens_first(monkeypatch, sequence_parallel, on_ranks):
    table = SegmentTable.build(Chunk((Segment(0, 0, 2), Segment(1, 0, 3))), 8)
    assert (table.num_tokens, table.num_real) == (8, 5)
    config = SimpleNamespace(sequence_parallel=sequence_parallel)
    sizes = {"get_context_parallel_world_size": 2, "get_tensor_model_parallel_world_size": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(mpu, name, lambda size=size: size)
    found = []
    for cp_rank in (0, 1):
        for tp_rank in (0, 1):
            monkeypatch.setattr(mpu, "get_context_parallel_rank", lambda rank=cp_rank: rank)
            monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", lambda rank=tp_rank: rank)
            found.append(RealTokens.of(table, config))
    assert found == [RealTokens(5, count, 2 if sequence_parallel else 4) for count in on_ranks]


@pytest.mark.parametrize(("version", "tokens"), [("0.18.2", 6), ("0.19.2", 1.5), ("0.20.0", 1.5)])
def test_a_loss_of_ranks_counts_by_all_their_tokens_in_every_release(monkeypatch, version, tokens):
    monkeypatch.setattr(releases, "installed_version", lambda: version)
    releases._multiplies_router_losses.cache_clear()
    try:
        assert releases.router_loss_tokens(6, 4) == tokens
    finally:
        releases._multiplies_router_losses.cache_clear()


class OwnRouter(TopKRouter):
    def routing(self, logits, padding_mask=None): ...


def test_a_router_of_ones_own_is_refused_where_chunks_are_padded():
    layer = torch.nn.Module()
    layer.router = router_of()
    need_routing(layer)
    assert list(problems(layer)) == []
    layer.router.apply_z_loss = lambda logits, padding_mask=None: logits
    assert said_of(layer) == ["router (TopKRouter) has another apply_z_loss"]
    layer.router.__class__ = OwnRouter
    assert said_of(layer) == [f"router (OwnRouter) has another {name}" for name in ("routing", "apply_z_loss")]


def said_of(model):
    return [problem.partition(" than ")[0] for problem in problems(model)]
