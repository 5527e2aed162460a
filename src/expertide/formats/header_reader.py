"""Reading the front of a file that is hostile until checked: bounded, forward only, with errors that name the field.

A HeaderReader keeps a window of about 1 MiB and never more than one field; it refuses a length before anything of that
length exists. `open_regular` refuses what must not even be opened (a pipe would wait for ever).
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from types import TracebackType

from expertide.errors import FormatError, StorageError
from expertide.units import MIB

# The largest GGUF headers we know (650,000 tokenizer strings) have 20 MB.
MAX_HEADER_BYTES = 256 * MIB
_WINDOW_BYTES = 1 * MIB
_MAX_SHOWN_CHARS = 120

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def shown(text: object) -> str:
    """`text` fit for one line of an error message: control characters escaped, very long text cut."""
    line = _escaped(str(text))
    return line if len(line) <= _MAX_SHOWN_CHARS else f"{line[: _MAX_SHOWN_CHARS - 3]}..."


def shown_path(path: Path) -> str:
    """The same for a path, which is never cut: the user must find the file."""
    return _escaped(str(path))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def regular_size(path: Path) -> int:
    """Bytes of an existing regular file.

    Raises:
        StorageError: it is missing, cannot be looked at, or is no regular file.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise StorageError(f"{shown_path(path)}: a link to {shown_path(path.readlink())}, which is gone") from None
        raise StorageError(f"{shown_path(path)}: no such file or directory") from None
    except OSError as error:
        raise StorageError(f"{shown_path(path)}: {error.strerror or error}") from None
    except ValueError:
        raise StorageError(f"{shown_path(path)}: a path cannot contain a zero byte") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a device, pipe or socket"
        raise StorageError(f"{shown_path(path)}: expected a model file, found {kind}")
    return found.st_size


class HeaderReader:
    """Reads the little-endian fields at the front of a file in order. A context manager; one thread.

    Attributes:
        size: bytes of the file when it was opened.
        position: offset of the next field.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = regular_size(path)
        self.position = 0
        self._window = b""
        self._window_start = 0
        try:
            # NONBLOCK: between the look above and this open, the name may have become a pipe.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise StorageError(f"{shown_path(path)}: {error.strerror}") from None

    def __enter__(self) -> HeaderReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    @property
    def num_left(self) -> int:
        """Bytes between here and the end of the file."""
        return self.size - self.position

    def fail(self, message: str) -> FormatError:
        """The error to raise: this file's name and the message."""
        return FormatError(f"{shown_path(self.path)}: {message}")

    def need(self, num_bytes: int, what: str) -> None:
        """Refuse a field that would not fit.

        Raises:
            FormatError: fewer than `num_bytes` bytes are left, or the header would become absurdly large.
        """
        if num_bytes > self.num_left:
            raise self.fail(
                f"{what} needs {num_bytes:,} bytes at offset {self.position:,}, but the file ends at {self.size:,}"
                " (truncated or damaged; download it again)"
            )
        if self.position + num_bytes > MAX_HEADER_BYTES:
            raise self.fail(f"{what} would make the header larger than {MAX_HEADER_BYTES // MIB} MiB; it is damaged")

    def take(self, num_bytes: int, what: str) -> bytes:
        """The next `num_bytes` bytes."""
        start = self.position - self._window_start
        if start + num_bytes > len(self._window):
            self.need(num_bytes, what)
            self._move_window(num_bytes)
            start = 0
        self.position += num_bytes
        return self._window[start : start + num_bytes]

    def skip(self, num_bytes: int, what: str) -> None:
        """Go past `num_bytes` bytes without reading them."""
        self.need(num_bytes, what)
        self.position += num_bytes
        if self.position > self._window_start + len(self._window):
            self._window, self._window_start = b"", self.position

    def u32(self, what: str) -> int:
        value: int = _U32.unpack(self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack(self.take(8, what))[0]
        return value

    def skip_strings(self, count: int, what: str) -> None:
        """Go past `count` strings, each a u64 length and its bytes.

        A tokenizer has some 100,000 of them, so this loop works on the window directly: 0.1 µs a string.
        """
        unpack = _U64.unpack_from
        while count:
            self.need(8, what)
            if self.position + 8 > self._window_start + len(self._window):
                self._move_window(8)
            window, last = self._window, len(self._window) - 8
            at = self.position - self._window_start
            while count and at <= last:
                after = at + 8 + unpack(window, at)[0]
                if after > last + 8:
                    break
                at = after
                count -= 1
            self.position = self._window_start + at
            if count and at <= last:
                # This one crosses the window's edge, or lies about its length.
                self.skip(self.u64(what), what)
                count -= 1

    def peek(self, offset: int, num_bytes: int) -> bytes:
        """Up to `num_bytes` bytes at `offset`, fewer at the end of the file. The position does not change."""
        try:
            return os.pread(self._fd, num_bytes, offset)
        except OSError as error:
            raise StorageError(f"{shown_path(self.path)}: read error at offset {offset:,}: {error.strerror}") from None

    def _move_window(self, num_bytes: int) -> None:
        wanted = min(max(num_bytes, _WINDOW_BYTES), self.num_left)
        pieces, got = [], 0
        while got < wanted:
            piece = self.peek(self.position + got, wanted - got)
            if not piece:
                break
            pieces.append(piece)
            got += len(piece)
        if got < num_bytes:
            raise StorageError(
                f"{shown_path(self.path)}: got {got:,} of {num_bytes:,} bytes at offset {self.position:,};"
                " the file became shorter while it was read"
            )
        self._window, self._window_start = b"".join(pieces), self.position
