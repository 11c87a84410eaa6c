"""The facts of one call of a window operator, without its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from la_core.spec.decode_problem import StateLayout, contiguous_strides, short_dtype

WindowOp = Literal["decode_window", "verify", "commit", "advance"]
"""What a backend implements: `fold`, `commit` and `commit_layers` are its `commit`, `clear` is its `advance`."""

CURSORS, CURSOR_BYTES, SLOPE_BYTES = 2, 4, 4
"""Cursors of a slot (read by every operator but `advance`, which reads and writes one), bytes of one, of a slope."""


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

    @classmethod
    def contiguous(
        cls,
        op: WindowOp,
        *,
        B: int,
        P: int,
        N: int,
        H: int,
        K: int,
        V: int,
        G: int | None = None,
        T: int = 1,
        L: int = 1,
        io_dtype: torch.dtype = torch.bfloat16,
        window_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        offsets_dtype: torch.dtype = torch.int32,
        counts_dtype: torch.dtype | None = None,
        state_layout: StateLayout = "vk",
        device: torch.device | str = "cpu",
        arch: tuple[int, int] | None = None,
    ) -> WindowProblem:
        """The problem of a call whose tensors are all contiguous, for questions asked without tensors.

        What the operator has no argument for is left out. With more layers than one, window, states and slopes are
        stacked, as for `commit_layers`.
        """
        if op == "advance":
            H = G = K = V = 0
        G = H if G is None else G
        tokens, states = op in ("decode_window", "verify"), op != "advance"
        layers = L if op == "commit" else 1
        T = T if op == "verify" else 1

        def token_strides(heads: int, size: int) -> tuple[int, int, int]:
            return (T * heads * size, heads * size if op == "verify" else 0, size) if tokens else (0, 0, 0)

        def window_strides(heads: int, size: int) -> tuple[int, int, int, int]:
            layer, slot, place, head, _ = contiguous_strides((layers, P, N, heads, size))
            return (layer if layers > 1 else 0, slot, place, head) if states else (0, 0, 0, 0)

        return cls(
            op=op,
            L=layers,
            B=B,
            T=T,
            P=P,
            N=N,
            H=H,
            G=G,
            K=K,
            V=V,
            io_dtype=io_dtype if tokens else None,
            out_dtype=out_dtype or io_dtype if tokens else None,
            window_dtype=window_dtype or io_dtype if states else None,
            state_dtype=state_dtype if states else None,
            offsets_dtype=offsets_dtype,
            counts_dtype=None if op == "decode_window" else counts_dtype,
            state_layout=state_layout if states else "vk",
            device=torch.device(device),
            arch=arch,
            q_strides=token_strides(G, K),
            k_strides=token_strides(G, K),
            v_strides=token_strides(H, V),
            out_strides=token_strides(H, V),
            window_k_strides=window_strides(G, K),
            window_v_strides=window_strides(H, V),
            s_strides=(P * H * V * K if layers > 1 else 0, V * K),
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that belong to the batch, of all layers; 0 for `advance`."""
        return self.L * self.B * self.H * self.V * self.K * _bytes(self.state_dtype)

    def bytes_moved(self, *, pending: float = 0.0, writing: float = 0.0) -> float:
        """The fewest bytes a call can move, of which the facts say all but how full the windows are.

        Parameters
        ----------
        pending
            Tokens of a row that are read from its window, averaged over all rows: the pending ones, with the accepted
            drafts for commit. Rows that `room` or an empty window exempts from fold and commit read none.
        writing
            Share of the rows whose states are written: for decode those whose window is full, for fold and commit those
            that bring tokens in. `verify` writes none, whatever is given.

        Returns
        -------
        float
            States read, and written by some rows; pending tokens read and new ones written; q, k, v, slopes, offsets,
            cursors and counts read; out and cursors written. A full window takes no new token of decode.
        """
        rows = self.L * self.B
        token = self.G * self.K + self.H * self.V
        kept, reading = pending, 1.0
        if self.op == "decode_window":
            kept += 1 - writing
        elif self.op == "verify":
            kept, writing = kept + self.T, 0.0
        elif self.op == "commit":
            reading = writing
        new = rows * self.T
        io = new * ((token + self.G * self.K) * _bytes(self.io_dtype) + self.H * self.V * _bytes(self.out_dtype))
        small = self.B * (self.offsets_dtype.itemsize + CURSORS * CURSOR_BYTES + _bytes(self.counts_dtype))
        return (
            (reading + writing) * self.state_bytes
            + rows * kept * token * _bytes(self.window_dtype)
            + io
            + small
            + self.L * self.H * SLOPE_BYTES
        )

    def describe(self) -> str:
        """One readable line, for messages."""
        sizes = [f"{name}={getattr(self, name)}" for name in ("L", "B", "T", "P", "N", "H", "G", "K", "V")]
        dtypes = (self.io_dtype, self.window_dtype, self.state_dtype, self.out_dtype)
        shown = "/".join(short_dtype(dtype) for dtype in dtypes)
        return (
            f"{' '.join(size for size in sizes if not size.endswith('=0'))} "
            f"io/window/state/out {shown} layout {self.state_layout} on {self.device}"
        )


def _bytes(dtype: torch.dtype | None) -> int:
    """Of one element; none of what an operator has no argument for."""
    return 0 if dtype is None else dtype.itemsize
