"""Weights go from a folder of Hugging Face through Megatron-Bridge, from its wheel, into a training by a recipe, and back.

Bridge and training have Transformer Engine's layers, its Python as installed (`test_transformer_engine.py`).
"""

import json
import re
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_epp.launch.script_flags import argv_of
from megatron_epp.launch.yaml_settings import load_settings
from megatron_epp.mcore import entry
from megatron_epp.tools.formulas.library import load_flags
from scripts.demo_rl import engine
from tests.callers.test_training_steps import if_installed
from tests.support.mcore.forked import RECORDER, job, launch, of_ranks, returned
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
"""Lengths of the documents, all of which every batch has."""
ENTRIES = 257
"""Entries of the tokenizer, which Megatron would fill up to a multiple of 128."""
ROWS = 272
"""Of the embedding."""
SIZES: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT, "initializer_range": 0.1,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS = {
    "qwen3-8b-finetune": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES)),
    "qwen3-30b-a3b-finetune": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(**SIZES, **EXPERTS)),
    "llama3.1-8b-finetune": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, rope_parameters=SCALED)),
}
"""Of recipes: the class and the configuration of a small model of the same kind."""
SMALL = (
    f"padded_vocab_size={ROWS} seq_length={CONTEXT} max_position_embeddings={CONTEXT} global_batch_size={len(LENGTHS)} "
    "bf16=false tensor_model_parallel_size=1 sequence_parallel=false context_parallel_size=1 expert_model_parallel_size=1 "
    "distributed_backend=gloo attention_backend=unfused num_workers=0"
)
BY_PLANS = f"pipeline_model_parallel_size=2 epp.slices=3 train_iters={ITERATIONS} lr=1e-3 lr_warmup_iters=0 split='100,0,0'"


@pytest.fixture(scope="module")
def ranks() -> Iterator[None]:
    with ranks_with_engine(NEWEST):
        yield


def write_model(folder: Path, recipe: str) -> None:
    """Write a model with random weights, and a tokenizer of bytes."""
    kind, config = MODELS[recipe]
    torch.manual_seed(7)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # gains of norms, which would all be 1
            parameter.data.normal_(1.0, 0.3)
    model.save_pretrained(folder)
    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "</s>"]
    assert len(tokens) == ENTRIES
    core = tokenizers.Tokenizer(tokenizers.models.BPE({token: number for number, token in enumerate(tokens)}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(folder)


def flags_of(recipe: str, model: Path, settings: str) -> list[str]:
    """Return the flags of a recipe with the sizes that the ``config.json`` of a folder has, and with other settings."""
    sizes = [f"{name}={value}" for name, value in load_flags(str(model)).items()]
    overrides = [*sizes, f"tokenizer_model={model}", *SMALL.split(), *settings.split()]
    return argv_of(load_settings([f"recipes/{recipe}"], overrides), entry.megatron_parser())


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of_folder(folder: Path, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = loaded(folder)(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("recipe", MODELS)
def test_weights_of_a_hugging_face_folder_train_by_a_recipe_and_return(ranks: None, tmp_path: Path, recipe: str) -> None:
    model, checkpoint, saved, exported = (tmp_path / name for name in ("model", "checkpoint", "saved", "exported"))
    write_model(model, recipe)
    documents = documents_of(LENGTHS, vocab_size=ENTRIES)
    data = write_pair(tmp_path / "documents", documents)
    first, *_ = texts = [document.tolist() for document in documents]

    def logits_of_checkpoint(folder: Path) -> Tensor:
        settings = f"pipeline_model_parallel_size=1 epp.enabled=false data_path={data} load={folder} finetune=true"
        return torch.tensor(returned(job(1, "bridge_weights:logits", flags=flags_of(recipe, model, settings), tokens=first)))

    of_ranks(job(1, "bridge_weights:imported", source=model, target=checkpoint))
    before = [logits_of_folder(model, tokens) for tokens in texts]
    torch.testing.assert_close(logits_of_checkpoint(checkpoint), before[0], rtol=TOLERANCE, atol=TOLERANCE)
    folders = f"data_path={data} pretrained_checkpoint={checkpoint} save={saved} load={saved}"
    flags = flags_of(recipe, model, f"{BY_PLANS} {folders}")
    finished = launch(2, RECORDER, *flags, env={"RECORD_TO": str(tmp_path)})
    assert finished.returncode == 0, finished.output[-5000:]
    chunks = [int(number) for number in re.findall(r"^epp iteration .* chunks: (\d+)", finished.output, re.MULTILINE)]
    assert len(chunks) == ITERATIONS
    assert min(chunks) > len(LENGTHS)
    losses = [
        cross_entropy(rows[:-1], torch.tensor(tokens[1:]), reduction="none") for rows, tokens in zip(before, texts, strict=True)
    ]
    steps = json.loads((tmp_path / "rank1.json").read_text())["steps"]
    assert steps["1"]["loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=TOLERANCE)
    (own,) = saved.glob("iter_*")
    shutil.copy(checkpoint / "iter_0000000" / "run_config.yaml", own)
    of_ranks(job(1, "bridge_weights:exported", source=model, checkpoint=saved, target=exported))
    after = logits_of_folder(exported, first)
    torch.testing.assert_close(after, logits_of_checkpoint(saved), rtol=TOLERANCE, atol=TOLERANCE)
    assert not torch.allclose(after, before[0], rtol=0.01, atol=0.01)


def test_adapters_of_the_example_train_by_plans_and_are_those_of_the_folder_of_peft_that_it_writes(
    ranks: None, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    write_model(model, "qwen3-8b-finetune")
    documents = documents_of(LENGTHS, vocab_size=ENTRIES)
    data = write_pair(tmp_path / "documents", documents)
    np.ones(sum(map(len, documents)), dtype=np.uint8).tofile(f"{data}.mask")
    texts = [document.tolist() for document in documents]

    def losses(steps: int) -> list[float]:
        given = {"source": model, "data": data, "target": tmp_path / str(steps), "steps": steps, "batch": len(LENGTHS)}
        lines, *_ = of_ranks(job(2, "bridge_weights:adapters", **given))
        return [float(re.search(r"loss ([\d.]+)", line)[1]) for line in lines]

    before, *_, after = losses(ITERATIONS + 1)
    assert losses(ITERATIONS)[0] == before > 1.02 * after
    engine.reachable("bridge", "peft")
    adapted = import_module("peft").PeftModel.from_pretrained(loaded(model), tmp_path / str(ITERATIONS)).eval()
    with torch.no_grad():
        found = [cross_entropy(adapted(torch.tensor([x])).logits[0, :-1], torch.tensor(x[1:]), reduction="none") for x in texts]
    assert float(torch.cat(found).mean()) == pytest.approx(after, rel=TOLERANCE)
