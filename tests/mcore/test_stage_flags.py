"""How many stages a rank has, from Megatron's flags; and which of them cannot be honoured together, by name."""

import pytest

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from tests.support.mcore.megatron_flags import arguments

PER_STAGE = "num_layers_per_virtual_pipeline_stage"
PER_RANK = "num_virtual_stages_per_pipeline_rank"
LAYOUT = "pipeline_model_parallel_layout"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
RANKS = "pipeline_model_parallel_size"


@pytest.mark.parametrize(
    "megatron",
    [
        {PER_STAGE: 2},
        {PER_RANK: 4},
        {PER_RANK: 1},
        {LAYOUT: "Ett|t|tt|tttL"},
        {LAYOUT: "E|t*8||L"},
        {LAYOUT: "E(t|)*7tL", RANKS: 4},
        {FIRST: 2},
        {FIRST: 2, LAST: 6, PER_RANK: 2},
        {
            "num_layers": 6,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
            PER_RANK: 2,
        },
    ],
    ids=str,
)
def test_stages_that_megatron_can_build_are_run(megatron):
    prepare_epp_args(arguments(**{RANKS: 2} | megatron))


def test_both_placements_are_run():
    for placement in ("looped", "v"):
        prepare_epp_args(arguments("--epp-placement", placement, **{RANKS: 2, PER_RANK: 2}))


@pytest.mark.parametrize(
    ("megatron", "says"),
    [
        ({PER_RANK: 3}, "--num-layers 8 cannot be .* 2 x --num-virtual-stages-per-pipeline-rank 3:"),
        ({LOSS: True}, "--num-layers 8 and 1 for --account-for-loss-in-pipeline-split cannot"),
        ({PER_RANK: 0}, "--num-virtual-stages-per-pipeline-rank is 0; it must be at least 1"),
        ({LAYOUT: "Ett|ttL"}, "has 4 layers but --num-layers is 8"),
        ({FIRST: 3, LAST: 5, PER_RANK: 2}, "--decoder-first-pipeline-num-layers 3 cannot be shared evenly"),
        ({FIRST: 3, RANKS: 3}, "5 of --num-layers 8 are left for 2 ranks"),
        ({FIRST: 5, RANKS: 4, PER_RANK: 5}, "1 of --num-layers 8 for every other rank cannot be"),
    ],
)
def test_stages_that_megatron_cannot_build_are_refused(megatron, says):
    with pytest.raises(ArgumentError, match=says):
        prepare_epp_args(arguments(**{RANKS: 2} | megatron))


def test_there_and_back_needs_several_stages_on_a_rank():
    with pytest.raises(ArgumentError, match=r"v needs several stages .*--num-virtual-stages-per-pipeline-rank 2"):
        prepare_epp_args(arguments("--epp-placement", "v", **{RANKS: 2}))


@pytest.mark.parametrize(
    ("epp", "batch", "says"),
    [
        (("--epp-schedule", "stock", "--epp-placement", "v"), 48, "stock runs .* looped: leave out --epp-placement v"),
        (("--epp-schedule", "packed"), 48, "packed makes another number of microbatches of every batch"),
        (("--epp-schedule", "stock"), 24, "for each of 24 replicas .*make --global-batch-size 24 a multiple of 48"),
    ],
)
def test_what_megatrons_own_schedule_cannot_run_is_refused(epp, batch, says):
    two_on_each = {RANKS: 2, PER_RANK: 2}
    with pytest.raises(ArgumentError, match=says):
        prepare_epp_args(arguments(*epp, global_batch_size=batch, **two_on_each))
    prepare_epp_args(arguments("--epp-schedule", "stock", global_batch_size=48, **two_on_each))
