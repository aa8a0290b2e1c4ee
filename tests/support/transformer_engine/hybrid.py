"""A hybrid model's layers on Transformer Engine, as Megatron has them, with Mamba-2's kernels in plain torch.

For `--spec tests.support.transformer_engine.hybrid stack_spec`.
"""

from dataclasses import replace

from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

from tests.support.mcore import mamba_stand_in

mamba_stand_in.install()

from megatron.core.ssm.mamba_mixer import MambaMixer  # noqa: E402, the stand-in is in it now

_LAYER = hybrid_stack_spec.submodules.mamba_layer
_MIXER = replace(_LAYER.submodules.mixer, module=MambaMixer)
stack_spec = replace(
    hybrid_stack_spec,
    submodules=replace(
        hybrid_stack_spec.submodules, mamba_layer=replace(_LAYER, submodules=replace(_LAYER.submodules, mixer=_MIXER))
    ),
)
