"""Table of the kinds of files that training and `prepare` read: documents, what is kept with checkpoints, YAML."""

import gzip
import io
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.parquet
import tokenizers
import torch.distributed as dist
import transformers

from megatron_epp.cost.kept import KeptCosts, to_state
from megatron_epp.features.learnt_costs import learnt
from megatron_epp.mcore import entry
from megatron_epp.mcore.arguments.yaml_cfg import take_yaml
from megatron_epp.mcore.data.document_dataset import DocumentDataset, DocumentFile, check_mask, check_tokens
from megatron_epp.mcore.data.encoders import Encoder, chat_encoder
from megatron_epp.mcore.data.prepare import prepare
from megatron_epp.mcore.training import layout_search as layout
from megatron_epp.mcore.training.checkpoints import TRACKER, settle_folder
from megatron_epp.mcore.training.nccl_settings import link_settings, user_settings
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs
from tests.support.fuzz import formats
from tests.support.fuzz.damage import Damage, binary_damage, byte_fields, index_fields, json_damage, lines_damage, text_damage
from tests.support.fuzz.formats import ALL, NUM_TOKENS, RECORD, keys, named
from tests.support.fuzz.judge import Fault, Format, logged

HERE = analytic_costs(
    ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000), CPU, [2, 2]
)
LEARNT_WITH = {"--seq-length": 512, "the device": "cpu"}
LAYOUT_FLAGS = {"seq_length": 512, "epp_costs": "analytic"}
TEXTS = b'{"text": "a few words"}\n\n{"text": "f\\u00fcr alle", "id": 7}\n{"text": "\\ud83d\\ude00 and more"}\n'
CHATS = b"".join(
    json.dumps({"messages": [{"role": role, "content": content} for role, content in chat], "tools": []}).encode() + b"\n"
    for chat in ([("system", "be brief"), ("user", "1 + 1?"), ("assistant", "two")], [("user", "again"), ("assistant", "yes")])
)
TEMPLATE = (
    b"{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    b"{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    b"{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    b"{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n"
    b"{% endfor %}"
)
ABOUT = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}'
GROUPS = b"pp:\n  max_ctas: 4\n  min_ctas: 1\n  is_high_priority_stream: true\ndp:\n  max_ctas: 8\n"
YAML_CFG = b"""language_model:
  num_layers: 4
  hidden_size: 64
  activation_func: swiglu
model_parallel:
  pipeline_model_parallel_size: 2
  bf16: true
micro_batch_size: 1
lr: 1.0e-3
data_path: [a, b]
epp: {slices: 2}
"""


def tokens() -> bytes:
    return (np.arange(NUM_TOKENS) % 257).astype(np.uint16).tobytes()


def learnt_costs() -> bytes:
    return json.dumps(to_state([KeptCosts(HERE, LEARNT_WITH)])).encode()


def kept_layout() -> bytes:
    body = {key: value for key, value in json.loads(formats.layout()).items() if key != "vocabulary"}
    return json.dumps(body | {"chosen_with": LAYOUT_FLAGS}).encode()


LINES = r"jsonl:\d|no documents|is text in UTF-16"
"""What says where the fault is in lines, of which not all may have documents."""
BINARY_LINES = r"(gz|parquet):\d|no documents|no message is|damaged or cut short|is not JSONL"
"""The same of a file whose bytes are not those of its lines."""
ROWS = r"given\.|no documents|no message is"


@cache
def parquet() -> tuple[bytes, ...]:
    sink = io.BytesIO()
    rows = [json.loads(line) for line in CHATS.splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return (sink.getvalue(),)


def alone() -> None:
    """Make this process the only rank of a job, as collective calls need it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@cache
def encoder() -> Encoder:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {text: number for number, text in enumerate(["<|im_start|>", "<|im_end|>", *sorted(alphabet)])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    return Encoder(
        encode=lambda raw: np.asarray(fast.encode(raw.decode()), dtype=np.int64),
        tokenizer=formats.Tokenizer("HuggingFaceTokenizer", "byte-level", len(vocabulary), 1, None),
        flags="--tokenizer-type HuggingFaceTokenizer",
        apply_template=lambda messages, template, **options: fast.apply_chat_template(
            messages, chat_template=template, **options
        ),
        template=TEMPLATE.decode(),
        decode=fast.decode,
        stops=frozenset(fast.all_special_ids),
    )


def _documents(path: Path) -> None:
    str(prepare([path], path.with_name("out")))


def _chats(path: Path) -> None:
    str(prepare([path], path.with_name("out"), encoder=encoder(), chat=chat_encoder(encoder(), ["assistant"])))


def _template(path: Path) -> None:
    chat = chat_encoder(encoder(), ["assistant"], path)
    str(prepare([path.with_name("chats.jsonl")], path.with_name("out"), encoder=encoder(), chat=chat))


def _pair(path: Path) -> None:
    """Read all tokens of a pair as training does. Raise `Fault` for a token that a model has no row for."""
    for mmap in (True, False):
        file = DocumentFile(str(path.with_name("given")), mmap)
        with logged():
            check_tokens(file, RECORD.tokenizer)
            check_mask(file)
            dataset = DocumentDataset(file, 64, vocab_size=RECORD.tokenizer.vocab_size)
        for number in range(len(dataset)):
            ids, length = dataset.tokens(number), int(dataset.lengths[number])
            if ids.dtype.kind not in "iu" or len(ids) != length + 1 or not 0 <= ids.min() <= ids.max() < 257:
                raise Fault(f"sequence {number} of {length} positions has {len(ids)} tokens: {ids}")
            dataset.trained(number, 0, length)


def _learnt_costs(path: Path) -> str:
    alone()
    with logged() as warnings:
        learnt.resumed(Namespace(load=str(path.parent)), [], LEARNT_WITH)
    return "\n".join(warnings)


def _kept_layout(path: Path) -> str:
    sizes = {"num_layers": 4, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": None}
    flags = {
        "epp_layout": "auto",
        "epp_placement": "looped",
        "epp_schedule": "elastic",
        "load": str(path.parent),
        "epp_loss_block_tokens": "auto",
    }
    args = Namespace(**sizes, **flags, epp_open_placements=[])
    with logged() as warnings, mock.patch.object(layout, "_obstacle", return_value=""):  # which asks all of Megatron's flags
        layout._kept(args, args, LAYOUT_FLAGS)
    return "\n".join(warnings)


def _checkpoint(path: Path) -> None:
    settle_folder(path.parent if path.name == TRACKER else path.parent.parent, falls_back=False)


def _communicators(path: Path) -> None:
    found = user_settings(Namespace(nccl_communicator_config_path=str(path), high_priority_stream_groups=["pp"]))
    link_settings(found, 2, 132)


@cache
def _parser() -> ArgumentParser:
    return entry.megatron_parser()


def _yaml_cfg(path: Path) -> None:
    """Take the defaults of a file, and put back those that the parser had: it takes long to make."""
    parser = _parser()
    defaults, actions = dict(parser._defaults), [(action, action.default, action.dest) for action in parser._actions]
    try:
        with logged():  # of keys without effect
            take_yaml(parser, ["--epp", "--yaml-cfg", str(path)])
    finally:
        parser._defaults.clear()
        parser._defaults.update(defaults)
        for action, default, dest in actions:
            action.default, action.dest = default, dest


def _pair_format(file: str, content: Callable[[], bytes], damage: Damage) -> Format:
    """Return the format of one file of a pair, next to the others."""
    all_files = {"given.idx": formats.index, "given.bin": tokens, "given.mask": formats.mask}
    where = r"token \d|document \d|sequence|\d bytes|header|first bytes|\.idx|\.bin|token type"
    others = lambda: {name: make() for name, make in all_files.items() if name != file}  # noqa: E731
    return Format(file, lambda: (content(),), damage, {"read": _pair}, where, others, named="given")


def _checkpoints(**contents: bytes) -> Callable[[], dict[str, bytes]]:
    return lambda: {f"iter_000000{number}/metadata.json": ABOUT for number in (2, 4)} | contents


_COSTS: Sequence[str] = (*keys(json.loads(HERE.to_json())), "costs of", r"layers", "--", "the device")
FORMATS: dict[str, Format] = {
    "pair-index": _pair_format("given.idx", formats.index, binary_damage(index_fields)),
    "pair-tokens": _pair_format("given.bin", tokens, binary_damage(byte_fields)),
    "pair-mask": _pair_format("given.mask", formats.mask, binary_damage(byte_fields)),
    "documents": Format("given.jsonl", lambda: (TEXTS,), lines_damage, {"prepare": _documents}, LINES),
    "chats": Format("given.jsonl", lambda: (CHATS,), lines_damage, {"prepare": _chats}, LINES),
    "chats-gzip": Format(
        "given.jsonl.gz",
        lambda: (gzip.compress(CHATS, mtime=0),),
        binary_damage(byte_fields),
        {"prepare": _chats},
        BINARY_LINES,
        named=ROWS,
    ),
    "chats-parquet": Format(
        "given.parquet", parquet, binary_damage(byte_fields), {"prepare": _chats}, BINARY_LINES, named=ROWS
    ),
    "template": Format(
        "given.jinja",
        lambda: (TEMPLATE, MARKED),
        text_damage,
        {"prepare": _template},
        rf"{ALL}|template|no documents",
        lambda: {"chats.jsonl": CHATS},
        named=r"given\.jinja|chat template|no documents",
    ),
    "learnt-costs": Format(
        learnt.FILE_NAME,
        lambda: (learnt_costs(),),
        json_damage(),
        {"resume": _learnt_costs},
        named(*_COSTS, *keys(json.loads(learnt_costs())), "learnt with", "dictionary"),
    ),
    "kept-layout": Format(
        layout.FILE_NAME,
        lambda: (kept_layout(),),
        json_damage(),
        {"resume": _kept_layout},
        named(*keys(json.loads(kept_layout())), "a layout (of|for|has)", "stages per rank") + "|--",
    ),
    "tracker": Format(TRACKER, lambda: (b"4",), text_damage, {"load": _checkpoint}, "iteration", _checkpoints()),
    "checkpoint": Format(
        "iter_0000004/metadata.json",
        lambda: (ABOUT,),
        json_damage(),
        {"load": _checkpoint},
        named("sharded_backend"),
        _checkpoints(**{TRACKER: b"4"}),
        named="metadata.json",
    ),
    "communicators": Format(
        "given.yaml",
        lambda: (GROUPS,),
        text_damage,
        {"read": _communicators},
        named("pp", "ctas", r"\w+_ctas", "names of groups"),
        named="given.yaml|--nccl-communicator-config-path",
    ),
    "yaml-cfg": Format(
        "given.yaml", lambda: (YAML_CFG,), text_damage, {"defaults": _yaml_cfg}, rf"{ALL}|\w+:|--\w|\w+ is|name: value|section"
    ),
}
"""Formats by their names, which mutants depend on."""
