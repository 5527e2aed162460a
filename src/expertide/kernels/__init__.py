"""Functions on tensors: one signature per op (`ops.Kernels`), several implementations.

Knows tensors, packed matrices and integers; no model, file or cache. Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from expertide.errors import RequestError

if TYPE_CHECKING:
    from expertide.kernels.ops import Kernels


def select(name: str, *, num_threads: int, cpus: Sequence[int] = ()) -> Kernels:
    """The implementation called `name`: "native" or "reference".

    Args:
        num_threads: workers of the native kernels. The reference runs on torch's own threads.
        cpus: which CPU each of them stays on; none: wherever the system puts it.

    Raises:
        RequestError: no implementation has this name.
    """
    if name == "reference":
        from expertide.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    if name == "native":
        from expertide.kernels.cpu import CpuKernels

        return CpuKernels(num_threads, cpus)
    raise RequestError(f"kernels {name!r} are not known; known: native, reference")
