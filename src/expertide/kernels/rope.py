"""Rotary positions: the angles, with and without YaRN. Plain Python and numpy; the rotation itself is an op.

YaRN (arXiv 2309.00071) leaves fast dimensions alone, divides slow ones by `factor`, and blends between:

    pair i       0 ............ low ............ high ............ C/2
    frequency    θ^(-2i/C)      blend linearly   θ^(-2i/C) / factor

It also multiplies attention scores; where that goes (cos and sin, or the softmax scale) is the model's affair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# Which values turn together, as a vector of C: (2i, 2i+1), or (i, i + C/2). The pairing depends on the architecture and
# on the container, since converters may permute the rows that make queries and keys.
RopePairs = Literal["adjacent", "halves"]


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """How YaRN stretches the context.

    Attributes:
        factor: new length over old, > 1.
        original_context: tokens the model was first trained on.
        beta_fast, beta_slow: turns over the original context above which a pair is left alone, and below which it is
            fully divided.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotation of `dim` values as dim/2 pairs.

    Attributes:
        theta: base of the frequencies.
        yarn: None for plain rope.
        magnitude: factor on cos and sin.
        pairs: which values turn together.
    """

    dim: int
    theta: float
    yarn: YarnSpec | None = None
    magnitude: float = 1.0
    pairs: RopePairs = "adjacent"

    def inverse_frequencies(self) -> NDArray[np.float64]:
        """Radians per position of each pair, [dim / 2]."""
        pairs = np.arange(self.dim // 2, dtype=np.float64)
        plain = self.theta ** (-2.0 * pairs / self.dim)
        if self.yarn is None:
            return plain
        low = max(math.floor(self._pair_of(self.yarn.beta_fast)), 0)
        high: float = min(math.ceil(self._pair_of(self.yarn.beta_slow)), self.dim - 1)
        if low == high:
            high += 0.001  # a step instead of a division by zero; the number is the original code's
        ramp = np.clip((pairs - low) / (high - low), 0.0, 1.0)
        return plain * (1.0 - ramp) + plain / self.yarn.factor * ramp

    def _pair_of(self, turns: float) -> float:
        """The (fractional) pair that makes `turns` full turns over the original context."""
        assert self.yarn is not None
        return self.dim * math.log(self.yarn.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def yarn_magnitude(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, and 1 for factors up to 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
