"""Demonstrations: a quickstart that trains with both schedules, and an emulation of plans without a model."""
