"""A wrong call gives the same exception and the same sentence, whichever backend is asked for."""

from __future__ import annotations

import pytest
import torch

from la_core import SpecViolation, decode, use_backend
from la_core.compat.cula import linear_attention_decode
from la_core.conformance.compare import same_bits
from la_core.conformance.decode_error_cases import (
    DECODE_ERROR_CASES,
    DECODE_OFFSET_ERROR_CASES,
    Arguments,
    DecodeErrorCase,
    legal_arguments,
)
from la_core.conformance.target import Target


def _assert_refused(target: Target, arguments: Arguments, sentence: str) -> None:
    """The sentence to the letter, and not a bit of any argument changed."""
    tensors = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"
    }
    before = {name: value.detach().clone() for name, value in tensors.items()}
    with pytest.raises(SpecViolation) as raised:
        decode(**arguments, backend=target.name)
    assert str(raised.value) == sentence.format(device=torch.zeros(1, device=target.device).device)
    for name, value in tensors.items():
        assert same_bits(value.detach().clone(), before[name]), f"{name} was written before the call was refused"


def test_the_call_that_the_cases_change_is_legal(target: Target) -> None:
    decode(**legal_arguments(target.device), backend=target.name)


@pytest.mark.parametrize("case", DECODE_ERROR_CASES, ids=lambda case: case.id)
def test_wrong_call(target: Target, case: DecodeErrorCase) -> None:
    arguments = legal_arguments(target.device)
    case.change(arguments)
    _assert_refused(target, arguments, case.sentence)


@pytest.mark.parametrize("case", DECODE_ERROR_CASES, ids=lambda case: case.id)
def test_wrong_call_after_a_right_one(target: Target, case: DecodeErrorCase) -> None:
    """What the last call had found legal must not speak for this one."""
    decode(**legal_arguments(target.device), backend=target.name)
    arguments = legal_arguments(target.device)
    case.change(arguments)
    _assert_refused(target, arguments, case.sentence)


@pytest.mark.parametrize("case", DECODE_OFFSET_ERROR_CASES, ids=lambda case: case.id)
def test_wrong_offsets(target: Target, case: DecodeErrorCase) -> None:
    arguments = legal_arguments(target.device)
    case.change(arguments)
    if target.device != "cpu":
        arguments["check_offsets"] = True
    _assert_refused(target, arguments, case.sentence)


def test_repeated_negative_offsets_are_fine(target: Target) -> None:
    arguments = legal_arguments(target.device)
    arguments["s_offsets"].fill_(-1)
    out = decode(**arguments, backend=target.name, check_offsets=True)
    assert bool((out == 0).all())


def test_what_requires_grad_is_fine_without_grad_mode(target: Target) -> None:
    arguments = legal_arguments(target.device)
    arguments["q"].requires_grad_()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            decode(**arguments, backend=target.name)


def test_interleaved_slices_of_one_buffer_do_not_overlap(target: Target) -> None:
    """q, k, v and out as slices of one buffer share no element, so the call is legal."""
    arguments = legal_arguments(target.device)
    expected = decode(**legal_arguments(target.device), backend=target.name)
    fused = torch.zeros(2, 128 + 128 + 512 + 512, dtype=torch.bfloat16, device=target.device)
    for name, part in zip(("q", "k", "v", "out"), fused.split([128, 128, 512, 512], dim=1), strict=True):
        view = part.unflatten(1, arguments[name].shape[1:])
        view.copy_(arguments[name])
        arguments[name] = view
    assert same_bits(decode(**arguments, backend=target.name), expected)


def test_cula_signature_runs_and_obeys_the_offsets(target: Target) -> None:
    arguments = legal_arguments(target.device)
    square = {
        "q": torch.randn(2, 4, 64, device=target.device),
        "k": torch.randn(2, 4, 64, device=target.device),
        "v": torch.randn(2, 4, 64, device=target.device),
        "s": torch.randn(12, 64, 64, device=target.device),
    }
    ours = {**square, "s": square["s"].clone()}
    expected = decode(
        **ours,
        s_offsets=arguments["s_offsets"],
        decay_scales=arguments["decay_scales"],
        softmax_scale=0.5,
        backend=target.name,
    )
    out = torch.full((2, 4, 64), torch.nan, device=target.device)
    with use_backend(target.name):
        linear_attention_decode(
            square["q"], square["k"], square["v"], square["s"], out, 0.5, 1, 2, 3, 4, 5,
            arguments["s_offsets"], arguments["decay_scales"], 64, 64, 64,
        )  # fmt: skip
    assert same_bits(out, expected)
    assert same_bits(square["s"], ours["s"])
