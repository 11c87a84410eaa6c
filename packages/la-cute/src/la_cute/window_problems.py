"""Problems of the window operators that go with one of decode, for questions asked without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.window_problem import WindowOp, WindowProblem


def window_problems(
    problem: DecodeProblem, places: int, counts: Sequence[torch.dtype | None]
) -> tuple[WindowProblem, ...]:
    """Those of a model whose decode has this problem, with windows of `places` in the dtype of q, k and v.

    `counts` are the dtypes of draft lengths and of accepted tokens, None for calls without such a tensor.
    """

    def one(op: WindowOp, dtype: torch.dtype | None) -> WindowProblem:
        found = WindowProblem.contiguous(
            op,
            B=problem.B,
            P=problem.P,
            N=places,
            H=problem.H,
            G=problem.G,
            K=problem.K,
            V=problem.V,
            io_dtype=problem.io_dtype,
            state_dtype=problem.state_dtype,
            out_dtype=problem.out_dtype,
            offsets_dtype=problem.offsets_dtype,
            counts_dtype=dtype,
            state_layout=problem.state_layout,
            device=problem.device,
            arch=problem.arch,
        )
        return replace(found, overlap=problem.overlap)

    with_counts: tuple[WindowOp, ...] = ("verify", "commit", "advance")
    return one("decode_window", None), *(one(op, dtype) for op in with_counts for dtype in counts)
