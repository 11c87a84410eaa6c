"""Values of la-cute's kernels without a GPU: the PTX of each runs on a CPU, and all that it does is checked.

A call goes through `DecodeLaunch` as on a GPU, with an emulated kernel in place of the compiled one. It is judged by
the float64 truth as every backend is, and by the record of its accesses: the named slots are read, and written once,
`out` is written once, and nothing else is written, nor read outside of the arguments.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from la_core import DecodeProblem
from la_core.conformance.compare import out_errors, same_bits, state_errors
from la_core.conformance.decode_cases import LAYOUTS, DecodeCase
from la_core.conformance.decode_inputs import DecodeInputs, judge_decode, make_decode_inputs, untouched_errors
from la_core.spec.decode_checks import check_decode
from la_core.spec.decode_problem import StateLayout
from la_cute.decode_compile_key import ARCHES, DecodeCompileKey, decode_compile_key
from la_cute.decode_launch import DecodeLaunch
from la_cute.decode_tiles import DecodeTiles, choose_decode_tiles

if sys.platform != "linux":
    pytest.skip("not run: the CuTe DSL is there for Linux alone", allow_module_level=True)
pytest.importorskip("cutlass", reason="not run: the CuTe DSL is not installed")

import numpy as np
from emulated_kernel import (
    ALLOCATIONS_AT,
    APART,
    ROWS_PER_Z,
    Arguments,
    EmulatedKernel,
    Placed,
    emulate,
    kernel_parameters,
    words_of,
)
from ptx_arithmetic import Array
from ptx_emulator import WORD, GlobalMemory, PtxError

from la_cute.decode_compile import compile_decode

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (64, 128, 256)


@functools.cache
def ptx_of(key: DecodeCompileKey) -> str:
    with tempfile.TemporaryDirectory() as folder:
        ptx: str = compile_decode(key, f"--keep-ptx --dump-dir={folder}").artifacts.PTX
    return ptx


# Calls and their verdict.


@dataclass(frozen=True)
class Call:
    """A call, and what decides its kernel beside the tensors."""

    case: DecodeCase
    batch: int = 0
    """Rows whose tiles it takes; 0 for its own."""
    heads: int = 0
    """The same for heads."""
    overlap: bool = False
    arch: tuple[int, int] = (9, 0)
    gap: int = 0
    """Elements of NaN behind each head of q, k, v and `out`."""
    beyond: tuple[int, ...] = ()
    """Offsets of padding rows that are no slots of the pool, in place of negative ones."""

    @property
    def id(self) -> str:
        named = {
            "tiles_of": self.batch,
            "x": self.heads,
            "overlap": self.overlap,
            "io_gap": self.gap,
            "beyond": len(self.beyond),
        }
        marks = [f"-{name}{int(value)}" for name, value in named.items() if value]
        return "sm_{}{}-".format(*self.arch) + self.case.id + "".join(marks)

    def inputs(self) -> DecodeInputs:
        """The tensors; `out` is always given."""
        inputs = make_decode_inputs(replace(self.case, out_dtype=self.case.out_dtype or self.case.io_dtype))
        padding = (inputs.s_offsets < 0).nonzero().flatten().tolist()
        for row, offset in zip(padding, self.beyond, strict=False):
            inputs.s_offsets[row] = offset
        if not self.gap:
            return inputs
        buffers: dict[str, torch.Tensor] = dict(inputs.buffers)
        spread: dict[str, Any] = {}
        for name in ("q", "k", "v", "out"):
            tensor = getattr(inputs, name)
            rows, heads, size = tensor.shape
            strides = (heads * (size + self.gap) + 2 * self.gap, size + self.gap, 1)
            buffers[name] = torch.full((rows * strides[0] + self.case.shift,), torch.nan, dtype=tensor.dtype)
            spread[name] = buffers[name].as_strided(tensor.shape, strides, self.case.shift).copy_(tensor)
        return replace(inputs, buffers=buffers, **spread)

    def problem(self, inputs: DecodeInputs) -> DecodeProblem:
        problem = check_decode(*inputs.tensors(), out=inputs.out)
        return replace(problem, device=torch.device("cuda"), arch=self.arch, overlap=self.overlap)

    def tiles(self, problem: DecodeProblem) -> DecodeTiles:
        heads = self.heads or problem.H
        return choose_decode_tiles(replace(problem, B=self.batch or problem.B, H=heads, G=heads))


def launch(
    call: Call, inputs: DecodeInputs, change: Callable[[str], str] = lambda ptx: ptx, aligned: bool | None = None
) -> EmulatedKernel:
    """Make a call, with the kernel that the launch asks for, or the one for this alignment, and its PTX changed."""
    kernels: list[EmulatedKernel] = []

    def emulated(key: DecodeCompileKey) -> EmulatedKernel:
        key = key if aligned is None else key._replace(aligned=aligned)
        kernels.append(EmulatedKernel(key, change(ptx_of(key))))
        return kernels[0]

    problem = call.problem(inputs)
    scale = problem.K**-0.5 if inputs.softmax_scale is None else inputs.softmax_scale
    assert inputs.out is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("la_cute.decode_launch.compiled_kernel", emulated)
        DecodeLaunch(problem, call.tiles(problem)).decode(*inputs.tensors(), scale, inputs.out)
    return kernels[0]


def access_errors(inputs: DecodeInputs, kernel: EmulatedKernel) -> list[str]:
    """A sentence for each buffer whose words were written or read otherwise than they must."""
    H = inputs.decay_scales.shape[0]
    slots = [inputs.s[slot * H : (slot + 1) * H] for slot in inputs.live_slots()]
    views = [inputs.s_offsets, inputs.decay_scales, inputs.q, inputs.k, inputs.v]
    errors = []
    for name, buffer in inputs.buffers.items():
        address = kernel.allocation(buffer)
        assert inputs.out is not None
        written = _cover(buffer, [*slots, inputs.out])
        if not np.array_equal(kernel.memory.of(address, kernel.memory.writes), written):
            errors.append(f"{name} is not written once where it must be, or elsewhere")
        read = kernel.memory.of(address, kernel.memory.read)
        may_be_read = _cover(buffer, [*views, *slots]) > 0
        if (read & ~may_be_read).any() or (name == "s" and not read[may_be_read].all()):
            errors.append(f"{name} is read where it must not be, or not where it must")
    return errors


def _cover(buffer: torch.Tensor, views: list[torch.Tensor]) -> Any:
    """How many of the views of a buffer each of its words belongs to; views of other buffers count nothing."""
    marks = torch.zeros_like(buffer, dtype=torch.int32)
    for view in views:
        if view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
            marks.as_strided(view.shape, view.stride(), view.storage_offset()).add_(1)
    return marks.numpy().repeat(buffer.itemsize // WORD)


def errors_of(call: Call, change: Callable[[str], str] = lambda ptx: ptx) -> list[str]:
    """Everything that is wrong with a call."""
    inputs = call.inputs()
    kernels: list[EmulatedKernel] = []

    def run(inputs: DecodeInputs) -> torch.Tensor:
        kernels.append(launch(call, inputs, change))
        assert inputs.out is not None
        return inputs.out

    errors = judge_decode(inputs, run)
    assert kernels[0].key.aligned == (call.case.shift == 0), "what the cases mean"
    return errors + access_errors(inputs, kernels[0])


ROWS = DecodeCase(B=4, P=5, H=2, K=128, V=128, offsets=(3, -1, 0, -7), pool_gap=16, out_dtype=fp32)
"""Two live rows, of slots that are not their numbers, and two of padding."""


def _calls_of_every_tile() -> list[Call]:
    """One for each tile that is chosen for K = V = 128 and float32 states."""
    calls: dict[DecodeCompileKey, Call] = {}
    for layout in LAYOUTS:
        for overlap, heads in itertools.product((False, True), (8, 64)):
            for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
                call = Call(replace(ROWS, state_layout=layout), batch, heads, overlap, beyond=(5,))
                problem = DecodeProblem.contiguous(
                    B=batch, P=5, H=heads, K=128, V=128, state_layout=layout, device="cuda", arch=(9, 0)
                )
                problem = replace(problem, overlap=overlap)
                calls.setdefault(decode_compile_key(problem, choose_decode_tiles(problem), aligned=True), call)
    return list(calls.values())


def _calls_of_other_kinds() -> list[Call]:
    """Sizes, dtypes, layouts, strides and shifts, so that each meets most others of them at least once."""
    calls = []
    dtypes = (
        (bf16, fp32, fp32, torch.int64),
        (fp16, bf16, bf16, torch.int32),
        (fp32, fp16, fp16, torch.int64),
        (fp32, fp32, bf16, torch.int32),
        (bf16, bf16, bf16, torch.int64),
        (fp16, fp16, fp32, torch.int32),
    )
    heads = ((2, 2), (4, 2), (3, 1), (6, 2))
    sizes = [(K, V) for K in SIZES for V in SIZES]
    kind = 0
    for layout in LAYOUTS:
        for K, V in sizes:
            io_dtype, state_dtype, out_dtype, offsets_dtype = dtypes[kind % len(dtypes)]
            H, G = heads[kind % len(heads)]
            case = DecodeCase(
                B=3,
                P=4,
                H=H,
                K=K,
                V=V,
                G=G,
                io_dtype=io_dtype,
                state_dtype=state_dtype,
                out_dtype=out_dtype,
                offsets_dtype=offsets_dtype,
                offsets=(2, -1, 0),
                state_layout=layout,
                fused_qkv=kind % 3 == 0,
                seed=kind,
            )
            beyond = (2**62 if offsets_dtype is torch.int64 else 2**31 - 1,) if kind % 2 else (4,)
            aligned = replace(case, pool_gap=8 * (kind % 2))
            shifted = replace(case, pool_gap=3 * (kind % 2), shift=1 + kind % 3)
            rows, more = 512 * (kind % 3 == 2), 64 * (kind % 3 == 1)
            calls.append(Call(aligned, rows, 0, kind % 2 == 0, beyond=beyond, gap=4 * (kind % 3 == 1)))
            calls.append(Call(shifted, more, 0, kind % 2 == 1, beyond=beyond, gap=5 * (kind % 3 == 2)))
            kind += 1
    return calls


def _calls_of_other_architectures() -> list[Call]:
    return [
        Call(replace(ROWS, state_layout=layout, io_dtype=io_dtype, state_dtype=state_dtype), overlap=True, arch=arch)
        for arch in ((8, 0), (10, 0), (12, 0))
        for layout, io_dtype, state_dtype in zip(LAYOUTS, (bf16, fp16), (fp32, bf16), strict=True)
    ]


def _calls_of_a_crowd() -> list[Call]:
    """Other sizes, dtypes and architectures in the tiles that share outputs."""
    small = replace(ROWS, K=64, V=64)
    wide = replace(ROWS, K=256, V=256, state_dtype=bf16)
    return [
        Call(small, 512, 8),
        Call(small, 512, 8, overlap=True, arch=(10, 0)),
        Call(wide, 30, 8, overlap=True),
        Call(ROWS, 128, 8, overlap=True, arch=(12, 0)),
    ]


CALLS = [*_calls_of_every_tile(), *_calls_of_other_kinds(), *_calls_of_other_architectures(), *_calls_of_a_crowd()]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_a_kernel_does_what_it_must_and_nothing_else(call: Call) -> None:
    assert errors_of(call) == []


def test_the_calls_span_what_a_key_holds() -> None:
    keys = set()
    for call in CALLS:
        problem = call.problem(call.inputs())
        key = decode_compile_key(problem, call.tiles(problem), aligned=call.case.shift == 0)
        keys.add((key, problem.H // problem.G))
    modes = {(key.state_layout, key.overlap, key.aligned) for key, _ in keys}
    assert modes == set(itertools.product(LAYOUTS, (False, True), (False, True)))
    sizes = {(key.state_layout, key.K, key.V, key.aligned) for key, _ in keys}
    assert sizes == set(itertools.product(LAYOUTS, SIZES, SIZES, (False, True)))
    floats = {bf16, fp16, fp32}
    assert {(key.state_layout, key.state_dtype) for key, _ in keys} == set(itertools.product(LAYOUTS, floats))
    assert {(key.state_layout, key.io_dtype) for key, _ in keys} == set(itertools.product(LAYOUTS, floats))
    assert {(key.state_layout, key.out_dtype) for key, _ in keys} == set(itertools.product(LAYOUTS, floats))
    assert {key.io_dtype == key.out_dtype for key, _ in keys} == {False, True}
    assert {key.offsets_dtype for key, _ in keys} == {torch.int32, torch.int64}
    assert {key.arch for key, _ in keys} == set(ARCHES)
    assert {group for _, group in keys} == {1, 2, 3}


SHORT = replace(ROWS, B=3, offsets=(3, -1, 0))
"""One row of padding."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [-1.0, 0.0, 1e300, -math.inf, math.inf, math.nan])
def test_any_scale_scales_the_output_and_leaves_zeros_in_padding(scale: float, layout: StateLayout) -> None:
    call = Call(replace(SHORT, state_layout=layout, softmax_scale=scale))
    if abs(scale) <= 1:
        assert errors_of(call) == []
    inputs = call.inputs()
    before = {name: buffer.clone() for name, buffer in inputs.buffers.items()}
    truth = replace(inputs, softmax_scale=1.0).truth()
    kernel = launch(call, inputs)
    assert inputs.out is not None
    assert same_bits(inputs.out[1], torch.zeros_like(inputs.out[1]))
    assert list(state_errors(inputs.s, inputs.s_offsets, truth, inputs.decay_scales)) == []
    assert untouched_errors(inputs, before) + access_errors(inputs, kernel) == []
    if not abs(scale) <= 1:
        live = [0, 2]
        expected = torch.sign(truth.out[live]) * torch.tensor(scale, dtype=fp32)
        assert torch.equal(inputs.out[live].nan_to_num(nan=7.0), expected.float().nan_to_num(nan=7.0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_beyond_32_bits(layout: StateLayout) -> None:
    """States 2**31 elements apart: only those that are named are there at all."""
    call = Call(replace(SHORT, pool_gap=0, state_layout=layout))
    inputs = call.inputs()
    truth = inputs.truth()
    problem = call.problem(inputs)
    assert inputs.out is not None
    key = decode_compile_key(problem, call.tiles(problem), aligned=True)
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "out", "s_offsets", "decay_scales")}
    arguments: Arguments = {
        name: Placed(ALLOCATIONS_AT + n * APART, tuple(tensor.shape), tensor.stride())
        for n, (name, tensor) in enumerate(tensors.items())
    }
    stride = (1 << 31) + 4
    start = ALLOCATIONS_AT + APART * len(tensors)
    arguments["s"] = Placed(start, tuple(inputs.s.shape), (stride, *inputs.s.stride()[1:]))
    rows = [slot * call.case.H + h for slot in inputs.live_slots() for h in range(call.case.H)]
    words = {arguments[name].address: words_of(tensor) for name, tensor in tensors.items()}
    pool, size = words_of(inputs.s), call.case.K * call.case.V * 4 // WORD
    words |= {start + 4 * stride * row: pool[row * size : (row + 1) * size] for row in rows}
    memory = GlobalMemory(words)
    emulate(key, ptx_of(key), memory, arguments, call.case.K**-0.5, call.case.P)
    for address, content in words.items():
        content[:] = memory.of(address, memory.words)
    assert list(out_errors(inputs.out, truth, inputs.decay_scales, call.case.K)) == []
    assert list(state_errors(inputs.s, inputs.s_offsets, truth, inputs.decay_scales)) == []


def _result(call: Call, rows: tuple[int, ...] = (0, 2), aligned: bool | None = None) -> list[torch.Tensor]:
    """Outputs and new states of some rows of a call, each row alone in a batch of its own if there is one."""
    inputs = call.inputs()
    if len(rows) == 1:
        alone = {name: getattr(inputs, name)[list(rows)].clone() for name in ("q", "k", "v", "out", "s_offsets")}
        inputs, rows = replace(inputs, **alone), (0,)
    launch(call, inputs, aligned=aligned)
    assert inputs.out is not None
    parts = []
    for row in rows:
        first = int(inputs.s_offsets[row]) * call.case.H
        parts += [inputs.out[row].clone(), inputs.s[first : first + call.case.H].clone()]
    return parts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_is_the_same_bits_in_every_tile_and_alignment_and_alone(layout: StateLayout) -> None:
    """States and output are float32, which rounds no difference away."""
    case = replace(SHORT, state_layout=layout)
    first = _result(Call(case))
    seen = set()
    for call in _calls_of_every_tile():
        if call.case.state_layout == layout:
            other = replace(call, case=case, beyond=())
            seen.add(other.tiles(other.problem(other.inputs())))
            for result in (
                _result(other),
                _result(other, aligned=False),
                _result(replace(other, case=replace(case, shift=1, pool_gap=3), gap=1)),
            ):
                assert all(map(same_bits, result, first))
    assert len(seen) > (5 if layout == "vk" else 1)
    assert all(map(same_bits, _result(Call(case), (0,)), first[:2]))
    assert all(map(same_bits, _result(Call(case), (2,)), first[2:]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_along_the_third_axis_of_the_grid(layout: StateLayout) -> None:
    """The last rows of a long batch; the blocks of the others are left out."""
    rows = ROWS_PER_Z + 3
    offsets = [-1] * rows
    offsets[-3:] = [2, 0, -1]
    call = Call(DecodeCase(B=rows, P=3, H=2, K=64, V=64, offsets=tuple(offsets), state_layout=layout))
    inputs = call.inputs()
    assert inputs.out is not None
    problem = call.problem(inputs)
    key = decode_compile_key(problem, choose_decode_tiles(problem), aligned=True)
    kernel = EmulatedKernel(key, ptx_of(key), first_row=ROWS_PER_Z)
    truth = inputs.truth()
    kernel(inputs.s_offsets, inputs.s, inputs.decay_scales, inputs.q, inputs.k, inputs.v, inputs.out, 64**-0.5, 3)
    assert bool(inputs.out[:ROWS_PER_Z].isnan().all())
    inputs.out[:ROWS_PER_Z] = 0
    assert list(out_errors(inputs.out, truth, inputs.decay_scales, 64)) == []
    assert list(state_errors(inputs.s, inputs.s_offsets, truth, inputs.decay_scales)) == []


# Tests of the test: kernels that are wrong, and what says so.


@functools.cache
def _is_right(call: Call) -> bool:
    return errors_of(call) == []


def _verdict(call: Call, change: Callable[[str], str] = lambda ptx: ptx) -> str:
    try:
        return "; ".join(errors_of(call, change))
    except PtxError as error:
        return str(error)


ALIGNED, SHIFTED = Call(SHORT), Call(replace(SHORT, shift=1))
KV = Call(replace(SHORT, state_layout="kv"))
OVERLAP = replace(ALIGNED, overlap=True)
CROWD = replace(ALIGNED, batch=128, heads=8)


DECAY = r"(ex2\.[^\n]*\n\s*)mul\.f32 (\s*%r\d+), [^\n]*;", r"\1mov.b32 \2, 0f3F800000;"
"""exp(-d) is a power of 2 times a whole one: without it, the factor is 1."""

WRONG: dict[str, tuple[Call, str, str, str]] = {
    "decay-left-out": (ALIGNED, *DECAY, "state of 4 of 4 "),
    "decay-left-out-kv": (KV, *DECAY, "state of 4 of 4 "),
    "no-wait": (OVERLAP, r"griddepcontrol\.wait;", "", "before the wait for it"),
    "no-wait-kv": (replace(KV, overlap=True), r"griddepcontrol\.wait;", "", "before the wait for it"),
    "store-of-16-bytes-shifted": (
        ALIGNED,
        r"(st\.global\.v4\.b32\s+\[%rd\d+)\]",
        r"\1+4]",
        "16 bytes at .* not aligned",
    ),
    "store-shifted": (SHIFTED, r"(st\.global\.b32\s+\[%rd\d+)\]", r"\1+4]", "state of 4 of 4 .*s is not written once"),
    "last-store-left-out": (SHIFTED, r"(.*)\n\s*st\.global\.b32[^;]*;", r"\1", "out is not written once"),
    "padding-loads": (ALIGNED, r"(or\.pred\s+(%p\d+),.*?@)(\2 bra)", r"\1!\3", "in no allocation"),
    "padding-stores": (ALIGNED, r"(or\.pred\s+(%p\d+),.*@)(\2 bra)", r"\1!\3", "in no allocation"),
    "padding-is-what-it-sums": (
        ALIGNED,
        r"(or\.pred\s+(%p\d+),.*selp\.f32\s+%r\d+), 0f00000000, (%r\d+), \2;",
        r"\1, \3, \3, \2;",
        "out of padding row 1 must be zero",
    ),
    "no-upper-bound-of-slots": (
        replace(ALIGNED, beyond=(5,)),
        r"or\.pred\s+(%p\d+), (%p\d+), %p\d+;",
        r"or.pred \1, \2, \2;",
        "in no allocation|s is read",
    ),
    "no-barrier": (KV, r"bar\.sync\s+0;", "", "reads what another one has written"),
    "no-barrier-in-a-crowd": (CROWD, r"bar\.sync\s+0;", "", "reads what another one has written"),
    "divergent-barrier": (
        KV,
        r"(setp\.gt\.u32\s+(%p\d+),.*)(bar\.sync\s+0;)",
        r"\1@\2 \3",
        "some threads of a block only",
    ),
    "unknown-instruction": (ALIGNED, r"neg\.f32", "neg.ftz.f32", r"^line \d+: neg\.ftz\.f32 .* does not know$"),
}
"""Calls of kernels that are wrong: what is changed in the PTX, and what the verdict must say."""


@pytest.mark.parametrize(("call", "pattern", "replacement", "verdict"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_kernel_is_caught(call: Call, pattern: str, replacement: str, verdict: str) -> None:
    def change(ptx: str) -> str:
        changed = re.sub(pattern, replacement, ptx, count=1, flags=re.DOTALL)
        assert changed != ptx
        return changed

    assert _is_right(call)
    assert re.search(verdict, _verdict(call, change))


def _swap(first: int, second: int) -> Callable[[list[Array]], None]:
    def change(parameters: list[Array]) -> None:
        parameters[first], parameters[second] = parameters[second], parameters[first]

    return change


def _set(which: int, field: int, value: int) -> Callable[[list[Array]], None]:
    def change(parameters: list[Array]) -> None:
        parameters[which][f"field{field}"] = value

    return change


MISLAID: dict[str, tuple[Callable[[list[Array]], None], str]] = {
    "s_offsets-and-s": (_swap(0, 1), "the parameters take"),
    "q-and-k": (_swap(3, 4), "state of 8 of 8"),
    "v-and-out": (_swap(5, 6), "in no allocation|is read"),
    "slots-and-their-stride": (_swap(8, 9), "not aligned|in no allocation"),
    "fewer-rows": (_set(0, 1, 2), "out of 4 of 8"),
    "stride-of-heads-without-the-gap": (_set(1, 2, 128 * 128), "s is not written once"),
    "stride-of-rows-of-q": (_set(3, 3, 0), "out of 8 of 8|out of 4 of 8"),
    "stride-of-heads-of-k": (_set(4, 4, 0), "state of 4 of 8"),
    "first-shift-of-the-divisor": (_set(10, 2, 0), "state of 4 of 8|k is read|in no allocation"),
}
"""Parameters that hold what they should not, and what the verdict must say."""


@pytest.mark.parametrize(("change", "verdict"), MISLAID.values(), ids=MISLAID.keys())
def test_parameters_that_lie_elsewhere_are_caught(
    change: Callable[[list[Array]], None], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `kernel_parameters` says of the layout cannot be wrong unseen; `test_host_code` asks the compiler itself."""
    call = Call(replace(SHORT, H=4, G=2), gap=4)
    assert _is_right(call)

    def changed(*arguments: Any) -> list[Array]:
        parameters = kernel_parameters(*arguments)
        change(parameters)
        return parameters

    monkeypatch.setattr("emulated_kernel.kernel_parameters", changed)
    assert re.search(verdict, _verdict(call))
