"""Tests on a GPU use the plans, and the hosts, of those on a CPU."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "cpu"), str(TESTS.parent / "scripts")]
