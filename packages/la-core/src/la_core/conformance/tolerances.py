"""The only tolerances of the repository, each with its derivation.

A result is judged per (row, head) by the L2 norm of its error. The allowance is

    store * norm(truth) + floor + arithmetic * norm(magnitude)

`store` is the one rounding at the end, `floor` the spacing of subnormal numbers, and `arithmetic` what float32
operations may lose, relative to the magnitude: the sum of absolute values, which cancellation cannot make small.
With u = 2**-24 the unit roundoff of float32:

============ ============================================== ==========================================================
term         value                                          why
============ ============================================== ==========================================================
store        2**-8 bf16, 2**-11 fp16, 2**-24 fp32           half a unit in the last place, to nearest even
floor        sqrt(n) times half the smallest subnormal      where the format cannot scale its rounding any more
state        (6 + 2 * d) * u                                decay times S, v times k and their sum round once each;
                                                            a hardware exp2 is good to 2 units, and its argument
                                                            d * log2(e) carries two roundings of d * u each
out          (2 * sqrt(K) + 8 + 2 * d) * u                  the state's terms, the products, and a sum over K whose
                                                            rounding errors add up like a random walk, doubled
============ ============================================== ==========================================================

At K = V = 128 with states of order 1 this allows about 5e-7 for a float32 state and 2e-5 for a float32 output, against
2e-3 for a state that was rounded to bf16 on the way and 2e-2 for a scale that is 2 % off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST_SUBNORMAL = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
MAX_DECAY = 104.0
"""Beyond this exp(-d) is zero in float32, however its argument was rounded."""


@dataclass(frozen=True)
class Tolerance:
    """How far a result [..., n] may be from the truth, as factors of norms over its last dimensions."""

    store: float
    floor: float
    arithmetic: torch.Tensor
    """One factor per head."""

    def allowed(self, truth_norm: torch.Tensor, magnitude_norm: torch.Tensor, elements: int) -> torch.Tensor:
        """Allowed L2 error for norms [..., H] over `elements` values each."""
        allowed: torch.Tensor = (
            self.store * truth_norm + self.floor * math.sqrt(elements) + self.arithmetic * magnitude_norm
        )
        return allowed


def out_tolerance(out_dtype: torch.dtype, k_size: int, decay_scales: torch.Tensor) -> Tolerance:
    """For `out` in `out_dtype`, summed over `k_size`, under slopes [H]."""
    return _tolerance(out_dtype, decay_scales, 2.0 * math.sqrt(k_size) + 8)


def state_tolerance(state_dtype: torch.dtype, decay_scales: torch.Tensor) -> Tolerance:
    """For states stored in `state_dtype`, under slopes [H]."""
    return _tolerance(state_dtype, decay_scales, 6)


def _tolerance(dtype: torch.dtype, decay_scales: torch.Tensor, operations: float) -> Tolerance:
    decays = decay_scales.detach().cpu().double().clamp(0, MAX_DECAY)
    return Tolerance(UNIT_ROUNDOFF[dtype], SMALLEST_SUBNORMAL[dtype] / 2, (operations + 2 * decays) * 2.0**-24)
