"""Random damage to files: to values of JSON, characters of text, fields and bytes of binary files."""

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Damage = Callable[[bytes, random.Random], bytes]
"""Function from the content of a sound file to damaged content."""

NASTY_VALUES = (
    *(None, True, 0, 1, -1, 1.5, 2**31, 2**63, 10**400, 1e-300, 1e30, 1e300, float("nan"), float("inf")),
    *("", "x", "0F0", "9F9", "0B7", "\x1b[2J", "\ud800", "9" * 5000, [], [[]], {}, {"x": 1}, [0] * 9, [1, [2, [3, [4]]]]),
)
"""Values of JSON that replace others."""
NASTY_TEXTS = (
    *(b"9" * 5000, b"[" * 5000, b"{" * 300, b"- " * 300, b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[2J"),
    *(b"1e999", b"-1", b"0", b"NaN", b"\xc2\xb2", b"\xd9\xa3", b"1" * 20, b"0x10"),
    *(b"&a [*a]", b"&a ", b"*a", b"<<: *a", b"${x}", b"\n\n", b"\r\n", b"\t", b"\xe2\x80\xa8", b"\\ud800"),
    *(b'"', b"'", b"---\n", b"!!python/object:os.system", b"{%", b"{{", b"%}"),
)
"""Texts that are put between others."""
NASTY_LETTERS = b"{}[]:,&*-!|>'\"#%@`\\$ \n\t09exy~?\x00\x1b\xb2\xff();FBIW."
NASTY_NUMBERS = (0, 1, -1, 2, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
"""Numbers that replace those of binary files."""


def json_damage(*, finish: Callable[[Any], str] = json.dumps, optional: Sequence[str] = ()) -> Damage:
    """Return damage to a JSON document: mostly to its values, sometimes to its text.

    Args:
        optional: names of fields that may be added to its objects.
    """

    def damage(content: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.25:
            return text_damage(content, draw)
        document = _with_other_values(json.loads(content), draw, optional)
        return (finish if draw.random() < 0.9 else json.dumps)(document).encode()

    return damage


def lines_damage(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    number = draw.choice([at for at, line in enumerate(lines) if line.strip()])
    lines[number] = json_damage()(lines[number], draw) + b"\n" * (draw.random() < 0.95)
    return b"".join(lines)


def text_damage(content: bytes, draw: random.Random) -> bytes:
    """Cut a text short, or change, insert, remove or repeat some of it, up to four times."""
    if draw.random() < 0.1:
        return content[: draw.randrange(len(content) + 1)]
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(content) + 1)
        end = start + draw.choice((1, 1, 1, 2, 5, 40))
        match draw.randrange(5):
            case 0 | 1:
                content = content[:start] + bytes([draw.choice(NASTY_LETTERS)]) + content[start + 1 :]
            case 2:
                content = content[:start] + draw.choice(NASTY_TEXTS) + content[start:]
            case 3:
                content = content[:start] + content[end:]
            case _:
                content = content[:end] + content[start:]
    return content


def binary_damage(fields: Callable[[bytes], Sequence[tuple[int, int]]]) -> Damage:
    """Return damage to a binary file: other numbers in its fields, other bits and bytes, parts removed, repeated or added.

    Args:
        fields: function from the content to the start and the number of bytes of every field, integers of 1, 4 or 8 bytes.
    """

    def damage(content: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.1:
            return content[: draw.randrange(len(content) + 1)]
        data = bytearray(content)
        if draw.random() < 0.5:
            _put(data, draw, *draw.choice(fields(content)))
            return bytes(data)
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(len(data) + 1)
            match draw.randrange(7):
                case 0 | 1 | 2:
                    _put(data, draw, *draw.choice(fields(content)))
                case 3 if start < len(data):
                    data[start] ^= 1 << draw.randrange(8)
                case 4:
                    del data[start : start + draw.choice((1, 4, 8, 64))]
                case 5:
                    data[start:start] = data[: draw.choice((1, 4, 8, 64))]
                case _:
                    data += bytes(draw.choice((1, 4, 8, 64)))
        return bytes(data)

    return damage


def index_fields(content: bytes) -> list[tuple[int, int]]:
    """Return start and number of bytes of every field of an index (`megatron_epp.data.indexed_documents`)."""
    sequences, boundaries = (int.from_bytes(content[at : at + 8], "little") for at in (18, 26))
    lengths, offsets, ends = 34, 34 + 4 * sequences, 34 + 12 * sequences
    return [
        *[(9, 8), (17, 1), (18, 8), (26, 8)] * 2,  # the header has few fields
        *((lengths + 4 * number, 4) for number in range(sequences)),
        *((offsets + 8 * number, 8) for number in range(sequences)),
        *((ends + 8 * number, 8) for number in range(boundaries)),
    ]


def byte_fields(content: bytes) -> list[tuple[int, int]]:
    return [(start, 1) for start in range(len(content))]


def _put(data: bytearray, draw: random.Random, start: int, num_bytes: int) -> None:
    """Write another number into a field; a nasty one, or one close to its own."""
    own = int.from_bytes(data[start : start + num_bytes], "little")
    value = draw.choice(NASTY_NUMBERS) if draw.random() < 0.6 else own + draw.choice((-8, -4, -1, 1, 4, 8))
    data[start : start + num_bytes] = (value % (1 << 8 * num_bytes)).to_bytes(num_bytes, "little")


def _with_other_values(document: Any, draw: random.Random, optional: Sequence[str]) -> Any:
    """Return a document with one to three values removed, repeated, added or replaced."""
    for _ in range(draw.randint(1, 3)):
        found = list(_addresses(document))
        if not found:
            return draw.choice(NASTY_VALUES)
        inner, key = draw.choice(found)
        match draw.randrange(5):
            case 0:
                del inner[key]
            case 1 if isinstance(inner, list):
                inner.insert(key, copy.deepcopy(inner[key]))
            case 2 if isinstance(inner, dict) and optional:
                inner[draw.choice(optional)] = copy.deepcopy(draw.choice(NASTY_VALUES))
            case 2 | 3:
                inner[key] = _near(inner[key], draw)
            case _:
                inner[key] = copy.deepcopy(draw.choice(NASTY_VALUES))
    return document


def _near(value: Any, draw: random.Random) -> Any:
    """Return a value of the same type that is close to a value, and may well be read."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return draw.choice((value + 1, value - 1, 2 * value, -value, value // 3, 1000 * value, 0.5))
    if isinstance(value, str):
        digits = [at for at, letter in enumerate(value) if letter.isdigit()]
        at = draw.choice(digits) if digits else 0
        return value[:at] + draw.choice("0123456789") + value[at + 1 :]
    if isinstance(value, dict):
        return dict(draw.sample(sorted(value.items()), draw.randint(0, len(value))))
    return draw.sample(value, draw.randint(0, len(value)))


def _addresses(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _addresses(one)
