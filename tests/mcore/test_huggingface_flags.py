"""What a Hugging Face config becomes are flags that Megatron has."""

import argparse
from typing import Any

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_epp.cost.huggingface import flags_of_config
from tests.pure.test_huggingface import DENSE, GATED_DELTA, LATENT, NARROW, STATES


@pytest.mark.parametrize("body", [DENSE, LATENT, NARROW, GATED_DELTA, STATES], ids=lambda body: body["model_type"])
def test_every_flag_of_a_config_is_one_of_megatrons(body: dict[str, Any]):
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = {option[2:].replace("-", "_") for action in parser._actions for option in action.option_strings}
    assert flags_of_config(body).keys() <= known
