"""What `advise` prints can be had again: its commands plan the same batches with the same costs, to the same figures."""

import json

import pytest

from megatron_epp.advice import configuration_search
from megatron_epp.advice.configuration_search import advise
from megatron_epp.advice.judge import exactly
from megatron_epp.advice.question import Configuration
from megatron_epp.cli import main as cli
from megatron_epp.cli.advise import plan_flags, question_of
from megatron_epp.cli.lengths import batches_of, lengths_of
from megatron_epp.cli.main import main
from megatron_epp.plan.serialize import load

SMALL = ["--layers", "8", "--hidden", "512", "--ffn", "1024", "--heads", "8", "--kv-heads", "2", "--vocab", "4096"]
CHATS = ["--lengths", "chat", "--context", "8192", "--global-batch-size", "16"]


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
    "flags",
    [
        pytest.param(["--memory-cap-gb", "2.05", "--offload", "off"], id="tight"),
        pytest.param(
            ["--memory-cap-gb", "1.2", "--offload", "on", "--vocab-parallel", "auto"], id="offload", marks=pytest.mark.slow
        ),
        pytest.param(["--virtual-stages", "2", "--stages", "2", "--offload", "off"], id="several"),
        pytest.param(["--seed", "7", "--offload", "off"], id="seed"),
    ],
)
def test_every_figure_of_the_advice_is_had_again_by_its_flags(flags, again, monkeypatch):
    monkeypatch.setattr(configuration_search, "PLANNED", 4)
    args = parsed("advise", *SMALL, "--devices", "4", *CHATS, "--context-parallel", "1", *flags)
    question = question_of(args)
    advice = advise(question)
    assert len(advice.best) == 4
    for entry in advice.best:
        made, peaks = again(plan_flags(args, question, entry))
        assert sorted(made.lengths) == sorted(entry.plan.lengths)
        assert made.predicted.makespan_us == entry.plan.predicted.makespan_us
        assert made.predicted.peak_bytes == entry.plan.predicted.peak_bytes == tuple(peaks)


@pytest.mark.parametrize("devices", [4, 16])
def test_links_are_those_that_are_advised_with(devices, again):
    args = parsed("advise", *SMALL, "--devices", str(devices), *CHATS, "--offload", "off")
    question = question_of(args)
    config = Configuration(1, 2, 2, devices // 4, layers=(4, 4))
    entry = exactly(question, config)
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
        plan = parsed("plan", "--lengths", "chat", "--context", "8192", "--batch-size", "16", "--seed", seed)
        compare = parsed("compare", "--lengths", "chat", "--context", "8192", "--batch-size", "16", "--seed", seed)
        assert lengths_of(plan) == batches_of(compare)[0][1] == lengths
    assert advised["0"] != advised["1"]
    assert len(lengths_of(parsed("plan", "--lengths", "chat"))) == 512
