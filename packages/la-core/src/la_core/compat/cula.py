"""The signature of cuLA's decode, which its twin `seg_la_d_kernel_cute` in serving engines shares."""

from __future__ import annotations

import torch

from la_core.ops.decode import decode
from la_core.spec.argument_checks import check_tensor
from la_core.spec.decode_checks import AXES


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
