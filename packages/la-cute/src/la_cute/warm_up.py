"""Making kernels ready before the first call that needs them."""

from __future__ import annotations

from dataclasses import replace

import torch

from la_core.spec.decode_problem import DecodeProblem
from la_cute.decode_compile_key import decode_compile_key
from la_cute.decode_tiles import choose_decode_tiles


def warmup(largest: DecodeProblem, *, overlap: bool = False) -> int:
    """Compile, or take from the disk, every kernel that decode calls of a model can need. Touches no pool.

    Parameters
    ----------
    largest
        The problem of the largest batch, such as `DecodeProblem.contiguous(B=512, P=512, H=16, K=128, V=128,
        device="cuda")`. Without `arch`, for the current GPU.
    overlap
        Whether calls are made inside :func:`la_core.use_overlap`.

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

    reason = backend.capabilities.decode_refusal(largest)
    if reason is not None:
        raise UnsupportedByBackend(f"warmup: backend 'cute' {reason}.")
    arch = largest.arch or torch.cuda.get_device_capability()
    problems = [replace(largest, B=rows, arch=arch, overlap=overlap) for rows in range(1, largest.B + 1)]
    keys = {
        decode_compile_key(problem, choose_decode_tiles(problem), aligned=aligned)
        for problem in problems
        for aligned in (True, False)
    }
    for key in keys:
        compiled_decode(key)
    return len(keys)
