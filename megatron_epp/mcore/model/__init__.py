"""Changes to Megatron's models that plans need: stages, attention, losses, recompute and split weight gradients."""
