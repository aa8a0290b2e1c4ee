"""Communicators that carry messages wait on a part of a device's SMs only, with the run's time limit."""

import json
from argparse import Namespace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from megatron_epp.mcore.training import nccl_settings
from megatron_epp.mcore.training.nccl_settings import link_options, link_settings
from megatron_epp.plan import EppError
from megatron_epp.plan.communicators import directions, link_ctas, most_links
from megatron_epp.plan.placement import Placement
from tests.support.mcore.forked import job, returned

SMS = (132, 114, 108, 80, 46)
"""Multiprocessors of H100 SXM and PCIe, A100, V100, and a smaller one."""

V = directions(Placement("v", 4, 2).rank_of)
"""Directions of messages where four ranks have two stages each, in a V."""


@pytest.mark.parametrize("num_sms", SMS)
@pytest.mark.parametrize("num_links", [0, 1, 2, 4, 8])
def test_all_links_of_a_rank_hold_at_most_a_quarter_of_the_sms(num_links, num_sms):
    ctas = link_ctas(num_links, num_sms)
    assert 1 <= ctas <= 4
    assert num_links * ctas <= num_sms / 4
    assert ctas & (ctas - 1) == 0  # NCCL rounds up to a power of two
    assert ctas == 4 or num_links * 2 * ctas > num_sms // 4  # no less than there is room for
    assert link_ctas(8, 16) == 1  # where there is no room


@pytest.mark.parametrize(("num_ranks", "links"), [(1, 0), (2, 2), (4, 4), (64, 4)])
def test_every_pair_of_ranks_has_a_link_for_each_kind_of_message(num_ranks, links):
    assert most_links(directions(range(num_ranks))) == links


@pytest.mark.parametrize(("num_ranks", "looped", "v"), [(2, 4, 4), (3, 4, 8), (4, 4, 8), (64, 4, 8)])
def test_where_ranks_have_several_stages_they_have_the_links_of_their_placement(num_ranks, looped, v):
    assert most_links(directions(Placement("looped", num_ranks, 2).rank_of)) == looped
    assert most_links(directions(Placement("v", num_ranks, 2).rank_of)) == v


def test_settings_of_the_user_go_before_ours():
    assert link_settings({}, 8, 132) == {"is_high_priority_stream": True, "max_ctas": 4}
    own = {"is_high_priority_stream": False, "max_ctas": 8, "cga_cluster_size": 2}
    assert link_settings(own, 8, 132) == own
    assert link_settings({"min_ctas": 8}, 8, 132) == {"is_high_priority_stream": True, "min_ctas": 8, "max_ctas": 8}


@pytest.mark.parametrize("own", [{"max_ctas": 32}, {"max_ctas": 17, "min_ctas": 1}, {"min_ctas": 32}])
def test_settings_whose_links_would_hold_every_sm_are_refused(own):
    name = "max_ctas" if "max_ctas" in own else "min_ctas"
    says = rf"--nccl-communicator-config-path gives 'pp' {name} {own[name]}: the 8 links .* with 132, .* Set it to 4, or"
    with pytest.raises(EppError, match=says):
        link_settings(own, 8, 132)


def arguments(path=None, groups=()):
    return Namespace(distributed_timeout_minutes=7, nccl_communicator_config_path=path, high_priority_stream_groups=groups)


@pytest.fixture(params=["cuda:nccl", "cpu:gloo,cuda:nccl"])
def on_nccl(request, monkeypatch):
    """Two ranks on NCCL, the other with a smaller device."""

    def gather(everyone, mine, group=None):
        everyone[:] = [mine, 108]

    monkeypatch.setattr(dist, "get_backend_config", lambda group: request.param)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL")
def test_every_group_has_options_of_its_own_for_the_smallest_device_and_with_the_runs_limit(on_nccl):
    make = link_options(arguments(), V)
    first, second = make(), make()
    assert first is not second
    assert first.is_high_priority_stream
    assert first.config.max_ctas == 2
    assert first._timeout == timedelta(minutes=7)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with NCCL")
def test_options_of_pipelines_in_the_runs_file_are_taken(on_nccl, tmp_path):
    file = tmp_path / "communicators.yaml"
    file.write_text(json.dumps({"tp": {"max_ctas": 32}, "pp": {"max_ctas": 6, "is_high_priority_stream": False}}))
    options = link_options(arguments(file), V)()
    assert options.config.max_ctas == 6
    assert not options.is_high_priority_stream
    assert link_options(arguments(file, ["pp"]), V)().is_high_priority_stream
    file.write_text("")
    assert link_options(arguments(file), V)().config.max_ctas == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1, 2]", r"the file holds \[1, 2\]; it must hold names of groups"),
        ("pp: 5", "pp is 5; it must hold names with values"),
        ("pp: {max_ctas: many}", "max_ctas of pp: 'many' is not a whole number"),
        ("pp: {net_name: tcp}", "net_name of pp is 'tcp'; it must be IB or Socket"),
        ("pp: {min_ctas: 0}", "min_ctas of pp: 0 is not a whole number from 1"),
        ("pp: [", "is not YAML"),
    ],
)
def test_a_file_of_something_else_is_named(tmp_path, text, told):
    (tmp_path / "communicators.yaml").write_text(text)
    with pytest.raises(EppError, match=rf"--nccl-communicator-config-path .*communicators\.yaml: .*{told}"):
        nccl_settings.user_settings(arguments(tmp_path / "communicators.yaml"))


def test_there_are_no_options_for_another_backend(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
    assert link_options(arguments(), V) is None


def test_training_runs_collectives_only_on_groups_that_have_run_one_before(tmp_path):
    """So that their communicators have their memory before caps are set."""
    found = returned(job(1, "collectives", folder=tmp_path, timeout_s=400))
    assert [len(ranks) for ranks in found.values()] == [4, 4], found
    for rank in (rank for ranks in found.values() for rank in ranks):
        assert rank["strange"] == []
        assert len(rank["used"]) >= 3, rank
