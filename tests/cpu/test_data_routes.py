"""Routes of samples, chunk by chunk, and what is said of wrong ones."""

import numpy as np
import pytest

from megatron_epp.data.batch import GlobalBatch, InputColumns, LossColumns
from megatron_epp.data.routes import Routing
from megatron_epp.data.samples import Samples, TokenSample
from megatron_epp.losses import Average
from megatron_epp.plan import EppError, Segment

LOSS = LossColumns((), Average.TOKENS)
MODEL = Routing(experts=9, per_token=2, layers=(1, 3), num_layers=4)
ROUTES = [[[token, token + 1], [token + 2, token]] for token in range(7)]


def sample(routes=ROUTES, loss=LOSS, routing=MODEL):
    return TokenSample.of(
        {"tokens": [3, 1, 4, 1, 5, 9, 2], "routes": routes}, loss, "sample 5", 10, InputColumns(routing=routing)
    )


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
        assert {layer: rows.tolist() for layer, rows in sample(routes).routes.items()} == {
            1: values[:6, 0].tolist(),
            3: values[:6, 1].tolist(),
        }


def test_a_loss_of_values_reads_the_routes_of_all_tokens():
    of_values = LOSS._replace(has_values=True)
    whole = sample(loss=of_values)
    assert routes_of([(0, 5, 7)], whole, whole)[0].T.tolist() == [[5, 6], [6, 7]]
    with pytest.raises(
        EppError, match="routes is 6 x 2 x 2; it must be 7 tokens x 2 layers with experts x 2 experts of a token"
    ):
        sample(ROUTES[:6], of_values)


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (3, "sample 5: routes is one number; it must be 7 tokens x 2 layers with experts"),
        (np.zeros((7, 3, 2), int), "routes is 7 x 3 x 2"),
        ([*[[[1, 2]]] * 6, [[1]]], "sample 5: routes: "),
        (np.array(ROUTES) + 1.0, "sample 5: routes must be numbers of experts"),
        (-np.array(ROUTES), r"sample 5: routes has expert -1 for token 0 in layer 1 \(both from 0\); there are experts 0 to 8"),
        (
            np.array(ROUTES) + 2,
            r"sample 5: routes has expert 9 for token 5 in layer 3 \(both from 0\); there are experts 0 to 8",
        ),
        (np.full((7, 2, 2), 4), r"sample 5: routes has expert 4 twice for token 0 in layer 1 \(both from 0\)"),
    ],
)
def test_what_is_wrong_is_told_in_a_line_with_numbers(routes, said):
    with pytest.raises(EppError, match=said):
        sample(routes)


def test_what_nothing_replays_is_refused():
    with pytest.raises(EppError, match="sample 5 has routes, and the model has no experts: leave them out"):
        sample(routing=None)
    with pytest.raises(EppError, match="sample 5 has routes, and routers choose by themselves"):
        sample(routing=MODEL._replace(obstacle="routers choose by themselves"))
    with pytest.raises(EppError, match="sample 1 has no routes, and others have: give them to all samples, or to none"):
        Samples([sample(), sample(None)])
    with pytest.raises(EppError, match="the model has experts in layer 2, counted from 0, of which samples have no routes"):
        routes_of([(0, 0, 1)], sample(), sample(), routing=MODEL._replace(layers=(1, 2)))
