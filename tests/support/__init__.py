"""Helpers that several tests share: cases, stand-ins, and programs that tests start as processes of their own."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the checkout."""
