"""Values of the window operators' kernels without a GPU: their PTX runs on a CPU, and all that it does is checked.

A call goes through the backend as on a GPU, with an emulated kernel in place of the compiled one. It is judged as
every backend is, and by the record of its accesses: what must be written is written once, nothing else is written, and
nothing is read that may not be.
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from la_core.conformance.compare import same_bits
from la_core.conformance.window_cases import (
    ADVANCE,
    CLEAR,
    COMMIT,
    DECODE,
    FOLD,
    LAYERS,
    RAGGED,
    SAMPLE_CASES,
    VERIFY,
    WindowCase,
)
from la_core.conformance.window_inputs import WindowInputs, make_window_inputs
from la_core.conformance.window_judge import judge_window
from la_core.conformance.window_target import problem_of
from la_core.conformance.window_truth import pending_places
from la_core.spec.decode_problem import StateLayout
from la_cute.backend import backend
from la_cute.decode_compile_key import DecodeCompileKey
from la_cute.kernel_keys import KernelKey, keys_of_problem
from la_cute.window_compile_key import WindowCompileKey
from la_cute.window_tiles import WindowTiles, candidate_window_tiles

if sys.platform != "linux":
    pytest.skip("not run: the CuTe DSL is there for Linux alone", allow_module_level=True)
pytest.importorskip("cutlass", reason="not run: the CuTe DSL is not installed")

import numpy as np
from emulated_kernel import ALLOCATIONS_AT, APART, Arguments, Placed, words_of
from emulated_window import EmulatedWindowKernel, Key, emulate_window
from ptx_emulator import WORD, GlobalMemory, PtxError

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
INT32, INT64 = torch.int32, torch.int64


@functools.cache
def ptx_of(key: KernelKey) -> str:
    with tempfile.TemporaryDirectory() as folder:
        ptx: str = key.compile(f"--keep-ptx --dump-dir={folder}").artifacts.PTX
    return ptx


@dataclass
class Emulation:
    """How a call is made, and the kernels that it has launched."""

    overlap: bool = False
    arch: tuple[int, int] = (9, 0)
    tiles: WindowTiles | None = None
    change: Callable[[str], str] = str
    """Applied to the PTX."""
    kernels: list[EmulatedWindowKernel] = field(default_factory=list)

    def run(self, inputs: WindowInputs) -> torch.Tensor | None:
        """Make the call of a case through the backend."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("la_cute.window_launch.compiled_kernel", self._kernel)
            if self.tiles is not None:
                patch.setattr("la_cute.kernel_keys.choose_window_tiles", lambda problem: self.tiles)
            return self._call(inputs)

    def _kernel(self, key: Key) -> EmulatedWindowKernel:
        self.kernels.append(EmulatedWindowKernel(key, self.change(ptx_of(key))))
        return self.kernels[-1]

    def _call(self, inputs: WindowInputs) -> torch.Tensor | None:
        case, window, counts, out = inputs.case, inputs.window, inputs.counts, inputs.out
        problem = replace(problem_of(inputs), device=torch.device("cuda"), arch=self.arch, overlap=self.overlap)
        tokens = (inputs.q, inputs.k, inputs.v, inputs.s, inputs.s_offsets, inputs.decay_scales, window)
        if case.op in ("decode", "verify"):
            scale = problem.K**-0.5 if case.softmax_scale is None else case.softmax_scale
            if out is None:
                out = torch.full(inputs.v.shape, torch.nan, dtype=problem.out_dtype)
            if case.op == "decode":
                backend.decode_window(problem, *tokens, scale, out)
            else:
                assert not isinstance(counts, int)
                backend.verify(problem, *tokens, counts, scale, out)
            return out
        if case.op in ("fold", "commit"):
            pool = (window, inputs.s, inputs.s_offsets, inputs.decay_scales)
            backend.commit(problem, *pool, 0 if counts is None else counts, case.room)
        else:
            accepted = 0 if case.op == "clear" else 1 if counts is None else counts
            backend.advance(problem, window, inputs.s_offsets, accepted, case.room, case.op == "clear")
        return None


def errors_of(case: WindowCase, emulation: Emulation, beyond: Mapping[int, int] | None = None) -> list[str]:
    """Everything that is wrong with a call, in which some rows have offsets beyond the pool."""
    inputs = make_window_inputs(case)
    for row, offset in (beyond or {}).items():
        inputs.s_offsets[row] = offset
    written, read = list(_to_write(inputs)), list(_may_read(inputs))
    errors = judge_window(inputs, emulation.run)
    (kernel,) = emulation.kernels
    for name, buffer in inputs.buffers.items():
        writes = kernel.record(buffer, "writes")
        if writes is None:
            continue
        if not np.array_equal(writes, _cover(buffer, written)):
            errors.append(f"{name} is not written once where it must be, or elsewhere")
        if (kernel.record(buffer, "read") & (_cover(buffer, read) == 0)).any():
            errors.append(f"{name} is read where it must not be")
    return errors


def _live_slots(inputs: WindowInputs) -> list[tuple[int, int]]:
    return [(b, slot) for b, slot in enumerate(inputs.s_offsets.tolist()) if 0 <= slot < inputs.case.P]


def _to_write(inputs: WindowInputs) -> Iterator[torch.Tensor]:
    truth, window, H = inputs.truth(), inputs.window, inputs.case.H
    if inputs.out is not None:
        yield inputs.out
    for slot, place in truth.places:
        yield from (window.k[slot, place], window.v[slot, place])
    for layer, slot in truth.states:
        yield (inputs.s[layer] if inputs.case.L else inputs.s)[slot * H : (slot + 1) * H]
    for b, slot in _live_slots(inputs):
        if inputs.case.op == "advance":
            yield window.length[slot]
            pending = len(pending_places(window, slot))
            accepted = 1 if inputs.counts is None else int(torch.as_tensor(inputs.counts).expand(inputs.case.B)[b])
            end = min(pending + max(accepted, 0), inputs.case.N)
            if inputs.case.room is not None and end + inputs.case.room > inputs.case.N:
                yield window.start[slot]
        if inputs.case.op == "clear" and (inputs.case.room is None or truth.length[slot] != window.length[slot]):
            yield from (window.start[slot], window.length[slot])


def _may_read(inputs: WindowInputs) -> Iterator[torch.Tensor]:
    case, window = inputs.case, inputs.window
    yield from (inputs.s_offsets, inputs.decay_scales, inputs.q, inputs.k, inputs.v)
    if isinstance(inputs.counts, torch.Tensor):
        yield inputs.counts
    for b, slot in _live_slots(inputs):
        yield from (window.start[slot], window.length[slot])
        if case.op in ("advance", "clear"):
            continue
        yield torch.unflatten(inputs.s, -3, (case.P, case.H)).select(-4, slot)
        brought = 0
        if case.op == "commit":
            count = int(inputs.counts[b] if isinstance(inputs.counts, torch.Tensor) else inputs.counts or 0)
            brought = min(max(count, 0), case.N - len(pending_places(window, slot)))
        for place in pending_places(window, slot, brought):
            yield from (window.k[..., slot, place, :, :], window.v[..., slot, place, :, :])


def _cover(buffer: torch.Tensor, views: list[torch.Tensor]) -> Any:
    """How many of the views of a buffer each of its words belongs to; views of other buffers count nothing."""
    marks = torch.zeros_like(buffer, dtype=torch.int32)
    for view in views:
        if view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
            marks.as_strided(view.shape, view.stride(), view.storage_offset()).add_(1)
    return marks.numpy().repeat(buffer.itemsize // WORD)


GROUPED: dict[str, Any] = {"H": 6, "G": 2, "K": 128, "V": 64}
GAPS: dict[str, Any] = {"pool_gap": 256, "window_gap": 32, "out_gap": 64, "fused_qkv": True, "fused_window": True}
SHIFTED: dict[str, Any] = {"shift": 1, "pool_gap": 3, "window_gap": 1}
ROOMLESS = replace(VERIFY, lengths=(5, 4, 8, 3), counts=(4, 4, 2, 0))
DEEP: dict[str, Any] = {"N": 33, "starts": (32, 20, 0, 31), "H": 1, "V": 64}

KINDS = (
    (bf16, None, fp32, INT32, fp32),
    (fp32, fp32, bf16, INT64, bf16),
    (fp16, fp32, fp16, INT64, fp32),
    (fp32, fp32, fp32, INT32, fp16),
)
"""Dtypes of q, k and v; of the window; of s; of offsets and counts; of out."""


def _cases_of_other_kinds() -> Iterator[WindowCase]:
    """Sizes, dtypes, layouts, strides and shifts, so that each meets most others of them at least once."""
    sizes = ((128, 128), (256, 64), (64, 256), (256, 256))
    for n, (base, other) in enumerate(((DECODE, RAGGED), (COMMIT, DECODE), (RAGGED, COMMIT), (DECODE, RAGGED))):
        io_dtype, window_dtype, state_dtype, offsets_dtype, out_dtype = KINDS[n]
        K, V = sizes[n]
        kinds: dict[str, Any] = {
            "io_dtype": io_dtype,
            "window_dtype": window_dtype,
            "state_dtype": state_dtype,
            "K": K,
            "V": V,
        }
        for layout, case, more in (
            ("vk", base, GAPS),
            ("kv", other, SHIFTED),
            ("kv", base, {}),
            ("vk", other, SHIFTED),
        ):
            outputs = {"out_dtype": out_dtype} if case.op in ("decode", "verify") else {}
            counts = {"counts_dtype": offsets_dtype} if case.counts is not None else {}
            more = {"offsets_dtype": offsets_dtype, **more, **kinds, **outputs, **counts}
            yield replace(case, state_layout=layout, H=2, G=1, seed=n, **more)


CASES = [
    *SAMPLE_CASES,
    *_cases_of_other_kinds(),
    *(ROOMLESS, replace(ROOMLESS, state_layout="kv", K=128, V=64)),
    *(replace(case, **GROUPED) for case in (DECODE, RAGGED, LAYERS)),
    replace(DECODE, lengths=(0, 33, 20, 32), **DEEP),
    replace(VERIFY, T=3, lengths=(0, 30, 20, 31), counts=(3, 3, 2, 3), **DEEP),
    replace(VERIFY, T=16, N=16, lengths=(0, 4, 0, 3), counts=(16, 12, 0, 3), H=1, V=64),
    replace(VERIFY, T=7, N=16, lengths=(0, 9, 12, 3), counts=(5, 7, 5, 4), H=2, V=64, state_layout="kv"),
    # More keys than a thread has registers for, and more drafts than it works on at a time.
    replace(VERIFY, T=6, lengths=(0, 27, 20, 31), counts=(6, 6, 2, 3), K=256, window_dtype=fp32, **DEEP),
    replace(COMMIT, lengths=(0, 33, 20, 32), counts=(33, 1, 0, 0), **DEEP),
    *(replace(case, N=1, lengths=(0, 1, 0, 1), starts=(0, 0, 0, 0), counts=None, room=None) for case in (DECODE, FOLD)),
    *(replace(case, decays=(1000.0, 0.0)) for case in (replace(DECODE, N=7), RAGGED, COMMIT)),
    # What a GPU is not asked before: cursors and counts outside of their limits.
    replace(DECODE, lengths=(-3, 4, 9, 2), starts=(-1, 17, 3, -9)),
    replace(RAGGED, lengths=(-3, 4, 2, 0), starts=(-1, 17, 3, -9), counts=(-2, 99, 4, 1)),
    replace(COMMIT, lengths=(-3, 4, 99, 2), starts=(-1, 17, 3, -9), counts=(-2, 99, 1, 1)),
    replace(ADVANCE, lengths=(-3, 4, 99, 2), starts=(-1, 17, 3, -9), counts=(-2, 99, 1, 1)),
    *(replace(ADVANCE, counts=number) for number in (0, 2)),
    *(replace(case, room=room, H=1, V=64) for case in (FOLD, CLEAR) for room in (1, 3, 4)),
    *(replace(case, room=room, H=1, V=64) for case in (COMMIT, ADVANCE) for room in (1, 4, 8)),
    replace(ADVANCE, room=4, counts=(0, 2, 0, 5)),
    replace(ADVANCE, room=3, lengths=(-3, 4, 99, 2), starts=(-1, 17, 3, -9), counts=(-2, 99, 1, 1)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_kernel_does_what_it_must_and_nothing_else(case: WindowCase) -> None:
    overlap = sum(map(ord, case.id)) % 2 == 1
    emulation = Emulation(overlap)
    assert errors_of(case, emulation) == []
    key = emulation.kernels[0].key
    if isinstance(key, WindowCompileKey):
        assert key.aligned == (case.shift == 0), "what the cases mean"


@pytest.mark.parametrize("case", [DECODE, RAGGED, COMMIT, ADVANCE, CLEAR], ids=lambda case: case.id)
def test_offsets_beyond_the_pool_are_padding(case: WindowCase) -> None:
    assert errors_of(case, Emulation(), {1: 2**31 - 1, 2: case.P, 3: -(2**31)}) == []


FAR = (1 << 31) + 8
"""Elements between slots; a multiple of 16 bytes in every dtype."""


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("case", [DECODE, RAGGED, COMMIT], ids=lambda case: case.id)
def test_slots_beyond_32_bits(case: WindowCase, layout: StateLayout) -> None:
    """States and slots of a window 2**31 elements apart: only those that are named are there at all."""
    case = replace(case, state_layout=layout, out_dtype=None if case.op == "commit" else fp32)

    def call(inputs: WindowInputs) -> torch.Tensor | None:
        problem = replace(problem_of(inputs), device=torch.device("cuda"), arch=(9, 0))
        key = keys_of_problem(problem)[0]
        assert not isinstance(key, DecodeCompileKey)
        window = inputs.window
        tensors = {"s_offsets": inputs.s_offsets, "s": inputs.s, "decay_scales": inputs.decay_scales}
        if case.op != "commit":
            assert inputs.out is not None
            tensors |= {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": inputs.out}
        tensors |= {"window_k": window.k, "window_v": window.v, "start": window.start, "length": window.length}
        if case.op != "decode":
            assert isinstance(inputs.counts, torch.Tensor)
            tensors["counts"] = inputs.counts
        arguments: Arguments = {}
        words: dict[int, Any] = {}
        for n, (name, tensor) in enumerate(tensors.items()):
            address, content, strides = ALLOCATIONS_AT + n * APART * 64, words_of(tensor), tensor.stride()
            if name in ("s", "window_k", "window_v"):
                strides = (FAR, *strides[1:])
                rows = case.H if name == "s" else 1
                size = tensor[0].numel() * tensor.itemsize // WORD
                for slot in inputs.s_offsets.tolist():
                    for row in range(slot * rows, (slot + 1) * rows):
                        words[address + FAR * tensor.itemsize * row] = content[row * size : (row + 1) * size]
            else:
                words[address] = content
            arguments[name] = Placed(address, tuple(tensor.shape), strides)
        memory = GlobalMemory(words)
        numbers = (0, 65, 1, 0, 0, 0) if case.op == "commit" else (case.K**-0.5,)
        emulate_window(key, ptx_of(key), memory, arguments, numbers)
        for address, content in words.items():
            content[:] = memory.of(address, memory.words)
        return inputs.out

    assert judge_window(make_window_inputs(case), call) == []


@pytest.mark.parametrize("arch", [(8, 0), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize(
    "case", [DECODE, replace(RAGGED, state_layout="kv", **GROUPED), COMMIT], ids=lambda case: case.id
)
def test_other_architectures(case: WindowCase, arch: tuple[int, int]) -> None:
    emulation = Emulation(True, arch)
    assert errors_of(case, emulation) == []
    assert emulation.kernels[0].key.arch.startswith(f"sm_{arch[0]}")


@pytest.mark.parametrize("case", [replace(DECODE, out_dtype=fp32), replace(RAGGED, out_dtype=fp32), COMMIT], ids=str)
def test_no_bit_depends_on_tiles_alignment_or_the_batch(case: WindowCase) -> None:
    case = replace(case, H=2, K=128, V=64, N=8)

    def results(inputs: WindowInputs, tiles: WindowTiles | None = None) -> list[torch.Tensor]:
        Emulation(tiles=tiles).run(inputs)
        return [*([] if inputs.out is None else [inputs.out]), inputs.s.clone()]

    first = results(make_window_inputs(case))
    seen = set()
    for tiles in candidate_window_tiles(problem_of(make_window_inputs(case)))[::2]:
        if tiles.eviction == "":
            seen.add(tiles)
            assert all(map(same_bits, results(make_window_inputs(case), tiles), first))
    assert len(seen) > 2
    shifted = replace(case, shift=1)
    assert all(map(same_bits, results(make_window_inputs(shifted)), first))
    inputs = make_window_inputs(case)
    for row, slot in ((1, 0), (3, 1)):
        alone = results(inputs.of_rows([row], [2], 3))
        if inputs.out is not None:
            assert same_bits(alone[0][0], first[0][row])
        assert same_bits(alone[-1][4:6], first[-1][2 * slot : 2 * slot + 2])


@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_a_draft_that_is_nan_reaches_no_output_before_it(layout: StateLayout) -> None:
    case = replace(VERIFY, state_layout=layout)
    inputs = make_window_inputs(case)
    expected = Emulation().run(inputs)
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor[:, 2] = torch.nan
    out = Emulation().run(inputs)
    assert expected is not None
    assert out is not None
    assert same_bits(out[:, :2], expected[:, :2])
    assert bool(out[:, 2:].isnan().all())


# Tests of the test: kernels that are wrong, and what says so.

WRONG = {
    "no-wait": (DECODE, r"griddepcontrol\.wait;", "", "before the wait for it"),
    "no-barrier": (DECODE, r"bar\.sync\s+0;", "", "reads what another one has written"),
    "no-barrier-kv": (replace(DECODE, state_layout="kv"), r"bar\.sync\s+0;", "", "reads what another one has written"),
    "verify-no-barrier": (VERIFY, r"bar\.sync\s+0;", "", "reads what another one has written"),
    "decay-left-out": (
        COMMIT,
        r"(ex2\.[^\n]*\n\s*)mul\.f32 (\s*%r\d+), [^\n]*;",
        r"\1mov.b32 \2, 0f3F800000;",
        "state of",
    ),
}
"""Calls of kernels that are wrong: what is changed in the PTX, and what the verdict must say."""


@pytest.mark.parametrize(("case", "pattern", "replacement", "verdict"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_kernel_is_caught(case: WindowCase, pattern: str, replacement: str, verdict: str) -> None:
    def change(ptx: str) -> str:
        changed = re.sub(pattern, replacement, ptx, count=1)
        assert changed != ptx
        return changed

    try:
        said = "; ".join(errors_of(case, Emulation(True, change=change)))
    except PtxError as error:
        said = str(error)
    assert re.search(verdict, said)
