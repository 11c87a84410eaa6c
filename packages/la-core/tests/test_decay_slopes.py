"""Worked numbers of the slope conventions."""

from __future__ import annotations

import pytest
import torch

from la_core import SpecViolation, decay_slopes


def test_alibi_slopes_of_a_power_of_two() -> None:
    assert decay_slopes(8, 0, 1, convention="none").tolist() == [2.0**-n for n in range(1, 9)]


def test_alibi_slopes_of_other_numbers() -> None:
    """12 heads: the 8 slopes of 8 heads, then every other one of 16: 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5."""
    expected = [*(2.0**-n for n in range(1, 9)), *(2.0 ** -(n + 0.5) for n in range(4))]
    assert torch.equal(decay_slopes(12, 0, 1, convention="none"), torch.tensor(expected))


@pytest.mark.parametrize(
    ("convention", "layer", "factor"),
    [
        ("minimax", 0, 1.00001),
        ("minimax", 1, 1 - 1 / 19 + 1e-5),
        ("minimax", 19, 0.00001),
        ("bailing-hf", 0, 1 + 1 / 19 + 1e-5),
        ("bailing-hf", 1, 1.00001),
        ("bailing-hf", 19, 1 / 19 + 1e-5),
        ("none", 7, 1.0),
    ],
)
def test_layer_factors(convention: str, layer: int, factor: float) -> None:
    slopes = decay_slopes(16, layer, 20, convention=convention)  # type: ignore[arg-type]
    alibi = torch.tensor([2.0 ** (-(i + 1) / 2) for i in range(16)], dtype=torch.float64)
    assert torch.equal(slopes, (alibi * factor).float())


def test_the_conventions_are_different_models() -> None:
    """The numbers that the docstring names: head 0 of layer 1 of Ring-mini-linear-2.0's 20 layers and 16 heads."""
    minimax, bailing = (decay_slopes(16, 1, 20, convention=c)[0].item() for c in ("minimax", "bailing-hf"))  # type: ignore[arg-type]
    assert (round(minimax, 5), round(bailing, 5)) == (0.6699, 0.70711)


def test_a_single_layer_of_minimax() -> None:
    assert decay_slopes(1, 0, 1, convention="minimax").tolist() == pytest.approx([2.0**-8 * 1.00001], rel=2.0**-24)


def test_tensor_parallel_ranks_hold_consecutive_heads() -> None:
    whole = decay_slopes(64, 3, 80, convention="minimax")
    ranks = [decay_slopes(64, 3, 80, convention="minimax", tp_rank=r, tp_size=8) for r in range(8)]
    assert all(rank.shape == (8,) for rank in ranks)
    assert torch.equal(torch.cat(ranks), whole)
    assert whole.dtype is torch.float32


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((0, 0, 2, "none"), "decay_slopes: num_heads must be a whole number >= 1; got 0. Pass the model's number."),
        ((4.0, 0, 2, "none"), "decay_slopes: num_heads must be a whole number >= 1; got 4.0. Pass the model's number."),
        ((4, 0.5, 2, "none"), "decay_slopes: layer must be a whole number; got 0.5. Pass the model's number."),
        ((4, 2, 2, "none"), "decay_slopes: layer must be in [0, 2); got 2. Layers are counted from 0."),
        ((4, -1, 2, "none"), "decay_slopes: layer must be in [0, 2); got -1. Layers are counted from 0."),
        (
            (4, 0, 1, "bailing-hf"),
            "decay_slopes: num_layers must be at least 2 for convention 'bailing-hf', whose factor divides by L - 1; "
            "got 1. A model of one layer has no such slopes.",
        ),
        (
            (4, 0, 2, "bailing"),
            "decay_slopes: convention must be one of 'minimax', 'bailing-hf', 'none'; got 'bailing'. "
            "Pass the one of the model's code.",
        ),
    ],
)
def test_wrong_values(arguments: tuple[float, float, int, str], sentence: str) -> None:
    with pytest.raises(SpecViolation) as raised:
        decay_slopes(*arguments[:3], convention=arguments[3])  # type: ignore[arg-type]
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("rank", "size", "sentence"),
    [
        (0, 3, "decay_slopes: num_heads must be divisible by tp_size = 3; got 4. Pass the model's own numbers."),
        (2, 2, "decay_slopes: tp_rank must be in [0, 2); got 2. Ranks are counted from 0."),
        (0, 0, "decay_slopes: tp_size must be a whole number >= 1; got 0. Pass the model's number."),
    ],
)
def test_wrong_ranks(rank: int, size: int, sentence: str) -> None:
    with pytest.raises(SpecViolation) as raised:
        decay_slopes(4, 0, 2, convention="none", tp_rank=rank, tp_size=size)
    assert str(raised.value) == sentence
