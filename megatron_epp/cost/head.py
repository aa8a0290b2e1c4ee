"""The loss by blocks of tokens: how many a block has, and what there is only while one is computed."""

from __future__ import annotations

AUTO = "auto"
BLOCK_BYTES = 2**30
"""Of a block's fp32 logits, where nobody says how many tokens it has."""


def loss_block_tokens(setting: str | int, vocabulary: int, longest: int) -> int:
    """Tokens of a block; 0 where the logits of a whole chunk are to be there at once.

    A block makes its logits again in backward, which is one more product with the output layer's weight. So by itself (auto)
    this is done where the fp32 logits of the longest sequence would take more than two blocks' bytes.

    Args:
        setting: a number, or auto.
        vocabulary: entries on a rank.
        longest: tokens of the longest sequence on a rank; 0 where that is not known.
    """
    if setting != AUTO:
        return int(setting)
    per_token = 4 * vocabulary
    if longest * per_token <= 2 * BLOCK_BYTES:
        return 0
    return 1 << (max(1, BLOCK_BYTES // per_token).bit_length() - 1)


def loss_workspace_bytes(
    block_tokens: int,
    vocabulary: int,
    hidden_size: int,
    bytes_per_value: int,
    *,
    fused_accumulation: bool = False,
    in_place: bool = False,
) -> int:
    """What there is beside activations while a pass computes a loss by blocks.

    Logits are fp32, and where values are narrower there is a copy of them or of their gradient as such. The weight's gradient
    is summed over the blocks in fp32, and where values are narrower a block's part of it is one more tensor.

    Args:
        block_tokens: of a block; 0 where there are none, which takes nothing.
        vocabulary: entries on a rank.
        hidden_size: of the model.
        bytes_per_value: of activations and weights.
        fused_accumulation: blocks add to the weight's main gradient themselves; then a tensor only stands for it.
        in_place: a kernel turns logits as narrow as values into their gradient, where they are; then a block's input is there
            once more, times its tokens' weights.
    """
    if block_tokens == 0:
        return 0
    copy = bytes_per_value if bytes_per_value < 4 else 0
    gradient = bytes_per_value if fused_accumulation else 4 + copy
    if in_place:
        return bytes_per_value * block_tokens * (vocabulary + hidden_size) + vocabulary * hidden_size * gradient
    return vocabulary * (block_tokens * (4 + copy) + hidden_size * gradient)
