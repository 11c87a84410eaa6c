"""advance and clear: the cursors of a window, moved once per step for all layers."""

from __future__ import annotations

from functools import partial

import torch
from torch.compiler import is_compiling

from la_core.backends.choose_backend import AUTO
from la_core.ops.decode_values import ENV_CHECK_OFFSETS, check_traced
from la_core.ops.kept_plans import Tensors
from la_core.ops.window_plan import WindowCall
from la_core.ops.window_traced import advance_operator, clear_operator
from la_core.ops.window_values import check_window_values
from la_core.spec.argument_checks import check_no_grad, check_optional_bool
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_checks import ADVANCE_AXES, check_advance, check_numbers, check_window_type
from la_core.spec.window_problem import WindowProblem

_ARGUMENTS = ("window.k", "window.start", "window.length", "s_offsets")
_WRITTEN = ("window.start", "window.length")
_ADVANCE = WindowCall("advance", "advance", _ARGUMENTS, _WRITTEN, check_advance)
_ADVANCE_EACH = WindowCall("advance", "advance", (*_ARGUMENTS, "accepted"), _WRITTEN, check_advance)
_CLEAR = WindowCall("clear", "advance", _ARGUMENTS, _WRITTEN, check_advance)


def advance(
    window: KVWindow,
    s_offsets: torch.Tensor,
    accepted: torch.Tensor | int = 1,
    *,
    room: int | None = None,
    backend: str = AUTO,
    check_offsets: bool | None = None,
) -> None:
    """End a step: the accepted tokens of each row become pending, a window that was full is empty.

    For every row `b` with a slot `p = s_offsets[b] >= 0`, `n = length[p]` and `a = accepted[b]`::

        length[p] = 0 if n == N and a > 0 else n + a

    The tokens themselves were written by `decode` or `verify`, or with a full window by `decode` into the state; those
    that are not accepted are forgotten. Call it once per step, after the operators of all layers.

    With `room` it also clears the rows with `n + a + room > N`. Only `commit` or `commit_layers` with the same
    `accepted` and `room`, in every layer of this step, has brought their tokens into the states; after `decode`, whose
    tokens nothing has brought in, they would be lost::

        start[p]  = (start[p] + n + a) % N
        length[p] = 0

    Parameters
    ----------
    window : KVWindow
        Of one layer or stacked: the cursors are those of all layers.
    s_offsets : Tensor [B], int32 or int64, contiguous
        The slot of each row; negative for padding rows.
    accepted : Tensor [B], int32 or int64, contiguous, or int
        Tokens of each row to keep: 1 after `decode`, which does not take back what it did to a full window; at most the
        drafts that it wrote after `verify`. From 0 to `N - n`, or 0 to 1 where the window was full.
    room : int, optional
        From 1 to `N`: places that a window must have left for the next drafts; others have been committed, and are
        cleared.
    backend, check_offsets
        As in :func:`la_core.decode`, for offsets, cursors and `accepted`. Unchecked, `accepted` is limited.

    Raises
    ------
    SpecViolation, UnsupportedByBackend, BackendUnavailable
        As :func:`la_core.decode`.
    """
    if is_compiling():
        given = _traced("advance", window, s_offsets, check_offsets)
        check_numbers("advance", accepted, room, window.k.shape[-3])
        if isinstance(accepted, torch.Tensor):
            check_no_grad("advance", "accepted", accepted)
            advance_operator(*given, accepted, 0, room, backend, check_offsets)
        else:
            advance_operator(*given, None, accepted, room, backend, check_offsets)
        return
    if check_offsets is not None:
        check_optional_bool("advance", "check_offsets", check_offsets)
    check_window_type("advance", window)
    tensors: Tensors = (window.k, window.start, window.length, s_offsets)
    call = _ADVANCE
    if isinstance(accepted, torch.Tensor):
        call, tensors = _ADVANCE_EACH, (*tensors, accepted)
    # What new facts call for is made up only where they are new.
    plan = call.latest_plan(backend, tensors) or call.find_plan(
        backend, tensors, partial(_check_advance, window, s_offsets, accepted, room, check_offsets)
    )
    check_numbers("advance", accepted, room, plan.problem.N)
    if plan.reads_values or check_offsets or ENV_CHECK_OFFSETS:
        check_window_values("advance", plan.problem, window, s_offsets, accepted, check_offsets, plan)
    if plan.run is not None:
        plan.run(plan.problem, window, s_offsets, accepted, room, False)


def clear(
    window: KVWindow,
    s_offsets: torch.Tensor,
    *,
    room: int | None = None,
    backend: str = AUTO,
    check_offsets: bool | None = None,
) -> None:
    """Empty the windows of the rows' slots: after `fold` or `commit`, or when a slot gets another request.

    For every row `b` with a slot `p = s_offsets[b] >= 0`::

        start[p]  = (start[p] + length[p]) % N
        length[p] = 0

    Parameters
    ----------
    window : KVWindow
        Of one layer or stacked: the cursors are those of all layers.
    s_offsets : Tensor [B], int32 or int64, contiguous
        The slot of each row; negative for padding rows.
    room : int, optional
        From 1 to `N`: clear only the rows with `length[p] + room > N`, as `fold` with the same `room`.
    backend, check_offsets
        As in :func:`la_core.decode`. Cursors are not checked but limited, so that any window can be cleared.

    Raises
    ------
    SpecViolation, UnsupportedByBackend, BackendUnavailable
        As :func:`la_core.decode`.
    """
    if is_compiling():
        given = _traced("clear", window, s_offsets, check_offsets)
        check_numbers("clear", 0, room, window.k.shape[-3])
        clear_operator(*given, room, backend, check_offsets)
        return
    if check_offsets is not None:
        check_optional_bool("clear", "check_offsets", check_offsets)
    check_window_type("clear", window)
    tensors = (window.k, window.start, window.length, s_offsets)
    plan = _CLEAR.latest_plan(backend, tensors) or _CLEAR.find_plan(
        backend, tensors, partial(_check_clear, window, s_offsets, room, check_offsets)
    )
    check_numbers("clear", 0, room, plan.problem.N)
    if plan.reads_values or check_offsets or ENV_CHECK_OFFSETS:
        check_window_values("clear", plan.problem, window, s_offsets, None, check_offsets, plan)
    if plan.run is not None:
        plan.run(plan.problem, window, s_offsets, 0, room, True)


def _check_advance(
    window: KVWindow,
    s_offsets: torch.Tensor,
    accepted: torch.Tensor | int,
    room: int | None,
    check_offsets: bool | None,
    problem: WindowProblem,
) -> None:
    check_numbers("advance", accepted, room, problem.N)
    check_window_values("advance", problem, window, s_offsets, accepted, check_offsets)


def _check_clear(
    window: KVWindow,
    s_offsets: torch.Tensor,
    room: int | None,
    check_offsets: bool | None,
    problem: WindowProblem,
) -> None:
    check_numbers("clear", 0, room, problem.N)
    check_window_values("clear", problem, window, s_offsets, None, check_offsets)


def _traced(op: str, window: KVWindow, s_offsets: torch.Tensor, check_offsets: bool | None) -> list[torch.Tensor]:
    """The tensors that the operators in a compiled graph share, after what the graph would not show them."""
    check_window_type(op, window)
    given = dict(zip(_ARGUMENTS, (window.k, window.start, window.length, s_offsets), strict=True))
    check_traced(op, ADVANCE_AXES, {**given}, None, check_offsets, ())
    return list(given.values())
