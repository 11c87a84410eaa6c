"""A wrong call gives the same exception and the same sentence, whichever backend is asked for."""

from __future__ import annotations

import contextlib

import pytest
import torch

from la_core import SpecViolation, decode, decode_problem, use_backend
from la_core.compat.cula import linear_attention_decode
from la_core.conformance.compare import same_bits
from la_core.conformance.decode_error_cases import (
    DECODE_ERROR_CASES,
    DECODE_OFFSET_ERROR_CASES,
    Arguments,
    DecodeErrorCase,
    legal_arguments,
)
from la_core.conformance.target import DeclaredRefusal, Target


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


def _run(target: Target, arguments: Arguments) -> torch.Tensor:
    """The legal call, unless the backend declares that it does not run its sizes or dtypes."""
    tensors = [arguments[name] for name in ("q", "k", "v", "s", "s_offsets", "decay_scales")]
    refusal = target.backend.refusal(decode_problem(*tensors, arguments.get("out")))
    if refusal is not None:
        raise DeclaredRefusal(f"{target} {refusal}")
    return decode(**arguments, backend=target.name)


def test_the_call_that_the_cases_change_is_legal(target: Target) -> None:
    _run(target, legal_arguments(target.device))


@pytest.mark.parametrize("case", DECODE_ERROR_CASES, ids=lambda case: case.id)
def test_wrong_call(target: Target, case: DecodeErrorCase) -> None:
    arguments = legal_arguments(target.device)
    case.change(arguments)
    _assert_refused(target, arguments, case.sentence)


@pytest.mark.parametrize("case", DECODE_ERROR_CASES, ids=lambda case: case.id)
def test_wrong_call_after_a_right_one(target: Target, case: DecodeErrorCase) -> None:
    """What the last call had found legal must not speak for this one."""
    with contextlib.suppress(DeclaredRefusal):
        _run(target, legal_arguments(target.device))
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
    out = _run(target, {**arguments, "check_offsets": True})
    assert bool((out == 0).all())


def test_what_requires_grad_is_fine_without_grad_mode(target: Target) -> None:
    arguments = legal_arguments(target.device)
    arguments["q"].requires_grad_()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            _run(target, arguments)


def test_interleaved_slices_of_one_buffer_do_not_overlap(target: Target) -> None:
    """q, k, v and out as slices of one buffer share no element, so the call is legal."""
    arguments = legal_arguments(target.device)
    expected = _run(target, legal_arguments(target.device))
    fused = torch.zeros(2, 128 + 128 + 512 + 512, dtype=torch.bfloat16, device=target.device)
    for name, part in zip(("q", "k", "v", "out"), fused.split([128, 128, 512, 512], dim=1), strict=True):
        view = part.unflatten(1, arguments[name].shape[1:])
        view.copy_(arguments[name])
        arguments[name] = view
    assert same_bits(decode(**arguments, backend=target.name), expected)


def test_cula_signature_runs_and_obeys_the_offsets(target: Target) -> None:
    arguments = legal_arguments(target.device)
    q, k, v = (torch.randn(2, 4, 128, device=target.device).bfloat16() for _ in range(3))
    square = {"q": q, "k": k, "v": v, "s": torch.randn(12, 128, 128, device=target.device)}
    offsets_and_slopes = {name: arguments[name] for name in ("s_offsets", "decay_scales")}
    ours = {**square, "s": square["s"].clone()}
    expected = _run(target, {**ours, **offsets_and_slopes, "softmax_scale": 0.5})
    out = torch.full_like(v, torch.nan)
    with use_backend(target.name):
        _call_cula({**square, "out": out, **offsets_and_slopes}, 128, 128, 128)
    assert same_bits(out, expected)
    assert same_bits(square["s"], ours["s"])


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((128, 64, 128), "K_SPLIT_DIM must equal HEAD_DIM = 128; got 64"),
        ((128, 128, 64), "V_SPLIT_DIM must equal HEAD_DIM = 128; got 64"),
        ((64, 64, 64), "HEAD_DIM must be the last size of v, 128; got 64"),
        ((128, 128, 128), "HEAD_DIM must be the last size of q, 64; got 128"),
    ],
)
def test_cula_sizes_that_the_signature_cannot_say(target: Target, sizes: tuple[int, int, int], sentence: str) -> None:
    arguments = legal_arguments(target.device)  # K = 64, V = 128
    before = {name: value.clone() for name, value in arguments.items()}
    with use_backend(target.name), pytest.raises(NotImplementedError, match=f"linear_attention_decode: {sentence}"):
        _call_cula(arguments, *sizes)
    assert all(same_bits(before[name], value) for name, value in arguments.items())


def test_cula_signature_must_be_given_an_out(target: Target) -> None:
    arguments = {**legal_arguments(target.device), "out": None}
    with use_backend(target.name), pytest.raises(SpecViolation, match=r"out must be a torch\.Tensor \[B, H, V\]; got"):
        _call_cula(arguments, 64, 64, 64)


def _call_cula(arguments: Arguments, head_dim: int, k_split: int, v_split: int) -> None:
    """Strides are nonsense on purpose: they are ignored."""
    tensors = (arguments[name] for name in ("q", "k", "v", "s", "out"))
    last = arguments["s_offsets"], arguments["decay_scales"]
    linear_attention_decode(*tensors, 0.5, 1, 2, 3, 4, 5, *last, head_dim, k_split, v_split)
