"""Bad files, numbers that are none, closed pipes and unforeseen errors end in one line that names them, not in a traceback."""

import json
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from megatron_epp.plan import EppError
from megatron_epp.plan.reading import MOST_SIZE, check_nested, naming_file
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.cli import plan as cli_plan
from megatron_epp.tools.cli import planning_flags
from tests.support.plan.bad_files import SOUND, error_line, exit_code, signed, spoiled, written

BATCH = ["--lengths", "300,200", "--stages", "2"]


def numeric_flags():
    (commands,) = (action for action in cli._parser()._actions if hasattr(action, "choices") and action.choices)
    for name, parser in commands.choices.items():
        for action in parser._actions:
            if callable(action.type) and action.option_strings and action.metavar in ("N", "S", "GB", "X", "SHARE", "MS", "K"):
                yield name, action


def test_no_flag_of_any_command_takes_what_is_no_finite_number_from_0():
    flags = list(numeric_flags())
    assert len(flags) > 60
    for command, action in flags:
        for value in ("nan", "inf", "-inf", "-1", "1e400", "1" + "0" * 400):
            with pytest.raises((ValueError, cli.argparse.ArgumentTypeError)):
                print(command, action.option_strings, action.type(value))


def test_drawn_batches_are_as_many_as_there_are(capsys):
    batches = ["--lengths", "5,4,3", "--batch-size", "2", "--batches", str(MOST_SIZE)]
    assert exit_code(["compare", *batches, "--planner", "1f1b", "--stages", "2"]) == 0
    assert capsys.readouterr().out.count("1f1b") == 2


@pytest.mark.parametrize(
    ("command", "stdout", "stderr"),
    [
        (r"printf '\xff' | PYTHONIOENCODING=utf-8:strict EPP plan --lengths -; echo $?", "2\n", "--lengths -: 'utf-8' codec"),
        ("EPP check FAULTY | true; echo ${PIPESTATUS[0]}", "1\n", ""),
        ("(EPP check FAULTY >&-); echo $?", "1\n", ""),
        ("EPP check FAULTY > /dev/full; echo $?", "2\n", "megatron-epp: error: [Errno 28] No space left on device"),
        ("PYTHONUTF8=0 PYTHONIOENCODING=ascii EPP show UMLAUT --width 60 | grep -o 'er gr[^,]*,'", r"er gr\xf6\xdfe,", ""),
    ],
    ids=["no text on stdin", "closed pipe", "closed output", "full disk", "ascii"],
)
def test_what_is_wrong_with_a_stream_is_one_line_or_silence_and_keeps_the_exit_code(tmp_path, command, stdout, stderr):
    faulty, umlaut = spoiled("plan", "predicted", "makespan_us", to=1.0), signed(SOUND["plan"] | {"planner": "größe"})
    files = {name: written(tmp_path / f"{name}.json", text) for name, text in (("FAULTY", faulty), ("UMLAUT", umlaut))}
    for word, value in {"EPP": f"{sys.executable} -m megatron_epp.tools.cli.main", **files}.items():
        command = command.replace(word, value)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], env=buffered, capture_output=True, text=True, check=False)
    assert stdout in done.stdout
    assert stderr in done.stderr
    assert done.stderr.count("\n") == bool(stderr)


def test_text_of_a_plan_that_looks_like_a_formula_is_drawn_as_it_is(tmp_path):
    path = written(tmp_path / "plan.json", signed(SOUND["plan"] | {"planner": "$\\frac{$\x1b"}))
    picture, text = tmp_path / "plan.svg", tmp_path / "plan.txt"
    assert exit_code(["show", path, "-o", str(picture)]) == exit_code(["show", path, "-o", str(text)]) == 0
    assert r"planner $\frac{$\x1b" in text.read_text()


def test_a_profiles_name_is_printed_as_escapes(tmp_path, capsys):
    path = written(tmp_path / "costs.json", spoiled("profile", "name", to="\x1b[2J"))
    assert exit_code(["plan", *BATCH, "--layout", "even", "--costs", path]) == 0
    assert r"costs \x1b[2J, " in capsys.readouterr().out


@pytest.fixture
def unforeseen(monkeypatch):
    def broken(name):
        with naming_file(name):
            raise LookupError("what\x1b\nwas that")

    monkeypatch.setattr(planning_flags, "load_costs", broken)


def test_an_unforeseen_error_is_one_line_with_the_file_at_hand(unforeseen, capsys):
    assert exit_code(["plan", *BATCH, "--costs", "given.json"]) == 70
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for fact in (r"unforeseen LookupError: what\x1b was that", "given.json", "a fault of megatron-epp", "--debug"):
        assert fact in err


@pytest.mark.parametrize("argv", [["--debug", "plan"], ["plan", "--debug"]])
def test_a_traceback_is_there_where_it_is_asked_for(unforeseen, capsys, argv):
    assert exit_code([*argv, *BATCH, "--costs", "given.json"]) == 70
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert "in broken\n" in err
    assert "unforeseen LookupError" in err.splitlines()[-1]
    assert exit_code([*argv, "--lengths", "nowhere"]) == 2, "a foreseen error"
    assert capsys.readouterr().err.startswith("Traceback")


def test_an_interrupted_command_ends_with_130_and_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(cli_plan.planning_flags, "costs_of", Mock(side_effect=KeyboardInterrupt))
    assert exit_code(["plan", *BATCH, "--layout", "even"]) == 130  # no slow step, which would be told
    assert capsys.readouterr().err == "\nmegatron-epp: interrupted\n"


def test_what_is_nested_up_to_the_limit_is_taken():
    value = []
    for _ in range(100):
        value = [value]
    check_nested(value, "it")
    with pytest.raises(EppError, match="it has lists or objects nested deeper than 100"):
        check_nested([value], "it")
    with pytest.raises(EppError, match="it holds more than 9 values"):
        check_nested([[0] * 5, [0] * 5], "it", most_values=9)


DEEP = "[" * 200_000 + "]" * 200_000
HUGE, NAN = 10**400, float("nan")
SHAPE = "hidden_size: 64, num_attention_heads: 1, vocab_size"
SMALL = "--lengths 300,200 --stages 2"
COMMANDS = {
    "check": "check FILE",
    "show": "show FILE",
    "simulate": "simulate FILE",
    "measured": "show plan.json --measured FILE",
    "picture": "show plan.json --measured FILE -o picture.png",
    "trace": "show plan.json --measured FILE -o trace.json",
    "costs": f"plan {SMALL} --costs FILE",
    "balanced": f"plan {SMALL} --layout balanced --costs FILE",
    "offload": f"plan {SMALL} --offload --costs FILE",
    "advise": "advise --devices 2 --lengths 300,200 --model tiny-gpt --cluster this-machine --costs FILE",
    "model": f"plan {SMALL} --model FILE",
    "shaped": f"plan {SMALL} --layers 4 --model FILE",
    "costs_and_model": f"plan {SMALL} --costs costs.json --model FILE",
    "cluster": f"plan {SMALL} --tensor-parallel 2 --cluster FILE",
    "train": "train --dry-run -c FILE",
    "lengths": "plan --lengths FILE",
}


def bare(**rest):
    """A document that says what it is, and little else."""
    return json.dumps({"schema": "megatron-epp/profile", "version": 1} | rest)


def bombed(depth=12, width=9):
    lines = ["a0: &a0 [" + ",".join("x" * width) + "]"]
    lines += [f"a{i}: &a{i} [" + ",".join([f"*a{i - 1}"] * width) + "]" for i in range(1, depth)]
    return "megatron:\n" + "\n".join(f"  {line}" for line in lines)


def emptied():
    """A plan without sequences, all of whose tables have the right shapes."""
    ranks = SOUND["plan"]["num_ranks"]
    rows = [[] for _ in range(ranks)]
    predicted = {"makespan_us": 0.0, "lower_bound_us": 0.0, "peak_bytes": [0] * ranks, "bubble_fraction": 0.0}
    empty = {"lengths": [], "chunks": [], "predicted": predicted, "messages": {"activation_us": [[]], "gradient_us": [[]]}}
    tables = dict.fromkeys(("ranks", "copies", "recompute", "recompute_us", "offload_share"), rows)
    return signed(SOUND["plan"] | empty | tables)


FILES = {
    # JSON that is nested, long, or no JSON
    "deep plan": ("check", DEEP, "nested deeper than 100"),
    "deep inside a plan": ("show", spoiled("plan", "notes", to=json.loads("[" * 200 + "]" * 200)), "nested deeper than 100"),
    "deep profile": ("costs", bare()[:-1] + f', "x": {DEEP}}}', "nested deeper than 100"),
    "deep measurement": ("measured", DEEP, "nested deeper than 100"),
    "half a plan": ("show", json.dumps(SOUND["plan"])[:200], "is not JSON"),
    "no object": ("costs", "[]", "is not a JSON object"),
    "no text": ("costs", b"\xff\xfe", "codec"),
    "numbers JSON has no word for": ("check", b'{\n"x": "NaN", "y": [NaN]}', "no word for: line 2 column 19"),
    "place of digits": ("check", f'{{"x": {"9" * 5000}}}', "line 1 column 7"),
    "number that no float holds": (
        "check",
        '{"schema": "megatron-epp/plan", "version": 3,\n"x": ["1e999", 1e-999, 1e999]}',
        "infinite or not a number; JSON has none: line 2 column 24",
    ),
    # fields of plans
    "times of messages": ("check", spoiled("plan", "messages", "collective_us", to=[]), "field 'messages' of the plan"),
    "time of a plan": ("check", spoiled("plan", "recompute_us", 0, 0, to=HUGE), "not a number from -1e+24 to 1e+24"),
    "time of a step": ("check", spoiled("plan", "ranks", 0, 0, 1, to=HUGE), "field 'ranks'"),
    "bytes of a step": ("show", spoiled("plan", "ranks", 0, 0, 2, to=HUGE), "not a whole number from"),
    "makespan": ("simulate", spoiled("plan", "predicted", "makespan_us", to=HUGE), "field 'predicted'"),
    # tables and actions that fit no plan
    "reverse order": ("simulate", spoiled("plan", "ranks", 0, to=SOUND["plan"]["ranks"][0][::-1]), "the order deadlocks"),
    "unknown chunk": ("simulate", spoiled("plan", "ranks", 0, 0, 0, to="0F999999999"), "unknown chunk 999999999; there are 4"),
    "unknown stage": ("show", spoiled("plan", "ranks", 0, 0, 0, to="9999F0"), "unknown stage 9999; there are 2"),
    "stage of many digits": ("check", spoiled("plan", "ranks", 0, 0, 0, to="9" * 5000 + "F0"), "is not an action"),
    "segment of no sequence": ("show", spoiled("plan", "chunks", 0, "segments", 0, 0, to=77), "holds sequence 77; there are 6"),
    "no sequences": ("show", emptied(), "lengths is empty"),
    "lengths of another type": ("show", spoiled("plan", "lengths", to={}), "'lengths' of the plan is malformed: {}"),
    # measurements
    "end of an event": ("measured", spoiled("measured", "ranks", 0, 0, 2, to=HUGE), "is not a number from"),
    "event of no chunk": ("picture", spoiled("measured", "ranks", 0, 0, 0, to="0F99"), "has 0F99; the plan has 2 stages"),
    "event of no stage": ("trace", spoiled("measured", "ranks", 0, 0, 0, to="9F0"), "has 9F0; the plan has 2 stages"),
    "event without an end": ("measured", spoiled("measured", "ranks", 1, 0, to=["0F0", 0]), "ranks[1][0]: ['0F0', 0] is not"),
    "measurement of another kind": ("measured", spoiled("measured", "schema", to="other"), "schema 'other'"),
    "measurement of a later version": ("measured", spoiled("measured", "version", to=2), "version 2"),
    "event of no time": ("measured", spoiled("measured", "ranks", 0, 0, to=["0F0", 5.0, 1.0]), "0F0 starts at 5.0 us and ends"),
    "event of no operation": ("measured", spoiled("measured", "ranks", 0, 0, 0, to="0Q0"), "0Q0"),
    "ranks of another plan": ("measured", spoiled("measured", "ranks", to=[]), "has 0 ranks, the plan has 2"),
    "run of another plan": ("measured", spoiled("measured", "plan_digest", to="x"), "the measurement is of plan x"),
    # costs
    "negative time": ("costs", spoiled("profile", "layer", "forward", "per_token_us", to=-100), "forward.per_token_us: -100"),
    "negative bytes": ("costs", spoiled("profile", "layer", "bytes_per_token", to=-1), "layer.bytes_per_token: -1"),
    "huge messages": ("costs", spoiled("costs", "message_bytes_per_token", to=1 << 63), "message_bytes_per_token: 92233"),
    "no stages": ("costs", spoiled("costs", "stages", to=[]), "stages is empty"),
    "negative weights": ("costs", spoiled("costs", "stages", 0, "static", to={"weights": -1}), "stages[0].static.weights: -1"),
    "all weight gradients": ("offload", spoiled("profile", "head", "backward", to=None), "head.weight is above the backward"),
    "above a stage": ("costs", spoiled("costs", "stages", 0, "blocks", 1, "weight", to={"fixed_us": 1e9}), "weight is above"),
    "no bytes": ("costs", spoiled("profile", "layer", "bytes_per_token"), "activation_bytes is -"),
    "infinite": ("costs", spoiled("profile", "message_latency_us", to=float("inf")), "Infinity is infinite"),
    "not a number": ("costs", spoiled("costs", "stages", 1, "blocks", 1, "forward", "fixed_us", to=NAN), "NaN is infinite or"),
    "too large": ("costs", spoiled("profile", "message_latency_us", to=HUGE), "message_latency_us: 1000000"),
    "too many parameters": ("costs", spoiled("profile", "layer", "parameters", to=1e23), "take 3.6e+24 bytes; a plan holds"),
    "a truth for a number": ("costs", spoiled("profile", "host_latency_us", to=True), "host_latency_us: True is not a number"),
    "half a layer": ("costs", spoiled("profile", "num_layers", to=1.5), "num_layers: 1.5 is not a whole number"),
    "no layer": ("costs", spoiled("profile", "layer"), "layer is missing"),
    "a number for a layer": ("costs", spoiled("profile", "layer", to=5), "layer is 5, which is not a JSON object"),
    "half a level": ("costs", spoiled("profile", "layer", "recompute", "mlp", to={}), "layer.recompute.mlp.again is missing"),
    "unknown field of many lines": ("costs", spoiled("profile", "layer", "fl\nops", to=5), r"layer.fl\nops is unknown"),
    "unknown field": ("costs", spoiled("profile", "layer", "flops", to=5), "layer.flops is unknown"),
    "too few stages": ("costs", spoiled("costs", "stages", 0), "costs of 1 stages, not of 2"),
    "stage of no layers": ("costs", spoiled("costs", "stages", 1, "blocks", 1, "count", to=-1), "[1].blocks[1].count: -1"),
    "too many layers": ("costs", spoiled("profile", "num_layers", to=10**9), "is not a whole number from 0 to 10,000"),
    "too many to balance": ("balanced", spoiled("profile", "num_layers", to=10**9), "is not a whole number from 0 to 10,000"),
    "no bytes of a weight": ("costs", spoiled("profile", "weight_bytes", to=0), "weight_bytes: 0 is not a number from 0.125"),
    "no heads": ("offload", spoiled("profile", "kv_heads", to=0), "kv_heads: 0 is not a whole number from 1"),
    "empty link": ("offload", spoiled("profile", "host_sharing", to=0), "host_sharing: 0 is not a whole number from 1"),
    "no ranks": ("costs", spoiled("profile", "stage_ranks", to=0), "stage_ranks: 0 is not a whole number from 1"),
    "no turns": ("offload", spoiled("costs", "host_turns", to=0), "host_turns: 0 is not a whole number from 1"),
    "more than all": ("offload", spoiled("costs", "offloadable_share", to=2), "share: 2 is not a number from 0 to 1"),
    "shape of words": ("advise", spoiled("profile", "origin", to={"shape": {"tensor_parallel": "two"}}), "'two' is not a"),
    # YAML
    "alias of itself": ("train", "megatron: &a\n  x: *a\n", "contains itself"),
    "list in itself": ("train", "megatron: {x: &a [*a]}\n", "contains itself"),
    "aliases of aliases": ("train", bombed(), "more than 20,000 values, those that aliases repeat counted each time"),
    "aliases in a model": ("model", bombed(), "more than 20,000 values"),
    "aliases in a cluster": ("cluster", bombed(), "more than 20,000 values"),
    "deep YAML": ("model", "megatron: {x: " + "[" * 5000 + "]" * 5000 + "}", "nested too deep"),
    "YAML of a size": ("train", "#" * (1 << 21), "larger than 1,048,576 bytes"),
    "characters that are not seen": ("model", "megatron: {\ufeffx: [}", r"{\ufeffx: [}"),
    "no date": ("train", "megatron: {lr: 2020-13-45}", "is not YAML: month must be in 1..12"),
    "YAML of many digits": ("model", f"megatron: {{num_layers: {'9' * 5000}}}", "is not YAML"),
    "hexadecimal": ("model", f"megatron: {{hidden_size: 0x{'f' * 5000}}}", "got a int too long to print"),
    "numbers for names": ("train", "megatron: {1: 3}", "megatron.1: Key 1 (int)"),
    "number of a variable": ("train", "launch: {environment: {1: 1}}", "launch.environment.1: Key 1 (int)"),
    "include of a number": ("train", "include: 5", "`include:` holds 5; it must hold a file, or a list of files"),
    "include of a long name": ("train", f"include: {'x' * 5000}", "given.yaml includes"),
    "include of lines": ("train", 'include: "a\\nb"', r"there is no file a\nb"),
    "include of no path": ("train", 'include: "a\\0b"', r"there is no file a\x00b"),
    "alias of digits": ("model", f"megatron: {{num_layers: *{'9' * 5000}}}", "line 1, column 24"),
    "nothing for a name": ("model", "megatron: {null: 3}", "has None where the name of a flag should stand"),
    "cluster of a list": ("train", "cluster: [a]", "cluster: Cannot convert 'ListConfig' to string"),
    "unknown reference": ("train", "megatron: {lr: '${foo}'}", "megatron.lr: Interpolation key 'foo' not found"),
    "reference to itself": ("train", "megatron: {lr: '${megatron.lr}'}", "Recursive interpolation detected"),
    "a date": ("train", "megatron: {lr: 2020-01-01}", "megatron.lr: Value 'date'"),
    "variable that is no YAML": ("train", "launch: {nodes: '${oc.env:EPP_TEST_BAD}'}", "launch.nodes: While dereferencing"),
    "no layers in a model": ("costs_and_model", "megatron: {hidden_size: 64}", "the model needs num_layers"),
    "vocabulary": ("model", f"megatron: {{num_layers: 4, {SHAPE}: {'9' * 20}}}", "vocab_size, a whole number from 1 to 2,147,"),
    "blocks of words": ("shaped", f"megatron: {{{SHAPE}: 99, epp_loss_block_tokens: foo}}", "epp_loss_block_tokens is 'foo'"),
    "rates of a list": ("cluster", "rates: [a]", "`rates` is ['a']; it must be one of h100, cpu"),
    "no operations": ("cluster", "linear_flops: 0", "linear_flops is 0; it must be a number from 1"),
    "hardly an operation": ("cluster", "linear_flops: 1e-300", "linear_flops is '1e-300'; it must be a number from 1"),
    "too much memory": ("cluster", "device_memory_gb: 1e300", "is '1e300'; it must be a number from 0 to 1e+09"),
    "a truth of devices": ("cluster", "devices_per_node: true", "devices_per_node is True; it must be a whole number"),
    # lengths
    "words": ("lengths", "12 x 13", "'x' is not a number of tokens"),
    "words of a line": ("lengths", "12\n13,x\n14\n", "line 2: 'x' is not a number of tokens"),
    "bytes": ("lengths", b"\xff", "codec"),
    "no lengths": ("lengths", "\n", "no lengths"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_named_with_what_is_wrong(case, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EPP_TEST_BAD", "[a")
    written(tmp_path / "plan.json", signed(SOUND["plan"]))
    written(tmp_path / "costs.json", json.dumps(SOUND["profile"]))
    command, content, words = FILES[case]
    file = f"given{'.yaml' if command in ('train', 'model', 'shaped', 'cluster', 'costs_and_model') else '.json'}"
    written(tmp_path / file, content)
    message = error_line(capsys, COMMANDS[command].replace("FILE", file).split())
    assert words in message
    assert file in message
