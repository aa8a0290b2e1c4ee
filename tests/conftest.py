"""What all tests share: property tests have no deadline, for a busy machine must not fail them; and the order of all tests."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

FOLDERS = ("slurm", "cpu", "gpu", "mcore", "pure")
"""In the order in which they run: what waits most first, many short tests last, so that processes end together.

What asks torch for a GPU's tensors comes before Megatron: its stand-ins for CUDA stay in the process that read its flags.
"""
LONG = ("test_planner_property.py",)
"""A file is one process's: the longest, begun last, would leave the other idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: 0 if item.path.name in LONG else FOLDERS.index(item.path.parent.name))
