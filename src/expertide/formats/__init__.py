"""Files on disk -> named, described bytes; the layouts of quant types.

    open_model     any path that holds a model -> ModelFiles, completely checked
    gguf, safetensors, splits, sniff      the containers
    metadata       typed access to key-values
    quants         one file per quant type

A file is hostile until checked: whatever its content, opening it succeeds or raises FormatError, in bounded time and
memory. No weights are read here and torch is not known.
"""

from __future__ import annotations

from pathlib import Path

from expertide.formats.locate import open_model_at
from expertide.formats.tensors import ModelFiles

__all__ = ["open_model"]


def open_model(path: str | Path) -> ModelFiles:
    """The model in a .gguf file (any part of a split set), a .safetensors file, or a directory holding one model.

    Raises:
        FormatError: it is no model, damaged or incomplete.
        StorageError: it is missing or cannot be read.
    """
    return open_model_at(Path(path))
