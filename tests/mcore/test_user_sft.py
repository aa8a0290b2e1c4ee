"""Conversations as whole microbatches of a script, Megatron's `--sft` data, train by plans as by Megatron's own schedule.

Megatron's script that trains on them is not installed with it, so `tests/support/mcore/sft_training.py` stands for it, with
Megatron's dataset, tokenizer and loaders.
"""

import json
import shlex
from pathlib import Path

import pytest
import tokenizers
import transformers

from tests.support.mcore.forked import launch
from tests.support.mcore.launch import TINY

PROGRAM = Path(__file__).parents[1] / "support" / "mcore" / "sft_training.py"
ITERATIONS = 6
"""One to warm up, three to learn costs from, two with plans made from these."""
TOLERANCE = 1e-5
CONTEXT = 96
FLAGS = shlex.split(
    f"--seq-length {CONTEXT} --max-position-embeddings {CONTEXT} --micro-batch-size 1 --eval-iters 0 "
    f"--train-iters {ITERATIONS} --no-create-attention-mask-in-dataloader --calculate-per-token-loss "
    "--split 100,0,0 --pipeline-model-parallel-size 2"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes, and the special tokens of the format of prompts that is Megatron's default."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_233>", "</s>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=260, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([], trainer)
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of one to three conversations, some longer than the context."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    lines = []
    for number in range(24):
        messages = []
        for part in range(1 + number % 3):
            messages += [
                {"role": "system", "content": "s" * (1 + number % 4)},
                {"role": "user", "content": f"{number} + {part}?"},
                {"role": "assistant", "content": f"{number + part} " * (1 + number % 5)},
            ]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))
    return path


def steps_of(folder: Path, *flags: object) -> tuple[dict[str, dict[str, float]], str]:
    folder.mkdir()
    tiny = [flag for flag in TINY if flag != "--mock-data"]
    done = launch(2, PROGRAM, *tiny, *FLAGS, *flags, env={"RECORD_TO": str(folder)})
    assert done.returncode == 0, done.output[-5000:]
    return json.loads((folder / "rank1.json").read_text())["steps"], done.output


def test_megatrons_sft_data_trains_as_without_plans(tmp_path: Path, tokenizer: Path, chats: Path) -> None:
    flags = ["--sft", "--data-path", chats, "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", tokenizer]
    stock, _ = steps_of(tmp_path / "stock", *flags)
    planned, output = steps_of(tmp_path / "planned", *flags, "--epp", "--epp-microbatches", "user")
    assert "costs learnt from 3 iterations" in output
    assert len({step["loss"] for step in stock.values()}) == ITERATIONS
    assert planned.keys() == stock.keys()
    for number, step in stock.items():
        assert planned[number] == pytest.approx(step, rel=TOLERANCE)
