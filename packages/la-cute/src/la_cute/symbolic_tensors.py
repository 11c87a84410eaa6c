"""The arguments of the kernels as shapes: which sizes are symbols, which strides are fixed, what alignment is promised.

One symbol for each meaning, so that sizes which must agree are one run-time value. Strides take 64 bits: with fewer, or
fixed, the compiler would compute offsets in 32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from la_cute.decode_tiles import ACCESS_BYTES, IO_PIECE

if TYPE_CHECKING:
    from la_core.spec.decode_problem import StateLayout
    from la_cute.decode_compile_key import DecodeCompileKey
    from la_cute.window_compile_key import CursorsCompileKey, WindowCompileKey

DTYPES = {
    torch.float32: cutlass.Float32,
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
}


def _tensor(dtype: torch.dtype, shape: tuple[Any, ...], inner: tuple[int, ...] = (1,), unit: int = 1) -> Any:
    """A tensor whose outer strides are symbols; it starts, and they are, at multiples of `unit` elements."""
    outer = tuple(cute.sym_int64(divisibility=unit) for _ in shape[len(inner) :])
    return make_fake_tensor(DTYPES[dtype], shape, (*outer, *inner), assumed_align=unit * dtype.itemsize)


def _states(dtype: torch.dtype, V: int, K: int, layout: StateLayout, aligned: bool) -> Any:
    """A pool [P*H, V, K]."""
    vector = ACCESS_BYTES // dtype.itemsize if aligned else 1
    return _tensor(dtype, (cute.sym_int64(symbol="PH"), V, K), (K, 1) if layout == "vk" else (1, V), vector)


def _sizes(*names: str) -> tuple[Any, ...]:
    return tuple(cute.sym_int32(symbol=name) for name in names)


def decode_arguments(key: DecodeCompileKey) -> tuple[Any, ...]:
    """Arguments of `la_cute.decode_kernel.launch` before its spec."""
    B, G, H = _sizes("B", "G", "H")
    piece = IO_PIECE if key.aligned else 1
    return (
        _tensor(key.offsets_dtype, (B,)),
        _states(key.state_dtype, key.V, key.K, key.state_layout, key.aligned),
        _tensor(torch.float32, (H,)),
        _tensor(key.io_dtype, (B, G, key.K), (1,), piece),
        _tensor(key.io_dtype, (B, G, key.K), (1,), piece),
        _tensor(key.io_dtype, (B, H, key.V), (1,), piece),
        _tensor(key.out_dtype, (B, H, key.V)),
        cutlass.Float32(1.0),
        cutlass.Int64(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def window_arguments(key: WindowCompileKey) -> tuple[Any, ...]:
    """Arguments of the `launch` of a window operator before its spec."""
    B, G, H, T, P, N = _sizes("B", "G", "H", "T", "P", "N")
    piece = IO_PIECE if key.aligned else 1
    counts = None if key.counts_dtype is None else _tensor(key.counts_dtype, (B,))
    pool = (
        _tensor(key.offsets_dtype, (B,)),
        _states(key.state_dtype, key.V, key.K, key.state_layout, key.aligned),
        _tensor(torch.float32, (H,)),
    )
    window = (
        _tensor(key.window_dtype, (P, N, G, key.K), (1,), piece),
        _tensor(key.window_dtype, (P, N, H, key.V), (1,), piece),
        _tensor(torch.int32, (P,)),
        _tensor(torch.int32, (P,)),
    )
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if key.op == "commit":
        numbers = (cutlass.Int32(1), cutlass.Int32(1), cutlass.Int32(1), *(cutlass.Int64(1),) * 3)
        return *pool, *window, counts, *numbers, stream
    assert key.io_dtype is not None
    assert key.out_dtype is not None
    tokens = (T,) if key.op == "verify" else ()
    inputs = (
        _tensor(key.io_dtype, (B, *tokens, G, key.K), (1,), piece),
        _tensor(key.io_dtype, (B, *tokens, G, key.K), (1,), piece),
        _tensor(key.io_dtype, (B, *tokens, H, key.V), (1,), piece),
        _tensor(key.out_dtype, (B, *tokens, H, key.V)),
    )
    drafts = (counts,) if key.op == "verify" else ()
    return *pool, *inputs, *window, *drafts, cutlass.Float32(1.0), stream


def cursors_arguments(key: CursorsCompileKey) -> tuple[Any, ...]:
    """Arguments of `la_cute.cursors_kernel.launch` before its spec."""
    B, P = _sizes("B", "P")
    return (
        _tensor(key.offsets_dtype, (B,)),
        _tensor(torch.int32, (P,)),
        _tensor(torch.int32, (P,)),
        None if key.counts_dtype is None else _tensor(key.counts_dtype, (B,)),
        *(cutlass.Int32(1),) * 4,
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
