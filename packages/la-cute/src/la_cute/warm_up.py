"""Making kernels ready before the first call that needs them."""

from __future__ import annotations

from dataclasses import replace

import torch

from la_core.spec.decode_problem import DecodeProblem, compute_capability
from la_cute.kernel_keys import KernelKey, keys_of_problem
from la_cute.window_problems import window_problems


def warmup(largest: DecodeProblem, *, overlap: bool = False, places: int = 0, layers: int = 1) -> int:
    """Compile, or take from the disk, every kernel that the calls of a model can need. Touches no pool.

    Parameters
    ----------
    largest
        The problem of the largest batch, such as `DecodeProblem.contiguous(B=512, P=512, H=16, K=128, V=128,
        device="cuda")`. Without `arch`, for the GPU that it names.
    overlap
        Whether calls are made inside :func:`la_core.use_overlap`; so also if the problem says it.
    places
        Places of a window in the dtype of q, k and v, for the operators that work on one; 0 for decode alone.
    layers
        Layers of a call of `commit_layers`.

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
    from la_cute.compiled_kernel_cache import compiled_kernel

    reason = backend.capabilities.decode_refusal(largest)
    if reason is not None:
        raise UnsupportedByBackend(f"warmup: backend 'cute' {reason}.")
    if largest.arch is None and not torch.cuda.is_available():
        raise BackendUnavailable("warmup: no GPU is here, and the problem names no arch, such as arch=(9, 0).")
    arch = largest.arch or compute_capability(largest.device)
    largest = replace(largest, arch=arch, overlap=overlap or largest.overlap)
    keys: set[KernelKey] = set()
    for rows in range(1, largest.B + 1):
        problem = replace(largest, B=rows)
        windows = window_problems(problem, places, (None, torch.int32, torch.int64)) if places else ()
        keys.update(keys_of_problem(problem))
        for window in windows:
            keys.update(keys_of_problem(window))
            if window.op == "commit":
                keys.update(keys_of_problem(replace(window, L=layers)))
    for key in keys:
        compiled_kernel(key)
    return len(keys)
