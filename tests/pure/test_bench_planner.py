"""The planner's benchmark: its cases, and what it keeps of them. `test_benches.py` runs it in its reduced form."""

import math

from megatron_epp.cost.library import load_flags, shape_of
from scripts.bench.planner.report import TUNED, against, text
from scripts.bench.planner.runs import BATCHES, RunCase
from scripts.bench.planner.suite import CAPS_GB, CONTEXTS, MODELS, STAGES, Case, all_cases, row, sampled_cases


def test_the_suite_computes_the_loss_as_training_with_its_flags_does():
    blocks = []
    for case in sampled_cases()[::8]:
        ranks = {"tensor_model_parallel_size": case.shape.tensor_parallel, "context_parallel_size": case.shape.context_parallel}
        trained = shape_of(load_flags(case.model) | ranks | {"seq_length": case.context})
        assert case.shape.loss_block_tokens == trained.loss_block_tokens
        blocks.append(trained.loss_block_tokens)
    assert any(blocks)


def test_costs_of_the_suite_tell_weight_gradients_apart_and_have_a_link_to_the_host():
    for case in sampled_cases()[::8]:
        assert case.costs.splits_weight
        assert case.costs.host_us(1 << 30) < math.inf


def test_a_run_has_several_batches_and_room_for_the_longest_sequence():
    case = RunCase("wikipedia", 1048576, 8, "llama3-8b", 40)
    assert len({problem.lengths for problem in case.batches}) == BATCHES
    assert case.batches[0].lengths == case.lengths
    assert max(case.worst.lengths) == case.longest > max(max(problem.lengths) for problem in case.batches)
    assert len(case.worst.lengths) == len(case.lengths)
    alone = Case("wikipedia", 1048576, 8, "llama3-8b", 40)
    assert case.shape.ranks > alone.shape.ranks, "its pipeline is made for its own batch"


def test_the_sample_covers_everything_evenly():
    cases = [case for case in sampled_cases() if case.lengths_like in ("wikipedia", "code", "chat")]
    assert set(cases) <= set(all_cases())
    assert len(set(cases)) == 30
    for field, values in (("context", CONTEXTS), ("stages", STAGES), ("model", MODELS), ("cap_gb", CAPS_GB)):
        counts = [sum(getattr(case, field) == value for case in cases) for value in values]
        assert sum(counts) == 30
        assert max(counts) - min(counts) <= 2


def test_batches_are_the_same_every_time_and_keep_to_the_context():
    for case in sampled_cases():
        lengths = type(case)(case.lengths_like, case.context, case.stages, case.model, case.cap_gb).lengths
        assert lengths == case.lengths
        assert 1 <= min(lengths) <= max(lengths) <= case.context


def test_a_case_that_nobody_can_plan_is_reported_as_such():
    case = all_cases()[0]
    hopeless = type(case)(case.lengths_like, 8192, 2, "llama3-8b", 1)
    rows = [{"case": TUNED} | row(hopeless, ("seq1f1b",))]
    assert against(rows, "seq1f1b")["both_have_a_plan"] == 0
    assert "None of 1 cases has a plan" in text(None, rows)
    assert "no plan" in text(None, rows)
