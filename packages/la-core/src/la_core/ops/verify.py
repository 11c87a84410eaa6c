"""verify: outputs of draft tokens against a pool of states and a window, without a write to the states."""

from __future__ import annotations

from functools import partial

import torch
from torch.compiler import is_compiling

from la_core.backends.choose_backend import AUTO
from la_core.ops.decode_values import ENV_CHECK_OFFSETS, check_traced
from la_core.ops.kept_plans import Tensors
from la_core.ops.window_plan import WINDOW, WindowCall
from la_core.ops.window_traced import verify_operator
from la_core.ops.window_values import check_window_values
from la_core.spec.argument_checks import check_number, check_optional_bool
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_checks import VERIFY_AXES, check_verify, check_window_type
from la_core.spec.window_problem import WindowProblem

_ARGUMENTS = ("q", "k", "v", "s", "s_offsets", "decay_scales", *WINDOW)
_CALLS = {
    optional: WindowCall(
        "verify",
        "verify",
        (*_ARGUMENTS, *optional),
        (*(name for name in optional if name == "out"), "window.k", "window.v"),
        check_verify,
    )
    for optional in ((), ("draft_lengths",), ("out",), ("draft_lengths", "out"))
}
_PLAIN, _RAGGED, _GIVEN, _RAGGED_GIVEN = _CALLS.values()


def verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    window: KVWindow,
    *,
    draft_lengths: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
    backend: str = AUTO,
    check_offsets: bool | None = None,
) -> torch.Tensor:
    """Outputs of up to `T` draft tokens per row; the drafts are kept in the window, the states stay as they are.

    Row `b` has `m = draft_lengths[b]` drafts behind the `n = window.length[p]` pending tokens of its slot
    `p = s_offsets[b] >= 0`. For every head `h` with `g = h // (H // G)` and `t < m`::

        S_t[h]       = exp(-decay_scales[h]) * S_(t-1)[h] + outer(v[b, t, h], k[b, t, g])     S_(-1): the slot's value
        out[b, t, h] = softmax_scale * S_t[h] @ q[b, t, g]

    Outputs behind `m` and those of padding rows are zero. Draft `t` is written to the place `(start + n + t) % N`. The
    value of the slot does not change: verifying again replaces the drafts, `advance` or `commit` accepts a prefix.

    Parameters
    ----------
    q, k : Tensor [B, T, G, K], bfloat16, float16 or float32
        Queries and keys of the drafts, of one dtype with `v`; `T` from 1 to `N`. Last stride 1, the others free.
    v : Tensor [B, T, H, V]
        Values. `H` must be a multiple of `G`.
    s, s_offsets, decay_scales
        As in :func:`la_core.decode`; only read.
    window : KVWindow
        Recent tokens of each slot, of this layer. The drafts' places of `window.k` and `window.v` are written.
    draft_lengths : Tensor [B], int32 or int64, contiguous, optional
        Drafts of each row, from 0 to `T`; `T` for every row by default. On a GPU limited to 0 ... `T`.
    softmax_scale : float, optional
        Factor of the output; `K ** -0.5` by default.
    out : Tensor [B, T, H, V], bfloat16, float16 or float32, optional
        Where to write; last stride 1, the others free. Allocated in `q.dtype` by default.
    backend : str
        As in :func:`la_core.decode`.
    check_offsets : bool, optional
        As in :func:`la_core.decode`, for offsets, cursors, draft lengths and room. Unchecked, a row with
        `n + m > N` is not written and its outputs `t < m` are NaN.

    Returns
    -------
    Tensor [B, T, H, V]
        `out`, or the tensor allocated for it.

    Raises
    ------
    SpecViolation
        The call breaks the contract, or a row whose values could be read lacks room. Nothing has been written.
    UnsupportedByBackend, BackendUnavailable
        As :func:`la_core.decode`.

    Notes
    -----
    Keeping drafts as k and v instead of temporary states follows KVBuffer (arXiv:2605.19049). Powers of the decay
    have exponents `<= 0` only, so any slope is finite.
    """
    if is_compiling():
        check_window_type("verify", window)
        given = dict(zip(_ARGUMENTS, (q, k, v, s, s_offsets, decay_scales, *window.tensors()), strict=True))
        shown = {**given, "draft_lengths": draft_lengths, "out": out}
        optional = ("draft_lengths", "out")
        softmax_scale = check_traced("verify", VERIFY_AXES, shown, softmax_scale, check_offsets, optional)
        if out is None:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        verify_operator(*given.values(), draft_lengths, softmax_scale, out, backend, check_offsets)
        return out
    if check_offsets is not None:
        check_optional_bool("verify", "check_offsets", check_offsets)
    check_window_type("verify", window)
    tensors: Tensors = (q, k, v, s, s_offsets, decay_scales, window.k, window.v, window.start, window.length)
    call = _PLAIN
    if draft_lengths is not None:
        call, tensors = _RAGGED, (*tensors, draft_lengths)
    if out is not None:
        call, tensors = (_GIVEN if call is _PLAIN else _RAGGED_GIVEN), (*tensors, out)
    # What new facts call for is made up only where they are new.
    plan = call.latest_plan(backend, tensors) or call.find_plan(
        backend, tensors, partial(_check_values, window, s_offsets, draft_lengths, softmax_scale, check_offsets)
    )
    if plan.reads_values or check_offsets or ENV_CHECK_OFFSETS:
        check_window_values("verify", plan.problem, window, s_offsets, draft_lengths, check_offsets, plan)
    if softmax_scale is None:
        softmax_scale = plan.default_scale
    elif type(softmax_scale) is not float:
        softmax_scale = check_number("verify", "softmax_scale", softmax_scale)
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if plan.run is not None:
        plan.run(plan.problem, q, k, v, s, s_offsets, decay_scales, window, draft_lengths, softmax_scale, out)
    return out


def _check_values(
    window: KVWindow,
    s_offsets: torch.Tensor,
    draft_lengths: torch.Tensor | None,
    softmax_scale: float | None,
    check_offsets: bool | None,
    problem: WindowProblem,
) -> None:
    check_window_values("verify", problem, window, s_offsets, draft_lengths, check_offsets)
    if softmax_scale is not None:
        check_number("verify", "softmax_scale", softmax_scale)
