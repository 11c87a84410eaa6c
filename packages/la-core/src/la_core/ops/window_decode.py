"""decode with a window; the public function is :func:`la_core.decode`."""

from __future__ import annotations

from functools import partial

import torch
from torch.compiler import is_compiling

from la_core.ops.decode_values import ENV_CHECK_OFFSETS, check_traced
from la_core.ops.kept_plans import Tensors
from la_core.ops.window_plan import WINDOW, WindowCall
from la_core.ops.window_traced import decode_window_operator
from la_core.ops.window_values import check_window_values
from la_core.spec.argument_checks import check_number, check_optional_bool
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_checks import DECODE_WINDOW_AXES, check_decode_window, check_window_type
from la_core.spec.window_problem import WindowProblem

_ARGUMENTS = ("q", "k", "v", "s", "s_offsets", "decay_scales", *WINDOW)
_ALLOCATING = WindowCall("decode", "decode_window", _ARGUMENTS, ("s", "window.k", "window.v"), check_decode_window)
_GIVEN = WindowCall(
    "decode", "decode_window", (*_ARGUMENTS, "out"), ("out", "s", "window.k", "window.v"), check_decode_window
)


def decode_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    window: KVWindow,
    softmax_scale: float | None,
    out: torch.Tensor | None,
    backend: str,
    check_offsets: bool | None,
) -> torch.Tensor:
    """Check, choose, run; see :func:`la_core.decode`."""
    if is_compiling():
        check_window_type("decode", window)
        given = dict(zip(_ARGUMENTS, (q, k, v, s, s_offsets, decay_scales, *window.tensors()), strict=True))
        softmax_scale = check_traced("decode", DECODE_WINDOW_AXES, {**given, "out": out}, softmax_scale, check_offsets)
        if out is None:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        decode_window_operator(*given.values(), softmax_scale, out, backend, check_offsets)
        return out
    if check_offsets is not None:
        check_optional_bool("decode", "check_offsets", check_offsets)
    check_window_type("decode", window)
    tensors: Tensors = (q, k, v, s, s_offsets, decay_scales, window.k, window.v, window.start, window.length)
    call = _ALLOCATING
    if out is not None:
        call, tensors = _GIVEN, (*tensors, out)
    # What new facts call for is made up only where they are new.
    plan = call.latest_plan(backend, tensors) or call.find_plan(
        backend, tensors, partial(_check_values, window, s_offsets, softmax_scale, check_offsets)
    )
    if plan.reads_values or check_offsets or ENV_CHECK_OFFSETS:
        check_window_values("decode", plan.problem, window, s_offsets, None, check_offsets, plan)
    if softmax_scale is None:
        softmax_scale = plan.default_scale
    elif type(softmax_scale) is not float:
        softmax_scale = check_number("decode", "softmax_scale", softmax_scale)
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if plan.run is not None:
        plan.run(plan.problem, q, k, v, s, s_offsets, decay_scales, window, softmax_scale, out)
    return out


def _check_values(
    window: KVWindow,
    s_offsets: torch.Tensor,
    softmax_scale: float | None,
    check_offsets: bool | None,
    problem: WindowProblem,
) -> None:
    check_window_values("decode", problem, window, s_offsets, None, check_offsets)
    if softmax_scale is not None:
        check_number("decode", "softmax_scale", softmax_scale)
