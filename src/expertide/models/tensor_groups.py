"""Tensors that come in groups and are named alike in the GGUF files of every architecture."""

from __future__ import annotations

from typing import Protocol

from expertide.formats.tensors import ExpertPart
from expertide.models.tensor_directory import TensorDirectory


class Take(Protocol):
    def __call__(self, name: str, *shape: int) -> None:
        """Note the tensor of this name, which must have this shape, as resident."""
        ...


def take_swiglu(take: Take, blk: str, suffix: str, hidden: int, inner: int) -> None:
    """`ffn_gate`, `ffn_up` and `ffn_down` of a layer (`blk.N.`), with "" or "_shexp" behind."""
    take(f"{blk}ffn_gate{suffix}.weight", inner, hidden)
    take(f"{blk}ffn_up{suffix}.weight", inner, hidden)
    take(f"{blk}ffn_down{suffix}.weight", hidden, inner)


def take_experts(
    directory: TensorDirectory, blk: str, num_experts: int, *, inner: int, hidden: int
) -> tuple[ExpertPart, ...]:
    """The parts of a layer's experts, in the order gate, up, down; or gate_up, down where the file stacks both.

    Raises:
        FormatError, UnsupportedError: see `TensorDirectory.take`.
    """
    if directory.has(blk + "ffn_gate_up_exps.weight"):
        shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    else:
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    parts = []
    for part, (rows, cols) in shapes.items():
        info = directory.take(f"{blk}ffn_{part}_exps.weight", (num_experts, rows, cols))
        ranges = tuple(info.slice(expert) for expert in range(num_experts))
        parts.append(ExpertPart(part, info.quant, rows, cols, ranges))
    return tuple(parts)


def layer_of(name: str) -> int:
    """The layer number in `blk.N.…`, or -1."""
    pieces = name.split(".", 2)
    return int(pieces[1]) if pieces[0] == "blk" and len(pieces) == 3 and pieces[1].isdecimal() else -1
