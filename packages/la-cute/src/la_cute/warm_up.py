"""Making kernels ready before the first call that needs them."""

from __future__ import annotations

from dataclasses import replace

import torch

from la_core.spec.decode_problem import DecodeProblem, StateLayout
from la_cute.decode_tiles import choose_decode_tiles


def warmup(
    *,
    H: int,
    K: int,
    V: int,
    max_rows: int,
    io_dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    offsets_dtype: torch.dtype = torch.int32,
    state_layout: StateLayout = "vk",
    overlap: bool = False,
    arch: tuple[int, int] | None = None,
) -> int:
    """Compile, or take from the disk, every kernel that decode calls of a model can need. Touches no pool.

    Parameters
    ----------
    H, K, V
        State heads, key size and value size; see :func:`la_core.decode`.
    max_rows
        Rows of the largest batch.
    io_dtype, state_dtype, out_dtype, offsets_dtype
        Dtypes of `q`, `k`, `v`; of `s`; of `out` (None: as `io_dtype`); of `s_offsets`.
    state_layout
        `"vk"` if K is contiguous in memory, `"kv"` if V is.
    overlap
        Whether calls are made inside :func:`la_core.use_overlap`.
    arch
        Compute capability such as `(9, 0)`; None for that of the current GPU.

    Returns
    -------
    int
        Kernels that are ready.

    Raises
    ------
    la_core.UnsupportedByBackend
        la-cute does not run such calls.
    """
    from la_core import UnsupportedByBackend
    from la_cute.backend import backend
    from la_cute.compiled_kernel_cache import compiled_decode
    from la_cute.decode_compile import decode_compile_key

    largest = DecodeProblem.contiguous(
        B=max_rows,
        P=max_rows,
        H=H,
        K=K,
        V=V,
        io_dtype=io_dtype,
        state_dtype=state_dtype,
        out_dtype=out_dtype,
        offsets_dtype=offsets_dtype,
        state_layout=state_layout,
        device="cuda",
        arch=torch.cuda.get_device_capability() if arch is None else arch,
    )
    reason = backend.capabilities.decode_refusal(largest)
    if reason is not None:
        raise UnsupportedByBackend(f"warmup: backend 'cute' {reason}.")
    problems = [replace(largest, B=rows, overlap=overlap) for rows in range(1, max_rows + 1)]
    keys = {
        decode_compile_key(problem, choose_decode_tiles(problem), aligned=aligned)
        for problem in problems
        for aligned in (True, False)
    }
    for key in keys:
        compiled_decode(key)
    return len(keys)
