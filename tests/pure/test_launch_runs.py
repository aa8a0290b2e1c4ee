"""Short runs that fail say why, as far as their logs do."""

import pytest

from megatron_epp.launch.runs import reason_in


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("megatron_epp, rank 1: there is no --data-path", "megatron_epp, rank 1: there is no --data-path"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "torch.OutOfMemoryError: CUDA out of memory."),
        ("[rank0]: RuntimeError: boom", "RuntimeError: boom"),
        ("an Error inside of a line", None),
    ],
)
def test_the_reason_is_the_line_that_names_it(line, reason):
    assert reason_in(f"iteration 1/2\n{line}\nlast\n") == reason
