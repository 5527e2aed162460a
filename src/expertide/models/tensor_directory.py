"""Looking up the tensors an architecture needs: found, of the right shape, or one clear sentence why not.

An absent tensor is another problem than a file that is cut short (which `formats` finds), so the messages differ.
What the file has and nobody asks for is a problem too: a bias left out would give fluent nonsense.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from expertide.errors import FormatError, UnsupportedError
from expertide.formats.tensors import ModelFiles, TensorInfo


class TensorDirectory:
    """The tensors of one file set, and which of them have been asked for."""

    def __init__(self, files: ModelFiles, architecture: str) -> None:
        self._files = files
        self._architecture = architecture
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._files.tensors

    def take(self, name: str, shape: Sequence[int], *, aliases: Sequence[str] = ()) -> TensorInfo:
        """The tensor of this name (or of the first alias that exists), which must have this shape.

        Raises:
            FormatError: not in the file, or of another shape.
            UnsupportedError: of a quant type without a decoder.
        """
        found = next((candidate for candidate in (name, *aliases) if self.has(candidate)), None)
        if found is None:
            raise FormatError(f"{self._file}: {self._missing(name)}")
        info = self._files.tensors[found]
        if info.shape != tuple(shape):
            raise FormatError(
                f"{self._file}: {found} has shape {_show(info.shape)}, expected {_show(shape)} from the file's keys"
            )
        if not info.quant.can_decode:
            raise UnsupportedError(f"{self._file}: {found} is stored as {info.quant.name}, which has no decoder here")
        self._taken.add(found)
        return info

    def ignore(self, names: Iterable[str]) -> None:
        """These may be in the file and are not needed."""
        self._taken.update(names)

    def refuse_leftovers(self) -> None:
        """
        Raises:
            UnsupportedError: the file holds tensors that nobody took or ignored.
        """
        leftovers = [name for name in self._files.tensors if name not in self._taken]
        if leftovers:
            names = ", ".join(leftovers[:3]) + (f" and {len(leftovers) - 3:,} more" if len(leftovers) > 3 else "")
            raise UnsupportedError(
                f"{self._file}: architecture {self._architecture!r} has no use here for {names}; "
                "leaving weights out would give wrong answers"
            )

    @property
    def _file(self) -> str:
        return str(self._files.files[0])

    def _missing(self, name: str) -> str:
        prefix = name[: name.rfind(".", 0, name.rfind("."))] if name.count(".") > 1 else ""
        nearby = [other for other in self._files.tensors if other.startswith(prefix)] or list(self._files.tensors)
        close = get_close_matches(name, nearby, n=3, cutoff=0.5)
        hint = f"; closest names in the file: {', '.join(close)}" if close else ""
        return f"tensor {name}, required by architecture {self._architecture!r}, is not in the file{hint}"


def _show(shape: Sequence[int]) -> str:
    return "[" + ", ".join(f"{size:,}" for size in shape) + "]"
