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

A window brings in `m` tokens at once. A share that came in `j` tokens ago has decayed `j` times, so the allowance has a
part that grows with age: `aging * norm(aged)`, where `aged` is the magnitude with each share times its age.

============ ============================================== ==========================================================
term         value                                          why
============ ============================================== ==========================================================
aging        (3 + 3 * d) * u                                per step of age. exp(-d * j): exp2 loses 3, its argument
                                                            d * j * log2(e) three roundings of d * j * u; or a product
                                                            of j factors exp(-d), each of which loses 3 + 2 * d
state        (2 + 2 * sqrt(2 * m + f)) * u                  v times k, times its power; 2 roundings of what is there
                                                            for each token that comes in, a product and a sum, which
                                                            add up like a random walk, doubled; `f` counts states that
                                                            were stored on the way, in a float32 pool
out          (2 * sqrt(K) + 4 + 2 * sqrt(2 * m + f)) * u    sums over K as above, of states times q or of k times q;
                                                            products with v, a power and the scale
============ ============================================== ==========================================================

With 16 pending tokens and 16 drafts at K = 128 and slopes below 1 that is 5e-6 for a float32 output of order 1, where a
decay that is off by one power is off by `1 - exp(-d)`.
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


@dataclass(frozen=True)
class WindowTolerance:
    """Like :class:`Tolerance`, for results to which tokens of different age contribute."""

    store: float
    floor: float
    arithmetic: float
    aging: torch.Tensor
    """One factor per head."""

    def allowed(
        self, truth_norm: torch.Tensor, magnitude_norm: torch.Tensor, aged_norm: torch.Tensor, elements: int
    ) -> torch.Tensor:
        """Allowed L2 error for norms [H] over `elements` values each."""
        allowed: torch.Tensor = (
            self.store * truth_norm
            + self.floor * math.sqrt(elements)
            + self.arithmetic * magnitude_norm
            + self.aging * aged_norm
        )
        return allowed


def window_out_tolerance(
    out_dtype: torch.dtype, k_size: int, decay_scales: torch.Tensor, tokens: int, stores: int = 0
) -> WindowTolerance:
    """For an output over `tokens` tokens, of which the states were stored `stores` times in float32 on the way."""
    return _window_tolerance(out_dtype, decay_scales, 2.0 * math.sqrt(k_size) + 4, tokens, stores)


def window_state_tolerance(
    state_dtype: torch.dtype, decay_scales: torch.Tensor, tokens: int, stores: int = 0
) -> WindowTolerance:
    """For states into which `tokens` tokens came."""
    return _window_tolerance(state_dtype, decay_scales, 2, tokens, stores)


def _window_tolerance(
    dtype: torch.dtype, decay_scales: torch.Tensor, operations: float, tokens: int, stores: int
) -> WindowTolerance:
    u = UNIT_ROUNDOFF[torch.float32]
    decays = decay_scales.detach().cpu().double().clamp(0, MAX_DECAY)
    arithmetic = (operations + 2 * math.sqrt(2 * tokens + stores)) * u
    return WindowTolerance(UNIT_ROUNDOFF[dtype], SMALLEST_SUBNORMAL[dtype] / 2, arithmetic, (3 + 3 * decays) * u)
