"""The byte alphabet: one printable character for each of the 256 bytes.

Byte-level vocabularies spell tokens in it, so that a token of raw bytes is an ordinary string without spaces.

    byte 0x21..0x7E, 0xA1..0xAC, 0xAE..0xFF   the character of the same number
    the 68 other bytes, in ascending order    U+0100, U+0101, …   (space 0x20 is U+0120 'Ġ', newline 0x0A is U+010A 'Ċ')

Source: bytes_to_unicode in the GPT-2 encoder.
"""

from __future__ import annotations

from collections.abc import Mapping


def _byte_to_char() -> dict[int, str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


BYTE_TO_CHAR: Mapping[int, str] = _byte_to_char()
CHAR_TO_BYTE: Mapping[str, int] = {char: byte for byte, char in BYTE_TO_CHAR.items()}

# These never occur in UTF-8 (overlong two-byte forms, and anything above U+10FFFF). Vocabularies trained on text,
# such as DeepSeek-V2's, have no token for them.
BYTES_OUTSIDE_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


def spelled_bytes(token: str) -> bytes:
    """The bytes that a normal token of a byte-level vocabulary stands for.

    A token with any character outside the alphabet was not spelled in it (`<｜fim▁hole｜>` of DeepSeek-Coder-V2, which
    files type as a normal token): its own UTF-8 counts.
    """
    try:
        return bytes([CHAR_TO_BYTE[char] for char in token])
    except KeyError:
        return token.encode("utf-8")
