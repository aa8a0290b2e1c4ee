"""Packaging of megatron-epp. Tool configuration lives in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "megatron_epp/__init__.py").read_text())[1]

setup(
    name="megatron-epp",
    version=VERSION,
    description="Elastic pipeline parallelism for Megatron-LM: train on sequences of very different lengths",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_epp", "megatron_epp.*"]),
    install_requires=["torch>=2.6", "megatron-core[training]>=0.19,<0.20", "numpy"],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "viz": ["matplotlib"],
        "dev": ["pytest", "pytest-xdist", "hypothesis", "matplotlib", "ruff", "mypy", "pre-commit", "codespell"],
    },
    entry_points={"console_scripts": ["megatron-epp = megatron_epp.cli:main"]},
)
