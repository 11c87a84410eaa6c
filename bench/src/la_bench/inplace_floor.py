# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The in-place floor: one Triton kernel that multiplies the states of a batch, found through their slots, no more.

Computes s[p*H + h] = factor * s[p*H + h] for every row b with slot p = s_offsets[b] in [0, P) and head h. One program
owns `ROWS` lines of a state, a line being its contiguous axis: K in the layout "vk", V in "kv". It loads them once, in
16-byte pieces, and stores them once. What decode costs beyond this is q, k, v, the sums and the output.

Lines must be powers of two and aligned to 16 bytes. Import it only where there is a GPU: it imports the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from la_bench.roofline import FLOOR_FACTOR
from la_core import DecodeProblem

KIB = 1024


@dataclass(frozen=True)
class FloorTiles:
    """Shape of one program: KiB of states, warps, and when states leave the L2 cache, before other lines or after.

    What leaves last is marked so as it is read only: it should be there still when it is written, and go then.
    """

    kib: int
    num_warps: int
    eviction: str = ""

    def __str__(self) -> str:
        warps = "1 warp" if self.num_warps == 1 else f"{self.num_warps} warps"
        return ", ".join(filter(None, (f"{self.kib} KiB", warps, self.eviction.replace("_", " "))))


TILES = (
    *(FloorTiles(2, 1), FloorTiles(4, 1), FloorTiles(4, 2), FloorTiles(8, 1)),
    *(FloorTiles(2, 1, "evict_first"), FloorTiles(4, 1, "evict_first")),
    *(FloorTiles(2, 1, "evict_last"), FloorTiles(4, 4, "evict_last")),
    *(FloorTiles(8, 1, "evict_last"), FloorTiles(8, 4, "evict_last"), FloorTiles(8, 8, "evict_last")),
    *(FloorTiles(16, 4, "evict_last"), FloorTiles(32, 4, "evict_last")),
)
"""What is tried, the best is reported."""


@triton.jit(do_not_specialize=["P", "H", "s_row"])
def floor_kernel(
    p_s,  # [P*H, V, K]
    p_offsets,  # [B]
    factor,
    P,
    H,
    s_row,
    LINES: tl.constexpr,  # of one state
    LINE: tl.constexpr,  # elements
    ROWS: tl.constexpr,
    LOAD_EVICTION: tl.constexpr,
    STORE_EVICTION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The module says what it computes."""
    BLOCKS: tl.constexpr = (LINES + ROWS - 1) // ROWS
    i_h = tl.program_id(0) // BLOCKS
    i_r = tl.program_id(0) % BLOCKS
    i_b = tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
    slot = tl.load(p_offsets + i_b).to(tl.int64)
    live = (slot >= 0) & (slot < P)
    o_r = i_r * ROWS + tl.arange(0, ROWS)
    o_c = tl.arange(0, LINE)
    p_S = p_s + (slot * H + i_h) * s_row + (o_r[:, None] * LINE + o_c[None, :])
    # The limit lies in the lines, so that within a line nothing is masked and accesses stay wide.
    m_S = (o_r < tl.where(live, LINES, 0))[:, None] & (o_c[None, :] >= 0)
    p_S = tl.multiple_of(p_S, [1, 16])
    b_S = tl.load(p_S, mask=m_S, other=0.0, eviction_policy=LOAD_EVICTION).to(tl.float32) * factor
    if OVERLAP:
        gdc_wait()
    tl.store(p_S, b_S.to(p_s.dtype.element_ty), mask=m_S, eviction_policy=STORE_EVICTION)


def refusal(problem: DecodeProblem) -> str | None:
    """Why the states of a problem cannot be multiplied, if so."""
    line = problem.K if problem.state_layout == "vk" else problem.V
    if line & (line - 1) or line * problem.state_dtype.itemsize < 16:
        return f"needs contiguous lines of a power of two of at least 16 bytes, they are {line} long"
    if problem.s_row_stride * problem.state_dtype.itemsize % 16:
        return "needs states that start at multiples of 16 bytes"
    if problem.B > 65535:
        return "takes up to 65535 rows"
    return None


def bind_floor(
    s: torch.Tensor, s_offsets: torch.Tensor, heads: int, tiles: FloorTiles, overlap: bool
) -> Callable[[], None]:
    """A launch of the kernel over the states `s` [P*H, V, K] in either layout."""
    lines, line = s.shape[1:] if s.stride(2) == 1 else (s.shape[2], s.shape[1])
    rows = max(1, min(lines, tiles.kib * KIB // (line * s.element_size())))
    rows = 1 << (rows.bit_length() - 1)
    launch = floor_kernel[heads * -(-lines // rows), len(s_offsets)]
    options = {"num_warps": tiles.num_warps, "num_stages": 1, "enable_fp_fusion": False}
    if overlap:
        options["launch_pdl"] = True

    def call() -> None:
        launch(
            *(s, s_offsets, FLOOR_FACTOR, s.shape[0] // heads, heads, s.stride(0)),
            LINES=lines,
            LINE=line,
            ROWS=rows,
            LOAD_EVICTION=tiles.eviction,
            STORE_EVICTION=tiles.eviction if tiles.eviction == "evict_first" else "",
            OVERLAP=overlap,
            **options,
        )

    return call
