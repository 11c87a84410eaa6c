"""Compiling a kernel for a named architecture: without tensors, without a launch, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_SCALARS = {
    "scale": "fp32",
    **dict.fromkeys(("B", "T", "N", "H", "group", "accepted", "room", "clear", "NEVER"), "i32"),
}
"""Types of the run-time numbers; all others are i64."""


def compile_kernel(
    kernel: Any,
    arch: int,
    pointers: Mapping[str, torch.dtype],
    constants: Mapping[str, Any],
    *,
    num_warps: int,
    overlap: bool = False,
) -> CompiledKernel:
    """Compile for an architecture such as 90, or take the result from Triton's cache on disk.

    `pointers` says what the pointer arguments point to; `constants` are the compile-time arguments.
    """
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = _POINTERS[pointers[name]]
        else:
            signature[name] = _SCALARS.get(name, "i64")
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=positions),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": 1, "launch_pdl": overlap, "enable_fp_fusion": False},
    )
