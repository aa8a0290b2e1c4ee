"""The JSON form: lossless, checked on reading, readable."""

import json
import os
import re
import threading
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.contrib.flexsp.context_groups import ContextGroups, Group
from megatron_epp.contrib.helix.attention_operations import INPUTS
from megatron_epp.plan import KVOffload, Op, PlanError, Prediction
from megatron_epp.plan.chunk import Borrowed
from megatron_epp.plan.document import digest
from megatron_epp.plan.serialize import from_json, load, save, to_json
from tests.support.plan import bad_files
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import EXAMPLES, hybrid, offload, one_f_one_b, with_step

GOLDEN = Path(__file__).parent.parent / "golden"
numbers = st.floats(0, 1e12, allow_nan=False)


@given(sound_plans(), numbers, numbers, st.integers(0, 2**62), st.text(max_size=5))
def test_a_plan_reads_back_equal(plan, time_us, share, num_bytes, text):
    peak = (num_bytes,) * plan.num_ranks
    plan = replace(plan, predicted=Prediction(time_us, time_us / 3, peak, share), cap_bytes=peak, notes=(text,), costs=text)
    again = from_json(to_json(plan))
    assert (again, digest(again)) == (plan, digest(plan))


def test_a_plan_reads_back_equal_in_every_field():
    """Each field differs from its default, so that one that is not written would be noticed."""
    plan = replace(
        offload(),
        predicted=Prediction(1.5, 1.25, (7, 8), 0.125),
        host_links=(4, 4),
        kv_offload=(KVOffload(1, 0, 70, 80),),
        host_cap_bytes=(9, 10),
        message_bytes=(1, 2),
        loss_groups=((0, 2), (1,)),
        borrowed=(Borrowed(-1, 0), Borrowed(0, 1)),
        messages=replace(
            offload().messages,
            num_bytes=(3, 4, 5),
            collective_us=((Op.REDUCE, (1.0, 2.0, 3.0)),),
            message_us=((INPUTS.send, (4.0, 5.0, 6.0)),),
        ),
        extensions=(ContextGroups(4, ((Group(0, 2, (0,)), Group(2, 1, ())), (), ()), (9, 8, 7)),),
        token_multiple=8,
        costs="profile.json",
        planner="mine",
        seed=3,
        notes=("a", "b"),
    )
    assert from_json(to_json(plan)) == plan
    assert from_json(to_json(replace(plan, forward_only=True))).forward_only
    assert {f.name for f in fields(plan)} - {"extensions"} | {"context_groups"} <= set(json.loads(to_json(plan)))


def test_a_step_has_a_line_of_its_own():
    assert '      ["1B2", 20.0, 0, 20]' in [line.rstrip(",]") + "]" for line in to_json(one_f_one_b()).splitlines()]


@given(sound_plans(), st.data())
def test_any_difference_changes_the_digest(plan, data):
    step = data.draw(st.sampled_from([step for row in plan.ranks for step in row]))
    assert digest(with_step(plan, str(step.action), time_us=step.time_us + 1e-9)) != digest(plan)
    assert digest(with_step(plan, str(step.action), alloc_bytes=step.alloc_bytes + 1)) != digest(plan)
    assert digest(replace(plan, seed=plan.seed + 1)) != digest(plan)


def test_the_digest_does_not_care_for_the_type_of_a_number():
    plan = one_f_one_b()
    assert digest(with_step(plan, "0F0", time_us=10)) == digest(plan)


def edited(change):
    document = json.loads(to_json(one_f_one_b()))
    change(document)
    return json.dumps(document)


def signed(change):
    return bad_files.signed(json.loads(edited(change)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not a plan, as `megatron-epp plan -o` and training write them: it is not JSON"),
        ('{"text": "one"}\n{"text": "two"}', "not a plan, .*: it is not JSON: Extra data"),
        ("[]", "not a plan, .*: schema is 'list', expected 'megatron-epp/plan'"),
        ("{}", "not a plan, .*: schema is None"),
        (edited(lambda d: d.update(lengths=[9, 9, 9])), "does not match its content"),
        (edited(lambda d: d.pop("digest")), "plan digest None does not match"),
        (edited(lambda d: d.update(seed=float("nan"))), "infinite or not a number"),
    ],
    ids=["not json", "documents", "no object", "no schema", "edited", "no digest", "nan"],
)
def test_what_is_no_plan_is_refused(text, reason):
    with pytest.raises(PlanError, match=reason):
        from_json(text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.pop("lengths"), "the plan lacks the field 'lengths'"),
        (lambda d: d.update(lengths=5), "field 'lengths' of the plan is malformed"),
        (lambda d: d.update(lengths=[1.5]), r"field 'lengths' of the plan is malformed: \[0\]: 1.5 is not a whole number"),
        (lambda d: d["ranks"][0].append(["0F0", 1.0, 0]), "field 'ranks' of the plan is malformed"),
        (
            lambda d: d["ranks"][0].append(["0Q0", 1.0, 0, 0]),
            r"field 'ranks' of the plan is malformed: \[0\]\[6\]: '0Q0' is not an action",
        ),
        (lambda d: d["chunks"][0].pop("segments"), r"field 'chunks' of the plan is malformed: \[0\].segments is missing"),
        (lambda d: d["chunks"][0].update(segments=[[0, 1]]), "field 'chunks' of the plan is malformed"),
        (
            lambda d: d["predicted"].update(makespan_us="1"),
            "field 'predicted' of the plan is malformed: makespan_us: '1' is not a number",
        ),
        (lambda d: d.update(forward_only=1), "field 'forward_only' of the plan is malformed: 1 is not true or false"),
        (lambda d: d.update(num_ranks=3), "num_ranks is 3, but the plan lists 2"),
    ],
)
def test_a_malformed_field_is_named(change, reason):
    with pytest.raises(PlanError, match=reason):
        from_json(signed(change))


def test_fields_of_a_later_writer_are_ignored():
    assert from_json(signed(lambda d: d.update(later={"a": 1}))) == one_f_one_b()


def test_optional_fields_may_be_absent():
    def strip(document):
        for name in ("copies", "token_multiple", "forward_only", "notes", "costs", "planner", "seed"):
            del document[name]

    assert from_json(signed(strip)) == one_f_one_b()


def test_infinite_numbers_are_not_written():
    with pytest.raises(PlanError, match="infinite or not a number"):
        to_json(with_step(one_f_one_b(), "0F0", time_us=float("inf")))


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    """Such as ``/dev/stdout``, or ``/dev/null``, which root could replace."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    save(offload(), pipe)
    reader.join(60)
    assert from_json(received[0]) == offload()
    assert pipe.is_fifo()


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "plan.json"
    save(hybrid(), path)
    with pytest.raises(PlanError):
        save(with_step(hybrid(), "0F0", time_us=float("nan")), path)
    assert (load(path), [p.name for p in tmp_path.iterdir()]) == (hybrid(), ["plan.json"])
    with pytest.raises(PlanError, match=r"cannot write the plan to .*No such file"):
        save(hybrid(), tmp_path / "none" / "plan.json")


def test_a_file_of_this_version_still_loads():
    assert load(GOLDEN / "plan_v3.json") == EXAMPLES["offload"]()


@pytest.mark.parametrize("version", [2, 5, None, "3"])
def test_a_file_of_another_version_is_refused_with_how_to_make_it_again(version):
    document = json.loads((GOLDEN / "plan_v3.json").read_text()) | {"version": version}
    expected = f"plan version {version!r} cannot be read, only 3 and 4; plan again with `megatron-epp plan`"
    with pytest.raises(PlanError, match=f"^{re.escape(expected)}$"):
        from_json(json.dumps(document))
