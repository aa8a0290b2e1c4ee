"""Advice as text and JSON: configurations whose times are given, so that every figure can be checked with a pencil."""

import math
import re
from dataclasses import replace

import pytest

from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed
from megatron_epp.planner import Decisions
from megatron_epp.tools.advice.advice_text import as_json, as_text, why_slower
from megatron_epp.tools.advice.causes import CAUSES, Gain, Stock
from megatron_epp.tools.advice.configuration_search import Advice, _simplest_first
from megatron_epp.tools.advice.judge import Baseline, Judged, Misfit, Parts
from megatron_epp.tools.advice.question import Configuration, Question
from megatron_epp.tools.formulas import H100
from megatron_epp.tools.formulas.library import Cluster
from tests.support.plan.small_plans import one_f_one_b

FLAGS = {"num_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 4096, "bf16": True}
QUESTION = Question(FLAGS, Cluster("nodes-of-two", H100, None, 2), 4, 8 << 30, (4, 4, 2), 4)
CONFIG = Configuration(1, 1, 2, 2, layers=(4, 4))
PARTS = Parts(compute_us=600.0, exchange_us=100.0, recompute_us=100.0, bubble_us=100.0, waiting_us=60.0, reduction_us=40.0)
PLAN = one_f_one_b()
BEST = Judged(CONFIG, PARTS, replace(PLAN, predicted=replace(PLAN.predicted, peak_bytes=(3 << 30, 1 << 30))), is_exact=True)


def entry(config=CONFIG, is_exact=True, **more_us):
    """An entry whose step has the parts of the best and some microseconds more of what is named."""
    parts = replace(PARTS, **{name: getattr(PARTS, name) + value for name, value in more_us.items()})
    return Judged(config, parts, BEST.plan, is_exact)


GAIN = Gain((1600.0, 1280.0, 1024.0, 1024.0, 1000.0, 1000.0))


def advice(best=(BEST,), slower=(), refused=(), plain=None, gain=GAIN):
    return Advice(QUESTION, tuple(best), tuple(slower), tuple(refused), plain, gain)


def stock(step_us, config=CONFIG, rows=8, steps=0, modes=("full",)):
    return Baseline(config, Stock(step_us, config.stages, rows, None, None, Decisions((), (), [[steps]], modes)))


def words(text):
    return " ".join(text.split())


def test_a_step_takes_the_sum_of_its_parts_and_tokens_per_second_are_those_of_the_whole_batch():
    assert (PARTS.step_us, entry(bubble_us=250.0).parts.step_us) == (1000.0, 1250.0)
    assert (BEST.peak_bytes, advice().tokens_per_s(1000.0)) == (3 << 30, 10_000.0)


@pytest.mark.parametrize(
    ("part", "facts"),
    [
        ("compute_us", ("computing takes 73%", "(best: 60%)", "its 3 chunks have 3 tokens on average, and kernels are slower")),
        ("exchange_us", ("exchange within", "40%", "(best: 10%)")),
        ("recompute_us", ("recompute takes 40%", "(best: 10%)", "leave 1.00 GiB for activations")),
        ("bubble_us", ("a pipeline of 2 is 40%", "(best: 10%)", "10 tokens for each replica")),
        ("waiting_us", ("2 replicas", "37%", "(best: 6%)", "the longest document has 4 tokens", "a fair share has 5")),
        ("reduction_us", ("gradients over 2 ranks takes 36%", "(best: 4%)")),
    ],
)
def test_the_part_that_takes_most_of_the_extra_time_is_the_reason(part, facts):
    other = entry(**{part: 500.0, "compute_us" if part != "compute_us" else "bubble_us": 1.0})
    room = replace(other.plan, cap_bytes=(2 << 30, 3 << 30), static_bytes=(1 << 30, 1 << 30))
    why = why_slower(QUESTION, replace(other, plan=room), BEST)
    assert [fact for fact in ("1.50x the time", *facts) if fact not in words(why)] == []


def test_exchanges_are_told_with_the_sizes_that_share_a_layer_and_whether_they_leave_a_node():
    experts = replace(QUESTION, flags=FLAGS | {"num_experts": 4})
    for asked, sizes, text in (
        (QUESTION, Configuration(2, 1, 1, 2), "TP 2 takes"),
        (experts, Configuration(2, 2, 1, 1, expert=2), "TP 2 x CP 2 x EP 2 across nodes takes"),
        (experts, Configuration(2, 1, 1, 2, expert=2), "TP 2 x EP 2 takes"),  # experts' ranks are neighbours
        (experts, Configuration(2, 1, 1, 2, expert=2, expert_tensor=2), "TP 2 x EP 2 x ETP 2 across nodes takes"),
    ):
        assert f"exchange within {text} 40%" in why_slower(asked, entry(config=sizes, exchange_us=500.0), BEST)


def test_what_is_close_or_slower_in_small_parts_alone_has_no_reason():
    assert why_slower(QUESTION, entry(bubble_us=20.0), BEST) == "as good within 2% (+2.0%)"
    spread = entry(compute_us=5.0, exchange_us=5.0, recompute_us=5.0, bubble_us=5.0, waiting_us=5.0, is_exact=False)
    assert why_slower(QUESTION, spread, BEST) == "about 1.02x the time"


def test_no_more_configurations_are_listed_than_asked_for():
    slower = [entry(Configuration(1, 1, 2, 2, virtual=count), bubble_us=100.0 * count) for count in range(2, 12)]
    assert "and 4 more (--all lists them)" in as_text(advice(slower=slower), 1, everything=False)
    everything = as_text(advice(slower=slower), 1, everything=True)
    assert "more (--all" not in everything
    assert all(f"VPP {count} looped:" in everything for count in range(2, 12))


@pytest.mark.parametrize(
    ("step_us", "words_of_it", "is_as_good"),
    [
        (900.0, "Megatron's own schedule is faster: plain 1F1B at its best has", True),
        (1030.0, "Megatron's own schedule is as good (within 3%)", True),
        (1500.0, "Elastic plans pay", False),
    ],
)
def test_plain_1f1b_is_compared_with_the_best(step_us, words_of_it, is_as_good):
    given = advice(plain=stock(step_us))
    text = words(as_text(given, 1, everything=False))
    assert words_of_it in text
    assert f"{10 / step_us * 1e6:,.0f} tokens/s, {1000 / step_us:.0%} of the best above." in text
    assert given.plain_is_as_good == is_as_good
    assert "rows of up to 8 tokens and no recompute:" in text

    def told(*args, **named):
        return words(as_text(advice(plain=stock(step_us, *args, **named)), 1, everything=False))

    assert "and recompute of a layer of each stage:" in told(steps=1)
    assert "rows of up to 8 tokens and recompute of 3 layers of each stage:" in told(steps=3)
    for config, is_told in ((CONFIG, False), (replace(CONFIG, expert=2), True)):
        assert ("Its replicas are taken not to wait for each other where they share experts" in told(config)) == is_told
    several = told(Configuration(1, 1, 2, 2, virtual=2, layers=(2,) * 4), steps=2, modes=("mlp",))
    assert "interleaved 1F1B at its best has" in several
    assert "recompute of norms and MLPs:" in several


def test_the_gain_is_divided_by_cause_and_the_factors_multiply_to_the_whole():
    text = as_text(advice(), 1, everything=False)
    factors = dict(zip(map(re.escape, CAUSES), ("1.25x", "1.25x", "1.00x", "1.02x", "1.00x"), strict=True))
    factors |= {"all together, over 1F1B of even layers, one stage per rank": "1.60x"}
    for cause, factor in (factors | {"of it by plans, over Megatron's own at its best": "1.02x"}).items():
        assert re.search(rf"^{cause} +{factor}$", text, re.MULTILINE)
    assert math.prod(GAIN.factors) == pytest.approx(1.6)
    row = as_json(advice(plain=stock(1024.0)))["gain"]
    assert math.prod(one["factor"] for one in row["causes"]) == pytest.approx(1.6)
    assert row["over_megatron"] == pytest.approx(1.024)


def test_what_fits_only_with_a_cause_has_no_factor_and_the_gain_is_over_the_first_that_fits():
    text = "\n".join(Gain((math.inf, math.inf, 1500.0, 1200.0, 1000.0, 750.0)).lines())
    assert re.search(r"layers and virtual stages.* 1.00x\n.*packing.* fits only so\n", text)
    assert re.search(r"all together, over the first that fits +2.00x", text)
    nothing = Gain((math.inf,) * 4 + (1000.0, 1000.0))
    assert re.search(r"slices.* fits only so\n", "\n".join(nothing.lines()))
    assert math.isinf(nothing.over_megatron)


def test_tokens_in_common_count_for_each_sequence_in_speed_and_trees_are_what_replicas_wait_for():
    tree = replace(QUESTION, lengths=(40, 40, 40, 40), borrowed=(NOTHING_BORROWED, *(Borrowed(0, 30),) * 2, NOTHING_BORROWED))
    text = words(as_text(Advice(tree, (BEST,), (entry(waiting_us=400.0),), (), None, GAIN), 1, everything=False))
    assert "160 tokens (60 of them in common with others)" in text
    assert "Tokens per second count what sequences have in common for each of them." in text
    assert " 160,000 " in text
    assert "2 replicas wait for the slowest for 33% of a step (best: 6%), on which sequences that begin alike stay" in text
    assert "in common" not in as_text(advice(), 1, everything=False)


def test_json_has_the_same_figures():
    slower, refused = entry(bubble_us=1000.0, is_exact=False), Misfit("TP 4", "too wide")
    found = as_json(advice(slower=[slower], refused=[refused], plain=stock(2000.0)))
    assert (found["devices"], found["context"], found["sequences"], found["tokens"]) == (4, 4, 3, 10)
    (best,), (row,) = found["best"], found["slower"]
    assert (best["step_us"], best["tokens_per_s"], best["why"], best["is_exact"]) == (1000.0, 10_000.0, "", True)
    assert (best["layout"]["pipeline"], best["peak_bytes"], best["parts"]["bubble_us"]) == (2, 3 << 30, 100.0)
    assert (row["step_us"], row["tokens_per_s"], row["is_exact"]) == (2000.0, 5_000.0, False)
    assert row["why"].startswith("about 2.00x the time: the bubble")
    assert found["refused"] == [{"name": "TP 4", "why": "too wide", "needed_bytes": 0}]
    assert (found["plain_1f1b"]["step_us"], found["plain_1f1b"]["is_as_good"]) == (2000.0, False)
    assert as_json(advice())["plain_1f1b"] is None


def test_the_simplest_of_close_ones_leads_and_how_close_the_others_are_is_told():
    simple = entry(Configuration(2, 1, 1, 2, layers=(8,)), bubble_us=15.0)
    several = entry(Configuration(1, 2, 2, 1, virtual=2, layers=(2, 2, 2, 2)))
    far = entry(Configuration(1, 1, 1, 4, layers=(8,)), bubble_us=30.0)  # simpler still
    assert _simplest_first([several, simple, far]) == [simple, several, far]
    text = words(as_text(advice([simple, several, far]), 3, everything=False))
    assert "TP 1 CP 2 PP 2 DP 1 VPP 2 looped: as good within 2% (-1.5%) TP 1 CP 1 PP 1 DP 4: as good within 2% (+1.5%)" in text
    fast, slow = entry(Configuration(2, 1, 1, 2, layers=(8,))), entry(Configuration(1, 2, 1, 2, layers=(8,)), bubble_us=5.0)
    assert _simplest_first([slow, fast]) == [fast, slow], "of equally simple ones the fastest"
    uneven, even = entry(Configuration(1, 1, 2, 2, layers=(5, 3))), entry(CONFIG, bubble_us=19.0)
    assert _simplest_first([uneven, even])[0] is even
