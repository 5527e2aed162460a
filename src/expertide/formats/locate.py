"""From a path to the container: a file is recognised by its first bytes, a directory by what lies in it."""

from __future__ import annotations

import difflib
from pathlib import Path

from expertide.errors import FormatError, StorageError
from expertide.formats.gguf import open_gguf
from expertide.formats.header_reader import regular_size, shown_path
from expertide.formats.safetensors import open_safetensors
from expertide.formats.sniff import container_of
from expertide.formats.splits import split_name
from expertide.formats.tensors import ModelFiles

_MAX_LISTED = 8


def open_model_at(path: Path) -> ModelFiles:
    """`open_model` without the package's front door."""
    try:
        is_directory = path.is_dir()
    except (OSError, ValueError):  # a name too long; a zero byte in the path, on Python 3.11 and 3.12
        is_directory = False
    if is_directory:
        return _open_directory(path)
    if path.name and not _exists(path):
        raise StorageError(f"{shown_path(path)}: no such file or directory{_closest(path)}")
    regular_size(path)
    _check_piece(path)
    if container_of(path) == "gguf":
        return open_gguf(path)
    return open_safetensors(path)


def _open_directory(directory: Path) -> ModelFiles:
    entries = _entries(directory)
    gguf = sorted(entry for entry in entries if entry.suffix.lower() == ".gguf")
    safetensors = [entry for entry in entries if entry.name.endswith((".safetensors", ".safetensors.index.json"))]
    if safetensors and gguf:
        raise FormatError(
            f"{shown_path(directory)}: holds both GGUF and safetensors files; give the path of the one to open"
        )
    if safetensors:
        return open_safetensors(directory)
    # One split set counts once: by its first part, or by whatever part is there.
    models: dict[object, Path] = {}
    for entry in gguf:
        name = split_name(entry)
        models.setdefault((name.stem, name.count) if name else entry, entry)
    if len(models) == 1:
        return open_model_at(next(iter(models.values())))
    if models:
        listed = ", ".join(shown_path(Path(entry.name)) for entry in list(models.values())[:_MAX_LISTED])
        more = f" and {len(models) - _MAX_LISTED:,} more" if len(models) > _MAX_LISTED else ""
        raise FormatError(f"{shown_path(directory)}: holds {len(models):,} models, give one of them: {listed}{more}")
    raise FormatError(f"{shown_path(directory)}: a directory without a model; {_what_is_there(entries)}")


def _what_is_there(entries: list[Path]) -> str:
    names = {entry.name for entry in entries}
    if not names:
        return "it is empty"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return "it holds a PyTorch checkpoint; expected .gguf or .safetensors files"
    return "expected a .gguf file, or .safetensors files with config.json"


def _check_piece(path: Path) -> None:
    """A part of a raw byte split under the name of a GGUF split: only the first piece begins like GGUF."""
    name = split_name(path)
    if name is None or path.suffix.lower() != ".gguf":
        return
    try:
        container_of(path)
    except FormatError:
        first = name.part(1)
        if name.number > 1 and _exists(first) and _begins_like_gguf(first):
            raise FormatError(
                f"{shown_path(path)}: this piece does not begin like GGUF, but {shown_path(Path(first.name))} does: one"
                " file was cut into raw pieces; join all of them in order with `cat` and open the result"
            ) from None
        raise


def _begins_like_gguf(path: Path) -> bool:
    try:
        return container_of(path) == "gguf"
    except (FormatError, StorageError):
        return False


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError as error:
        raise StorageError(f"{shown_path(directory)}: {error.strerror}") from None


def _exists(path: Path) -> bool:
    try:
        return path.is_symlink() or path.exists()
    except (OSError, ValueError):
        return True  # whatever is wrong with it, opening says it better


def _closest(path: Path) -> str:
    """A hint with the most similar name in the same directory."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    found = difflib.get_close_matches(path.name, names[:1000], n=1, cutoff=0.75)
    return f" (is it {shown_path(Path(found[0]))}?)" if found else ""
