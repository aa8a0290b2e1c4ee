"""Rates of attention kernels: published figures, and the kernel that a plan takes."""

import shlex

import pytest

from megatron_epp.cli import main as cli
from megatron_epp.cli.planning_flags import costs_source
from megatron_epp.cost.attention import BACKWARD_TFLOPS, FLASH_3, FORWARD_TFLOPS, KERNELS, LENGTHS, speed_of
from megatron_epp.cost.library import load_cluster
from megatron_epp.plan import EppError


@pytest.mark.parametrize(("kernel", "width"), FORWARD_TFLOPS)
def test_lines_are_near_every_published_rate(kernel: str, width: int):
    speed = speed_of(kernel, width)
    for length, published in zip(LENGTHS, FORWARD_TFLOPS[kernel, width], strict=True):
        pairs = length**2 / 2
        rate = speed.forward_flops * pairs / (pairs + speed.forward_pairs * length) / 1e12
        assert rate == pytest.approx(published, rel=0.06)
    for length, published in zip(LENGTHS, BACKWARD_TFLOPS.get((kernel, width), ()), strict=(kernel, width) in BACKWARD_TFLOPS):
        rate = speed.backward_flops * length**2 / (length**2 + speed.backward_pairs * length) / 1e12
        assert rate == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize("kernel", KERNELS)
def test_widths_between_the_published_ones_are_between_them_and_others_are_as_the_last(kernel: str):
    narrow, between, wide = (speed_of(kernel, channels).forward_flops for channels in (64, 96, 128))
    assert between == pytest.approx((narrow + wide) / 2)
    assert speed_of(kernel, 32) == speed_of(kernel, 64)
    assert speed_of(kernel, 512) == speed_of(kernel, 256)


@pytest.mark.parametrize("command", ["plan", "compare", "memory"])
def test_commands_take_a_kernel_for_a_cluster_that_names_one(command: str):
    def pair_us(more: str) -> float:
        args = cli._parser().parse(shlex.split(f"{command} --model llama3-8b --stages 4 --lengths 4096 {more}"))
        source, _ = costs_source(args, 4096)
        return source.layer.forward.per_pair_us

    default, cudnn, flash = (
        pair_us(f"--cluster h100x8 {more}") for more in ("", "--attention-kernel cudnn", "--attention-kernel flash-attention-3")
    )
    assert default == cudnn > flash
    with pytest.raises(EppError, match="an H100's, and cluster a100x8 has its own"):
        pair_us("--cluster a100x8 --attention-kernel cudnn")
    with pytest.raises(EppError, match="--attention-kernel is of a --cluster"):
        pair_us("--attention-kernel cudnn")


def test_a_cluster_file_names_a_kernel_or_has_rates_of_its_own(tmp_path):
    path = tmp_path / "mine.yaml"
    for text, kernel in (("attention_kernel: flash-attention-3", FLASH_3), ("attention_forward_flops: 3e14", "")):
        path.write_text(f"rates: h100\n{text}\n")
        assert load_cluster(str(path)).rates.attention_kernel == kernel
    path.write_text("attention_kernel: cudn")
    with pytest.raises(EppError, match=r"attention_kernel is 'cudn'; it must be one of .*did you mean"):
        load_cluster(str(path))
    assert load_cluster("a100x8").rates.attention_kernel == ""
