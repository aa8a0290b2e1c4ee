"""A script's own microbatches and those of frameworks train by plans as by Megatron's schedules; so do SFT and reruns."""

import json
import re
import shlex
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from megatron_epp.plan import EppError
from tests.support.mcore.forked import RECORDER, job, launch, of_ranks, succeeded, train
from tests.support.mcore.jobs.frameworks import EVEN, UNEVEN
from tests.support.mcore.jobs.reinforcement import UNLIKE
from tests.support.mcore.launch import TINY, Finished
from tests.support.seeds import some_by_default

PLANS = "--epp --epp-microbatches user"
ITERATIONS = 6
"""One to warm up, three to learn costs from, two with plans made from these."""
TOLERANCE = 1e-5
"""Largest relative difference of losses and of norms of gradients: replicas and stages may add in another order."""

STAGES = "--pipeline-model-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CELLS = {
    "one process": (1, ""),
    "full recompute, loss per token": (2, f"{STAGES} --calculate-per-token-loss {RECOMPUTE}"),
}
"""Others are rows of `test_matrix.py`, compared tensor by tensor."""


def both(folder: Path, processes: int, *flags: object, change: str = "") -> tuple[Finished, Finished]:
    own = train(folder / "stock", processes, *flags, iterations=ITERATIONS, change=change)
    planned = train(folder / "planned", processes, *flags, *PLANS.split(), iterations=ITERATIONS, change=change)
    return own, planned


def check_equal(own: Finished, planned: Finished) -> None:
    assert planned.steps.keys() == own.steps.keys()
    for iteration, step in own.steps.items():
        assert planned.steps[iteration] == pytest.approx(step, rel=TOLERANCE)


@pytest.mark.parametrize("cell", CELLS)
def test_a_stock_script_trains_as_without_plans(tmp_path: Path, cell: str) -> None:
    processes, flags = CELLS[cell]
    own, planned = both(tmp_path, processes, *flags.split())
    check_equal(own, planned)
    assert "in their own order, while costs are learnt" in planned.output
    assert "costs learnt from 3 iterations" in planned.output
    assert re.findall(r"epp iteration (\d+) \| makespan \(ms\): ", planned.output) == [str(1 + i) for i in range(ITERATIONS)]
    assert "agreed while the last iteration ran" in planned.output
    told = "plans recompute no layers: the model's own recompute_granularity=full decides: leave it out"
    assert planned.output.count(told) == ("--recompute-granularity" in flags)


def test_a_loss_of_the_scripts_own_runs_and_makes_megatrons_climb(tmp_path: Path) -> None:
    own, planned = both(tmp_path, 2, *STAGES.split(), change="own_loss")
    check_equal(own, planned)
    assert planned.steps[ITERATIONS]["loss"] > planned.steps[1]["loss"]


def test_what_would_send_over_another_pipeline_or_other_messages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron_epp.mcore.iteration import schedule_call

    class Bridging(P2PCommunicator):
        """Sends by another way."""

    def communicator(kind: type[P2PCommunicator], group: str | None) -> P2PCommunicator:
        made = kind.__new__(kind)
        made.pp_group = group  # type: ignore[assignment]
        return made

    ranks = {"own": [0, 1], "other": [0, 2], "again": [0, 1]}
    monkeypatch.setattr(schedule_call.mpu, "get_pipeline_model_parallel_group", lambda: "own")
    monkeypatch.setattr(schedule_call.dist, "get_process_group_ranks", ranks.__getitem__)
    required = {"forward_step_func": print, "data_iterator": None, "model": None, "num_microbatches": 1}
    call = partial(schedule_call.ScheduleCall, **required, seq_length=1, micro_batch_size=1)
    for messages, said in (
        ({"adjust_tensor_shapes_fn": print}, "adjust_tensor_shapes_fn: messages follow the plan"),
        ({"p2p_communicator": communicator(Bridging, "own")}, "a p2p_communicator of type Bridging: messages follow the plan"),
        ({"p2p_communicator": Namespace(pp_group="own")}, "a p2p_communicator of type Namespace: messages follow the plan"),
        ({"p2p_communicator": communicator(P2PCommunicator, "other")}, "p2p_communicator: its pipeline is not the one of"),
        ({"p2p_communicator": communicator(P2PCommunicator, None)}, "p2p_communicator: its pipeline is not the one of"),
        *(({"pg_collection": Namespace(**own)}, "pg_collection: its pipeline") for own in ({"pp": "other"}, {}, {"pp": None})),
    ):
        with pytest.raises(EppError, match=f"^a plan cannot honour {said}"):
            call(**messages).check_messages()
    call().check_messages()
    call(p2p_communicator=communicator(P2PCommunicator, "again"), pg_collection=Namespace(pp="again")).check_messages()


LOOPS = {"one stage": (1, 1, UNEVEN, "somewhere"), "pipeline": (2, 2, UNEVEN, None), "stages per rank": (2, 4, EVEN, None)}
"""Ranks, stages, lengths of microbatches, and the attribute of another model that holds the model."""


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_without_megatrons_parser_gets_the_gradients_and_results_of_stock_in_its_own_order(loop: str) -> None:
    """Data that is no loss too."""
    ranks, stages, lengths, inside = LOOPS[loop]
    finished = job(ranks, "frameworks:compared", stages=stages, lengths=lengths, inside=inside)
    told = "plans recompute no layers: Outer has no decoder with layers, nor a language_model with one"
    assert finished.output.count(told) == (inside is not None)
    figures = of_ranks(finished)
    assert len(figures) == ranks
    assert worst_of(figures) < TOLERANCE
    for rank in figures:
        by_plans = [(run["results"], rank["stock"], "loss") for run in (*rank["runs"], {"results": rank["evaluated"]})]
        for ours, theirs, value in (*by_plans, (rank["collected"], rank["collected by stock"], "of each")):
            assert [entry["tokens"] for entry in ours] == [entry["tokens"] for entry in theirs]
            for mine, other in zip(ours, theirs, strict=True):
                assert mine[value] == pytest.approx(other[value], rel=TOLERANCE)
    assert any(rank["stock"] and rank["collected by stock"] for rank in figures)


def worst_of(ranks: tuple[dict[str, Any], ...]) -> float:
    return max(run["worst"] for rank in ranks for run in rank["runs"])


def test_under_a_cap_layers_of_some_microbatches_recompute_and_gradients_stay() -> None:
    """The model is a multimodal one, whose layers are those of the language model inside."""
    cap_bytes = 202_000  # weights, gradients and optimizer included, by formula
    settings = {"memory_cap_gb": cap_bytes / 2**30}
    finished = job(2, "frameworks:compared", stages=2, lengths=UNEVEN, settings=settings, inside="language_model")
    said = of_ranks(finished)
    (share,) = re.findall(r"planned .* bubble [\d.]+%, ([\d.]+)% of layers recompute", finished.output)[1:2]
    assert 0 < float(share) < 100
    assert worst_of(said) < TOLERANCE
    peaks = {one["rank"]: [run["peak_bytes"] for run in one["runs"]] for one in said}
    assert peaks.keys() == {0, 1}
    for of_rank in peaks.values():  # the first iteration runs without plans for the cap, the last with one
        assert of_rank[-1] < min(of_rank[0], cap_bytes)


TIMES = {"forward": 100.0, "backward": 200.0, "weight": 100.0}
"""Times of a layer per token, in us; measured times of such tiny layers are mostly noise."""
PLANNED = re.compile(
    r"planned .* ([\d.]+)% of layers recompute, ([\d.]+)% of activations are offloaded, (\d+) weight gradients are actions "
    r"of their own, microbatches take ([\d.]+) MiB"
)


def planned_by(
    ranks: int, stages: int, lengths: Sequence[int], settings: dict[str, object], times: object = TIMES, **given: object
) -> list[tuple[float, ...]]:
    """Run a loop with settings of `wrap`, check its gradients, and return the figures of each plan in the log."""
    given |= {"stages": stages, "lengths": lengths, "settings": settings, "us_per_token": times}
    finished = job(ranks, "frameworks:compared", **given)
    assert worst_of(of_ranks(finished)) < TOLERANCE
    return [tuple(map(float, found)) for found in PLANNED.findall(finished.output)]


@pytest.mark.parametrize(
    ("stages", "lengths", "settings"),
    [(2, UNEVEN, {"split_weight_gradient": True}), (4, EVEN, {})],
    ids=["one stage per rank", "two stages per rank, by default"],
)
def test_weight_gradients_are_actions_of_their_own(stages: int, lengths: tuple[int, ...], settings: dict[str, object]) -> None:
    learning, planned, evaluation = planned_by(2, stages, lengths, settings)
    assert learning[2] == 6 * stages  # each is measured
    assert 0 < planned[2] <= 6 * stages
    assert evaluation[2] == 0


def test_weight_gradients_wait_in_layers_that_recompute() -> None:
    settings = {"split_weight_gradient": True, "memory_cap_gb": 240_000 / 2**30}
    planned = planned_by(2, 2, EVEN, settings, TIMES | {"forward": 20.0})[1]
    assert planned[0] > 0
    assert planned[2] > 0


def test_memory_of_the_microbatches_themselves_counts_under_the_cap() -> None:
    settings = {"memory_cap_gb": 500_000 / 2**30}
    pixels = 50_000  # in each of six microbatches, which ranks hold throughout the iteration
    small = planned_by(2, 2, EVEN, settings)[1]
    large = planned_by(2, 2, EVEN, settings, pixels=pixels)[1]
    assert large[3] - small[3] == pytest.approx(6 * pixels / 2**20, abs=0.1)
    assert small[0] == 0
    assert large[0] > 0


def test_a_model_without_layers_that_can_delay_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from megatron_epp.features.split_weights import linear_layers

    monkeypatch.setattr(linear_layers, "from_each_of_job", lambda mine: [0, mine])
    args = Namespace(epp_split_weight_gradient=True)
    for num_split, allowed in ((1, nullcontext()), (0, pytest.raises(EppError, match="no layer of this model"))):
        monkeypatch.setattr(linear_layers, "split_where_possible", lambda _, found=num_split: (found, []))
        with allowed:
            linear_layers.split_built([torch.nn.Identity()], args)


def test_activations_are_offloaded_where_recompute_would_take_longer() -> None:
    cap_gb = 160_000 / 2**30  # room for a little more than two of the four microbatches that the first rank has in flight
    settings = {"offload": "on", "host_memory_gb": 1, "memory_cap_gb": cap_gb}
    assert planned_by(4, 4, [24] * 8, settings, host_link=[0.1, 1e-6])[1][1] > 0


def test_a_stock_script_trains_as_without_them(tmp_path: Path) -> None:
    flags = "--pipeline-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --no-bias-gelu-fusion --disable-bias-linear"
    own = train(tmp_path / "stock", 2, *flags.split(), iterations=6)
    ours = "--epp-split-weight-gradient --epp-offload on --epp-host-memory-gb 1"
    planned = train(tmp_path / "planned", 2, *flags.split(), *PLANS.split(), *ours.split(), iterations=6)
    check_equal(own, planned)
    assert [found for found in PLANNED.findall(planned.output) if float(found[2]) > 0]


PROGRAM = Path(__file__).parents[1] / "support" / "mcore" / "sft_training.py"
CONTEXT = 96
FLAGS = shlex.split(f"--seq-length {CONTEXT} --max-position-embeddings {CONTEXT} --micro-batch-size 1 --eval-iters 0 ")
FLAGS += shlex.split(f"--train-iters {ITERATIONS} --no-create-attention-mask-in-dataloader --calculate-per-token-loss ")
FLAGS += shlex.split("--split 100,0,0 --pipeline-model-parallel-size 2")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes, and the special tokens of the format of prompts that is Megatron's default."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_233>", "</s>"]
    own = {"special_tokens": special, "initial_alphabet": tokenizers.pre_tokenizers.ByteLevel.alphabet()}
    core.train_from_iterator([], tokenizers.trainers.BpeTrainer(vocab_size=260, show_progress=False, **own))
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of one to three conversations, some longer than the context."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    lines = []
    for number in range(24):
        messages = []
        for part in range(1 + number % 3):
            messages += [
                {"role": "system", "content": "s" * (1 + number % 4)},
                {"role": "user", "content": f"{number} + {part}?"},
                {"role": "assistant", "content": f"{number + part} " * (1 + number % 5)},
            ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))
    return path


def steps_of(folder: Path, *flags: object) -> tuple[dict[str, dict[str, float]], str]:
    folder.mkdir()
    tiny = [flag for flag in TINY if flag != "--mock-data"]
    done = succeeded(launch(2, PROGRAM, *tiny, *FLAGS, *flags, env={"RECORD_TO": str(folder)}))
    return json.loads((folder / "rank1.json").read_text())["steps"], done.output


def test_megatrons_sft_data_trains_as_without_plans(tmp_path: Path, tokenizer: Path, chats: Path) -> None:
    flags = ["--sft", "--data-path", chats, "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", tokenizer]
    stock, _ = steps_of(tmp_path / "stock", *flags)
    planned, output = steps_of(tmp_path / "planned", *flags, "--epp", "--epp-microbatches", "user")
    assert "costs learnt from 3 iterations" in output
    assert len({step["loss"] for step in stock.values()}) == ITERATIONS
    assert planned.keys() == stock.keys()
    for number, step in stock.items():
        assert planned[number] == pytest.approx(step, rel=TOLERANCE)


TWO_STAGES, PIPELINING = ("--pipeline-model-parallel-size", "2"), "forward_backward_pipelining"
PIPELINES = [
    pytest.param(2, UNEVEN, id="a stage per rank", marks=pytest.mark.slow),  # the other has queues of several chunks
    pytest.param(4, EVEN, id="two stages per rank"),
]


def test_an_iteration_that_runs_again_gets_its_own_microbatches_and_its_own_plan(tmp_path: Path) -> None:
    """Costs are learnt when four runs are done; the second of iteration 3 is the fifth. Dropout differs by order."""
    run = partial(train, tmp_path / "run", 2, *TWO_STAGES, "--hidden-dropout", 0.1, iterations=ITERATIONS, change="rerun")
    own, planned = run(), run(*PLANS.split())
    for finished in (own, planned):
        assert len(re.findall("Unexpected result", finished.output)) == 3
        assert len(re.findall("unexpected result is reproducible within the tolerance", finished.output)) == 3
        assert "not reproducible" not in finished.output
    for iteration in range(1, 4):  # from the next on, microbatches have the random numbers of another order
        assert planned.steps[iteration] == pytest.approx(own.steps[iteration], rel=TOLERANCE)


def test_validated_results_are_numbered_by_microbatch_in_whatever_order_these_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import rerun_state_machine

    from megatron_epp.mcore.iteration.schedule_call import numbered_by

    machine = rerun_state_machine.RerunStateMachine()
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)

    def numbers(order: tuple[int, ...]) -> dict[int, list[int]]:
        machine.validation_counts, found = defaultdict(int), {}
        for index in order:
            with numbered_by(index):
                found[index] = [machine._get_validation_call_info("a message").sequence for _ in range(2)]
        assert machine.validation_counts == {}
        return found

    assert numbers((0, 1, 2)) == numbers((2, 0, 1))
    assert len({number for each in numbers((0, 1, 2)).values() for number in each}) == 6
    assert numbers((0,)) == {0: [1, 2]}  # as Megatron numbers them


@pytest.mark.parametrize(
    ("stages", "lengths", "name"),
    [(2, UNEVEN, f"{PIPELINING}_without_interleaving"), (4, EVEN, f"{PIPELINING}_with_interleaving")],
)
def test_a_framework_without_plans_trains_by_installed_ones(stages: int, lengths: tuple[int, ...], name: str) -> None:
    for found in of_ranks(job(2, "frameworks:installed", stages=stages, lengths=lengths, name=name)):
        assert found["worst"] < TOLERANCE
        assert all(results == found["stock"] for results in found["results"])
        assert found["learnt"]
        assert "plans run Megatron's schedules already" in found["twice"]
        assert found["is_stock"]


@pytest.mark.parametrize(
    ("processes", "flags", "name"),
    [
        (1, (), "forward_backward_no_pipelining"),
        (2, TWO_STAGES, f"{PIPELINING}_without_interleaving"),
        (2, (*TWO_STAGES, "--num-layers-per-virtual-pipeline-stage", "1"), f"{PIPELINING}_with_interleaving"),
    ],
)
def test_a_schedule_called_in_a_wrapper_is_planned(tmp_path: Path, processes: int, flags: tuple[str, ...], name: str) -> None:
    program = RECORDER.with_name("direct_training.py")
    arguments = [*TINY, "--train-iters", 2, *flags, *PLANS.split()]
    finished = succeeded(launch(processes, "-m", "megatron_epp.run", program, *arguments, env={"RECORD_TO": str(tmp_path)}))
    assert f"called through the wrapper: 4 times {name}" in finished.output  # training, and evaluation at the end
    assert "in their own order, while costs are learnt" in finished.output


@some_by_default("ways", [((False, False), (True, True)), ((False, True), (True, False))], 1)
def test_gradients_are_reduced_once_after_two_calls_and_with_an_idle_replica(
    ways: tuple[tuple[bool, bool], ...],
) -> None:
    """As NeMo-RL's split step: the hooks are set so that no call reduces, and gradients are finalised behind the last."""
    found = [*chain.from_iterable(of_ranks(job(4, "frameworks:split_step", ways=ways)))]
    said = [(one["rank"], one["overlap"], one["distributed"]) for one in found]
    assert sorted(said) == sorted(2 * [(rank, *way) for rank in range(4) for way in ways])
    assert [one for one in found if one["worst"] > TOLERANCE] == []


def test_replicas_that_share_experts_train_microbatches_of_their_own_lengths_in_one_order() -> None:
    """Without it a third of public recipes with pipeline stages and experts could not be planned."""
    ranks = of_ranks(job(4, "reinforcement:shared_experts"))
    assert [one for rank in ranks for one in rank if one["worst"] > TOLERANCE] == []
    for own in ranks:
        assert all(sorted(one["lengths"]) == sorted(UNLIKE[own[0]["rank"] % 2]) for one in own)
    given, planned = ([own[number]["lengths"] for own in ranks] for number in (0, -1))
    assert given == [list(UNLIKE[0]), list(UNLIKE[1])] * 2
    assert planned != given
    orders = [[UNLIKE[number % 2].index(length) for length in row] for number, row in enumerate(planned)]
    assert orders[::2] == orders[1::2]  # by stage, of the two replicas


@pytest.mark.parametrize(("stages", "lengths"), PIPELINES)
def test_routes_that_routers_replay_are_those_of_their_microbatches_in_the_given_order(
    stages: int, lengths: tuple[int, ...]
) -> None:
    ranks = of_ranks(job(2, "config_functions:replayed", stages=stages, lengths=lengths))
    assert len(ranks) == 2
    for rank in ranks:
        said = "a plan cannot honour moe_enable_routing_replay=True (microbatches must run in their own order"
        assert rank["refused"].startswith(said)
        assert [one for one in rank["trained"] if one["worst"] > TOLERANCE] == []
        assert all(len(set(row)) == 1 for one in rank["trained"] for row in one["recompute"])
        assert all(found == rank["by stock"] for found in rank["recorded"])
    trained = [one for rank in ranks for one in rank["trained"]]
    assert sum(any(map(any, one["recompute"])) for one in trained) == 2  # the last of each rank, under a cap


@pytest.mark.parametrize(("stages", "lengths"), PIPELINES)
def test_microbatches_read_by_get_next_are_run_in_any_order(stages: int, lengths: tuple[int, ...]) -> None:
    """Iterators are left behind the last."""
    finished = job(2, "reinforcement:read_by_get_next", stages=stages, lengths=lengths)
    ranks = of_ranks(finished)
    runs = [run for rank in ranks for run in rank["runs"]]
    assert len(runs) == 12
    for rank in ranks:
        for run in rank["runs"]:
            assert run["worst"] < TOLERANCE
            assert run["offsets"] == [6] * (stages // 2)
            for name in ("reward", "loss"):
                assert [entry[name] for entry in run["results"]] == pytest.approx([entry[name] for entry in rank["stock"]])
        ours, theirs = ([*chain.from_iterable(rank[name])] for name in ("samples", "samples by stock"))
        assert ours == pytest.approx(theirs)
    assert [entry["reward"] for entry in next(run["results"] for run in runs if run["results"])] == [1, 2, 3, 4, 5, 6]
    assert "6 microbatches of 24 tokens: " in finished.output or "6 microbatches of 8 to 32 tokens: " in finished.output


def test_objects_of_a_generator_that_know_their_padded_lengths_are_run_in_any_order_with_results_in_the_callers() -> None:
    """As NeMo-RL calls Megatron: packed microbatches are objects, and the model is in no list."""
    ranks = of_ranks(job(2, "reinforcement:of_processed", lengths=UNEVEN))
    for rank in ranks:
        assert [run for run in rank["runs"] if run["worst"] > TOLERANCE] == []
        for results in (*(run["results"] for run in rank["runs"]), rank["evaluated"]):
            for ours, theirs in zip(results, rank["stock"], strict=True):
                assert [*chain(*ours["logprobs"])] == pytest.approx([*chain(*theirs["logprobs"])], rel=1e-4, abs=1e-5)
        orders = [run["ran"] for run in rank["runs"]]
        assert orders[-1] != orders[0]
        assert sorted(orders[-1]) == sorted(orders[0])
    assert any(rank["stock"] for rank in ranks)
