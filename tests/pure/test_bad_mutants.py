"""Files with random damage are taken, or refused in one line that names them; never a traceback, never another exit code."""

import copy
import json
import random

import pytest

from megatron_epp.launch.settings import load_settings
from megatron_epp.plan import EppError
from tests.support.plan.bad_files import SOUND, exit_code, signed, written

MUTANTS = 60
"""Number of mutants of every kind of file."""
NASTY = (
    *(None, True, 0, 1, -1, 1.5, 2**31, 2**63, 10**400, 1e-300, 1e30, 1e300, float("nan"), float("inf")),
    *("", "x", "0F0", "9F9", "0B7", "\x1b[2J", "\ud800", "9" * 5000, [], [[]], {}, {"x": 1}, [0] * 9, [1, [2, [3, [4]]]]),
)
"""Values to put in the place of others."""
MODEL = """megatron:
  num_layers: 4
  hidden_size: 64
  ffn_hidden_size: 128
  num_attention_heads: 4
  group_query_attention: true
  num_query_groups: 2
  vocab_size: 384
  swiglu: true
"""
CLUSTER = "rates: cpu\nlinear_flops: 8e10\nhost_sharing: 2\ndevice_memory_gb: 80\ndevices_per_node: 8\n"
SETTINGS = """cluster: this-machine
include: [recipes/tiny-cpu]
megatron: {lr: 1e-3, num_layers: "${EPP_TEST_UNSET:4}", hidden_size: "${megatron.num_layers}"}
epp: {slices: 2}
launch: {environment: {A: b}}
"""
BATCH = ["--lengths", "300,200", "--stages", "2"]
FORMS: dict[str, tuple[str, list[str]]] = {
    "check a plan": ("plan", ["check", "FILE"]),
    "show a plan": ("plan", ["show", "FILE"]),
    "simulate a plan": ("plan", ["simulate", "FILE"]),
    "trace a plan": ("plan", ["show", "FILE", "--trace", "trace.json"]),
    "show a run": ("measured", ["show", "plan.json", "--measured", "FILE"]),
    "trace a run": ("measured", ["show", "plan.json", "--measured", "FILE", "--trace", "trace.json"]),
    "plan by a profile": ("profile", ["plan", *BATCH, "--costs", "FILE"]),
    "plan copies by a profile": ("profile", ["plan", *BATCH, "--offload", "--split-weight", "--costs", "FILE"]),
    "plan by costs": ("costs", ["plan", *BATCH, "--costs", "FILE"]),
    "plan for a model": (MODEL, ["plan", *BATCH, "--model", "FILE"]),
    "plan for a cluster": (CLUSTER, ["plan", *BATCH, "--cluster", "FILE"]),
    "plan lengths": ("300\n200, 17\n", ["plan", "--stages", "2", "--lengths", "FILE"]),
}


def places(value, path=()):
    """Paths to all values of a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def with_other_values(document, draw: random.Random):
    """A document with one to three values taken out, put twice, or put in the place of others."""
    document = copy.deepcopy(document)
    for _ in range(draw.randint(1, 3)):
        *path, last = draw.choice(list(places(document)))
        inner = document
        for step in path:
            inner = inner[step]
        match draw.randrange(4):
            case 0:
                del inner[last]
            case 1 if isinstance(inner, list):
                inner.insert(last, copy.deepcopy(inner[last]))
            case _:
                inner[last] = copy.deepcopy(draw.choice(NASTY))
    return document


def with_other_letters(text: str, draw: random.Random) -> str:
    """A text cut short, or with other characters in some places."""
    if draw.random() < 0.2:
        return text[: draw.randrange(len(text))]
    letters = list(text)
    for _ in range(draw.randint(1, 4)):
        letters[draw.randrange(len(letters))] = draw.choice("{}[]:,&*-!|>'\"#%@`\\$ \n\t09exy~?\x00\x1b²")
    return "".join(letters)


def mutant(form: str, draw: random.Random) -> str:
    if form not in SOUND:
        return with_other_letters(form, draw)
    if draw.random() < 0.2:
        return with_other_letters(json.dumps(SOUND[form]), draw)
    document = with_other_values(SOUND[form], draw)
    try:
        return signed(document) if form == "plan" and draw.random() < 0.9 else json.dumps(document)
    except ValueError:  # a whole number of more digits than Python prints
        return mutant(form, draw)


@pytest.mark.parametrize("name", FORMS)
def test_a_damaged_file_is_taken_or_refused_by_name_in_one_line(name, tmp_path, monkeypatch, capsys):
    form, argv = FORMS[name]
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "plan.json", signed(SOUND["plan"]))
    draw, refused = random.Random(name), 0
    suffix = "json" if form in SOUND else "txt" if "lengths" in name else "yaml"
    for number in range(MUTANTS):
        text = mutant(form, draw)
        path = written(tmp_path / f"given{number}.{suffix}", text)
        code = exit_code([path if word == "FILE" else word for word in argv])
        out, err = capsys.readouterr()
        said = f"mutant {number}, exit code {code}:\n{err}\n{text[:3000]}"
        assert code in ((0, 1, 2) if argv[0] == "check" else (0, 2)), said
        assert all(line.isprintable() for line in (out + err).split("\n")), said
        if code == 2:
            refused += 1
            _, prefix, message = err.rpartition(": error: ")
            assert prefix, said
            assert message.count("\n") == 1, said
            assert f"given{number}.{suffix}" in message, said
    assert refused > MUTANTS // 10


def test_the_files_are_sound_before_they_are_damaged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "plan.json", signed(SOUND["plan"]))
    for name, (form, argv) in FORMS.items():
        text = form if form not in SOUND else signed(SOUND[form]) if form == "plan" else json.dumps(SOUND[form])
        path = written(tmp_path / f"sound.{'json' if form in SOUND else 'yaml'}", text)
        assert exit_code([path if word == "FILE" else word for word in argv]) == 0, (name, capsys.readouterr().err)
    assert load_settings([written(tmp_path / "sound.yaml", SETTINGS)])["megatron"]["hidden_size"] == 4


def test_damaged_settings_are_taken_or_refused_by_name_in_one_line(tmp_path):
    draw, refused = random.Random("settings"), 0
    for number in range(MUTANTS):
        text = with_other_letters(SETTINGS, draw)
        path = written(tmp_path / f"given{number}.yaml", text)
        if message := refusal(path):
            refused += 1
            assert f"given{number}.yaml" in message, text
            assert "\n" not in message, text
    assert refused > MUTANTS // 4


def refusal(path: str) -> str:
    """Why settings are refused; empty where they are taken."""
    try:
        load_settings([path])
    except EppError as error:
        return str(error)
    return ""
