"""What a GPU says about itself: driver and clocks, from NVML where its Python bindings are, else from `nvidia-smi`."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
SMI_SECONDS = 20
"""Longer than `nvidia-smi` takes on a machine with eight cards that sleep."""


@dataclass(frozen=True)
class GpuState:
    """Driver and clocks in MHz, now and at most; None where the card does not say."""

    driver: str | None
    sm_mhz: int | None
    memory_mhz: int | None
    max_sm_mhz: int | None
    max_memory_mhz: int | None


UNKNOWN = GpuState(None, None, None, None, None)

_failed: set[Callable[[str], GpuState]] = set()
"""Ways that have led nowhere in this process."""


def read_gpu(device: torch.device) -> GpuState:
    """The state of a CUDA device; `UNKNOWN` without one, and where neither way leads to it."""
    if device.type != "cuda":
        return UNKNOWN
    for read in (_from_nvml, _from_smi):
        state = _or_none(read, device)
        if state is not None:
            return state
    return UNKNOWN


def _or_none(read: Callable[[str], GpuState], device: torch.device) -> GpuState | None:
    # Bindings are missing or old, a container hides the driver, a card is cut into parts: times are worth more than
    # clocks, so no reason is a reason to stop, nor to wait for the same answer at the next point.
    if read in _failed:
        return None
    try:
        return read(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:
        _failed.add(read)
        return None


def _from_nvml(uuid: str) -> GpuState:
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        driver = nvml.nvmlSystemGetDriverVersion()
        clocks = [
            int(read(handle, kind))
            for read in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
            for kind in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM)
        ]
    finally:
        nvml.nvmlShutdown()
    # Older bindings return bytes.
    return GpuState(driver.decode() if isinstance(driver, bytes) else str(driver), *clocks)


def _from_smi(uuid: str) -> GpuState:
    query = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits", f"--id={uuid}"]
    answer = subprocess.run(query, check=True, capture_output=True, text=True, timeout=SMI_SECONDS).stdout
    driver, *clocks = (part.strip() for part in answer.strip().split(","))
    # A clock that a card does not have reads "[N/A]".
    return GpuState(driver, *(int(clock) if clock.isdigit() else None for clock in clocks))
