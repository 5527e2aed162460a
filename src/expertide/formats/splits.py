"""The names of split GGUF sets: NAME-00001-of-00005.gguf, as gguf-split writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from expertide.errors import FormatError
from expertide.formats.header_reader import shown_path

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<suffix>\.[A-Za-z]+)", re.DOTALL)
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class SplitName:
    """One file name of a set.

    Attributes:
        number: of this part, from 1.
        count: of parts.
    """

    directory: Path
    stem: str
    suffix: str
    number: int
    count: int

    def part(self, number: int) -> Path:
        """The path of part `number`, from 1."""
        return self.directory / f"{self.stem}-{number:05d}-of-{self.count:05d}{self.suffix}"

    def all_parts(self) -> tuple[Path, ...]:
        return tuple(self.part(number) for number in range(1, self.count + 1))


def split_name(path: Path) -> SplitName | None:
    """The set that this name belongs to; None when it does not have such a name or is the only part.

    Raises:
        FormatError: the name contradicts itself, as part 7 of 5.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise FormatError(f"{shown_path(path)}: the name says part {number} of {count}; expected parts 1 to {count}")
    if count == 1:
        return None
    return SplitName(path.parent, match["stem"], match["suffix"], number, count)


def check_all_present(name: SplitName) -> None:
    """Refuse an incomplete set, listing everything that is missing.

    Raises:
        FormatError: parts are missing.
    """
    # One listing instead of up to 99,999 look-ups; a name may claim that many parts.
    present = {entry.name for entry in name.directory.iterdir()} if name.directory.is_dir() else set()
    missing = [path.name for path in name.all_parts() if path.name not in present]
    if not missing:
        return
    listed = ", ".join(shown_path(Path(entry)) for entry in missing[:_MAX_LISTED])
    more = f" and {len(missing) - _MAX_LISTED:,} more" if len(missing) > _MAX_LISTED else ""
    raise FormatError(
        f"{shown_path(name.part(name.number))}: {len(missing):,} of {name.count:,} parts of this model are missing:"
        f" {listed}{more} (expected in the same folder)"
    )
