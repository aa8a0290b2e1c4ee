"""An iteration's figures in Megatron's log and writers."""

import threading
from argparse import Namespace
from contextlib import nullcontext
from functools import partial

import pytest
from megatron.training import global_vars

from megatron_epp.cost import balance as spread
from megatron_epp.data.iterator import DisagreementError
from megatron_epp.features.layer_hint.hint_of_batches import layer_hint, layout_words
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.iteration import base_run, loggers, sliced_run
from megatron_epp.mcore.iteration.loggers import Reports
from megatron_epp.mcore.iteration.report import IterationReport
from megatron_epp.mcore.start.run_start import settle
from megatron_epp.plan import EppError, InfeasibleError
from megatron_epp.plan.plan_figures import main_items
from megatron_epp.plan.problem import Lengths
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.memory.breakdown import peak_items
from megatron_epp.port.planning import BackgroundPlanner
from megatron_epp.port.worker import WorkerError
from megatron_epp.runtime.watchdog import Watchdog
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs
from megatron_epp.tools.launch.torchrun import is_shown

LINE = {
    "iteration": 7, "makespan_us": {"planned": 2000.0, "measured": 2500.0},
    "bubble_fraction": {"planned": 0.1, "measured": 0.2}, "planned_peak_activation_bytes": [2**30, 2**29],
    "peak_activation_bytes": [None, None], "device_peak_bytes": [None, None], "planning_us": 12000.0, "plan_wait_us": 300.0,
    "replicas": 1, "imbalance": 0.0, "chunks": 9, "recompute_share": 0.25, "offload_share": 0.5,
    "planned_host_peak_bytes": [2**29, 0], "host_peak_bytes": [2**28, 0], "padding_share": 0.0, "recompute_us": 500.0,
    "copies_us": 100.0, "wait_us": [400.0, 700.0], "tokens": 1234, "sequences": 5,
}  # fmt: skip

FLAGS = Namespace(tensor_model_parallel_size=1, context_parallel_size=1, sequence_parallel=False)


class Recording:
    def __init__(self):
        self.seen = {}

    def add_scalar(self, name, value, iteration):
        self.seen[name, iteration] = value

    def log(self, values, iteration):
        self.seen |= {(name, iteration): value for name, value in values.items()}


@pytest.fixture
def both(monkeypatch):
    tensorboard, wandb = Recording(), Recording()
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", tensorboard)
    monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", wandb)
    return tensorboard, wandb


def test_both_writers_get_the_same_figures_under_epp(both):
    tensorboard, wandb = both
    loggers.write(LINE)
    assert tensorboard.seen == wandb.seen
    assert all(name.startswith("epp/") and iteration == 7 for name, iteration in tensorboard.seen)
    assert tensorboard.seen["epp/measured makespan (ms)", 7] == 2.5
    assert tensorboard.seen["epp/planned peak activations (GiB)", 7] == 1.0
    assert tensorboard.seen["epp/planning (ms)", 7] == 12.0


@pytest.mark.parametrize(
    ("values", "figures"),
    [
        ({"peak_activation_bytes": [2**28, 2**29]}, {"measured peak activations (GiB)": 0.5}),
        (
            {"device_peak_bytes": [(3 * 2**30, 4 * 2**30), (2**30, 5 * 2**30)]},
            {"allocated peak so far (GiB)": 3.0, "reserved peak so far (GiB)": 5.0},
        ),
        ({"replicas": 4, "imbalance": 0.015}, {"planned imbalance of replicas": 0.015}),
    ],
)
def test_figures_that_only_some_runs_have_are_written_where_they_are_there(both, values, figures):
    names = {(f"epp/{name}", 7): figure for name, figure in figures.items()}
    loggers.write(LINE)
    assert not names.keys() & both[0].seen.keys()
    loggers.write(LINE | values)
    assert names.items() <= both[0].seen.items()


def test_lines_about_iterations_reach_the_terminal_of_a_run_with_a_short_log(capsys):
    say = loggers.line_of(TRAINING)
    say(loggers.iteration_text(LINE))
    say("epp hint | fewer layers on the last stage")
    totals = loggers.Totals()
    for tokens, bubble in ((1000, 0.1), (234, 0.3)):
        totals = totals.after(LINE | {"tokens": tokens, "bubble_fraction": {"measured": bubble}})
    say(loggers.end_text(7, totals, "runs/tiny"))
    iteration, hint, end = capsys.readouterr().out.encode().splitlines()
    assert iteration.startswith(b"epp iteration 7 | makespan (ms): 2.0 planned, 2.5 measured")
    assert b"planning (ms): 12.0" in iteration
    assert is_shown(iteration)
    assert is_shown(hint)
    figures = b"logged iterations: 2 with 1,234 tokens | mean bubble of these: 20.0% measured | reports: runs/tiny"
    assert end == b"epp run has ended after iteration 7 | " + figures
    assert is_shown(end)


def test_the_planned_peaks_are_told_with_what_the_highest_is_made_of(capsys):
    shape = ModelShape(num_layers=2, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=8, vocab_size=512)
    costs = analytic_costs(shape, CPU, [1, 1])
    made = plan(Problem((9000, 200), (0, 1), (UNLIMITED_BYTES,) * 2), costs)
    items = peak_items(made, costs)
    loggers.line_of(TRAINING)(loggers.memory_text(made.predicted.peak_bytes, items, 3))
    line = capsys.readouterr().out
    assert is_shown(line.encode())
    peaks = [peak / 2**30 for peak in made.predicted.peak_bytes]
    assert sum(items.values()) == max(made.predicted.peak_bytes)
    assert f"epp memory planned for iteration 3 | peak per pipeline rank (GiB): {peaks[0]:.3g} {peaks[1]:.3g} | rank" in line
    assert main_items(items) in line
    assert "layers that keep everything" in line


def planned(layers):
    shape = ModelShape(num_layers=8, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=8, vocab_size=128 * 1024)
    costs = analytic_costs(shape, CPU, layers)
    return plan(Problem((900, 200), (0, 1, 2, 3), (UNLIMITED_BYTES,) * 4), costs), costs


def test_after_a_few_logged_batches_it_is_told_once_which_layers_would_keep_fewer_ranks_waiting():
    made, costs = planned([2] * 4)
    hint = layer_hint(Namespace(names=TRAINING, args=Namespace(moe_layer_freq=1)))
    told = [hint.hint(made, costs) for _ in range(20)]
    assert [number for number, text in enumerate(told) if text] == [9]
    assert told[9] == spread.advice(costs, made.placement, made.chunks * 10, partial(layout_words, 0))
    assert "--pipeline-model-parallel-layout 'Et" in told[9]


OF_KINDS = [{"hybrid_layer_pattern": "*-*-"}, {"hybrid_override_pattern": "*-*-"}, {"moe_layer_freq": [0, 1]}]


@pytest.mark.parametrize("flags", OF_KINDS)
def test_nothing_is_told_of_layers_that_differ_from_each_other(flags):
    assert layer_hint(Namespace(names=TRAINING, args=Namespace(**flags))) is None


def test_a_batch_that_cannot_be_planned_is_named_in_the_error():
    shape = ModelShape(num_layers=2, hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, vocab_size=32)
    ours = object.__new__(sliced_run.SlicedRun)
    planner = BackgroundPlanner(analytic_costs(shape, CPU, [1, 1]), Options())
    ours._can_plan, ours.process = threading.Event(), planner.process
    ours.plan_with(planner)
    ours.reports, ours.problem = Reports(), Problem((), (0, 1), (1000, 1000))
    said = r"epp-memory-cap-gb[\s\S]*3 sequences of 7 to 1,200 tokens, 1,237 in all, the longest 1200, 30, 7"
    with pytest.raises(InfeasibleError, match=said):
        ours._plan(Lengths((7, 1200, 30)), forward_only=False)
    ours.problem = Problem((), (0, 1), (2**30, 2**30))
    (packed,) = ours._plan(Lengths((7, 1200, 30)), forward_only=False)
    assert packed.plan().lengths == (7, 1200, 30)
    assert packed.planning_us > 0
    ours.close()
    with pytest.raises(WorkerError):
        ours._plan(Lengths((7, 1200, 30)), forward_only=False)


def test_ranks_that_wait_while_costs_are_settled_say_so_and_end():
    reports, reported = [], threading.Event()
    ours = object.__new__(base_run.Run)
    ours.args, ours.rank = FLAGS, 3
    ours.watchdog = Watchdog(0.1, lambda message: (reports.append(message), reported.set()))

    def hang(note):
        note("measuring bytes")
        assert reported.wait(60)
        raise EppError("ended")

    with pytest.raises(EppError, match="ended"):
        settle(ours, hang)
    assert reports == ["rank 3 has been measuring bytes for 0.8 s, 0.1 s for each of 8 steps (wait_limit_seconds)"]
    assert ours.step is None


@pytest.mark.parametrize(("longest", "warns"), [(100, False), (900, True)])
def test_a_sequence_that_will_come_and_fits_no_plan_is_warned_of_with_the_first_batch(longest, warns, caplog):
    shape = ModelShape(num_layers=2, hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, vocab_size=32)
    costs = analytic_costs(shape, CPU, [1, 1])
    cap = max(plan(Problem((100, 100), (0, 1), (UNLIMITED_BYTES,) * 2), costs, Options()).predicted.peak_bytes)
    ours = object.__new__(sliced_run.SlicedRun)
    ours.problem, ours.replicas, ours.names = Problem((), (0, 1), (cap,) * 2), 1, {"cap_bytes": "--cap"}
    ours.longest_tokens, ours._can_plan = longest, threading.Event()
    options = Options(recompute=0, chunk_tokens=longest)
    ours.plan_with(Namespace(plan=lambda problem, **_: plan(problem, costs, options)))
    for _ in range(2):
        ours._plan(Lengths((50,)), forward_only=False)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warns
    assert all(f"of {longest} tokens" in line and "the least that would do" in line and "Raise --cap" in line for line in said)


@pytest.mark.parametrize(
    ("mine", "all_replicas", "fault"),
    [
        (7, [7, 7], ""),
        (7, [7, 8], r"checksums \[7, 8\].*seed, software and costs"),
        (7, [7, None], "another replica has no plan"),
        (None, [None, 7], ""),  # the one whose planning failed raises that error
    ],
)
def test_replicas_that_divide_a_batch_differently_or_have_no_plan_end_the_run(mine, all_replicas, fault):
    """Or sequences would be trained twice, or never."""
    ours = object.__new__(sliced_run.SlicedRun)
    ours.plans, ours.lockstep_groups = True, ((0,), (1,))
    ours.planning_ranks = Namespace(from_each=lambda mine: all_replicas)
    with pytest.raises(DisagreementError, match=fault) if fault else nullcontext():
        ours._check_division(mine)
    ours.plans, ours.planning_ranks = False, None
    ours._check_division(mine)


@pytest.mark.parametrize(
    ("writer", "collected"),
    [
        ({}, {10, 20}),
        ({"tensorboard_dir": "", "wandb_project": ""}, {10, 20}),
        ({"tensorboard_dir": "runs"}, {4, 8, 10, 12, 16, 20}),
        ({"wandb_project": "epp"}, {4, 8, 10, 12, 16, 20}),
    ],
)
def test_iterations_are_collected_when_the_log_or_a_writer_that_is_there_shows_them(writer, collected):
    flags = {"log_interval": 10, "tensorboard_log_interval": 4, "epp_report_dir": None, "epp_schedule": "elastic"}
    run = Namespace(args=Namespace(**flags, **writer), iteration=0, features=())
    planned = Namespace(plan=object())
    reports = [IterationReport.begin(run, planned, forward_only=False) for _ in range(20)]
    assert {report.iteration for report in reports if report.collects} == collected
