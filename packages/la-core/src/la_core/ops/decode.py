"""decode: one token per row against a pool of Lightning Attention states."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from la_core.backends.choose_backend import AUTO, Choice, current_defaults, explain
from la_core.ops.decode_plan import DecodePlan, find_plan, latest
from la_core.ops.decode_traced import decode_operator
from la_core.ops.decode_values import (
    ENV_CHECK_OFFSETS,
    TENSORS,
    check_memory,
    check_offsets_on_gpu,
    check_traced,
)
from la_core.ops.window_decode import decode_window
from la_core.spec.argument_checks import check_number, check_optional_bool
from la_core.spec.decode_checks import AXES
from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.kv_window import KVWindow
from la_core.spec.state_pool_rules import check_offset_values
from la_core.spec.window_problem import WindowProblem


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
    window: KVWindow | None = None,
    backend: str = AUTO,
    check_offsets: bool | None = None,
) -> torch.Tensor:
    """One Lightning Attention decode step over a state pool, in place.

    For every row `b` with a slot `p = s_offsets[b] >= 0` and every head `h`, with `g = h // (H // G)`::

        S'[h]    = exp(-decay_scales[h]) * S[h] + outer(v[b, h], k[b, g])      S[h] = s[p*H + h], [V, K]
        out[b,h] = softmax_scale * S'[h] @ q[b, g]
        s[p*H + h] = S'[h]

    A row with a negative offset is padding: its output is zero and no state is touched.

    Parameters
    ----------
    q, k : Tensor [B, G, K], bfloat16, float16 or float32
        Queries and keys, of one dtype with `v`. Last stride 1, the others free.
    v : Tensor [B, H, V]
        Values. `H` must be a multiple of `G`.
    s : Tensor [P*H, V, K], float32, bfloat16 or float16
        The pool, updated in place. Each `V x K` state is dense with K or with V contiguous (a transposed view of
        `[P*H, K, V]` memory); the row stride is free.
    s_offsets : Tensor [B], int32 or int64, contiguous
        The slot of each row, each used at most once; negative for padding rows.
    decay_scales : Tensor [H], float32, contiguous
        Positive slopes; one step multiplies the state by `exp(-decay_scales[h])`. See :func:`la_core.decay_slopes`.
    softmax_scale : float, optional
        Factor of the output; `K ** -0.5` by default.
    out : Tensor [B, H, V], bfloat16, float16 or float32, optional
        Where to write; last stride 1, the others free. Allocated in `q.dtype` by default.
    window : KVWindow, optional
        Recent tokens of each slot whose contribution is not yet in `s`. `S[h]` above is then the value of the slot, and
        the token is written to the window; only a full window is brought into `s`, with the token.
        :func:`la_core.advance` follows, once for all layers. See the page on the KV window.
    backend : str
        A backend's name, or `"auto"`: the default of :func:`la_core.use_backend` or `LA_BACKEND`, else the first of
        cute, triton, ref that runs the call for CUDA tensors, and ref for CPU tensors.
    check_offsets : bool, optional
        Offset values on the CPU are always checked. On a GPU True checks them at the price of a synchronisation
        (`LA_CHECK_OFFSETS=1` makes that the default outside of graph capture, False overrides it); unchecked, an
        offset `>= P` is treated as padding, and two rows that name one slot leave that slot undefined.

    Returns
    -------
    Tensor [B, H, V]
        `out`, or the tensor allocated for it.

    Raises
    ------
    SpecViolation
        The call breaks the contract. Nothing has been written.
    UnsupportedByBackend
        The call is legal, but the backend cannot run it.
    BackendUnavailable
        The backend is not installed or cannot be loaded.

    Notes
    -----
    The recurrence is that of Lightning Attention-2 (Qin et al., 2024, arXiv:2401.04658) as MiniMax-01 uses it
    (arXiv:2501.08313). Inputs are widened to float32, all arithmetic is float32, each result is rounded once.
    """
    if window is not None:
        return decode_window(*(q, k, v, s, s_offsets, decay_scales, window), softmax_scale, out, backend, check_offsets)
    if is_compiling():
        tensors = dict(zip(TENSORS, (q, k, v, s, s_offsets, decay_scales, out), strict=True))
        softmax_scale = check_traced("decode", AXES, tensors, softmax_scale, check_offsets)
        if out is None:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        decode_operator(q, k, v, s, s_offsets, decay_scales, softmax_scale, out, backend, check_offsets)
        return out
    if check_offsets is not None:
        check_optional_bool("decode", "check_offsets", check_offsets)
    if out is None:
        plan = latest.allocating
        if (
            plan is None
            or not plan.guard(q, k, v, s, s_offsets, decay_scales)
            or plan.asked != backend
            or plan.defaults is not current_defaults.get()
        ):
            plan = latest.allocating = find_plan(
                backend, (q, k, v, s, s_offsets, decay_scales), softmax_scale, check_offsets
            )
    else:
        plan = latest.given
        if (
            plan is None
            or not plan.guard(q, k, v, s, s_offsets, decay_scales, out)
            or plan.asked != backend
            or plan.defaults is not current_defaults.get()
        ):
            plan = latest.given = find_plan(
                backend, (q, k, v, s, s_offsets, decay_scales, out), softmax_scale, check_offsets
            )

    allocated = None
    direct = plan.direct
    if (
        direct is not None
        and (softmax_scale is None or type(softmax_scale) is float)
        and not (check_offsets or (ENV_CHECK_OFFSETS and check_offsets is None))
    ):
        target = out
        if target is None:
            target = allocated = _new_output(v, plan)
        scale = plan.default_scale if softmax_scale is None else softmax_scale
        if direct(q, k, v, s, s_offsets, decay_scales, target, scale):
            return target

    # What is written must not overlap anything else. Extents that do not meet settle it; the rest is judged exactly.
    q_bytes, k_bytes, v_bytes, s_bytes, offsets_bytes, decay_bytes = plan.extents[:6]
    q_start, k_start, v_start = q.data_ptr(), k.data_ptr(), v.data_ptr()
    s_start, offsets_start, decay_start = s.data_ptr(), s_offsets.data_ptr(), decay_scales.data_ptr()
    s_end = s_start + s_bytes
    if (
        (q_start < s_end and s_start < q_start + q_bytes)
        or (k_start < s_end and s_start < k_start + k_bytes)
        or (v_start < s_end and s_start < v_start + v_bytes)
        or (offsets_start < s_end and s_start < offsets_start + offsets_bytes)
        or (decay_start < s_end and s_start < decay_start + decay_bytes)
    ):
        check_memory((q, k, v, s, s_offsets, decay_scales), plan.disjoint)
    if out is not None:
        out_start = out.data_ptr()
        out_end = out_start + plan.extents[6]
        if (
            (s_start < out_end and out_start < s_end)
            or (q_start < out_end and out_start < q_start + q_bytes)
            or (k_start < out_end and out_start < k_start + k_bytes)
            or (v_start < out_end and out_start < v_start + v_bytes)
            or (offsets_start < out_end and out_start < offsets_start + offsets_bytes)
            or (decay_start < out_end and out_start < decay_start + decay_bytes)
        ):
            check_memory((q, k, v, s, s_offsets, decay_scales, out), plan.disjoint)

    if plan.reads_values:
        offsets = s_offsets.tolist()
        if offsets != plan.checked_offsets:
            check_offset_values("decode", offsets, plan.problem.P)
            plan.checked_offsets = offsets
    elif check_offsets or (ENV_CHECK_OFFSETS and check_offsets is None):
        check_offsets_on_gpu(s_offsets, plan.problem.P, explicit=bool(check_offsets))

    if softmax_scale is None:
        softmax_scale = plan.default_scale
    elif type(softmax_scale) is not float:
        softmax_scale = check_number("decode", "softmax_scale", softmax_scale)
    if out is None:
        out = _new_output(v, plan) if allocated is None else allocated
    if plan.run is not None:
        plan.run(plan.problem, q, k, v, s, s_offsets, decay_scales, softmax_scale, out)
        if plan.offer is not None:
            plan.take_offer()
    return out


def _new_output(v: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
    return torch.empty_like(v) if plan.like_v else torch.empty_like(v, memory_format=torch.contiguous_format)


def explain_choice(problem: DecodeProblem | WindowProblem, *, backend: str = AUTO) -> Choice:
    """Which backend would run a call, and why each of the others would not.

    Parameters
    ----------
    problem : DecodeProblem or WindowProblem
        From :func:`la_core.decode_problem` or, for an operator with a window, :func:`la_core.window_problem` for
        tensors at hand; or :meth:`la_core.DecodeProblem.contiguous` and :meth:`la_core.WindowProblem.contiguous`.
    backend : str
        As in :func:`decode`.

    Returns
    -------
    Choice
        Prints as a sentence; `.backend` is the chosen one or None, `.verdicts` holds a reason for each.
    """
    return explain(problem, backend, problem.op if isinstance(problem, WindowProblem) else "decode")
