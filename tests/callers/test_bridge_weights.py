"""Weights go from a folder of Hugging Face through Megatron-Bridge, from its wheel, into trainings by recipes, and back.

The bridge and the trainings have Transformer Engine's layers, its Python as installed (`test_transformer_engine.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from torch import Tensor

from megatron_epp.cost.library import load_flags
from megatron_epp.launch.script_flags import argv_of
from megatron_epp.launch.yaml_settings import load_settings
from megatron_epp.mcore import entry
from tests.callers.test_training_steps import if_installed
from tests.support.mcore.forked import RECORDER, job, launch, of_ranks, returned
from tests.support.mcore.launch import Finished
from tests.support.mcore.synthetic_documents import documents_of, write_pair
from tests.support.transformer_engine.forked import VERSIONS, is_installed, ranks_with_engine

NEWEST = VERSIONS[0]
pytestmark = [
    pytest.mark.callers,
    if_installed("bridge"),
    pytest.mark.skipif(not is_installed(NEWEST), reason=f"needs the Python of Transformer Engine: bash scripts/te.sh {NEWEST}"),
]
TOLERANCE = 1e-5
ITERATIONS = 4
CONTEXT = 64
LENGTHS = (64, 9, 40, 3, 17, 64, 5, 30)
"""Of the documents, all of which every batch has."""
ROWS = 272
"""Of the embedding: more than the tokenizer has entries, and no multiple of 128, to which Megatron would fill up."""
SIZES: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MODELS = {
    "qwen3-8b-finetune": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES)),
    "qwen3-30b-a3b-finetune": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**SIZES, **EXPERTS)),
}
"""Of recipes: the class and the configuration of a small model of the same kind."""
ON_TWO_RANKS = (
    "pipeline_model_parallel_size=2 tensor_model_parallel_size=1 sequence_parallel=false context_parallel_size=1 "
    "expert_model_parallel_size=1 distributed_backend=gloo attention_backend=unfused num_workers=0 epp.slices=3"
).split()


@pytest.fixture(scope="module")
def ranks() -> Iterator[None]:
    with ranks_with_engine(NEWEST):
        yield


def write_model(folder: Path, recipe: str) -> None:
    """Write a model with random weights, and a tokenizer of bytes."""
    kind, config = MODELS[recipe]
    torch.manual_seed(7)
    kind(config).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(tokenizers.models.BPE({token: number for number, token in enumerate([*alphabet, "</s>"])}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(folder)


def flags_of(recipe: str, model: Path, *overrides: str) -> list[str]:
    """Return the flags of a recipe for the model that a folder of Hugging Face describes, in fp32."""
    sizes = load_flags(str(model)) | {"bf16": False, "padded_vocab_size": ROWS}
    own = [f"{name}={value}" for name, value in sizes.items()]
    lengths = f"seq_length={CONTEXT} max_position_embeddings={CONTEXT} global_batch_size={len(LENGTHS)}".split()
    settings = load_settings(
        [f"recipes/{recipe}"], [*own, *lengths, *ON_TWO_RANKS, f"tokenizer_model={model}", *overrides]
    )
    return argv_of(settings, entry.megatron_parser())


def trained(folder: Path, flags: list[str]) -> tuple[Finished, list[float]]:
    """Train by plans; return the losses."""
    folder.mkdir()
    finished = launch(2, RECORDER, *flags, env={"RECORD_TO": str(folder)})
    assert finished.returncode == 0, finished.output[-5000:]
    steps = json.loads((folder / "rank1.json").read_text())["steps"]
    return finished, [steps[str(1 + number)]["loss"] for number in range(len(steps))]


def logits_of_folder(folder: Path, tokens: list[int]) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0]


def loss_of(logits: list[Tensor], documents: list[list[int]]) -> float:
    """Return the mean over tokens of documents."""
    pairs = zip(logits, documents, strict=True)
    losses = [
        torch.nn.functional.cross_entropy(rows[:-1], torch.tensor(tokens[1:]), reduction="sum") for rows, tokens in pairs
    ]
    return float(sum(losses)) / sum(len(tokens) - 1 for tokens in documents)


@pytest.mark.parametrize("recipe", MODELS)
def test_weights_of_a_hugging_face_folder_train_by_a_recipe_and_return(ranks: None, tmp_path: Path, recipe: str) -> None:
    model, checkpoint, saved, trained_model = (tmp_path / name for name in ("model", "checkpoint", "saved", "trained"))
    write_model(model, recipe)
    documents = [document.tolist() for document in documents_of(LENGTHS, vocab_size=250)]
    data = write_pair(tmp_path / "documents", [np.asarray(document) for document in documents])
    probe = documents[0]

    of_ranks(job(1, "bridge_weights:imported", source=model, target=checkpoint))

    def logits_of_checkpoint(folder: Path) -> Tensor:
        settings = f"epp.enabled=false pipeline_model_parallel_size=1 data_path={data} load={folder} finetune=true".split()
        flags = flags_of(recipe, model, *settings)
        return torch.tensor(returned(job(1, "bridge_weights:logits", flags=flags, tokens=probe)))

    before = [logits_of_folder(model, document) for document in documents]
    torch.testing.assert_close(logits_of_checkpoint(checkpoint), before[0], rtol=TOLERANCE, atol=TOLERANCE)

    overrides = f"train_iters={ITERATIONS} lr=1e-3 lr_warmup_iters=0 save={saved} load={saved} split='100,0,0'".split()
    flags = flags_of(recipe, model, *overrides, f"data_path={data}", f"pretrained_checkpoint={checkpoint}")
    finished, losses = trained(tmp_path / "record", flags)
    print(finished.output)
    assert losses[0] == pytest.approx(loss_of(before, documents), rel=TOLERANCE)

    (own,) = saved.glob("iter_*")
    shutil.copy(next(checkpoint.glob("iter_*")) / "run_config.yaml", own)
    of_ranks(job(1, "bridge_weights:exported", source=model, checkpoint=saved, target=trained_model))
    after = logits_of_folder(trained_model, probe)
    torch.testing.assert_close(after, logits_of_checkpoint(saved), rtol=TOLERANCE, atol=TOLERANCE)
    assert not torch.allclose(after, before[0], atol=1e-2)
