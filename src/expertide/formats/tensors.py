"""Named, described bytes: what a container file says it holds, without reading the weights.

    ModelFiles        one model: its files, metadata, tensor directory (all checked against the file sizes)
    TensorInfo        name, shape, quant type, and where its bytes lie
    ByteRange         a run of bytes of one file
    ExpertCatalog     (layer, expert) -> the parts whose bytes make up that expert

No torch here, and no weights are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from expertide.formats.quants.base import QuantType


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`nbytes` bytes at `offset` of file number `file_id` of the model's file list."""

    file_id: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of the directory.

    Attributes:
        shape: slowest axis first (GGUF's `ne` reversed); `shape[-1]` is the row that blocks divide.
        file_id, offset, nbytes: place of the bytes; `offset` counts from the start of that file.
    """

    name: str
    shape: tuple[int, ...]
    quant: QuantType
    file_id: int
    offset: int
    nbytes: int

    @property
    def where(self) -> ByteRange:
        return ByteRange(self.file_id, self.offset, self.nbytes)

    @property
    def num_values(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    def slice(self, index: int) -> ByteRange:
        """The bytes of entry `index` along the first axis (expert `index` of a stacked expert tensor)."""
        assert 0 <= index < self.shape[0]
        size = self.nbytes // self.shape[0]
        return ByteRange(self.file_id, self.offset + index * size, size)


@dataclass(frozen=True, slots=True)
class FilePart:
    """How one file of the model is laid out; for people who look at it.

    Attributes:
        version: of the container; 0 where it has none.
        alignment: every tensor begins at a multiple of it, counted from `data_start`.
        data_start: offset of the tensor data.
    """

    version: int
    alignment: int
    data_start: int
    num_tensors: int
    num_metadata: int


@dataclass(frozen=True)
class ModelFiles:
    """One model as it lies on disk; checked completely before it exists.

    Attributes:
        container: "gguf" or "safetensors".
        files: every part, in order; `TensorInfo.file_id` indexes this.
        file_sizes: bytes of every part.
        metadata: GGUF key-values (arrays of a large tokenizer are decoded at first access), or config.json's content.
        tensors: by name, in file order.
        warnings: sentences worth telling the user; none stops the load.
        parts: one per file: versions, alignments.
    """

    container: str
    files: tuple[Path, ...]
    file_sizes: tuple[int, ...]
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    warnings: tuple[str, ...] = field(default=())
    parts: tuple[FilePart, ...] = field(default=())

    @property
    def total_bytes(self) -> int:
        return sum(self.file_sizes)


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One matrix (or scale tensor) of every expert of a layer: `bytes_of[e]` is expert e's share.

    Attributes:
        name: "gate", "up", "down", or "gate_up" where a file stacks both (gate rows first).
        rows, cols: the matrix as the kernel sees it, [rows, cols], row-major in blocks of `quant`.
        ranges: one per expert, all of the same nbytes.
    """

    name: str
    quant: QuantType
    rows: int
    cols: int
    ranges: tuple[ByteRange, ...]

    @property
    def nbytes(self) -> int:
        return self.ranges[0].nbytes


@dataclass(frozen=True)
class ExpertCatalog:
    """Where every routed expert lies.

    Attributes:
        num_experts: E, the same for all MoE layers.
        layers: layer_id -> its parts. Only MoE layers have an entry.
    """

    num_experts: int
    layers: Mapping[int, tuple[ExpertPart, ...]]

    def expert_nbytes(self, layer_id: int) -> int:
        """Bytes of one expert of this layer, without alignment windows."""
        return sum(part.nbytes for part in self.layers[layer_id])

    @property
    def total_bytes(self) -> int:
        return sum(self.expert_nbytes(layer_id) * self.num_experts for layer_id in self.layers)
