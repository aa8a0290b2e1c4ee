"""Samples of a program: what is taken, the spans and routes that they bring, and what is wrong in a line with numbers."""

import gzip
import json

import numpy as np
import pyarrow.parquet
import pytest

from megatron_epp.data.batch import GlobalBatch, InputColumns, LossColumns
from megatron_epp.data.iterator import spans_of
from megatron_epp.data.routes import Routing
from megatron_epp.data.samples import Samples, TokenSample, read_samples
from megatron_epp.losses import Average
from megatron_epp.plan import EppError, Segment
from megatron_epp.plan.problem import TokenSpan
from tests.support.calls import refusal

GOOD = {"tokens": [3, 1, 4], "trained": [0, 1, 1], "advantages": 0.5, "old_logprobs": [0, -1, -2], "note": "not read"}
ASKS = LossColumns(("advantages", "old_logprobs"), Average.TOKENS)


def read(tmp_path, *samples, asks=ASKS, most_tokens=8, vocab_size=9):
    path = tmp_path / "samples.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in samples))
    return read_samples(path, asks, most_tokens, vocab_size)


def test_a_file_has_a_sequence_in_every_line_and_one_number_stands_for_all_tokens(tmp_path):
    found = read(tmp_path, GOOD, "", {"tokens": [1, 2], "advantages": -1, "old_logprobs": [0, -3]})
    assert (found.lengths.tolist(), found.tokens(0, 1, 3).tolist()) == ([2, 1], [1, 4])
    assert found.trained(0, 1, 3).tolist() == [1, 1]
    assert found.trained(1, 1, 2) is None
    assert found.column("advantages", 0, 1, 3).tolist() == [0.5, 0.5]
    assert found.column("old_logprobs", 0, 1, 3).tolist() == [-1, -2]


def test_samples_of_compressed_jsonl_and_of_parquet_are_those_of_jsonl(tmp_path):
    rows = [GOOD, GOOD | {"tokens": [1, 2, 5], "trained": None, "advantages": -1.0}]
    (tmp_path / "samples.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "samples.parquet")
    for name in ("samples.jsonl.gz", "samples.parquet"):
        samples = read_samples(tmp_path / name, ASKS, 8, 9)
        assert [samples.tokens(index).tolist() for index in (0, 1)] == [[3, 1, 4], [1, 2, 5]]
        assert (samples.trained(0, 0, 3).tolist(), samples.trained(1, 0, 3)) == ([0, 1, 1], None)
        of_first, of_second = samples.column("advantages", 0, 1, 3), samples.column("old_logprobs", 1, 1, 3)
        assert (of_first.tolist(), of_second.tolist()) == ([0.5, 0.5], [-1, -2])
    with pytest.raises(EppError, match=r"samples\.parquet:2 has token 5, and the vocabulary 5 entries"):
        read_samples(tmp_path / "samples.parquet", ASKS, 8, 5)


WRONG = {
    "no JSON": ("{", ":2"),
    "no object": ("[1, 2]", ":2 is no object with tokens"),
    "no tokens": ({"advantages": 1}, ":2 has no tokens"),
    "one token": (GOOD | {"tokens": [1]}, ":2: tokens must be a list of at least 2 integers"),
    "no integers": (GOOD | {"tokens": [1.5, 2, 3]}, ":2: tokens must be a list of at least 2 integers"),
    "words": (GOOD | {"tokens": ["a", "b"]}, ":2: tokens must be numbers"),
    "no column": ({"tokens": [1, 2], "advantages": 1}, ":2 has no old_logprobs, which the loss reads; it has tokens, adv"),
    "another length": (GOOD | {"old_logprobs": [0, 1]}, ":2: old_logprobs has 2 values for 3 tokens"),
    "ragged": (GOOD | {"old_logprobs": [[0], [1, 2]]}, ":2: old_logprobs"),
    "not finite": (GOOD | {"advantages": float("nan")}, ":2: advantages is nan for token 1, which is trained: it must be"),
    "infinite": (GOOD | {"old_logprobs": float("-inf")}, ":2: old_logprobs is -inf for token 1, which is trained: it must be"),
    "a mask of other values": (GOOD | {"trained": [0, 2, 1]}, ":2: trained must be 0 or 1"),
    "too long": (GOOD | {"tokens": [1] * 10, "trained": 1, "old_logprobs": 0}, "2 has 10 tokens, 9 positions of 8 at most; s"),
    "unknown token": (GOOD | {"tokens": [1, 9, 2]}, ":2 has token 9, and the vocabulary 9 entries"),
}


def test_a_file_without_samples_or_no_file_is_refused(tmp_path):
    with pytest.raises(EppError, match="there is no sample"):
        read(tmp_path, "")
    with pytest.raises(EppError, match=r"cannot read .*missing\.jsonl"):
        read_samples(tmp_path / "missing.jsonl", ASKS, 8)


def test_arrays_and_what_has_a_list_are_taken_as_lists():
    given = {"tokens": np.array([1, 2, 3]), "trained": np.array([False, True, True])}
    samples = Samples([TokenSample.of(given, LossColumns((), Average.TOKENS), "a")])
    assert (samples.tokens(0).tolist(), samples.trained(0, 0, 3).tolist()) == ([1, 2, 3], [0, 1, 1])


TEACHER = LossColumns(("teacher", "weight"), Average.TOKENS, {"teacher": 2}, "teacher")
TAUGHT = {"tokens": [3, 1, 4], "trained": [0, 1, 0], "teacher": [[-1, 99], [5, 8], [0.5, -7]], "weight": 2}


def test_a_column_may_have_several_values_of_every_token_of_which_those_that_train_are_checked(tmp_path):
    found = read(tmp_path, TAUGHT, asks=TEACHER)
    assert found.column("teacher", 0, 1, 3).tolist() == [[5, 8], [0.5, -7]]
    arrays = GlobalBatch(indices=(0,), lengths=(2,), dataset=found).chunk_of([Segment(0, 0, 2)], 4, of_loss=TEACHER).of_loss
    assert arrays.columns.tolist() == [[5, 0.5, 0, 0], [8, -7, 0, 0], [2, 2, 0, 0]]


WRONG_TEACHERS = {
    "narrow": ({"teacher": [[1], [2], [3]]}, ":1: teacher is 3 x 1; the loss reads 2 values for each of 3 tokens"),
    "one for each": ({"teacher": [1, 2, 3]}, ":1: teacher is 3; the loss reads 2 values"),
    "ragged pairs": ({"teacher": [[1, 2], [3], [4, 5]]}, ":1: teacher"),
    "wide where one is read": ({"weight": [[1, 2]] * 3}, ":1: weight has 6 values for 3 tokens"),
    "above": ({"teacher": [[0, 0], [9, 1], [0, 0]]}, ":1: teacher has token 9, and the vocabulary 9 entries"),
    "below": ({"teacher": [[0, 0], [1, -1], [0, 0]]}, ":1: teacher has token -1, and the vocabulary 9 entries"),
    "between": ({"teacher": [[0, 0], [1, 1.5], [0, 0]]}, ":1: teacher must be numbers of tokens"),
}


@pytest.mark.parametrize("name", [*WRONG, *WRONG_TEACHERS])
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, name):
    sample, said = WRONG.get(name) or WRONG_TEACHERS[name]
    samples, asks = ((GOOD, sample), ASKS) if name in WRONG else ((TAUGHT | sample,), TEACHER)
    refused = refusal(read, tmp_path, *samples, asks=asks)
    assert said in refused
    assert str(tmp_path / "samples.jsonl") in refused


def test_numbers_of_tokens_that_fp32_rounds_are_refused(tmp_path):
    exact, rounded = 2**24 - 1, 2**24 + 1
    found = read(tmp_path, TAUGHT | {"teacher": [[0, 0], [exact, 0], [0, 0]]}, asks=TEACHER, vocab_size=2**25)
    assert found.column("teacher", 0, 1, 2).tolist() == [[exact, 0]]
    with pytest.raises(EppError, match=f"teacher has token {rounded}, and the vocabulary {2**24} entries"):
        read(tmp_path, TAUGHT | {"teacher": [[0, 0], [rounded, 0], [0, 0]]}, asks=TEACHER, vocab_size=2**25)


def test_for_values_all_tokens_are_inputs_and_what_is_of_a_token_is_read_with_it(tmp_path):
    asks = LossColumns(("returns", "weight"), Average.SEQUENCES, {}, None, has_values=True)
    given = {"tokens": [3, 1, 4], "trained": [0, 0, 1], "returns": [5, 6, 7], "weight": 2}
    found = read(tmp_path, given, {"tokens": [8], "returns": [9], "weight": 1}, asks=asks, most_tokens=3)
    assert found.lengths.tolist() == [3, 1]
    batch = GlobalBatch(indices=(0, 1), lengths=(3, 1), dataset=found)
    parts = ([Segment(0, 0, 2)], 1), ([Segment(0, 2, 3), Segment(1, 0, 1)], 3)
    arrays = [batch.chunk_of(*part, of_loss=asks) for part in parts]
    assert [chunk.tokens.tolist() for chunk in arrays] == [[3, 1], [4, 8, 0]]
    assert [chunk.of_loss.weights.tolist() for chunk in arrays] == [[0, 0], [1, 1, 0]]
    assert [chunk.of_loss.columns.tolist() for chunk in arrays] == [[[5, 6], [2, 2]], [[7, 9, 0], [2, 1, 0]]]
    assert [chunk.of_loss.counts.tolist() for chunk in arrays] == [[0, 0], [1, 1, 0]]
    with pytest.raises(EppError, match=":1 has 3 tokens, 3 positions of 2 at most"):
        read(tmp_path, given, asks=asks, most_tokens=2)


LOSS = LossColumns((), Average.TOKENS)
MODEL = Routing(experts=9, per_token=2, layers=(1, 3), num_layers=4)
ROUTES = [[[token, token + 1], [token + 2, token]] for token in range(7)]


def sample(routes=ROUTES, loss=LOSS, routing=MODEL):
    given = {"tokens": [3, 1, 4, 1, 5, 9, 2], "routes": routes}
    return TokenSample.of(given, loss, "sample 5", 10, InputColumns(routing=routing))


def routes_of(segments, *samples, multiple=1, routing=MODEL):
    dataset = Samples(samples)
    batch = GlobalBatch(indices=(1, 0), lengths=tuple(map(int, dataset.lengths[::-1])), dataset=dataset)
    return batch.chunk_of([Segment(*segment) for segment in segments], multiple, of_inputs=InputColumns(routing=routing)).routes


def test_a_chunk_has_the_routes_of_its_tokens_in_the_layers_that_ask_and_padding_has_some_experts():
    other = sample([[[8, 7], [7, 8]]] * 7)
    found = routes_of([(1, 3, 6), (0, 0, 1)], sample(), other, multiple=6)
    assert found.shape == (2, 2, 6)
    assert found[0].T.tolist() == [[3, 4], [4, 5], [5, 6], [8, 7], [0, 1], [0, 1]]
    assert found[1].T.tolist() == [[5, 3], [6, 4], [7, 5], [7, 8], [0, 1], [0, 1]]
    of_stage = routes_of([(1, 3, 5)], sample(), other, routing=MODEL._replace(layers=(3,)))
    assert of_stage.tolist() == found[1:, :, :2].tolist()
    assert routes_of([(1, 3, 5)], sample(), other, routing=None) is None
    assert routes_of([(1, 3, 5)], sample(None), sample(None)) is None


def test_routes_of_all_layers_and_without_the_last_token_are_taken():
    values = np.array(ROUTES)
    everywhere = np.full((7, 4, 2), 100)  # of layers without experts, where anything may be
    everywhere[:, [1, 3]] = values
    for routes in (everywhere, values[:6], values.astype(np.uint8)):
        of_layers = {layer: rows.tolist() for layer, rows in sample(routes).routes.items()}
        assert of_layers == {1: values[:6, 0].tolist(), 3: values[:6, 1].tolist()}


def test_a_loss_of_values_reads_the_routes_of_all_tokens():
    of_values = LOSS._replace(has_values=True)
    whole = sample(loss=of_values)
    assert routes_of([(0, 5, 7)], whole, whole)[0].T.tolist() == [[5, 6], [6, 7]]
    says = "routes is 6 x 2 x 2; it must be 7 tokens x 2 layers with experts x 2 experts of a token"
    assert says in refusal(sample, ROUTES[:6], of_values)


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (3, "sample 5: routes is one number; it must be 7 tokens x 2 layers with experts"),
        (np.zeros((7, 3, 2), int), "routes is 7 x 3 x 2"),
        ([*[[[1, 2]]] * 6, [[1]]], "sample 5: routes: "),
        (np.array(ROUTES) + 1.0, "sample 5: routes must be numbers of experts"),
        (-np.array(ROUTES), "sample 5: routes has expert -1 for token 0 in layer 1 (both from 0); there are experts 0 to 8"),
        (2 + np.array(ROUTES), "sample 5: routes has expert 9 for token 5 in layer 3 (both from 0); there are experts 0 to 8"),
        (np.full((7, 2, 2), 4), "sample 5: routes has expert 4 twice for token 0 in layer 1 (both from 0)"),
    ],
)
def test_what_is_wrong_is_told_in_a_line_with_numbers(routes, said):
    assert said in refusal(sample, routes)


def test_what_nothing_replays_is_refused():
    by_themselves, others = MODEL._replace(obstacle="routers choose by themselves"), MODEL._replace(layers=(1, 2))
    for says, call, *args in (
        ("sample 5 has routes, and the model has no experts: leave them out", sample, ROUTES, LOSS, None),
        ("sample 5 has routes, and routers choose by themselves", sample, ROUTES, LOSS, by_themselves),
        ("sample 1 has no routes, and others have: give them to all samples, or to none", Samples, [sample(), sample(None)]),
    ):
        assert says in refusal(call, *args)
    says = "the model has experts in layer 2, counted from 0, of which samples have no routes"
    assert says in refusal(routes_of, [(0, 0, 1)], sample(), sample(), routing=others)


SPAN_ASKS = InputColumns(("volume", "place"), 3)
SPAN_GOOD = {
    "tokens": [3, 1, 4, 1, 5, 9, 2],
    "volume": [10, 11, 12, 13, 14, 15, 16],
    "place": [[token, -token] for token in range(7)],
    "positions": [[token, 2 * token, 3 * token] for token in range(7)],
    "spans": [
        {"start": 4, "tokens": 2, "kept": 2, "payload": "second"},
        {"start": 1, "tokens": 2, "work": 7, "kept": 9, "payload": "first"},
    ],
}


def span_sample(asks=SPAN_ASKS, **changes):
    return TokenSample.of(SPAN_GOOD | changes, LOSS, "sample 5", 10, asks)


def batch(*samples):
    dataset = Samples(samples)
    lengths = tuple(map(int, dataset.lengths))
    return GlobalBatch(indices=tuple(range(len(samples)))[::-1], lengths=lengths[::-1], dataset=dataset)


def test_a_chunk_has_the_columns_positions_and_whole_spans_of_its_tokens():
    plain = span_sample(tokens=[7, 8, 9], spans=None, positions=None, volume=[1, 2, 3], place=[[5, 6]] * 3)
    made = batch(span_sample(), plain).chunk_of((Segment(1, 3, 6), Segment(0, 0, 2)), 4, of_inputs=SPAN_ASKS)
    assert made.position_ids.tolist() == [[3, 4, 5, 0, 1, 0, 1, 2], [6, 8, 10, 0, 1, 0, 1, 2], [9, 12, 15, 0, 1, 0, 1, 2]]
    volume, place = made.of_inputs.columns
    assert volume.tolist() == [13, 14, 15, 1, 2, 0, 0, 0]
    assert place.tolist() == [[3, -3], [4, -4], [5, -5], [5, 6], [5, 6], *[[0, 0]] * 3]
    assert made.of_inputs.tokens.tolist() == made.tokens.tolist() == [1, 5, 9, 7, 8, 0, 0, 0]
    assert [(span.start, span.num_tokens, span.sample, span.payload) for span in made.of_inputs.spans] == [(1, 2, 0, "second")]
    first = batch(span_sample(), plain).chunk_of((Segment(1, 0, 3),), of_inputs=SPAN_ASKS)
    assert [(span.start, span.payload) for span in first.of_inputs.spans] == [(1, "first")]


def test_ranks_of_other_stages_read_positions_alone_and_plans_get_spans_with_their_work():
    made = batch(span_sample())
    assert made.chunk_of((Segment(0, 0, 2),), of_inputs=InputColumns(None, 3)).of_inputs is None
    assert made.chunk_of((Segment(0, 0, 2),)).position_ids.tolist() == [0, 1]
    assert spans_of(made.dataset, (0,)) == ((TokenSpan(1, 3, 7.0, 9.0), TokenSpan(4, 6, 0.0, 2.0)),)
    assert spans_of(Samples([span_sample(spans=[])]), (0,)) == ()


def test_payloads_are_those_of_the_last_samples_that_a_dataset_has_taken():
    of_one = batch(span_sample())
    (first, _) = of_one.chunk_of((Segment(0, 0, 6),), of_inputs=SPAN_ASKS).of_inputs.spans
    new = span_sample(spans=[span | {"payload": "new"} for span in SPAN_GOOD["spans"]])
    of_one.dataset.take_payloads(Samples([new]))
    assert first.payload == "new"


def test_a_loss_of_values_has_all_tokens_as_inputs():
    values = LOSS._replace(has_values=True)
    whole = TokenSample.of(SPAN_GOOD | {"spans": [{"start": 5, "tokens": 2}]}, values, "sample", 10, SPAN_ASKS)
    made = batch(whole).chunk_of((Segment(0, 4, 7),), of_inputs=SPAN_ASKS)
    assert (made.tokens.tolist(), made.of_inputs.columns[0].tolist()) == ([5, 9, 2], [14, 15, 16])
    assert made.position_ids[1].tolist() == [8, 10, 12]
    assert [(span.start, span.num_tokens) for span in made.of_inputs.spans] == [(1, 2)]


def span_of(start, tokens):
    return {"start": start, "tokens": tokens}


SPAN_WRONG = {
    "beyond the end": ({"spans": [{"start": 5, "tokens": 2}]}, "span 0 has tokens 5 to 7, and the sample has inputs 0 to 6"),
    "ahead of the start": ({"spans": [{"start": -1, "tokens": 2}]}, "span 0 has tokens -1 to 1"),
    "empty": ({"spans": [{"start": 1, "tokens": 0}]}, "span 0 has tokens 1 to 1"),
    "overlapping": ({"spans": [span_of(3, 2), span_of(1, 3)]}, "spans 1 and 0 overlap: tokens 1 to 4 and 3 to 5"),
    "no number": ({"spans": [{"start": "a", "tokens": 2}]}, "span 0 needs start and tokens, two integers"),
    "half a token": ({"spans": [{"start": 1.5, "tokens": 2}]}, "span 0 needs start and tokens, two integers"),
    "no end": ({"spans": [{"start": 1}]}, "span 0 needs start and tokens, two integers"),
    "no dict": ({"spans": [(1, 2)]}, "span 0 must be a dict of start and tokens"),
    "another key": ({"spans": [{"start": 1, "tokens": 2, "end": 3}]}, "if there are any; it has end"),
    "less than no work": ({"spans": [{"start": 1, "tokens": 2, "work": -1}]}, "span 0: work is -1.0"),
    "less than nothing kept": ({"spans": [{"start": 1, "tokens": 2, "kept": -1}]}, "span 0: kept is -1.0"),
    "work without what is kept": ({"spans": [span_of(1, 2) | {"work": 7}]}, "span 0 has work and not what its encoder"),
    "endless work": ({"spans": [{"start": 1, "tokens": 2, "work": np.inf}]}, "span 0: work is inf"),
    "no numbers": ({"volume": ["a"] * 7}, "sample 5: volume must be numbers"),
    "one number": ({"volume": 3.0}, "volume is one number; the inputs read one row for each of 7 tokens"),
    "a short column": ({"place": [[1, 2]]}, "place is 1 x 2; the inputs read one row for each of 7 tokens"),
    "positions the other way": ({"positions": np.zeros((3, 7))}, "positions is 3 x 7; the model reads 3 for each of 7 tokens"),
    "broken positions": ({"positions": np.full((7, 3), 0.5)}, "positions must be whole numbers"),
}


@pytest.mark.parametrize("name", SPAN_WRONG)
def test_what_is_wrong_with_spans_is_told_in_a_line_with_numbers(name):
    change, text = SPAN_WRONG[name]
    assert text in refusal(span_sample, **change)


def test_what_nothing_reads_is_refused():
    no_rows = "sample 5 has 2 spans, and no function makes their rows: pass inputs="
    assert no_rows in refusal(span_sample, InputColumns(None, 3))
    no_positions = "sample 5 has positions, which a model with position_embedding_type='mrope' alone reads"
    assert no_positions in refusal(span_sample, InputColumns((), 1))
    with pytest.raises(EppError, match="volume has 1 and 2 values for a token: give all samples as many"):
        Samples([span_sample(), span_sample(volume=[[1, 2]] * 7)])
