"""Every way to run a pass: a backward's peak is that of a walk along its layers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_epp.planner.passes import BackwardBytes, LayerGroup, moments


@pytest.mark.parametrize("seed", range(200))
def test_the_peak_of_a_backward_is_that_of_a_walk_along_its_layers(seed: int):
    draw = random.Random(seed)
    sizes = BackwardBytes(*(np.array(draw.randint(-9, 30)) for _ in BackwardBytes._fields))
    groups = [LayerGroup(draw.randint(1, 4), draw.randint(0, 20), draw.randint(0, 30)) for _ in range(draw.randint(0, 3))]
    live, walked = int(sizes.constant + sizes.reached), [int(sizes.constant + sizes.at_half)]
    for number, (kept, peak) in enumerate((kept, peak) for count, kept, peak in groups for _ in range(count)):
        walked.append(live + peak - kept)
        live += int(sizes.first_mlp) * (number == 0) - kept - int(sizes.gone)
    assert max(map(int, moments(sizes, groups))) == max(walked if groups else [*walked, live])
