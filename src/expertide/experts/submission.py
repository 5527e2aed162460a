"""What follows a reservation: its reads are submitted, or its slot ends as failed. Never neither."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expertide._native import Residency
    from expertide.experts.cache import Reservation
    from expertide.memory.reader import Reader, WindowRead


def fail_reads(residency: Residency, reads: Iterable[WindowRead]) -> None:
    """End reads that nobody has begun: their slots would be loading for ever, and whoever waits for them too."""
    for slot, file_id, offset, _, need_nbytes, _ in reads:
        residency.fail(slot, errno.ECANCELED, file_id, offset, need_nbytes, 0)


def submit_in_background(
    reader: Reader, residency: Residency, reservation: Reservation, layer_id: int, expert: int
) -> None:
    """Submit behind all demand, and give back the lease that came with the reservation. Call under the cache's lock.

    Raises:
        whatever `reader` raises; the load has then failed, and nothing is leased.
    """
    try:
        reader.submit(residency, reservation.reads, background=True)
    except BaseException:
        fail_reads(residency, reservation.reads)
        raise
    finally:
        residency.release(layer_id, expert)
