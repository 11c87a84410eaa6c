"""Compiling the kernel of the cursors: a function of a small key, without tensors, launch or GPU."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from la_cute.cursors_kernel import launch
from la_cute.symbolic_tensors import cursors_arguments
from la_cute.window_compile_key import CursorsCompileKey


def compile_cursors(key: CursorsCompileKey, options: str = "") -> Any:
    """Compile for the key's architecture; `options` are further ones of the compiler.

    The result takes torch tensors and numbers, those of the kernel's `launch` up to the stream, and launches on the
    current stream of their device.
    """
    return cute.compile(
        launch, *cursors_arguments(key), options=f"--enable-tvm-ffi --gpu-arch={key.arch} {options}".strip()
    )
