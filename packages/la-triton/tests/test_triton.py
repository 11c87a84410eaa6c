"""What la-triton promises beyond the contract: few kernels, of known quality, for architectures that are not here."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from la_core import DecodeProblem
from la_core.conformance.compare import same_bits
from la_core.conformance.decode_cases import NON_IDENTITY, DecodeCase
from la_core.conformance.decode_inputs import DecodeInputs, judge_decode, make_decode_inputs
from la_core.spec.decode_checks import check_decode
from la_core.spec.window_problem import WindowOp
from la_triton.backend import INTERPRETED, backend
from la_triton.decode_tiles import DecodeTiles, candidate_tiles, choose_decode_tiles, next_power_of_two
from la_triton.window_tiles import choose_window_tiles

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (1, 16, 24, 64, 80, 96, 128, 200, 256)

REGISTERS = 144
"""A thread's budget: fourteen warps still fit on a multiprocessor."""

compiled = pytest.mark.skipif(INTERPRETED, reason="not run: the interpreter is on, which compiles nothing")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="not run: needs TRITON_INTERPRET=1")
on_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="not run: no CUDA device")


def _problem(**changes: object) -> DecodeProblem:
    sizes = {"B": 8, "P": 100, "H": 8, "K": 128, "V": 128, "device": "cuda", "arch": (9, 0)}
    overlap = bool(changes.pop("overlap", False))
    return replace(DecodeProblem.contiguous(**{**sizes, **changes}), overlap=overlap)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [fp32, bf16])
def test_tiles_fit_and_are_few(overlap: bool, state_layout: str, state_dtype: torch.dtype) -> None:
    """For one model there are at most four, whatever the batch; heads and batch matter by their product alone."""
    for k_size, v_size in itertools.product(SIZES, SIZES):
        chosen = set()
        for rows, heads in itertools.product((1, 2, 3, 7, 8, 16, 33, 64, 200, 512, 70_000), (1, 8, 64)):
            problem = _problem(
                B=rows, H=heads, K=k_size, V=v_size, state_dtype=state_dtype, state_layout=state_layout, overlap=overlap
            )
            tiles = choose_decode_tiles(problem)
            assert 1 <= tiles.block_v <= next_power_of_two(v_size)
            assert tiles.block_v & (tiles.block_v - 1) == 0
            assert tiles in candidate_tiles(problem)
            assert tiles == choose_decode_tiles(replace(problem, B=rows * heads, H=1, G=1))
            chosen.add(tiles)
        assert len(chosen) <= 4


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (_problem(K=257), "runs K and V up to 256, got K = 257"),
        (_problem(V=512), "runs K and V up to 256, got V = 512"),
        (_problem(arch=(7, 5)), "needs compute capability 8.0 or newer, got 7.5"),
        (
            _problem(device="cpu", arch=None),
            "runs CPU tensors only under Triton's interpreter: set TRITON_INTERPRET=1 before Python starts",
        ),
    ],
)
@compiled
def test_refusals(problem: DecodeProblem, reason: str) -> None:
    assert backend.refusal(problem) == reason


@compiled
def test_run_time_values_make_no_kernel() -> None:
    """Over batch, pool, heads and strides there is one key per tile and alignment."""
    from la_triton.decode_compile import decode_compile_key

    keys = set()
    for rows, slots, heads, gap in itertools.product(range(1, 65), (8, 64, 500), (1, 8, 16), (0, 1, 64)):
        problem = _problem(B=rows, P=slots, H=heads)
        row, head = problem.q_strides
        strides = (row + gap, head + gap)
        problem = replace(problem, q_strides=strides, k_strides=strides, v_strides=strides, out_strides=strides)
        problem = replace(problem, s_row_stride=128 * 128 + gap)
        for aligned in (True, False):
            keys.add(decode_compile_key(problem, 90, choose_decode_tiles(problem), aligned=aligned))
    assert len(keys) == 3 * 2  # three tiles up to 1024 states, aligned or not


@compiled
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [fp32, bf16], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_kernels_spill_nothing_and_move_16_bytes_a_thread(
    arch: str, state_layout: str, state_dtype: torch.dtype, overlap: bool
) -> None:
    from la_triton.compile_offline import ARCHES, report_kernel
    from la_triton.decode_compile import decode_compile_key

    problems = [
        _problem(B=rows, state_dtype=state_dtype, state_layout=state_layout, overlap=overlap)
        for rows in (1, 8, 16, 32, 64, 256, 4096)
    ]
    for tiles, problem in {choose_decode_tiles(problem): problem for problem in problems}.items():
        report = report_kernel(decode_compile_key(problem, ARCHES[arch], tiles, aligned=True))
        pieces = tiles.block_v * 128 * state_dtype.itemsize // (16 * 32 * tiles.num_warps)
        assert report.spill_bytes == 0
        assert report.registers <= REGISTERS
        assert report.wide_stores == pieces
        assert report.wide_loads >= pieces


@compiled
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
def test_alignment_changes_accesses_but_not_the_order_of_sums(state_layout: str) -> None:
    from la_triton.decode_compile import compile_decode, decode_compile_key

    problem = _problem(state_layout=state_layout)
    tiles = choose_decode_tiles(problem)
    texts = [
        compile_decode(decode_compile_key(problem, 90, tiles, aligned=aligned)).asm["ptx"] for aligned in (True, False)
    ]
    shuffles = [re.findall(r"shfl\.sync\.bfly\.b32.*?, (\d+),", text) for text in texts]
    assert shuffles[0] == shuffles[1]
    wide = [len(re.findall(r"(?:ld|st)\.global\S*\.v[24]\.b32", text)) for text in texts]
    assert wide[0] > 0
    assert wide[1] == 0


@compiled
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [fp32, bf16], ids=str)
@pytest.mark.parametrize("size", [(128, 128), (256, 200), (80, 96), (16, 16), (1, 1)], ids=str)
def test_all_tiles_of_a_problem_sum_in_one_order(
    size: tuple[int, int], state_dtype: torch.dtype, state_layout: str
) -> None:
    """K lies over the same registers, lanes and warps in all of them, so the batch changes no bit."""
    from la_triton.decode_compile import compile_decode, decode_compile_key

    problem = _problem(K=size[0], V=size[1], state_dtype=state_dtype, state_layout=state_layout)
    k_dim = 1 if state_layout == "vk" else 0
    orders = set()
    for tiles in {replace(tiles, eviction="") for tiles in candidate_tiles(problem)}:
        for aligned in (True, False):
            text = compile_decode(decode_compile_key(problem, 90, tiles, aligned=aligned)).asm["ttgir"]
            layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<\{(.*?)\}>", text))
            (name,) = set(re.findall(r"tt\.reduce.*?tensor<\d+x\d+xf32, (#\w+)>", text, flags=re.DOTALL))
            spread = re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[(\d+), (\d+)\]", layouts[name])
            assert len(spread) == 3
            orders.add(tuple(pair[k_dim] for pair in spread))
    assert len(orders) == 1


CASES = [
    DecodeCase(B=5, P=7, H=2, K=128, V=64, padding=0.2, out_dtype=fp32),
    DecodeCase(B=5, P=7, H=2, K=96, V=80, padding=0.2, out_dtype=fp32, pool_gap=4),
    DecodeCase(B=5, P=7, H=2, K=64, V=128, padding=0.2, state_layout="kv", state_dtype=bf16, out_dtype=fp32),
    DecodeCase(B=5, P=7, H=2, K=256, V=64, padding=0.2, out_dtype=fp32),
    DecodeCase(B=5, P=7, H=2, K=16, V=16, padding=0.2, out_dtype=fp32, state_dtype=bf16),
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64, 128])
def test_every_tile_is_right_by_itself(case: DecodeCase, rows: int) -> None:
    from la_triton.decode_launch import interpret_decode

    def call(inputs: DecodeInputs) -> torch.Tensor:
        out = torch.full_like(inputs.v, torch.nan) if inputs.out is None else inputs.out
        problem = check_decode(*inputs.tensors(), out=out)
        interpret_decode(problem, *inputs.tensors(), case.K**-0.5, out, DecodeTiles(rows, 1))
        return out

    # The interpreter runs one program after the other: two rows and one of padding say what more of them would.
    assert judge_decode(make_decode_inputs(replace(case, B=3, P=5)), call) == []


@on_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_tile_is_right_and_gives_the_same_bits_on_a_gpu(case: DecodeCase) -> None:
    """Also with overlap, and also for addresses that are not aligned."""
    from la_triton.decode_launch import DecodeLaunch

    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    problem = DecodeProblem.contiguous(
        B=case.B, P=case.P, H=case.H, K=case.K, V=case.V, state_dtype=case.state_dtype, state_layout=case.state_layout
    )
    for tiles, overlap, shift in itertools.product(candidate_tiles(problem), (False, True), (0, 1)):
        inputs = make_decode_inputs(replace(case, shift=shift), "cuda")

        def call(given: DecodeInputs, tiles: DecodeTiles = tiles, overlap: bool = overlap) -> torch.Tensor:
            out = torch.full_like(given.v, torch.nan) if given.out is None else given.out
            problem = replace(check_decode(*given.tensors(), out=out), overlap=overlap)
            DecodeLaunch(problem, tiles).decode(*given.tensors(), case.K**-0.5, out)
            return out

        assert judge_decode(inputs, call) == [], tiles
        live = [slot * case.H + h for slot in sorted(inputs.live_slots()) for h in range(case.H)]
        again = make_decode_inputs(replace(case, shift=shift), "cuda")
        results.append((call(again), again.s[live]))
    for out, states in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(states, results[0][1])


@on_gpu
def test_kernels_are_counted_over_many_batches_on_a_gpu() -> None:
    """The count that the key promises is what the process really holds."""
    from la_core import decode
    from la_triton.decode_launch import kernels_made

    def run(rows: int, slots: int, scale: float) -> None:
        inputs = make_decode_inputs(replace(NON_IDENTITY, B=rows, P=slots, H=2, K=128, V=128, offsets=None), "cuda")
        decode(*inputs.tensors(), softmax_scale=scale, backend="triton")

    for rows in (1, 64):
        run(rows, 64, 1.0)
    before = kernels_made()
    for rows, slots, scale in itertools.product(range(1, 65), (64, 500), (1.0, 0.5, 0.0)):
        run(rows, slots, scale)
    assert kernels_made() == before


def _accesses(ptx: str, kernel: Any) -> list[str]:
    """Accesses of global memory and steps of overlap in the order of the code, such as `load s`, `wait`, `store o`.

    An address belongs to the argument that it was computed from; pointers are the first parameters of a kernel.
    """
    pointers = [name.removeprefix("p_") for name in kernel.arg_names if name.startswith("p_")]
    origin: dict[str, str] = {}
    found = []
    for line in ptx.splitlines():
        registers = re.findall(r"%\w+", line)
        parameter = re.search(r"ld\.param\S*\s+(%\w+), \[\w+_param_(\d+)\]", line)
        access = re.search(r"(ld|st)\.global.*?\[ (%\w+)", line)
        if parameter:
            if int(parameter[2]) < len(pointers):
                origin[parameter[1]] = pointers[int(parameter[2])]
        elif "griddepcontrol" in line:
            found.append("wait" if "wait" in line else "launch")
        elif access:
            found.append(f"{'load' if access[1] == 'ld' else 'store'} {origin[access[2]]}")
        elif len(registers) > 1:
            # Addresses alone have an origin: what was loaded, sizes and strides have none.
            sources = {origin[name] for name in registers[1:] if name in origin}
            if len(sources) == 1:
                origin[registers[0]] = sources.pop()
    return found


def _overlap_faults(accesses: list[str]) -> list[str]:
    """Accesses on the wrong side of the wait for the kernel before."""
    at = accesses.index("wait") if "wait" in accesses else len(accesses)
    early, late = {"load s", "load offsets", "load decay"}, {"load q", "load k", "load v"}
    stores = {one for one in accesses if one.startswith("store")}
    return [
        *(f"{one} before the wait" for one in accesses[:at] if one in late | stores),
        *(f"{one} behind the wait" for one in accesses[at:] if one in early),
        *(f"no {one}" for one in early | late | {"store s", "store o"} if one not in accesses),
    ]


@compiled
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("rows", [1, 16, 64, 512])
def test_with_overlap_inputs_and_stores_wait_and_states_do_not(state_layout: str, rows: int) -> None:
    from la_triton.decode_compile import compile_decode, decode_compile_key
    from la_triton.decode_kernel import decode_kernel

    problem = _problem(B=rows, state_layout=state_layout, overlap=True)
    for aligned in (True, False):
        key = decode_compile_key(problem, 90, choose_decode_tiles(problem), aligned=aligned)
        accesses = _accesses(compile_decode(key).asm["ptx"], decode_kernel)
        assert accesses[0] == "launch"
        assert _overlap_faults(accesses) == []
        plain = _accesses(compile_decode(key._replace(overlap=False)).asm["ptx"], decode_kernel)
        assert sorted(plain) == sorted(one for one in accesses if one not in ("launch", "wait"))
        # What this test would say of kernels that wait too late, not at all, or too early.
        rest = [one for one in accesses if one != "wait"]
        assert "load q before the wait" in _overlap_faults([*rest, "wait"])
        assert "store s before the wait" in _overlap_faults(rest)
        assert "load s behind the wait" in _overlap_faults(["wait", *rest])


@compiled
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("op", ["decode_window", "verify"])
def test_with_overlap_windows_do_not_wait_either(op: WindowOp, state_layout: str) -> None:
    """The state comes before what needs the cursors; a full window is read once more, to be brought in, behind."""
    from la_triton.compile_offline import window_problem
    from la_triton.window_compile import KERNELS, compile_window, window_compile_key

    for aligned in (True, False):
        problem = window_problem(op, state_layout=state_layout, overlap=True)
        key = window_compile_key(problem, 90, choose_window_tiles(problem), aligned=aligned)
        accesses = _accesses(compile_window(key).asm["ptx"], KERNELS[op])
        at = accesses.index("wait")
        assert accesses[0] == "launch"
        cursors = {"load start", "load length"}
        assert set(accesses[1:at]) == {"load s", "load offsets", "load decay", "load wk", "load wv", *cursors}
        assert not {"load s", *cursors} & set(accesses[at:])
        assert {"load q", "load k", "load v", "store wk", "store wv", "store o"} <= set(accesses[at:])
        assert accesses.index("load s") < accesses.index("load length") < accesses.index("load wk")
        assert ("store s" in accesses) == (op == "decode_window")
