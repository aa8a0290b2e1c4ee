"""A hybrid model's layers without Transformer Engine, Mamba-2 and gated delta nets among them.

For `--spec tests.support.mcore.mamba_hybrid stack_spec`.
"""

from dataclasses import replace

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from tests.support.mcore import delta_hybrid, mamba_stand_in

mamba_stand_in.install()

from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # noqa: E402, the stand-in is in it now

stack_spec = ModuleSpec(
    module=delta_hybrid.stack_spec.module,
    submodules=replace(
        delta_hybrid.stack_spec.submodules,
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm,
                mixer=ModuleSpec(
                    module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
                ),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
    ),
)
