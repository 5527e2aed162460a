"""Where pulled models lie: `models/ORG--NAME/` in the user's cache, files under their paths in the repository.

A file that is still on its way is called `FILE.SHA.part`: SHA is of what it shall become, so that a transfer never goes
on with the beginning of another version.
"""

from __future__ import annotations

from pathlib import Path

from expertide.errors import RequestError
from expertide.hub.names import Candidate, HubName, RemoteFile, candidates, select
from expertide.settings import user_cache


def models_folder() -> Path:
    return user_cache() / "models"


def folder_of(repo: str) -> Path:
    return models_folder() / repo.replace("/", "--")


def part_path(target: Path, file: RemoteFile) -> Path:
    """Where a file is gathered."""
    return target.with_name(f"{target.name}.{(file.sha256 or 'unknown')[:12]}.part")


def pulled(repo: str) -> list[Candidate]:
    """What is complete of a repository; sizes as they lie."""
    folder = folder_of(repo)
    files = [
        RemoteFile(path.relative_to(folder).as_posix(), path.stat().st_size, None)
        for path in sorted(folder.rglob("*.gguf"))
        if path.is_file()
    ]
    return candidates(files)


def repositories() -> list[str]:
    """Repositories of which something lies here."""
    if not models_folder().is_dir():
        return []
    names = (entry.name.replace("--", "/", 1) for entry in sorted(models_folder().iterdir()) if entry.is_dir())
    return [name for name in names if "/" in name]


def find(name: HubName) -> Path:
    """The first file of a pulled model.

    Raises:
        RequestError: it is not here, or it is not said which one of several is meant.
    """
    found = pulled(name.repo)
    if not found:
        raise RequestError(f"{name}: no such file, and no model of this name is here; `expertide pull {name}` gets it")
    chosen = select(name, found)
    if len(chosen) > 1:
        names = ", ".join(f"{name.repo}:{candidate.quant or candidate.first}" for candidate in chosen)
        raise RequestError(f"{name}: several are here: {names}")
    return folder_of(name.repo) / chosen[0].first
