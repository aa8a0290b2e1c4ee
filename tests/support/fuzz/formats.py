"""Table of the kinds of files that are read without torch: plans, runs, costs, settings, lengths, schedules, and records."""

import fcntl
import json
import struct
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np

from megatron_epp.data.indexed_documents import MASK_SUFFIX, open_mask
from megatron_epp.data.token_record import SUFFIX, Tokenizer, TokenRecord, check_kind, check_tokenizer, load_record
from megatron_epp.launch.run_folder import LOCK, hold
from megatron_epp.launch.yaml_settings import load_settings
from megatron_epp.mcore.arguments.layout import layout_problems
from megatron_epp.plan import EppError
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.serialize import to_json
from megatron_epp.planner import Options, plan
from tests.support.fuzz.damage import binary_damage, byte_fields, index_fields, json_damage, text_damage
from tests.support.fuzz.judge import Fault, Format, command
from tests.support.plan.bad_files import SOUND, signed
from tests.support.plan.campaign_cases import case_of, planned
from tests.support.plan.planner_cases import GIB, pipeline, problem
from tests.support.plan.small_plans import offload, shared_link

MODEL = b"""megatron:
  num_layers: 4
  hidden_size: 64
  ffn_hidden_size: 128
  num_attention_heads: 4
  group_query_attention: true
  num_query_groups: 2
  vocab_size: 384
  swiglu: true
"""
CLUSTER = b"rates: cpu\nlinear_flops: 8e10\nhost_sharing: 2\ndevice_memory_gb: 80\ndevices_per_node: 8\n"
SETTINGS = b"""cluster: this-machine
include: [recipes/tiny-cpu]
megatron: {lr: 1e-3, num_layers: "${oc.env:EPP_TEST_UNSET,4}", hidden_size: "${megatron.num_layers}"}
epp: {slices: 2}
launch: {environment: {A: b}}
"""
TABLES = (b"0F0,0F1,,0I0,0W0,0B1\n,1F0,1B0,1F1,1SEND_B1,1B1\n", b"0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n")
PRIMUS = (b"Rank 0: (F|0|0),(SF|0|0),(F|1|0),(B|0|0),(W|0|0),(BW|1|0)\nRank 1: (F|0|0),(B|0|0),[(F|1|0),(BW|1|0)],(W|0|0)\n",)
ZERO_BUBBLE = (b"f0 sf0 f1 rb0 b0 w0 b1\nrf0 f0 b0 sb0 f1 b1 w0\n", b"F0.0 F0.1 BW0.1 BW0.0\n", b"F0-0 F0-1 BW0-1 BW0-0\n")
LENGTHS = np.array([300, 200, 0, 1, 17, 40], dtype=np.int32)
"""Tokens of the sequences of a pair; `BOUNDARIES` divides them into documents."""
BOUNDARIES = np.array([0, 1, 3, 4, 6], dtype=np.int64)
NUM_TOKENS = int(LENGTHS.sum())
RECORD = TokenRecord(Tokenizer("NullTokenizer", "bytes", 257, 256, None), "--vocab-size 257", 4, NUM_TOKENS, 256)
BATCH = ("--lengths", "300,200", "--stages", "2")
EVEN = ("--stages", "2", "--layout", "even")
OPTIONAL = {
    "kv_offload": [[0, 0]], "host_links": [0, 0], "host_cap_bytes": [10**12, 10**12], "message_bytes": [0, 0],
    "loss_groups": [[0, 1]],
    "context_groups": {"num_ranks": 1, "of_chunk": [[[0, 1, [0]]]], "rank_tokens": [1]},
}  # fmt: skip
"""Fields that a plan may have, which need not go with its others."""
ALL = r"line \d|row \d|column \d|position \d|char \d|bytes|is empty|larger than|nested|schema|version"
"""Pattern of where a fault is in any text, or of what is wrong with a file as a whole."""


def named(*names: str) -> str:
    """Return the pattern of a text that names a position, or one of these keys."""
    return rf"{ALL}|\b({'|'.join(names)})\b"


def keys(*documents: object) -> set[str]:
    found: set[str] = set()
    for one in documents:
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        found |= keys(*inner) | (set(one) if isinstance(one, dict) else set())
    return found


@cache
def plans() -> Sequence[bytes]:
    """Return plans with every optional field: copies, links that are shared, KV offload, vocabulary shards."""
    hosted = Options(slices=3, offload=True, kv_offload=True, split_weight=True)
    of_hosted_kv = plan(problem((100_000, 3_000), 2, 20 * GIB), pipeline(2), hosted)
    made = [offload(), shared_link(), planned(case_of(15)), of_hosted_kv]
    messages = SOUND["plan"]["messages"] | {"num_bytes": [1], "collective_us": {"S": [1.0]}, "message_us": {"F": [1.0]}}
    whole = [signed(SOUND["plan"]), *map(to_json, made), signed(SOUND["plan"] | OPTIONAL | {"messages": messages})]
    return tuple(one.encode() for one in whole)


def sound(kind: str) -> Callable[[], Sequence[bytes]]:
    return lambda: (json.dumps(SOUND[kind]).encode(),)


def layout() -> bytes:
    return Layout((1, 3), Placement("looped", 2, 1), shards_vocabulary=True).to_json().encode()


def index(item_bytes: int = 2) -> bytes:
    """Return the content of an index of tokens of two bytes each, laid out as Megatron writes it."""
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(LENGTHS), len(BOUNDARIES))
    offsets = item_bytes * np.cumsum([0, *LENGTHS[:-1]], dtype=np.int64)
    return header + LENGTHS.tobytes() + offsets.tobytes() + BOUNDARIES.tobytes()


def mask() -> bytes:
    return bytes(number % 3 == 0 for number in range(NUM_TOKENS))


def record() -> bytes:
    return json.dumps({"schema": "megatron-epp/tokenizer", "version": 1, **asdict(RECORD)}).encode()


def _layout(path: Path) -> str:
    sizes = {"num_layers": 4, "pipeline_model_parallel_size": 2}
    flags = {"epp_layout": str(path), "epp_placement": "looped", "epp_schedule": "elastic"}
    return next(layout_problems(Namespace(**sizes, **flags)), "")


def _record(path: Path) -> None:
    prefix = str(path).removesuffix(SUFFIX)
    if (found := load_record(prefix)) is not None:
        check_kind(prefix, found, RECORD.tokenizer.kind, None)
        check_tokenizer(prefix, found, RECORD.tokenizer, masks_eod=True)


def _mask(path: Path) -> None:
    for mmap in (True, False):
        open_mask(str(path).removesuffix(MASK_SUFFIX), NUM_TOKENS, mmap).read(0, NUM_TOKENS)


def _lock(path: Path) -> None:
    """Hold the lock of a folder, and have the package say what it knows of the holder."""
    with path.open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, 0, 0, 0, 0))
        try:
            hold(path.parent, "0123abcd")
        except EppError as error:
            if not str(error).isprintable():
                raise Fault(f"control characters are printed: {error}") from error
            return
    raise Fault("a folder that is held is held again")


_COSTS = keys(SOUND["profile"], SOUND["costs"]) | {"costs of", r"stage \d+"}
_CHECKED = {"check": command("check", "FILE", accepted=(0, 1))}
_IN_TABLE = named(r"stages? \d+", r"rank \d+")
FORMATS: dict[str, Format] = {
    "plan": Format(
        "given.json",
        plans,
        json_damage(finish=signed, optional=(*OPTIONAL, "num_bytes", "collective_us", "message_us")),
        {
            "check": command("check", "FILE", accepted=(0, 1)),
            "show": command("show", "FILE"),
            "simulate": command("simulate", "FILE"),
            "trace": command("show", "FILE", "-o", "FOLDER/trace.json"),
        },
        named(*keys(SOUND["plan"]), *OPTIONAL, r"(rank|stage|chunk|sequence|action|step)s? \d+", r"\d+[A-Z]\d+"),
    ),
    "run": Format(
        "given.json",
        sound("measured"),
        json_damage(),
        {
            "show": command("show", "FOLDER/plan.json", "--measured", "FILE"),
            "trace": command("show", "FOLDER/plan.json", "--measured", "FILE", "-o", "FOLDER/trace.json"),
        },
        r"line \d|position \d|is empty|nested|schema .* version .*;|plan_digest|ranks|has \d+[A-Z]\d+|of plan|JSON object",
        lambda: {"plan.json": plans()[0]},
    ),
    "profile": Format(
        "given.json",
        sound("profile"),
        json_damage(),
        {
            "plan": command("plan", *BATCH, "--costs", "FILE"),
            "copies": command("plan", *BATCH, "--offload", "--split-weight", "--costs", "FILE"),
        },
        named(*_COSTS),
    ),
    "costs": Format(
        "given.json", sound("costs"), json_damage(), {"plan": command("plan", *BATCH, "--costs", "FILE")}, named(*_COSTS)
    ),
    "layout": Format(
        "given.json",
        lambda: (layout(),),
        json_damage(optional=("chosen_with",)),
        {"plan": command("plan", "--lengths", "300,200", "--layers", "4", "--layout", "FILE"), "training": _layout},
        named(*keys(json.loads(layout())), "a layout (of|for|has)"),
    ),
    "model": Format(
        "given.yaml",
        lambda: (MODEL,),
        text_damage,
        {"plan": command("plan", *BATCH, "--model", "FILE")},
        named("megatron", r"num_\w+", r"\w*hidden.size", "attention heads", "vocab_size", "name: value"),
    ),
    "cluster": Format(
        "given.yaml",
        lambda: (CLUSTER,),
        text_damage,
        {"plan": command("plan", *EVEN, "--lengths", "300,200", "--cluster", "FILE")},
        named("rates", r"\w+_(flops|sharing|gb|per_node)", "unknown", r"name: value", r"stage \d+"),
        named="given",
    ),
    "settings": Format(
        "given.yaml",
        lambda: (SETTINGS,),
        text_damage,
        {"load": lambda path: load_settings([path])},
        named("includes?", "name: value", "recursion", "surrogates", "unknown", "Launch") + r"|\.yaml: \S+: |\$\{",
    ),
    "lengths": Format(
        "given.txt",
        lambda: (b"300\n200, 17\n",),
        text_damage,
        {"plan": command("plan", *EVEN, "--lengths", "FILE")},
        named("no lengths"),
    ),
    "index": Format(
        "given.idx",
        lambda: (index(),),
        binary_damage(index_fields),
        {
            "plan": command("plan", *EVEN, "--lengths", "FILE"),
            "context": command("plan", *EVEN, "--lengths", "FILE", "--context", "64", "--batch-size", "8"),
        },
        named("header", "first bytes", r"document \d", r"sequence \d", "no documents?"),
    ),
    "table": Format("given.csv", lambda: TABLES, text_damage, _CHECKED, _IN_TABLE),
    "primus": Format("given.txt", lambda: PRIMUS, text_damage, _CHECKED, _IN_TABLE),
    "zero-bubble": Format("given.txt", lambda: ZERO_BUBBLE, text_damage, _CHECKED, _IN_TABLE),
    "record": Format(
        f"given{SUFFIX}",
        lambda: (record(),),
        json_damage(),
        {"check": _record},
        named(*keys(json.loads(record())), "tokens of", "token"),
        named="given",
    ),
    "mask": Format(f"given{MASK_SUFFIX}", lambda: (mask(),), binary_damage(byte_fields), {"read": _mask}, r"token \d|bytes"),
    "lock": Format(
        LOCK,
        lambda: (b'{"run": "0123abcd", "host": "node-1", "pid": 123, "since": "2026-11-22 12:00:00"}\n',),
        json_damage(),
        {"hold": _lock},
        ALL,
    ),
}
"""Formats by their names, which mutants depend on."""
