"""Kernels that were compiled ahead of time: for an architecture, a library for decode and one for the window operators.

`python -m la_cute.prebuild` makes them, each with a manifest beside it. A library is used only if the sources of this
package are those it was made of, if it is the file that was made, and if tvm-ffi still speaks the interface that it was
made for. A look costs a few milliseconds, once a process and library: it reads the sources and that library.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any

from la_core.conformance.source_hash import source_hash
from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.window_problem import WindowProblem
from la_cute.decode_tiles import ACCESS_BYTES
from la_cute.kernel_keys import KernelKey, keys_of_problem
from la_cute.prebuilt_keys import Family, family_of, function_name

ENV_PREBUILT = "LA_CUTE_PREBUILT"
"""`0`: prebuilt kernels are not used."""

FOLDER = Path(__file__).parent.with_name("la_cute_kernels")
"""Where the libraries are."""

DECODE_CALL = "decode_call"
"""What every library is as an extension module of CPython: see `decode_call.c`."""

FFI = "apache-tvm-ffi"
"""The distribution through which functions are called, of any source."""

COMPILER, COMPILER_VERSION = "nvidia-cutlass-dsl", "4.8."
"""The compiler's distribution, and how its version begins."""

MAKERS = (COMPILER, f"{COMPILER}-libs-base", f"{COMPILER}-libs-cu13", FFI)
"""Distributions whose versions a compiled kernel depends on."""

PIECE_BYTES = 256 * 1024
"""What is read of a library at a time: it stays in a cache of the processor until it is hashed."""

ADVICE = 'and no compiler to make one: run python3 -m pip install "la-cute[jit]"'


@dataclass(frozen=True)
class Manifest:
    """What is written beside a library.

    Attributes
    ----------
    sources
        Hash of this package's sources that it was made of.
    library
        SHA-256 of the library, whose name holds the beginning of it.
    made_with
        Versions of the distributions that made it.
    glibc
        The lowest version of glibc that can load it, such as `(2, 34)`.
    functions
        Names of its functions.
    """

    sources: str
    library: str
    made_with: dict[str, str]
    glibc: tuple[int, int]
    functions: tuple[str, ...]

    def write(self, path: Path) -> None:
        """Write it as JSON; whole, or not at all."""
        draft = path.with_name(f".{path.name}")
        draft.write_text(json.dumps(vars(self), indent=0), encoding="utf-8")
        os.replace(draft, path)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read what `write` wrote; a ValueError says that something else did."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            values["glibc"], values["functions"] = tuple(values["glibc"]), tuple(values["functions"])
            manifest = cls(**values)
            if FFI not in manifest.made_with:
                raise KeyError(FFI)
        except (KeyError, TypeError) as reason:
            raise ValueError(f"{path.name} is no manifest: {reason!r}") from reason
        return manifest


@dataclass(frozen=True)
class Library:
    """A library, or why there is none to use."""

    path: Path
    functions: frozenset[str] = frozenset()
    flaw: str = ""


def library_name(arch: str, family: Family) -> str:
    """What the files of a library begin with."""
    return f"{arch}-{family}"


def manifest_path(folder: Path, name: str) -> Path:
    """Where the manifest of a library is."""
    return folder / f"{name}.json"


def library_path(folder: Path, name: str, digest: str) -> Path:
    """Where a library is. A new one has a new name: a process that has looked at the one before still finds that, or
    nothing.
    """
    return folder / f"{name}-{digest[:16]}.so"


def library_digest(path: Path) -> str:
    """SHA-256 of a library: the quickest hash of `hashlib` where processors have instructions for it."""
    # Mapped, it takes a quarter longer: each page is a fault.
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            digest.update(piece[:size])
    return digest.hexdigest()


@functools.cache
def compiler_installed() -> bool:
    """Whether all that compiles kernels is here, in a version that it was tried in; imports nothing."""
    try:
        versions = [importlib.metadata.version(name) for name in MAKERS]
    except importlib.metadata.PackageNotFoundError:
        return False
    return versions[0].startswith(COMPILER_VERSION) and importlib.util.find_spec("cutlass") is not None


@functools.cache
def sources() -> str:
    """Hash of this package's sources as they were when this process first asked: those that it runs."""
    return str(source_hash("la_cute"))


def sources_changed() -> bool:
    """Whether the files differ by now from what this process runs."""
    return str(source_hash("la_cute")) != sources()


def refusal(problem: DecodeProblem | WindowProblem) -> str | None:
    """Why no kernel of the problem is there or can be made; None if one is or can."""
    if compiler_installed() or problem.arch is None:
        return None
    keys = keys_of_problem(problem)
    if isinstance(problem, DecodeProblem) and problem.s_row_stride * problem.state_dtype.itemsize % ACCESS_BYTES:
        keys = keys[1:]
    # The addresses of a call are not known here, so a problem needs the kernel for any address as well.
    return next(filter(None, map(why_missing, keys)), None)


def why_missing(key: KernelKey) -> str | None:
    """The reason, in a backend's words, why a key cannot be had without a compiler; None if it is prebuilt."""
    if os.environ.get(ENV_PREBUILT) == "0":
        return f"may use no prebuilt kernel ({ENV_PREBUILT}=0), {ADVICE}"
    found = _of_library(key)
    library = find_library(FOLDER, found.arch, family_of(found))
    if library.flaw:
        return f"{library.flaw}, {ADVICE}"
    if function_name(found) not in library.functions:
        return f"has no prebuilt kernel for this call, {ADVICE}"
    return None


def prebuilt_kernel(key: KernelKey) -> Any:
    """The function of a key, as from its `compile`; None if it is not prebuilt."""
    name = function_name(_of_library(key))
    return _from_library(key, lambda path: _module(path)[name])


def decode_call_of(key: KernelKey) -> Any:
    """The `make` of `decode_call.c`, from the library of a key; None if that is not prebuilt, or without the stable
    interface of CPython.
    """
    if sys.implementation.name != "cpython" or "t" in getattr(sys, "abiflags", ""):
        return None
    return _from_library(key, lambda path: load_decode_call(path).make)


def _from_library(key: KernelKey, take: Callable[[Path], Any]) -> Any:
    """What `take` finds in the library that has a key; None without one."""
    if why_missing(key) is not None:
        return None
    found = _of_library(key)
    path = find_library(FOLDER, found.arch, family_of(found)).path
    try:
        return take(path)
    except (RuntimeError, AttributeError, ImportError, SystemError) as reason:
        warnings.warn(f"la-cute cannot load {path}: {reason}", RuntimeWarning, stacklevel=5)
        return None


@functools.cache
def _module(path: Path) -> Any:
    from tvm_ffi import load_module

    return load_module(path)


@functools.cache
def load_decode_call(path: Path) -> Any:
    """A library as an extension module."""
    loader = ExtensionFileLoader(DECODE_CALL, str(path))
    module = importlib.util.module_from_spec(ModuleSpec(DECODE_CALL, loader, origin=str(path)))
    loader.exec_module(module)
    return module


@functools.cache
def find_library(folder: Path, arch: str, family: Family) -> Library:
    """The library of an architecture and a family, looked at once a process."""
    name, kernels = library_name(arch, family), f"prebuilt {family} kernels for {arch}"
    path = manifest_path(folder, name)
    if not path.exists():
        return Library(path, flaw=f"has no {kernels}")
    try:
        manifest = Manifest.read(path)
        path = library_path(folder, name, manifest.library)
        digest = library_digest(path)
    except (OSError, ValueError) as reason:
        return _damaged(path, kernels, str(reason))
    if manifest.sources != sources():
        return Library(path, flaw=f"has {kernels} made from other sources")
    if manifest.library != digest:
        return _damaged(path, kernels, "it is not the file that its manifest describes")
    needed, here = _interface(manifest.made_with[FFI]), _interface(_version_here())
    if needed != here:
        return Library(path, flaw=f"has {kernels} that need {FFI} {needed}, got {here}")
    return Library(path, frozenset(manifest.functions))


def _interface(version: str) -> str:
    """The part of tvm-ffi's version that changes with its binary interface, as its release notes promise."""
    return ".".join(version.split(".")[:2])


def _version_here() -> str:
    try:
        return importlib.metadata.version(FFI)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _damaged(path: Path, kernels: str, reason: str) -> Library:
    warnings.warn(f"la-cute does not use {path}: {reason}", RuntimeWarning, stacklevel=6)
    return Library(path, flaw=f"has damaged {kernels}")


def _of_library(key: KernelKey) -> KernelKey:
    """The key under which a key is prebuilt: before Hopper, code for 8.0 runs on all of 8.x."""
    return key._replace(arch="sm_80") if key.arch.startswith("sm_8") else key
