"""Fingerprints of Megatron's code: how they are computed from a function's source, and the known ones.

Fingerprints of Megatron's own functions are `patching.fingerprint` in releases 0.18.0 and 0.18.2, 0.19.0 and 0.19.2, and in
main of 22 August 2026 (0.20.0, d98e8a64ddf3), in this order, each different text once. Fingerprints of training scripts
(`SCRIPTS`) do not depend on comments, docstrings and formatting.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import linecache
from types import CodeType, FunctionType
from typing import Any

_RANDOM = "megatron.core.tensor_parallel.random"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_LAYERS = "megatron.core.tensor_parallel.layers"
_LAYOUT = "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout"
_LATENT = "megatron.core.transformer.multi_latent_attention"
_AHEAD = "megatron.core.transformer.multi_token_prediction"
_LAYER = "megatron.core.transformer.transformer_layer"
_LANGUAGE = "megatron.core.models.common.language_module.language_module:LanguageModule"
_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_ROUTING = "megatron.core.transformer.moe.moe_utils"
_DELTA = "megatron.core.ssm.gated_delta_net:GatedDeltaNet"
_MAMBA = "megatron.core.ssm.mamba_mixer:MambaMixer"

PATCHED: dict[str, tuple[str, ...]] = {
    f"{_RANDOM}:_set_cuda_rng_state": ("b179c9d95438",),
    "megatron.training.initialize:set_jit_fusion_options": ("2bbb86ed2859", "fe3ec3dcf2af"),
    "megatron.training.utils:get_device_arch_version": ("b7e375abfdb1",),
    "megatron.core.datasets.utils:compile_helpers": ("84029a50ae8c",),
    "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__": ("d3dc509021de", "ca188ccbd7ed"),
    f"{_OPTIMIZER}.state_dict": ("fe621ae6a622",),
    f"{_OPTIMIZER}.load_state_dict": ("5c1ad081423b", "7e5f988b86b4"),
    f"{_OPTIMIZER}._set_main_param_and_optimizer_states": ("ad03a66fb809", "40cab7846597"),
    f"{_ROUTER}.routing": ("b13f6a7393c2", "e93abc48c2d9"),
    f"{_ROUTER}.apply_z_loss": ("0ebb6d1d1ca8", "bce126c6a499", "8e6e8022da61"),
    f"{_ROUTER}._apply_expert_bias": ("f82dbc793f06", "26073493a41a"),
    f"{_ROUTER}.sinkhorn_load_balancing": ("d11a743e6888",),
    f"{_ROUTING}:apply_router_token_dropping": ("215cbb6df959",),
    f"{_ROUTING}:get_tokens_per_expert_and_token_count": ("53bdcd7e6672",),
    f"{_AHEAD}:MultiTokenPredictionLayer._get_embeddings": ("b5e8e0a83af6", "0de994b5131c", "2aae4b4c7700"),
    f"{_AHEAD}:process_mtp_loss": ("55b7a80ffcbc", "7a459bac5884", "918518880dbb"),
}
"""Functions that patches replace, or wrap in a way that depends on their code: other code there is refused."""

RELIED_ON: dict[str, tuple[str, ...]] = {
    f"{_DELTA}.forward": ("81b1829e71ac", "6b5b300d75dd", "1264ad1d101a"),
    f"{_DELTA}._apply_gated_norm": ("218235122197",),
    f"{_MAMBA}.forward": ("678907f3033c",),
    f"{_MAMBA}._ssm_training": ("560abcfa2ca0", "9ea8ec82b390"),
    f"{_SCHEDULES}:forward_backward_pipelining_without_interleaving": ("c8fd558b6fdc", "772d6b7d8182", "b2582d25713c"),
    f"{_SCHEDULES}:forward_step": ("24c526af4445", "d24e8a478a19"),
    f"{_SCHEDULES}:backward_step": ("435628e2479e", "b767f2485190"),
    f"{_SCHEDULES}:custom_backward": ("134012de6fb7",),
    f"{_SCHEDULES}:deallocate_output_tensor": ("ec45aab59f27",),
    "megatron.core.distributed.finalize_model_grads:finalize_model_grads": ("1ea6af88d1ec", "36d18a1e1730", "8c9cea1ccd91"),
    "megatron.core.distributed.finalize_model_grads:_get_shared_word_embedding_weight": ("862c0ffef65a",),
    "megatron.core.transformer.attention:Attention.forward": ("3c1526e57c19", "b144e903f3ca", "eceb93d8c2a7"),
    f"{_LATENT}:MultiLatentAttention.forward": ("0e7f38820035", "b0d8e69892f3", "d0c12b439a67"),
    f"{_LATENT}:MLASelfAttention.get_query_key_value_tensors": ("b57ff9fdfb15", "e19fa46a2a0b", "0e0b9e37d17c"),
    "megatron.core.transformer.transformer_block:TransformerBlock.forward": ("e20defb813f6", "797a0aac5e02"),
    "megatron.core.models.gpt.gpt_model:GPTModel._preprocess": ("b9884d38ede9", "1bc57437dfda"),
    "megatron.core.models.gpt.gpt_model:GPTModel._postprocess": ("de4dbfb0d7d4", "41700c5f809c"),
    f"{_LANGUAGE}.compute_language_model_loss": ("7ab354400f22", "cfdd820917a2"),
    f"{_LANGUAGE}._scale_logits": ("8eb5ca0ddad5",),
    "megatron.core.transformer.transformer_block:get_num_layers_to_build": ("d5e27af88de0",),
    f"{_LAYER}:get_transformer_layer_offset": ("841de49f82bd",),
    f"{_LAYER}:TransformerLayer.forward": ("bdb067023a17", "bdfecfb342cb", "dd702f1c85bc"),
    f"{_LAYER}:TransformerLayer._forward_attention": ("e4ad2634e735", "257c7c162bd0", "cd954b04f33b"),
    f"{_LAYER}:TransformerLayer._forward_mlp": ("03f314c685ca", "04ae2df5a64a", "c3fba511c02a"),
    f"{_LAYER}:MoETransformerLayer._forward_mlp": ("4a944ed851f2", "4e2bba56ad0e", "674b35f91893"),
    f"{_ROUTER}.attach_and_log_load_balancing_loss": ("e3986eb5ce1f", "f9a34bfea0ed"),
    f"{_ROUTER}._apply_aux_loss": ("6ae2521667b8",),
    f"{_ROUTER}._apply_seq_aux_loss": ("d426056f8d31", "d3115a115f8c"),
    f"{_ROUTING}:compute_routing_scores_for_aux_loss": ("d183c63bf2fb",),
    f"{_ROUTING}:switch_load_balancing_loss_func": ("1d9d774b2a32",),
    f"{_RANDOM}:checkpoint": ("b1b936f81b48",),
    f"{_RANDOM}:CheckpointFunction": ("17827ea9250b", "0229852a984f"),
    f"{_LAYOUT}.__init__": ("1459655caf39",),
    f"{_LAYOUT}.get_layer_offset": ("b0c0cf472aee",),
    f"{_LANGUAGE}.setup_embeddings_and_output_layer": ("9cdf2778ee6d",),
    f"{_LANGUAGE}.sharded_state_dict": ("10e15ea625fa",),
    f"{_LANGUAGE}.tie_embeddings_and_output_weights_state_dict": ("8775811a92fe",),
    f"{_LAYERS}:VocabParallelEmbedding.forward": ("aebc86ce7d99", "417ff87fe913"),
    f"{_LAYERS}:ColumnParallelLinear.forward": ("8de69f2acd5f", "dac5d6cfeaa4", "43a9d792d308"),
    f"{_LAYERS}:RowParallelLinear.forward": ("959fc4b4dbb9", "d98cea58261a"),
    f"{_LAYERS}:prepare_input_tensors_for_wgrad_compute": ("79c20a0283c0",),
    "megatron.core.rerun_state_machine:RerunDataIterator.__init__": ("b5bab67a492c",),
    "megatron.training.training:build_train_valid_test_data_iterators": ("d12ed278f953",),
    "megatron.training.training:train_step": ("76bee605a250", "68989d425b23", "29bb2196b79a"),
}
"""Functions that our schedule replaces or calls: other code there may still work, and causes a warning."""

SCRIPTS: dict[str, tuple[str, ...]] = {
    "_build_cached_logits_loss_func": ("c28a4f50f8c6",),
    "BATCH_KEYS": ("ef10269979f5",),
    "core_gpt_dataset_config_from_args": ("529e7a1d910e", "0fe8dd138d45", "1b2587e544f1", "deea63f48447"),
    "forward_step": ("95e05c11c45d", "ade95dc38644", "218c3d0fd672", "7ba7c96178a8"),
    "get_batch": ("e5851b096413", "478108a61a9c", "5b1566dde385", "764b680f2a52"),
    "get_embedding_ranks": ("e4c37ad63493",),
    "is_dataset_built_on_rank": ("12fd84d1a9de",),
    "loss_func": ("164ac332b1bc", "54cbc4c6c875", "ecd56124c25d", "2b56be347b1c"),
    "SPIKY_LOSS_FACTOR": ("4a44dc153642",),
    "train_valid_test_datasets_provider": ("76137f4a9b7d", "398474cf0b9f"),
}
"""Functions and constants that the forward step, the datasets and the embedding ranks of Megatron's scripts consist of.

`fingerprint` of a function, or the digest of a constant: `pretrain_gpt.py` and `pretrain_hybrid.py` of 0.18.0 and 0.18.2, then
of 0.19.0, the end of its branch and main of August 2026. `scripts/fingerprint_script.py` prints those of another release.
"""

Definition = ast.FunctionDef | ast.AsyncFunctionDef

_SILENT = ("ctx", "kind", "type_comment")  # fields of syntax nodes that follow from the others or have no effect


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def fingerprint(node: ast.AST) -> str:
    """Return the digest of a definition's syntax tree without docstrings, the same for Python 3.12 to 3.14."""
    return digest(_written(node))


def definition(function: FunctionType) -> Definition | None:
    """Return the definition that a function was compiled from; None if there is no source, and for a lambda."""
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    return _definitions(text).get((code.co_name, code.co_firstlineno))


def global_names(code: CodeType) -> list[str]:
    """Return the names that a function's code, and the functions inside it, look up in its module, in order and once each."""
    names = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names += global_names(inner)
    return list(dict.fromkeys(names))


@functools.lru_cache(maxsize=16)
def _definitions(text: str) -> dict[tuple[str, int], Definition]:
    """Return the definitions in a file by name and first line, which is the first decorator's if there is one."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    definitions = (node for node in ast.walk(tree) if isinstance(node, Definition))
    return {(node.name, min(part.lineno for part in (node, *node.decorator_list))): node for node in definitions}


def _written(value: Any) -> str:
    """Format a syntax tree as text. `ast.dump` and `ast.unparse` cannot be used: their output differs between Pythons."""
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if not isinstance(value, ast.AST):
        return f"{type(value).__name__} {value!a}"
    fields = dict(ast.iter_fields(value))
    if isinstance(value, ast.Constant):  # whose None is a value
        return f"({_written(fields['value'])})"
    if isinstance(value, Definition | ast.ClassDef) and ast.get_docstring(value, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    if isinstance(value, ast.JoinedStr):  # early releases of Python 3.12 end a format with an empty text
        fields["values"] = [part for part in value.values if not (isinstance(part, ast.Constant) and part.value == "")]
    texts = [f"{name}={_written(part)}" for name, part in fields.items() if name not in _SILENT and part not in (None, [])]
    return f"{type(value).__name__}({','.join(texts)})"
