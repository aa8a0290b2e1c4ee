"""What the command line refuses ends in one line and exit code 2: it names the value, the file or the flag, and what would do.

A row of `REFUSED` is a command and what its refusal must hold; words between may change.
"""

import json
import shlex
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.tools.formulas.library import load_costs
from tests.pure.test_cost_latents import costs as costs_of_latents
from tests.support.plan.bad_files import SOUND, exit_code, signed, written

NINES = "9" * 5000
FLAGS = "plan --lengths 300,200 --stages 2"
STAGES = "plan --lengths 9000,4000,2000 --layout"
ADVISE = "advise --layers 8 --hidden 512 --ffn 1024 --heads 8 --kv-heads 2 --vocab 4096 --lengths 900 --devices"
LISTED = "plan --layers 8 --lengths 900 --stages 2 --layout"
LATENTS = "--lengths 900,300 --model tiny-gpt --latents on"
HUGE = "plan --lengths 2147483647 --stages 2 --token-multiple 2147483647 --hidden 2147483616"
PLANNER = f"{FLAGS} --planner given_planners"
FIVE = "plan --lengths 5"
MOONLIGHT = "plan --lengths 9000 --model moonlight-16b-a3b --latents on"
NO_LATENTS = ("--latents on", "a model with latent attention", "--model", "leave it out")
MISSPELT = {
    "plam": "plan", "plan --lenghts 5": "--lengths", "plan --lengths wikipdia": "wikipedia", f"{STAGES} balnced": "balanced",
    f"{FIVE} --documents spilt": "split", f"{FIVE} --planner greddy": "greedy", f"{FIVE} --model llama3-8": "llama3-8b",
    f"{FIVE} --cluster h100x": "h100x8", f"{FIVE} --costs llama3-8b-h10": "llama3-8b-h100",
    f"{FIVE} --cluster cluster.yaml": "linear_flops", f"{FIVE} --costs misspelt.json": "message_latency_us",
    "train -c recipes/tiny-cp": "recipes/tiny-cpu", "train -c recipes/tiny-cpu lunch.nodes=2": "launch",
    "train -c recipes/tiny-cpu launch.node=2": "nodes",
}  # fmt: skip
REFUSED = [
    # lengths
    *((f"plan --lengths 12,{word}", f"'{word}'", "a number of tokens") for word in "x0"),
    ("plan --lengths ,", "no lengths"),
    ("plan --lengths 8k", "did you mean 8192?"),
    ("plan --lengths absent.txt", "'absent.txt'", "no such file"),
    ("plan --lengths-file absent.txt", "absent.txt"),
    ("plan --lengths a\udcff", "no such file"),
    ("plan --lengths \x1b[31m", r"\x1b[31m"),
    ("plan --lengths corpus.bin", "--lengths corpus.bin", "the tokens of documents", "corpus.idx", "is not there"),
    ("plan --lengths tokens.bin", "--lengths tokens.bin", "the tokens of documents", "tokens.idx"),
    ("plan --lengths tokens", "tokens.idx is empty"),  # the prefix of a corpus is its index
    ("plan --lengths short.idx", "short.idx is truncated"),
    ("plan --lengths future.idx", "future.idx", "index version 2"),
    ("plan --lengths beyond.idx", "beyond.idx", "document 3", "sequence 99", "5 sequences"),
    ("plan --lengths huge.idx", "huge.idx", "sequence 1 has 4,294,967,293 tokens"),
    ("plan --lengths other.idx", "not a Megatron index"),
    # numbers
    (f"{FLAGS} --memory-gb 1e300", "'1e300'", "a positive number up to 1,000,000,000"),
    (f"{FLAGS} --memory-gb nan", "'nan'", "a positive number"),
    (f"{FLAGS} --memory-gb 80GB", "did you mean 80?"),
    (f"{FLAGS} --offload --host-memory-gb 1e308", "a positive number"),
    (f"{FLAGS} --layers 100000000000", "a whole number from 1 to 10,000"),
    (f"{FLAGS} --layers 100000000000 --layout balanced", "from 1 to 10,000"),
    ("plan --lengths 3 --stages 1000000000", "a whole number from 1 to 4,096"),
    ("plan --lengths 3 --stages 0", "'0'", "from 1", "--help"),
    (f"{FLAGS} --seed {'9' * 30}", "a whole number from 0 to 4,294,967,295"),
    (f"{FLAGS} --recompute {NINES}", "auto or a number of layers, up to 10,000"),
    (f"{FLAGS} --recompute ²", "auto or a number of layers"),
    (f"{FLAGS} --recompute some", "'some'", "auto or a number of layers"),
    (f"{FLAGS} --context 128k", "did you mean 131072?"),
    (HUGE, "a plan can hold"),
    # flags that do not go together
    ("plan --lengths 12 --layers 4 --stages 5", "--layers or --stages"),
    ("plan --lengths 3 --cluster h100x8 --rates cpu", "--cluster", "--rates", "one of them"),
    ("plan --lengths 5 --devices 8", "--devices", "--cluster", "leave it out"),
    ("plan --lengths 9000 --stages 1 --vocab-parallel on", "--stages is 1"),
    *((f"{name} {LATENTS}", *NO_LATENTS) for name in ("plan", "memory", "compare")),
    (f"{MOONLIGHT} --costs latents.json", "latents.json has costs of a pipeline", "leave --latents out"),
    (f"{FLAGS} --costs lopsided.json --layout balanced", "layers of their own"),
    *((f"{FLAGS}{more} --chunk-tokens 4 --token-multiple 8", "raise --chunk-tokens to 8") for more in ("", " --memory")),
    (f"{FLAGS} --layers 2 --hidden 64 --memory-cap-gb 0.001", "a memory cap of 0.00100 GiB", "Raise --memory-cap-gb to"),
    (f"{ADVISE} 12", "--devices 12", "a multiple of 8", "h100x8", "8 or 16"),
    (f"{ADVISE} 8 --tensor-parallel 3", "a multiple of 3"),
    (f"{ADVISE} 8 --expert-parallel 2", "a model with --experts"),
    (f"{ADVISE} 8 --expert-tensor-parallel 2", "--expert-tensor-parallel 2", "a model with --experts", "leave"),
    (f"{ADVISE} 8 --costs llama3-8b-h100", "measured with ffn_hidden_size 14336"),
    # layers of stages
    (f"{STAGES} 9,8,8 --stages 4", "--layout '9,8,8'", "3 stages and 25 layers", "auto, even, balanced, a layout file, or 4"),
    (f"{STAGES} 9,8,8,8 --stages 4", "--layout", "'9,8,8,8'", "4 stages and 33 layers"),
    (f"{STAGES} 9,8,8,6", "--layout", "'9,8,8,6'", "4 stages and 31 layers"),
    (f"{STAGES} 8,8,8,7", "4 whole numbers", "--stages", "add up to 32 (--layers)"),
    (f"{STAGES} some --stages 4", "add up to 32"),
    (f"{FLAGS} --layout {NINES},1", "2 whole numbers", "--stages"),
    (f"{STAGES} absent.json", "--layout", "a layout file"),
    (f"{STAGES} v.json --stages 4", "--layout v.json", "2 pipeline ranks", "--stages is 4", "leave --stages out"),
    (f"{STAGES} v.json --layers 40", "--layout v.json", "7, 8, 9, 8 layers has 32", "40"),
    (f"{STAGES} extra.json", "--layout", "rank_of", "[0, 1, 1, 5]"),
    (f"{STAGES} vocabluary.json", "--layout", "vocabluary", "did you mean 'vocabulary'"),
    (f"{STAGES} brace.json", "--layout", "is not JSON"),
    (f"{LISTED} v:4,4", "--layout v:", "2 stages for 2 ranks", "4 stages, two on each"),
    (f"{LISTED} looped:3,3,2", "--layout looped:", "3 stages for 2 ranks", "a multiple"),
    (f"{LISTED} v:2,2,2,1", "7"),
    (f"{LISTED} 4.5,3.5", "--layout '4.5,3.5'", "begin between layers", "whole ones, such as 4,4"),
    # names
    *((command, *facts, "--help") for command, *facts in ([""], ["plan", "--lengths"], ["check"], ["plam"])),
    ("plan --lengths 12 --stagess 4", "--stagess", "did you mean '--stages'?", "megatron-epp plan --help"),
    *((command, f"did you mean '{meant}'?") for command, meant in MISSPELT.items()),
    # files and folders
    ("plan --lengths 5 --model model.yaml", "'hidden_sise'"),
    ("plan --lengths 5 --costs empty.json", "empty.json", "is empty"),
    ("train -c empty.json", "empty.json is empty"),
    *((f"{name} a-folder", "a-folder is a folder, not a file") for name in (f"{FIVE} --model", f"{FIVE} --costs", "train -c")),
    ("check empty.json", "empty.json", "is empty"),
    ("show later.json", "later.json", "9"),
    ("show absent.json", "absent.json"),
    ("show plan.json --measured absent.json", "absent.json"),
    ("show plan.json plan.json --measured run.json", "run of one plan"),
    ("show a-folder", "--epp-trace"),
    ("show plan.json -o nodir/plan.png", "nodir"),
    ("show plan.json -o plan.gif", "'.gif'"),
    ("show plan.json --proof -o plan.png", "--proof"),
    ("show plan.json --proof --times", "--proof", "--times"),
    ("simulate plan.json plan.json", "several plans"),
    ("compare --lengths 900 --lengths 70 --planner greedy -o compared.png", "give --lengths once"),
    ("memory --lengths 900 --stages 2 --memory-out page.gif", ".html"),
    ("memory --lengths 900 --stages 2 -o memory.png", "--memory-out draws its memory"),
    ("emulate plan.json --time-scale 0", "--time-scale: '0' is not a positive number"),
    ("profile --model tiny-gpt", "-o/--output"),
    ("doctor -o profile.json", "add --profile"),
    ("quickstart -o a-file", "-o/--output", "a-file is a file: give a folder"),
    ("first-run -o a-file/below", "-o/--output", "a-file is a file"),
    ("first-run -o /proc/none", "-o/--output", "cannot be written to"),
    # planners of a user's own
    (f"{PLANNER}:raises", "planner given_planners:raises", "given_planners.py:3): RuntimeError: no luck in line 2"),
    (f"{PLANNER}:divides", "planner given_planners:divides", "given_planners.py:4): ZeroDivisionError"),
    (f"{PLANNER}:exits", "planner given_planners:exits", "given_planners.py:5): SystemExit: 3"),
    (f"{PLANNER}:nothing", "planner given_planners:nothing returned None", "`Decisions`"),
    (f"{PLANNER}:two", "planner given_planners:two", "TypeError: two() takes 2 positional arguments but 3"),
    (f"{PLANNER}:halves", "'given_planners:halves'", "order has 0 rows for 2 ranks"),
    (f"{PLANNER}:value", "planner given_planners:value is 5", "not a function"),
    (f"{PLANNER}:absent", "planner given_planners:absent", "'absent'", "module:function"),
    *(
        (f"{FLAGS} --planner {name}", f"planner {name}: ", "module:function")
        for name in ("none:gpipe", ":two", "given_planners:")
    ),
    (f"{FLAGS} --planner unreadable_planners:f", "SyntaxError"),
    (f"{FLAGS} --planner failing_planners:f", "ZeroDivisionError"),
]
PLANNERS = """
from megatron_epp.planner import PLANNERS, Decisions
def raises(problem, costs, options): raise RuntimeError("no luck\\nin line 2")
def divides(problem, costs, options): return 1 / 0
def exits(problem, costs, options): raise SystemExit(3)
def nothing(problem, costs, options): return None
def two(problem, costs): return None
def halves(problem, costs, options): return Decisions((), [], [])
value = 5
"""


def index_of(documents: list[list[int]]) -> bytes:
    """A Megatron index: documents as lists of sentences' token counts."""
    sizes = np.array([n for sentences in documents for n in sentences], np.int32)
    boundaries = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(sizes), len(boundaries))
    return header + sizes.tobytes() + np.zeros(len(sizes), np.int64).tobytes() + boundaries.tobytes()


INDEX = index_of([[100], [30, 20], [1], [7]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    layout = json.loads(Layout((7, 8, 9, 8), Placement("v", 2, 2)).to_json())
    profile = json.loads(load_costs("llama3-8b-h100").to_json())
    profile["mesage_latency_us"] = profile.pop("message_latency_us")
    files: dict[str, str | bytes] = {
        "corpus.bin": b"\xff\xfe" * 50, "tokens.bin": b"\xff\xfe" * 50, "tokens.idx": "",
        "short.idx": INDEX[:-9], "other.idx": "something else", "future.idx": INDEX[:9] + struct.pack("<Q", 2) + INDEX[17:],
        "beyond.idx": INDEX[:-8] + struct.pack("<q", 99), "huge.idx": index_of([[5], [2**31 - 1, 2**31 - 1]]),
        "latents.json": costs_of_latents(True).to_json(), "lopsided.json": json.dumps(SOUND["costs"]),
        "misspelt.json": json.dumps(profile), "v.json": json.dumps(layout), "brace.json": "{", "empty.json": "",
        "extra.json": json.dumps(layout | {"rank_of": [0, 1, 1, 5]}), "vocabluary.json": json.dumps(layout | {"vocabluary": 1}),
        "cluster.yaml": "linear_flop: 1e15\ndevice_memory_gb: 80\n", "model.yaml": "megatron: {hidden_sise: 64}\n",
        "later.json": '{"schema": "megatron-epp/plan", "version": 9}',
        "plan.json": signed(SOUND["plan"] | {"notes": ["another"]}), "run.json": json.dumps(SOUND["measured"]), "a-file": "",
        "given_planners.py": PLANNERS, "unreadable_planners.py": "def (", "failing_planners.py": "1 / 0",
    }  # fmt: skip
    for name, content in files.items():
        written(folder / name, content)
    (folder / "a-folder").mkdir()
    return folder


@pytest.mark.parametrize(("command", "facts"), [(command, facts) for command, *facts in REFUSED])
def test_what_is_refused_is_named_with_what_would_do(command: str, facts: list[str], folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    code = exit_code(shlex.split(command))
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    _, prefix, message = err.rpartition(": error: ")  # on a slow machine lines of progress come before it
    assert prefix
    assert [fact for fact in facts if fact not in message] == [], message
    assert all(line.isprintable() for line in message.splitlines())
    is_long = "0.001" in command or "halves" in command  # followed by what would fit, by the violations
    assert message.count("\n") == 1 or is_long
    assert "Traceback" not in err
