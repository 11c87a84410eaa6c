"""Problems of the window operators that go with one of decode, for questions asked without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.window_problem import WindowProblem


def window_problems(
    problem: DecodeProblem, places: int, counts: Sequence[torch.dtype | None]
) -> tuple[WindowProblem, ...]:
    """Those of a model whose decode has this problem, with windows of `places` in the dtype of q, k and v.

    `counts` are the dtypes of draft lengths and of accepted tokens, None for calls without such a tensor. Strides are
    left out: no kernel is made for one.
    """
    decode_window = WindowProblem(
        op="decode_window",
        L=1,
        B=problem.B,
        T=1,
        P=problem.P,
        N=places,
        H=problem.H,
        G=problem.G,
        K=problem.K,
        V=problem.V,
        io_dtype=problem.io_dtype,
        out_dtype=problem.out_dtype,
        window_dtype=problem.io_dtype,
        state_dtype=problem.state_dtype,
        offsets_dtype=problem.offsets_dtype,
        counts_dtype=None,
        state_layout=problem.state_layout,
        device=problem.device,
        arch=problem.arch,
        overlap=problem.overlap,
    )
    verify = replace(decode_window, op="verify")
    commit = replace(decode_window, op="commit", io_dtype=None, out_dtype=None)
    advance = replace(commit, op="advance", window_dtype=None, state_dtype=None)
    return decode_window, *(replace(one, counts_dtype=dtype) for one in (verify, commit, advance) for dtype in counts)
