"""The facts of one decode call, without its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

StateLayout = Literal["vk", "kv"]
"""`"vk"`: K is contiguous in memory. `"kv"`: V is contiguous, `s` is a transposed view of `[.., K, V]` memory."""

IO_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OFFSET_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class DecodeProblem:
    """Sizes, dtypes, layouts and device of a decode call.

    A backend's `refusal` and its choice of tiles are functions of this. `B`, `P` and the strides are run-time
    values: no backend may compile for one of them.

    Parameters
    ----------
    B, P, H, G, K, V
        Rows, pool slots, state heads, query/key heads, key size, value size.
    io_dtype
        Dtype of `q`, `k` and `v`.
    state_dtype, out_dtype, offsets_dtype
        Dtype of `s`, of `out` and of `s_offsets`.
    state_layout
        `"vk"` if K is contiguous in memory, `"kv"` if V is.
    device
        Where all tensors lie.
    arch
        Compute capability of a CUDA device, such as `(9, 0)`; None elsewhere.
    q_strides, k_strides, v_strides, out_strides
        Elements between rows and between heads.
    s_row_stride
        Elements between rows of `s`; `V * K` in a dense pool.
    overlap
        Whether the kernel may start before the previous one has ended; see :func:`la_core.use_overlap`. A backend
        that cannot overlap runs the call without.
    """

    B: int
    P: int
    H: int
    G: int
    K: int
    V: int
    io_dtype: torch.dtype
    state_dtype: torch.dtype
    out_dtype: torch.dtype
    offsets_dtype: torch.dtype
    state_layout: StateLayout
    device: torch.device
    arch: tuple[int, int] | None
    q_strides: tuple[int, int]
    k_strides: tuple[int, int]
    v_strides: tuple[int, int]
    out_strides: tuple[int, int]
    s_row_stride: int
    overlap: bool = False

    @classmethod
    def contiguous(
        cls,
        *,
        B: int,
        P: int,
        H: int,
        K: int,
        V: int,
        G: int | None = None,
        io_dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        offsets_dtype: torch.dtype = torch.int32,
        state_layout: StateLayout = "vk",
        device: torch.device | str = "cpu",
        arch: tuple[int, int] | None = None,
    ) -> DecodeProblem:
        """The problem of a call whose tensors are all contiguous, for questions asked without tensors."""
        G = H if G is None else G
        return cls(
            B=B,
            P=P,
            H=H,
            G=G,
            K=K,
            V=V,
            io_dtype=io_dtype,
            state_dtype=state_dtype,
            out_dtype=out_dtype or io_dtype,
            offsets_dtype=offsets_dtype,
            state_layout=state_layout,
            device=torch.device(device),
            arch=arch,
            q_strides=(G * K, K),
            k_strides=(G * K, K),
            v_strides=(H * V, V),
            out_strides=(H * V, V),
            s_row_stride=V * K,
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that belong to the batch: `B * H * V * K` elements."""
        return self.B * self.H * self.V * self.K * self.state_dtype.itemsize

    def bytes_moved(self) -> int:
        """The fewest bytes a call can move: states read and written, q, k, v, offsets and slopes read, out written."""
        io_elements = 2 * self.B * self.G * self.K + self.B * self.H * self.V
        return (
            2 * self.state_bytes
            + io_elements * self.io_dtype.itemsize
            + self.B * self.H * self.V * self.out_dtype.itemsize
            + self.B * self.offsets_dtype.itemsize
            + self.H * 4
        )

    def describe(self) -> str:
        """One readable line, for messages."""
        dtypes = "/".join(short_dtype(dtype) for dtype in (self.io_dtype, self.state_dtype, self.out_dtype))
        return (
            f"B={self.B} P={self.P} H={self.H} G={self.G} K={self.K} V={self.V} "
            f"io/state/out {dtypes} layout {self.state_layout} on {self.device}"
        )


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a freshly allocated tensor of that shape."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def short_dtype(dtype: torch.dtype | None) -> str:
    """`bf16` for `torch.bfloat16`, `-` for None."""
    if dtype is None:
        return "-"
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype, str(dtype))
