"""Jobs of `tests/callers/test_training_steps.py`: Qwen2.5-VL and Qwen3-VL of Megatron-Bridge, from its wheel, in slices."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.mcore.absent_packages import stand_ins
from tests.support.mcore.jobs.frameworks import HIDDEN, begin, causal
from tests.support.mcore.jobs.inputs import Training, compared
from tests.support.mcore.jobs.training_steps import of_bridge

IMAGE, VIDEO, START = 7, 6, 5
PIXELS = 3 * 2 * 2 * 2
"""Of a patch: colours, two frames of one picture, height and width."""
GRIDS = {0: ((3, 6, 8), (17, 4, 6), (30, 10, 4)), 2: ((1, 8, 8),), 3: ((2, 2, 4),), 5: ((8, 8, 10), (32, 4, 4), (40, 6, 8))}
"""Of samples: the first token, height and width in patches of each of their pictures; four patches make a token."""
LENGTHS = (44, 10, 24, 6, 18, 56)


def qwen(language_model: Any) -> Any:
    with of_bridge():
        from megatron.bridge.models.qwen_vl.modeling_qwen25_vl import Qwen25VLModel
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    vision = Qwen2_5_VLVisionConfig(
        depth=2,
        hidden_size=16,
        intermediate_size=24,
        num_heads=2,
        out_hidden_size=HIDDEN,
        patch_size=2,
        spatial_merge_size=2,
        temporal_patch_size=2,
        window_size=8,
        fullatt_block_indexes=[1],
    )
    config = language_model.config
    config.vision_config, config.provide_language_model = vision, lambda **_: language_model
    config.share_embeddings_and_output_weights, config._pg_collection, config.return_dict = False, None, True
    config.image_token_id, config.video_token_id, config.vision_start_token_id = IMAGE, VIDEO, START
    model = Qwen25VLModel(config, pre_process=language_model.pre_process, post_process=language_model.post_process)
    model.model_type = language_model.model_type
    return model


def samples(get_rope_index: Any) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(4)
    made = []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(8, 64, (length + 1,), generator=random)
        spans, grid = [], [(1, height, width) for _, height, width in GRIDS.get(number, ())]
        for (start, height, width), own in zip(GRIDS.get(number, ()), grid, strict=True):
            size = height * width // 4
            tokens[start - 1], tokens[start : start + size] = START, IMAGE
            pixels = torch.randn(height * width, PIXELS, generator=random)
            cost = {"work": float(size), "kept": float(size)}
            spans.append({"start": start, "tokens": size, **cost, "payload": (pixels, torch.tensor([own]))})
        kinds = (tokens == IMAGE).int()
        positions, _ = get_rope_index(tokens[None], kinds[None], torch.tensor(grid) if grid else None)
        sample = {"tokens": tokens, "trained": 1 - kinds, "spans": spans, "positions": positions[:, 0].T}
        made.append(sample)
    return made


def inputs(chunk: Any) -> Tensor:
    model, rows = chunk.model, chunk.embedded().transpose(0, 1)
    if chunk.spans:
        pixels, grids = zip(*(span.payload for span in chunk.spans), strict=True)
        features = torch.cat(model.get_image_features(torch.cat(pixels), torch.cat(grids), return_dict=True).pooler_output)
        mask, _ = model.get_placeholder_mask(chunk.tokens, inputs_embeds=rows, image_features=features)
        rows = rows.masked_scatter(mask, features)
    return rows.transpose(0, 1)


def whole_step(data: Any, model: Any) -> tuple[Tensor, Any]:
    sample = next(data)
    tokens, weights = sample["tokens"][None, :-1], sample["trained"][1:].float()
    mask, pictures = causal(tokens.shape[1]), {}
    if sample["spans"]:
        pixels, grids = zip(*(span["payload"] for span in sample["spans"]), strict=True)
        pictures = {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)}
    losses = model(input_ids=tokens, attention_mask=mask, position_ids=None, labels=sample["tokens"][None, 1:], **pictures)

    def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = (output[0] * weights).sum()
        return total, weights.sum().int(), {"loss": total.detach()}

    return losses, loss_of


def pictures(**settings: Any) -> dict[str, Any]:
    """Return how far steps in slices are from those by Megatron's schedule, whose forward step calls the class's forward."""
    loop = begin(LENGTHS, calculate_per_token_loss=True, positions="mrope", mrope_section=[2, 1, 1], **settings)
    torch.manual_seed(3)
    models = [qwen(model) for model in loop.models]
    training = Training(loop, samples(models[0].get_rope_index), whole_step, models)
    return compared(training, training.stepped(), inputs)


DEEPSTACK = (0, 1)
"""Layers of the tower whose features enter behind the first layers of the language model, which are on the first stage."""


class Tower(torch.nn.Module):
    """Tower of Hugging Face's Qwen3-VL, called as Megatron-Bridge calls its own, which needs Transformer Engine."""

    def __init__(self) -> None:
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": HIDDEN, "patch_size": 2}
        settings = {"depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": list(DEEPSTACK)}
        self.inside = Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**sizes, **settings))

    def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> tuple[Tensor, list[Tensor]]:
        output = self.inside(hidden_states, grid_thw)
        return output.pooler_output, list(output.deepstack_features)


def qwen3(language_model: Any) -> Any:
    """Return Megatron-Bridge's Qwen3-VL with the configuration of another model, and a tower on the first stage."""
    with of_bridge(), stand_ins(extensions=True):
        from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model import Qwen3VLModel
        from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import Qwen3VLTransformerConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None  # which its forward calls
    same = {field.name: getattr(language_model.config, field.name) for field in fields(language_model.config) if field.init}
    own = {"vocab_size": 64, "language_max_sequence_length": 64, "spatial_merge_size": 2, "deepstack_visual_indexes": DEEPSTACK}
    own |= {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    config = Qwen3VLTransformerConfig(**same | own)
    config.batch_p2p_comm = False
    ends = {"pre_process": language_model.pre_process, "post_process": language_model.post_process}
    vision = SimpleNamespace(spatial_merge_size=2, deepstack_visual_indexes=DEEPSTACK)
    model = Qwen3VLModel(config, get_gpt_layer_local_spec(), vision, add_encoder=False, **ends)
    model.model_type = language_model.model_type
    if language_model.pre_process:
        model.vision_model = Tower()
    return model


def inputs_of_qwen3(chunk: Any) -> tuple[Tensor, list[Tensor]]:
    rows = chunk.embedded()
    entering = [rows, *(torch.zeros_like(rows) for _ in DEEPSTACK)]
    if chunk.spans:
        pixels, grids = zip(*(span.payload for span in chunk.spans), strict=True)
        own, features = chunk.model.vision_model(torch.cat(pixels), torch.cat(grids))
        mask = (chunk.tokens[0] == IMAGE)[:, None, None]
        entering = [rows.masked_scatter(mask, values) for rows, values in zip(entering, (own, *features), strict=True)]
    rows, *features = entering
    return rows, features


def deepstack(**settings: Any) -> dict[str, Any]:
    """Return the same as `pictures` of Qwen3-VL, whose features enter behind layers, and whose axes take turns in angles."""
    loop = begin(LENGTHS, calculate_per_token_loss=True, positions="mrope", mrope_section=[2, 1, 1], **settings)
    torch.manual_seed(3)
    models = [qwen3(model) for model in loop.models]
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import get_rope_index

    def positions(tokens: Tensor, kinds: Tensor, grids: Tensor | None) -> tuple[Tensor, Tensor]:
        return get_rope_index(2, IMAGE, VIDEO, START, tokens, image_grid_thw=grids)

    training = Training(loop, samples(positions), whole_step, models)
    return compared(training, training.stepped(), inputs_of_qwen3, {"feature_layers": DEEPSTACK})
