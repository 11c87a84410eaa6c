"""The per-head slopes that released Lightning Attention models use."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from la_core.spec.argument_checks import violation

SlopeConvention = Literal["minimax", "bailing-hf", "none"]


def decay_slopes(
    num_heads: int,
    layer: int,
    num_layers: int,
    *,
    convention: SlopeConvention,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> torch.Tensor:
    """Slopes of the heads of one layer, to pass as `decay_scales`.

    Slopes are those of ALiBi (Press et al., 2022, arXiv:2108.12409), `2**(-8 * (i + 1) / n)` for head `i` of `n`,
    times a factor that depends on the layer. The conventions for that factor differ, and are confused in the field:

    ============== ================================ ========================================================
    convention     factor of layer `l` of `L`       used by
    ============== ================================ ========================================================
    `"minimax"`    `1 - l / (L - 1) + 1e-5`         MiniMax-01 in SGLang and vLLM, and their Ring/Ling-2.x
    `"bailing-hf"` `1 - (l - 1) / (L - 1) + 1e-5`   the modelling code published with Ring/Ling-2.x
    `"none"`       `1`                              MiniCPM-SALA
    ============== ================================ ========================================================

    The first two are not the same model: at 20 layers and 16 heads, head 0 of layer 1 has the slope 0.66990
    under `"minimax"` and 0.70711 under `"bailing-hf"`. Take the convention that the weights were trained with.

    Parameters
    ----------
    num_heads
        Heads of the whole model, before tensor parallelism. If not a power of two, ALiBi's rule holds: the slopes
        of the largest power of two below, then every other slope of the next power of two.
    layer
        `l`, counted from 0 over all layers of the model, the softmax attention layers included.
    num_layers
        `L`, all layers of the model. A single layer has the factor `1 + 1e-5` under `"minimax"`, as in SGLang.
    convention
        The layer factor, see above.
    tp_rank, tp_size
        This rank and the number of ranks of tensor parallelism: the rank's heads are consecutive.

    Returns
    -------
    Tensor [num_heads / tp_size], float32, on the CPU
        Computed in float64 and rounded once.

    Raises
    ------
    SpecViolation
        A value is out of its range, or `num_heads` is not divisible by `tp_size`.

    Examples
    --------
    >>> import la_core
    >>> la_core.decay_slopes(4, layer=0, num_layers=5, convention="none").tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    op = "decay_slopes"
    for name, value, low in (("num_heads", num_heads, 1), ("num_layers", num_layers, 1), ("tp_size", tp_size, 1)):
        if not isinstance(value, int) or value < low:
            raise violation(op, f"{name} must be a whole number >= {low}", repr(value), "Pass the model's number.")
    for name, value in (("layer", layer), ("tp_rank", tp_rank)):
        if not isinstance(value, int):
            raise violation(op, f"{name} must be a whole number", repr(value), "Pass the model's number.")
    if not 0 <= layer < num_layers:
        raise violation(op, f"layer must be in [0, {num_layers})", str(layer), "Layers are counted from 0.")
    if not 0 <= tp_rank < tp_size:
        raise violation(op, f"tp_rank must be in [0, {tp_size})", str(tp_rank), "Ranks are counted from 0.")
    if num_heads % tp_size:
        raise violation(
            op, f"num_heads must be divisible by tp_size = {tp_size}", str(num_heads), "Pass the model's own numbers."
        )
    if convention not in get_args(SlopeConvention):
        names = ", ".join(map(repr, get_args(SlopeConvention)))
        raise violation(op, f"convention must be one of {names}", repr(convention), "Pass the one of the model's code.")
    if convention == "bailing-hf" and num_layers < 2:
        raise violation(
            op,
            "num_layers must be at least 2 for convention 'bailing-hf', whose factor divides by L - 1",
            str(num_layers),
            "A model of one layer has no such slopes.",
        )
    factor = 1.0
    if convention == "minimax":
        factor = 1 - layer / max(num_layers - 1, 1) + 1e-5
    elif convention == "bailing-hf":
        factor = 1 - (layer - 1) / (num_layers - 1) + 1e-5
    slopes = [slope * factor for slope in _alibi_slopes(num_heads)]
    heads = num_heads // tp_size
    return torch.tensor(slopes[tp_rank * heads : (tp_rank + 1) * heads], dtype=torch.float64).float()


def _alibi_slopes(num_heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    if power < num_heads:
        slopes += [2.0 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)][: num_heads - power]
    return slopes
