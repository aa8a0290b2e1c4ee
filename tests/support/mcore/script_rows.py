"""Rows of the matrix for a script's own microbatches: any model of Megatron's, on any layout, compared tensor by tensor.

Microbatches run in another order than in stock as soon as costs are learnt. Attention over context-parallel ranks, with windows
or with latent keys, and state-space layers are stand-ins in plain torch, of which stock has the same.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from tests.support.mcore import worker
from tests.support.mcore.launch import TINY

TOLERANCE = 1e-5
"""Largest norm of the difference of a tensor, beside the norm of stock's."""
PLANS = ("--epp", "--epp-microbatches", "user")


@dataclass(frozen=True, eq=False, kw_only=True)
class ScriptRow:
    name: str
    num_processes: int
    flags: str
    iterations: int
    is_slow: bool

    def check(self) -> None:
        """Assert that plans leave every loss, gradient and weight as stock has it, from equal seeds.

        Compared are losses and gradients of all iterations and weights after the last. Plans that follow learnt costs run
        microbatches from the last to the first.
        """
        stock, planned = (self._train(*flags) for flags in ((), PLANS))
        found = dict.fromkeys(("losses", "gradients", "weights"), 0.0)
        for own, ours in zip(stock, planned, strict=True):
            assert len(own["losses"]) == len(ours["losses"]) == self.iterations
            for kind in ("losses", "gradients"):
                pairs = zip(own[kind], ours[kind], strict=True)
                found[kind] = max([found[kind], *(_worst(theirs, mine) for theirs, mine in pairs)])
            found["weights"] = max(found["weights"], _worst(own["weights"], ours["weights"]))
        assert any(losses for rank in stock for losses in rank["losses"])
        assert {kind: worst for kind, worst in found.items() if worst > TOLERANCE} == {}
        assert "costs learnt from 3 iterations" in "\n".join(line for rank in planned for line in rank["log"])

    def _train(self, *more: str) -> list[dict[str, Any]]:
        iterations = ["--train-iters", str(self.iterations), "--eval-iters", str(int(self.is_slow))]
        flags = [*TINY, *iterations, *self.flags.split(), *more]
        return worker.call(self.num_processes, "tests.support.mcore.trainings:tensors", limit_s=300, flags=flags)


def _worst(own: dict[str, Tensor], ours: dict[str, Tensor]) -> float:
    assert own.keys() == ours.keys()
    return max((_relative(own[name], ours[name]) for name in own), default=0.0)


def _relative(own: Tensor, ours: Tensor) -> float:
    difference = float((ours.double() - own.double()).norm())
    return difference / float(own.double().norm()) if difference else 0.0


# ---- the rows --------------------------------------------------------------------------------------------------------

SGD = "--optimizer sgd --lr 0.02"
ROPE = "--position-embedding-type rope --no-rope-fusion"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
EXPERTS += "--moe-token-dispatcher-type alltoall --no-bias-gelu-fusion --disable-bias-linear"
LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12 "
LATENT += f"--normalization RMSNorm {ROPE}"
REPLICAS = "--global-batch-size 16"
"""Two replicas have four microbatches each."""
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --optimizer adam --adam-eps 1e-2 --lr 1e-3 "
SHARDED += f"--timing-log-level 2 {REPLICAS}"
"""It takes no SGD. Its eps keeps Adam from making much of gradients that are zero but for rounding."""
STATES, SECOND = "--mamba-num-heads 8 --mamba-num-groups 4", "--window-size 5,0 --window-attn-skip-freq 2"
SHARED = "--moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 16 --swiglu"
HYBRID = "--spec tests.support.mcore.stand_ins hybrid_spec"


class Model(NamedTuple):
    flags: str
    two: str = ""
    four: str = ""


MODELS = {
    "attention and MLP": Model(ROPE),
    "hybrid": Model(HYBRID, "*-*-|*-*-", "*-|*-|*-|*-"),
    "latent attention, experts, multi-token prediction": Model(f"{LATENT} {EXPERTS} --mtp-num-layers 1 {SHARED}"),
    "state-space layers and experts": Model(f"{HYBRID} {EXPERTS} {STATES}", "M*E-|M*-E", "ME|*E|M-E|*E"),
    "sliding window": Model(f"{ROPE} --window-size 8,0"),
    "sliding window in every second layer, loss per token": Model(f"{ROPE} {SECOND} --calculate-per-token-loss"),
}
TWO = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "2 stages": (2, "--pipeline-model-parallel-size 2"),
    "4 stages": (4, "--pipeline-model-parallel-size 4"),
    "4 stages on 2 ranks": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "tensor and sequence parallel": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    "context parallel": (4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
    "expert parallel": (4, f"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {REPLICAS}"),
    "distributed optimizer": (4, f"--pipeline-model-parallel-size 2 {SHARDED}"),
    "distributed optimizer, 4 stages on 2 ranks": (4, f"{TWO} --num-layers-per-virtual-pipeline-stage 1 {SHARDED}"),
}
COVERING = {
    ("latent attention, experts, multi-token prediction", "expert parallel"),
    ("state-space layers and experts", "tensor and sequence parallel"),
    ("sliding window", "context parallel"),
    ("attention and MLP", "distributed optimizer, 4 stages on 2 ranks"),
}
"""Every model that needs more than stock's layers, every kind of parallelism, and both schedules of stock, once."""


def _script_rows() -> list[ScriptRow]:
    """Return the rows of `COVERING` for 5 iterations, and all for 20: ten minutes of training."""
    rows = []
    for model, (own, two, four) in MODELS.items():
        for layout, (num_processes, sizes) in LAYOUTS.items():
            if "expert" in layout and "expert" not in own:
                continue
            flags = f"{SGD} {own} {sizes}"
            if two:
                pattern = four if "4 stages" in layout else two
                flags = f"{flags.replace(' --num-layers-per-virtual-pipeline-stage 1', '')} --hybrid-layer-pattern {pattern}"
            given = {"num_processes": num_processes, "flags": flags}
            if (model, layout) in COVERING:
                rows.append(ScriptRow(name=f"{model}, {layout}", **given, iterations=5, is_slow=False))
            rows.append(ScriptRow(name=f"20 iterations, {model}, {layout}", **given, iterations=20, is_slow=True))
    return rows


_FLEX = f"{SGD} {ROPE} {EXPERTS.replace('alltoall', 'flex')} {LAYOUTS['expert parallel'][1]} --moe-flex-dispatcher-backend"
SINKS = f"{SECOND} --softmax-type"
_DELTA = "--spec tests.support.mcore.delta_hybrid stack_spec --linear-num-key-heads 2 --linear-num-value-heads 4 "
_DELTA += "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-conv-kernel-dim 4 --swiglu --disable-bias-linear"
_OF_LAYERS = {
    "learnable sinks": ("4 stages on 2 ranks", f"{SINKS} learnable"),
    "sinks of zero, experts": ("expert parallel", f"{SINKS} off-by-one {EXPERTS}"),
    "gated delta nets": ("2 stages", f"{_DELTA} --hybrid-layer-pattern G-*|-G-G"),
    "gated delta nets, experts": ("expert parallel", f"{_DELTA} {EXPERTS} --hybrid-layer-pattern GE|*E"),
}
"""Layout and flags. Those of sinks have Megatron's own attention."""
_LONG: dict[str, Any] = {"num_processes": 4, "iterations": 5, "is_slow": True}
SCRIPT_ROWS = (
    *_script_rows(),
    *(
        ScriptRow(
            name=name,
            num_processes=(sizes := LAYOUTS[layout])[0],
            flags=f"{SGD} {ROPE} {own} {sizes[1]}",
            iterations=5,
            is_slow=name != "learnable sinks",  # the matrix has gated delta nets on every layout
        )
        for name, (layout, own) in _OF_LAYERS.items()
    ),
    *(ScriptRow(name=f"experts by {own}", flags=f"{_FLEX} {own}", **_LONG) for own in ("deepep", "hybridep")),
)
