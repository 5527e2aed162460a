"""Names of models on a hub, and the GGUF files behind them. Plain Python: strings in, choices out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from expertide.errors import RequestError

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?::(.+))?", re.ASCII)
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|MXFP4(?:_[A-Z0-9]+)*|BF16|F16|F32))$", re.IGNORECASE)
# What most people should take: about 4.8 bits a weight, hardly worse than the original, with fast kernels; then what
# is near it.
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_K_XL", "Q4_0", "IQ4_XS", "MXFP4", "MXFP4_MOE", "Q5_K_M", "Q3_K_M", "Q8_0")


@dataclass(frozen=True, slots=True)
class HubName:
    """`ORG/NAME`, and what was asked for behind the colon: a file's path in the repository, or a quant."""

    repo: str
    wanted: str | None = None

    def __str__(self) -> str:
        return self.repo if self.wanted is None else f"{self.repo}:{self.wanted}"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository. `sha256`: None where the hub does not say it."""

    path: str
    size: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model of a repository: a file, or a split set in the order of its parts."""

    quant: str
    files: tuple[RemoteFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def first(self) -> str:
        """Path of the part that stands for the set."""
        return self.files[0].path


def parse(name: str) -> HubName | None:
    """The hub's name that `name` may be; None where it can only be a path."""
    found = _NAME.fullmatch(name)
    if found is None or (found[3] is None and name.endswith(".gguf")):
        return None
    return HubName(f"{found[1]}/{found[2]}", found[3])


def quant_of(path: str) -> str:
    """The quant in a file's name; "" where there is none."""
    stem = path.rpartition("/")[2]
    split = _SPLIT.fullmatch(stem)
    found = _QUANT.search(split[1] if split else stem.removesuffix(".gguf"))
    return found[1].upper() if found else ""


def candidates(files: Sequence[RemoteFile]) -> list[Candidate]:
    """The models among a repository's files, smallest first. Incomplete split sets and projectors are left out."""
    sets: dict[tuple[str, int], dict[int, RemoteFile]] = {}
    found: list[Candidate] = []
    for file in files:
        if not file.path.endswith(".gguf") or file.path.rpartition("/")[2].lower().startswith("mmproj"):
            continue
        split = _SPLIT.fullmatch(file.path)
        if split is None:
            found.append(Candidate(quant_of(file.path), (file,)))
        else:
            sets.setdefault((split[1], int(split[3])), {})[int(split[2])] = file
    for (_, total), parts in sets.items():
        if set(parts) == set(range(1, total + 1)):
            files_in_order = tuple(parts[number] for number in sorted(parts))
            found.append(Candidate(quant_of(files_in_order[0].path), files_in_order))
    return sorted(found, key=lambda candidate: (candidate.num_bytes, candidate.first))


def select(name: HubName, found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that `name` may mean; all of them when it does not say.

    Raises:
        RequestError: none, or several that the same word means.
    """
    if not found:
        raise RequestError(f"{name.repo}: has no GGUF files")
    if name.wanted is None:
        return list(found)
    by_file = [c for c in found if name.wanted in {file.path for file in c.files}]
    by_quant = [c for c in found if c.quant == name.wanted.upper()]
    chosen = by_file or by_quant
    if not chosen:
        known = ", ".join(sorted({c.quant or c.first for c in found}))
        raise RequestError(f"{name}: no such file or quant; there are {known}")
    if len(chosen) > 1:
        raise RequestError(f"{name}: means several files: {', '.join(c.first for c in chosen)}; name one of them")
    return chosen


def in_order(found: Sequence[Candidate]) -> list[Candidate]:
    """Which to try first when nobody has named one: the usual quants, then from small to large."""
    rank = {quant: position for position, quant in enumerate(PREFERRED)}
    return sorted(found, key=lambda c: (rank.get(c.quant.removeprefix("UD-"), len(rank)), c.num_bytes))
