"""Two actions of a step run a layer's forwards in a thread each, and each recomputes the parts that its own chunk names."""

from __future__ import annotations

import threading
from argparse import Namespace

import torch
from megatron.core.transformer.identity_op import IdentityOp

from megatron_epp.mcore.model import layer_recompute
from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.plan.recompute import MLP, MODES


class Layer:
    """Layer that is nothing but an MLP, whose forwards wait for each other before it runs."""

    def __init__(self) -> None:
        self.mlp, self.input_layernorm = torch.nn.Identity(), IdentityOp()
        self.both = threading.Barrier(2, timeout=60)

    def forward(self, hidden: torch.Tensor, packed_seq_params: ChunkParams) -> torch.Tensor:
        self.both.wait()
        output = self._forward_mlp(hidden)
        self.both.wait()
        return output

    def _forward_mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2


def params_of(mode: str) -> ChunkParams:
    params = ChunkParams.__new__(ChunkParams)
    params.context = Namespace(recompute=Namespace(mode=lambda number: mode))
    return params


def test_forwards_of_a_layer_at_the_same_time_recompute_their_own_parts(monkeypatch) -> None:
    again: list[str] = []
    monkeypatch.setattr(
        layer_recompute,
        "run_again",
        lambda run, args, kwargs, in_fp8: (again.append(threading.current_thread().name), run(*args, **kwargs))[1],
    )
    assert MODES["mlp"].runs_again >= {MLP}
    layer = Layer()
    layer_recompute.recompute_by_mode([layer], [0])
    hidden = torch.ones(2, requires_grad=True)
    threads = [
        threading.Thread(
            target=layer.forward, args=(hidden,), kwargs={"packed_seq_params": params_of(mode)}, name=mode or "none"
        )
        for mode in ("mlp", "")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert again == ["mlp"]
