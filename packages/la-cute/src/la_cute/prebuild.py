"""Building kernels ahead of time: shared libraries for each architecture. Needs the compiler and gcc, but no GPU.

    python -m la_cute.prebuild [sm_90a ...]

writes the libraries of the named architectures, of all by default, into the package, unless they are up to date: one
for decode, and where they are built ahead of time one for the operators of the KV window. Each is linked of the
kernels' object files, the compiler's static launch functions, the static CUDA runtime of the distribution
`nvidia-cuda-runtime`, and the C files of this package; of the system it needs glibc, and of Python `apache-tvm-ffi`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from la_cute.decode_compile_key import ARCHES
from la_cute.kernel_keys import KernelKey
from la_cute.prebuilt_kernels import (
    FOLDER,
    MAKERS,
    Manifest,
    library_digest,
    library_name,
    library_path,
    manifest_path,
    sources,
    sources_changed,
)
from la_cute.prebuilt_keys import FAMILIES, function_name, prebuilt_keys

CUDA_RUNTIME = "nvidia-cuda-runtime"

C_FILES = tuple(Path(__file__).with_name(name) for name in ("cuda_error.c", "decode_call.c", "kernel_launch.c"))

PYTHON_HEADER = Path(sysconfig.get_path("include"), "Python.h")

CPU, CPU_FEATURES = "x86-64", ("sse2",)
"""Host code is for every processor of this family. Left alone, the compiler takes the one that it runs on."""

JOBS = min(os.cpu_count() or 1, 8)
"""Each process holds the compiler."""

EXPORTS = "{ global: __tvm_ffi_*; PyInit_*; local: *; };"
"""Nothing else is seen from outside, so that a second CUDA runtime in the process does not meet this one."""


def build_library(folder: Path, name: str, keys: Sequence[KernelKey], workers: Executor) -> Path:
    """Compile `keys`, link them into a library in `folder`, and describe it by a manifest.

    Parameters
    ----------
    name
        Of the library, see :func:`la_cute.prebuilt_kernels.library_name`: all keys are of its architecture and family.

    Raises
    ------
    RuntimeError
        gcc cannot link them, or the package's sources have changed since this process started: the kernels may then be
        of either.
    """
    sources()
    with tempfile.TemporaryDirectory() as home:
        scratch = Path(home)
        targets = [scratch / f"{function_name(key)}.o" for key in keys]
        list(workers.map(export_kernel, keys, targets))
        linked = link(targets, scratch)
        if sources_changed():
            raise RuntimeError("the sources of la-cute have changed since this process started: build again")
        folder.mkdir(exist_ok=True)
        digest = library_digest(linked)
        library = library_path(folder, name, digest)
        shutil.move(linked, folder / f".{library.name}")
        os.replace(folder / f".{library.name}", library)
    manifest = Manifest(
        sources=sources(),
        library=digest,
        made_with=_versions(),
        glibc=(2, max(int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes()))),
        functions=tuple(map(function_name, keys)),
    )
    manifest.write(manifest_path(folder, name))
    for old in folder.glob(f"{name}-*.so"):
        if old != library:
            old.unlink()
    return library


def export_kernel(key: KernelKey, target: Path) -> None:
    """Compile a key into an object file whose host code runs on every processor."""
    function = key.compile()
    _set_processor(function.ir_module)
    function.export_to_c(str(target), function_name=function_name(key), export_only_tvm_ffi_symbols=True)


def _set_processor(module: Any) -> None:
    """Name the processor on each function of a module: the compiler's option for it excludes functions of tvm-ffi."""
    from cutlass._mlir import ir

    features = ", ".join(f'"+{feature}"' for feature in CPU_FEATURES)
    with module.context:
        for operation in module.body.operations:
            if operation.operation.name == "llvm.func" and operation.regions[0].blocks:
                operation.operation.attributes["target_cpu"] = ir.StringAttr.get(CPU)
                operation.operation.attributes["target_features"] = ir.Attribute.parse(
                    f"#llvm.target_features<[{features}]>"
                )


def link(objects: Sequence[Path], scratch: Path) -> Path:
    """Link object files and what they need into a shared library in `scratch`."""
    import tvm_ffi.libinfo
    from cutlass.cute.export.aot_config import get_libdir

    exports, library = scratch / "exports", scratch / "kernels.so"
    exports.write_text(EXPORTS)
    cuda = Path(importlib.metadata.distribution(CUDA_RUNTIME).locate_file("nvidia/cu13"))
    archives = (
        Path(get_libdir()) / "libcuda_dialect_runtime_static.a",
        cuda / "lib/libcudart_static.a",
        tvm_ffi.libinfo.find_libtvm_ffi(),
    )
    command = (
        *("gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror"),
        *(f"-I{folder}" for folder in (*include_folders(), cuda / "include")),
        *("-o", library, *objects, *C_FILES, *archives),
        *("-lpthread", "-ldl", "-lrt", f"-Wl,--version-script={exports}", "-Wl,--wrap=cudaLaunchKernelExC"),
        *("-Wl,--gc-sections", "-Wl,--strip-all", "-Wl,--no-undefined", "-Wl,-z,now"),
    )
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"gcc cannot link the kernels:\n{done.stderr[-4000:]}")
    return library


def include_folders() -> tuple[str, ...]:
    """Where `decode_call.c` finds the headers of tvm-ffi, DLPack and Python."""
    from tvm_ffi import libinfo

    return libinfo.find_include_path(), libinfo.find_dlpack_include_path(), str(PYTHON_HEADER.parent)


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in (*MAKERS, CUDA_RUNTIME)}


def remove_others(folder: Path, arch: str, names: Sequence[str]) -> None:
    """Remove what lies in `folder` for an architecture and belongs to none of its libraries: it would be packaged."""
    for path in folder.glob(f"{arch}[-.]*"):
        if not path.name.startswith(tuple(f"{name}{mark}" for name in names for mark in "-.")):
            path.unlink()


def is_current(folder: Path, name: str) -> bool:
    """Whether a library is what `build_library` would make now."""
    try:
        manifest = Manifest.read(manifest_path(folder, name))
        digest = library_digest(library_path(folder, name, manifest.library))
    except (OSError, ValueError):
        return False
    return (manifest.sources, manifest.library, manifest.made_with) == (sources(), digest, _versions())


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what is not up to date."""
    parser = argparse.ArgumentParser(prog="python -m la_cute.prebuild", description="Build kernels ahead of time.")
    parser.add_argument("arch", nargs="*", metavar="arch", help=f"of {', '.join(ARCHES)}; all by default")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"processes that compile; {JOBS} by default")
    options = parser.parse_args(arguments)
    for arch in set(options.arch) - set(ARCHES):
        parser.error(f"no architecture {arch!r}. Known: {', '.join(ARCHES)}")
    if sys.platform != "linux" or platform.machine() != "x86_64":
        parser.error(f"kernels are built ahead of time on Linux for x86-64, not on {sys.platform} {platform.machine()}")
    if shutil.which("gcc") is None:
        parser.error("gcc is not there, and kernels are linked by it")
    if not PYTHON_HEADER.exists():
        parser.error(f"{PYTHON_HEADER} is not there: it comes with the development files of this Python")
    # Not forked: the compiler has threads.
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as workers:
        for arch in options.arch or ARCHES:
            libraries = {library_name(arch, family): prebuilt_keys(arch, family) for family in FAMILIES}
            libraries = {name: keys for name, keys in libraries.items() if keys}
            remove_others(FOLDER, arch, list(libraries))
            for name, keys in libraries.items():
                if is_current(FOLDER, name):
                    sys.stdout.write(f"{name}: up to date\n")
                    continue
                start = time.monotonic()
                library = build_library(FOLDER, name, keys, workers)
                size, seconds = library.stat().st_size / 1e6, time.monotonic() - start
                sys.stdout.write(f"{name}: {len(keys)} kernels, {size:.1f} MB, in {seconds:.0f} s\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
