"""Formulas of a model's time and memory on a machine: asked once, for costs and for a layout."""

from megatron_epp.tools.formulas.analytic import analytic_costs, analytic_profile
from megatron_epp.tools.formulas.device import on_device
from megatron_epp.tools.formulas.hardware import CPU, H100, H100_NODE, Rates
from megatron_epp.tools.formulas.model_shape import ModelShape
from megatron_epp.tools.formulas.profile import ModelPart, Profile

__all__ = ["CPU", "H100", "H100_NODE", "ModelPart", "ModelShape", "Profile", "Rates"]
__all__ += ["analytic_costs", "analytic_profile", "on_device"]
