"""The table of kinds of layers: what runs in slices is in it, and all else that Megatron has is refused by name."""

import subprocess
import sys

import pytest
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

from megatron_epp.mcore.arguments.layout import BETWEEN_STAGES
from megatron_epp.mcore.arguments.refusals import REFUSED_LAYERS, pattern_problem
from megatron_epp.mcore.model.kinds import KINDS
from tests.support.mcore.launch import REPOSITORY

BY_SYMBOL = {kind.symbol: kind for kind in KINDS if kind.symbol}


def test_every_layer_that_megatron_has_is_in_the_table_or_refused_by_name() -> None:
    symbols = {value for name, value in vars(Symbols).items() if name.isupper() and isinstance(value, str)}
    assert symbols == {*BY_SYMBOL, *REFUSED_LAYERS, BETWEEN_STAGES}
    for symbol in symbols - {*BY_SYMBOL, BETWEEN_STAGES}:
        assert f"cannot run {REFUSED_LAYERS[symbol]} ({symbol}) layers of" in pattern_problem(f"*-{symbol}")


def test_a_layer_of_a_later_megatron_is_refused_too() -> None:
    assert "cannot run unknown (Z) layers of --hybrid-layer-pattern *Z-" in pattern_problem("*Z-")


@pytest.mark.parametrize("symbol", BY_SYMBOL)
def test_a_kind_of_the_table_runs_in_a_hybrid_model(symbol: str) -> None:
    assert pattern_problem(f"*-|{symbol}-") == ""


def test_the_table_is_read_without_megatron_and_torch() -> None:
    """Commands on other machines check flags by it."""
    code = (
        "import sys; from megatron_epp.mcore.model.kinds import KINDS; assert len(KINDS) > 3; "
        "sys.exit(bool({'torch', 'megatron.core'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
