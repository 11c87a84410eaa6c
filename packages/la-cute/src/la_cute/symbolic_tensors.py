"""The arguments of decode as shapes: which sizes are symbols, which strides are fixed, what alignment is promised."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from la_cute.decode_tiles import ACCESS_BYTES, IO_PIECE

if TYPE_CHECKING:
    from la_cute.decode_compile_key import DecodeCompileKey

DTYPES = {
    torch.float32: cutlass.Float32,
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
}


def decode_arguments(key: DecodeCompileKey) -> tuple[Any, ...]:
    """Arguments of `la_cute.decode_kernel.launch` before its spec.

    One symbol for each meaning, so that sizes which must agree are one run-time value. Strides take 64 bits: with
    fewer, or fixed, the compiler would compute offsets in 32.
    """
    B, G, H = (cute.sym_int32(symbol=name) for name in ("B", "G", "H"))
    rows_of_pool = cute.sym_int64(symbol="PH")
    vector = ACCESS_BYTES // key.state_dtype.itemsize if key.aligned else 1
    piece = IO_PIECE if key.aligned else 1

    def tensor(dtype: torch.dtype, shape: tuple[Any, ...], inner: tuple[int, ...], unit: int = 1) -> Any:
        """A tensor whose outer strides are symbols; it starts, and they are, at multiples of `unit` elements."""
        outer = tuple(cute.sym_int64(divisibility=unit) for _ in shape[len(inner) :])
        return make_fake_tensor(DTYPES[dtype], shape, (*outer, *inner), assumed_align=unit * dtype.itemsize)

    return (
        tensor(key.offsets_dtype, (B,), (1,)),
        tensor(
            key.state_dtype,
            (rows_of_pool, key.V, key.K),
            (key.K, 1) if key.state_layout == "vk" else (1, key.V),
            vector,
        ),
        tensor(torch.float32, (H,), (1,)),
        tensor(key.io_dtype, (B, G, key.K), (1,), piece),
        tensor(key.io_dtype, (B, G, key.K), (1,), piece),
        tensor(key.io_dtype, (B, H, key.V), (1,), piece),
        tensor(key.out_dtype, (B, H, key.V), (1,)),
        cutlass.Float32(1.0),
        cutlass.Int64(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
