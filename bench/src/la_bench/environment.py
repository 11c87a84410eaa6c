"""Where and with what a run happened."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import la_core
from la_bench.gpu_state import read_gpu
from la_bench.version import __version__
from la_core.conformance.source_hash import source_hash


@dataclass(frozen=True)
class Environment:
    """The same for all rows of a run.

    Attributes
    ----------
    machine
        Model of the CPU, or of the GPU if that was measured.
    cache_bytes
        Size of the last-level cache (CPU) or of L2 (GPU); None if unknown.
    commit, dirty
        Of the git checkout this package lies in; None outside of one, unless they are handed over.
    triton, cutlass_dsl
        Versions of the compilers of kernels; None where they are not installed, and in rows from before they were kept,
        as are all that follow.
    driver, max_sm_mhz, max_memory_mhz
        Of the GPU; its clocks as they were stand in each row's result.
    options
        Of the command line; paths without their folders.
    variables
        Environment variables that change what runs, as `NAME=value`.
    sources
        SHA-256 of the sources of la-core and la-bench, by package.
    """

    utc: str
    device: str
    machine: str
    cache_bytes: int | None
    system: str
    threads: int
    python: str
    torch: str
    cuda: str | None
    la_core: str
    la_bench: str
    spec_revision: int
    commit: str | None
    dirty: bool | None
    seed: int
    quick: bool
    triton: str | None = None
    cutlass_dsl: str | None = None
    driver: str | None = None
    max_sm_mhz: int | None = None
    max_memory_mhz: int | None = None
    options: str | None = None
    variables: str | None = None
    sources: dict[str, str | None] | None = None


NOT_KNOWN = ("commit", "dirty", "cache_bytes")
"""Facts of which None says that nobody could tell, and not that there is no such thing."""

VARIABLES = (
    *("LA_BACKEND", "LA_CHECK_OFFSETS", "LA_CUTE_PREBUILT", "TRITON_INTERPRET", "NVIDIA_TF32_OVERRIDE"),
    "CUDA_LAUNCH_BLOCKING",
    *("CUTE_DSL_ARCH", "TRITON_DEFAULT_FP_FUSION", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
)
"""Those that change what runs, or how fast; folders of caches do not."""


def read_environment(device: torch.device, *, seed: int, quick: bool, options: str | None = None) -> Environment:
    """The environment of a run that starts now."""
    commit, dirty = git_state(Path(__file__).parent)
    state = read_gpu(device)
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        machine = gpu.name
        cache: int | None = gpu.L2_cache_size
    else:
        machine, cache = cpu_model(), last_level_cache()
    return Environment(
        utc=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device=device.type,
        machine=machine,
        cache_bytes=cache,
        system=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        la_core=la_core.__version__,
        la_bench=__version__,
        spec_revision=la_core.SPEC_REVISION,
        commit=commit,
        dirty=dirty,
        seed=seed,
        quick=quick,
        triton=_version("triton"),
        cutlass_dsl=_version("nvidia-cutlass-dsl"),
        driver=state.driver,
        max_sm_mhz=state.max_sm_mhz,
        max_memory_mhz=state.max_memory_mhz,
        options=options,
        variables=" ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ) or None,
        sources={package: source_hash(package) for package in ("la_core", "la_bench")},
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The CPU's name with the number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def last_level_cache() -> int | None:
    """Bytes of the largest cache of core 0; None where the system does not say."""
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    known = [int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units]
    return max(known, default=None)


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Commit of this project's checkout around `folder`, and whether any tracked or new file differs from it.

    Outside of a checkout, also if an environment lies in that of another project, they are what `LA_BENCH_COMMIT` hands
    over, a commit that ends in `-dirty` where files differ. Without it both are None.
    """
    try:
        root = Path(_git(folder, "rev-parse", "--show-toplevel"))
        if (root / "bench" / "src" / "la_bench").is_dir():
            return _git(folder, "rev-parse", "HEAD"), bool(_git(folder, "status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        pass
    told = os.environ.get("LA_BENCH_COMMIT")
    return (told.removesuffix("-dirty"), told.endswith("-dirty")) if told else (None, None)


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()
