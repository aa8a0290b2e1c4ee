"""Rules about settings: a row says the flag, when it is refused, why, and what to do instead."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_epp.plan.errors import as_setting
from megatron_epp.plan.flags import flag_of

OUT = "leave it out"
BOTH = "leave one of them out"


class Door(enum.Flag):
    """Source of settings, which says their names, and which of them are refused."""

    STOCK = enum.auto()  # the command line of a training by Megatron's own schedule
    DOCUMENTS = enum.auto()  # that of a training on documents
    USER = enum.auto()  # that of a script with its own microbatches
    MODEL = enum.auto()  # configuration of a model, or of its data parallelism, whose microbatches `megatron_epp.wrap` plans
    WRAP = enum.auto()  # what `megatron_epp.wrap` is called with
    # The configuration of a model that runs in slices: of a training on documents, or of `megatron_epp.wrap_samples`, for which
    # MODEL is asked, too
    SLICED_MODEL = enum.auto()
    SLICES = DOCUMENTS | SLICED_MODEL
    MICROBATCHES = USER | MODEL
    ALL = DOCUMENTS | MICROBATCHES

    @property
    def has_flags(self) -> bool:
        """True where settings are flags; else they are keywords, and fields of a configuration."""
        return self not in Door.MODEL | Door.WRAP | Door.SLICED_MODEL

    @property
    def cannot(self) -> str:
        """Begin of the refusal of settings that plans cannot honour."""
        return "--epp cannot honour" if self.has_flags else "a plan cannot honour"

    def name_of(self, attribute: str) -> str:
        """Return the name of a setting, of which parsed flags have this attribute."""
        return flag_of(attribute) if self.has_flags else attribute.removeprefix("epp_")

    def with_value(self, attribute: str, value: object) -> str:
        """Format a setting, of which parsed flags have this attribute, with its value."""
        return as_setting(self.name_of(attribute), value)


def always(settings: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """A flag that is refused where its value asks for something."""

    flag: str  # with its hyphens
    # Further condition on the settings, which is asked where the value asks for something
    when: Callable[[Any], object] = always
    # why, as the words behind the flag with its value; ``{name}`` is another setting with its value. Empty for a flag that
    # plans cannot honour.
    say: str = ""
    use: str = OUT  # what to do instead, with such names; may be empty
    doors: Door = Door.DOCUMENTS
    allowed: tuple[Any, ...] = (None, False)  # values that ask for nothing
    dest: str = ""  # attribute of parsed flags; empty where it follows from the flag

    @property
    def attribute(self) -> str:
        return self.dest or self.flag[2:].replace("-", "_")

    def is_given(self, settings: object) -> bool:
        """Return True if this Megatron has the flag and its value asks for something."""
        return hasattr(settings, self.attribute) and getattr(settings, self.attribute) not in self.allowed

    def applies(self, settings: object) -> bool:
        return self.is_given(settings) and bool(self.when(settings))

    def text(self, settings: object, door: Door = Door.DOCUMENTS) -> str:
        name, value = self.flag if door.has_flags else door.name_of(self.attribute), getattr(settings, self.attribute)
        joint = "; " if ": " in self.use else ": "
        words = f"({self.use})" if not self.say else f"{self.say}{joint * bool(self.use)}{self.use}"
        return f"{name if value is None else as_setting(name, value)} {words.format_map(_Named(settings, door))}"


class _Named(dict[str, str]):
    def __init__(self, settings: object, door: Door) -> None:
        self._settings, self._door = settings, door

    def __missing__(self, attribute: str) -> str:
        return self._door.with_value(attribute, getattr(self._settings, attribute))


class Check(NamedTuple):
    """Function from settings and their source to why they are refused, a line each, which rows cannot say; and who asks."""

    problems: Callable[[Any, Door], Iterable[str]]
    doors: Door = Door.DOCUMENTS


type Rules = tuple[Rule | Check, ...]


def flags(
    names: str,
    use: str = OUT,
    doors: Door = Door.DOCUMENTS,
    when: Callable[[Any], object] = always,
    say: str = "",
    allowed: tuple[Any, ...] = (None, False),
) -> tuple[Rule, ...]:
    """Return a row for each of several flags that are refused for one reason."""
    return tuple(Rule(name, when, say, use, doors, allowed) for name in names.split())


def problems_of(settings: object, door: Door, rules: Rules) -> Iterator[str]:
    """Yield why settings (arguments or a configuration) are refused: all flags that plans cannot honour in the first line.

    Raises `EppError` if a file or a function that one names cannot be read, or sizes are no sizes.
    """
    asked = [rule for rule in rules if door in rule.doors]
    clashes = [rule for rule in asked if isinstance(rule, Rule) and not rule.say and rule.applies(settings)]
    if clashes:
        yield f"{door.cannot} {'; '.join(rule.text(settings, door) for rule in clashes)}"
    for rule in asked:
        if isinstance(rule, Check):
            yield from rule.problems(settings, door)
        elif rule.say and rule.applies(settings):
            yield rule.text(settings, door)
