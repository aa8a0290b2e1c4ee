"""Stages go to ranks as a placement says, and Megatron's model, checkpoints and flags follow it."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
from megatron.core import mpu
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.enums import LayerType

from megatron_epp.mcore.model.model_chunks import PlacedLayout, assign_stages, ends, layers_of_stages
from megatron_epp.plan import Op
from megatron_epp.plan.placement import Placement
from megatron_epp.planner.baselines.whole import rows_together
from megatron_epp.planner.orders.patterns import one_warm_up
from tests.support.mcore.forked import job, succeeded

ITERATIONS = 5


def test_a_layout_numbers_layers_by_stage_wherever_the_stage_is() -> None:
    placement = Placement("v", 2, 2)
    stages = [["embedding", "decoder"], ["decoder", "decoder"], [], ["decoder", "loss"]]
    layout = PlacedLayout(stages, placement)
    layout.validate_layer_layout(num_layers=4, mtp_num_layers=None)
    numbers = {}
    for rank in range(2):
        for chunk, stage in enumerate(placement.stages(rank)):
            offset = layout.get_layer_offset(vp_stage=chunk, pp_rank=rank)
            numbers[stage] = list(range(offset, offset + layout.layout[rank][chunk].count(LayerType.decoder)))
    assert numbers == {0: [0], 1: [1, 2], 2: [], 3: [3]}


@pytest.mark.parametrize(("rows", "ranks", "laps"), [(8, 4, 2), (9, 4, 3), (7, 2, 2), (13, 4, 2)])
def test_planned_baselines_interleave_rows_as_megatron_does(rows: int, ranks: int, laps: int) -> None:
    together, own = rows_together(rows, ranks), Placement("looped", ranks, laps)
    table = get_schedule_table(rows, laps, together)
    for rank, row in enumerate(one_warm_up([range(c, c + 1) for c in range(rows)], own, together)):
        forwards = [(action.chunk, action.stage // ranks) for action in row if action.op is Op.F]
        backwards = [(action.chunk, laps - 1 - action.stage // ranks) for action in row if action.op is Op.B]
        assert forwards == backwards == [*map(tuple, table)]
        ahead = [action.op for action in row].index(Op.B)
        assert ahead == min(len(table), 1 + 2 * (ranks - rank - 1) + (laps - 1) * together)


def model(chunks: int, layers: int = 12, first: int | None = None, last: int | None = None, ends: bool = False) -> Namespace:
    return Namespace(
        pipeline_model_parallel_layout=None,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_layers=layers,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=ends,
        account_for_loss_in_pipeline_split=ends,
    )


@pytest.mark.parametrize(
    ("flags", "chunks", "layers"),
    [
        ({}, 1, [6, 6]), ({}, 3, [2] * 6), ({"first": 4}, 2, [2, 4, 2, 4]), ({"first": 8, "last": 4}, 4, [2, 1] * 4),
        ({"layers": 10, "ends": True}, 2, [2, 3, 3, 2]),
    ],
)  # fmt: skip
def test_layers_are_shared_out_as_megatrons_flags_say(flags: dict[str, int], chunks: int, layers: list[int]) -> None:
    assert layers_of_stages(model(chunks, **flags), 2, chunks) == layers


def test_a_run_goes_on_from_its_checkpoint_with_its_stages_elsewhere(tmp_path: Path) -> None:
    """From one process to two replicas there and back, whose optimizer states are shared out and whose embedding is tied; from
    these to four ranks there and back, then to a looped pipeline, and back to one process. Layers are shared out unevenly, and
    some stages have none.
    """
    succeeded(job(1, "placement", folder=tmp_path, timeout_s=900))
    report = json.loads((tmp_path / "report.json").read_text())
    whole = report["whole"]["losses"]
    assert len(whole) == ITERATIONS
    for done, name in enumerate(("there and back", "four ranks", "looped", "alone"), start=1):
        assert report[name]["losses"] == pytest.approx(whole[done:], rel=1e-5), name
        assert report[name]["apart"] <= 1e-5, name
    # Two replicas of two ranks with two stages each overlap gathers, from the second of their four iterations on.
    assert report["gathers"] == (4 - 1) * 4 * 2
    # Megatron reduces all of a rank's later model chunk by one collective, here also the tied embedding, which has a bucket of
    # its own. A second one would hold up the first chunk's compute where a GPU has one hardware queue
    # (`test_runtime_launches.py`).
    groups = {(rank, chunk): number for rank, chunk, number in report["reductions"]}
    assert groups.keys() == {(rank, chunk) for rank in range(2) for chunk in range(2)}
    assert [groups[rank, 1] for rank in range(2)] == [1, 0]  # stage 2 has no layers


def test_layers_of_stages_there_and_back_are_laid_out_with_both_ends() -> None:
    args = Namespace(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, epp_placement="v")
    config = model(2, layers=4)
    assign_stages(config, args)
    layout = config.pipeline_model_parallel_layout
    named = [[layer.name for layer in layout.layout[rank][chunk]] for rank, chunk in ((0, 0), (1, 0), (1, 1), (0, 1))]
    assert named == [["embedding", "decoder"], ["decoder"], ["decoder"], ["decoder", "loss"]]
    assign_stages(config, args)
    assert config.pipeline_model_parallel_layout is layout


def test_a_looped_pipeline_keeps_megatrons_own_settings() -> None:
    args = Namespace(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=None, epp_placement="looped")
    config = model(1, first=3)
    before = vars(config).copy()
    assign_stages(config, args)
    assert vars(config) == before


@pytest.mark.parametrize(
    ("placement", "rank", "chunk", "first", "last"),
    [
        ("v", 0, None, True, False), ("v", 0, 1, False, True), ("v", 1, 0, False, False), ("looped", 0, 1, False, False),
        ("looped", 1, 1, False, True),
    ],
)  # fmt: skip
def test_the_chunks_at_the_models_ends_have_the_embedding_and_the_loss(
    monkeypatch: pytest.MonkeyPatch, placement: str, rank: int, chunk: int | None, first: bool, last: bool
) -> None:
    monkeypatch.setattr(mpu, "get_pipeline_model_parallel_rank", lambda: rank)
    args = Namespace(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, epp_placement=placement)
    assert ends(args, chunk) == {"pre_process": first, "post_process": last}
