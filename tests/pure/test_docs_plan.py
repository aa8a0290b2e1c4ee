"""The plan that the documentation reads is read there as it is: its text, its fields, and what is said of a fault in it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.plan import Action, check, load, report
from megatron_epp.plan.plan import KVOffload
from megatron_epp.plan.serialize import to_json
from megatron_epp.report.text import summary

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "reading-a-plan.md").read_text()
FILE = DOCS / "examples" / "plan.json"


@pytest.fixture(scope="module")
def plan():
    return load(FILE)


def test_it_is_sound_and_prints_as_shown(plan):
    assert not check(plan)
    assert f"```text\n{summary(plan)}\n```\n" in PAGE, f"the page shows another text: megatron-epp show {FILE}"


def test_every_field_that_a_file_may_have_is_explained(plan):
    """The example's, and those that are written only where a plan has KV offload or links that ranks share,
    where messages in flight are counted, where chunks share a loss, and where layers are cut.
    """
    ranks = range(plan.num_ranks)
    more = replace(plan, kv_offload=(KVOffload(0, 0, 1, 1),), host_cap_bytes=tuple(ranks), host_links=tuple(ranks))
    more = replace(more, message_bytes=tuple(ranks), loss_groups=((0, 1),), half_layers=tuple(ranks))
    table = PAGE.partition("| field |")[2]
    explained = {name for cells in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cells)}
    assert explained == set(json.loads(to_json(more)))
    assert set(json.loads(FILE.read_text())) < explained


def test_a_fault_is_reported_as_shown(plan):
    steps = list(plan.ranks[0])
    at = {step.action: position for position, step in enumerate(steps)}
    one, other = (at[Action.parse(text)] for text in ("0B1", "0B0"))
    steps[one], steps[other] = steps[other], steps[one]
    broken = replace(plan, ranks=(tuple(steps), *plan.ranks[1:]))
    assert f"```text\nswapped.json: {report(broken, check(broken))}```\n" in PAGE
