"""The loss by blocks of tokens: tokens of a block, and workspace while a block is computed."""

from __future__ import annotations

AUTO = "auto"
BLOCK_BYTES = 2**30
"""Size of a block's fp32 logits if the number of tokens of a block is not set. With a vocabulary of 128,256 a block has 2,048
tokens, so that the matrix products reach 94 % of their rate (`Rates.saturation_tokens`)."""


def loss_block_tokens(setting: str | int, vocabulary: int, longest: int) -> int:
    """Tokens of a block of the loss; 0 if the logits of a whole chunk are computed at once.

    A block recomputes its logits in backward, which is one more product with the output layer's weight. So ``auto`` uses blocks
    only if the fp32 logits of the longest sequence would take more than the bytes of two blocks.

    Args:
        longest: tokens of the longest sequence on a rank; 0 if unknown.
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
    """Bytes of workspace, in addition to activations, while a pass computes a loss by blocks.

    Logits are fp32; if values are narrower, there is also a copy of them or of their gradient in that type. The weight gradient
    is summed over the blocks in fp32; if values are narrower, a block's contribution is one more tensor.

    Args:
        block_tokens: tokens of a block; 0 for no blocks, which takes no memory.
        fused_accumulation: blocks accumulate into the weight's main gradient directly; only a placeholder tensor is allocated.
        in_place: a kernel overwrites logits, stored in the type of the values, with their gradient; then there is a second copy
            of a block's input, scaled by the weights of its tokens.
    """
    if block_tokens == 0:
        return 0
    copy = bytes_per_value if bytes_per_value < 4 else 0
    gradient = bytes_per_value if fused_accumulation else 4 + copy
    if in_place:
        return bytes_per_value * block_tokens * (vocabulary + hidden_size) + vocabulary * hidden_size * gradient
    return vocabulary * (block_tokens * (4 + copy) + hidden_size * gradient)
