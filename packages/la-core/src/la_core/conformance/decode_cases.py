"""Decode calls as data: sample cases for every quick check, reference cases that span the contract."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch

from la_core.spec.decode_problem import StateLayout

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS: tuple[StateLayout, ...] = ("vk", "kv")
_SHORT = {bf16: "bf16", fp16: "fp16", fp32: "fp32"}


@dataclass(frozen=True)
class DecodeCase:
    """One call, complete: the same case gives the same tensors on every machine.

    Attributes
    ----------
    B, P, H, K, V, G
        Sizes as in the contract; `G = 0` stands for `G = H`.
    io_dtype, state_dtype, out_dtype, offsets_dtype
        Dtypes; `out_dtype` None leaves the output to the operator.
    offsets
        The slots; None draws distinct slots at random, a share `padding` of the rows negative.
    state_layout
        `"vk"` or `"kv"`.
    softmax_scale
        None for the default.
    decays
        Slopes; None spreads them from 0.02 to 1 over the heads.
    fused_qkv
        q, k and v are slices of one buffer whose rows hold all three.
    pool_gap, out_gap
        Unused elements between the rows of `s` and of `out`.
    shift
        Elements by which every tensor starts behind an aligned address.
    seed
        Of the random values.
    """

    B: int
    P: int
    H: int
    K: int
    V: int
    G: int = 0
    io_dtype: torch.dtype = bf16
    state_dtype: torch.dtype = fp32
    out_dtype: torch.dtype | None = None
    offsets_dtype: torch.dtype = torch.int32
    offsets: tuple[int, ...] | None = None
    padding: float = 0.0
    state_layout: StateLayout = "vk"
    softmax_scale: float | None = None
    decays: tuple[float, ...] | None = None
    fused_qkv: bool = False
    pool_gap: int = 0
    out_gap: int = 0
    shift: int = 0
    seed: int = 0

    @property
    def id(self) -> str:
        """Readable name that says how the case differs from the defaults."""
        parts = [f"rows{self.B}-slots{self.P}-heads{self.H}"]
        if self.G:
            parts.append(f"qkheads{self.G}")
        parts.append(f"k{self.K}-v{self.V}-{_SHORT[self.io_dtype]}-state_{_SHORT[self.state_dtype]}")
        if self.out_dtype is not None:
            parts.append(f"out_{_SHORT[self.out_dtype]}")
        if self.state_layout != "vk":
            parts.append(self.state_layout)
        if self.offsets_dtype is not torch.int32:
            parts.append("int64")
        if self.offsets is not None:
            parts.append("at" + "_".join(str(n) for n in self.offsets[:6]) + ("_more" if self.B > 6 else ""))
        for name in ("padding", "softmax_scale", "pool_gap", "out_gap", "shift", "seed"):
            value = getattr(self, name)
            if (value is not None and value != 0) or (name == "softmax_scale" and value == 0):
                parts.append(f"{name}{value}")
        if self.decays is not None:
            parts.append("decays" + "_".join(f"{d:g}" for d in self.decays[:4]))
        if self.fused_qkv:
            parts.append("fused")
        return "-".join(parts)


IDENTITY = DecodeCase(B=4, P=4, H=4, K=64, V=128, offsets=(0, 1, 2, 3))
NON_IDENTITY = DecodeCase(B=4, P=6, H=4, K=64, V=128, offsets=(2, 0, 5, 1))
REVERSED = DecodeCase(B=4, P=4, H=4, K=64, V=128, offsets=(3, 2, 1, 0))
BIG_BATCH = DecodeCase(B=33, P=40, H=2, K=64, V=128)
PADDED = DecodeCase(B=6, P=8, H=3, K=128, V=64, offsets=(5, -1, 0, -7, 7, -(2**31)))

SAMPLE_CASES = (
    IDENTITY,
    NON_IDENTITY,
    REVERSED,
    BIG_BATCH,
    PADDED,
    replace(NON_IDENTITY, state_layout="kv", K=128, V=64),
    replace(NON_IDENTITY, H=6, G=2, out_dtype=fp32),
    replace(NON_IDENTITY, io_dtype=fp32, out_dtype=fp32),
    replace(NON_IDENTITY, state_dtype=bf16, out_dtype=fp32),
)
"""Few and small, but together they tell every known kind of wrong kernel from a right one."""

_BASE = DecodeCase(B=3, P=7, H=2, K=64, V=128, padding=0.3)


def _reference_cases() -> tuple[DecodeCase, ...]:
    cases: list[DecodeCase] = []
    # Every dtype in every role.
    for io, state, out in product((bf16, fp16, fp32), (fp32, bf16, fp16), (None, bf16, fp16, fp32)):
        cases.append(replace(_BASE, io_dtype=io, state_dtype=state, out_dtype=out, seed=1))
    # Sizes: both orders of K and V, powers of two and not, V no multiple of anything.
    square = [(64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (64, 256), (256, 256)]
    odd = [
        (16, 16),
        (32, 64),
        (96, 80),
        (80, 96),
        (16, 8),
        (16, 24),
        (40, 136),
        (136, 40),
        (1, 1),
        (1, 5),
        (7, 1),
        (3, 129),
    ]
    for (k_size, v_size), layout in product(square + odd, LAYOUTS):
        cases.append(replace(_BASE, K=k_size, V=v_size, state_layout=layout, seed=2))
    # Grouped heads.
    for heads, groups in ((2, 1), (4, 2), (6, 2), (6, 3), (8, 8), (12, 1), (5, 5)):
        cases.append(replace(_BASE, H=heads, G=groups, seed=3))
    # Batch and pool sizes; one row in a large pool; more rows than any block.
    for rows, slots in (
        (1, 1),
        (1, 500),
        (2, 3),
        (16, 16),
        (17, 33),
        (32, 40),
        (33, 40),
        (64, 70),
        (130, 150),
        (300, 310),
        (513, 520),
    ):
        cases.append(replace(_BASE, B=rows, P=slots, H=1, seed=4))
    # Strides and alignment, at the batch sizes around which kernels switch.
    for rows in (1, 4, 32, 33):
        for layout in LAYOUTS:
            cases.append(
                replace(_BASE, B=rows, P=rows + 3, fused_qkv=True, pool_gap=256, out_gap=64, state_layout=layout)
            )
            for shift in (1, 2, 8):
                cases.append(
                    replace(_BASE, B=rows, P=rows + 3, shift=shift, state_layout=layout, pool_gap=shift, seed=5)
                )
            cases.append(
                replace(_BASE, B=rows, P=rows + 3, shift=3, fused_qkv=True, out_gap=5, state_dtype=bf16, seed=5)
            )
    # Padding: almost all, all, the largest negative numbers, slot 0 and the last slot live or not.
    cases += [
        replace(_BASE, B=64, P=9, padding=0.94, H=1, seed=6),
        replace(_BASE, offsets=(-1, -1, -1)),
        replace(_BASE, offsets=(-1, -1, 2)),
        replace(_BASE, offsets=(-1, -1, 0)),
        replace(_BASE, offsets=(-1, -1, 6)),
        replace(_BASE, offsets=(-(2**31), 3, -5)),
        replace(_BASE, offsets=(-(2**63), 3, -(2**40)), offsets_dtype=torch.int64),
        replace(_BASE, offsets=(-1, -2, -3), P=0),
    ]
    # Scales and slopes.
    for scale in (0.0, 1.0, 0.5, -2.0, None):
        cases.append(replace(_BASE, softmax_scale=scale, io_dtype=fp32, seed=7))
    for decays in ((0.0, 0.0), (0.0, 0.5), (20.0, 0.01), (1000.0, 1.0), (50.0, 5.0), (87.0, 100.0)):
        cases.append(replace(_BASE, decays=decays, io_dtype=fp32, out_dtype=fp32, seed=8))
    cases.append(replace(_BASE, offsets_dtype=torch.int64, seed=9))
    return tuple(dict.fromkeys(cases))


REFERENCE_CASES = _reference_cases()
"""Every rule of the contract that a single call can show, on every dtype, layout and kind of size."""
