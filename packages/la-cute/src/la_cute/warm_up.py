"""Making kernels ready before the first call that needs them."""

from __future__ import annotations

from dataclasses import replace

import torch

from la_core.spec.decode_problem import DecodeProblem, compute_capability
from la_cute.decode_compile_key import decode_compile_key
from la_cute.decode_tiles import choose_decode_tiles


def warmup(largest: DecodeProblem, *, overlap: bool = False) -> int:
    """Compile, or take from the disk, every kernel that decode calls of a model can need. Touches no pool.

    Parameters
    ----------
    largest
        The problem of the largest batch, such as `DecodeProblem.contiguous(B=512, P=512, H=16, K=128, V=128,
        device="cuda")`. Without `arch`, for the GPU that it names.
    overlap
        Whether calls are made inside :func:`la_core.use_overlap`; so also if the problem says it.

    Returns
    -------
    int
        Kernels that are ready.

    Raises
    ------
    la_core.UnsupportedByBackend
        la-cute does not run such calls.
    la_core.BackendUnavailable
        The problem names no `arch`, and there is no GPU to ask.
    """
    from la_core import BackendUnavailable, UnsupportedByBackend
    from la_cute.backend import backend
    from la_cute.compiled_kernel_cache import compiled_decode

    reason = backend.capabilities.decode_refusal(largest)
    if reason is not None:
        raise UnsupportedByBackend(f"warmup: backend 'cute' {reason}.")
    if largest.arch is None and not torch.cuda.is_available():
        raise BackendUnavailable("warmup: no GPU is here, and the problem names no arch, such as arch=(9, 0).")
    arch = largest.arch or compute_capability(largest.device)
    largest = replace(largest, arch=arch, overlap=overlap or largest.overlap)
    problems = [replace(largest, B=rows) for rows in range(1, largest.B + 1)]
    keys = {
        decode_compile_key(problem, choose_decode_tiles(problem), aligned=aligned)
        for problem in problems
        for aligned in (True, False)
    }
    for key in keys:
        compiled_decode(key)
    return len(keys)
