"""What a legal call of a window operator is: every rule that can be judged from the arguments' facts.

Each function takes the tensor arguments by the names that messages use, `window.k` for the `k` of a window, and
returns the problem of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from la_core.spec.argument_checks import (
    check_contiguous,
    check_dtype,
    check_last_stride,
    check_no_grad,
    check_rank,
    check_same_device,
    check_shape,
    check_tensor,
    show_dtype,
    show_shape,
    violation,
)
from la_core.spec.decode_checks import (
    AXES,
    check_pool_dtypes,
    check_pool_sizes,
    check_tokens_and_pool,
    count_axes,
)
from la_core.spec.decode_problem import IO_DTYPES, OFFSET_DTYPES, StateLayout, compute_capability, contiguous_strides
from la_core.spec.kv_window import MAX_PLACES, KVWindow
from la_core.spec.state_pool_rules import check_own_memory, check_pool_rank, pool_layout
from la_core.spec.window_problem import WindowOp, WindowProblem

WINDOW_AXES = {
    "window.k": "[P, N, G, K]",
    "window.v": "[P, N, H, V]",
    "window.start": "[P]",
    "window.length": "[P]",
}
"""Axes of the tensors of a window."""

DECODE_WINDOW_AXES = {**AXES, **WINDOW_AXES}
"""Axes of the tensor arguments of decode with a window."""

VERIFY_AXES = {
    **DECODE_WINDOW_AXES,
    **dict.fromkeys(("q", "k"), "[B, T, G, K]"),
    **dict.fromkeys(("v", "out"), "[B, T, H, V]"),
    "draft_lengths": "[B]",
}
"""Axes of the tensor arguments of verify."""

COMMIT_AXES = {**{name: AXES[name] for name in ("s", "s_offsets", "decay_scales")}, **WINDOW_AXES, "accepted": "[B]"}
"""Axes of the tensor arguments of fold and commit."""

COMMIT_LAYERS_AXES = {
    **COMMIT_AXES,
    "window.k": "[L, P, N, G, K]",
    "window.v": "[L, P, N, H, V]",
    "s": "[L, P*H, V, K]",
    "decay_scales": "[L, H]",
}
"""Axes of the tensor arguments of commit_layers."""

ADVANCE_AXES = {**WINDOW_AXES, "s_offsets": "[B]", "accepted": "[B]"}
"""Axes of the tensor arguments of advance and clear, where `window.k` may also be stacked."""

Tensors = dict[str, Any]


def check_window_type(op: str, window: Any) -> None:
    """`window` is a :class:`KVWindow`."""
    if not isinstance(window, KVWindow):
        raise violation(
            op,
            "window must be a la_core.KVWindow",
            "None" if window is None else f"a {type(window).__name__}",
            "Pass KVWindow(k, v, start, length), or KVWindow.allocate(...).",
        )


def check_count(op: str, name: str, value: Any, least: int, most: int) -> None:
    """A number given for all rows lies within `least` ... `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise violation(
            op,
            f"{name} must be {'an int or a Tensor [B]' if name == 'accepted' else 'an int or None'}",
            f"a {type(value).__name__}",
            f"Pass a number from {least} to {most}.",
        )
    if not least <= value <= most:
        raise violation(op, f"{name} must be from {least} to {most}", str(value), "N is the places of the window.")


def check_numbers(op: str, accepted: torch.Tensor | int, room: int | None, N: int) -> None:
    """`accepted`, where it is a number for all rows, is from 0 to `N`, and `room` from 1 to `N`.

    Raises
    ------
    SpecViolation
        It is not.
    """
    if not isinstance(accepted, torch.Tensor):
        check_count(op, "accepted", accepted, 0, N)
    if room is not None:
        check_count(op, "room", room, 1, N)


def check_window_call(
    op: str,
    *,
    window: Any,
    s_offsets: Any,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    s: Any = None,
    decay_scales: Any = None,
    out: Any = None,
    draft_lengths: Any = None,
    accepted: Any = None,
) -> WindowProblem:
    """Refuse a call on a window that breaks the contract, else return its problem.

    Parameters
    ----------
    op
        The operator: `"decode"`, `"verify"`, `"fold"`, `"commit"`, `"commit_layers"`, `"advance"` or `"clear"`.
    window, s_offsets
        As every one of them takes them.
    q, k, v, s, decay_scales, out, draft_lengths, accepted
        As the operator takes them, with the same shapes: see :func:`la_core.decode`, :func:`la_core.verify`,
        :func:`la_core.fold`, :func:`la_core.commit`, :func:`la_core.commit_layers` and :func:`la_core.advance`. `out`,
        `draft_lengths` and `accepted` may be None; a number for `accepted` leaves no trace in the problem.

    Returns
    -------
    WindowProblem
        The facts of the call.

    Raises
    ------
    SpecViolation
        In the sentences of the operator; or `op` is none of them, or takes no such argument. Values of tensors and
        shared memory are not looked at here: they change from call to call while the facts stay.
    """
    names = _ARGUMENTS_OF.get(op) if isinstance(op, str) else None
    if names is None:
        raise violation(
            "window_problem",
            "op must be the name of an operator with a window",
            repr(op),
            f"Pass one of {', '.join(_ARGUMENTS_OF)}.",
        )
    check_window_type(op, window)
    needed = {"q": q, "k": k, "v": v, "s": s, "s_offsets": s_offsets, "decay_scales": decay_scales}
    optional = {"draft_lengths": draft_lengths, "accepted": accepted, "out": out}
    for name, value in {**needed, **optional}.items():
        if value is not None and name not in names:
            raise violation(op, f"{name} must be left out", f"a {type(value).__name__}", f"{op} takes no such thing.")
    given = {**needed, **dict(zip(WINDOW_AXES, window.tensors(), strict=True)), **optional}
    for_all = accepted is not None and not isinstance(accepted, torch.Tensor)
    absent = {name for name, value in optional.items() if value is None} | ({"accepted"} if for_all else set())
    problem = _CHECKS[op](op, {name: given[name] for name in names if name not in absent})
    if for_all:
        check_count(op, "accepted", accepted, 0, problem.N)
    return problem


def check_decode_window(op: str, tensors: Tensors) -> WindowProblem:
    """Refuse a call of decode with a window that breaks the contract, else return its problem."""
    state_layout = _check_tokens_and_window(op, tensors, DECODE_WINDOW_AXES)
    return _token_problem("decode_window", tensors, state_layout)


def check_verify(op: str, tensors: Tensors) -> WindowProblem:
    """Refuse a call of verify that breaks the contract, else return its problem."""
    state_layout = _check_tokens_and_window(op, tensors, VERIFY_AXES)
    q = tensors["q"]
    T, N = q.shape[1], tensors["window.k"].shape[1]
    if not 1 <= T <= N:
        raise violation(
            op,
            f"q [B, T, G, K] must have T from 1 to N = {N}, the places of the window",
            f"T = {T}",
            "Pass fewer drafts, or allocate a window of more places.",
        )
    _check_counts(op, "draft_lengths", tensors, q.shape[0], "q")
    return _token_problem("verify", tensors, state_layout)


def check_commit(op: str, tensors: Tensors) -> WindowProblem:
    """Refuse a call of fold, commit or commit_layers that breaks the contract, else return its problem."""
    stacked = op == "commit_layers"
    axes = COMMIT_LAYERS_AXES if stacked else COMMIT_AXES
    for name, value in tensors.items():
        check_tensor(op, name, value, axes[name])
    for name, value in tensors.items():
        if name == "s" and not stacked:
            check_pool_rank(op, value)
        else:
            check_rank(op, name, value, axes[name], count_axes(axes[name]), _stacked_remedy(op, name, value))
    _check_window(op, tensors, axes)
    window_k, window_v, s = tensors["window.k"], tensors["window.v"], tensors["s"]
    *layers, P, N, G, K = window_k.shape
    H, V = window_v.shape[-2:]
    if stacked:
        if layers[0] < 1:
            raise violation(op, "window.k must have L >= 1", show_shape(window_k.shape), "Only B and P may be 0.")
        check_shape(op, "s", s, axes["s"], (*layers, P * H, V, K), "with the sizes of window.k and window.v")
    else:
        check_pool_sizes(op, s, H, V, K, "window.v", "window.k")
        _check_slots(op, P, s.shape[0] // H)
    offsets, decays = tensors["s_offsets"], tensors["decay_scales"]
    slopes = "one slope for each head of window.v" + (", of each layer" if stacked else "")
    check_shape(op, "decay_scales", decays, axes["decay_scales"], (*layers, H), slopes)
    check_pool_dtypes(op, tensors)
    _check_counts(op, "accepted", tensors, offsets.shape[0], "s_offsets")
    for name, value in tensors.items():
        check_same_device(op, name, value, window_k.device, "window.k")
    check_contiguous(op, "s_offsets", offsets, axes["s_offsets"])
    check_contiguous(op, "decay_scales", decays, axes["decay_scales"])
    state_layout = pool_layout(op, s[0] if stacked else s)
    if stacked:
        check_own_memory(op, "s", s, axes["s"])
    for name, value in tensors.items():
        check_no_grad(op, name, value)
    counts = tensors.get("accepted")
    return WindowProblem(
        op="commit",
        L=layers[0] if stacked else 1,
        B=offsets.shape[0],
        T=1,
        P=P,
        N=N,
        H=H,
        G=G,
        K=K,
        V=V,
        io_dtype=None,
        out_dtype=None,
        window_dtype=window_k.dtype,
        state_dtype=s.dtype,
        offsets_dtype=offsets.dtype,
        counts_dtype=None if counts is None else counts.dtype,
        state_layout=state_layout,
        device=window_k.device,
        arch=compute_capability(window_k.device),
        window_k_strides=_window_strides(window_k),
        window_v_strides=_window_strides(window_v),
        s_strides=_pool_strides(s),
    )


def check_advance(op: str, tensors: Tensors) -> WindowProblem:
    """Refuse a call of advance or clear that breaks the contract, else return its problem."""
    axes = ADVANCE_AXES
    for name, value in tensors.items():
        check_tensor(op, name, value, axes[name])
    window_k, offsets = tensors["window.k"], tensors["s_offsets"]
    if window_k.ndim not in (4, 5):
        raise violation(
            op,
            "window.k must be 4-D [P, N, G, K], or 5-D [L, P, N, G, K] for all layers",
            f"{window_k.ndim}-D {show_shape(window_k.shape)}",
            "Pass the window of the other operators.",
        )
    for name in tensors.keys() - {"window.k"}:
        check_rank(op, name, tensors[name], axes[name], 1)
    P, N = window_k.shape[-4:-2]
    _check_places(op, N, window_k)
    _check_cursors(op, tensors, P)
    check_dtype(op, "s_offsets", offsets, OFFSET_DTYPES, "Pass s_offsets.to(torch.int32).")
    _check_counts(op, "accepted", tensors, offsets.shape[0], "s_offsets")
    for name, value in tensors.items():
        check_same_device(op, name, value, window_k.device, "window.k")
    check_contiguous(op, "s_offsets", offsets, axes["s_offsets"])
    for name, value in tensors.items():
        check_no_grad(op, name, value)
    counts = tensors.get("accepted")
    return WindowProblem(
        op="advance",
        L=1,
        B=offsets.shape[0],
        T=1,
        P=P,
        N=N,
        H=0,
        G=0,
        K=0,
        V=0,
        io_dtype=None,
        out_dtype=None,
        window_dtype=None,
        state_dtype=None,
        offsets_dtype=offsets.dtype,
        counts_dtype=None if counts is None else counts.dtype,
        state_layout="vk",
        device=window_k.device,
        arch=compute_capability(window_k.device),
    )


def _check_tokens_and_window(op: str, tensors: Tensors, axes: dict[str, str]) -> StateLayout:
    """The rules that decode with a window and verify share."""
    apart = {name: value for name, value in tensors.items() if name not in WINDOW_AXES and name != "draft_lengths"}
    state_layout = check_tokens_and_pool(op, apart, axes)
    q, v, window_k = tensors["q"], tensors["v"], tensors["window.k"]
    others = {name: tensors[name] for name in (*WINDOW_AXES, "draft_lengths") if name in tensors}
    for name, value in others.items():
        check_tensor(op, name, value, axes[name])
        check_rank(op, name, value, axes[name], count_axes(axes[name]), _stacked_remedy(op, name, value))
    _check_window(op, tensors, axes)
    P, N = window_k.shape[:2]
    _check_slots(op, P, tensors["s"].shape[0] // v.shape[-2])
    for name, front in (("k", q), ("v", v)):
        expected = (P, N, *front.shape[-2:])
        why = "with the heads and sizes of " + ("q" if name == "k" else "v")
        check_shape(op, f"window.{name}", tensors[f"window.{name}"], axes[f"window.{name}"], expected, why)
    if window_k.dtype not in (q.dtype, torch.float32):
        raise violation(
            op,
            f"window.k must have the dtype of q, {show_dtype(q.dtype)}"
            + ("" if q.dtype is torch.float32 else ", or float32"),
            show_dtype(window_k.dtype),
            "Allocate the window in the dtype of q, k and v.",
        )
    for name, value in others.items():
        check_same_device(op, name, value, q.device)
        check_no_grad(op, name, value)
    return state_layout


def _check_window(op: str, tensors: Tensors, axes: dict[str, str]) -> None:
    """The rules of a window by itself, after the ranks of its tensors."""
    window_k, window_v = tensors["window.k"], tensors["window.v"]
    *front, N, G, K = window_k.shape
    H, V = window_v.shape[-2:]
    _check_places(op, N, window_k)
    for name, letter, size in (
        ("window.k", "G", G),
        ("window.k", "K", K),
        ("window.v", "H", H),
        ("window.v", "V", V),
    ):
        if size < 1:
            raise violation(
                op,
                f"{name} {axes[name]} must have {letter} >= 1",
                show_shape(tensors[name].shape),
                "Only B and P may be 0.",
            )
    letters = "L, P and N" if len(front) == 2 else "P and N"
    check_shape(op, "window.v", window_v, axes["window.v"], (*front, N, H, V), f"with the {letters} of window.k")
    if H % G:
        raise violation(
            op,
            "the H heads of window.v must be a multiple of the G heads of window.k",
            f"H = {H}, G = {G}",
            "Head h of v uses head h // (H // G) of q and k.",
        )
    check_dtype(op, "window.k", window_k, IO_DTYPES, "Allocate the window in the dtype of q, k and v.")
    if window_v.dtype is not window_k.dtype:
        raise violation(
            op,
            f"window.v must have the dtype of window.k, {show_dtype(window_k.dtype)}",
            show_dtype(window_v.dtype),
            "Allocate both in the dtype of q, k and v.",
        )
    _check_cursors(op, tensors, front[-1])
    for name in ("window.k", "window.v"):
        check_last_stride(op, name, tensors[name], axes[name])
        check_own_memory(op, name, tensors[name], axes[name])


def _check_places(op: str, N: int, window_k: torch.Tensor) -> None:
    if not 1 <= N <= MAX_PLACES:
        raise violation(
            op,
            f"window.k must have N from 1 to {MAX_PLACES} places",
            f"N = {N} in {show_shape(window_k.shape)}",
            "Allocate a window with KVWindow.allocate(...).",
        )


def _check_cursors(op: str, tensors: Tensors, P: int) -> None:
    for name in ("window.start", "window.length"):
        value = tensors[name]
        check_shape(op, name, value, "[P]", (P,), "one cursor for each slot of window.k")
        check_dtype(op, name, value, (torch.int32,), f"Allocate {name} as int32.")
        check_contiguous(op, name, value, "[P]")


def _check_slots(op: str, P: int, slots: int) -> None:
    if slots != P:
        raise violation(
            op,
            f"window.k must have the P = {slots} slots of s",
            f"P = {P}",
            "Allocate the window for the same pool.",
        )


def _check_counts(op: str, name: str, tensors: Tensors, B: int, owner: str) -> None:
    """`draft_lengths` or `accepted`, where it is a tensor."""
    if name in tensors:
        value = tensors[name]
        check_shape(op, name, value, "[B]", (B,), f"one count for each row of {owner}")
        check_dtype(op, name, value, OFFSET_DTYPES, f"Pass {name}.to(torch.int32).")
        check_contiguous(op, name, value, "[B]")


def _stacked_remedy(op: str, name: str, value: torch.Tensor) -> str | None:
    """What to do with a stacked window where that of one layer is due."""
    if name in ("window.k", "window.v") and value.ndim == 5 and op != "commit_layers":
        return "Pass window.layer(l), the window of one layer."
    return None


def _token_strides(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Elements between rows, tokens and heads; 0 between tokens where there is but one."""
    return strides[0], strides[1] if len(strides) == 4 else 0, strides[-2]


def _window_strides(value: torch.Tensor) -> tuple[int, int, int, int]:
    """Elements between layers (0 where there are none), slots, places and heads of `window.k` or `window.v`."""
    slots, places, heads = value.stride()[-4:-1]
    return value.stride(0) if value.ndim == 5 else 0, slots, places, heads


def _pool_strides(s: torch.Tensor) -> tuple[int, int]:
    """Elements between layers (0 where there are none) and between rows of `s`."""
    return s.stride(0) if s.ndim == 4 else 0, s.stride(-3)


def _token_problem(op: WindowOp, tensors: Tensors, state_layout: StateLayout) -> WindowProblem:
    q, v, s, window_k = tensors["q"], tensors["v"], tensors["s"], tensors["window.k"]
    P, N, G, K = window_k.shape
    H, V = v.shape[-2:]
    out, counts = tensors.get("out"), tensors.get("draft_lengths")
    strides = {name: tensors[name].stride() for name in ("q", "k", "v")}
    strides["out"] = contiguous_strides(v.shape) if out is None else out.stride()
    q_strides, k_strides, v_strides, out_strides = map(_token_strides, strides.values())
    return WindowProblem(
        op=op,
        L=1,
        B=q.shape[0],
        T=q.shape[1] if op == "verify" else 1,
        P=P,
        N=N,
        H=H,
        G=G,
        K=K,
        V=V,
        io_dtype=q.dtype,
        out_dtype=q.dtype if out is None else out.dtype,
        window_dtype=window_k.dtype,
        state_dtype=s.dtype,
        offsets_dtype=tensors["s_offsets"].dtype,
        counts_dtype=None if counts is None else counts.dtype,
        state_layout=state_layout,
        device=q.device,
        arch=compute_capability(q.device),
        q_strides=q_strides,
        k_strides=k_strides,
        v_strides=v_strides,
        out_strides=out_strides,
        window_k_strides=_window_strides(window_k),
        window_v_strides=_window_strides(tensors["window.v"]),
        s_strides=_pool_strides(s),
    )


_TOKENS = ("q", "k", "v", "s", "s_offsets", "decay_scales", *WINDOW_AXES)
_POOL = (*WINDOW_AXES, "s", "s_offsets", "decay_scales")
_CURSORS = ("window.k", "window.start", "window.length", "s_offsets")

_ARGUMENTS_OF: dict[str, tuple[str, ...]] = {
    "decode": (*_TOKENS, "out"),
    "verify": (*_TOKENS, "draft_lengths", "out"),
    "fold": _POOL,
    "commit": (*_POOL, "accepted"),
    "commit_layers": (*_POOL, "accepted"),
    "advance": (*_CURSORS, "accepted"),
    "clear": _CURSORS,
}
"""Tensor arguments of each operator in the order in which they are passed around, `accepted` if it is a tensor."""

_CHECKS: dict[str, Callable[[str, Tensors], WindowProblem]] = {
    "decode": check_decode_window,
    "verify": check_verify,
    **dict.fromkeys(("fold", "commit", "commit_layers"), check_commit),
    **dict.fromkeys(("advance", "clear"), check_advance),
}
