"""Operations and actions, the elements of a plan.

An action prints as ``2F5`` (stage 2, forward, chunk 5), the form `torch.distributed.pipelining` uses, and parses back.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import ClassVar, NamedTuple

from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.reading import brief

ADDED = dict.fromkeys(
    ("A", "G", "SEND_QKV", "RECV_QKV", "SEND_A", "RECV_A", "SEND_DA", "RECV_DA", "SEND_DQKV", "RECV_DQKV"),
    "megatron_epp.contrib.helix.attention_operations",
)
"""Operations of other packages, each with the module that defines it, imported when a plan names the operation."""


class Op(str):
    """Name of a kind of action, as plans write it. `plan.operations` defines what each kind means, and adds new ones.

    Instances are interned: ``Op("F") is Op.F``, also after unpickling. ``Op(text)`` raises `ValueError` for an unknown name.
    """

    __slots__ = ()

    F: ClassVar[Op]
    B: ClassVar[Op]
    W: ClassVar[Op]
    R: ClassVar[Op]
    O: ClassVar[Op]  # noqa: E741 - the letter is the field's name for offload
    L: ClassVar[Op]
    FREE: ClassVar[Op]
    SEND_F: ClassVar[Op]
    RECV_F: ClassVar[Op]
    SEND_B: ClassVar[Op]
    RECV_B: ClassVar[Op]
    REDUCE: ClassVar[Op]
    S: ClassVar[Op]
    N: ClassVar[Op]
    T: ClassVar[Op]
    SPREAD: ClassVar[Op]
    GATHER: ClassVar[Op]

    _known: ClassVar[dict[str, Op]] = {}

    def __new__(cls, text: str) -> Op:
        if text not in cls._known and text in ADDED:
            importlib.import_module(ADDED[text])
        known = cls._known.get(text)
        if known is None:
            raise ValueError(f"{text!r} is not an operation; there are {', '.join(cls._known)}")
        return known

    @classmethod
    def define(cls, text: str) -> Op:
        """Return the operation of a name, which may be new: capital letters, in words joined by underscores."""
        if _NAME.fullmatch(text) is None:
            raise ValueError(f"{text!r} is not a name of an operation: capital letters, in words joined by underscores")
        return cls._known.setdefault(text, str.__new__(cls, text))

    @classmethod
    def known(cls) -> tuple[Op, ...]:
        return tuple(cls._known.values())

    def __repr__(self) -> str:
        return f"Op.{self}"


_NAME = re.compile(r"[A-Z]+(?:_[A-Z]+)*", re.ASCII)
_TEXT = re.compile(rf"(\d{{1,9}})({_NAME.pattern})(\d{{1,9}})", re.ASCII)

for _text in filter(str.isupper, Op.__annotations__):
    setattr(Op, _text, Op.define(_text))


class Action(NamedTuple):
    """One operation of one stage on one chunk. `stage` is the index of the operation's site: a stage for all operations of this
    package, or, for an added one, whatever its `Operation.sites` counts, such as shards of the vocabulary.
    """

    op: Op
    stage: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.chunk}"

    @staticmethod
    @functools.lru_cache(1 << 16)  # iterations have the same names again and again
    def parse(text: str) -> Action:
        """Read ``2F5``, numbers of up to nine digits. Raises `PlanError` on anything else."""
        match = _TEXT.fullmatch(text)
        try:
            if match is not None:
                return Action(Op(match[2]), int(match[1]), int(match[3]))
        except ValueError:
            pass
        expected = f"<stage><op><chunk> such as '2F5', op one of {', '.join(Op.known())}"
        raise PlanError(f"{brief(text)} is not an action; expected {expected}")
