"""cuLA's signatures for draft tokens: what they refuse, what they keep between calls, and that they never copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from la_core import KVWindow, SpecViolation, decode, use_backend, use_overlap, verify
from la_core.backends.discover_backends import load_backend
from la_core.compat import cula
from la_core.conformance.compare import same_bits

B, P, T, H, HV, K, V = 3, 5, 4, 2, 4, 8, 12

RECORDING = """
from la_core.backends.capabilities import Capabilities

class Recording:
    name = "{name}"
    spec_revision = 1
    capabilities = Capabilities(ops=("decode", "verify", "commit"), device_types=("cpu",))
    overlaps = []

    def refusal(self, problem):
        return self.capabilities.window_refusal(problem)

    def decode(self, problem, *arguments):
        self.overlaps.append(problem.overlap)

    verify = commit = decode

backend = Recording()
"""


def _arguments() -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    return {
        "q": make(B, T, H, K),
        "k": make(B, T, H, K),
        "v": make(B, T, HV, V),
        "s": make(P, HV, V, K),
        "out": torch.full((B, T, HV, V), float("nan")),
        "decay_scales": torch.linspace(0.1, 0.9, HV),
        "h0_indices": torch.tensor([4, -1, 1], dtype=torch.int32),
        "softmax_scale": 0.25,
        "T": T,
        "k_buf": torch.full((P, T, H, K), float("nan")),
        "v_buf": torch.full((P, T, HV, V), float("nan")),
    }


def _update(arguments: dict[str, Any], accepted: list[int], **changes: Any) -> None:
    names = ("k_buf", "v_buf", "s", "decay_scales", "h0_indices", "T")
    given = {name: arguments[name] for name in names} | {"accepted_len": torch.tensor(accepted)} | changes
    cula.linear_attention_state_update_kvbuffer(**given)


def test_verify_and_update_are_as_many_decodes() -> None:
    arguments = _arguments()
    before = arguments["s"].clone()
    cula.linear_attention_verify_kvbuffer(**arguments)
    assert same_bits(arguments["s"], before)
    accepted = [3, 2, 0]
    pool, expected = before.clone().view(P * HV, V, K), before.clone()
    for t in range(T):
        token = (arguments[name][:, t] for name in ("q", "k", "v"))
        out = decode(*token, pool, arguments["h0_indices"], arguments["decay_scales"], softmax_scale=0.25)
        torch.testing.assert_close(arguments["out"][:, t], out)
        if t == accepted[0] - 1:
            expected[4] = pool.view_as(before)[4]
    _update(arguments, accepted)
    torch.testing.assert_close(arguments["s"], expected)
    assert same_bits(arguments["s"][:4], before[:4])


def test_without_buffers_the_outputs_are_the_same() -> None:
    arguments = _arguments()
    cula.linear_attention_verify_kvbuffer(**arguments)
    out = torch.empty_like(arguments["out"])
    cula.linear_attention_verify_kvbuffer(**{**arguments, "out": out, "k_buf": None, "v_buf": None})
    assert same_bits(out, arguments["out"])


def test_the_fused_update_is_the_update_of_each_layer() -> None:
    arguments = _arguments()
    cula.linear_attention_verify_kvbuffer(**arguments)
    stacked = {name: torch.stack([arguments[name]] * 2) for name in ("k_buf", "v_buf", "s", "decay_scales")}
    stacked["decay_scales"][1] *= 2
    second = {**arguments, "s": arguments["s"].clone(), "decay_scales": arguments["decay_scales"] * 2}
    for each in (arguments, second):
        _update(each, [3, 2, 0])
    cula.linear_attention_state_update_kvbuffer_fused(
        **stacked, h0_indices=arguments["h0_indices"], accepted_len=torch.tensor([3, 2, 0]), T=T
    )
    for layer, each in enumerate((arguments, second)):
        assert same_bits(stacked["s"][layer], each["s"])


def test_a_pool_stored_the_other_way_is_written_in_place() -> None:
    arguments = _arguments()
    cula.linear_attention_verify_kvbuffer(**arguments)
    stored = arguments["s"].transpose(2, 3).contiguous()
    _update(arguments, [3, 2, 0], s=stored.transpose(2, 3))
    _update(arguments, [3, 2, 0])
    torch.testing.assert_close(stored.transpose(2, 3), arguments["s"])


def test_no_call_overlaps_the_kernel_that_zeroes_its_cursors(install: Callable[..., None]) -> None:
    install("recording", RECORDING)
    arguments = _arguments()
    with use_backend("recording"), use_overlap():
        cula.linear_attention_verify_kvbuffer(**arguments)
        _update(arguments, [3, 2, 0])
        stacked = {name: arguments[name][None] for name in ("k_buf", "v_buf", "s", "decay_scales")}
        cula.linear_attention_state_update_kvbuffer_fused(
            **stacked, h0_indices=arguments["h0_indices"], accepted_len=torch.tensor([3, 2, 0]), T=T
        )
        verify(
            *(arguments[name] for name in ("q", "k", "v")),
            arguments["s"].flatten(0, 1),
            arguments["h0_indices"],
            arguments["decay_scales"],
            KVWindow.allocate(P=P, N=T, H=HV, G=H, K=K, V=V, dtype=torch.float32),
        )
    overlaps = load_backend("recording").overlaps  # type: ignore[attr-defined]
    assert overlaps == [False, False, False, True], "the last is the caller's own call, which may"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"T": 3},
            "linear_attention_verify_kvbuffer: T must be that of q, 4; got 3. Pass T = 4.",
        ),
        (
            {"v_buf": None},
            "linear_attention_verify_kvbuffer: k_buf and v_buf must be given together; got one of them. "
            "Pass both, or neither.",
        ),
        (
            {"s": torch.zeros(P * HV, V, K)},
            "linear_attention_verify_kvbuffer: s must be 4-D [P, HV, V, K]; got 3-D (20, 12, 8). "
            "Pass a 4-D tensor or view.",
        ),
        (
            {"s": torch.zeros(P, HV + 1, V, K)[:, :HV]},
            "linear_attention_verify_kvbuffer: the slots and heads of s [P, HV, V, K] must have one common stride; "
            "got strides (480, 96, 8, 1). No view flattens them, and a copy would lose the update: "
            "allocate the pool so.",
        ),
        (
            {"out": None},
            "linear_attention_verify_kvbuffer: out must be a torch.Tensor [B, T, HV, V]; got None. Pass a tensor.",
        ),
        (
            {"k_buf": torch.zeros(P, T, H)},
            "linear_attention_verify_kvbuffer: k_buf must be 4-D [P, T, H, K]; got 3-D (5, 4, 2). "
            "Pass a 4-D tensor or view.",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_verify_is_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecViolation) as raised:
        cula.linear_attention_verify_kvbuffer(**{**_arguments(), **change})
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    "update", [cula.linear_attention_state_update_kvbuffer, cula.linear_attention_state_update_kvbuffer_fused]
)
def test_a_wrong_update_is_refused(update: Callable[..., None]) -> None:
    fused = update is cula.linear_attention_state_update_kvbuffer_fused
    a = _arguments()
    given = {name: torch.stack([a[name]] * 2) if fused else a[name] for name in ("k_buf", "v_buf", "s", "decay_scales")}
    with pytest.raises(SpecViolation, match=r"T must be that of k_buf, 4; got 5. Pass T = 4."):
        update(**given, h0_indices=a["h0_indices"], accepted_len=torch.tensor([0, 0, 0]), T=5)
    with pytest.raises(SpecViolation, match="accepted must be from 0 to the number of places"):
        update(**given, h0_indices=a["h0_indices"], accepted_len=torch.tensor([5, 0, 0]), T=4)
