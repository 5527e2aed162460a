"""Which file of this folder understands which model. One line per architecture; importing it does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from expertide.errors import FormatError, UnsupportedError
from expertide.formats.tensors import ModelFiles
from expertide.models.architecture import Architecture
from expertide.models.deepseek_v2 import DeepseekV2Architecture
from expertide.models.olmoe import OlmoeArchitecture
from expertide.models.qwen2_moe import Qwen2MoeArchitecture
from expertide.models.qwen3_moe import Qwen3MoeArchitecture

ARCHITECTURES: Mapping[str, Callable[[ModelFiles], Architecture]] = {
    "deepseek2": DeepseekV2Architecture,
    "olmoe": OlmoeArchitecture,
    "qwen2moe": Qwen2MoeArchitecture,
    "qwen3moe": Qwen3MoeArchitecture,
}


def find(files: ModelFiles) -> Architecture:
    """The architecture of these files, its config and tensor directory checked.

    Raises:
        UnsupportedError: no file here for it, or a container whose weights cannot be run yet.
        FormatError: the files contradict themselves.
    """
    path = files.files[0]
    if files.container != "gguf":
        raise UnsupportedError(f"{path}: running models from {files.container} is not written yet; use a GGUF file")
    name = files.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise FormatError(f"{path}: general.architecture is {name!r}, expected the name of an architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"{path}: architecture {name!r} has no file in expertide/models; known: {known}")
    return ARCHITECTURES[name](files)
