"""The rows of the matrix: features and layouts, with what their plans must contain.

Those of the default set take some iterations each, and many bring features together that have nothing to do with
each other. The set `slow` has each feature by itself and more, for longer, the rows on up to eight ranks in which every two
choices meet, and every cell.
"""

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_epp.cost.kept import RECORDED, WARM_UP
from megatron_epp.plan.serialize import load
from scripts.parity.cells import Case, Cell, all_rows, covering_rows, full_rows
from scripts.parity.cells import Row as Choices
from scripts.parity.compare import BATCH
from tests.support.mcore.matrix import FOLDER, SEED, Check, Row, case
from tests.support.mcore.parity_figures import SMALL_BATCH, Figures

LONG = 20
"""Iterations of most rows of the set `slow`."""
_LONG: dict[str, Any] = {"iterations": LONG, "batch": BATCH, "is_slow": True}
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
ONE, THREE, SEVEN = (f"--epp-slices {count}" for count in (1, 3, 7))
AGAIN, MANY = f"{THREE} --epp-recompute 1", f"{SEVEN} --epp-recompute 1"
REPLICAS, RANKS = "dp2 pp2 experts4 ep2", "cp2 dp2 experts4 ep2"
"""Layouts with experts."""


def plans_of(figures: Figures) -> list[dict[str, Any]]:
    return [plan for replica in figures["plans"] for plan in replica]


def kinds_of(figures: Figures) -> set[str]:
    return {kind for plan in plans_of(figures) for kind in plan["kinds"]}


def splits_weights(figures: Figures) -> bool:
    return any(plan["weights"] > 0 for plan in plans_of(figures))


# ---- cuts of the documents -------------------------------------------------------------------------------------------

ITERATIONS = 5
MORE_ITERATIONS = 20
"""Iterations of all cases in the set `slow`."""
LEARNED = {ITERATIONS: 0.05, MORE_ITERATIONS: 0.1}
"""Least difference between the first and the last loss of a training that learns, by number of iterations."""


@dataclass(frozen=True)
class Cut:
    """A way to cut and pack the documents, and what its plans must then contain, or the case proves nothing.

    Attributes:
        flags: that ask for it.
        slices: of the longest document of every batch, where it has that many tokens.
        has: a kind of chunk that the first or the last plan must have, since their gradients are compared: ``whole`` (a
            document), ``packed`` (several), ``split`` (a slice) or ``hybrid`` (a slice next to whole documents).
        recompute: shares of a stage's layers, ``none``, ``some`` or ``all``, that recompute somewhere in the plans.
        splits: weight gradients are apart from their backwards.
    """

    flags: str
    slices: int
    has: str
    recompute: tuple[str, ...] = ("none",)
    splits: bool = False


CUTS = {
    "whole": Cut("--epp-planner 1f1b", slices=1, has="whole"),
    "packed": Cut(ONE, slices=1, has="packed"),
    "two": Cut("--epp-slices 2", slices=2, has="split"),
    "hybrid": Cut(THREE, slices=3, has="hybrid"),
    "seven": Cut(SEVEN, slices=7, has="hybrid"),
    "some recompute": Cut(MANY, slices=7, has="hybrid", recompute=("some",)),
    "all recompute": Cut(f"{THREE} --epp-recompute 4", slices=3, has="hybrid", recompute=("all",)),
    "split": Cut(f"{THREE} --epp-split-weight-gradient", slices=3, has="hybrid", splits=True),
    "split, some recompute": Cut(f"{AGAIN} --epp-split-weight-gradient", 3, "hybrid", recompute=("some",), splits=True),
    "loss by blocks": Cut(f"{THREE} --epp-loss-block-tokens 5", slices=3, has="hybrid"),
    # As much as the cap asks for, so not the same for every chunk.
    "capped": Cut(f"{THREE} --epp-memory-cap-gb 0.0006", slices=3, has="hybrid", recompute=("all", "none", "some")),
}

Cases = dict[Cell, dict[str, tuple[str, ...]]]

CASES: Cases = {Cell(): {"llama": ("two",)}, Cell(pp=2): {"llama": ("capped",), "gpt2": ("split, some recompute",)}}
"""Cuts by model, on two stages and one of them on one: every cut but those to which another one only adds something. Others,
as whole documents, layers that all recompute and the loss by blocks, are in rows of routers, pairs of kinds and masks.
"""
MORE_CASES: Cases = {
    Cell(): {"llama": ("two", "packed", "some recompute"), "grouped": ("seven",), "gpt2": ("all recompute", "loss by blocks")},
    Cell(pp=2): {
        "llama": tuple(CUTS),
        "grouped": ("whole", "packed", "some recompute", "split"),
        "learned": ("two", "seven", "all recompute"),
        "gpt2": ("packed", "seven", "all recompute", "split", "split, some recompute"),
    },
}
"""The same and more, for longer, in the set `slow`."""


def _check_cut(wanted: Cut, iterations: int, figures: Figures, _: Path) -> None:
    (plans,) = figures["plans"]
    assert figures["learned"] > LEARNED[iterations]
    assert len(plans) == iterations
    assert all(plan["slices"] == min(wanted.slices, plan["longest"]) for plan in plans)
    assert any(plan["slices"] == wanted.slices for plan in plans)
    assert any(wanted.has in plans[i]["kinds"] for i in (0, -1))
    assert sorted({share for plan in plans for share in plan["recompute"]}) == list(wanted.recompute)
    assert splits_weights(figures) == wanted.splits
    assert not any(plan["padding"] for plan in plans)


def _cuts(iterations: int, cases: Cases) -> list[Row]:
    return [
        Row(
            name=f"{cell}: {model}, {cut}, {iterations}",
            case=Case(Cell(pp=cell.pp), model, CUTS[cut].flags),
            check=functools.partial(_check_cut, CUTS[cut], iterations),
            iterations=iterations,
            batch=BATCH,
            is_slow=iterations == MORE_ITERATIONS,
        )
        for cell, models in cases.items()
        for model, cuts in models.items()
        for cut in cuts
    ]


# ---- every two kinds of parallelism ----------------------------------------------------------------------------------

BY_DEFAULT = (
    "dp2 pp2 looped2 split experts4 ep2: gpt2, packed, overlapped",
    "cp2 pp2 v2 split experts4: llama, recompute, distributed",
    "tp2 sp pp2 v2 split experts4: learned, packed, plain",
    "tp2 pp2 looped2 split: grouped, sliced, plain",
    "cp2 dp2 experts4 ep2: grouped, sliced, plain",
    "tp2 sp dp2 experts4 ep2: learned, recompute, distributed",
    "tp2 dp2: llama, sliced, plain",
    "tp2 sp cp2: grouped, packed, plain",
)
"""Rows of four processes in which every two kinds meet, with one of the two placements of several stages."""
OF_ANSWERS = BY_DEFAULT[1], BY_DEFAULT[5], BY_DEFAULT[7]
"""Those whose documents train their ends alone, so that some chunks, and some ranks' parts of chunks, have no trained token."""
CHOICES = tuple(choices for choices in all_rows() if str(choices) in BY_DEFAULT)
PAIRS = tuple(choices for choices in covering_rows() if choices not in CHOICES)
PLACEMENTS = {(count, 1, "looped"): tuple(range(count)) for count in (1, 2, 4)}
PLACEMENTS |= {(2, 2, "looped"): (0, 1, 0, 1), (2, 2, "v"): (0, 1, 1, 0)}
"""The rank of every stage, by pipeline size, stages per rank and placement."""


def _check_choices(choices: Choices, iterations: int, batch: int, figures: Figures, _: Path) -> None:
    cell, plans = choices.cell, plans_of(figures)
    assert figures["num_processes"] == cell.num_processes
    assert len(figures["plans"]) == cell.dp
    assert len(plans) == cell.dp * iterations
    counts = list(zip(*([plan["sequences"] for plan in replica] for replica in figures["plans"]), strict=True))
    assert {sum(of_replicas) for of_replicas in counts} == {batch}
    assert {plan["token_multiple"] for plan in plans} == {cell.cp * (cell.tp if cell.sp else 1)}
    assert {tuple(plan["placement"]) for plan in plans} == {PLACEMENTS[cell.pp, cell.virtual, cell.placement]}
    assert any(plan["padding"] for plan in plans) == (cell.sp or cell.cp > 1)
    assert ("packed" if choices.plan == "packed" else "hybrid") in kinds_of(figures)
    assert ("none" not in {share for plan in plans for share in plan["recompute"]}) == (choices.plan == "recompute")
    assert splits_weights(figures) == cell.split


def _chosen(name: str, choices: Choices, iterations: int, batch: int = BATCH, is_slow: bool = True) -> Row:
    check = functools.partial(_check_choices, choices, iterations, batch)
    return Row(name=name, case=choices.case, check=check, iterations=iterations, batch=batch, is_slow=is_slow)


def _kinds() -> Iterator[Row]:
    """Yield the default set's rows: small where that leaves what they are for."""
    for choices in CHOICES:
        row = _chosen(str(choices), choices, 2, BATCH if choices.cell.dp > 1 else SMALL_BATCH, is_slow=False)
        layers = "" if choices.cell.pp > 1 else " --num-layers 2"
        documents = "answers" if str(choices) in OF_ANSWERS else "plain"
        yield replace(row, case=replace(row.case, both=row.case.both + layers), documents=documents)


KINDS = tuple(_kinds())

# ---- routers ---------------------------------------------------------------------------------------------------------

ALL_STATISTICS = "--make-vocab-size-divisible-by 64 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.5 "
ALL_STATISTICS += "--moe-z-loss-coeff 0.1 --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
ALL_STATISTICS += "--moe-router-bias-update-rate 0.003"
"""Flags of routers that add up and count all that they can over tokens, on any number of ranks that share a vocabulary."""
_BY_SEQUENCE = "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss"
ROUTERS = {
    "losses": ("--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001", "--epp-planner 1f1b"),
    "losses by sequence, capacity": (f"{_BY_SEQUENCE} --moe-expert-capacity-factor 1.0", "--epp-planner 1f1b"),
    "bias, shared experts, dense layers": (
        "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.1 "
        "--moe-shared-expert-intermediate-size 32 --moe-layer-freq [0,1,1,0]",
        AGAIN,
    ),
}
"""Routers that count and add up by chunk, in chunks of one whole document; and others, in slices."""
PADDED = {"context": "cp2 experts4", "tensor and sequence": "tp2 sp experts4"}
"""Ranks that share padded chunks, beside one process, whose chunks have no padding; the second is in the set `slow`."""


def _check_padded(figures: Figures, _: Path) -> None:
    (plans,) = figures["plans"]
    assert all(plan["padding"] for plan in plans)
    assert all(plan["recompute"] == ["all"] for plan in plans)


def _routers() -> list[Row]:
    routers = {name: case("experts4", plan, both=both) for name, (both, plan) in ROUTERS.items()}
    rows = [replace(row, iterations=3) for row in _of_layers("routers", routers, check=_anything)]
    again = {"both": ALL_STATISTICS, "alone": True}
    padded = {name: case(cell, "--epp-planner 1f1b --epp-recompute 4", "learned", **again) for name, cell in PADDED.items()}
    return rows + _of_layers("padding is invisible to routers", padded, slow=("tensor and sequence",), check=_check_padded)


def _anything(figures: Figures, _: Path) -> None:
    """Ask nothing more."""


# ---- latent attention ------------------------------------------------------------------------------------------------

LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12 "
LATENT += "--qk-layernorm --rope-type rope --no-rope-fusion"
_YARN = LATENT.replace("--rope-type rope", "--rope-type yarn --rotary-scaling-factor 4 --mscale-all-dim 0.8")
_WIDE = LATENT.replace("--q-lora-rank 16 ", "").replace("--v-head-dim 12", "--v-head-dim 20").replace("--qk-layernorm ", "")
LATENTS = {
    "weights apart": case("pp2 split", THREE, both=LATENT),
    "offload": case("pp2", f"{SEVEN} --epp-offload", both=_WIDE.replace("--kv-lora-rank 16", "--kv-lora-rank 64")),
    "there and back, capped": case("pp2 v2", f"{THREE} --epp-memory-cap-gb 0.0006 --epp-recompute-modes all", both=_YARN),
    "tensor and sequence parallel": case("tp2 sp pp2", AGAIN, both=_WIDE),
    "context parallel, experts": case(RANKS, THREE, both=_YARN, optimizer=OVERLAPPED),
    "tensor parallel": case("tp2 pp2", MANY, both=LATENT),
    "four stages": case("pp4", AGAIN, both=_YARN),
    "two stages per rank": case("pp2 looped2 split", MANY, both=LATENT),
}
_LATENT_CAPS = {("offload", "on"): "--epp-memory-cap-gb 0.00073", ("offload", "off"): "--epp-memory-cap-gb 0.00078"}
_OFTEN = {("offload", "on")}
"""Cases and choices of the default set, which has others with multi-token prediction (`LATENT_PREDICTIONS`)."""


def _check_latents(name: str, figures: Figures, _: Path) -> None:
    plans = plans_of(figures)
    assert kinds_of(figures) & {"split", "hybrid"}
    assert splits_weights(figures) == (name in ("weights apart", "two stages per rank"))
    assert any(plan["copies"] for plan in plans) == any(plan["kv_offload"] for plan in plans) == (name == "offload")
    assert any(plan["modes"] for plan in plans) == (name not in ("weights apart", "context parallel, experts"))


def _latents() -> list[Row]:
    """Return every case with latents in the relay and with keys and values; those of `_OFTEN` are in the default set."""
    return [
        Row(
            name=f"latent attention, {relayed}: {name}",
            case=replace(own, plan=f"{own.plan} {_LATENT_CAPS.get((name, choice), '')} --epp-latents {choice}"),
            check=functools.partial(_check_latents, name),
            batch=BATCH,
            is_slow=(name, choice) not in _OFTEN,
        )
        for name, own in LATENTS.items()
        for choice, relayed in (("on", "latents"), ("off", "keys and values"))
    ]


# ---- multi-token prediction ------------------------------------------------------------------------------------------

PREDICTIONS = {"repeated layer, tied, masks": case("pp2", MANY, "grouped", both="--mtp-num-layers 2 --mtp-use-repeated-layer")}
_CAPPED = f"{THREE} --epp-memory-cap-gb 0.0015 --epp-recompute-modes all"
LATENT_PREDICTIONS = {
    # In the set `slow`: Transformer Engine's layers have latents with weights apart; those that share tokens are there, too.
    "weights apart": case("pp2 split", THREE, both=f"{LATENT} --mtp-num-layers 1"),
    "there and back, capped": case("pp2 v2", f"{_CAPPED} --epp-loss-block-tokens 5", both=f"{_YARN} --mtp-num-layers 2"),
    "tensor and sequence parallel": case("tp2 sp pp2", AGAIN, both=f"{_WIDE} --mtp-num-layers 1"),
    "context parallel, experts": case(RANKS, THREE, both=f"{_YARN} --mtp-num-layers 2", optimizer=OVERLAPPED),
}
MORE_PREDICTIONS = {
    "two depths, tied": case("pp2", MANY, "grouped", both="--mtp-num-layers 2"),
    "weights apart": case("pp2 split", THREE, both="--mtp-num-layers 1"),
    "there and back": case("pp2 v2", f"{THREE} --epp-loss-block-tokens 5", both="--mtp-num-layers 2"),
    "latent attention, tensor and sequence parallel": case(
        "tp2 sp pp2", f"{SEVEN} --epp-memory-cap-gb 0.0006 --epp-offload", both=f"{LATENT} --mtp-num-layers 1"
    ),
    "context parallel, experts": case(RANKS, THREE, both="--mtp-num-layers 2", optimizer=OVERLAPPED),
    "uneven stages": case("pp2", f"{THREE} --epp-layout 3,1", both="--mtp-num-layers 2"),
    "two stages per rank": case("pp2 looped2 split", MANY, both="--mtp-num-layers 1"),
    "there and back, replicas": case("dp2 pp2 v2", THREE, both="--mtp-num-layers 1", optimizer=OVERLAPPED),
    "one stage, packed": case("alone", ONE, "grouped", both="--mtp-num-layers 2"),
    "four stages": case("pp4", THREE, both="--mtp-num-layers 1"),
}


def _check_predictions(slices: int, figures: Figures, _: Path) -> None:
    assert figures["predictions"] is not None  # both logged losses, which were compared
    assert kinds_of(figures) & ({"split", "hybrid"} if slices > 1 else {"packed"})


def _predictions() -> list[Row]:
    """Return rows whose last stage, where weights are tied, has an unused copy of the embedding as its output layer."""
    return [
        Row(
            name=f"multi-token prediction: {name}",
            case=own,
            check=functools.partial(_check_predictions, 1 if "packed" in name else 3),
            iterations=3 if name in MORE_PREDICTIONS else 2,
            batch=BATCH if name in MORE_PREDICTIONS else SMALL_BATCH,
            documents="answers" if "masks" in name else "plain",
            unused="tied" in name,
            is_slow=name in MORE_PREDICTIONS,
        )
        for name, own in (PREDICTIONS | MORE_PREDICTIONS).items()
    ]


def _check_latent_predictions(name: str, figures: Figures, folder: Path) -> None:
    _check_predictions(3, figures, folder)
    _check_latents(name, figures, folder)


def _latent_predictions() -> list[Row]:
    return [
        Row(
            name=f"latent attention, multi-token prediction: {name}",
            case=replace(own, plan=f"{own.plan} --epp-latents {'off' if 'cap' in name else 'on'}"),
            check=functools.partial(_check_latent_predictions, name),
            batch=BATCH if "cap" in name else SMALL_BATCH,
            is_slow=name in ("weights apart", "tensor and sequence parallel"),
        )
        for name, own in LATENT_PREDICTIONS.items()
    ]


# ---- masks of trained tokens -----------------------------------------------------------------------------------------


def _check_slices(figures: Figures, _: Path) -> None:
    assert kinds_of(figures) & {"split", "hybrid"}


def _check_one_each(figures: Figures, _: Path) -> None:
    assert [[plan["sequences"] for plan in replica] for replica in figures["plans"]] == [[1] * 2] * 2


def _masks() -> list[Row]:
    """Return rows of masked labels. By default answers are trained on ranks that share tokens in rows of `OF_ANSWERS`."""
    parts = case("pp2", f"{THREE} --epp-loss-block-tokens 5", both=f"--seed {SEED}")
    few = case("dp2", THREE, "gpt2", both=f"--seed {SEED} --global-batch-size 2")
    blocks = f"{THREE} --epp-loss-block-tokens 3"
    answers = {
        "split": case("pp2 split", THREE),  # by default with learnt costs
        "sequence parallel by blocks": case("tp2 sp", blocks),
        "context parallel": case("cp2", THREE),
        "tensor parallel, tied": case("tp2", THREE, "gpt2"),
        "sequence parallel by blocks, tied": case("tp2 sp", blocks, "grouped"),
    }
    return [
        Row(name="masked labels: part of every document", case=parts, check=_check_slices, documents="parts"),
        Row(name="masked labels: one of two replicas", case=few, check=_check_one_each, documents="one of two replicas"),
        *(replace(row, documents="answers") for row in _of_layers("answers", answers, slow=answers)),
    ]


# ---- uneven layouts --------------------------------------------------------------------------------------------------

LAYOUTS = {
    "a stage without layers": case("pp4", f"{THREE} --epp-layout 0,2,1,1"),
    "looped": case("pp2 looped2 split", f"{AGAIN} --epp-layout 2,1,1,0"),
    "there and back": case("pp2 v2", f"{AGAIN} --epp-layout 2,0,1,1", "gpt2"),
    "learnt costs": case("pp2", f"{THREE} --epp-costs learn --epp-layout 1,3"),
}
"""Rows of the set `slow`; in the default set others have an output layer in shards, too (`UNEVEN_SHARDS`)."""


_CHOOSING = f"{THREE} --epp-layout auto --epp-vocab-parallel auto --epp-split-weight-gradient auto"
CHOSEN = {
    "there and back": case("pp2", f"{_CHOOSING} --epp-placement v", "gpt2"),
    "experts of replicas": case(REPLICAS, _CHOOSING, "gpt2", optimizer=OVERLAPPED),
    "two stages": case("pp2", _CHOOSING),
    "tensor and sequence parallel": case("tp2 sp pp2", _CHOOSING, "grouped"),
    "context parallel": case("cp2 pp2", _CHOOSING),
    "four stages": case("pp4", _CHOOSING),
}
"""Rows in which the run chooses; the first two are in the default set."""


def _check_layout(splits: bool, figures: Figures, _: Path) -> None:
    assert "hybrid" in kinds_of(figures)
    assert splits_weights(figures) == splits


def _layouts() -> list[Row]:
    chosen = _of_layers("chosen", CHOSEN, slow=[*CHOSEN][2:])
    cut = [
        Row(name=f"uneven layers: {name}, {LONG}", case=own, check=functools.partial(_check_layout, own.cell.split), **_LONG)
        for name, own in LAYOUTS.items()
    ]
    return chosen + cut


# ---- an output layer in shards ---------------------------------------------------------------------------------------

_SHARDS, _VOCAB_AUTO = "--epp-vocab-parallel on --epp-slices 3", f"{THREE} --epp-vocab-parallel auto"
_UNEVEN = "--vocab-size 97 --make-vocab-size-divisible-by 1"
_MASKED = "whole or ends"
VOCABULARIES = {
    "four ranks, tied, uneven": case("pp4", _SHARDS, "gpt2", both=f"{_UNEVEN} --clip-grad 0.05"),
    "tied, by blocks, masked": case("pp2", f"{_SHARDS} --epp-loss-block-tokens 5", "gpt2"),
}
_UNEVEN_SHARDS = "--epp-vocab-parallel on --epp-slices 3 --epp-recompute 1"
UNEVEN_SHARDS = {
    "context parallel, weights apart, tied": case("cp2 pp2 split", f"{_UNEVEN_SHARDS} --epp-layout 1,3", "gpt2"),
    "there and back, tied": case("pp2 v2", f"{_UNEVEN_SHARDS} --epp-layout 2,1,1,0", "gpt2"),
    "tensor and sequence parallel, windows and sinks": case(
        "tp2 sp pp2", f"{_UNEVEN_SHARDS} --epp-layout 1,3", both="--window-size 30,0 --softmax-type learnable"
    ),
    "experts of replicas, tied": case(REPLICAS, f"{_UNEVEN_SHARDS} --epp-layout 1,3", "gpt2", optimizer=OVERLAPPED),
}
_FUSED = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"
MORE_VOCABULARIES = {
    "four ranks, tied, uneven": VOCABULARIES["four ranks, tied, uneven"],
    "tied, by blocks": case("pp2", f"{_SHARDS} --epp-loss-block-tokens 5", "gpt2"),
    "there and back, tied": case("pp2 v2", _SHARDS, "gpt2"),
    "sequence parallel": case("tp2 sp pp2", _SHARDS),
    "context parallel, tied": case("cp2 pp2", _SHARDS, "gpt2"),
    "replicas, tied": case("dp2 pp2", _SHARDS, "gpt2", optimizer=OVERLAPPED),
    "masked": case("pp2", _SHARDS),
    "tied": case("pp2", _SHARDS, "grouped"),
    "by blocks": case("pp2", f"{_SHARDS} --epp-loss-block-tokens 5"),
    "looped": case("pp2 looped2", _SHARDS),
    "looped, tied": case("pp2 looped2", _SHARDS, "gpt2"),
    "there and back": case("pp2 v2", _SHARDS),
    "tensor parallel": case("tp2 pp2", _SHARDS),
    "tensor parallel, tied": case("tp2 pp2", _SHARDS, "gpt2"),
    "sequence parallel, tied, by blocks": case("tp2 sp pp2", f"{_SHARDS} --epp-loss-block-tokens 5", "grouped"),
    "sequence parallel, masked": case("tp2 sp pp2", _SHARDS),
    "context parallel, masked": case("cp2 pp2", _SHARDS),
    "four ranks, uneven": case("pp4", _SHARDS, "learned", both=_UNEVEN),
    "replicas": case("dp2 pp2", _SHARDS, optimizer=OVERLAPPED),
    "experts": case(REPLICAS, _SHARDS, optimizer=OVERLAPPED),
    "uneven layers": case("pp2", f"{_SHARDS} --epp-layout 3,1 --epp-recompute 1"),
    "weights apart": case("pp2 split", _SHARDS),
    "weights apart, looped, tied": case("pp2 looped2 split", _SHARDS, "gpt2"),
    "offload": case("pp2", f"{_SHARDS} --epp-memory-cap-gb 0.0006 --epp-offload"),
    "capped": case("pp2", f"{_SHARDS} --epp-memory-cap-gb 0.0006"),
    "another planner": case("pp2", "--epp-vocab-parallel on --epp-planner chunkflow"),
    "SlimPipe": case("pp2 looped2", "--epp-vocab-parallel on --epp-planner slimpipe --epp-slices 4"),
    "chosen by the run": case("pp2", _VOCAB_AUTO, both="--vocab-size 4000"),
    "chosen with the layout": case("pp2", f"{_VOCAB_AUTO} --epp-layout auto", "gpt2", both="--vocab-size 4000"),
    "muP": case("pp2", _SHARDS, both="--use-mup --mup-base-hidden-size 16"),
    "muP, tied": case("pp2", _SHARDS, "grouped", both="--use-mup --mup-base-hidden-size 16"),
    "decoupled rate, clipped": case("pp2", _SHARDS, both="--decoupled-lr 1e-3 --clip-grad 0.05 --log-num-zeros-in-grad"),
    "learnt costs": case("pp2", f"{_SHARDS} --epp-costs learn"),
    "fused loss of the stock schedule": case("pp2", f"{_SHARDS} {_FUSED}"),
}
"""With `masked` in the name, on documents of which some train nothing."""


def _check_shards(splits: bool, is_chosen: bool, cuts: bool, figures: Figures, _: Path) -> None:
    assert is_chosen or all(plan["shards"] > 0 for plan in plans_of(figures))
    assert not cuts or kinds_of(figures) & {"hybrid", "split"}
    assert splits_weights(figures) == splits


def _vocabularies(iterations: int, cases: dict[str, Case]) -> list[Row]:
    return [
        Row(
            name=f"vocabulary: {name}, {iterations}",
            case=own,
            check=functools.partial(_check_shards, own.cell.split, "--epp-layout auto" in own.plan, "planner" not in own.plan),
            iterations=iterations,
            batch=BATCH if iterations == LONG else SMALL_BATCH,
            documents=_MASKED if "masked" in name else "plain",
            is_slow=iterations == LONG,
        )
        for name, own in cases.items()
    ]


def _check_uneven_shards(splits: bool, figures: Figures, folder: Path) -> None:
    _check_layout(splits, figures, folder)
    _check_shards(splits, False, True, figures, folder)


def _uneven_shards() -> list[Row]:
    checks = {name: functools.partial(_check_uneven_shards, own.cell.split) for name, own in UNEVEN_SHARDS.items()}
    return [Row(name=f"uneven layers, vocabulary: {name}", case=own, check=checks[name]) for name, own in UNEVEN_SHARDS.items()]


# ---- hybrid models ---------------------------------------------------------------------------------------------------


def _check_hybrid(figures: Figures, _: Path) -> None:
    assert kinds_of(figures) & {"split", "hybrid"}
    assert all(plan["recompute"] == ["some"] for plan in plans_of(figures))


_HYBRID_EXPERTS = Row(
    name="hybrid model of attention, MLP and expert layers",
    case=case(REPLICAS, AGAIN, both="--hybrid-layer-pattern *E|-*E --spec tests.support.mcore.local_hybrid stack_spec"),
    check=_check_hybrid,
    is_slow=True,  # as those of `STATES` with experts, on stages
)
_DELTA = "--spec tests.support.mcore.delta_hybrid stack_spec --linear-num-key-heads 2 --linear-num-value-heads 4 "
_DELTA += "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-conv-kernel-dim 4"
_MAMBA = f"{_DELTA.replace('delta_hybrid', 'mamba_hybrid')} --mamba-num-heads 8 --mamba-head-dim 8 --mamba-num-groups 2 "
_MAMBA += "--mamba-state-dim 8"
_LAYERS, _OF_GPT = f"{_MAMBA} --hybrid-layer-pattern", _DELTA.replace("stack_spec", "two_gpt_layers")
STATES = {
    "two stages, weights apart": case("pp2 split", AGAIN, both=f"{_LAYERS} M-*G|MG-M"),
    "tensor and sequence parallel": case("tp2 sp pp2", SEVEN, both=f"{_LAYERS} M-*|-G"),
    "context parallel, experts": case(RANKS, AGAIN, both=f"{_LAYERS.replace('groups 2', 'groups 1')} GME*E"),
    "gated delta nets in a GPT, multi-token prediction": case("pp2", AGAIN, both=f"{_OF_GPT} --mtp-num-layers 1"),
}
"""Layers by their letters in a pattern. The first is in the default set with multi-token prediction (`HYBRID_PREDICTIONS`)."""


HYBRID_PREDICTIONS = {
    "states, two depths": case("pp2 split", AGAIN, both=f"{_LAYERS} M-*|-GM/*M-/*M- --mtp-use-repeated-layer"),
    "two depths": case("pp2", f"{SEVEN} --epp-loss-block-tokens 5", both=f"{_LAYERS} M-*|-M/G*/G*"),
    "experts, tensor and sequence parallel": case("tp2 sp dp2 experts4 ep2", THREE, both=f"{_LAYERS} ME*E/*E"),
    "context parallel": case("cp2 pp2", THREE, both=f"{_LAYERS} M-|*-/*-", optimizer=OVERLAPPED),
}
"""The first is in the default set, and has a long row, too."""


def _hybrid_predictions() -> list[Row]:
    check = functools.partial(_check_predictions, 3)
    rows = _of_layers("hybrid model, multi-token prediction", HYBRID_PREDICTIONS)
    first, *others = [replace(row, check=check) for row in rows]
    long = replace(first, name=f"{first.name}, {LONG}", iterations=LONG, batch=BATCH)
    return [first, *(replace(row, is_slow=True) for row in (*others, long))]


WINDOWS = {
    "stages in a V": case(
        "pp2 v2 split", AGAIN, both="--window-size 5,0 --window-attn-skip-freq 3 --softmax-type learnable"
    )  # which loads weights that stock has saved
}
"""Tensor-parallel ranks have them in `UNEVEN_SHARDS`, context-parallel ones in `UNEVEN_HEADS`."""


def _of_layers(kind: str, cases: dict[str, Case], slow: Collection[str] = (), check: Check | None = None) -> list[Row]:
    """Return the rows of a kind, of which `slow` are in the slow set. Each has slices, unless another check is given."""
    check = check or _check_slices
    return [Row(name=f"{kind}: {name}", case=own, check=check, is_slow=name in slow) for name, own in cases.items()]


_HEADS = "--kv-channels 8 --num-attention-heads"
_WINDOW = "--window-size 9,0 --window-attn-skip-freq [0,1,1,0] --softmax-type"
UNEVEN_HEADS = {
    "more ranks than key heads, windows, sinks": case(
        "cp4", f"{THREE} --epp-recompute 4", "grouped", both=f"{_HEADS} 6 {_WINDOW} off-by-one"
    ),
    "tensor and sequence parallel": case("tp2 sp cp2", SEVEN, "grouped", both=f"{_HEADS} 6"),
    "weights apart": case("cp2 pp2 split", AGAIN, both=f"{_HEADS} 3"),
    "windows, sinks, experts": case(RANKS, THREE, both=f"{_HEADS} 3 {_WINDOW} learnable"),
    "latents": case("cp4", f"{THREE} --epp-latents on", both=f"{LATENT} {_HEADS} 6"),
    "gated delta nets": case("cp2 pp2", THREE, both=f"{_DELTA} --hybrid-layer-pattern G-*|-G-* {_HEADS} 3"),
}
"""Context-parallel ranks that do not divide the query heads; the first case is in the default set."""


def _uneven_heads() -> list[Row]:
    rows = _of_layers("uneven heads", UNEVEN_HEADS, slow=[*UNEVEN_HEADS][1:])
    return [replace(row, batch=BATCH if row.case.cell.dp > 1 else SMALL_BATCH) for row in rows]


_OF_LAYERS = "--epp-slices 5 --epp-recompute 1"
_LONG_LAYOUTS = {"four stages, weights apart": case("pp4 split", _OF_LAYERS), "looped": case("pp2 looped2", _OF_LAYERS)}
_LONG_LAYOUTS["replicas"] = case("dp2 pp2", _OF_LAYERS, optimizer=OVERLAPPED)
_LONG_LAYERS: dict[str, dict[str, str]] = {
    "gated delta nets": {  # looped, with Transformer Engine: a hybrid model's pattern says how many stages ranks have
        "four stages, weights apart": f"{_DELTA} --hybrid-layer-pattern G-|G-|*|G-",
        "replicas": f"{_DELTA} --hybrid-layer-pattern G-G-|*G-",
    },
    "Mamba-2": {"four stages, weights apart": f"{_LAYERS} M-|M-|*|M-", "replicas": f"{_LAYERS} M-M-|*M-"},
    "windows and sinks": dict.fromkeys(_LONG_LAYOUTS, "--window-size 9,0 --window-attn-skip-freq 2 --softmax-type learnable"),
}


def _long_of_layers() -> list[Row]:
    return [
        Row(name=f"{kind}: {layout}, {LONG}", case=replace(_LONG_LAYOUTS[layout], both=both), check=_check_slices, **_LONG)
        for kind, layouts in _LONG_LAYERS.items()
        for layout, both in layouts.items()
    ]


_LATENT_SPEC = "tests.support.mcore.latent_hybrid stack_spec"
_HYBRID_LATENTS = Row(
    name="hybrid model of latent attention, MLP and expert layers",
    case=case(REPLICAS, f"{AGAIN} --epp-latents on", both=f"{_WIDE} --hybrid-layer-pattern +E|-+E --spec {_LATENT_SPEC}"),
    check=_check_hybrid,
    iterations=3,
    batch=BATCH,
    is_slow=True,
)


# ---- experts by DeepEP and HybridEP ----------------------------------------------------------------------------------

_HYBRID_EP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
FLEX = {
    "HybridEP, weights apart": case("dp2 pp2 split experts4 ep2", f"{AGAIN} {_HYBRID_EP}"),
    "DeepEP": case("dp2 pp2 split experts4 ep2", f"{MANY} --moe-token-dispatcher-type flex --moe-enable-deepep"),
    "DeepEP, there and back": case("dp2 pp2 v2 experts4 ep2", f"{AGAIN} --moe-token-dispatcher-type flex"),
    "HybridEP, tensor and sequence parallel": case("tp2 sp dp2 experts4 ep2", f"{THREE} {_HYBRID_EP}"),
    "DeepEP, context parallel": case(RANKS, f"{THREE} --moe-token-dispatcher-type flex"),
}
"""Cases that stock trains with `alltoall`; the first is in the default set, and the first two have long rows, too."""


def _flex() -> list[Row]:
    first, *others = _of_layers("experts by", FLEX)
    long = [replace(row, name=f"{row.name}, {LONG}", iterations=LONG, batch=BATCH) for row in (first, others[0])]
    return [first, *(replace(row, is_slow=True) for row in (*others, *long))]


# ---- parts that do not train -----------------------------------------------------------------------------------------

_AGAIN = f"{MANY} --epp-loss-block-tokens 5"
_TIGHT = f"{THREE} --epp-memory-cap-gb 0.0006 --epp-offload"
_BACK = "pp2 v2 split"
FROZEN = ("adapters", "pp2", _AGAIN, ""), ("some", "pp2", f"{THREE} --epp-costs learn", ""), ("layers", "pp2 split", _AGAIN, "")
"""Part that trains, layout, and flags of plans and of both runs."""
MORE_FROZEN = (
    ("adapters", _BACK, "--epp-slices 4", ""),
    ("adapters", "pp2", _TIGHT, ""),
    ("adapters", "cp2 pp2", THREE, ""),
    ("adapters", "dp2 pp2", f"{THREE} --use-distributed-optimizer", ""),
    ("adapters", "pp2", THREE, "--mtp-num-layers 1"),
    ("last", "pp2", _TIGHT, ""),
    ("last", "pp2 split", THREE, ""),
    ("last", "pp4 split", THREE, ""),
    ("last", "pp2 looped2", _AGAIN, ""),
    ("later", _BACK, "--epp-slices 4", ""),
    ("last", "cp2 pp2", f"{THREE} --epp-costs learn", ""),
    ("later", "pp2", "--epp-layout 3,1 --epp-slices 3 --epp-recompute 1", ""),
    ("first", "pp2 split", _AGAIN, ""),
    ("head", "pp2", _AGAIN, ""),
    ("head", "pp2 split", THREE, "--mtp-num-layers 1"),
    ("layers", "tp2 sp pp2 split", THREE, ""),
)


def _frozen(number: int, part: str, cell: str, plan: str, both: str, is_slow: bool) -> Row:
    name = f"of the model only a part trains: {part}, {cell}, {number}"
    own = case(cell, plan, both=f"--spec tests.support.mcore.adapters {part} {both}")
    return Row(name=name, case=own, check=_check_slices, is_slow=is_slow)


# ---- learnt costs ----------------------------------------------------------------------------------------------------

LOOKAHEAD = 1
FIRST_LEARNT = WARM_UP + RECORDED + LOOKAHEAD + 1
"""First batch that is planned by learnt costs."""
LEARN = f"--epp-costs learn --epp-lookahead {LOOKAHEAD}"


def _check_learnt(figures: Figures, folder: Path) -> None:
    before, after = (load(folder / f"plan-{number}.json") for number in (FIRST_LEARNT - 1, FIRST_LEARNT))
    assert before.costs != "learnt"
    assert after.costs == "learnt"


def _learnt() -> list[Row]:
    traced = f"{LEARN} --epp-report-dir {FOLDER} --epp-trace {FIRST_LEARNT - 1} {FIRST_LEARNT}"
    sliced = case("pp2 split", f"{AGAIN} {traced}")
    replicas, stages = (case(cell, f"--epp-slices 2 {traced}", "gpt2") for cell in ("dp2", "dp2 pp2"))
    row = Row(name="learnt costs: sliced", case=sliced, check=_check_learnt, iterations=FIRST_LEARNT + 1, documents="answers")
    return [
        row,
        replace(row, name="learnt costs: replicas", case=replicas, documents="plain"),
        replace(row, name="learnt costs: replicas of two stages", case=stages, documents="plain", is_slow=True),
    ]


ROWS = (
    *_cuts(ITERATIONS, CASES),
    *KINDS,
    *_routers(),
    *_latents(),
    *_predictions(),
    *_latent_predictions(),
    *_masks(),
    *_vocabularies(2, VOCABULARIES),
    *_uneven_shards(),
    _HYBRID_EXPERTS,
    *_of_layers("Mamba-2 and gated delta nets", STATES, slow=("two stages, weights apart",)),
    *_hybrid_predictions(),
    *_of_layers("windows and sinks", WINDOWS),
    *_uneven_heads(),
    *_long_of_layers(),
    *_flex(),
    _HYBRID_LATENTS,
    *_learnt(),
    *(_frozen(number, *given, is_slow=False) for number, given in enumerate(FROZEN)),
    *(_frozen(number, *given, is_slow=True) for number, given in enumerate(MORE_FROZEN)),
    *_cuts(MORE_ITERATIONS, MORE_CASES),
    *(_chosen(str(choices), choices, 2) for choices in PAIRS),
    *(_chosen(f"{choices} (full)", choices, 3) for choices in full_rows()),
    *_layouts(),
    *_vocabularies(LONG, MORE_VOCABULARIES),
)
