"""How far from the limit: bandwidth, its share of the machine's copy bandwidth, and the copy floor."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

FLOOR_FACTOR = 0.999
"""What the in-place floor multiplies states with: below 1, so that no state ever overflows."""


@dataclass(frozen=True)
class Roofline:
    """A call's time set against what the same bytes would take if they were merely copied.

    Attributes
    ----------
    gb_per_s
        Bytes that a call must move over its time, in 1e9 bytes per second.
    copy_gb_per_s
        Bytes read and written by a large eager copy over its median time, in the same rounds.
    share_of_copy
        The first over the second: 1 is a call that moves its bytes as fast as a copy does.
    copy_floor_us
        Microseconds that the call's bytes take at the speed of the copy.
    """

    gb_per_s: float
    copy_gb_per_s: float
    share_of_copy: float
    copy_floor_us: float


def roofline(bytes_per_call: float, seconds_per_call: float, copy_bytes: int, copy_seconds: list[float]) -> Roofline:
    """From a median time per call and the copy's samples; `copy_bytes` counts reads and writes."""
    achieved = bytes_per_call / seconds_per_call
    ceiling = copy_bytes / median(copy_seconds)
    return Roofline(achieved / 1e9, ceiling / 1e9, achieved / ceiling, bytes_per_call / ceiling * 1e6)
