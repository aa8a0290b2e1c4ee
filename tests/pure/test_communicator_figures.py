"""Figures of communicators follow from the placement, and the page has them."""

import pytest

from megatron_epp.plan.placement import Placement
from scripts import write_communicators
from scripts.write_communicators import CHANNEL_BYTES, link_use


def test_the_page_is_written_from_the_formulas():
    current = write_communicators.TARGET.read_text()
    assert current == write_communicators.document(), "run: python -m scripts.write_communicators"


@pytest.mark.parametrize("placement", [Placement("looped", 8, 1), Placement("looped", 8, 2), Placement("v", 8, 2)])
@pytest.mark.parametrize("num_sms", [132, 108, 46])
def test_links_hold_a_quarter_of_the_sms_and_as_much_memory_as_their_ctas_have_channels(placement, num_sms):
    use = link_use(placement, num_sms)
    assert use.num_sms == use.num_links * use.ctas <= num_sms / 4
    assert use.num_bytes == use.num_sms * CHANNEL_BYTES
    by_nccl = link_use(placement, num_sms, ctas=16)
    assert by_nccl.num_bytes / use.num_bytes == 16 / use.ctas


def test_a_pipeline_in_a_line_has_two_communicators_for_each_pair_of_neighbours():
    assert link_use(Placement("looped", 8, 1), 132).num_communicators == 2 * 7
    assert link_use(Placement("looped", 8, 2), 132).num_communicators == 2 * 8
    assert link_use(Placement("v", 8, 2), 132).num_communicators == 2 * 2 * 7
