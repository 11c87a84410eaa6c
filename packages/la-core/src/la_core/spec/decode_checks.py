"""What a legal decode call is: every rule of the contract that can be judged from the arguments' facts."""

from __future__ import annotations

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
from la_core.spec.decode_problem import (
    IO_DTYPES,
    OFFSET_DTYPES,
    STATE_DTYPES,
    DecodeProblem,
    StateLayout,
    compute_capability,
    contiguous_strides,
)
from la_core.spec.state_pool_rules import check_own_memory, check_pool_rank, pool_layout

AXES = {
    "q": "[B, G, K]",
    "k": "[B, G, K]",
    "v": "[B, H, V]",
    "s": "[P*H, V, K]",
    "s_offsets": "[B]",
    "decay_scales": "[H]",
    "out": "[B, H, V]",
}
"""The axes of every tensor argument of decode, as messages and documentation print them."""


def check_decode(
    q: Any,
    k: Any,
    v: Any,
    s: Any,
    s_offsets: Any,
    decay_scales: Any,
    out: Any = None,
    *,
    op: str = "decode",
) -> DecodeProblem:
    """Refuse a call that breaks the contract, else return its problem.

    Parameters
    ----------
    q, k, v, s, s_offsets, decay_scales, out
        As in :func:`la_core.decode`; `out` may be None.
    op
        The operator's name in messages.

    Returns
    -------
    DecodeProblem
        The facts of the call.

    Raises
    ------
    SpecViolation
        Names the argument, the rule, what came and what to do. Values of `s_offsets` and shared memory are not
        looked at here: they change from call to call while the facts stay.
    """
    tensors = {"q": q, "k": k, "v": v, "s": s, "s_offsets": s_offsets, "decay_scales": decay_scales}
    if out is not None:
        tensors["out"] = out
    state_layout = check_tokens_and_pool(op, tensors, AXES)
    (B, G, K), (H, V) = q.shape, v.shape[1:]
    out_strides = out.stride() if out is not None else contiguous_strides((B, H, V))
    return DecodeProblem(
        B=B,
        P=s.shape[0] // H,
        H=H,
        G=G,
        K=K,
        V=V,
        io_dtype=q.dtype,
        state_dtype=s.dtype,
        out_dtype=q.dtype if out is None else out.dtype,
        offsets_dtype=s_offsets.dtype,
        state_layout=state_layout,
        device=q.device,
        arch=compute_capability(q.device),
        q_strides=q.stride()[:2],
        k_strides=k.stride()[:2],
        v_strides=v.stride()[:2],
        out_strides=(out_strides[0], out_strides[1]),
        s_row_stride=s.stride(0),
    )


def check_tokens_and_pool(op: str, tensors: dict[str, Any], axes: dict[str, str]) -> StateLayout:
    """All rules of the arguments of decode, for an operator whose q, k, v and out have the axes `axes`.

    Returns the layout of the states in `s`.
    """
    for name, value in tensors.items():
        check_tensor(op, name, value, axes[name])
    for name, value in tensors.items():
        if name == "s":
            check_pool_rank(op, value)
        else:
            check_rank(op, name, value, axes[name], count_axes(axes[name]))
    _check_sizes(op, tensors, axes)
    _check_dtypes(op, tensors)
    for name, value in tensors.items():
        check_same_device(op, name, value, tensors["q"].device)
    state_layout = _check_strides(op, tensors, axes)
    for name, value in tensors.items():
        check_no_grad(op, name, value)
    return state_layout


def count_axes(axes: str) -> int:
    """3 for `"[B, G, K]"`."""
    return axes.count(",") + 1


def _check_sizes(op: str, tensors: dict[str, torch.Tensor], axes: dict[str, str]) -> None:
    q, v, s = tensors["q"], tensors["v"], tensors["s"]
    *rows, G, K = q.shape
    H, V = v.shape[-2:]
    for name, letter, size in (("q", "G", G), ("q", "K", K), ("v", "H", H), ("v", "V", V)):
        if size < 1:
            raise violation(
                op,
                f"{name} {axes[name]} must have {letter} >= 1",
                show_shape(tensors[name].shape),
                "Only B and P may be 0.",
            )
    check_shape(op, "k", tensors["k"], axes["k"], q.shape, "the shape of q")
    check_shape(op, "v", v, axes["v"], (*rows, H, V), f"with the {' and '.join('BT'[: len(rows)])} of q")
    if H % G:
        raise violation(
            op,
            "the H heads of v must be a multiple of the G heads of q and k",
            f"H = {H}, G = {G}",
            "Head h of v uses head h // (H // G) of q and k.",
        )
    check_pool_sizes(op, s, H, V, K, "v", "q")
    check_shape(op, "s_offsets", tensors["s_offsets"], axes["s_offsets"], q.shape[:1], "one slot for each row of q")
    check_shape(op, "decay_scales", tensors["decay_scales"], axes["decay_scales"], (H,), "one slope for each head of v")
    if "out" in tensors:
        check_shape(op, "out", tensors["out"], axes["out"], v.shape, "the shape of v")


def check_pool_sizes(op: str, s: torch.Tensor, H: int, V: int, K: int, values: str, keys: str) -> None:
    """`s` [P*H, V, K] has whole slots, with the H and V of the argument `values` and the K of the argument `keys`."""
    if s.shape[0] % H:
        raise violation(
            op,
            f"s.shape[0] must be P*H, divisible by the H = {H} heads of {values}",
            show_shape(s.shape),
            f"Pass a pool of whole slots, {H} rows each.",
        )
    why = f"with the V of {values} and the K of {keys}"
    if K != V and s.shape[1:] == (K, V):
        raise violation(
            op,
            f"s must be {AXES['s']} = {show_shape((s.shape[0], V, K))}, {why}",
            show_shape(s.shape),
            "Pass s.transpose(1, 2): its strides say how it is stored.",
        )
    check_shape(op, "s", s, AXES["s"], (s.shape[0], V, K), why)


def _check_dtypes(op: str, tensors: dict[str, torch.Tensor]) -> None:
    q = tensors["q"]
    check_dtype(op, "q", q, IO_DTYPES, "Convert q, k and v to one of them.")
    for name in ("k", "v"):
        if tensors[name].dtype is not q.dtype:
            raise violation(
                op,
                f"{name} must have the dtype of q, {show_dtype(q.dtype)}",
                show_dtype(tensors[name].dtype),
                f"Pass {name}.to({q.dtype}).",
            )
    check_pool_dtypes(op, tensors)
    if "out" in tensors:
        check_dtype(op, "out", tensors["out"], IO_DTYPES, "Allocate out in one of them.")


def check_pool_dtypes(op: str, tensors: dict[str, torch.Tensor]) -> None:
    """Dtypes of `s`, `s_offsets` and `decay_scales`."""
    check_dtype(op, "s", tensors["s"], STATE_DTYPES, "Allocate the pool in one of them.")
    check_dtype(op, "s_offsets", tensors["s_offsets"], OFFSET_DTYPES, "Pass s_offsets.to(torch.int32).")
    check_dtype(
        op,
        "decay_scales",
        tensors["decay_scales"],
        (torch.float32,),
        "Pass decay_scales.float(), computed in float32 from the start: a slope rounded to 16 bits is another model.",
    )


def _check_strides(op: str, tensors: dict[str, torch.Tensor], axes: dict[str, str]) -> StateLayout:
    for name in ("q", "k", "v", "out"):
        if name in tensors:
            check_last_stride(op, name, tensors[name], axes[name])
    for name in ("s_offsets", "decay_scales"):
        check_contiguous(op, name, tensors[name], axes[name])
    if "out" in tensors:
        check_own_memory(op, "out", tensors["out"], axes["out"])
    return pool_layout(op, tensors["s"])
