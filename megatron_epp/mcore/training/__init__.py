"""Preparation of a training before its first iteration: layout, latents, vocabulary, caps, communicators and checkpoints."""
