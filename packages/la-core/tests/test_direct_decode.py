"""What a backend offers for calls with known facts: when it is asked for, when it is taken, and when not."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from la_core import DecodeProblem, SpecViolation, decode
from la_core.backends.discover_backends import load_backend
from la_core.conformance.decode_error_cases import legal_arguments
from la_core.ops.decode_plan import DecodePlan, latest

decode_module = importlib.import_module("la_core.ops.decode")

Install = Callable[..., None]
Arguments = dict[str, Any]


class Offer:
    """The `direct_decode` of a made-up backend: fills what it writes with 2, unless it is told to answer False."""

    def __init__(self) -> None:
        self.asked: list[tuple[DecodeProblem, tuple[int, ...]]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.answer = True

    def __call__(self, problem: DecodeProblem, extents: tuple[int, ...]) -> Callable[..., bool]:
        self.asked.append((problem, extents))
        return self.direct

    def direct(self, *arguments: Any) -> bool:
        if self.answer:
            self.calls.append(arguments)
            arguments[6].fill_(2)
        return self.answer


@pytest.fixture
def offer(install: Install, monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Of the backend `made`, which fills what it writes with 1 in its `decode`."""
    install("made")
    made = Offer()
    monkeypatch.setattr(load_backend("made"), "direct_decode", made, raising=False)
    return made


def _arguments(**changes: Any) -> Arguments:
    return {**legal_arguments(), "backend": "made", **changes}


def _known(arguments: Arguments) -> DecodePlan:
    """The plan after two calls, as on a GPU, where no values can be read."""
    decode(**arguments)
    plan = latest.given if "out" in arguments else latest.allocating
    assert plan is not None
    plan.reads_values = False
    plan.offer = load_backend(arguments["backend"]).direct_decode  # type: ignore[attr-defined]
    decode(**arguments)
    return plan


def _is_direct(arguments: Arguments) -> bool:
    return bool((decode(**arguments) == 2).all())


def test_values_that_can_be_read_are_checked_in_every_call(offer: Offer) -> None:
    for _ in range(3):
        assert not _is_direct(_arguments())
    assert offer.asked == []


def test_it_is_asked_for_once_and_then_gets_every_call(offer: Offer) -> None:
    arguments = _arguments()
    plan = _known(arguments)
    assert [problem for problem, _ in offer.asked] == [plan.problem]
    assert offer.calls == []
    assert decode(**arguments) is arguments["out"]
    assert decode(**arguments, softmax_scale=0.5) is arguments["out"]
    assert len(offer.asked) == 1
    names = ("q", "k", "v", "s", "s_offsets", "decay_scales", "out")
    for (*tensors, scale), expected in zip(offer.calls, (64**-0.5, 0.5), strict=True):
        assert scale == expected
        assert all(tensor is arguments[name] for tensor, name in zip(tensors, names, strict=True))


def test_it_writes_to_an_output_of_its_own(offer: Offer) -> None:
    arguments = _arguments()
    del arguments["out"]
    # A slice of a buffer: what is allocated has other strides.
    arguments["v"] = torch.zeros(2, 4, 192, dtype=torch.bfloat16)[:, :, :128]
    _known(arguments)
    out = decode(**arguments)
    assert out is offer.calls[0][6]
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 4, 128), torch.bfloat16, True)
    assert bool((out == 2).all())


@pytest.mark.parametrize("given", [True, False], ids=["out-given", "out-allocated"])
def test_it_is_told_how_far_each_tensor_reaches(offer: Offer, given: bool) -> None:
    spread = torch.zeros(2, 4, 192, dtype=torch.bfloat16)
    arguments = _arguments(q=torch.zeros(2, 5, 64, dtype=torch.bfloat16)[:, 1:3], out=spread[:, :, :128])
    if not given:
        del arguments["out"]
    _known(arguments)
    ((_, extents),) = offer.asked
    out = 2 * (7 * 192 + 128) if given else 2 * 8 * 128
    assert extents == (2 * (5 + 2) * 64, 2 * 4 * 64, 2 * 8 * 128, 4 * 12 * 128 * 64, 4 * 2, 4 * 4, out)


def test_a_call_that_it_does_not_take_goes_the_whole_way(offer: Offer) -> None:
    arguments = _arguments()
    _known(arguments)
    offer.answer = False
    assert bool((decode(**arguments) == 1).all())
    with pytest.raises(SpecViolation, match="out is written and must not overlap v"):
        decode(**{**arguments, "out": arguments["v"]})
    with pytest.raises(SpecViolation, match="softmax_scale"):
        decode(**arguments, softmax_scale="1")


def test_what_it_raises_is_raised_and_nothing_is_done_again(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _arguments()
    plan = _known(arguments)

    def failing(*given: Any) -> bool:
        arguments["out"].fill_(3)
        raise RuntimeError("no such launch")

    monkeypatch.setattr(plan, "direct", failing)
    with pytest.raises(RuntimeError, match="no such launch"):
        decode(**arguments)
    assert bool((arguments["out"] == 3).all())


def test_a_scale_that_is_no_float_is_looked_at_first(offer: Offer) -> None:
    arguments = _arguments()
    _known(arguments)
    assert not _is_direct({**arguments, "softmax_scale": 2})
    with pytest.raises(SpecViolation, match="softmax_scale"):
        decode(**arguments, softmax_scale=True)
    assert offer.calls == []


def test_offsets_that_are_to_be_checked_are(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[bool] = []
    monkeypatch.setattr("la_core.ops.decode.check_offsets_on_gpu", lambda *_, explicit: checked.append(explicit))
    arguments = _arguments()
    _known(arguments)
    assert not _is_direct({**arguments, "check_offsets": True})
    assert checked == [True]
    assert _is_direct({**arguments, "check_offsets": False})
    monkeypatch.setattr("la_core.ops.decode.ENV_CHECK_OFFSETS", True)
    assert not _is_direct(arguments)
    assert checked == [True, False]
    assert _is_direct({**arguments, "check_offsets": False})
    with pytest.raises(SpecViolation, match="check_offsets"):
        decode(**arguments, check_offsets=1)


def test_other_facts_are_not_what_it_was_asked_for(offer: Offer) -> None:
    arguments = _arguments()
    _known(arguments)
    assert not _is_direct({**arguments, "out": torch.zeros(2, 4, 128)})
    assert _is_direct(arguments)
    with pytest.raises(SpecViolation, match="decay_scales"):
        decode(**{**arguments, "decay_scales": arguments["decay_scales"][:3]})


def test_nothing_offered_is_nothing_taken(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(load_backend("made"), "direct_decode", lambda *given: asked.append(given))
    arguments = _arguments()
    plan = _known(arguments)
    assert plan.direct is None
    assert not _is_direct(arguments)
    assert len(asked) == 1


def test_a_call_stands_whatever_comes_behind_it(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: DecodeProblem, extents: tuple[int, ...]) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(load_backend("made"), "direct_decode", broken)
    arguments = _arguments()
    with pytest.warns(RuntimeWarning, match="not today"):
        plan = _known(arguments)
    assert bool((arguments["out"] == 1).all())
    assert (plan.direct, plan.offer) == (None, None)
    assert not _is_direct(arguments)


def test_an_offer_that_another_thread_has_taken(offer: Offer) -> None:
    arguments = _arguments()
    plan = _known(arguments)
    plan.take_offer()
    assert len(offer.asked) == 1
    assert _is_direct(arguments)


def test_an_output_that_was_made_in_vain_is_used(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    new_output = decode_module._new_output

    def remembering(v: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
        made.append(new_output(v, plan))
        return made[-1]

    arguments = _arguments()
    del arguments["out"]
    _known(arguments)
    offer.answer = False
    monkeypatch.setattr(decode_module, "_new_output", remembering)
    assert decode(**arguments) is made[0]
    assert len(made) == 1
