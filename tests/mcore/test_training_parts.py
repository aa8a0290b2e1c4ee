"""Small parts of training on one rank: what runs on which device, what comes back, what costs and losses are of."""

import sys
import threading
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp

from megatron_epp import run as way_in
from megatron_epp.callers import verl
from megatron_epp.features.learnt_costs.learn_costs import CostLearning
from megatron_epp.features.slow_stages.stage_watch import StageWatch
from megatron_epp.mcore import entry
from megatron_epp.mcore.costs import memory_probe
from megatron_epp.mcore.costs.megatron_facts import kernel_of, run_facts
from megatron_epp.mcore.iteration import wrap
from megatron_epp.mcore.iteration.loggers import Reports
from megatron_epp.mcore.model import layer_recompute, losses, stage
from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.mcore.model.stage import Snapshot
from megatron_epp.plan import NO_RECOMPUTE, EppError
from megatron_epp.plan.flags import CUDNN, FLASH_2, FLASH_3
from megatron_epp.plan.recompute import MLP, MODES, NORMS, RecomputeMode
from megatron_epp.port.run_facts import AttentionSizes
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.kernels import flash, transformer_engine
from megatron_epp.tools.advice.question import Configuration
from megatron_epp.tools.formulas import ModelShape
from megatron_epp.tools.formulas import of_run as formulas
from tests.mcore.test_refusals import arguments
from tests.support.mcore.asking import ask_here
from tests.support.runtime.device_audit import Audit, run
from tests.support.runtime.runtime_plans import two_ranks


@pytest.fixture
def audit():
    with Audit().installed() as audit:
        yield audit
    assert audit.faults == []


def test_reports_read_times_on_their_ranks_device(audit):
    plan, reports = two_ranks(), Reports()
    recorder = run(audit, plan, 0)
    reports.begin(lambda: recorder.events() and None)
    reports.complete()
    assert audit.seen["epp-reports"] >= {"stream", "synchronize", "elapsed_time"}


def test_stages_are_watched_on_their_ranks_device(audit):
    plan, watch = two_ranks(), StageWatch(0, None)
    watch.after(plan, run(audit, plan, 0), dict)
    watch.complete()
    assert "elapsed_time" in audit.seen["epp-stage-watch"]


def test_costs_are_learnt_on_their_ranks_device(audit):
    plan, learning = two_ranks(), CostLearning(SimpleNamespace(links=SimpleNamespace(ranks=[0])))
    while not learning.is_recording:
        learning.after(plan, run(audit, plan, 0), dict)
    learning.after(plan, run(audit, plan, 0), dict)
    learning._added.result()
    assert "elapsed_time" in audit.seen["epp-cost-learning"]


def test_layers_run_with_and_without_recompute_and_without_gradients(monkeypatch):
    ran = []

    def forward(stage, chunk, recompute=NO_RECOMPUTE):
        ran.append((chunk.num_tokens, recompute.full, torch.is_grad_enabled()))
        return None, "output", "context"

    monkeypatch.setattr(memory_probe, "forward", forward)
    monkeypatch.setattr(memory_probe, "backward", lambda stage, output, context: ran.append("backward"))
    stage = SimpleNamespace(token_multiple=4, num_layers=3, has_gradient=True)
    memory_probe.run_other_size(stage)
    first = memory_probe.bytes_chunk(stage).num_tokens
    with_gradients = [(first + 4, 0, True), "backward", (first + 4, 3, True), "backward"]
    assert ran == [*with_gradients, (first, 0, False), (first + 4, 0, False)]


class Layer:
    """Layer that is nothing but an MLP, whose forwards wait for each other before it runs."""

    def __init__(self) -> None:
        self.mlp, self.input_layernorm = torch.nn.Identity(), IdentityOp()
        self.both = threading.Barrier(2, timeout=60)

    def forward(self, hidden: torch.Tensor, packed_seq_params: ChunkParams) -> torch.Tensor:
        self.both.wait()
        output = self._forward_mlp(hidden)
        self.both.wait()
        return output

    def _forward_mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2


def params_of(mode: str) -> ChunkParams:
    params = ChunkParams.__new__(ChunkParams)
    params.context = Namespace(recompute=Namespace(mode=lambda number: mode))
    return params


def test_forwards_of_a_layer_at_the_same_time_recompute_their_own_parts(monkeypatch) -> None:
    again: list[str] = []

    def run_again(run, args, kwargs, in_fp8):
        again.append(threading.current_thread().name)
        return run(*args, **kwargs)

    monkeypatch.setattr(layer_recompute, "run_again", run_again)
    assert MODES["mlp"].runs_again >= {MLP}
    layer = Layer()
    layer_recompute.recompute_by_mode([layer])
    hidden = torch.ones(2, requires_grad=True)
    targets = {mode: partial(layer.forward, hidden, packed_seq_params=params_of(mode)) for mode in ("mlp", "")}
    threads = [threading.Thread(target=target, name=mode or "none") for mode, target in targets.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert again == ["mlp"]


def test_a_mode_that_runs_other_parts_again_than_a_layer_can_is_refused(monkeypatch) -> None:
    monkeypatch.setitem(MODES, "norms", RecomputeMode(name="norms", column=3, runs_again=frozenset({NORMS})))
    with pytest.raises(EppError, match="recompute mode norms: layers cannot run only norms again"):
        layer_recompute.recompute_by_mode([])


class Wrapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens_per_expert", torch.tensor([1.0, 2.0]))
        self.main_grad = torch.ones(2)

    def zero_grad_buffer(self) -> None:
        self.main_grad.zero_()


def test_everything_comes_back(monkeypatch) -> None:
    logged = {"load_balancing_loss": torch.tensor([3.0])}
    monkeypatch.setattr(stage, "logged_router_losses", lambda: logged)
    model = Wrapped()
    before = Snapshot([model])
    drawn = torch.rand(3)
    model.tokens_per_expert += 5
    logged["load_balancing_loss"] += 1
    logged["z_loss"] = torch.tensor([7.0])  # first seen in the iteration
    before.restore()
    assert torch.equal(torch.rand(3), drawn)
    assert model.tokens_per_expert.tolist() == [1.0, 2.0]
    assert {name: values.tolist() for name, values in logged.items()} == {"load_balancing_loss": [3.0], "z_loss": [0.0]}
    assert model.main_grad.tolist() == [0.0, 0.0]


ORDER = "tp-cp-ep-dp-pp"


@pytest.mark.parametrize(
    ("tensor", "context", "data", "expert", "sharing"),
    [(2, 1, 4, 4, 1), (2, 2, 4, 4, 2), (4, 2, 2, 4, 1), (2, 2, 2, 8, 1), (4, 1, 2, 1, 2), (1, 4, 4, 2, 1), (2, 1, 8, 4, 4)],
)
def test_experts_span_neighbours_across_ranks_and_replicas(tensor: int, context: int, data: int, expert: int, sharing: int):
    config = Configuration(tensor, context, 2, data, expert, sharing)
    shape = ModelShape(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=64,
        num_attention_heads=8,
        vocab_size=128,
        num_experts=8,
        tensor_parallel=tensor,
        context_parallel=context,
        expert_parallel=expert,
        expert_tensor_parallel=sharing,
    )
    holders = tensor * context * data // (expert * sharing)
    experts = RankGenerator(tp=sharing, ep=expert, dp=holders, pp=2, cp=1, order=ORDER)
    dense = RankGenerator(tp=tensor, ep=1, dp=data, pp=2, cp=context, order=ORDER)
    of_experts = [exchange for exchange in shape.mlp_exchanges if exchange.ranks == expert][-1]
    for group in experts.get_ranks("ep"):
        assert group == list(range(group[0], group[-1] + 1, of_experts.spacing))
        assert len(group) == of_experts.ranks
    shared, stages = experts.get_ranks("tp-ep"), dense.get_ranks("tp-cp")
    assert max(group[-1] - group[0] + 1 for group in shared + stages) == shape.neighbours
    replica_of = {rank: number % data for number, ranks in enumerate(stages) for rank in ranks}
    assert {tuple(sorted({replica_of[rank] for rank in group})) for group in shared} == set(config.lockstep_groups)


@pytest.mark.parametrize(
    ("ranks", "padded"),
    [((1, 1), [5, 8, 1]), ((4, 1), [8, 8, 4]), ((1, 2), [8, 8, 4]), ((2, 2), [8, 8, 8]), ((1, 4), [8, 8, 8])],
)
def test_every_sequence_is_padded_to_a_multiple_of_the_ranks_that_share_it(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int], padded: list[int]
) -> None:
    monkeypatch.setattr(wrap, "sharing_ranks", lambda: ranks)
    tokens = torch.nested.nested_tensor([torch.zeros(5), torch.zeros(8), torch.zeros(1)], layout=torch.jagged)
    assert verl.padded_lengths({"input_ids": tokens}) == padded


class Machine:
    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []

    def validate_result(self, **asked: object) -> None:
        self.asked.append(asked)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(losses, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(losses.releases, "checks_losses", lambda: True)
    return machine


def test_a_loss_that_is_nan_or_infinite_ends_the_run(machine: Machine) -> None:
    losses.check_loss(torch.tensor(float("nan")), "this microbatch")
    for asked, value in zip(machine.asked, ("nan", "inf"), strict=True):
        assert asked["fatal"]
        assert "this microbatch" in str(asked["message"])
        reject = asked["rejection_func"]
        assert callable(reject)
        assert bool(reject(torch.tensor(float(value))))
        assert not bool(reject(torch.tensor(1.0)))


def test_without_the_check_the_host_does_not_wait_for_the_loss(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(losses.releases, "checks_losses", lambda: False)
    losses.check_loss(torch.tensor(float("nan")), "this microbatch")
    assert machine.asked == []


def arguments_of(*flags, **values):
    return arguments(*flags, padded_vocab_size=1024, params_dtype=torch.bfloat16, **values)


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        (transformer_engine.TRANSFORMER_ENGINE, CUDNN), (flash.FLASH_ATTN_3, FLASH_3), (flash.FLASH_ATTN, FLASH_2),
        (flash.TORCH_FLASH, FLASH_2), (kernels.EXACT_ATTENTION, ""), (None, ""),
    ],
)  # fmt: skip
def test_times_are_of_the_attention_kernel_that_the_run_takes(monkeypatch, chosen, name):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(kernels, "explain", lambda case, preference: asked.append((case, preference)) or (chosen, []))
    facts = run_facts(arguments_of("--attention-backend", "flash"), ask_here)
    shape = formulas.model_shape(facts)
    assert facts.kernel == name
    ((case, preference),) = asked
    assert preference == "flash"
    assert (case.channels, case.query_heads, case.kv_heads) == (shape.head_width, shape.num_attention_heads, 4)


def test_a_loop_of_ones_own_tells_what_an_attention_kernel_is_chosen_by(monkeypatch):
    config = TransformerConfig(num_layers=2, hidden_size=512, num_attention_heads=4, bf16=True, params_dtype=torch.bfloat16)
    args = Namespace(**{name: getattr(config, name, None) for names in wrap._OF_MODEL for name in names.split()})
    sizes = AttentionSizes(4, 4, 1, 128, 128, 0.0, 0, 2, False)
    asked = []
    monkeypatch.setattr(kernels, "explain", lambda *given: asked.append(given) or (flash.TORCH_FLASH, []))
    assert kernel_of(args, sizes)
    ((case, preference),) = asked
    assert (case.dtype, preference) == (torch.bfloat16, "auto")


@pytest.fixture
def prepared(monkeypatch):
    calls = []
    monkeypatch.setattr(entry, "prepare", lambda: calls.append([*sys.argv]))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return calls


def test_the_script_runs_as_main_with_its_own_flags_and_folder(prepared, monkeypatch, tmp_path, capsys):
    (tmp_path / "beside.py").write_text("text = 'found'\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint(__name__, *sys.argv[1:], beside.text)\n")
    monkeypatch.setattr(sys, "argv", ["run", str(script), "--epp", "--lr", "1"])
    way_in.main()
    assert capsys.readouterr().out == "__main__ --epp --lr 1 found\n"
    assert prepared == [[str(script), "--epp", "--lr", "1"]]


def test_without_a_script_one_line_says_what_is_missing(prepared, monkeypatch):
    for given, words in (([], "say which script to run: torchrun"), (["nowhere.py"], "there is no script .*nowhere.py")):
        monkeypatch.setattr(sys, "argv", ["run", *given])
        with pytest.raises(SystemExit, match=f"megatron_epp, rank 0: {words}"):
            way_in.main()
    assert prepared == []
