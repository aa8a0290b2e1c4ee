"""Lengths of sequences that begin like a parent: how they are written, drawn and refused, and what commands make of them."""

import functools
import json
import operator
import random
from dataclasses import replace

import pytest

from megatron_epp.features.trees import parents
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.problem import Lengths, Problem
from megatron_epp.plan.proof.plan_tables import check_borrowed
from megatron_epp.plan.serialize import load
from megatron_epp.planner import UNLIMITED_BYTES, result
from megatron_epp.tools.cli.advise import question_of
from megatron_epp.tools.cli.main import main
from tests.pure.test_advise import parsed
from tests.support.plan.random_forests import forest
from tests.support.plan.small_plans import chunk, make_plan

GROUP = "5000,5000@0:4000,4900@0:4000,4800@0:4000"
PAIRS = "900,800@0:700,600,500@2:400,300"
SMALL = ("--model", "tiny-gpt", "--cluster", "this-machine", "--layout", "even")
NONE = NOTHING_BORROWED


def test_a_list_and_lines_of_json_say_the_same_and_the_sequence_that_holds_a_token_lends_it():
    said = "6000, 5500@0:2000\n4000@1:3000 5000@1:1500 70"
    rows = [(6000,), (5500, 0, 2000), (4000, 1, 3000), (5000, 1, 1500), (70,)]
    records = [dict(zip(("tokens", "parent", "shared"), row, strict=False)) for row in rows]
    batch = Lengths((6000, 5500, 4000, 5000, 70), borrowed=(NONE, (0, 2000), (1, 3000), (0, 1500), NONE))
    assert parents.read(said) == parents.read("\n".join(map(json.dumps, records)) + "\n") == batch
    assert parents.read(parents.words(batch)) == batch
    assert parents.read("5@1:3,9") == Lengths((5, 9), borrowed=(Borrowed(1, 3), NONE))  # a parent may come later
    assert parents.read("70\n\n50").borrowed == ()


@pytest.mark.parametrize("seed", range(20))
def test_any_parents_become_what_a_plan_may_borrow(seed):
    """Each sequence of a random forest names any ancestor that has its prefix, as a user might, not the one that holds it."""
    rng = random.Random(seed)
    grown = forest(rng, trees=2, depth=4)
    texts = []
    for q, (length, (lender, shared)) in enumerate(zip(grown.lengths, grown.borrowed, strict=True)):
        others = [p for p in range(q) if shared and grown.texts[p][: shared + 1] == grown.texts[q][: shared + 1]]
        texts.append(f"{length}@{rng.choice(others)}:{shared}" if lender >= 0 else str(length))
    batch = parents.read(",".join(texts))
    plan = make_plan(["0F0 0B0"], (chunk((0, 0, 1)),))
    assert [*check_borrowed(replace(plan, lengths=batch.lengths, borrowed=batch.borrowed))] == []
    for q, length in enumerate(batch.lengths):
        own = [grown.texts[part.sequence][part.start : part.end] for part in path_of(q, length, batch.borrowed)]
        assert functools.reduce(operator.iadd, own, []) == grown.texts[q][:length]


WRONG = [
    ("9,8@2:3", "sequence 1 of 8 tokens names parent 2: there are sequences 0 to 1"),
    ("9,8@1:3", "sequence 1 of 8 tokens names itself as its parent"),
    ("9,8@0:0", "sequence 1 of 8 tokens shares 0 with its parent, sequence 0: 1 to 7 can be"),
    ("9,8@0:8", "sequence 1 of 8 tokens shares 8 with its parent, sequence 0: 1 to 7 can be"),
    ("5,8@0:6", "sequence 1 of 8 tokens shares 6 with its parent, sequence 0, which has 5"),
    ("9,9@3:2,9@1:2,9@2:3,9@1:1", "sequences 1, 2, 3 are parents of each other, in a circle"),
    ("9,8@0", "'8@0' is not a number of tokens (a whole number, 1 to 2,147,483,647), or tokens@parent:shared"),
    ("9\n8@0:5 0@0:1", "line 2: '0@0:1' is not a number"),
    ('{"tokens": 9}\n{"tokens": 8, "parent": 0}', "line 2: {'parent': 0, 'tokens': 8} is not of the form"),
    ('{"tokens": 9}\n\n{"tokens": 8, "parent": 0, "share": 2}', "line 3: "),
    ('{"tokens": [1, 2]}', "line 1: {'tokens': [1, 2]} is not of the form"),
    ('{"tokens": 0}', "line 1: tokens is 0; it is 1 to"),
    ('{"tokens": 9}\n{', "line 2 is not JSON"),
    ('{"tokens": 9, "parent": true, "shared": 2}', "is not of the form"),
    ('{"tokens": 9}\n7', "line 2: 7 is not of the form"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_lengths_that_no_tree_has_are_refused_by_sequence_or_line(text, says, capsys):
    with pytest.raises(EppError) as refusal:
        parents.read(text, has_lines="\n" in text)
    assert says in refusal.value.message
    if "{" not in text and "\n" not in text:
        assert main(["plan", "--lengths", text, *SMALL]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--lengths {text!r}" in line
        assert says in line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batch-size", "2"], None),
        (["--batch-size", "3"], "sequence 3 is in a batch of 3 to 4, and its parent, 2, is not: put "),
        (["--context", "800"], "more than 800, and none is cut where some have parents; raise --context to 900"),
        (["--context", "900", "--documents", "stream"], "--documents stream joins documents"),
    ],
)
def test_trees_are_neither_cut_nor_in_two_batches(flags, says, capsys):
    assert main(["compare", "--lengths", PAIRS, "--batches", "2", "--planner", "greedy", *flags, *SMALL]) == (2 if says else 0)
    assert says is None or says in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(5))
def test_sequences_of_a_tree_are_drawn_together_and_of_the_last_one_the_root_first(seed):
    sizes = [4, 1, 3, 2]
    at = [(100 * tree + number + 2, sum(sizes[:tree])) for tree in range(4) for number in range(sizes[tree])]
    batch = parents.read(",".join(f"{tokens}@{root}:1" if tokens % 100 > 2 else str(tokens) for tokens, root in at))
    for size in (3, 10, 24):
        drawn = parents.drawn(batch, size, seed)
        assert len(drawn.lengths) == size
        assert drawn == parents.drawn(batch, size, seed)
        problem = Problem(drawn.lengths, (0,), (UNLIMITED_BYTES,), borrowed=drawn.borrowed)
        counts = [(len(unit), {drawn.lengths[q] // 100 for q in unit}) for unit in problem.indivisible]
        assert all(len(trees) == 1 for _, trees in counts)
        assert sum(count != sizes[min(trees)] for count, trees in counts) <= 1
        assert sum(shared for _, shared in drawn.borrowed) == size - len(counts)
    assert parents.drawn(batch, 10, 0) != parents.drawn(batch, 10, 1)


def test_plan_runs_tokens_in_common_once_and_says_how_many_or_runs_sequences_alone_where_that_is_faster(tmp_path, capsys):
    (tmp_path / "groups.jsonl").write_text('{"tokens": 5000}\n' + '{"tokens": 4900, "parent": 0, "shared": 4000}\n' * 3)
    path = tmp_path / "plan.json"
    for source in (GROUP, str(tmp_path / "groups.jsonl")):
        assert main(["plan", "--lengths", source, "--stages", "2", "--layout", "even", "-o", str(path)]) == 0
        said = capsys.readouterr().out
        assert "[4000:" in said
        assert "]<0" in said
        assert "19,700 in all, of which 7,700 run (12,000 are in common with others)" in said or source != GROUP
        assert "]<0: the first 4,000 tokens of sequence" in said
        assert load(path).borrowed == (NONE, *[Borrowed(0, 4000)] * 3)
    for alone in (["4000,4000@0:40"], [GROUP, "--planner", "seq1f1b"], ["900,900@0:700", "--planner", "milp", "--slices", "2"]):
        main(["plan", "--lengths", *alone, "--stages", "2", "--layout", "even", "-o", str(path)])
        assert load(path).borrowed == ()
        assert "megatron-epp: tokens in common run for every sequence: " in capsys.readouterr().err


OF_MODELS = [("--experts 4 --experts-per-token 2", "experts, "), ("--fp8-format e4m3 --fp8-recipe mxfp8", "FP8 or FP4, ")]


@pytest.mark.parametrize(("flags", "reason"), OF_MODELS)
def test_for_a_model_that_runs_every_sample_by_itself_parents_are_left_out_which_is_told_once(flags, reason, capsys):
    asked = ["compare", "--lengths", GROUP, "--lengths", GROUP, "--planner", "greedy", "--stages", "2", "--layout", "even"]
    assert main([*asked, "--cluster", "h100x8", *flags.split()]) == 0
    said = capsys.readouterr()
    assert said.err.count(f"megatron-epp: parents are left out, as the model has {reason}") == 1
    assert "in common" not in said.out


def test_a_tree_too_large_for_memory_is_refused_with_a_cap_that_would_do(tmp_path, capsys):
    deep = ",".join(["60000", *(f"{60000 + 10000 * n}@{n - 1}:{59000 + 10000 * (n - 1)}" for n in range(1, 4))])
    flags = ["plan", "--lengths", deep, "--layers", "8", "--stages", "2", "--layout", "even", "--vocab-parallel", "off"]
    assert main([*flags, "--memory-cap-gb", "28"]) == 2
    refusal = capsys.readouterr().err
    assert "a memory cap of 28" in refusal
    assert "Raise --memory-cap-gb to " in refusal
    cap = refusal.partition("Raise --memory-cap-gb to ")[2].split()[0].strip(".,;")
    assert main([*flags, "--memory-cap-gb", cap]) == 0


def test_baselines_run_every_sequence_whole_and_the_gain_of_what_runs_once_is_a_cause_of_its_own(capsys):
    rows = {}
    for lengths in (GROUP, "5000,5000,4900,4800"):
        assert (
            main(["compare", "--lengths", lengths, "--stages", "2", "--layout", "even", "--vocab-parallel", "off", "--json"])
            == 0
        )
        rows[lengths] = {row["planner"]: row for row in json.loads(capsys.readouterr().out)}
    shared, alone = rows.values()
    assert main(["compare", "--lengths", GROUP, "--planner", "greedy", "--planner", "seq1f1b", *SMALL]) == 0
    said = capsys.readouterr().out
    assert "greedy: 12,000 of 19,700 tokens are in common with others and run once\nseq1f1b: every sequence runs whole" in said
    times = {name: (shared[name]["makespan_us"], alone[name]["makespan_us"]) for name in shared}
    ours, same = times.pop("greedy")
    assert ours < 0.6 * same
    assert all(mine == other for mine, other in times.values())
    assert {row["tokens"] for row in shared.values()} == {19700}
    gains = [rows["greedy"]["gain"] for rows in (shared, alone)]
    assert gains[0]["steps_us"] == [*gains[1]["steps_us"], ours]
    assert gains[0]["causes"][-1] == {"cause": "tokens in common, which run once", "factor": pytest.approx(same / ours)}


def test_advice_plans_trees_whole_and_its_plan_can_be_made_again(tmp_path, capsys):
    flags = ["--model", "llama3-8b", "--layers", "4", "--devices", "4", "--cluster", "h100x8", "--tensor-parallel", "1"]
    flags += ["--context-parallel", "1", "--virtual-stages", "1", "--global-batch-size", "8", "--vocab-parallel", "off"]
    sources = GROUP.split(","), ["5000", "5000", "4900", "4800"]
    figures = {}
    for words in sources:
        asked = ["advise", "--lengths", ",".join(words), *flags]
        assert main([*asked, "--json"]) == 0
        figures[words[1]] = json.loads(capsys.readouterr().out)
    shared, alone = figures.values()
    assert (shared["tokens"], shared["shared_tokens"], alone["shared_tokens"]) == (39400, 24000, 0)
    assert shared["plain_1f1b"]["step_us"] == alone["plain_1f1b"]["step_us"]
    assert shared["best"][0]["step_us"] < 0.7 * alone["best"][0]["step_us"]
    assert shared["gain"]["causes"][-1]["factor"] > 1.4
    question = question_of(parsed("advise", "--lengths", GROUP, *flags))
    assert question.borrowed.count(NONE) == 2
    main(["advise", "--lengths", GROUP, *flags])
    again = capsys.readouterr().out.splitlines()[-2].split()[1:]
    assert "@0:4000" in again[again.index("--lengths") + 1]
    path = tmp_path / "again.json"
    assert main([*again, "-o", str(path)]) == 0
    assert load(path).num_shared_tokens > 0


def test_a_command_plans_no_batch_twice_to_choose_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, made = [], result.plan_alone
    monkeypatch.setattr(result, "plan_alone", lambda *own: asked.append(own[:3]) or made(*own))
    assert main(["plan", "--lengths", "6100,5500@0:4000,700", "--stages", "2", "--layout", "auto"]) == 0
    assert len(asked) == len(set(asked)) > 1
