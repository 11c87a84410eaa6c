"""What la-cute promises beyond the contract: few kernels, of known quality, for architectures that are not here."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from la_core import DecodeProblem, KVWindow
from la_core.spec.decode_problem import StateLayout
from la_cute.backend import SIZES, CuteBackend, backend
from la_cute.decode_compile_key import ARCHES, decode_compile_key
from la_cute.decode_launch import DecodeLaunch
from la_cute.decode_tiles import DecodeTiles, candidate_tiles, choose_decode_tiles, thread_layout
from la_cute.kernel_keys import key_of_decode, keys_of_problem
from la_cute.window_problems import window_problems

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

REGISTERS = {"sm_90a": 128}
"""A thread's budget: sixteen warps still fit on a multiprocessor, and 256 states in blocks of one warp and 8 KiB on an
H200 at a time."""

OTHER_REGISTERS = 144
"""On architectures that the tiles were not measured on."""

compiler = pytest.mark.skipif(sys.platform != "linux", reason="not run: the CuTe DSL is there for Linux alone")


def _problem(
    B: int = 8,
    P: int = 100,
    H: int = 8,
    K: int = 128,
    V: int = 128,
    state_dtype: torch.dtype = fp32,
    state_layout: StateLayout = "vk",
    arch: tuple[int, int] = (9, 0),
    overlap: bool = False,
) -> DecodeProblem:
    problem = DecodeProblem.contiguous(
        B=B, P=P, H=H, K=K, V=V, state_dtype=state_dtype, state_layout=state_layout, device="cuda", arch=arch
    )
    return replace(problem, overlap=overlap)


@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [fp32, bf16, fp16], ids=str)
@pytest.mark.parametrize(("K", "V"), list(itertools.product(SIZES, SIZES)))
def test_the_threads_of_every_tile_cover_a_state_and_its_output_once(
    K: int, V: int, state_dtype: torch.dtype, state_layout: StateLayout
) -> None:
    """The indices of `decode_kernel`, worked out for every thread."""
    problem = _problem(K=K, V=V, state_dtype=state_dtype, state_layout=state_layout)
    for tiles in candidate_tiles(problem):
        vector, lanes, repeats, lines, passes = thread_layout(K, state_dtype, state_layout, tiles)
        assert vector * state_dtype.itemsize == 16
        assert vector * repeats * passes <= 64
        assert 4 * tiles.block_v * tiles.num_warps <= 48 * 1024, "shared memory of V contiguous"
        thread = torch.arange(32 * tiles.num_warps)
        lane, warp = thread % 32, thread // 32
        own, line = lane % lanes, (warp * lines + lane // lanes) * passes
        starts = torch.arange(0, V, tiles.block_v)[:, None]
        along, across = own * vector, line
        if state_layout == "vk":
            first = (starts + across) * K + along
            copies = lanes // passes
            outputs = starts + across + (own // copies if tiles.spread_sums else own)
            outputs = outputs[:, own % copies == 0 if tiles.spread_sums else own < passes]
            # In a crowd a thread of the block each takes one from shared memory.
            assert not tiles.crowded or len(thread) >= tiles.block_v
        else:
            first = across * V + starts + along
            outputs = (starts + thread)[:, thread < tiles.block_v]
        line_step = K if state_layout == "vk" else V
        values = (
            first[..., None, None, None]
            + torch.arange(passes)[:, None, None] * line_step
            + torch.arange(repeats)[:, None] * lanes * vector
            + torch.arange(vector)
        )
        assert torch.equal(values.flatten().sort().values, torch.arange(K * V))
        assert torch.equal(outputs.flatten().sort().values, torch.arange(V))
        # What the kernel promises the compiler of its indices.
        assert not (first % vector).any()
        assert not (line % passes).any()
        assert not (starts % (passes if state_layout == "vk" else vector)).any()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [fp32, bf16], ids=str)
def test_tiles_are_few_and_all_sum_in_one_order(
    state_dtype: torch.dtype, state_layout: StateLayout, overlap: bool
) -> None:
    """For one model at most seven, whatever the batch; K lies over the same registers, lanes and warps in all."""
    for K, V in itertools.product(SIZES, SIZES):
        chosen: dict[int, set[DecodeTiles]] = {1: set(), 8: set(), 64: set()}
        orders = set()
        for rows, heads in itertools.product((1, 2, 3, 7, 8, 16, 33, 64, 200, 512, 70_000), chosen):
            problem = _problem(rows, 100, heads, K, V, state_dtype, state_layout, overlap=overlap)
            tiles = choose_decode_tiles(problem)
            assert tiles in candidate_tiles(problem)
            chosen[heads].add(tiles)
            threads = thread_layout(K, state_dtype, state_layout, tiles)
            share = 0 if state_layout == "vk" else tiles.num_warps
            orders.add((threads.vector, threads.lanes, threads.repeats, share))
        assert all(len(of_model) <= 7 for of_model in chosen.values())
        assert len(orders) == 1


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (_problem(K=32), "runs K and V of 64, 128 and 256, got K = 32"),
        (_problem(V=96), "runs K and V of 64, 128 and 256, got V = 96"),
        (_problem(arch=(7, 5)), "needs compute capability 8.0 or newer, got 7.5"),
        (DecodeProblem.contiguous(B=1, P=1, H=1, K=64, V=64), "runs cuda tensors, got cpu"),
    ],
)
def test_refusals(problem: DecodeProblem, reason: str) -> None:
    assert backend.refusal(problem) == reason


def test_a_launch_is_kept_for_its_problem_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal problem that is another object gets its own, and there are never more than the limit."""
    made: list[DecodeProblem] = []

    def decode(launch: DecodeLaunch, *arguments: object) -> None:
        made.append(launch.problem)

    monkeypatch.setattr(DecodeLaunch, "decode", decode)
    monkeypatch.setattr("la_cute.backend.MAX_LAUNCHES", 2)
    own = CuteBackend()
    x = torch.empty(0)

    def launch_of(problem: DecodeProblem) -> DecodeLaunch:
        own.decode(problem, x, x, x, x, x, x, 1.0, x)
        launch: DecodeLaunch = own._launches[id(problem)]
        assert made.pop() is launch.problem is problem
        assert len(own._launches) <= 2
        return launch

    first, equal, third = _problem(), _problem(), _problem(B=3)
    kept = launch_of(first)
    assert launch_of(equal) is not kept
    assert launch_of(first) is kept
    launch_of(third)
    assert launch_of(first) is not kept
    # A problem that is gone leaves its number to another.
    own._launches[id(equal)] = launch_of(third)
    assert launch_of(equal) is not launch_of(third)


def test_an_empty_pool_needs_no_kernel() -> None:
    """What an operator returns is cleared, and a GPU is not asked for."""
    decode = _problem(P=0)
    x, window = torch.ones(2), KVWindow.allocate(P=0, N=8, H=8, K=128, V=128)
    problems = {one.op: one for one in window_problems(decode, 8, (None,))}
    calls = {
        "decode": lambda out: backend.decode(decode, x, x, x, x, x, x, 1.0, out),
        "decode_window": lambda out: backend.decode_window(
            problems["decode_window"], x, x, x, x, x, x, window, 1.0, out
        ),
        "verify": lambda out: backend.verify(problems["verify"], x, x, x, x, x, x, window, None, 1.0, out),
    }
    for call in calls.values():
        out = torch.ones(3)
        call(out)
        assert torch.equal(out, torch.zeros(3))
    assert backend.direct_decode(decode, (1,) * 7) is None
    assert backend.direct_decode(_problem(), (1,) * 7) is None
    backend.commit(problems["commit"], window, x, x, x, 1, None)
    backend.advance(problems["advance"], window, x, 1, None, False)
    assert torch.equal(x, torch.ones(2))


def test_importing_the_backend_imports_no_compiler() -> None:
    code = "import la_cute.backend, sys; print([m for m in sys.modules if m.split('.')[0] in ('cutlass', 'tvm_ffi')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_run_time_values_make_no_kernel() -> None:
    """Over batch, pool, heads and strides there is one key per tile, and one for addresses that are not aligned."""
    keys, tiles = set(), set()
    for rows, slots, heads, gap in itertools.product(range(1, 65), (8, 64, 500), (1, 8, 16), (0, 1, 64)):
        problem = _problem(rows, slots, heads)
        row, head = problem.q_strides
        strides = (row + gap, head + gap)
        problem = replace(problem, q_strides=strides, k_strides=strides, v_strides=strides, out_strides=strides)
        problem = replace(problem, s_row_stride=128 * 128 + gap)
        tiles.add(choose_decode_tiles(problem))
        keys.update(keys_of_problem(problem))
    assert len(keys) == len(tiles) + 1


@compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [fp32, bf16], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_kernels_spill_nothing_and_move_16_bytes_a_thread(
    arch: str, state_layout: StateLayout, state_dtype: torch.dtype, overlap: bool
) -> None:
    from la_cute.compile_offline import report_kernel

    problems = [
        _problem(rows, 100, heads, 128, 128, state_dtype, state_layout, ARCHES[arch], overlap)
        for rows, heads in itertools.product((1, 8, 16, 32, 64, 256, 4096), (8, 64))
    ]
    for tiles, problem in {choose_decode_tiles(problem): problem for problem in problems}.items():
        key = decode_compile_key(problem, tiles, aligned=True)
        assert key.arch == arch
        report = report_kernel(key)
        pieces = tiles.block_v * 128 * state_dtype.itemsize // (16 * 32 * tiles.num_warps)
        assert report.stack_bytes == 0
        assert report.registers <= REGISTERS.get(arch, OTHER_REGISTERS)
        assert report.wide_stores == pieces
        assert report.wide_loads == pieces


@compiler
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize(("K", "V"), [(64, 256), (256, 64), (256, 256)])
def test_other_sizes_and_dtypes_compile_without_spills(
    K: int, V: int, state_layout: StateLayout, aligned: bool
) -> None:
    from la_cute.compile_offline import report_kernel

    for io_dtype, state_dtype, out_dtype, offsets_dtype in (
        (fp32, fp32, bf16, torch.int64),
        (fp16, fp16, fp32, torch.int32),
        (fp32, bf16, fp16, torch.int32),
    ):
        problem = _problem(K=K, V=V, state_layout=state_layout, state_dtype=state_dtype)
        problem = replace(problem, io_dtype=io_dtype, out_dtype=out_dtype, offsets_dtype=offsets_dtype)
        report = report_kernel(key_of_decode(problem, aligned=aligned))
        assert report.stack_bytes == 0
        assert (report.wide_stores > 0) == aligned


@compiler
def test_the_report_sees_a_stack_frame() -> None:
    """A block that no thread can hold in registers: the check of spills can fail."""
    from la_cute.compile_offline import report_kernel

    report = report_kernel(decode_compile_key(_problem(K=256), DecodeTiles(32, 1), aligned=True))
    assert report.stack_bytes > 0
