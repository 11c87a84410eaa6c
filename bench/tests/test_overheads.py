"""`la-bench host` and `la-bench ref` measure what they say, and leave nothing behind."""

from __future__ import annotations

import sys

import pytest

import la_bench.ref_cost
from la_bench.cli import main
from la_bench.host_overhead import (
    BASELINE,
    OPERATORS,
    HostCost,
    host_variants,
    installed_backend,
    measure_host,
    over_limit,
)
from la_bench.timing import Spread
from la_core import BackendUnavailable, list_backends, use_backend
from la_ref.blocks import BLOCK_BYTES

TARGET = "la_bench.do_nothing_backend:backend"


def test_the_backend_is_found_by_discovery_and_gone_afterwards() -> None:
    path = list(sys.path)
    with installed_backend("do-nothing", TARGET):
        found = {info.name: info for info in list_backends()}
        assert found["do-nothing"].distribution == "la-bench-do-nothing 0.0.0"
        assert found["do-nothing"].error is None
        assert "ref" in found
    assert "do-nothing" not in {info.name for info in list_backends()}
    assert sys.path == path
    with pytest.raises(BackendUnavailable), use_backend("do-nothing"):
        pass


def test_the_backend_is_gone_after_an_exception() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), installed_backend("do-nothing", TARGET):
        raise RuntimeError("on purpose")
    assert "do-nothing" not in {info.name for info in list_backends()}


def test_every_variant_is_a_legal_call_of_the_backend_that_does_nothing() -> None:
    names = set()
    with installed_backend("do-nothing", TARGET), use_backend("do-nothing"):
        for variant in host_variants():
            names.add(variant.name)
            out = variant.names.get("out")
            before = None if out is None else out.fill_(3.0).clone()
            exec(variant.statement, {**OPERATORS, **variant.names})
            assert before is None or bool((out == before).all())
    assert len(names) == len(host_variants())
    main_figures = [variant.name for variant in host_variants() if variant.main]
    assert main_figures == ["B = 1, out given", "B = 1, out allocated", "B = 4, out given", "B = 4, out allocated"]


def test_host_costs_are_relative_to_the_baseline() -> None:
    costs = measure_host(samples=2)
    assert (costs[0].name, costs[0].ratio) == (BASELINE, 1.0)
    assert len(costs) == 1 + len(host_variants())
    for cost in costs:
        assert cost.ratio == pytest.approx(cost.time_us.median / costs[0].time_us.median)
        assert 0 < cost.time_us.p20 <= cost.time_us.p80


def test_only_main_figures_can_exceed_the_limit() -> None:
    time = Spread(1.0, 1.0, 1.0)
    costs = [
        HostCost("a", time, 2.0, main=True),
        HostCost("b", time, 4.0, main=True),
        HostCost("c", time, 9.0, main=False),
    ]
    assert [cost.name for cost in over_limit(costs, 3.0)] == ["b"]


@pytest.mark.parametrize(("limit", "status"), [("0.001", 1), ("1e9", 0)])
def test_host_limit(limit: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "--samples", "2", "--max-ratio", limit]) == status
    printed = capsys.readouterr().out
    assert ("OVER THE LIMIT" in printed) == (status == 1)
    assert "torch.add(x, x) of one element" in printed


@pytest.fixture
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(la_bench.ref_cost, "B", 2)
    monkeypatch.setattr(la_bench.ref_cost, "COLD_BATCHES", 3)


@pytest.mark.usefixtures("small_pools")
@pytest.mark.parametrize(("limit", "status"), [("1e-9", 1), ("1e9", 0)])
def test_ref_limit(limit: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ref", "--rounds", "2", "--max-ratio", limit]) == status
    printed = capsys.readouterr().out
    assert ("OVER THE LIMIT" in printed) == (status == 1)
    assert "in turn, cold: " in printed
    assert "in turn: one pool" in printed
    assert "each in a loop: " in printed


@pytest.mark.usefixtures("small_pools")
def test_block_sweep_restores_the_usual_size(capsys: pytest.CaptureFixture[str]) -> None:
    usual = dict(BLOCK_BYTES)
    assert main(["ref", "--blocks", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    for size in ("1 MiB", "2 MiB", "4 MiB", "8 MiB", "16 MiB"):
        assert f"blocks of {size}" in printed
    assert usual == BLOCK_BYTES
