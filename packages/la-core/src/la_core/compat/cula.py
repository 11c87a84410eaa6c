"""The signatures of cuLA's decode, which its twin `seg_la_d_kernel_cute` in serving engines shares, and of its kernels
for draft tokens (its pull request 97).
"""

from __future__ import annotations

import torch

from la_core.backends.choose_backend import use_overlap
from la_core.ops.commit import commit, commit_layers
from la_core.ops.decode import decode
from la_core.ops.verify import verify
from la_core.spec.argument_checks import check_rank, check_tensor, show_shape, violation
from la_core.spec.decode_checks import AXES
from la_core.spec.kv_window import KVWindow


def linear_attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    out: torch.Tensor,
    softmax_scale: float,
    stride_q: int,
    stride_k: int,
    stride_v: int,
    stride_s: int,
    stride_o: int,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    HEAD_DIM: int,
    K_SPLIT_DIM: int,
    V_SPLIT_DIM: int,
) -> None:
    """:func:`la_core.decode` in cuLA's spelling: writes `out` and `s` in place, obeys `s_offsets`.

    Parameters
    ----------
    q, k, v, s, out, softmax_scale, s_offsets, decay_scales
        As in :func:`la_core.decode`, with its shapes and checks.
    stride_q, stride_k, stride_v, stride_s, stride_o
        Accepted and ignored, as there: tensors know their strides.
    HEAD_DIM
        The size of K and of V; a call whose sizes differ is not what this signature can say.
    K_SPLIT_DIM, V_SPLIT_DIM
        Must equal `HEAD_DIM`.

    Raises
    ------
    NotImplementedError
        `HEAD_DIM` is not the heads' size, or a split size differs from it.
    SpecViolation, UnsupportedByBackend, BackendUnavailable
        As :func:`la_core.decode`.
    """
    check_tensor("decode", "out", out, AXES["out"])
    for name, size in (("K_SPLIT_DIM", K_SPLIT_DIM), ("V_SPLIT_DIM", V_SPLIT_DIM)):
        if size != HEAD_DIM:
            raise NotImplementedError(
                f"linear_attention_decode: {name} must equal HEAD_DIM = {HEAD_DIM}; got {size}. "
                "Split heads are not supported: pass the whole head."
            )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if isinstance(tensor, torch.Tensor) and tensor.ndim == 3 and tensor.shape[-1] != HEAD_DIM:
            raise NotImplementedError(
                f"linear_attention_decode: HEAD_DIM must be the last size of {name}, {tensor.shape[-1]}; "
                f"got {HEAD_DIM}. Call la_core.decode for K and V that differ."
            )
    decode(q, k, v, s, s_offsets, decay_scales, softmax_scale=softmax_scale, out=out)


def linear_attention_verify_kvbuffer(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    out: torch.Tensor,
    decay_scales: torch.Tensor,
    h0_indices: torch.Tensor,
    softmax_scale: float,
    T: int,
    k_buf: torch.Tensor | None = None,
    v_buf: torch.Tensor | None = None,
) -> None:
    """:func:`la_core.verify` in cuLA's spelling: writes `out` and the drafts' places in the buffers.

    No token is pending between calls: the buffers are windows that `linear_attention_state_update_kvbuffer` empties.
    Outputs of padding rows are zero, where cuLA leaves them as they were. :func:`la_core.use_overlap` has no effect on
    this and the two functions below, whose cursors are zeroed by the kernel in front of theirs.

    Parameters
    ----------
    q, k : Tensor [B, T, H, K]
        Queries and keys of the drafts.
    v, out : Tensor [B, T, HV, V]
        Values and outputs.
    s : Tensor [P, HV, V, K]
        The pool, only read. Slots and heads must have one common stride.
    decay_scales : Tensor [HV], float32
        Positive slopes.
    h0_indices : Tensor [B], int32 or int64
        The slot of each row; negative for padding rows.
    softmax_scale
        Factor of the output.
    T
        Must be the drafts of `q`.
    k_buf, v_buf : Tensor [P, T, H, K] and [P, T, HV, V], optional
        Where the drafts of a slot are kept for the state update; both or neither. Without them, as many bytes in the
        dtype of `k` are allocated for the duration of the call. Every call allocates 2 * P cursors, all zero.

    Raises
    ------
    SpecViolation, UnsupportedByBackend, BackendUnavailable
        As :func:`la_core.verify`; its sentences call `h0_indices` `s_offsets`, the buffers `window.k` and `window.v`.
    """
    op = "linear_attention_verify_kvbuffer"
    for name, tensor, axes in (("q", q, "[B, T, H, K]"), ("v", v, "[B, T, HV, V]"), ("out", out, "[B, T, HV, V]")):
        check_tensor(op, name, tensor, axes)
        check_rank(op, name, tensor, axes, 4)
    _check_drafts(op, "q", q.shape[1], T)
    pool = _flat_pool(op, s, "[P, HV, V, K]")
    if (k_buf is None) is not (v_buf is None):
        raise violation(op, "k_buf and v_buf must be given together", "one of them", "Pass both, or neither.")
    if k_buf is None or v_buf is None:
        slots = s.shape[0]
        k_buf = q.new_empty(slots, T, *q.shape[2:])
        v_buf = v.new_empty(slots, T, *v.shape[2:])
    window = _empty_window(op, k_buf, v_buf, "[P, T, H, K]")
    with use_overlap(False):
        verify(q, k, v, pool, h0_indices, decay_scales, window, softmax_scale=softmax_scale, out=out)


def linear_attention_state_update_kvbuffer(
    k_buf: torch.Tensor,
    v_buf: torch.Tensor,
    s: torch.Tensor,
    decay_scales: torch.Tensor,
    h0_indices: torch.Tensor,
    accepted_len: torch.Tensor,
    T: int,
) -> None:
    """:func:`la_core.commit` in cuLA's spelling: brings the accepted prefix of the buffers into `s`, in place.

    Parameters
    ----------
    k_buf, v_buf : Tensor [P, T, H, K] and [P, T, HV, V]
        What `linear_attention_verify_kvbuffer` has kept.
    s, decay_scales, h0_indices
        As there; the states are written.
    accepted_len : Tensor [B], int32 or int64
        Drafts of each row to bring in, from 0 to T; a row with 0 keeps its state.
    T
        Must be the places of the buffers.

    Raises
    ------
    SpecViolation, UnsupportedByBackend, BackendUnavailable
        As :func:`la_core.commit`; its sentences call `accepted_len` `accepted`.
    """
    op = "linear_attention_state_update_kvbuffer"
    window = _empty_window(op, k_buf, v_buf, "[P, T, H, K]")
    _check_drafts(op, "k_buf", k_buf.shape[1], T)
    pool = _flat_pool(op, s, "[P, HV, V, K]")
    with use_overlap(False):
        commit(window, pool, h0_indices, decay_scales, accepted_len)


def linear_attention_state_update_kvbuffer_fused(
    k_buf: torch.Tensor,
    v_buf: torch.Tensor,
    s: torch.Tensor,
    decay_scales: torch.Tensor,
    h0_indices: torch.Tensor,
    accepted_len: torch.Tensor,
    T: int,
) -> None:
    """:func:`linear_attention_state_update_kvbuffer` for all layers at once, by :func:`la_core.commit_layers`.

    Parameters
    ----------
    k_buf, v_buf : Tensor [L, P, T, H, K] and [L, P, T, HV, V]
        Buffers of each layer.
    s : Tensor [L, P, HV, V, K]
        Pools of each layer.
    decay_scales : Tensor [L, HV], float32
        Positive slopes of each layer.
    h0_indices, accepted_len, T
        As there, the same in every layer.

    Raises
    ------
    SpecViolation, UnsupportedByBackend, BackendUnavailable
        As :func:`la_core.commit_layers`.
    """
    op = "linear_attention_state_update_kvbuffer_fused"
    window = _empty_window(op, k_buf, v_buf, "[L, P, T, H, K]")
    _check_drafts(op, "k_buf", k_buf.shape[2], T)
    pool = _flat_pool(op, s, "[L, P, HV, V, K]")
    with use_overlap(False):
        commit_layers(window, pool, h0_indices, decay_scales, accepted_len)


def _check_drafts(op: str, name: str, drafts: int, T: int) -> None:
    if drafts != T:
        raise violation(op, f"T must be that of {name}, {drafts}", str(T), f"Pass T = {drafts}.")


def _flat_pool(op: str, s: torch.Tensor, axes: str) -> torch.Tensor:
    """`s` with slots and heads as one axis: a view, since a copy would lose the update."""
    check_tensor(op, "s", s, axes)
    check_rank(op, "s", s, axes, axes.count(",") + 1)
    *layers, slots, heads, v_size, k_size = s.shape
    try:
        return s.view(*layers, slots * heads, v_size, k_size)
    except RuntimeError:
        raise violation(
            op,
            f"the slots and heads of s {axes} must have one common stride",
            f"strides {show_shape(s.stride())}",
            "No view flattens them, and a copy would lose the update: allocate the pool so.",
        ) from None


def _empty_window(op: str, k_buf: torch.Tensor, v_buf: torch.Tensor, axes: str) -> KVWindow:
    """The window of buffers in which nothing is pending.

    A kernel writes its cursors right in front of the operator, which therefore must not overlap.
    """
    check_tensor(op, "k_buf", k_buf, axes)
    check_rank(op, "k_buf", k_buf, axes, axes.count(",") + 1)
    start, length = torch.zeros(2, k_buf.shape[-4], dtype=torch.int32, device=k_buf.device).unbind()
    return KVWindow(k_buf, v_buf, start, length)
