"""What la-triton promises beyond the contract of the window operators: few kernels, of known quality, in one order."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import get_args

import pytest
import torch

from la_core import KVWindow, WindowProblem
from la_core.conformance.target import Target
from la_core.conformance.window_cases import COMMIT, DECODE, LAYERS, RAGGED, WindowCase
from la_core.conformance.window_target import WindowTarget
from la_core.spec.window_problem import WindowOp
from la_triton.backend import INTERPRETED, backend
from la_triton.decode_tiles import next_power_of_two
from la_triton.window_tiles import WindowTiles, candidate_window_tiles, choose_window_tiles, padded_k

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
SIZES = (1, 16, 24, 64, 80, 96, 128, 200, 256)
OPS: tuple[WindowOp, ...] = get_args(WindowOp)

REGISTERS = 128
"""A thread's budget: two programs of eight warps fit on a multiprocessor."""

compiled = pytest.mark.skipif(INTERPRETED, reason="not run: the interpreter is on, which compiles nothing")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="not run: needs TRITON_INTERPRET=1")
on_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="not run: no CUDA device")


def _problem(op: WindowOp, **changes: object) -> WindowProblem:
    from la_triton.compile_offline import window_problem

    return window_problem(op, **changes)


@compiled
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("op", OPS)
def test_one_tile_serves_all_batches(op: WindowOp, state_layout: str) -> None:
    """Sums come in an order that follows the tile: it may depend on sizes and dtypes alone."""
    for k_size, v_size, places, dtype in itertools.product(SIZES, SIZES, (1, 7, 16, 64), (fp32, bf16)):
        chosen = set()
        for rows, heads in itertools.product((1, 16, 64, 512, 70_000), (1, 8, 64)):
            problem = _problem(op, state_layout=state_layout, B=rows, H=heads, G=heads, N=places)
            if op != "advance":
                problem = replace(problem, K=k_size, V=v_size, state_dtype=dtype)
            tiles = choose_window_tiles(problem)
            assert 1 <= tiles.block_v <= next_power_of_two(v_size)
            assert tiles.block_v & (tiles.block_v - 1) == 0
            assert tiles.inner_k <= padded_k(k_size)
            chosen.add(tiles)
        assert len(chosen) == 1


@compiled
@pytest.mark.parametrize("op", OPS)
def test_run_time_values_make_no_kernel(op: WindowOp) -> None:
    """Over batch, pool, heads, layers, tokens, strides and places up to a power of two."""
    from la_triton.window_compile import window_compile_key

    keys = set()
    for rows, slots, heads, more, gap in itertools.product((1, 2, 63, 512), (8, 500), (1, 8, 64), (1, 3), (0, 64)):
        problem = _problem(op, B=rows, P=slots, N=9 + more)
        if op == "verify":
            problem = replace(problem, T=more)
        elif op == "commit":
            problem = replace(problem, L=more)
        if op != "advance":
            problem = replace(problem, H=heads, G=heads)
        strides = (100 * 128 + gap, 128 + gap, 128)
        problem = replace(problem, q_strides=strides, window_k_strides=(0, *strides), s_strides=(gap, 128 * 128 + gap))
        for aligned in (True, False):
            keys.add(window_compile_key(problem, 90, choose_window_tiles(problem), aligned=aligned))
    assert len(keys) == 2  # aligned or not


@compiled
def test_refusals() -> None:
    assert backend.refusal(_problem("verify", K=257)) == "runs K and V up to 256, got K = 257"
    assert backend.refusal(_problem("commit", V=512)) == "runs K and V up to 256, got V = 512"
    for op in OPS:
        assert backend.refusal(_problem(op)) is None
        old = _problem(op, arch=(7, 5))
        assert backend.refusal(old) == "needs compute capability 8.0 or newer, got 7.5"


@compiled
@pytest.mark.parametrize("op", OPS)
def test_the_smallest_sizes_compile(op: WindowOp) -> None:
    """Triton 3.6 refuses some masks on an axis of one element."""
    from la_triton.window_compile import compile_window, window_compile_key, window_constants

    for k_size, v_size in ((1, 1), (1, 64), (64, 1)):
        problem = _problem(op) if op == "advance" else replace(_problem(op), K=k_size, V=v_size)
        key = window_compile_key(problem, 90, choose_window_tiles(problem), aligned=True)
        assert window_constants(key).get("BLOCK_K", 2) >= 2
        assert compile_window(key).asm["cubin"]


QUALITY = [
    ("decode_window", "vk", fp32),
    ("decode_window", "vk", bf16),
    ("decode_window", "kv", fp32),
    ("verify", "vk", fp32),
    ("verify", "kv", bf16),
    ("commit", "vk", fp32),
    ("commit", "kv", bf16),
]


@compiled
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(("op", "state_layout", "state_dtype"), QUALITY, ids=str)
def test_kernels_spill_nothing_and_move_16_bytes_a_thread(
    arch: str, op: WindowOp, state_layout: str, state_dtype: torch.dtype
) -> None:
    from la_triton.compile_offline import ARCHES, report_kernel
    from la_triton.window_compile import window_compile_key

    problem = _problem(op, B=512, state_layout=state_layout, state_dtype=state_dtype, overlap=True)
    tiles = choose_window_tiles(problem)
    report = report_kernel(window_compile_key(problem, ARCHES[arch], tiles, aligned=True))
    pieces = tiles.block_v * 128 * state_dtype.itemsize // (16 * 32 * tiles.num_warps)
    assert report.spill_bytes == 0
    assert report.registers <= REGISTERS
    assert report.wide_loads >= pieces
    assert report.wide_stores >= (0 if op == "verify" else pieces)


@compiled
@pytest.mark.parametrize("op", ["decode_window", "verify"])
@pytest.mark.parametrize("places", [1, 64])
def test_windows_of_any_size_and_the_largest_states_spill_nothing(op: WindowOp, places: int) -> None:
    from la_triton.compile_offline import report_kernel
    from la_triton.window_compile import window_compile_key

    for K in (128, 256):
        problem = _problem(op, N=places, K=K, V=K)
        report = report_kernel(window_compile_key(problem, 90, choose_window_tiles(problem), aligned=True))
        assert report.spill_bytes == 0


def _sums(text: str) -> list[str]:
    """Every sum in the compiler's own language: its axis and its operand's shape, with the layouts written out."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.(?:blocked|linear)<.*>)$", text, flags=re.MULTILINE))
    found = re.findall(r'"tt\.reduce".*?axis = (\d).*?\}\) : \(tensor<([^:]*?)>\) ->', text, flags=re.DOTALL)
    return [
        f"{axis} {re.sub(r'#(?!ttg)[a-z]+[0-9]*', lambda name: layouts[name[0]], operand)}" for axis, operand in found
    ]


@compiled
@pytest.mark.parametrize("op", ["decode_window", "verify"])
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
def test_neither_addresses_nor_overlap_change_the_order_of_sums(op: WindowOp, state_layout: str) -> None:
    from la_triton.window_compile import compile_window, window_compile_key

    orders, wide = [], []
    for overlap, aligned in ((False, True), (True, True), (False, False)):
        problem = _problem(op, N=7, state_layout=state_layout, overlap=overlap)
        key = window_compile_key(problem, 90, choose_window_tiles(problem), aligned=aligned)
        text = compile_window(key).asm
        orders.append(_sums(text["ttgir"]))
        wide.append(len(re.findall(r"(?:ld|st)\.global\S*\.v[24]\.b32", text["ptx"])))
    assert len(orders[0]) >= 4
    assert all(order == orders[0] for order in orders)
    assert wide[0] > 0
    assert wide[-1] == 0


@compiled
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
def test_commit_takes_any_address_element_by_element(state_layout: str) -> None:
    from la_triton.window_compile import compile_window, window_compile_key

    problem = _problem("commit", state_layout=state_layout)
    key = window_compile_key(problem, 90, choose_window_tiles(problem), aligned=False)
    assert re.findall(r"(?:ld|st)\.global\S*\.v[24]\.b32", compile_window(key).asm["ptx"]) == []


@compiled
def test_what_writes_cursors_or_folds_starts_without_overlap() -> None:
    """The next kernel may read cursors and states before its wait, so it must start when these have ended."""
    from la_triton.window_compile import window_compile_key

    for op in OPS:
        problem = _problem(op, overlap=True)
        key = window_compile_key(problem, 90, choose_window_tiles(problem), aligned=False)
        assert key.overlap == (op in ("decode_window", "verify"))
        assert not window_compile_key(problem, 80, choose_window_tiles(problem), aligned=False).overlap


CASES = [
    replace(DECODE, H=4, G=2, K=40, V=24, io_dtype=fp32, out_dtype=fp32),
    replace(DECODE, state_layout="kv", window_dtype=fp32, V=48, shift=1),
    replace(RAGGED, H=4, G=2, K=40, V=24, io_dtype=fp32, out_dtype=fp32, window_gap=3),
    replace(RAGGED, state_layout="kv", state_dtype=bf16, V=48, out_dtype=fp32),
    replace(COMMIT, K=40, V=24, state_dtype=bf16),
    replace(LAYERS, state_layout="kv", V=48),
]


@pytest.mark.parametrize("op", ["decode_window", "verify", "commit"])
def test_candidates_hold_the_present_choice(op: WindowOp) -> None:
    candidates = candidate_window_tiles(_problem(op))
    assert choose_window_tiles(_problem(op)) in candidates
    assert len(set(candidates)) == len(candidates) > 4


def test_a_launch_takes_the_arguments_of_the_backend() -> None:
    """Without the problem, which it was made for; as `la-bench tune` calls it."""
    from la_triton import window_launch

    class Remembering(window_launch.WindowLaunch):
        def __init__(self, problem: WindowProblem) -> None:
            self.problem = problem

        def __call__(self, call: window_launch.WindowCall) -> None:
            seen.append(call)

    seen: list[window_launch.WindowCall] = []
    window = KVWindow.allocate(P=2, N=4, H=1, K=8, V=8)
    q, k, v, s, slots, slopes, out = (torch.full((1,), float(number)) for number in range(7))
    cursors = window.k, window.v, window.start, window.length
    Remembering(_problem("decode_window")).decode(q, k, v, s, slots, slopes, window, 0.5, out)
    Remembering(_problem("verify")).verify(q, k, v, s, slots, slopes, window, None, 0.5, out)
    Remembering(_problem("commit")).commit(window, s, slots, slopes, 3, None)
    assert [call.tensors for call in seen] == [
        (q, k, v, s, slots, slopes, *cursors, out),
        (q, k, v, s, slots, slopes, *cursors, slots, out),
        (s, slots, slopes, *cursors, slots),
    ]
    # 16 places: no row has room for 17, and that stands for none asked for.
    assert [call.numbers for call in seen] == [(0.5,), (0.5,), (3, 17)]


TILES = [
    WindowTiles(8, 1, 64, step=1),
    WindowTiles(16, 1, 8, step=2),
    WindowTiles(32, 1, 16, step=4),
]


def _with_tiles(monkeypatch: pytest.MonkeyPatch, tiles: WindowTiles) -> WindowTarget:
    """la-triton where every call runs with these tiles, fitted to it."""
    from la_triton import window_launch

    def fitted(problem: WindowProblem) -> WindowTiles:
        inner = min(tiles.inner_k, next_power_of_two(problem.K)) if problem.state_layout == "vk" else 1
        return replace(tiles, inner_k=inner)

    if INTERPRETED:
        run = window_launch.interpret_window
        monkeypatch.setattr(
            window_launch, "interpret_window", lambda problem, call: run(problem, call, fitted(problem))
        )
    else:
        launch = window_launch.WindowLaunch
        monkeypatch.setattr(
            window_launch, "launch_window", lambda problem, call: launch(problem, fitted(problem))(call)
        )
    return WindowTarget(Target("triton", "cpu" if INTERPRETED else "cuda"))


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_every_tile_is_right_by_itself(monkeypatch: pytest.MonkeyPatch, case: WindowCase, tiles: WindowTiles) -> None:
    _with_tiles(monkeypatch, tiles).assert_conforms(case)


@on_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_tile_is_right_on_a_gpu(monkeypatch: pytest.MonkeyPatch, case: WindowCase) -> None:
    problem = _problem("decode_window", K=case.K, V=case.V, N=case.N, state_dtype=case.state_dtype)
    for number, tiles in enumerate(candidate_window_tiles(problem)):
        with monkeypatch.context() as patched:
            varied = replace(tiles, step=(1, 2, 4)[number % 3])
            _with_tiles(patched, varied).assert_conforms(case)
