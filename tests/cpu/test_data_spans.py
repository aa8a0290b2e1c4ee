"""Spans, positions and columns of samples as inputs, chunk by chunk, and what is said of wrong ones."""

import numpy as np
import pytest

from megatron_epp.data.batch import GlobalBatch, InputColumns, LossColumns
from megatron_epp.data.iterator import spans_of
from megatron_epp.data.samples import Samples, TokenSample
from megatron_epp.losses import Average
from megatron_epp.plan import EppError, Segment
from megatron_epp.plan.problem import TokenSpan

LOSS = LossColumns((), Average.TOKENS)
ASKS = InputColumns(("volume", "place"), 3)
GOOD = {
    "tokens": [3, 1, 4, 1, 5, 9, 2],
    "volume": [10, 11, 12, 13, 14, 15, 16],
    "place": [[token, -token] for token in range(7)],
    "positions": [[token, 2 * token, 3 * token] for token in range(7)],
    "spans": [
        {"start": 4, "tokens": 2, "kept": 2, "payload": "second"},
        {"start": 1, "tokens": 2, "work": 7, "kept": 9, "payload": "first"},
    ],
}


def sample(asks=ASKS, **changes):
    return TokenSample.of(GOOD | changes, LOSS, "sample 5", 10, asks)


def batch(*samples):
    dataset = Samples(samples)
    lengths = tuple(map(int, dataset.lengths))
    return GlobalBatch(indices=tuple(range(len(samples)))[::-1], lengths=lengths[::-1], dataset=dataset)


def test_a_chunk_has_the_columns_positions_and_whole_spans_of_its_tokens():
    plain = sample(tokens=[7, 8, 9], spans=None, positions=None, volume=[1, 2, 3], place=[[5, 6]] * 3)
    made = batch(sample(), plain).chunk_of((Segment(1, 3, 6), Segment(0, 0, 2)), 4, of_inputs=ASKS)
    assert made.position_ids.tolist() == [[3, 4, 5, 0, 1, 0, 1, 2], [6, 8, 10, 0, 1, 0, 1, 2], [9, 12, 15, 0, 1, 0, 1, 2]]
    volume, place = made.of_inputs.columns
    assert volume.tolist() == [13, 14, 15, 1, 2, 0, 0, 0]
    assert place.tolist() == [[3, -3], [4, -4], [5, -5], [5, 6], [5, 6], *[[0, 0]] * 3]
    assert made.of_inputs.tokens.tolist() == made.tokens.tolist() == [1, 5, 9, 7, 8, 0, 0, 0]
    assert [(span.start, span.num_tokens, span.sample, span.payload) for span in made.of_inputs.spans] == [(1, 2, 0, "second")]
    first = batch(sample(), plain).chunk_of((Segment(1, 0, 3),), of_inputs=ASKS)
    assert [(span.start, span.payload) for span in first.of_inputs.spans] == [(1, "first")]


def test_ranks_of_other_stages_read_positions_alone_and_plans_get_spans_with_their_work():
    made = batch(sample())
    assert made.chunk_of((Segment(0, 0, 2),), of_inputs=InputColumns(None, 3)).of_inputs is None
    assert made.chunk_of((Segment(0, 0, 2),)).position_ids.tolist() == [0, 1]
    assert spans_of(made.dataset, (0,)) == ((TokenSpan(1, 3, 7.0, 9.0), TokenSpan(4, 6, 0.0, 2.0)),)
    assert spans_of(Samples([sample(spans=[])]), (0,)) == ()


def test_payloads_are_those_of_the_last_samples_that_a_dataset_has_taken():
    dataset = Samples([sample()])
    batch_ = GlobalBatch(indices=(0,), lengths=(6,), dataset=dataset)
    (first, _) = batch_.chunk_of((Segment(0, 0, 6),), of_inputs=ASKS).of_inputs.spans
    dataset.take_payloads(Samples([sample(spans=[span | {"payload": "new"} for span in GOOD["spans"]])]))
    assert first.payload == "new"


def test_a_loss_of_values_has_all_tokens_as_inputs():
    values = LOSS._replace(has_values=True)
    whole = TokenSample.of(GOOD | {"spans": [{"start": 5, "tokens": 2}]}, values, "sample", 10, ASKS)
    made = batch(whole).chunk_of((Segment(0, 4, 7),), of_inputs=ASKS)
    assert made.tokens.tolist() == [5, 9, 2]
    assert made.of_inputs.columns[0].tolist() == [14, 15, 16]
    assert made.position_ids[1].tolist() == [8, 10, 12]
    assert [(span.start, span.num_tokens) for span in made.of_inputs.spans] == [(1, 2)]


WRONG = {
    "beyond the end": ({"spans": [{"start": 5, "tokens": 2}]}, "span 0 has tokens 5 to 7, and the sample has inputs 0 to 6"),
    "ahead of the start": ({"spans": [{"start": -1, "tokens": 2}]}, "span 0 has tokens -1 to 1"),
    "empty": ({"spans": [{"start": 1, "tokens": 0}]}, "span 0 has tokens 1 to 1"),
    "overlapping": (
        {"spans": [{"start": 3, "tokens": 2}, {"start": 1, "tokens": 3}]},
        "spans 1 and 0 overlap: tokens 1 to 4 and 3 to 5",
    ),
    "no number": ({"spans": [{"start": "a", "tokens": 2}]}, "span 0 needs start and tokens, two integers"),
    "half a token": ({"spans": [{"start": 1.5, "tokens": 2}]}, "span 0 needs start and tokens, two integers"),
    "no end": ({"spans": [{"start": 1}]}, "span 0 needs start and tokens, two integers"),
    "no dict": ({"spans": [(1, 2)]}, "span 0 must be a dict of start and tokens"),
    "another key": ({"spans": [{"start": 1, "tokens": 2, "end": 3}]}, "if there are any; it has end"),
    "less than no work": ({"spans": [{"start": 1, "tokens": 2, "work": -1}]}, "span 0: work is -1.0"),
    "less than nothing kept": ({"spans": [{"start": 1, "tokens": 2, "kept": -1}]}, "span 0: kept is -1.0"),
    "work without what is kept": (
        {"spans": [{"start": 1, "tokens": 2, "work": 7}]},
        "span 0 has work and not what its encoder",
    ),
    "endless work": ({"spans": [{"start": 1, "tokens": 2, "work": np.inf}]}, "span 0: work is inf"),
    "no numbers": ({"volume": ["a"] * 7}, "sample 5: volume must be numbers"),
    "one number": ({"volume": 3.0}, "volume is one number; the inputs read one row for each of 7 tokens"),
    "a short column": ({"place": [[1, 2]]}, "place is 1 x 2; the inputs read one row for each of 7 tokens"),
    "positions the other way": ({"positions": np.zeros((3, 7))}, "positions is 3 x 7; the model reads 3 for each of 7 tokens"),
    "broken positions": ({"positions": np.full((7, 3), 0.5)}, "positions must be whole numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_in_a_line_with_numbers(name):
    change, text = WRONG[name]
    with pytest.raises(EppError) as told:
        sample(**change)
    assert text in str(told.value)
    assert "\n" not in str(told.value)


def test_what_nothing_reads_is_refused():
    with pytest.raises(EppError, match="sample 5 has 2 spans, and no function makes their rows: pass inputs="):
        sample(InputColumns(None, 3))
    with pytest.raises(
        EppError, match="sample 5 has positions, which a model with position_embedding_type='mrope' alone reads"
    ):
        sample(InputColumns((), 1))
    with pytest.raises(EppError, match="volume has 1 and 2 values for a token: give all samples as many"):
        Samples([sample(), sample(volume=[[1, 2]] * 7)])
