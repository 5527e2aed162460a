"""How fast a decoded token can be expected, from the plan and from what `expertide doctor` measured. Arithmetic only.

    seconds = max(multiplying, reading RAM) + reading missing experts + layers * what a layer takes besides

Reads and multiplications overlap in part, layer by layer; the sum errs on the slow side. Hits are taken as the cached
share of all experts, as if every expert were asked for equally often: real routing is uneven and hits more often, which
errs on the same side. The other errors are of the machine: a busy one is slower than when it was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from expertide.memory.machine_rates import MachineRates

if TYPE_CHECKING:
    from expertide.prepare import Prepared

# The two kinds of packed row that the kernels know: multiplied as integers, or decoded first.
MEASURED_TYPES = ("Q4_K", "Q8_0")


def touched_values(prepared: Prepared) -> dict[str, int]:
    """Quant type -> weights that one decoded token is multiplied with."""
    architecture, catalog = prepared.architecture, prepared.catalog
    values: Counter[str] = Counter()
    has_own_head = "output.weight" in prepared.files.tensors
    for tensor in architecture.resident_tensors():
        # One row of the embedding is read per token, unless it is the head as well.
        if not (has_own_head and tensor.name == "token_embd.weight"):
            values[tensor.quant.name] += tensor.num_values
    if catalog is not None:
        for parts in catalog.layers.values():
            for part in parts:
                values[part.quant.name] += part.rows * part.cols * architecture.config.num_experts_per_tok
    return dict(values)


def multiply_seconds(values: Mapping[str, int], rates: Mapping[int, Mapping[str, float]], num_threads: int) -> float:
    """Seconds for `values` weights of each type, by the largest measured thread count that is not above `num_threads`.

    A type that was not measured takes the slowest measured rate. 0 where nothing was measured.
    """
    counts = [threads for threads in rates if threads <= num_threads]
    if not counts:
        return 0.0
    by_type = rates[max(counts)]
    slowest = min(by_type.values())
    return sum(number / by_type.get(name, slowest) for name, number in values.items())


def seconds_per_token(
    values: Mapping[str, int], num_bytes: int, missing_bytes: int, *, num_layers: int, num_threads: int,
    rates: MachineRates, disk_bytes_per_s: float | None,
) -> float:  # fmt: skip
    """Seconds of one decoded token.

    Args:
        values: from `touched_values`.
        num_bytes: read from RAM.
        missing_bytes: read from the disk; not counted where `disk_bytes_per_s` is None.
    """
    compute = multiply_seconds(values, rates.values_per_s, num_threads)
    disk = missing_bytes / disk_bytes_per_s if disk_bytes_per_s else 0.0
    return max(compute, num_bytes / rates.memory_bytes_per_s) + disk + num_layers * rates.layer_s
