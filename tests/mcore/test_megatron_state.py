"""State that Megatron's functions keep is known, by name, in three releases, and what plans do about it is what is said.

The list is `scripts/megatron_state/known.yaml`. State that is honoured is looked at here for a script's own microbatches: three
of them run forward and backward in other orders than they come in, and recompute unevenly.
"""

import argparse
import functools
import shlex
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from megatron.core import package_info
from megatron.training.arguments import add_megatron_arguments

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.arguments.parser import add_epp_args
from megatron_epp.mcore.arguments.refusals import RULES, problems_of
from megatron_epp.mcore.arguments.rule import Door
from scripts.megatron_state.known import PAGE, PLANS, flags, known, page, rows_of, verdict
from scripts.megatron_state.state import State, states
from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.launch import REPOSITORY
from tests.support.mcore.releases import OTHER_RELEASES, release

INSTALLED = Path(package_info.__file__).parents[2]
TOLERANCE = 1e-6
"""Largest relative difference of sums that are added in another order."""


@pytest.fixture(scope="module")
def trees() -> dict[str, Path]:
    return {wanted: release(wanted) for wanted in OTHER_RELEASES} | {package_info.__version__: INSTALLED}


@pytest.fixture(scope="module")
def found(trees: dict[str, Path]) -> list[State]:
    return states(trees, known()["outside"])


def test_every_state_of_three_releases_is_on_one_list(found: list[State]) -> None:
    rows = [*known()["reached"], *known()["unreached"]]
    belongs = {state.name: [row.get("keeps", row.get("changed")) for row in rows_of(state.name, rows)] for state in found}
    assert len(belongs) > 300
    assert {name: of for name, of in belongs.items() if len(of) != 1} == {}, (
        "decide what plans do about it, in scripts/megatron_state/known.yaml, and run: python -m scripts.megatron_state --write"
    )


def test_nothing_on_the_list_is_gone_from_all_releases(found: list[State], trees: dict[str, Path]) -> None:
    data = known()
    listed = {name for row in (*data["reached"], *data["unreached"]) for name in row.get("names", ())}
    assert {name for name in listed if not any(fnmatchcase(state.name, name) for state in found)} == set()
    for path in data["outside"]:
        assert any((tree / "megatron" / path).exists() for tree in trees.values()), path
    for name in (name for row in data["reached"] for name in row.get("unseen", ())):
        module, _, attribute = name.partition(":")
        files = (tree / "megatron" / f"{module.replace('.', '/')}.py" for tree in trees.values())
        assert any(attribute in file.read_text() for file in files if file.exists()), name


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m scripts.megatron_state --write"


def test_every_state_that_is_honoured_names_a_test() -> None:
    for row in known()["reached"]:
        for what, why in (verdict(row, plans) for plans in PLANS):
            assert what in ("honoured", "refused", "harmless")
            if what == "honoured":
                file, _, name = why.partition("::")
                assert f"def {name}(" in (REPOSITORY / file).read_text(), why


VERDICTS = {(plans, *verdict(row, plans)) for row in known()["reached"] for plans in PLANS}
REFUSED = sorted((plans, why) for plans, what, why in VERDICTS if what == "refused")
EXPERTS = {"expert_tensor_parallel_size": 1, "expert_tensor_parallel_num_weight_shards": 2}


@functools.cache
def parser() -> argparse.ArgumentParser:
    return add_epp_args(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


@pytest.mark.parametrize(("plans", "given"), REFUSED)
def test_flags_that_are_said_to_be_refused_are(plans: str, given: str) -> None:
    model = "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --attention-dropout 0 --num-experts 4 --epp"
    args = parser().parse_args(shlex.split(f"{model} {given}"))
    args.rank, args.world_size = 0, 8
    args.epp_microbatches = "plan" if plans == "documents" else "user"
    with pytest.raises(ArgumentError) as refusal:
        prepare_epp_args(args)
    for flag in flags(given):
        assert flag.partition(" ")[0] in str(refusal.value)


def test_weights_that_more_ranks_share_than_tensor_parallelism_has_are_refused_with_the_numbers() -> None:
    """In a configuration Megatron says the number of tensor-parallel ranks where nothing is asked for."""
    for settings, refused in (
        ({"tensor_parallel_num_weight_shards": 2}, ""),
        ({"tensor_parallel_num_weight_shards": 4}, "tensor_parallel_num_weight_shards=4 on 2 tensor-parallel ranks"),
        ({"gtp_weight_remat_size": 3}, "tensor_parallel_num_weight_shards=6 on 2 tensor-parallel ranks"),
        (EXPERTS, "expert_tensor_parallel_num_weight_shards=2 on 1 tensor-parallel ranks"),
    ):
        problems = [*problems_of(argparse.Namespace(tensor_model_parallel_size=2, **settings), Door.MODEL, RULES)]
        assert len(problems) == bool(refused)
        assert refused in "".join(problems)


@pytest.fixture(scope="module")
def models() -> dict[str, Mapping[str, Any]]:
    return {one["model"]: one for one in of_ranks(job(1, "state"))}


SAME = "losses, biases, multi-token prediction", "quantiles"
"""Models that draw nothing at random."""


@pytest.mark.parametrize("name", SAME)
def test_gradients_are_those_of_stock(models: dict[str, Mapping[str, Any]], name: str) -> None:
    assert models[name]["from stock"] < TOLERANCE
    assert models[name]["gradients"] > 30


@pytest.mark.parametrize("name", SAME)
def test_what_forwards_leave_behind_is_that_of_stock(models: dict[str, Mapping[str, Any]], name: str) -> None:
    stock = models[name]["stock"]
    every, there = "tokens_per_expert z_loss balancing prediction qb_beta", [key for key, of in stock.items() if any(of)]
    kinds = {kind for kind in every.split() if any(kind in key for key in there)}
    assert kinds == ({"qb_beta"} if name == "quantiles" else {"tokens_per_expert", "z_loss", "balancing", "prediction"})
    for variant in ("in other orders", "with recompute"):
        assert models[name][variant].keys() == stock.keys()
        for key, values in stock.items():
            assert models[name][variant][key] == pytest.approx(values, rel=TOLERANCE), key


def test_layers_that_recompute_draw_what_their_forward_drew(models: dict[str, Mapping[str, Any]]) -> None:
    one = models["dropout, jitter"]
    assert one["by recompute"] == 0.0
    assert one["from stock"] > 0.01  # masks by the order of running
    for key, values in one["in other orders"].items():
        assert one["with recompute"][key] == pytest.approx(values, rel=TOLERANCE), key
