"""Split weight gradients: those of linear layers as actions of their own (W), where a stage would wait."""
