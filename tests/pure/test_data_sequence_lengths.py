"""Samples of sequence lengths: equal seeds give equal lengths, distributed as their corpora are."""

import numpy as np
import pytest

from megatron_epp.data import sequence_lengths


@pytest.mark.parametrize(
    ("corpus", "median", "longest"), [("wikipedia", 344, 269428), ("code", 2200, 1 << 24), ("chat", 640, 1 << 24)]
)
def test_lengths_are_those_of_the_corpus_and_of_the_seed(corpus, median, longest):
    draw = getattr(sequence_lengths, corpus)
    found = draw(20_000, 7)
    assert found.shape == (20_000,)
    assert found.min() >= 1
    assert found.max() <= longest
    assert np.median(found) == pytest.approx(median, rel=0.06)
    assert (found == draw(20_000, 7)).all()
    assert (found != draw(20_000, 8)).any()


def test_articles_have_the_quantiles_that_were_counted():
    found = sequence_lengths.wikipedia(400_000, 7)
    for share, length in sequence_lengths.WIKIPEDIA[1:-2]:  # behind them are a few dozen
        assert np.quantile(found, share) == pytest.approx(length, rel=0.1, abs=2)


def test_one_in_twenty_files_of_code_is_long():
    found = sequence_lengths.code(20_000, 7)
    assert (found >= 16384).mean() == pytest.approx(0.05 + 0.95 * 0.053, abs=0.01)


def test_one_in_sixteen_chats_has_a_long_document():
    found = sequence_lengths.chat(20_000, 7)
    assert (found > 5000).mean() == pytest.approx(0.99 / 16, abs=0.01)
    assert np.median(found[found > 5000]) == pytest.approx(60_000, rel=0.15)
