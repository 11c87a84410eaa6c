"""fold, commit and commit_layers: tokens of a window brought into the states."""

from __future__ import annotations

from functools import partial

import torch
from torch.compiler import is_compiling

from la_core.backends.choose_backend import AUTO
from la_core.ops.decode_values import ENV_CHECK_OFFSETS, check_traced
from la_core.ops.kept_plans import Tensors
from la_core.ops.window_plan import WINDOW, WindowCall
from la_core.ops.window_traced import commit_operator
from la_core.ops.window_values import check_window_values
from la_core.spec.argument_checks import check_optional_bool
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_checks import COMMIT_AXES, COMMIT_LAYERS_AXES, check_commit, check_numbers, check_window_type
from la_core.spec.window_problem import WindowProblem

_ARGUMENTS = (*WINDOW, "s", "s_offsets", "decay_scales")


class _Calls:
    """The calls of one operator: `accepted` as a number for all rows, or one for each."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.one = WindowCall(op, "commit", _ARGUMENTS, ("s",), check_commit)
        self.each = WindowCall(op, "commit", (*_ARGUMENTS, "accepted"), ("s",), check_commit)


CALLS = {op: _Calls(op) for op in ("fold", "commit", "commit_layers")}


def fold(
    window: KVWindow,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    *,
    room: int | None = None,
    backend: str = AUTO,
    check_offsets: bool | None = None,
) -> None:
    """Bring the pending tokens of each row's slot into its state.

    For every row `b` with a slot `p = s_offsets[b] >= 0`, `n = length[p]` and every head `h`, `g = h // (H // G)`::

        s[p*H + h] = exp(-d*n) * s[p*H + h] + sum over i < n of exp(-d*(n-1-i)) * outer(v_i[h], k_i[g])

    with `d = decay_scales[h]` and the tokens `i` at the places `(start + i) % N`. A row with nothing pending keeps its
    state bit for bit. The cursors stay: :func:`la_core.clear` follows, once for all layers.

    Parameters
    ----------
    window : KVWindow
        Of this layer; only read.
    s : Tensor [P*H, V, K], float32, bfloat16 or float16
        The pool, updated in place; layouts as in :func:`la_core.decode`.
    s_offsets : Tensor [B], int32 or int64, contiguous
        The slot of each row, each used at most once; negative for padding rows.
    decay_scales : Tensor [H], float32, contiguous
        Positive slopes.
    room : int, optional
        From 1 to `N`: fold only the rows with `n + room > N`, those that have no place for as many drafts.
    backend, check_offsets
        As in :func:`la_core.decode`, for offsets and cursors.

    Raises
    ------
    SpecViolation, UnsupportedByBackend, BackendUnavailable
        As :func:`la_core.decode`.
    """
    run_commit(CALLS["fold"], window, s, s_offsets, decay_scales, 0, room, backend, check_offsets)


def commit(
    window: KVWindow,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    accepted: torch.Tensor | int,
    *,
    room: int | None = None,
    backend: str = AUTO,
    check_offsets: bool | None = None,
) -> None:
    """Bring the pending tokens of each row's slot, and the accepted drafts behind them, into its state.

    :func:`fold` over the first `n + accepted[b]` tokens. The cursors stay: :func:`la_core.clear` follows, once for all
    layers, unless no token is pending anyway; with `room` :func:`la_core.advance` with the same `room` does.

    Parameters
    ----------
    window, s, s_offsets, decay_scales, backend, check_offsets
        As in :func:`fold`.
    accepted : Tensor [B], int32 or int64, contiguous, or int
        Drafts of each row to bring in, from 0 to `N - n`. Unchecked, it is limited.
    room : int, optional
        From 1 to `N`: only the rows with `n + accepted[b] + room > N`, those that would have no place for as many
        drafts if the accepted ones became pending.

    Raises
    ------
    SpecViolation, UnsupportedByBackend, BackendUnavailable
        As :func:`la_core.decode`.
    """
    run_commit(CALLS["commit"], window, s, s_offsets, decay_scales, accepted, room, backend, check_offsets)


def commit_layers(
    window: KVWindow,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    accepted: torch.Tensor | int,
    *,
    room: int | None = None,
    backend: str = AUTO,
    check_offsets: bool | None = None,
) -> None:
    """:func:`commit` for all layers of a model at once.

    Parameters
    ----------
    window : KVWindow
        Stacked: `k [L, P, N, G, K]` and `v [L, P, N, H, V]`.
    s : Tensor [L, P*H, V, K]
        The pools of the layers; each as in :func:`la_core.decode`, the stride between them free.
    s_offsets : Tensor [B], int32 or int64, contiguous
        The slot of each row, the same in every layer.
    decay_scales : Tensor [L, H], float32, contiguous
        Positive slopes of each layer.
    accepted, room, backend, check_offsets
        As in :func:`commit`.

    Raises
    ------
    SpecViolation, UnsupportedByBackend, BackendUnavailable
        As :func:`la_core.decode`.
    """
    run_commit(CALLS["commit_layers"], window, s, s_offsets, decay_scales, accepted, room, backend, check_offsets)


def run_commit(
    calls: _Calls,
    window: KVWindow,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    accepted: torch.Tensor | int,
    room: int | None,
    backend: str,
    check_offsets: bool | None,
) -> None:
    """Check, choose, run; see :func:`fold` and :func:`commit`."""
    op = calls.op
    if is_compiling():
        check_window_type(op, window)
        each, for_all = (accepted, 0) if isinstance(accepted, torch.Tensor) else (None, accepted)
        given = dict(zip(_ARGUMENTS, (*window.tensors(), s, s_offsets, decay_scales), strict=True))
        axes = COMMIT_LAYERS_AXES if op == "commit_layers" else COMMIT_AXES
        check_traced(op, axes, {**given, "accepted": each}, None, check_offsets, ("accepted",))
        check_numbers(op, accepted, room, window.k.shape[-3])
        commit_operator(op, *given.values(), each, for_all, room, backend, check_offsets)
        return
    if check_offsets is not None:
        check_optional_bool(op, "check_offsets", check_offsets)
    check_window_type(op, window)
    tensors: Tensors = (window.k, window.v, window.start, window.length, s, s_offsets, decay_scales)
    call = calls.one
    if isinstance(accepted, torch.Tensor):
        call, tensors = calls.each, (*tensors, accepted)
    # What new facts call for is made up only where they are new.
    plan = call.latest_plan(backend, tensors) or call.find_plan(
        backend, tensors, partial(_check_values, op, window, s_offsets, accepted, room, check_offsets)
    )
    check_numbers(op, accepted, room, plan.problem.N)
    if plan.reads_values or check_offsets or ENV_CHECK_OFFSETS:
        check_window_values(op, plan.problem, window, s_offsets, accepted, check_offsets, plan)
    if plan.run is not None:
        plan.run(plan.problem, window, s, s_offsets, decay_scales, accepted, room)


def _check_values(
    op: str,
    window: KVWindow,
    s_offsets: torch.Tensor,
    accepted: torch.Tensor | int,
    room: int | None,
    check_offsets: bool | None,
    problem: WindowProblem,
) -> None:
    check_numbers(op, accepted, room, problem.N)
    check_window_values(op, problem, window, s_offsets, accepted, check_offsets)
