"""Advice on parallel sizes, for a small model on a few devices, and plans of it by the commands that it prints."""

import json
import math
from dataclasses import asdict, replace
from unittest.mock import patch

import pytest

from megatron_epp.launch.yaml_settings import load_settings
from megatron_epp.mcore.arguments.layout import world_of
from megatron_epp.plan import InfeasibleError
from megatron_epp.plan.first_fit import pack_whole
from megatron_epp.plan.proof import check
from megatron_epp.plan.serialize import load
from megatron_epp.plan.units import format_gib
from megatron_epp.planner import UNLIMITED_BYTES, Decisions, Options, plan
from megatron_epp.planner.baselines.whole import UniformDecisions
from megatron_epp.tools.advice import configuration_search
from megatron_epp.tools.advice.advice_text import as_json, as_text, epp_settings, recipe_text, stock_settings
from megatron_epp.tools.advice.causes import STAGES_PER_RANK, Gain, Stock, stock_text, without_shards
from megatron_epp.tools.advice.configuration_search import NothingFitsError, advise, candidates
from megatron_epp.tools.advice.judge import Baseline, choices_of, exactly, misfit, shares_by_work, step_without_shards_us
from megatron_epp.tools.advice.question import Configuration, Question
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.cli.advise import plan_flags, question_of
from megatron_epp.tools.cli.lengths import batches_of, lengths_of
from megatron_epp.tools.cli.main import main
from megatron_epp.tools.formulas import H100, H100_NODE, analytic_profile
from megatron_epp.tools.formulas.analytic import exchange_line
from megatron_epp.tools.formulas.library import Cluster, load_cluster, load_flags, shape_of
from tests.support.plan.planner_cases import web_lengths

MODEL = {
    "num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 8, "vocab_size": 8192,
    "group_query_attention": True, "num_query_groups": 2, "swiglu": True, "bf16": True,
}  # fmt: skip
NODES_OF_TWO = Cluster("nodes-of-two", H100, None, 2)
CONTEXT = 32768
SKEWED = (CONTEXT, *web_lengths(7, 1, CONTEXT))
SMALL = ["--layers", "8", "--hidden", "512", "--ffn", "1024", "--heads", "8", "--kv-heads", "2", "--vocab", "4096"]
ADVISE = ["advise", *SMALL, "--lengths", "900,300,4000", "--global-batch-size", "8"]
SMALL_FLAGS = MODEL | {"hidden_size": 512, "ffn_hidden_size": 1024, "vocab_size": 4096}


def question(lengths=SKEWED, cap_bytes=UNLIMITED_BYTES, devices=4, **rest) -> Question:
    return Question(MODEL, NODES_OF_TWO, devices, cap_bytes, tuple(lengths), CONTEXT, **rest)


def fits(asked: Question) -> bool:
    return any(misfit(asked, config) is None for config in candidates(asked)[0])


@pytest.fixture(scope="module", autouse=True)
def _small_searches():
    with patch.multiple(configuration_search, SEARCHED=2, PLANNED=4):
        yield


@pytest.fixture
def _smallest_searches():
    with patch.multiple(configuration_search, SEARCHED=1, PLANNED=1):
        yield


@pytest.fixture(scope="module")
def tight():
    return advise(question(cap_bytes=5 << 30))


def test_what_is_advised_fits_memory_and_uses_all_devices(tight):
    assert len(tight.best) > 2
    for entry in tight.best:
        config = entry.config
        assert entry.peak_bytes <= 5 << 30
        assert check(entry.plan) == []
        assert config.tensor * config.context * config.pipeline * config.data == 4
        assert sum(entry.plan.num_layers) == 8
        assert misfit(tight.question, config) is None
        assert entry.parts.step_us == pytest.approx(entry.plan.predicted.makespan_us + entry.parts.reduction_us)
        assert (entry.parts.exchange_us > 0) == (config.ranks > 1)
        assert tight.best[0].parts.step_us <= 1.02 * entry.parts.step_us, "the best comes first"
    for row in as_json(tight)["slower"]:
        ratio = row["step_us"] / tight.best[0].parts.step_us
        assert row["why"].startswith(f"about {ratio:.2f}x" if ratio > 1.02 else "as good")


def test_a_configuration_that_does_not_fit_is_named_with_what_it_needs(tight):
    unfit = [one for one in tight.refused if one.config is not None]
    assert unfit
    text = as_text(tight, 5, everything=True)
    for one in unfit:
        needed, cap = one.needed_bytes, 5 << 30
        assert needed > cap
        assert f"{one.name}: {one.why}" in text
        assert f"needs {format_gib(needed, cap)} of {format_gib(cap, needed)}" in one.why.replace("need ", "needs ")
        asked = tight.question.problem(one.config, (CONTEXT,)), tight.question.costs(one.config), tight.question.options
        with pytest.raises(InfeasibleError):
            plan(*asked)
        if "alone" not in one.why:
            assert misfit(replace(tight.question, cap_bytes=one.needed_bytes), one.config) is None


@pytest.mark.usefixtures("_smallest_searches")
def test_a_sequence_as_long_as_the_context_must_fit_though_the_batch_has_none(tight):
    short = advise(replace(tight.question, lengths=(512,) * 16))
    named = {one.config for one in short.refused}
    assert {one.config for one in tight.refused} <= named
    assert not named & {entry.config for entry in (*short.best, *short.slower)}


def test_of_equal_lengths_plain_1f1b_is_as_good_and_of_skewed_ones_in_a_pipeline_elastic_plans_pay():
    advice = advise(replace(question([8192] * 32), context=8192))
    assert advice.plain_is_as_good
    assert "Megatron's own schedule is as good" in as_text(advice, 3, everything=False)
    advice = advise(question(fixed={"pipeline": 4}))
    assert all(entry.parts.exchange_us == 0 for entry in advice.best)  # no rank shares a layer
    assert advice.plain is not None
    assert not advice.plain_is_as_good
    assert "Elastic plans pay" in as_text(advice, 3, everything=False)


@pytest.mark.parametrize("cap_bytes", [UNLIMITED_BYTES, 9 << 30])
def test_the_gain_is_over_megatrons_schedule_at_its_best_which_can_be_planned_again(cap_bytes):
    asked = question((CONTEXT, *web_lengths(15, 1, CONTEXT)), cap_bytes, fixed={"pipeline": 4})
    advice = advise(asked)
    plain, gain, best = advice.plain, advice.gain, advice.best[0]
    assert math.prod(gain.factors) * best.parts.step_us == pytest.approx(gain.steps_us[0])
    assert gain.over_megatron * best.parts.step_us == pytest.approx(plain.stock.step_us)
    assert min(gain.factors[:3]) >= 1, "what may be done without a cause may be done with it"
    stock = plain.stock
    made = plan(stock.problem, stock.costs, Options(planner="1f1b-packed", context=stock.row_tokens))
    assert check(made) == []
    assert made.predicted.makespan_us + asked.reduction_us(plain.config) == pytest.approx(plain.stock.step_us)
    assert stock.peak_bytes <= max(made.predicted.peak_bytes) <= cap_bytes


def many_short(vocab_size=8192, **rest):
    """Choices of Megatron's own schedule for two replicas of four ranks."""
    asked = question(web_lengths(96, 2, 4096), devices=8, fixed={"pipeline": 4}, **rest)
    asked = replace(asked, context=4096, flags=MODEL | {"vocab_size": vocab_size})
    config = Configuration(1, 1, 4, 2, layers=(2,) * 4)
    return choices_of(asked, config, shares_by_work(asked, config))


def test_each_step_of_megatrons_schedule_has_the_causes_before_it_and_no_other():
    choices = many_short()
    dealt, by_work = choices.problems
    assert sorted(dealt.lengths) != sorted(by_work.lengths)
    even, levelled, packed = choices.steps()
    assert even.layout == choices.even != levelled.layout
    assert even.step_us > levelled.step_us > packed.step_us
    for step in (even, levelled):
        assert (step.problem.lengths, step.row_tokens) == (dealt.lengths, 4096)
        assert set(step.decisions.chunks) == set(pack_whole(dealt.lengths, 4096))
    assert packed.problem.lengths == by_work.lengths
    for step in (even, levelled, packed):
        assert choices.added_us(step.layout) > 0
        pipeline_us = step.decisions.makespan_us(step.problem, step.costs)
        assert step.step_us == pytest.approx(pipeline_us + choices.added_us(step.layout))
    made = plan(packed.problem, packed.costs, Options(planner="1f1b-packed", context=packed.row_tokens))
    assert 0.95 * max(made.predicted.peak_bytes) < packed.peak_bytes <= max(made.predicted.peak_bytes)
    given = replace(choices, counts=(), layouts=(levelled.layout,)).steps()[1]
    assert given.layout == levelled.layout, "layouts of plans are tried"
    assert Gain.of((even, None, levelled), 3.0, 2.0).steps_us == (even.step_us, math.inf, levelled.step_us, 3.0, 2.0)


def test_layers_move_away_from_the_rank_with_the_largest_vocabulary():
    choices = replace(many_short(vocab_size=128000), counts=())
    assert choices.steps()[2].layout.layers[-1] < choices.even.layers[-1]
    plain, levelled = without_shards(replace(choices.even, shards_vocabulary=True), choices.problems[0], choices.costs_of)
    assert plain == choices.even
    assert levelled.layers[-1] < plain.layers[-1]


def test_recompute_and_copies_that_are_chosen_for_each_row_are_faster_than_uniform_recompute():
    choices = many_short(cap_bytes=7 << 29)
    packed = choices.steps()[2]
    assert packed.recompute != "no recompute"
    alone = replace(choices, options=replace(choices.options, offload=False)).by_chunk(packed)
    copied = replace(choices, options=replace(choices.options, offload=True)).by_chunk(packed)
    assert packed.step_us > alone.step_us > copied.step_us
    for step in (alone, copied):
        pipeline_us = step.decisions.makespan_us(step.problem, step.costs)
        assert step.step_us == pytest.approx(pipeline_us + choices.added_us(step.layout))


def test_megatrons_own_schedule_may_have_virtual_stages_unless_the_question_fixes_them():
    advice = advise(replace(question([2048] * 32, fixed={"pipeline": 4}), context=2048))
    assert advice.gain.factors[2] == 1, "memory is not short, so nothing is recomputed"
    one_stage = advise(replace(advice.question, fixed={"pipeline": 4, "virtual": 1})).plain
    assert one_stage.config.virtual == 1 < advice.plain.config.virtual
    assert one_stage.stock.step_us > 1.03 * advice.plain.stock.step_us


def test_blocks_of_the_loss_are_lent_to_megatron_only_where_its_logits_do_not_fit(capsys):
    """Rows of the longest document alone: its logits take 15 GiB."""
    flags = ["--model", "llama3-8b", "--stages", "4", "--tensor-parallel", "2", "--sequence-parallel", "--lengths", "60000,900"]
    flags += ["--cluster", "h100x8", "--planner", "greedy", "--planner", "1f1b-packed", "--json"]
    for cap_gb, is_lent in ((200, False), (40, True)):
        assert main(["compare", *flags, "--memory-cap-gb", str(cap_gb)]) == 0
        packed, greedy = sorted(json.loads(capsys.readouterr().out), key=lambda row: row["planner"])
        packed_us = greedy["gain"]["steps_us"][2]
        assert packed_us is not None, "nothing that Megatron's schedule can run is called too large"
        assert (packed_us < 0.999 * packed["makespan_us"]) == (not is_lent)


def test_megatrons_flags_are_those_of_its_own_schedule_alone():
    asked = replace(question([2048] * 32, fixed={"pipeline": 4}), flags=MODEL | {"num_experts": 4, "moe_router_topk": 2})
    config = Configuration(1, 1, 4, 1, virtual=2, layers=(1,) * 8)
    rows = pack_whole(asked.lengths, 5 * 2048)
    decisions = Decisions(rows, (), [[1] * len(rows)] * 8, ("mlp",))
    stock = Stock(1.0, config.stages, 10240, asked.problem(config, ()), asked.costs(config), decisions)
    flags = stock_settings(asked, Baseline(config, stock))
    assert not any(name.startswith("epp") for name in flags)
    assert (flags["seq_length"], flags["global_batch_size"], flags["num_virtual_stages_per_pipeline_rank"]) == (10240, 7, 2)
    assert flags["microbatch_group_size_per_virtual_pipeline_stage"] == 7
    assert flags["recompute_granularity"] == "selective"
    assert flags["recompute_modules"] == ["layernorm", "mlp", "moe"]
    full = stock._replace(decisions=replace(decisions, modes=("full",)))
    assert stock_settings(asked, Baseline(config, full))["recompute_num_layers"] == 1
    groups = stock._replace(decisions=UniformDecisions(rows, (), [[1] * len(rows)] * 8, group=4))
    flags = stock_settings(asked, Baseline(config, groups))
    assert (flags["recompute_method"], flags["recompute_num_layers"]) == ("uniform", 4)
    assert groups.recompute == "recompute of all layers in groups of 4"


def test_sizes_that_cannot_be_are_ruled_out_by_name():
    configs, refused = candidates(question([512] * 30, devices=16))
    why = {one.name: one.why for one in refused}
    assert "leave a node of 2" in why["TP above 2"]
    assert "8 layers" in why["PP above 8"]
    assert "batch of 30 does not divide over 4" in why["DP 4"]
    assert {config.data for config in configs} == {1, 2}
    configs, refused = candidates(Question(MODEL, load_cluster("h100x8"), 8, UNLIMITED_BYTES, SKEWED, CONTEXT))
    assert "key and value heads (2)" in {one.name: one.why for one in refused}["TP 4"]
    assert max(config.tensor for config in configs) == 2
    configs, _ = candidates(question(fixed={"tensor": 2, "pipeline": 2}))
    assert {(config.tensor, config.pipeline) for config in configs} == {(2, 2)}, "fixed sizes are not searched"


def test_context_parallel_sizes_need_not_divide_the_query_heads_but_key_heads_of_gated_delta_nets():
    model = load_flags("qwen3.5-27b")
    configs, refused = candidates(Question(model, load_cluster("h100x8"), 32, UNLIMITED_BYTES, SKEWED * 32, CONTEXT))
    assert max(config.tensor * config.context for config in configs) == 16 == model["linear_num_key_heads"]
    assert model["num_attention_heads"] % 16
    assert "32 ranks cannot share key heads of gated delta nets (16)" in {one.name: one.why for one in refused}["TP x CP"]


def test_experts_are_shared_inside_a_node():
    experts = MODEL | {"num_experts": 4, "moe_router_topk": 2}
    configs, _ = candidates(replace(question(), flags=experts))
    assert {config.expert for config in configs if config.tensor == 2} == {config.expert for config in configs} == {1, 2}
    assert {config.expert_tensor for config in configs} == {1}
    shared, inside = (
        next(one for one in configs if (one.expert, one.ranks, one.data) == (2, *sizes)) for sizes in ((1, 4), (2, 2))
    )
    assert (shared.lockstep_groups, inside.lockstep_groups) == (((0, 1), (2, 3)), ((0,), (1,)))
    assert inside.settings(experts).get("expert_tensor_parallel_size", inside.tensor) == 1
    whole, _ = candidates(replace(question(fixed={"tensor": 2, "expert_tensor": 2}), flags=experts))
    assert {config.expert for config in whole} == {1}  # two ranks of an expert fill a node of two


def test_ranks_on_several_nodes_exchange_slower():
    asked = question()

    def rate_of(config: Configuration) -> float:
        exchanges = asked.shape(config).exchanges
        return 1e6 * sum(one.num_bytes for one in exchanges) / exchange_line(exchanges, asked.rates).per_token_us

    assert rate_of(Configuration(1, 2, 1, 1)) == pytest.approx(H100.exchange_bytes)
    assert rate_of(Configuration(2, 1, 2, 1)) == pytest.approx(H100.exchange_bytes)
    assert H100.message_bytes < rate_of(Configuration(1, 4, 1, 1)) < H100.exchange_bytes


def test_what_holds_weights_alone_reduces_nothing_and_more_parameters_take_longer():
    asked = question()
    assert asked.reduction_us(Configuration(2, 1, 2, 1, layers=(4, 4))) == 0
    halves, uneven = (asked.reduction_us(Configuration(1, 1, 2, 2, layers=layers)) for layers in ((4, 4), (6, 2)))
    assert 0 < halves < uneven
    asked = replace(asked, flags=MODEL | {"vocab_size": 8})  # the layers' alone
    few, many = (asked.reduction_us(Configuration(1, 1, 2, 2, layers=layers)) for layers in ((4, 4), (8, 8)))
    assert many == pytest.approx(2 * few, rel=0.01)


def test_where_nothing_fits_each_change_that_is_named_would_do():
    asked = question(cap_bytes=3 << 30, fixed={"context": 1, "tensor": 2})
    with pytest.raises(NothingFitsError, match=r"nothing fits 3.00 GiB per device on 4 devices") as failure:
        advise(asked)
    changes = dict(change.removeprefix("--").split() for change in str(failure.value).split("would do: ")[1].split(", or "))
    assert set(changes) == {"memory-cap-gb", "context", "devices"}
    assert fits(replace(asked, cap_bytes=int(changes["memory-cap-gb"]) << 30))
    assert fits(replace(asked, devices=int(changes["devices"])))
    shorter = int(changes["context"])
    assert fits(replace(asked, context=shorter, lengths=tuple(min(n, shorter) for n in SKEWED)))
    assert not fits(replace(asked, cap_bytes=int(changes["memory-cap-gb"]) - 1 << 30))


def test_the_devices_that_would_do_are_the_smallest_multiple():
    asked = replace(question((1024,) * 4, cap_bytes=int(1.2 * 2**30), fixed={"context": 1, "tensor": 2}), context=1024)
    with pytest.raises(NothingFitsError, match=r"--devices 12$"):
        advise(asked)
    assert [fits(replace(asked, devices=devices)) for devices in (8, 12, 16)] == [False, True, True]


def test_a_configuration_says_its_flags():
    assert Configuration(2, 1, 2, 1, expert=2, expert_tensor=2, layers=(4, 4)).name == "TP 2 CP 1 PP 2 DP 1 EP 2 ETP 2"
    uneven = Configuration(1, 1, 2, 1, layers=(5, 3))
    assert uneven.settings({})["pipeline_model_parallel_layout"] == "Et*5|t*3L"
    assert uneven.settings({"mtp_num_layers": 2})["pipeline_model_parallel_layout"] == "Et*5|t*3mmL"
    there_and_back = Configuration(2, 1, 2, 1, virtual=2, placement="v", layers=(2, 2, 2, 2))
    assert there_and_back.rank_of == (0, 1, 1, 0)
    assert there_and_back.settings({})["num_virtual_stages_per_pipeline_rank"] == 2
    assert there_and_back.settings({})["sequence_parallel"] is True
    hybrid = {"hybrid_layer_pattern": "M*M*M*M*/*M"}  # with a depth of multi-token prediction, behind the last stage's layers
    assert there_and_back.settings(hybrid)["hybrid_layer_pattern"] == "M*|M*|M*|M*/*M"
    assert epp_settings(question(), there_and_back)["placement"] == "v"


@pytest.mark.usefixtures("_smallest_searches")
def test_the_command_prints_flags_and_writes_a_recipe_that_loads(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    command = [*ADVISE, "--devices", "2", "--offload", "on", "--split-weight"]
    assert main([*command, "-o", str(recipe)]) == 0
    printed = " ".join(capsys.readouterr().out.replace("\\", "").split())
    assert "--epp-offload on --epp-split-weight-gradient" in printed, "plans are made with what training is to do"
    assert main([*command, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]["layout"]
    settings = load_settings([recipe])
    flags, launch = settings.megatron, settings.launch
    assert (launch.nodes * launch.processes_per_node, world_of(flags) * best["data"]) == (2, 2)
    assert (flags["hidden_size"], flags["global_batch_size"], flags["seq_length"]) == (512, 8, 4000)
    assert settings.epp["memory_cap_gb"] == 72
    for name, long in (("tensor", "tensor_model"), ("context", "context"), ("pipeline", "pipeline_model")):
        assert flags[f"{long}_parallel_size"] == best[name]
        assert f"--{long.replace('_', '-')}-parallel-size {best[name]}" in printed
    shipped = ["--model", "llama3-8b", "--devices", "8", "--lengths", "8192", "--global-batch-size", "8"]
    assert main(["advise", *shipped, "--tensor-parallel", "4", "--pipeline-parallel", "2", "-o", str(recipe)]) == 0
    assert "models/llama3-8b" in recipe.read_text(), "a shipped model is included by name"
    assert load_settings([recipe]).megatron["num_layers"] == 32


@pytest.mark.parametrize(("more", "rows"), [({}, 8192), ({"padded_vocab_size": 8320}, 8320)])
def test_a_recipe_has_the_rows_of_the_embedding_that_the_model_says(more, rows):
    asked, config = replace(question(), flags=MODEL | more), Configuration(2, 1, 2, 1, layers=(4, 4))
    assert f"padded_vocab_size: {rows}\n" in recipe_text(asked, config, None, "--lengths code")


@pytest.mark.usefixtures("_smallest_searches")
def test_documents_beyond_the_context_are_what_training_makes_of_them(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    command = ["advise", *SMALL, "--devices", "2", "--lengths", "900,4000", "--context", "1000"]
    command += ["--global-batch-size", "5", "--pipeline-parallel", "2"]
    for flags, tokens, documents in (([], 900 + 4000, None), (["--documents", "truncate"], 2 * 900 + 3 * 1000, "truncate")):
        assert main([*command, *flags, "-o", str(recipe)]) == 0
        assert f"{tokens:,} tokens, of up to 1,000 tokens" in capsys.readouterr().out
        assert load_settings([recipe]).epp.get("documents") == documents


def profile_of(path, tensor=1):
    """As `megatron-epp profile` would write it for the small model, products and launches eight times as slow as by formula."""
    shape = shape_of(SMALL_FLAGS | {"tensor_model_parallel_size": tensor, "sequence_parallel": tensor > 1})
    slow = {f"launch_{name}_us": 8 * getattr(H100_NODE, f"launch_{name}_us") for name in ("forward", "backward")}
    rates = replace(H100_NODE, linear_flops=H100.linear_flops / 8, **slow)
    path.write_text(replace(analytic_profile(shape, rates), origin={"shape": asdict(shape)}).to_json())
    return str(path)


def test_measured_costs_take_the_place_of_formulas_for_the_sizes_that_were_measured(tmp_path, capsys):
    def advised(*more):
        assert main([*ADVISE, "--devices", "4", "--json", "--pipeline-parallel", "2", *more]) == 0
        return json.loads(capsys.readouterr().out)

    costs = ["--costs", profile_of(tmp_path / "one.json"), "--costs", profile_of(tmp_path / "two.json", tensor=2)]
    formulas, measured = (advised(*more, "--tensor-parallel", "2") for more in ([], costs))
    assert measured["best"][0]["step_us"] > 1.2 * formulas["best"][0]["step_us"]
    assert measured["settings"]["epp"]["costs"] == costs[-1]
    rows = advised(*costs)
    assert {(row["layout"]["tensor"], row["layout"]["context"]) for row in rows["best"]} <= {(1, 1), (2, 1)}
    assert "other TP, CP or EP" in {one["name"] for one in rows["refused"]}


def test_replicas_that_share_experts_are_planned_together_with_offload(capsys):
    assert main([*ADVISE, "--devices", "2", "--offload", "on", "--experts", "2", "--expert-parallel", "2"]) == 0
    assert "--epp-offload on" in capsys.readouterr().out


def test_where_nothing_fits_without_offload_all_is_planned_with_it():
    asked = question(cap_bytes=5 << 30, devices=2, fixed={"context": 1, "tensor": 2})
    with pytest.raises(NothingFitsError, match="without offload"):
        advise(asked)
    offloading = replace(asked, options=replace(asked.options, offload=True))
    best = advise(offloading).best[0]
    assert best.peak_bytes <= 5 << 30
    assert any(best.plan.copies)
    with pytest.raises(NothingFitsError):
        advise(replace(offloading, cap_bytes=3 << 30))


def test_offload_is_left_to_the_plans_where_there_is_a_link_unless_the_flag_says_it():
    command = ["advise", "--devices", "2", "--lengths", "900", "--global-batch-size", "2"]
    for flags, may_offload in (([], True), (["--offload", "off"], False), (["--offload"], True)):
        assert question_of(parsed(*command, *flags)).options.offload == may_offload


CHATS = ["--lengths", "agents", "--context", "8192", "--global-batch-size", "16"]


def parsed(command, *argv):
    return cli._parser([command]).parse([command, *argv])


@pytest.fixture
def again(tmp_path, capsys):
    """Return the plan of printed flags, and the peaks that `plan --memory` tells for them."""

    def run(flags):
        path = tmp_path / "plan.json"
        assert main(["plan", *flags, "-o", str(path)]) == 0
        capsys.readouterr()
        assert main(["plan", "--memory", *flags, "--json"]) == 0
        return load(path), [rank["peak_bytes"] for rank in json.loads(capsys.readouterr().out)["ranks"]]

    return run


@pytest.mark.parametrize(
    ("flags", "planned"),
    [
        pytest.param("--memory-cap-gb 2.05 --offload off --seed 7", 4, id="tight, another seed", marks=pytest.mark.slow),
        pytest.param("--memory-cap-gb 1.2 --offload on --vocab-parallel auto", 4, id="offload", marks=pytest.mark.slow),
        pytest.param("--virtual-stages 2 --stages 2 --offload off", 2, id="several"),
    ],
)
def test_every_figure_of_the_advice_is_had_again_by_its_flags(flags, planned, again, monkeypatch):
    monkeypatch.setattr(configuration_search, "PLANNED", planned)
    args = parsed("advise", *SMALL, "--devices", "4", *CHATS, "--context-parallel", "1", *flags.split())
    question = question_of(args)
    advice = advise(question)
    assert len(advice.best) == planned
    for entry in advice.best:
        made, peaks = again(plan_flags(args, question, entry))
        assert sorted(made.lengths) == sorted(entry.plan.lengths)
        assert made.predicted.makespan_us == entry.plan.predicted.makespan_us
        assert made.predicted.peak_bytes == entry.plan.predicted.peak_bytes == tuple(peaks)


def test_compare_divides_the_same_gain_over_the_same_schedule_of_megatrons(capsys):
    sizes = ["--tensor-parallel", "1", "--context-parallel", "1", "--stages", "4", "--virtual-stages", "2"]
    args = parsed("advise", *SMALL, "--devices", "4", *CHATS, *sizes, "--offload", "off", "--memory-cap-gb", "2.05")
    question = question_of(args)
    advice = advise(question)
    best = next(entry for entry in advice.best if entry.config.virtual == 2)
    shares = shares_by_work(question, best.config)
    choices = choices_of(question, best.config, shares, [best.config.stages])
    choices = replace(choices, counts=STAGES_PER_RANK)
    *_, stock = steps = choices.steps()
    gain = Gain.of((*steps, choices.by_chunk(stock)), step_without_shards_us(question, best), best.parts.step_us)
    flags = [*plan_flags(args, question, best), "--planner", "greedy", "--planner", "1f1b-packed"]
    assert main(["compare", *flags, "--json"]) == 0
    row = next(row for row in json.loads(capsys.readouterr().out) if row["planner"] == "greedy")
    assert row["gain"]["steps_us"] == pytest.approx(gain.steps_us)
    assert row["gain"]["over_megatron"] * row["makespan_us"] == pytest.approx(stock.step_us)
    assert main(["compare", *flags]) == 0
    printed = capsys.readouterr().out
    assert all(line in printed for line in gain.lines())
    assert stock_text(stock) in printed


@pytest.mark.parametrize("devices", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_links_are_those_that_are_advised_with(devices, again):
    args = parsed("advise", *SMALL, "--devices", str(devices), *CHATS, "--offload", "off")
    question = question_of(args)
    entry = exactly(question, Configuration(1, 2, 2, devices // 4, layers=(4, 4)))
    flags = plan_flags(args, question, entry)
    assert again(flags)[0].predicted.makespan_us == entry.plan.predicted.makespan_us
    at = flags.index("--devices")
    without = again([*flags[:at], *flags[at + 2 :]])[0]
    assert (without.predicted.makespan_us == entry.plan.predicted.makespan_us) == (devices == 16)


def test_a_value_of_zero_is_not_left_out_of_the_flags():
    args = parsed("advise", *SMALL, "--devices", "4", *CHATS, "--offload", "off", "--loss-block-tokens", "0")
    question = question_of(args)
    flags = plan_flags(args, question, exactly(question, Configuration(1, 2, 2, 1, layers=(4, 4))))
    assert flags[flags.index("--loss-block-tokens") + 1] == "0"


def test_a_distribution_is_drawn_alike_by_all_commands_and_as_the_seed_says():
    advised = {seed: question_of(parsed("advise", "--devices", "8", *CHATS, "--seed", seed)).lengths for seed in ("0", "1")}
    for seed, lengths in advised.items():
        plan = parsed("plan", "--lengths", "agents", "--context", "8192", "--batch-size", "16", "--seed", seed)
        compare = parsed("compare", "--lengths", "agents", "--context", "8192", "--batch-size", "16", "--seed", seed)
        assert lengths_of(plan).lengths == batches_of(compare)[0][1].lengths == lengths
    assert advised["0"] != advised["1"]
    assert len(lengths_of(parsed("plan", "--lengths", "agents")).lengths) == 512
