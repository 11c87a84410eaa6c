"""cuLA's signatures for drafts: the same kernels, spelt as its callers spell them."""

from __future__ import annotations

import pytest
import torch

from la_core import SpecViolation, UnsupportedByBackend, use_backend
from la_core.compat.cula import (
    linear_attention_state_update_kvbuffer,
    linear_attention_state_update_kvbuffer_fused,
    linear_attention_verify_kvbuffer,
)
from la_core.conformance.compare import same_bits
from la_core.conformance.target import DeclaredRefusal
from la_core.conformance.window_cases import WindowCase
from la_core.conformance.window_inputs import WindowInputs
from la_core.conformance.window_target import WindowTarget

T, H, P = 4, 4, 6
VERIFY = WindowCase(
    "verify", B=4, P=P, N=T, T=T, H=H, G=2, K=128, V=128, offsets=(2, -1, 5, 1), starts=(0,) * 4, lengths=(0,) * 4
)


class Buffers:
    """The arguments of one user, [L, ...] if there are layers."""

    def __init__(self, inputs: WindowInputs) -> None:
        self.inputs = inputs
        self.q, self.k, self.v = inputs.q, inputs.k, inputs.v
        self.s = inputs.s.unflatten(0, (P, H))
        self.k_buf = torch.full_like(inputs.window.k, torch.nan)
        self.v_buf = torch.full_like(inputs.window.v, torch.nan)
        self.out = torch.full_like(inputs.v, torch.nan)

    def verify(self, buffers: bool = True) -> None:
        kept = {"k_buf": self.k_buf, "v_buf": self.v_buf} if buffers else {}
        linear_attention_verify_kvbuffer(
            self.q, self.k, self.v, self.s, self.out, self.inputs.decay_scales, self.inputs.s_offsets, 0.5, T, **kept
        )

    def update(self, accepted: torch.Tensor) -> None:
        linear_attention_state_update_kvbuffer(
            self.k_buf, self.v_buf, self.s, self.inputs.decay_scales, self.inputs.s_offsets, accepted, T
        )


def _buffers(windows: WindowTarget) -> Buffers:
    try:
        windows.needs("verify", "commit")
        return Buffers(windows.inputs(VERIFY))
    except UnsupportedByBackend as reason:
        raise DeclaredRefusal(str(reason)) from reason


def test_verify_and_update_are_ours(windows: WindowTarget) -> None:
    """The outputs of a padding row are zero here, where others leave them untouched; accepted counts from 0 to T."""
    ours, theirs = windows.inputs(VERIFY), _buffers(windows)
    ours.window.start.zero_()
    ours.window.length.zero_()
    tokens = (ours.q, ours.k, ours.v, ours.s, ours.s_offsets, ours.decay_scales, ours.window)
    expected = windows.verify(*tokens, softmax_scale=0.5)
    before = theirs.s.clone()
    with use_backend(windows.target.name):
        theirs.verify()
        assert same_bits(theirs.out, expected)
        assert same_bits(theirs.s, before)
        accepted = torch.tensor([4, 3, 0, 1], device=windows.device)
        theirs.update(accepted)
    windows.commit(ours.window, ours.s, ours.s_offsets, ours.decay_scales, accepted)
    assert same_bits(theirs.s.flatten(0, 1), ours.s)
    changed = {slot for slot in range(P) if not same_bits(theirs.s[slot], before[slot])}
    assert changed == {2, 1}


def test_verify_without_buffers_gives_the_same_outputs(windows: WindowTarget) -> None:
    kept, plain = _buffers(windows), _buffers(windows)
    with use_backend(windows.target.name):
        kept.verify()
        plain.verify(buffers=False)
    assert same_bits(kept.out, plain.out)


def test_verify_again_replaces_the_drafts(windows: WindowTarget) -> None:
    """Nothing is pending between calls, whatever was accepted before."""
    once, twice = _buffers(windows), _buffers(windows)
    accepted = torch.tensor([2, 0, 4, 1], dtype=torch.int32, device=windows.device)
    with use_backend(windows.target.name):
        twice.verify()
        for one in (once, twice):
            one.verify()
            one.update(accepted)
            one.verify()
    assert same_bits(once.s, twice.s)
    assert same_bits(once.out, twice.out)


def test_the_fused_form_is_the_layers_one_by_one(windows: WindowTarget) -> None:
    layers = [_buffers(windows) for _ in range(3)]
    accepted = torch.tensor([4, 0, 2, 1], device=windows.device)
    with use_backend(windows.target.name):
        for n, layer in enumerate(layers):
            layer.s.mul_(n + 1)
            layer.inputs.decay_scales.mul_(n + 1)
            layer.verify()
        stacked = {name: torch.stack([getattr(layer, name) for layer in layers]) for name in ("k_buf", "v_buf", "s")}
        slopes = torch.stack([layer.inputs.decay_scales for layer in layers])
        linear_attention_state_update_kvbuffer_fused(*stacked.values(), slopes, layers[0].inputs.s_offsets, accepted, T)
        for layer in layers:
            layer.update(accepted)
    for n, layer in enumerate(layers):
        assert same_bits(stacked["s"][n], layer.s.contiguous())


def test_a_t_that_is_not_that_of_the_tensors_is_refused(windows: WindowTarget) -> None:
    buffers = _buffers(windows)
    inputs = buffers.inputs
    rest = (inputs.decay_scales, inputs.s_offsets)
    before = buffers.s.clone()
    with use_backend(windows.target.name):
        with pytest.raises(SpecViolation, match="T must be that of q, 4; got 3"):
            linear_attention_verify_kvbuffer(buffers.q, buffers.k, buffers.v, buffers.s, buffers.out, *rest, 0.5, 3)
        counts = torch.zeros(4, dtype=torch.int32, device=windows.device)
        with pytest.raises(SpecViolation, match="T must be that of k_buf, 4; got 5"):
            linear_attention_state_update_kvbuffer(buffers.k_buf, buffers.v_buf, buffers.s, *rest, counts, 5)
    assert same_bits(buffers.s, before)


def test_a_pool_that_no_view_flattens_is_refused_and_not_copied(windows: WindowTarget) -> None:
    """The update of a copy would be lost: the caller's pool would never change."""
    buffers = _buffers(windows)
    wide = torch.zeros(P, H + 1, 128, 128, device=windows.device)
    buffers.s = wide[:, :H]
    with use_backend(windows.target.name), pytest.raises(SpecViolation, match="must have one common stride"):
        buffers.verify()
