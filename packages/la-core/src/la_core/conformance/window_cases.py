"""Calls of the window operators as data: sample cases for every quick check, reference cases that span the contract."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from la_core.spec.decode_problem import StateLayout

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
_SHORT = {bf16: "bf16", fp16: "fp16", fp32: "fp32"}

WindowCall = Literal["decode", "verify", "fold", "commit", "advance", "clear"]
"""The operators as users call them; a commit of stacked layers is `commit_layers`."""


@dataclass(frozen=True)
class WindowCase:
    """One call, complete: the same case gives the same tensors on every machine.

    Attributes
    ----------
    op
        The operator.
    B, P, N, H, K, V, G
        Sizes as in the contract; `G = 0` stands for `G = H`.
    T
        Tokens of a row, for verify.
    L
        Layers that are stacked, for commit; 0 for a window and a pool of one layer.
    io_dtype, state_dtype, window_dtype, out_dtype, offsets_dtype
        Dtypes; `window_dtype` None is that of `io_dtype`, `out_dtype` None leaves the output to the operator.
    offsets
        The slots; None draws distinct slots at random, a share `padding` of the rows negative.
    starts, lengths
        Cursors of each row's slot; None draws them, with room for the drafts.
    counts
        `draft_lengths` or `accepted`: a number, or one for each row, or None to draw them if `counts_dtype` is given
        and to leave them out otherwise.
    counts_dtype
        Of counts that are a tensor.
    room
        Of fold, commit, advance and clear.
    state_layout
        `"vk"` or `"kv"`.
    softmax_scale
        None for the default.
    decays
        Slopes; None spreads them from 0.02 to 1 over the heads.
    fused_qkv, fused_window
        q, k and v, or the window's k and v, are slices of one buffer whose rows, or places, hold all of them.
    tokens_first
        The memory of q, k, v and out is `[T, B, ...]`.
    pool_gap, window_gap, out_gap
        Unused elements between the rows of `s`, the places and slots of the window, and the tokens of `out`.
    shift
        Elements by which every tensor starts behind an aligned address.
    seed
        Of the random values.
    """

    op: WindowCall
    B: int = 3
    P: int = 6
    N: int = 4
    H: int = 2
    K: int = 64
    V: int = 128
    G: int = 0
    T: int = 1
    L: int = 0
    io_dtype: torch.dtype = bf16
    state_dtype: torch.dtype = fp32
    window_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    offsets_dtype: torch.dtype = torch.int32
    offsets: tuple[int, ...] | None = None
    padding: float = 0.0
    starts: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    counts: int | tuple[int, ...] | None = None
    counts_dtype: torch.dtype | None = None
    room: int | None = None
    state_layout: StateLayout = "vk"
    softmax_scale: float | None = None
    decays: tuple[float, ...] | None = None
    fused_qkv: bool = False
    fused_window: bool = False
    tokens_first: bool = False
    pool_gap: int = 0
    window_gap: int = 0
    out_gap: int = 0
    shift: int = 0
    seed: int = 0

    @property
    def id(self) -> str:
        """Readable name that says how the case differs from the defaults."""
        parts = [self.op if not self.L else f"commit_layers{self.L}", f"rows{self.B}-slots{self.P}-window{self.N}"]
        parts += [f"tokens{self.T}"] if self.op == "verify" else []
        parts.append(f"heads{self.H}" + (f"-qkheads{self.G}" if self.G else ""))
        parts.append(f"k{self.K}-v{self.V}-{_SHORT[self.io_dtype]}-state_{_SHORT[self.state_dtype]}")
        for name, dtype in (("window", self.window_dtype), ("out", self.out_dtype)):
            parts += [f"{name}_{_SHORT[dtype]}"] if dtype is not None else []
        parts += [self.state_layout] if self.state_layout != "vk" else []
        parts += ["int64"] if self.offsets_dtype is not torch.int32 else []
        for name, values in (("at", self.offsets), ("start", self.starts), ("length", self.lengths)):
            parts += [name + "_".join(str(n) for n in values[:6])] if values is not None else []
        if self.counts is not None:
            counts = self.counts if isinstance(self.counts, tuple) else (self.counts,)
            parts.append("counts" + "_".join(str(n) for n in counts[:6]))
        parts += [str(self.counts_dtype).replace("torch.", "counts_")] if self.counts_dtype is not None else []
        parts += [f"decays{'_'.join(f'{d:g}' for d in self.decays[:4])}"] if self.decays is not None else []
        for name in ("room", "softmax_scale"):
            parts += [f"{name}{getattr(self, name)}"] if getattr(self, name) is not None else []
        for name in ("padding", "pool_gap", "window_gap", "out_gap", "shift", "seed"):
            parts += [f"{name}{getattr(self, name)}"] if getattr(self, name) else []
        parts += [name for name in ("fused_qkv", "fused_window", "tokens_first") if getattr(self, name)]
        return "-".join(parts)


# Rings that wrap: the pending tokens begin at the last places and go on at the first.
DECODE = WindowCase("decode", B=4, offsets=(2, 0, 5, 1), starts=(3, 2, 3, 1), lengths=(0, 3, 2, 4))
VERIFY = WindowCase("verify", B=4, N=8, T=4, offsets=(2, 0, 5, 1), starts=(7, 6, 3, 5), lengths=(0, 4, 2, 3))
COMMIT = WindowCase(
    "commit", B=4, N=8, offsets=(2, 0, 5, 1), starts=(7, 6, 3, 5), lengths=(0, 4, 8, 3), counts=(4, 2, 0, 5)
)
FOLD = replace(DECODE, op="fold")
ADVANCE = replace(COMMIT, op="advance")
CLEAR = replace(DECODE, op="clear")
RAGGED = replace(VERIFY, counts=(4, 1, 0, 3))
LAYERS = replace(COMMIT, L=3)

SAMPLE_CASES = (
    DECODE,
    replace(
        DECODE, B=6, H=3, offsets=(5, -1, 0, -7, 1, -(2**31)), starts=(3, 0, 2, 0, 1, 0), lengths=(2, 1, 4, 1, 0, 1)
    ),
    replace(DECODE, state_layout="kv", K=128, V=64, H=6, G=2, out_dtype=fp32),
    replace(DECODE, io_dtype=fp32, out_dtype=fp32, state_dtype=bf16),
    VERIFY,
    RAGGED,
    replace(
        RAGGED, B=5, offsets=(2, 0, -1, 5, 1), starts=(7, 6, 0, 3, 0), lengths=(0, 4, 0, 2, 3), counts=(4, 1, 3, 0, 3)
    ),
    replace(RAGGED, state_layout="kv", K=128, V=64, H=6, G=2, io_dtype=fp32, out_dtype=fp32),
    replace(VERIFY, lengths=(5, 4, 8, 3)),
    FOLD,
    replace(FOLD, room=2, H=4, G=2),
    COMMIT,
    replace(COMMIT, state_layout="kv", K=128, V=64, H=6, G=2, state_dtype=bf16),
    replace(COMMIT, room=4),
    LAYERS,
    replace(LAYERS, H=4, G=2, state_layout="kv"),
    ADVANCE,
    replace(ADVANCE, counts=None, lengths=(0, 7, 8, 3)),
    replace(ADVANCE, room=4),
    CLEAR,
    replace(CLEAR, room=2),
)
"""Few and small, but together they tell every known kind of wrong kernel from a right one."""

INT32, INT64 = torch.int32, torch.int64


def _sizes() -> list[WindowCase]:
    cases = []
    alternating: tuple[StateLayout, StateLayout] = ("vk", "kv")
    sizes = [(64, 64), (128, 128), (128, 64), (64, 256), (256, 128), (16, 16), (96, 80), (40, 136), (1, 1), (7, 5)]
    for n, (k_size, v_size) in enumerate(sizes):
        for base in (DECODE, RAGGED, COMMIT):
            for layout in alternating if n < 2 else alternating[n % 2 :][:1]:
                cases.append(replace(base, K=k_size, V=v_size, state_layout=layout, seed=1))
    return cases


def _dtypes() -> list[WindowCase]:
    cases = []
    for io, state, window in product((bf16, fp16, fp32), (fp32, bf16, fp16), (None, fp32)):
        if io is fp32 and window is fp32:
            continue
        some = {"io_dtype": io, "state_dtype": state, "window_dtype": window, "seed": 2}
        cases += [replace(base, **some) for base in (DECODE, RAGGED, COMMIT)]  # type: ignore[arg-type]
    for io, out in product((bf16, fp16, fp32), repeat=2):
        cases += [replace(base, io_dtype=io, out_dtype=out, seed=2) for base in (DECODE, RAGGED)]
    for offsets, counts in product((INT32, INT64), (INT32, INT64)):
        for base in (RAGGED, COMMIT, ADVANCE):
            cases.append(replace(base, offsets_dtype=offsets, counts_dtype=counts, seed=2))
    return cases


def _phases() -> list[WindowCase]:
    """Windows of all sizes, empty, almost full and full, wrapped."""
    cases = []
    for N in (1, 4, 7, 8, 16, 64):
        phases = {"N": N, "lengths": (0, N - 1, N), "starts": (N - 1, N // 2, N // 3), "offsets": (4, 0, 2), "seed": 3}
        for op in ("decode", "fold", "clear"):
            cases.append(WindowCase(op, **phases))  # type: ignore[arg-type]
        for op in ("commit", "advance"):
            cases.append(WindowCase(op, **phases, counts=(N, 1, 0)))  # type: ignore[arg-type]
        for room in {1, N // 2 + 1, N}:
            cases += [WindowCase(op, **phases, room=room) for op in ("fold", "clear")]  # type: ignore[arg-type]
            for op in ("commit", "advance"):
                cases.append(WindowCase(op, **phases, counts=(N // 2, 1, 0), room=room))  # type: ignore[arg-type]
    for T, N in ((1, 1), (1, 8), (2, 4), (4, 4), (4, 7), (8, 8), (8, 16), (16, 16), (16, 64), (33, 64)):
        more = min(4, N - T)
        lengths, starts = (0, N - T, more), (N - 1, T % N, (N + T // 2) % N)
        some = WindowCase("verify", N=N, T=T, offsets=(4, 0, 2), lengths=lengths, starts=starts, seed=3)
        cases += [some, replace(some, counts=(T, T // 2, max(T - 1, 0)))]
        cases += [replace(some, lengths=(N, N - T + 1, 0), counts=(T, T, 1))]  # no room in two rows
    return cases


def _numbers() -> list[WindowCase]:
    """Slopes at the ends and beyond what an inverse power could hold; scales."""
    cases = []
    for decays in ((0.0, 0.0), (0.0, 1000.0), (20.0, 0.01), (1000.0, 1.0), (40.0, 5.0), (87.0, 104.0)):
        some = {"decays": decays, "io_dtype": fp32, "out_dtype": fp32, "seed": 4}
        deep = {"N": 32, "T": 16, "lengths": (8, 16, 12, 0), "starts": (30, 20, 0, 31), "counts": None}
        cases += [replace(base, **some) for base in (DECODE, RAGGED)]  # type: ignore[arg-type]
        cases.append(replace(VERIFY, **{**some, **deep}))  # type: ignore[arg-type]
        cases.append(replace(COMMIT, decays=decays, io_dtype=fp32, seed=4))
    for scale in (0.0, 1.0, 0.5, -2.0):
        cases += [replace(base, softmax_scale=scale, io_dtype=fp32, seed=4) for base in (DECODE, RAGGED)]
    return cases


def _memory() -> list[WindowCase]:
    """Views: strides, gaps, alignment, fused buffers; batches and pools; grouped heads; padding."""
    cases = []
    gaps = {"pool_gap": 256, "window_gap": 32, "out_gap": 64, "fused_qkv": True, "fused_window": True}
    for base in (DECODE, RAGGED, COMMIT, FOLD, ADVANCE, CLEAR, LAYERS):
        cases.append(replace(base, **gaps, seed=5))  # type: ignore[arg-type]
        for shift, layout in ((1, "vk"), (3, "kv"), (8, "vk")):
            some = {"shift": shift, "state_layout": layout, "pool_gap": shift, "window_gap": shift}
            cases.append(replace(base, **some, counts_dtype=INT64 if base.counts is not None else None, seed=5))  # type: ignore[arg-type]
    cases.append(replace(RAGGED, tokens_first=True, out_gap=3, seed=5))
    for heads, groups in ((2, 1), (6, 3), (8, 2), (5, 5)):
        cases += [replace(base, H=heads, G=groups, seed=5) for base in (DECODE, RAGGED, COMMIT, LAYERS)]
    for base in (DECODE, VERIFY, COMMIT, FOLD, ADVANCE, CLEAR):
        drawn = replace(base, offsets=None, starts=None, lengths=None, counts=None, H=1, V=64, seed=6)
        counts = INT32 if base.op in ("verify", "commit", "advance") else None
        for rows, slots in ((1, 1), (1, 300), (17, 33), (33, 40)):
            cases.append(replace(drawn, B=rows, P=slots, padding=0.3 if rows > 1 else 0.0, counts_dtype=counts))
        nobody = replace(drawn, B=3, offsets=(-1, -(2**31), -6), counts_dtype=counts)
        cases += [
            nobody,
            replace(nobody, P=0),
            replace(nobody, offsets=(-1, -4, 5)),
            replace(nobody, offsets=(-5, 0, -1)),
        ]
    far = replace(DECODE, B=3, offsets=(-(2**63), 3, -(2**40)), offsets_dtype=INT64, starts=None, lengths=(0, 2, 0))
    return [*cases, far]


REFERENCE_CASES = tuple(dict.fromkeys([*_sizes(), *_dtypes(), *_phases(), *_numbers(), *_memory()]))
"""Every rule of the window that a single call can show, on every dtype, layout and kind of size."""
