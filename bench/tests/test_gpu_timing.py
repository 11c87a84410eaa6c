"""The order of events on a GPU, with a device that only writes down what is asked of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from la_bench.gpu_timing import HOST_CALLS, HOST_SAMPLES, HOST_WARM_UP, GraphTimer
from la_bench.timing import Effort, Lap

EFFORT = Effort(seconds=0.01, min_rounds=3, max_rounds=3)


class FakeGraph:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def capture_begin(self, pool: object) -> None:
        assert not gc.isenabled()
        self.log.append("begin")

    def capture_end(self) -> None:
        self.log.append("end")
        if "broken" in self.log:
            raise RuntimeError("the capture was spoilt")

    def replay(self) -> None:
        self.log.append("replay")


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: FakeEvent) -> float:
        return 200.0


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order."""
    events: list[str] = []
    fakes = {
        "is_available": lambda: True,
        "graph_pool_handle": lambda: (0, 1),
        "current_stream": lambda: None,
        "Stream": lambda: SimpleNamespace(wait_stream=lambda stream: None),
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": lambda: FakeGraph(events),
        "Event": FakeEvent,
        "_sleep": lambda cycles: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return events


class FakeCopy:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def run(self) -> None:
        self.log.append("copy")


def lap_of(name: str, calls: int, log: list[str]) -> Lap:
    @contextmanager
    def inside() -> Iterator[None]:
        log.append(f"<{name}")
        yield
        log.append(f"{name}>")

    return Lap([lambda: log.append(name)] * calls, 2, inside)


def test_laps_are_warmed_up_captured_and_replayed_in_turns(log: list[str]) -> None:
    timer = GraphTimer()
    laps = {"a": lap_of("a", 4, log), "b": lap_of("b", 2, log)}
    timing = timer.time(laps, FakeCopy(log), EFFORT, lambda done: None)  # type: ignore[arg-type]
    captured = ["<a", "a", "a", "begin", "a", "a", "a", "a", "end", "a>"]
    captured += ["<b", "b", "b", "begin", "b", "b", "end", "b>"]
    # Warm-up takes 0.3 s of copies that take 0.2 s each, then comes a round that is not counted.
    assert log == [*captured, "copy", "copy", *["replay", "replay", "copy"] * 4]
    assert timing.seconds == {"a": [0.05] * 3, "b": [0.1] * 3}
    assert timing.copy_seconds == [0.2] * 3
    assert gc.isenabled()
    log.clear()
    timer.time({"a": laps["a"]}, FakeCopy(log), EFFORT, lambda done: None)  # type: ignore[arg-type]
    assert log.count("copy") == 4


def test_what_is_new_in_each_sample_comes_before_it_and_a_time_is_that_of_a_unit(log: list[str]) -> None:
    lap = Lap([lambda: None] * 4, 0, per_call=5.0, renew=lambda: log.append("renew"))
    timer = GraphTimer()
    timing = timer.time({"a": lap}, FakeCopy(log), EFFORT, lambda done: None)  # type: ignore[arg-type]
    assert timing.seconds == {"a": [0.01] * 3}
    assert log[-9:] == ["renew", "replay", "copy"] * 3
    assert timer.compare({"a": lap}, rounds=1).medians() == {"a": 0.01}


def test_a_variant_that_raises_is_left_out_with_its_own_exception(log: list[str]) -> None:
    calls = iter(range(100))

    def breaks() -> None:
        if next(calls) == 3:
            log.append("broken")
            raise ValueError("no such kernel")

    timing = GraphTimer().compare({"bad": Lap([breaks] * 4, 2)}, rounds=2)
    assert str(timing.errors["bad"]) == "no such kernel"
    assert timing.medians() == {}
    assert gc.isenabled()


def test_variants_are_compared_without_copies(log: list[str]) -> None:
    timing = GraphTimer().compare({"a": lap_of("a", 4, log)}, rounds=5)
    assert timing.medians() == {"a": 0.05}
    assert log.count("replay") == 6


def test_host_time_counts_calls_in_their_context(log: list[str]) -> None:
    taken = GraphTimer().host({"a": lap_of("a", 3, log), "b": lap_of("b", 3, log)})
    assert log.count("a") == (HOST_WARM_UP + HOST_CALLS) * (HOST_SAMPLES + 1)
    assert log[0] == "<a"
    assert log.index("b>") < log.index("<a", 1)
    assert {name: len(samples) for name, samples in taken.items()} == {"a": HOST_SAMPLES, "b": HOST_SAMPLES}
