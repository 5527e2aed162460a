"""What a file is, by its first bytes; and for what is no model, the sentence that says what it is instead.

People meet these under a model's name: a web page, a Git LFS pointer, an error text of a hub, an empty or zero-filled
file of an unfinished download, an archive, a checkpoint of another kind.
"""

from __future__ import annotations

import re
from pathlib import Path

from expertide.errors import FormatError
from expertide.formats.header_reader import HeaderReader, shown, shown_path

GGUF_MAGIC = b"GGUF"
# Enough for a zero-filled beginning to be no accident.
_PEEK_BYTES = 4096

_AGAIN = "download the model file itself again"

# First bytes (after white space for texts, lower case) and what they mean.
_TEXTS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", f"this is a Git LFS pointer, not the model: run `git lfs pull`, or {_AGAIN}"),
    (b"<!doctype html", f"this is an HTML page, not a model: {_AGAIN}"),
    (b"<html", f"this is an HTML page, not a model: {_AGAIN}"),
    (b"<head", f"this is an HTML page, not a model: {_AGAIN}"),
    (b"<?xml", f"this is an XML document, probably a server's error, not a model: {_AGAIN}"),
    (b"<error", f"this is an XML document, probably a server's error, not a model: {_AGAIN}"),
)
_MAGICS: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "this is a zip archive or a PyTorch checkpoint; expected GGUF or safetensors"),
    (b"\x80\x02", "this is a Python pickle, an old PyTorch checkpoint; expected GGUF or safetensors"),
    (b"\x1f\x8b", "this is a gzip archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "this is a zstd archive: unpack it first"),
    (b"7z\xbc\xaf", "this is a 7-Zip archive: unpack it first"),
    (b"\xfd7zXZ", "this is an xz archive: unpack it first"),
    (b"\x89HDF", "this is an HDF5 file; expected GGUF or safetensors"),
    (b"lmgg", "this is a GGML file, older than GGUF, which is no longer read: get the model as GGUF"),
    (b"fmgg", "this is a GGML file, older than GGUF, which is no longer read: get the model as GGUF"),
    (b"tjgg", "this is a GGML file, older than GGUF, which is no longer read: get the model as GGUF"),
    (b"algg", "this is a GGML adapter file, older than GGUF, and no model"),
    (b"FUGG", "this is a byte-swapped (big-endian) GGUF file; only little-endian files are read"),
)

# Names that programs give to pieces of a file cut at arbitrary bytes.
_RAW_PIECE = re.compile(
    r"\.part-?\w+$|\.part\d+of\d+$|-split-[a-z]+$|\.gguf\.\d+$|\.gguf\.[a-z]{2}$|\.split-[a-z]+$", re.I
)
# Names that programs give to downloads under way.
_UNFINISHED = re.compile(r"\.(part|partial|incomplete|crdownload|download|aria2|tmp|opdownload)$", re.I)


def container_of(path: Path) -> str:
    """ "gguf" or "safetensors".

    Raises:
        FormatError: it is neither; the message says what it looks like.
        StorageError: it cannot be read.
    """
    with HeaderReader(path) as reader:
        head = reader.peek(0, _PEEK_BYTES)
        size = reader.size
    if head[:4] == GGUF_MAGIC:
        return "gguf"
    name = shown_path(path)
    if not size:
        raise FormatError(f"{name}: the file is empty: {_AGAIN}")
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    for start, meaning in _TEXTS:
        if text.startswith(start):
            raise FormatError(f"{name}: {meaning}")
    for start, meaning in _MAGICS:
        if head.startswith(start):
            raise FormatError(f"{name}: {meaning}")
    if path.suffix == ".safetensors" or _looks_like_safetensors(head, size):
        if not head.strip(b"\0"):
            raise FormatError(f"{name}: {_zeros(path)}")
        return "safetensors"
    raise FormatError(f"{name}: {_other(path, head)}")


def piece_hint(path: Path) -> str:
    """How the name explains that a file is incomplete; empty when it does not."""
    if _RAW_PIECE.search(path.name):
        return "its name is that of a piece of a cut file: join all pieces in order with `cat` and open the result"
    if _UNFINISHED.search(path.name):
        return "its name is that of an unfinished download: let it finish"
    return ""


def _looks_like_safetensors(head: bytes, size: int) -> bool:
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8


def _zeros(path: Path) -> str:
    return piece_hint(path) or f"it begins with zeros, as an unfinished download does: {_AGAIN}"


def _other(path: Path, head: bytes) -> str:
    hint = piece_hint(path)
    if hint:
        return f"this does not begin like a model; {hint}"
    if not head.strip(b"\0"):
        return _zeros(path)
    printable = sum(32 <= byte < 127 or byte in b"\t\r\n" for byte in head)
    if printable == len(head):
        start = shown(head[:40].decode("ascii").strip())
        return f"this is a text beginning with {start!r}, not a model: {_AGAIN}"
    return f"no model file: it begins with bytes {head[:8].hex(' ')}; expected GGUF (47 47 55 46) or safetensors"
