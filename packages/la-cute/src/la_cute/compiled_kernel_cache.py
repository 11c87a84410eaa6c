"""Compiled kernels: those in memory, then those built ahead of time, then those on disk, then compiled and kept.

Only the last two need the compiler installed, for its loader too; it is imported when their turn comes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import stat
import tempfile
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

from la_core.spec.errors import UnsupportedByBackend
from la_cute.kernel_keys import KernelKey
from la_cute.prebuilt_kernels import (
    ADVICE,
    MAKERS,
    compiler_installed,
    prebuilt_kernel,
    sources,
    sources_changed,
    why_missing,
)

ENV_CACHE_DIR = "LA_CUTE_CACHE_DIR"
"""Folder of compiled kernels; empty for none. Without it `la-cute` in the user's cache folder."""

FUNCTION = "la_cute_kernel"
"""Name of the function in every object file."""

OPS = {"decode": "decode", "decode_window": "decode", "verify": "verify", "commit": "commit", "advance": "advance"}
"""The operators as callers name them."""

Origin = Literal["prebuilt", "disk", "compiled"]


class Kernel(NamedTuple):
    """A kernel that is ready, and where it came from."""

    function: Any
    origin: Origin


_lock = Lock()
_kernels: dict[KernelKey, Kernel] = {}
_modules: list[Any] = []
"""Keeps loaded object files in memory."""


def kernels_made() -> int:
    """Kernels that this process has compiled or loaded."""
    return len(_kernels)


def kernel_origins() -> Counter[Origin]:
    """How many of them were prebuilt, found on disk, or compiled."""
    return Counter(kernel.origin for kernel in _kernels.values())


def origin_of(key: KernelKey) -> Origin | None:
    """Where a kernel came from; None if this process has not made it ready."""
    kernel = _kernels.get(key)
    return kernel.origin if kernel is not None else None


def compiled_kernel(key: KernelKey) -> Any:
    """The function of a key, as from its `compile`.

    Raises
    ------
    la_core.UnsupportedByBackend
        It is not prebuilt, and there is no compiler.
    """
    with _lock:
        if key not in _kernels:
            _kernels[key] = _make(key)
        return _kernels[key].function


def _make(key: KernelKey) -> Kernel:
    function = prebuilt_kernel(key)
    if function is not None:
        return Kernel(function, "prebuilt")
    if not compiler_installed():
        reason = why_missing(key) or f"cannot load its kernel, {ADVICE}"
        raise UnsupportedByBackend(f"{OPS[key.op]}: backend 'cute' {reason}.")
    folder, entry = _folder(), _entry(key)
    function = _load(folder, entry) if folder else None
    if function is not None:
        return Kernel(function, "disk")
    return Kernel(_compile(folder, entry, key), "compiled")


def _compile(folder: Path | None, entry: str, key: KernelKey) -> Any:
    """Compile, keep, and load what was kept: the same function as later processes get, and quicker to call.

    What was compiled by code that is no longer on disk is not kept: later processes would take it for their own.
    """
    function = key.compile()
    if sources_changed():
        folder = None
    with contextlib.ExitStack() as stack:
        home = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            _save(home, entry, function)
        except Exception as reason:
            warnings.warn(f"la-cute cannot keep compiled kernels in {home}: {reason}", RuntimeWarning, stacklevel=4)
            return function
        return _load(home, entry) or function


def _folder() -> Path | None:
    """The folder, made if need be; None if there is to be none, or if others could put code into it."""
    named = os.environ.get(ENV_CACHE_DIR)
    if named == "":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(named) if named else Path(home, "la-cute")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as reason:
        warnings.warn(f"la-cute cannot use {folder} for compiled kernels: {reason}", RuntimeWarning, stacklevel=4)
        return None
    if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        warnings.warn(
            f"la-cute keeps no compiled kernels in {folder}: others can write to it. "
            f"Run chmod go-w on it, or set {ENV_CACHE_DIR} to a folder of your own.",
            RuntimeWarning,
            stacklevel=4,
        )
        return None
    return folder


def _entry(key: KernelKey) -> str:
    """What file names of a key begin with: its digest, with the sources, the compiler and the processor it is for."""
    makers = [f"{name} {importlib.metadata.version(name)}" for name in MAKERS]
    return hashlib.sha256(repr((sources(), *makers, _processor(), key)).encode()).hexdigest()[:32]


@cache
def _processor() -> str:
    """What tells processors apart: an object file also holds code for the one it was made on."""
    facts = {platform.machine()}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts |= {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join(sorted(facts))


def _save(folder: Path, entry: str, function: Any) -> None:
    """Write the object file under a name that holds its own digest; whole, or not at all."""
    descriptor, name = tempfile.mkstemp(suffix=".o", prefix=".", dir=folder)
    os.close(descriptor)
    try:
        function.export_to_c(name, function_name=FUNCTION)
        digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()[:32]
        os.replace(name, folder / f"{entry}-{digest}.o")
    finally:
        Path(name).unlink(missing_ok=True)


def _load(folder: Path, entry: str) -> Any:
    """The function from the disk; None if it is not there. A file that is not what its name says, or that cannot be
    loaded, is set aside.
    """
    from cutlass.runtime import load_module

    for path in sorted(folder.glob(f"{entry}-*.o")):
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest()[:32] == path.stem.split("-")[1]:
                module = load_module(str(path), enable_tvm_ffi=True)
                function = module[FUNCTION]
                _modules.append(module)
                return function
        except Exception as reason:
            warnings.warn(f"la-cute cannot load {path}: {reason}", RuntimeWarning, stacklevel=4)
        with contextlib.suppress(OSError):
            os.replace(path, path.with_suffix(".damaged"))
    return None
