"""What la-cute promises of the window operators beyond the contract: few kernels, of known quality, on any machine."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from la_core import DecodeProblem
from la_core.spec.decode_problem import StateLayout
from la_core.spec.window_problem import WindowOp, WindowProblem
from la_cute.backend import SIZES, backend
from la_cute.decode_compile_key import ARCHES
from la_cute.kernel_keys import KernelKey, key_of_window, keys_of_problem
from la_cute.window_compile_key import window_compile_key
from la_cute.window_problems import window_problems
from la_cute.window_tiles import (
    TEAM,
    WindowTiles,
    candidate_window_tiles,
    choose_window_tiles,
    window_threads,
)

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

REGISTERS = 168
"""A thread's budget: twelve warps still fit on a multiprocessor."""

OPS: tuple[WindowOp, ...] = ("decode_window", "verify", "commit")
LAYOUTS: tuple[StateLayout, ...] = ("vk", "kv")

compiler = pytest.mark.skipif(sys.platform != "linux", reason="not run: the CuTe DSL is there for Linux alone")


def _problem(
    op: WindowOp,
    B: int = 8,
    P: int = 100,
    H: int = 8,
    K: int = 128,
    V: int = 128,
    N: int = 8,
    state_dtype: torch.dtype = fp32,
    state_layout: StateLayout = "vk",
    arch: tuple[int, int] = (9, 0),
    **changes: Any,
) -> WindowProblem:
    decode = DecodeProblem.contiguous(
        B=B, P=P, H=H, K=K, V=V, state_dtype=state_dtype, state_layout=state_layout, device="cuda", arch=arch
    )
    return replace(next(one for one in window_problems(decode, N, (None,)) if one.op == op), **changes)


@pytest.mark.parametrize("state_layout", LAYOUTS)
@pytest.mark.parametrize(
    ("K", "V", "state_dtype"),
    [*((K, V, fp32) for K in SIZES for V in SIZES), *((size, size, bf16) for size in SIZES)],
)
def test_the_threads_of_every_tile_cover_a_state_its_output_and_the_window_once(
    K: int, V: int, state_dtype: torch.dtype, state_layout: StateLayout
) -> None:
    """The indices of the kernels, worked out for every thread."""
    problem = _problem("decode_window", K=K, V=V, state_dtype=state_dtype, state_layout=state_layout, N=64)
    for tiles in candidate_window_tiles(problem):
        if tiles.eviction:
            continue
        vector, lanes, repeats, lines, passes = window_threads(K, state_dtype, state_layout, tiles)
        assert vector * repeats * passes * state_dtype.itemsize <= 4 * 64
        thread = torch.arange(32 * tiles.num_warps)
        lane, warp = thread % 32, thread // 32
        own, line = lane % lanes, (warp * lines + lane // lanes) * passes
        starts = torch.arange(0, V, tiles.block_v)[:, None]
        if state_layout == "vk":
            first, outputs, sharer = (starts + line) * K + own * vector, (starts + line + own)[:, own < passes], own
        else:
            first, sharer = line * V + starts + own * vector, warp * lines + lane // lanes
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
        # Each place of the ring belongs to one team, and for each row of V to one of the threads that share its sum.
        team = torch.arange(K // (TEAM * vector))[:, None, None] * TEAM * vector + torch.arange(vector)
        of_team = (team + torch.arange(TEAM)[:, None] * vector).flatten()
        assert torch.equal(of_team.sort().values, torch.arange(K))
        rows_of_block = (line[:, None] + torch.arange(passes)) if state_layout == "vk" else None
        sharers = lanes if state_layout == "vk" else lines * tiles.num_warps
        if rows_of_block is not None:
            pairs = (rows_of_block * sharers + sharer[:, None]).flatten()
        else:
            columns = (own * vector)[:, None, None] + torch.arange(repeats)[:, None] * lanes * vector
            pairs = ((columns + torch.arange(vector)) * sharers + sharer[:, None, None]).flatten()
        assert torch.equal(pairs.sort().values, torch.arange(tiles.block_v * sharers))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("state_layout", LAYOUTS)
def test_tiles_are_few_and_all_sum_in_one_order(state_layout: StateLayout, op: WindowOp, overlap: bool) -> None:
    for (K, V), state_dtype, N in itertools.product(itertools.product(SIZES, SIZES), (fp32, bf16), (1, 8, 16, 64)):
        chosen, orders = set(), set()
        for rows, heads in itertools.product((1, 2, 3, 7, 8, 16, 33, 64, 200, 512, 70_000), (1, 8, 64)):
            problem = replace(_problem(op, rows, 100, heads, K, V, N, state_dtype, state_layout), overlap=overlap)
            tiles = choose_window_tiles(problem)
            assert tiles in candidate_window_tiles(problem)
            chosen.add(tiles)
            threads = window_threads(K, state_dtype, state_layout, tiles)
            share = 0 if state_layout == "vk" else tiles.num_warps
            orders.add((threads.vector, threads.lanes, threads.repeats, share))
        assert len(chosen) <= 5
        assert len(orders) == 1


@pytest.mark.parametrize(("state_dtype", "most"), [(fp32, 2048), (bf16, 4096)])
def test_decode_with_a_window_overlaps_up_to_128_mib(state_dtype: torch.dtype, most: int) -> None:
    for states, overlaps in ((8, True), (most, True), (most + 8, False)):
        problem = replace(_problem("decode_window", states // 8, 1000, state_dtype=state_dtype), overlap=True)
        assert [key.overlap for key in keys_of_problem(problem) if key.aligned] == [overlaps]
    assert [key.overlap for key in keys_of_problem(replace(problem, op="verify")) if key.aligned] == [True]


def test_run_time_values_make_no_kernel() -> None:
    """Over batch, pool, heads, layers, tokens, places of a class and strides there is one key per tile, and one for
    addresses that are not aligned.
    """
    for op in OPS:
        keys, tiles = set(), set()
        for rows, slots, heads, places, more in itertools.product(
            (1, 2, 7, 64, 300), (8, 500), (1, 8), (9, 14, 15), (1, 3)
        ):
            strides = (64 * more, 128 * more, 256 * more, 512 * more)
            problem = _problem(op, rows, slots, heads, N=places, T=more, L=more, window_k_strides=strides)
            tiles.add(choose_window_tiles(problem))
            keys.update(keys_of_problem(problem))
        assert len(keys) == len(tiles) + 1
    advances = [_problem("advance", rows, N=places) for rows in (1, 7, 300) for places in (1, 64)]
    assert len({key for problem in advances for key in keys_of_problem(problem)}) == 1


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (_problem("verify", K=32), "runs K and V of 64, 128 and 256, got K = 32"),
        (_problem("decode_window", arch=(7, 5)), "needs compute capability 8.0 or newer, got 7.5"),
        (_problem("commit", device=torch.device("cpu"), arch=None), "runs cuda tensors, got cpu"),
        (_problem("advance", device=torch.device("cpu"), arch=None), "runs cuda tensors, got cpu"),
        (_problem("advance", K=0, V=0), None),
    ],
)
def test_refusals(problem: WindowProblem, reason: str | None) -> None:
    assert backend.refusal(problem) == reason


def _assert_quality(key: KernelKey, op: WindowOp, tiles: WindowTiles, size: int) -> None:
    from la_cute.compile_offline import report_kernel

    report = report_kernel(key)
    pieces = tiles.block_v * size // (16 * 32 * tiles.num_warps)
    assert report.stack_bytes == 0
    # Blocks of 8 warps leave either 128 registers or all of them, and verify with V contiguous needs some more.
    assert report.registers <= (255 if tiles.num_warps == 8 and op == "verify" else REGISTERS)
    assert report.wide_loads == pieces
    assert report.wide_stores == (0 if op == "verify" else pieces)


@compiler
@pytest.mark.parametrize("arch", list(ARCHES))
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("state_layout", "state_dtype", "N"), [("vk", fp32, 16), ("vk", bf16, 7), ("kv", bf16, 8)])
def test_kernels_spill_nothing_and_move_16_bytes_a_thread(
    arch: str, op: WindowOp, state_layout: StateLayout, state_dtype: torch.dtype, N: int
) -> None:
    problem = _problem(op, 4096, state_dtype=state_dtype, state_layout=state_layout, arch=ARCHES[arch], N=N)
    tiles = choose_window_tiles(problem)
    key = window_compile_key(replace(problem, overlap=op == "verify"), tiles, aligned=True)
    assert key.arch == arch
    _assert_quality(key, op, tiles, 128 * state_dtype.itemsize)


@compiler
@pytest.mark.parametrize("op", OPS)
def test_kernels_of_every_batch_spill_nothing(op: WindowOp) -> None:
    for state_dtype in (fp32, bf16):
        problems = (_problem(op, rows, state_dtype=state_dtype) for rows in (1, 8, 64))
        for tiles, problem in {choose_window_tiles(problem): problem for problem in problems}.items():
            _assert_quality(window_compile_key(problem, tiles, aligned=True), op, tiles, 128 * state_dtype.itemsize)


@compiler
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("K", "V", "state_layout", "state_dtype", "aligned"),
    [(64, 256, "vk", fp16, True), (256, 64, "kv", fp32, False), (256, 256, "vk", bf16, False)],
)
def test_other_sizes_and_dtypes_compile_without_spills(
    op: WindowOp, K: int, V: int, state_layout: StateLayout, state_dtype: torch.dtype, aligned: bool
) -> None:
    from la_cute.compile_offline import report_kernel

    problem = _problem(op, K=K, V=V, state_layout=state_layout, state_dtype=state_dtype, N=64, window_dtype=fp32)
    if op != "commit":
        problem = replace(problem, io_dtype=fp32, out_dtype=bf16)
    report = report_kernel(key_of_window(problem, aligned=aligned))
    assert report.stack_bytes == 0
    assert (report.wide_loads > 0) == aligned
