"""`expertide inspect MODEL`: what the file says it holds, checked, without reading a weight."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from expertide.cli.flags import JsonFlag, ModelName
from expertide.cli.output import JsonTarget, ProgressBars, count, emit, note, table
from expertide.errors import StorageError, UnsupportedError
from expertide.formats import open_model
from expertide.formats.tensors import ModelFiles
from expertide.memory import placement
from expertide.models import registry
from expertide.models.architecture import Architecture
from expertide.prepare import model_path
from expertide.units import format_size

# An array of 100,000 tokens is named and counted, not printed.
_SHOWN_ARRAY = 8
_SHOWN_TEXT = 200
_READ_BYTES = 4 << 20


def command(
    model: ModelName,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    metadata: Annotated[bool, typer.Option("--metadata", help="List every metadata entry.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and show each file's SHA-256.")] = False,
    json: JsonFlag = None,
) -> None:
    """Show what a model file holds, and whether it is sound."""
    target = JsonTarget(json)
    files = open_model(model_path(model))
    architecture, refusal = _architecture(files)
    facts = facts_of(files, architecture)
    if refusal:
        facts["unsupported"] = refusal
    if verify:
        with ProgressBars() as progress:
            for entry in facts["files"]:
                entry["sha256"] = _sha256(Path(entry["path"]), entry["bytes"], progress)
    if target:
        # JSON is for programs: it is always complete.
        facts["metadata"] = {key: _short(value) for key, value in files.metadata.items()}
        facts["tensors"] = [_tensor(files, name) for name in files.tensors]
        target.write(facts)
    if not target.is_stdout:
        _print(files, facts, with_tensors=tensors, with_metadata=metadata)
    for warning in files.warnings:
        note(f"note: {warning}")
    if refusal:
        # The container is sound and was shown; that this program cannot run it is still a failure of what was asked.
        raise UnsupportedError(refusal)


def facts_of(files: ModelFiles, architecture: Architecture | None) -> dict[str, Any]:
    """The summary as plain values."""
    by_type: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "bytes": 0})
    for tensor in files.tensors.values():
        entry = by_type[tensor.quant.name]
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    facts: dict[str, Any] = {
        "container": files.container,
        "files": [{"path": str(path), "bytes": size} for path, size in zip(files.files, files.file_sizes, strict=True)],
        "total_bytes": files.total_bytes,
        "num_tensors": len(files.tensors),
        "num_parameters": sum(tensor.num_values for tensor in files.tensors.values()),
        "tensor_types": dict(sorted(by_type.items(), key=lambda item: -item[1]["bytes"])),
    }
    if architecture is None:
        return facts
    facts["architecture"] = architecture.name
    facts["model"] = architecture.describe()
    facts["resident_bytes"] = sum(tensor.nbytes for tensor in architecture.resident_tensors())
    catalog = architecture.expert_catalog()
    if catalog is not None:
        sizes = Counter(catalog.expert_nbytes(layer_id) for layer_id in catalog.layers)
        facts["experts"] = {
            "layers": len(catalog.layers),
            "per_layer": catalog.num_experts,
            "total_bytes": catalog.total_bytes,
            "in_ram_bytes": sum(placement.expert_window_bytes(catalog).values()) * catalog.num_experts,
            "bytes_of_one": [{"bytes": size, "layers": count} for size, count in sorted(sizes.items())],
        }
    return facts


def _architecture(files: ModelFiles) -> tuple[Architecture | None, str]:
    try:
        return registry.find(files), ""
    except UnsupportedError as error:
        return None, str(error)


def _sha256(path: Path, num_bytes: int, progress: ProgressBars) -> str:
    digest, done = hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
                done += len(piece)
                progress(f"reading {path.name}", done, num_bytes)
    except OSError as error:
        raise StorageError(f"{path}: read error at offset {done:,}: {error.strerror}") from None
    return digest.hexdigest()


def _print(files: ModelFiles, facts: dict[str, Any], *, with_tensors: bool, with_metadata: bool) -> None:
    rows = [("container", facts["container"])]
    rows += [("file", f"{entry['path']}  {format_size(entry['bytes'])}") for entry in facts["files"]]
    rows += [("SHA-256", entry["sha256"]) for entry in facts["files"] if "sha256" in entry]
    rows.append(("tensors", f"{facts['num_tensors']:,} of {facts['num_parameters']:,} values"))
    for name, entry in facts["tensor_types"].items():
        rows.append((f"  {name}", f"{count(entry['tensors'], 'tensor')}, {format_size(entry['bytes'])}"))
    if "model" in facts:
        rows.append(("architecture", facts["architecture"]))
        rows += [(f"  {name}", _value(value)) for name, value in facts["model"].items()]
        rows.append(("resident", f"{format_size(facts['resident_bytes'])} that every token needs"))
    if "experts" in facts:
        experts = facts["experts"]
        sizes = " or ".join(format_size(entry["bytes"]) for entry in experts["bytes_of_one"])
        total = experts["layers"] * experts["per_layer"]
        rows.append(
            (
                "experts",
                f"{experts['layers']} layers of {experts['per_layer']}: {total:,} of {sizes}, "
                f"{format_size(experts['total_bytes'])} in all "
                f"({format_size(experts['in_ram_bytes'])} in RAM, in whole pages of the disk)",
            )
        )
    if "unsupported" not in facts:
        rows.append(("checks", "header, metadata, tensor directory and file sizes agree"))
    emit(table(rows) + "\n")
    if with_metadata:
        emit("\n" + table((key, _value(_short(value))) for key, value in files.metadata.items()) + "\n")
    if with_tensors:
        emit("\n" + table((name, _tensor_line(files, name)) for name in files.tensors) + "\n")


def _tensor(files: ModelFiles, name: str) -> dict[str, Any]:
    tensor = files.tensors[name]
    return {
        "name": name,
        "shape": list(tensor.shape),
        "type": tensor.quant.name,
        "file": tensor.file_id,
        "offset": tensor.offset,
        "bytes": tensor.nbytes,
    }


def _tensor_line(files: ModelFiles, name: str) -> str:
    tensor = files.tensors[name]
    shape = " x ".join(f"{size:,}" for size in tensor.shape)
    return f"{tensor.quant.name:<6} {shape:<24} {format_size(tensor.nbytes)}"


def _short(value: object) -> Any:
    """A metadata value fit to print: long arrays become their length and first entries."""
    if isinstance(value, str):
        return value if len(value) <= _SHOWN_TEXT else value[:_SHOWN_TEXT] + "…"
    if isinstance(value, bool | int | float) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _short(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) or hasattr(value, "__len__"):
        length = len(value)
        first = [_short(value[i]) for i in range(min(length, _SHOWN_ARRAY))]  # type: ignore[index]
        return first if length <= _SHOWN_ARRAY else {"length": length, "first": first}
    return str(value)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(_value(entry) for entry in value)
    return " ".join(str(value).split())
