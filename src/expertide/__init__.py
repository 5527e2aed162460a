"""Expertide: Mixture-of-Experts language models larger than the memory they run in."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from expertide.engine.sampling import SamplingParams
    from expertide.llm import LLM

_HOME = {"LLM": "expertide.llm", "SamplingParams": "expertide.engine.sampling"}


def __getattr__(name: str) -> Any:
    # Loaded at first use: `expertide --help`, `inspect` and `plan` finish before torch is imported.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'expertide' has no attribute {name!r}")
