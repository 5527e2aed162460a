"""Sizes in bytes: parsing what people type, printing what people read."""

from __future__ import annotations

import re

from expertide.errors import RequestError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "kb": 1000,
    "m": MIB,
    "mib": MIB,
    "mb": 1000**2,
    "g": GIB,
    "gib": GIB,
    "gb": 1000**3,
    "t": GIB << 10,
    "tib": GIB << 10,
    "tb": 1000**4,
}


def parse_size(text: str) -> int:
    """Bytes meant by `4GiB`, `512MiB`, `1.5g` or `4096`.

    Raises:
        RequestError: not a number with a known unit, or not a positive number of bytes.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None or len(match[1]) > 20:
        raise RequestError(f"size {text!r} is not understood; write it like 4GiB or 512MiB")
    num_bytes = int(float(match[1]) * factor)
    if num_bytes <= 0:
        raise RequestError(f"size {text!r} must be positive; write it like 4GiB or 512MiB")
    return num_bytes


def format_size(num_bytes: int) -> str:
    """`1.50 GiB`, `12.3 MiB`, `640 B`: three significant figures, binary units."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= factor:
            value = num_bytes / factor
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:,.{digits}f} {unit}"
    return f"{num_bytes} B"


def exact_size(num_bytes: int) -> str:
    """`4GiB`, `3776KiB`, `1025B`: the whole number, as it can be typed."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return f"{num_bytes}B"


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """The largest multiple of `multiple` that is at most `value`."""
    return value // multiple * multiple
