"""Whole steps in CUDA graphs with the cursors on the device; streams; no synchronisation. All of it needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from la_core import KVWindow, SpecViolation, use_overlap
from la_core.conformance.compare import same_bits
from la_core.conformance.window_cases import ADVANCE, CLEAR, COMMIT, DECODE, FOLD, LAYERS, RAGGED, WindowCase
from la_core.conformance.window_inputs import WindowInputs
from la_core.conformance.window_target import WindowTarget

pytestmark = pytest.mark.needs_gpu

ALL_OPS = (DECODE, RAGGED, FOLD, COMMIT, LAYERS, ADVANCE, CLEAR)
every_op = pytest.mark.parametrize("base", ALL_OPS, ids=lambda case: "commit_layers" if case.L else case.op)
COUNT, B, P, H, G = 2, 4, 6, 4, 2


def _with_out(inputs: WindowInputs) -> WindowInputs:
    return inputs if inputs.out is not None else replace(inputs, out=torch.full_like(inputs.v, torch.nan))


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of the call; an empty one is an error."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*graph is empty.*")
        with torch.cuda.graph(graph):
            call()
    return graph


class Model:
    """Tensors of a few layers whose every step is one graph."""

    def __init__(self, windows: WindowTarget, T: int, N: int) -> None:
        sizes = windows.fit(replace(RAGGED, K=128, V=128, H=H, G=G))
        self.windows, self.T, self.K, self.V = windows, T, sizes.K, sizes.V
        device = windows.device
        random = torch.Generator(device).manual_seed(0)
        self.s = torch.randn(COUNT, P * H, self.V, self.K, generator=random, device=device)
        self.slopes = torch.rand(COUNT, H, generator=random, device=device)
        self.window = KVWindow.allocate(P=P, N=N, H=H, G=G, K=self.K, V=self.V, layers=COUNT, device=device)
        self.window.k.fill_(torch.nan)
        self.window.v.fill_(torch.nan)
        bf16 = {"dtype": torch.bfloat16, "device": device}
        self.q, self.k = (torch.zeros(COUNT, B, T, G, self.K, **bf16) for _ in range(2))
        self.v, self.out = (torch.zeros(COUNT, B, T, H, self.V, **bf16) for _ in range(2))
        self.offsets = torch.arange(B, dtype=torch.int32, device=device)
        self.drafts = torch.full((B,), T, dtype=torch.int32, device=device)
        self.accepted = torch.full((B,), T, dtype=torch.int32, device=device)

    def _layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.s[layer], self.offsets, self.slopes[layer]

    def decode_step(self) -> None:
        for n in range(COUNT):
            q, k, v = self.q[n, :, 0], self.k[n, :, 0], self.v[n, :, 0]
            self.windows.decode(q, k, v, *self._layer(n), window=self.window.layer(n), out=self.out[n, :, 0])
        self.windows.advance(self.window, self.offsets)

    def speculative_step(self) -> None:
        """Room is made, drafts are verified, a prefix is accepted: all on the device."""
        for n in range(COUNT):
            self.windows.fold(self.window.layer(n), *self._layer(n), room=self.T)
        self.windows.clear(self.window, self.offsets, room=self.T)
        for n in range(COUNT):
            tokens = (self.q[n], self.k[n], self.v[n], *self._layer(n), self.window.layer(n))
            self.windows.verify(*tokens, draft_lengths=self.drafts, out=self.out[n])
        self.windows.advance(self.window, self.offsets, self.accepted)

    def roomy_step(self) -> None:
        """Drafts are verified, a prefix is accepted, and what would leave no room for the next ones is committed."""
        for n in range(COUNT):
            tokens = (self.q[n], self.k[n], self.v[n], *self._layer(n), self.window.layer(n))
            self.windows.verify(*tokens, draft_lengths=self.drafts, out=self.out[n])
        self.windows.commit_layers(self.window, self.s, self.offsets, self.slopes, self.accepted, room=self.T)
        self.windows.advance(self.window, self.offsets, self.accepted, room=self.T)

    def commit_step(self) -> None:
        for n in range(COUNT):
            tokens = (self.q[n], self.k[n], self.v[n], *self._layer(n), self.window.layer(n))
            self.windows.verify(*tokens, draft_lengths=self.drafts, out=self.out[n])
        self.windows.commit_layers(self.window, self.s, self.offsets, self.slopes, self.accepted)
        self.windows.clear(self.window, self.offsets)

    def edit(self, step: int) -> None:
        """Other values in place: rows that move, pad and come back, ragged drafts, all kinds of accepts."""
        random = torch.Generator().manual_seed(step)
        slots = torch.randperm(P, generator=random)[:B]
        slots[torch.rand(B, generator=random) < 0.2] = -1
        self.offsets.copy_(slots)
        drafts = torch.randint(0, self.T + 1, (B,), generator=random)
        self.drafts.copy_(drafts)
        self.accepted.copy_((torch.rand(B, generator=random) * (drafts + 1)).int())
        for tensor in (self.q, self.k, self.v):
            tensor.copy_(torch.randn(tensor.shape, generator=random))

    def state(self) -> list[torch.Tensor]:
        return [self.s, self.window.k, self.window.v, self.window.start, self.window.length, self.out]


@pytest.mark.parametrize(
    ("step", "overlap"),
    [
        ("decode_step", False),
        ("decode_step", True),
        ("speculative_step", False),
        ("roomy_step", False),
        ("commit_step", False),
    ],
)
def test_a_whole_step_replays_like_eager_calls(windows: WindowTarget, step: str, overlap: bool) -> None:
    """Decode of all layers and advance; fold, clear, verify of all layers and advance; verify, commit and advance with
    room; verify and commit.

    Twenty replays with inputs edited in place, through every phase of the window, against the same calls made eagerly.
    """
    windows.needs("decode_window", "verify", "commit", "advance")
    T = 1 if step == "decode_step" else 4
    replayed, eager = (Model(windows, T, N=7) for _ in range(2))
    with use_overlap(overlap):
        for model in (replayed, eager):
            getattr(model, step)()  # the same first step, so that kernels are there
        before = [tensor.clone() for tensor in replayed.state()]
        graph = _captured(getattr(replayed, step))
    torch.cuda.synchronize()
    for was, now in zip(before, replayed.state(), strict=True):
        assert same_bits(was, now), "a capture does nothing by itself"
    for n in range(20):
        for model in (replayed, eager):
            model.edit(n)
        graph.replay()
        getattr(eager, step)()
        torch.cuda.synchronize()
        for name, ours, theirs in zip(
            ("s", "window.k", "window.v", "start", "length", "out"), replayed.state(), eager.state(), strict=True
        ):
            assert same_bits(ours, theirs), f"{name} after replay {n}"


def _projection(model: Model) -> tuple[list[torch.Tensor], Callable[[], object], Callable[[], object]]:
    """q, k and v as slices of one product of matrices: the tensors, the product, and how to poison and change it."""
    random = torch.Generator(model.windows.device).manual_seed(1)
    bf16 = {"dtype": torch.bfloat16, "device": model.windows.device}
    widths = [G * model.K, G * model.K, H * model.V]
    fused = torch.empty(B, model.T, sum(widths), **bf16)
    hidden = torch.empty(B * model.T, 4096, **bf16)
    weights = torch.empty(4096, sum(widths), **bf16).normal_(0, 1 / 64, generator=random)

    def renew() -> None:
        fused.fill_(torch.nan)
        hidden.normal_(generator=random)

    parts = fused.split(widths, dim=-1)
    tokens = [part.unflatten(-1, (heads, -1)) for part, heads in zip(parts, (G, G, H), strict=True)]
    return tokens, lambda: torch.mm(hidden, weights, out=fused.view(B * model.T, -1)), renew


def _layer_before(model: Model) -> tuple[list[torch.Tensor], Callable[[], object], Callable[[], object]]:
    """q, k and v as slices of what another layer puts out last: a large verify, which lets the next kernel start early.

    The same three as of :func:`_projection`.
    """
    windows, rows = model.windows, 512
    case = WindowCase("verify", B=rows, P=rows, N=8, T=model.T, H=H, G=G, K=model.K, V=model.V)
    first = _with_out(windows.inputs(case))
    assert first.out is not None
    random = torch.Generator(windows.device).manual_seed(1)

    def renew() -> None:
        first.out.fill_(torch.nan)
        first.q.normal_(generator=random)

    x = first.out[-B:]
    return [x[:, :, :G, : model.K], x[:, :, G : 2 * G, : model.K], x], lambda: windows.run(first), renew


@pytest.mark.parametrize("make", [_projection, _layer_before], ids=["projection", "layer"])
def test_verify_that_overlaps_waits_for_its_tokens(
    windows: WindowTarget,
    make: Callable[[Model], tuple[list[torch.Tensor], Callable[[], object], Callable[[], object]]],
) -> None:
    """In one graph with the kernel before it, which writes q, k and v; NaN until then.

    Replayed for other slots, padding and draft lengths, over pending tokens, and compared with calls that are made
    eagerly, without overlap and after the tokens are there.
    """
    windows.needs("verify", "commit", "advance")
    replayed, eager = (Model(windows, 4, N=16) for _ in range(2))
    for model in (replayed, eager):
        for n in range(3):  # 4 drafts at most are accepted in each, so that there is room for 4 more
            model.edit(n)
            model.speculative_step()
    tokens, produce, renew = make(replayed)

    def verify(model: Model, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        layer = (*model._layer(0), model.window.layer(0))
        windows.verify(q, k, v, *layer, draft_lengths=model.drafts, out=model.out[0])

    def step() -> None:
        produce()
        verify(replayed, *tokens)

    def assert_like_eager(what: str) -> None:
        torch.cuda.synchronize()
        verify(eager, *(tensor.clone() for tensor in tokens))
        assert bool(replayed.out[0].isfinite().all()), f"out after {what}"
        for name, ours, theirs in zip(
            ("s", "window.k", "window.v", "start", "length", "out"), replayed.state(), eager.state(), strict=True
        ):
            assert same_bits(ours, theirs), f"{name} after {what}"

    renew()
    with use_overlap():
        step()  # so that kernels are there
    assert_like_eager("an eager call")
    with use_overlap():
        graph = _captured(step)
    for n in range(3, 13):
        renew()
        for model in (replayed, eager):
            model.edit(n)
        graph.replay()
        assert_like_eager(f"replay {n}")


@every_op
def test_a_graph_does_what_the_contract_says(windows: WindowTarget, base: WindowCase) -> None:
    """Captured after a call, and replayed on fresh values of every argument, judged like any call."""
    case = replace(base, counts_dtype=torch.int32 if base.counts else None)
    inputs = _with_out(windows.inputs(case)) if base.op in ("decode", "verify") else windows.inputs(case)
    fresh = {name: buffer.clone() for name, buffer in inputs.buffers.items()}
    windows.run(inputs)
    graph = _captured(lambda: windows.run(inputs))
    for name, buffer in inputs.buffers.items():
        buffer.copy_(fresh[name])

    def replay(replayed: WindowInputs) -> torch.Tensor | None:
        graph.replay()
        torch.cuda.synchronize()
        return replayed.out

    windows.assert_right(inputs, replay)


FIRST_CALL = """
import sys, torch
from dataclasses import replace
from la_core.conformance import window_cases
from la_core.conformance.target import Target
from la_core.conformance.window_target import WindowTarget
windows = WindowTarget(Target(sys.argv[1], "cuda"))
inputs = windows.inputs(getattr(window_cases, sys.argv[2]))
if inputs.case.op in ("decode", "verify"):
    inputs = replace(inputs, out=torch.full_like(inputs.v, torch.nan))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    windows.run(inputs)
def replay(inputs):
    graph.replay()
    torch.cuda.synchronize()
    return inputs.out
windows.assert_right(inputs, replay)
"""


@pytest.mark.parametrize("name", ["DECODE", "RAGGED", "COMMIT", "LAYERS", "ADVANCE"])
def test_the_first_call_of_a_process_can_be_captured(windows: WindowTarget, name: str) -> None:
    """And is exactly one step: nothing tries kernels out on the caller's pool."""
    from la_core.conformance import window_cases

    windows.inputs(getattr(window_cases, name))
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, windows.target.name, name],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@every_op
def test_work_goes_to_the_current_stream(windows: WindowTarget, base: WindowCase) -> None:
    """A side stream that is busy for a while: the call must wait for it, and the default stream must not have it."""
    case = replace(base, counts_dtype=torch.int32 if base.counts else None)
    inputs, expected = windows.inputs(case), windows.inputs(case)
    out = windows.run(expected)
    late = inputs.s_offsets.clone()
    inputs.s_offsets.fill_(-1)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        inputs.s_offsets.copy_(late)
        got = windows.run(inputs)
    side.synchronize()
    assert out is None or (got is not None and same_bits(got, out))
    for name in ("k", "v", "start", "length"):
        assert same_bits(getattr(inputs.window, name), getattr(expected.window, name))
    assert same_bits(inputs.s, expected.s)


@every_op
def test_no_call_waits_for_the_device(windows: WindowTarget, base: WindowCase) -> None:
    """Nor reads a count back: with `accepted` as a number and as a tensor, with and without an `out`."""
    inputs = windows.inputs(base)
    numbers = replace(inputs, counts=1) if base.op in ("commit", "advance") else inputs
    for given in (inputs, numbers):
        windows.run(given)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        for given in (inputs, numbers, _with_out(inputs) if base.op in ("decode", "verify") else inputs):
            windows.run(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_values_are_checked_on_request_but_not_during_capture(windows: WindowTarget) -> None:
    inputs = windows.inputs(ADVANCE)
    windows.advance(inputs.window, inputs.s_offsets, inputs.counts, check_offsets=True)
    inputs.s_offsets[0] = 99
    with pytest.raises(SpecViolation, match="got slot 99 in row 0"):
        windows.advance(inputs.window, inputs.s_offsets, inputs.counts, check_offsets=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        windows.advance(inputs.window, inputs.s_offsets, inputs.counts)
        with pytest.raises(ValueError, match="check_offsets=True must read s_offsets back"):
            windows.advance(inputs.window, inputs.s_offsets, inputs.counts, check_offsets=True)


def test_la_check_offsets_names_the_row(windows: WindowTarget) -> None:
    """A bad slot surfaces far from the culprit: the switch of the environment names it, for every operator."""
    windows.needs("verify")
    code = (
        "import sys, torch\n"
        "from la_core import SpecViolation\n"
        "from la_core.conformance.target import Target\n"
        "from la_core.conformance.window_cases import VERIFY\n"
        "from la_core.conformance.window_target import WindowTarget\n"
        "windows = WindowTarget(Target(sys.argv[1], 'cuda'))\n"
        "inputs = windows.inputs(VERIFY)\n"
        "windows.run(inputs)\n"
        "inputs.s_offsets[1] = 6\n"
        "try:\n"
        "    windows.run(inputs)\n"
        "except SpecViolation as reason:\n"
        "    assert 'got slot 6 in row 1' in str(reason)\n"
        "else:\n"
        "    sys.exit('was not checked')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, windows.target.name],
        env={**os.environ, "LA_CHECK_OFFSETS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
