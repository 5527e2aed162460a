"""What every quant type says about itself. Plain numpy; one subclass per type, each in a file of this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from expertide.errors import FormatError


class QuantType(ABC):
    """A way to store a row of numbers as blocks of equal size. Instances are stateless singletons.

    Attributes:
        name: as ggml spells it: "Q4_K".
        ggml_id: the number in GGUF files.
        block_size: values in a block.
        block_bytes: bytes of a block.
    """

    name: str
    ggml_id: int
    block_size: int
    block_bytes: int

    @abstractmethod
    def decode(self, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Exact values of whole blocks.

        Args:
            raw: uint8 [..., num_blocks * block_bytes], contiguous in the last axis.

        Returns:
            float32 [..., num_blocks * block_size], bit-identical to the `gguf` package.
        """

    def row_bytes(self, num_values: int) -> int:
        """Bytes of a row of `num_values` values.

        Raises:
            FormatError: the row does not divide into blocks.
        """
        if num_values % self.block_size:
            raise FormatError(
                f"rows of {num_values:,} values do not divide into {self.name} blocks of {self.block_size}"
            )
        return num_values // self.block_size * self.block_bytes

    def __repr__(self) -> str:
        return self.name
