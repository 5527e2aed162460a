"""Quant types: how a row of numbers is stored as blocks of bytes, one type per file.

Promises: each decoder is exact, bit-identical to the `gguf` package. Knows numpy; knows no file, no tensor, no torch.
One more type is one more file here and its line in `_ALL`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from expertide.errors import UnsupportedError
from expertide.formats.quants.base import QuantType
from expertide.formats.quants.bf16 import BF16
from expertide.formats.quants.f16 import F16
from expertide.formats.quants.f32 import F32
from expertide.formats.quants.iq4_nl import IQ4_NL
from expertide.formats.quants.iq4_xs import IQ4_XS
from expertide.formats.quants.mxfp4 import MXFP4
from expertide.formats.quants.q2_k import Q2_K
from expertide.formats.quants.q3_k import Q3_K
from expertide.formats.quants.q4_0 import Q4_0
from expertide.formats.quants.q4_1 import Q4_1
from expertide.formats.quants.q4_k import Q4_K
from expertide.formats.quants.q5_0 import Q5_0
from expertide.formats.quants.q5_1 import Q5_1
from expertide.formats.quants.q5_k import Q5_K
from expertide.formats.quants.q6_k import Q6_K
from expertide.formats.quants.q8_0 import Q8_0

__all__ = ["QUANT_TYPES", "QuantType", "by_id", "by_name"]

_ALL: tuple[QuantType, ...] = (
    F32(),
    F16(),
    BF16(),
    Q4_0(),
    Q4_1(),
    Q5_0(),
    Q5_1(),
    Q8_0(),
    Q2_K(),
    Q3_K(),
    Q4_K(),
    Q5_K(),
    Q6_K(),
    IQ4_NL(),
    IQ4_XS(),
    MXFP4(),
)

# Every type with a decoder, by its number in GGUF files.
QUANT_TYPES: Mapping[int, QuantType] = MappingProxyType({quant.ggml_id: quant for quant in _ALL})

_BY_NAME = {quant.name: quant for quant in _ALL}


def by_id(ggml_id: int) -> QuantType:
    """The type with this number in GGUF files.

    Raises:
        UnsupportedError: no decoder for it.
    """
    quant = QUANT_TYPES.get(ggml_id)
    if quant is None:
        raise UnsupportedError(f"tensor type {ggml_id} has no decoder; known: {_known()}")
    return quant


def by_name(name: str) -> QuantType:
    """The type of this name, spelled as in ggml: "Q4_K".

    Raises:
        UnsupportedError: no decoder for it.
    """
    quant = _BY_NAME.get(name)
    if quant is None:
        raise UnsupportedError(f"tensor type {name!r} has no decoder; known: {_known()}")
    return quant


def _known() -> str:
    return ", ".join(_BY_NAME)
