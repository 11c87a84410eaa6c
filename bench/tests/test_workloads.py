"""Workloads carry the facts of the models and legal, cold calls."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from la_bench.errors import UsageError
from la_bench.models import MODELS
from la_bench.tensors import ARENA_BYTES, lap_order, make_arena, make_tensors, pool_bytes, reuse_distance, timed_layers
from la_bench.trace import CAPTURED_SIZES
from la_bench.workloads import make_workload, select_workloads, workload_names
from la_core import DecodeProblem, decode_problem


@pytest.mark.parametrize(
    ("name", "heads", "linear", "layers", "softmax"),
    [
        ("ring-mini-linear-2.0", 16, 16, 20, (4, 9, 14, 19)),
        ("ling-2.6-flash-tp4", 8, 28, 32, (7, 15, 23, 31)),
        ("minimax-01-tp8", 8, 70, 80, tuple(range(7, 80, 8))),
        ("minicpm-sala", 32, 24, 32, (0, 9, 16, 17, 22, 29, 30, 31)),
    ],
)
def test_models(name: str, heads: int, linear: int, layers: int, softmax: tuple[int, ...]) -> None:
    model = next(model for model in MODELS if model.name == name)
    assert (model.heads, len(model.linear_layers), model.num_layers) == (heads, linear, layers)
    assert model.softmax_layers == softmax
    assert model.head_size == 128


def test_slopes_are_those_of_the_layer() -> None:
    ring, sala = MODELS[0], MODELS[3]
    assert not torch.equal(ring.slopes(0), ring.slopes(18))
    assert torch.equal(sala.slopes(1), sala.slopes(28))
    for model in MODELS:
        assert all(bool((model.slopes(layer) > 0).all()) for layer in model.linear_layers)
        assert model.slopes(model.linear_layers[0]).shape == (model.heads,)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_workload_is_padded_recycled_and_cold(device_type: str) -> None:
    for name in workload_names(device_type):
        workload = make_workload(name, device_type, seed=0)
        assert workload == make_workload(name, device_type, seed=0)
        for batch, live in zip(workload.batches, workload.live_rows, strict=True):
            slots = [slot for slot in batch if slot >= 0]
            assert len(batch) in CAPTURED_SIZES
            assert 1 <= live == len(set(slots))
            assert max(slots) < workload.load.slots
        layers = timed_layers(workload, ARENA_BYTES[device_type])
        assert len(layers) == len(set(layers)) >= 4
        assert set(layers) <= set(workload.model.linear_layers)
        assert len(layers) * pool_bytes(workload) <= ARENA_BYTES[device_type]
        # Twice what the last-level cache of one group of cores, or an L2, usually holds.
        assert reuse_distance(workload, len(layers)) > {"cpu": 32 << 20, "cuda": 60 << 20}[device_type]


def test_padding_moves_no_state() -> None:
    workload = make_workload("ring-mini-linear-2.0/medium", "cpu", seed=0)
    expected = 0
    for live, rows in zip(workload.live_rows, workload.padded_rows, strict=True):
        whole = DecodeProblem.contiguous(B=rows, P=40, H=16, K=128, V=128)
        expected += whole.bytes_moved() - 2 * (rows - live) * 16 * 128 * 128 * 4
    assert workload.bytes_per_walk == expected


def test_tensors_make_legal_calls_on_separate_pools() -> None:
    workload = make_workload("ling-2.6-flash-tp4/light", "cpu", seed=0)
    arena = torch.zeros(3 * pool_bytes(workload) // 4)
    tensors = make_tensors(workload, arena, seed=0)
    assert [layer.number for layer in tensors.layers] == [0, 16, 30]
    starts = {layer.pool.data_ptr() for layer in tensors.layers}
    assert len(starts) == 3
    for batch, layer in tensors.lap:
        problem = decode_problem(batch.q, batch.k, batch.v, layer.pool, batch.s_offsets, layer.decay_scales, batch.out)
        assert (problem.P, problem.H, problem.state_dtype) == (32, 8, torch.float32)
        assert len(batch.q) == 1 or batch.q.stride(0) == 3 * 8 * 128  # a slice of a fused qkv


def test_the_arena_holds_a_pool_for_every_layer() -> None:
    workload = make_workload("ling-2.6-flash-tp4/light", "cpu", seed=0)
    arena = make_arena(workload, torch.device("cpu"))
    assert arena.nbytes == 28 * pool_bytes(workload)
    assert bool(arena.isfinite().all())
    assert 0.9 < float(arena[:: 1 << 8].std()) < 1.1


def test_a_lap_holds_each_batch_as_often_and_moves_on_with_every_call() -> None:
    lap = lap_order(6, 16)
    assert len(lap) == 48
    assert all(a[1] != b[1] for a, b in pairwise(lap))
    for start in range(0, 48, 6):
        assert sorted(batch for batch, _ in lap[start : start + 6]) == list(range(6))


def test_reuse_distance_of_a_case_worked_by_hand() -> None:
    workload = make_workload("ling-2.6-flash-tp4/light", "cpu", seed=0)
    one_batch = type(workload)(workload.name, workload.model, workload.load, ((5, 3, -1, -1),))
    # Two pools, two live rows: between two visits of a state lie the other one here and two in the other pool.
    assert reuse_distance(one_batch, layers=2) == 3 * 8 * 128 * 128 * 4


def test_selection_by_name_and_beginning() -> None:
    assert select_workloads("cpu", ["minicpm-sala/heavy"], quick=True) == ("minicpm-sala/heavy",)
    assert len(select_workloads("cpu", ["ring", "minicpm-sala"], quick=False)) == 6
    assert len(select_workloads("cpu", [], quick=False)) == 12
    assert all(not name.endswith("heavy") for name in select_workloads("cpu", [], quick=True))


def test_an_unknown_workload_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no workload is called 'rong'.*ring-mini-linear-2\.0/light") as caught:
        select_workloads("cpu", ["ring", "rong"], quick=False)
    assert all(name in str(caught.value) for name in workload_names("cpu"))
