"""The facts of one call of a window operator, without its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from la_core.spec.decode_problem import StateLayout, short_dtype

WindowOp = Literal["decode_window", "verify", "commit", "advance"]
"""What a backend implements: `fold`, `commit` and `commit_layers` are its `commit`, `clear` is its `advance`."""


@dataclass(frozen=True)
class WindowProblem:
    """Sizes, dtypes, layouts and device of a call that works on a :class:`la_core.KVWindow`.

    `B`, `P`, `T`, `L` and the strides are run-time values: no backend may compile for one of them. What an operator has
    no argument for is 1 (`L`, `T`), 0 (strides, sizes of `advance`) or None (dtypes).

    Parameters
    ----------
    op
        The operator, as backends see it.
    L, B, T, P, N, H, G, K, V
        Layers, rows, tokens of a row, pool slots, places of a window, state heads, query/key heads, key size, value
        size.
    io_dtype, out_dtype
        Dtype of `q`, `k` and `v`; of `out`.
    window_dtype, state_dtype
        Dtype of the window's k and v; of `s`.
    offsets_dtype, counts_dtype
        Dtype of `s_offsets`; of `draft_lengths` or `accepted`, None if that is a number or missing.
    state_layout
        `"vk"` if K is contiguous in memory, `"kv"` if V is.
    device, arch
        Where all tensors lie; compute capability of a CUDA device.
    q_strides, k_strides, v_strides, out_strides
        Elements between rows, tokens and heads.
    window_k_strides, window_v_strides
        Elements between layers, slots, places and heads.
    s_strides
        Elements between layers and between rows of `s`.
    overlap
        See :func:`la_core.use_overlap`.
    """

    op: WindowOp
    L: int
    B: int
    T: int
    P: int
    N: int
    H: int
    G: int
    K: int
    V: int
    io_dtype: torch.dtype | None
    out_dtype: torch.dtype | None
    window_dtype: torch.dtype | None
    state_dtype: torch.dtype | None
    offsets_dtype: torch.dtype
    counts_dtype: torch.dtype | None
    state_layout: StateLayout
    device: torch.device
    arch: tuple[int, int] | None
    q_strides: tuple[int, int, int] = (0, 0, 0)
    k_strides: tuple[int, int, int] = (0, 0, 0)
    v_strides: tuple[int, int, int] = (0, 0, 0)
    out_strides: tuple[int, int, int] = (0, 0, 0)
    window_k_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    window_v_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    s_strides: tuple[int, int] = (0, 0)
    overlap: bool = False

    def describe(self) -> str:
        """One readable line, for messages."""
        sizes = [f"{name}={getattr(self, name)}" for name in ("L", "B", "T", "P", "N", "H", "G", "K", "V")]
        dtypes = (self.io_dtype, self.window_dtype, self.state_dtype, self.out_dtype)
        shown = "/".join(short_dtype(dtype) for dtype in dtypes)
        return (
            f"{' '.join(size for size in sizes if not size.endswith('=0'))} "
            f"io/window/state/out {shown} layout {self.state_layout} on {self.device}"
        )
