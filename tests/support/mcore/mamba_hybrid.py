"""A hybrid model's layers without Transformer Engine, Mamba-2 and gated delta nets among them.

For `--spec tests.support.mcore.mamba_hybrid stack_spec`.
"""

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from tests.support.mcore import delta_hybrid, local_hybrid, mamba_stand_in

mamba_stand_in.install()

from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # noqa: E402, the stand-in is in it now

_PARTS = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
_MIXER = ModuleSpec(module=MambaMixer, submodules=_PARTS)
stack_spec = local_hybrid.with_layers(delta_hybrid.stack_spec, mamba_layer=local_hybrid.mamba_layer(_MIXER))
