"""The emulator against arithmetic that is right for sure, and on small programs that do what no kernel may do."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

pytest.importorskip("numpy", reason="not run: numpy is not installed")

import numpy as np
from ptx_arithmetic import ARITHMETIC, Array
from ptx_emulator import GlobalMemory, PtxError, parse_ptx, run_ptx

MEMORY_AT = 0x7F00_0000_0000
THREADS = 64


def _floats(count: int) -> Array:
    """All kinds of finite floats, many of them near each other in size."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 32, count, np.uint32).view(np.float32)
    near = random.standard_normal(count).astype(np.float32) * np.float32(2.0) ** random.integers(-13, 13, count)
    values: Array = np.where(np.isfinite(bits) & (random.random(count) < 0.3), bits, near.astype(np.float32))
    return values


def test_fma_rounds_once() -> None:
    """Also where a product and a sum in float64 would round twice, to the other side of a tie."""
    a, b, c = _floats(3 * 4000).reshape(3, -1)
    a[:3], b[:3], c[:3] = 1, (1 + 2**-23, 1 - 2**-24, 1), (2**-24 + 2**-60, -(2**-60), 2**-149)
    a[0], c[0] = 1 + 2**-23, np.float32(2**-80)
    with np.errstate(all="ignore"):
        nearest, down = (ARITHMETIC[name][1](a, b, c) for name in ("fma.rn.f32", "fma.rm.f32"))
        above, below = (np.nextafter(nearest, np.float32(end)) for end in (np.inf, -np.inf))
        above_down = np.nextafter(down, np.float32(np.inf))
    checked = 0
    for n in range(len(a)):
        if not all(map(np.isfinite, (above[n], below[n], above_down[n], down[n]))):
            continue
        exact = Fraction(float(a[n])) * Fraction(float(b[n])) + Fraction(float(c[n]))
        error = abs(Fraction(float(nearest[n])) - exact)
        for other in (above[n], below[n]):
            other_error = abs(Fraction(float(other)) - exact)
            assert error < other_error or (error == other_error and nearest[n : n + 1].view(np.uint32)[0] % 2 == 0)
        assert Fraction(float(down[n])) <= exact < Fraction(float(above_down[n]))
        checked += 1
    assert checked > len(a) // 2


@pytest.mark.parametrize(
    ("name", "dtype"), [("cvt.rn.bf16.f32", torch.bfloat16), ("cvt.rn.f16.f32", torch.float16)], ids=str
)
def test_conversions_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    values = np.concatenate([_floats(4000), np.array([0, -0.0, np.inf, -np.inf, 65520, 2**-25, 2**-24], np.float32)])
    ties = (values.view(np.uint32) & 0xFFFF0000 | 0x8000).view(np.float32)
    for floats in (values, ties[np.isfinite(ties)]):
        with np.errstate(all="ignore"):
            got = ARITHMETIC[name][1](floats)
        expected = torch.from_numpy(floats.copy()).to(dtype)
        assert np.array_equal(got, expected.view(torch.int16).numpy().view(np.uint16))
        back = got.view(np.float16) if dtype is torch.float16 else got
        widened = ARITHMETIC[name.replace("rn.", "").replace("bf16.f32", "f32.bf16").replace("f16.f32", "f32.f16")]
        assert np.array_equal(widened[1](back).astype(np.float32), expected.float().numpy())


def test_a_division_by_multiplication_is_one() -> None:
    """The instructions that make h // (H // G) of a multiplier and shifts; see `kernel_parameters`."""
    heads = np.arange(70_000, dtype=np.uint32)
    for divisor in (1, 2, 3, 5, 7, 8, 48, 65_537):
        bits = (divisor - 1).bit_length()
        multiplier = np.full_like(heads, (1 << 32) * ((1 << bits) - divisor) // divisor + 1)
        high = ARITHMETIC["mul.hi.u32"][1](multiplier, heads).astype(np.uint32)
        shift = ARITHMETIC["shr.u32"][1]
        half = shift(heads - high, np.full_like(heads, min(bits, 1)))
        assert np.array_equal(shift(half + high, np.full_like(heads, max(bits - 1, 0))), heads // divisor)


def _run(*lines: str, late: bool = False, overlap: bool = False) -> Array:
    """Run a program of two warps on 1024 bytes, `%rd0`; `%r0` is the thread. What is in memory afterwards."""
    program = [
        *(".visible .entry kernel(", ".param .u64 kernel_param_0", ")", f".reqntid {THREADS}, 1, 1", "{"),
        *("ld.param.b64 %rd0, [kernel_param_0];", "mov.u32 %r0, %tid.x;"),
        *(lines if lines[-1] == "bra $BACK;" else (*lines, "ret;")),
        "}",
    ]
    memory = GlobalMemory({MEMORY_AT: np.zeros(1024, np.uint8)}, [MEMORY_AT] if late else [])
    run_ptx(parse_ptx("\n".join(program)), memory, [MEMORY_AT.to_bytes(8, "little")], (1, 1, 1), 512, overlap)
    return memory.words.view(np.uint32)


ADDRESS = ("mul.wide.u32 %rd1, %r0, 4;", "add.s64 %rd1, %rd0, %rd1;")
STORE = (*ADDRESS, "st.global.b32 [%rd1], %r0;")
SHARED = ("mov.b32 %r1, __dynamic_shmem__0;", "shl.b32 %r2, %r0, 2;", "add.s32 %r1, %r1, %r2;")


def test_a_program_that_is_right() -> None:
    """Each thread's neighbour in the other warp, through shared memory; then one warp adds 100."""
    words = _run(
        *SHARED,
        "st.shared.b32 [%r1], %r0;",
        "bar.sync 0;",
        "setp.lt.s32 %p1, %r0, 32;",
        "@%p1 bra $LOW;",
        "ld.shared.b32 %r3, [%r1+-128];",
        "add.s32 %r3, %r3, 100;",
        "bra $END;",
        "$LOW:",
        "ld.shared.b32 %r3, [%r1+128];",
        "$END:",
        "shfl.sync.bfly.b32 %r3, %r3, 1, 31, -1;",
        *ADDRESS,
        "st.global.b32 [%rd1], %r3;",
    )
    thread = np.arange(THREADS)
    assert np.array_equal(words[:THREADS], (thread ^ 33) + 100 * (thread >= 32))


def test_threads_leave_a_loop_each_in_its_round_and_meet_behind_it() -> None:
    words = _run(
        "mov.b32 %r1, 0;",
        "$LOOP:",
        "add.s32 %r1, %r1, 3;",
        "setp.lt.s32 %p1, %r1, %r0;",
        "@%p1 bra $LOOP;",
        "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;",
        *ADDRESS,
        "st.global.b32 [%rd1], %r2;",
    )
    other = np.arange(THREADS) ^ 1
    assert np.array_equal(words[:THREADS], np.maximum(-(-other // 3), 1) * 3)


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        (("setp.lt.s32 %p1, %r0, 40;", "@%p1 bra $L;", "bar.sync 0;", "$L:"), "line 10: bar.sync .* of a block only"),
        (
            ("setp.lt.s32 %p1, %r0, 40;", "@%p1 bra $L;", "shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;", "$L:"),
            "some threads of a warp only",
        ),
        (("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 255;",), "does not know"),
        (("$BACK:", "mov.b32 %r1, 0;", "bra $BACK;"), "goes back without an end"),
        (("add.s32 %r1, %r0, %r2;",), "%r2, which is not set"),
        (("add.s64 %rd1, %rd0, %r0;",), "reads %r0 of 32 bits as s64"),
        (("st.global.b32 [%rd0], %r0;",), "two threads write one place"),
        ((*STORE, "ld.global.b32 %r1, [%rd0];"), "reads what another one has written"),
        (("ld.global.b32 %r1, [%rd0];", *STORE), "writes what another one has read"),
        ((*ADDRESS, "ld.global.b32 %r1, [%rd1+772];"), "4 bytes at 0x7f0000000400 are in no allocation"),
        ((*ADDRESS, "ld.global.b32 %r1, [%rd1+-4];"), "4 bytes at 0x7efffffffffc are in no allocation"),
        ((*ADDRESS, "ld.global.v2.b32 {%r1, %r2}, [%rd1];"), "8 bytes at 0x7f0000000004: not aligned"),
        ((*SHARED, "st.shared.b32 [%r1+260], %r0;"), "leaves the 512 bytes of shared memory"),
        ((*SHARED, "st.shared.b32 [%r2], %r0;"), "leaves the 512 bytes of shared memory"),
        ((*SHARED, "st.shared.b32 [%r1], %r0;", "ld.shared.b32 %r3, [%r1+4];"), "reads what another one has written"),
    ],
)
def test_a_program_that_is_wrong_is_caught(lines: tuple[str, ...], verdict: str) -> None:
    with pytest.raises(PtxError, match=verdict):
        _run(*lines)


def test_memory_of_the_previous_kernel_is_there_behind_the_wait() -> None:
    wait = "griddepcontrol.wait;"
    assert np.array_equal(_run(wait, *STORE, late=True, overlap=True)[:THREADS], np.arange(THREADS))
    assert np.array_equal(_run(*STORE, late=True)[:THREADS], np.arange(THREADS))
    half = ("setp.lt.s32 %p1, %r0, 63;", f"@%p1 {wait}")
    for lines in (STORE, (*STORE, wait), (*half, *STORE), (*ADDRESS, "ld.global.b32 %r1, [%rd1];", wait)):
        with pytest.raises(PtxError, match="before the wait for it"):
            _run(*lines, late=True, overlap=True)


def test_parameters_of_another_layout_are_refused() -> None:
    kernel = parse_ptx(".param .align 8 .b8 a[12],\n.param .f32 b\n.reqntid 32, 1, 1\nret;")
    assert kernel.parameters == {"a": 12, "b": 4}
    memory = GlobalMemory({MEMORY_AT: np.zeros(4, np.uint8)})
    for sizes in ((4, 12), (12, 8), (12,)):
        with pytest.raises(PtxError, match="the parameters take"):
            run_ptx(kernel, memory, [bytes(size) for size in sizes], (1, 1, 1))
