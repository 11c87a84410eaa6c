"""Memory that a call allocates on top of its arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Peak of the bytes that torch's allocator hands out during `call` and that were not in use before.

    Memory from elsewhere (numpy, a C++ library of its own) is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    with _muted_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        call()
    # Not by way of an exported trace: a disk that is full must not cost a result.
    assert recording.profiler is not None
    assert recording.profiler.kineto_results is not None
    events = recording.profiler.kineto_results.events()
    in_use = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        in_use += event.nbytes()
        peak = max(peak, in_use)
    return peak


@contextmanager
def _muted_stderr() -> Iterator[None]:
    """Nothing reaches file descriptor 2 inside: torch's profiler writes two lines there whatever its log level is."""
    saved = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
