"""Calls with a window: options, tensors, phases of slots, and the fewest bytes that they move."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import la_bench.grid
import la_bench.timing
import la_bench.window_calls
from la_bench.errors import UsageError
from la_bench.grid import GridPoint
from la_bench.timing import CopyProbe, Effort, Lap
from la_bench.window_calls import WindowCall, WindowTensors, held_layers
from la_bench.window_spec import WindowSpec, window_spec
from la_bench.window_traffic import (
    commit_bytes,
    deferred_bytes,
    kept_bytes,
    once_bytes,
    steady_lengths,
)
from la_bench.window_variants import Deferred, Kept, Once, bind_action, ways_of

CPU = torch.device("cpu")
POINT = GridPoint(2, 3, device_type="cpu")
VERIFY = WindowSpec("verify", (8,), 4, 1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(la_bench.grid.LAP_BYTES, "cpu", 4 << 20)


def lap_of(spec: WindowSpec, point: GridPoint = POINT) -> list[WindowCall]:
    calls = WindowTensors([point], spec, CPU, 0).lap(point)
    assert all(isinstance(call, WindowCall) for call in calls)
    return calls  # type: ignore[return-value]


def test_defaults_of_the_operators() -> None:
    assert window_spec("decode", (), None, None) is None
    assert window_spec("deferred", (), None, None) == WindowSpec("deferred", (7, 15))
    assert window_spec("verify", (), None, None) == WindowSpec("verify", (16,), 4, 1)
    assert window_spec("commit", (), None, None) == WindowSpec("commit", (16,), 4, 4)
    assert window_spec("deferred", (3, 7, 3), None, None) == WindowSpec("deferred", (3, 7))


@pytest.mark.parametrize(
    ("op", "places", "drafts", "layers", "sentence"),
    [
        ("decode", (7,), None, None, "belong to --op deferred, verify or commit"),
        ("deferred", (), 4, None, "deferred decode has no drafts"),
        ("deferred", (7, 65), None, None, "from 1 to 64 places, got 65"),
        ("verify", (3,), None, None, "must hold the 4 drafts"),
        ("commit", (8, 16), None, None, "takes one --window"),
    ],
    ids=["decode", "drafts", "large", "small", "two"],
)
def test_options_that_do_not_belong_together(
    op: str, places: tuple[int, ...], drafts: int | None, layers: int | None, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        window_spec(op, places, drafts, layers)


def test_deferred_windows_are_filled_to_every_length_as_often() -> None:
    lap = lap_of(WindowSpec("deferred", (3, 7)))
    for places in (3, 7):
        window = lap[0].windows[f"window{places}"]
        counts = Counter(window.length.tolist())
        assert sorted(counts) == list(range(places + 1))
        assert max(counts.values()) - min(counts.values()) <= 1
        assert window.k.shape == (1, POINT.slots, places, 2, 128)
        assert window.length.tolist() != sorted(window.length.tolist())
        assert 0 <= int(window.start.min()) <= int(window.start.max()) < places


def test_groups_of_a_lap_share_no_slot() -> None:
    lap = lap_of(VERIFY)
    named = [slot for call in lap for slot in call.here.s_offsets.tolist()]
    assert sorted(named) == list(range(len(named)))
    assert len(lap[0].windows["window8"].start) == len(named)


def test_layers_that_do_not_fit_take_turns() -> None:
    point = GridPoint(2, 10, device_type="cpu")
    assert point.chunks == 4
    spec = WindowSpec("verify", (8,), 4, 6)
    lap = lap_of(spec, point)
    assert (len(lap), lap[0].pools.shape[:2], lap[0].layers) == (2, (2, 2 * 10 * 2), 6)
    for way in (Kept(spec, 8), Once(spec)):
        actions = way.actions(lap[0])
        wanted = ["verify"] * 6 + ["commit"] * 3 + (["advance"] if isinstance(way, Kept) else [])
        assert [action.case.op for action in actions] == wanted
        pools = [action.s.data_ptr() for action in actions[:6]]
        assert len(set(pools)) == 2
        assert pools[0] == pools[2] == pools[4]
        assert not torch.equal(actions[0].decay_scales, actions[1].decay_scales)
        assert {action.case.L for action in actions[6:9]} == {2}, "commit_layers of the layers that are held"


def test_as_many_layers_are_held_as_take_turns_evenly() -> None:
    point = GridPoint(2, 10, device_type="cpu")
    assert point.chunks // 2 == 2
    assert [held_layers(point, WindowSpec("verify", (8,), 4, layers)) for layers in (1, 2, 3, 4, 5)] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("phases", [(), ("cpu",)], ids=["one group", "half a lap apart"])
@pytest.mark.parametrize("drafts", [1, 4])
def test_laps_of_verify_never_lack_room(phases: tuple[str, ...], drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(la_bench.window_calls, "TWO_PHASES", phases)
    spec = WindowSpec("verify", (8,), drafts, 1)
    lap = lap_of(spec)
    assert (lap[0].ahead is lap[0].here) == (not phases)
    lengths = []
    for _ in range(3):
        lap[0].redraw()
        for call in lap:
            for way in ways_of(spec):
                # la_core refuses a verification without room here, since it can read the cursors.
                for action in way.actions(call):
                    bind_action(action, "ref")()
        lengths.append(lap[0].windows["window8"].length.tolist())
    assert len({tuple(one) for one in lengths}) == 3
    assert set(lap[0].windows["once"].length.tolist()) == {0}


def test_accepted_drafts_are_drawn_anew() -> None:
    lap = lap_of(VERIFY)
    seen = set()
    for _ in range(40):
        lap[0].redraw()
        seen |= {*lap[0].here.accepted.tolist(), *lap[-1].here.accepted.tolist()}
    assert seen == {1, 2, 3, 4}


def test_folds_have_the_tokens_that_commits_accept() -> None:
    call = lap_of(WindowSpec("commit", (8,), 4, 2))[0]
    slots = call.here.s_offsets.long()
    assert torch.equal(call.windows["pending"].length[slots], call.here.accepted)
    assert set(call.windows["window8"].length.tolist()) == {0}
    assert call.windows["pending"].k.data_ptr() == call.windows["window8"].k.data_ptr()


def test_a_16_bit_pool_has_a_yardstick_in_float32() -> None:
    point = GridPoint(2, 3, torch.bfloat16, device_type="cpu")
    lap = lap_of(WindowSpec("deferred", (7,)), point)
    assert lap[0].s.dtype is torch.bfloat16
    assert {call.for_floor().s.dtype for call in lap} == {torch.float32}
    assert len(lap[0].for_floor().s_offsets) == 3
    lap = lap_of(WindowSpec("deferred", (7,)))
    assert lap[0].for_floor() is lap[0]


def test_phases_of_a_long_run() -> None:
    shares = steady_lengths(16, 4)
    assert sum(shares) == pytest.approx(1)
    generator = torch.Generator().manual_seed(0)
    length = torch.zeros(50000, dtype=torch.int64)
    for _ in range(60):
        length = length + torch.randint(1, 5, length.shape, generator=generator)
        length[length + 4 > 16] = 0
    for n, share in enumerate(shares):
        assert float((length == n).float().mean()) == pytest.approx(share, abs=0.006)
    # One draft: the phases go round, each as often.
    assert steady_lengths(4, 1) == pytest.approx([0.25] * 4)
    assert steady_lengths(4, 4) == pytest.approx([1.0])


def test_the_fewest_bytes() -> None:
    point = GridPoint(2, 3)
    states, token = point.state_bytes, 3 * 2 * 2 * 128 * 2
    # Offsets, cursors and slopes are less than a thousandth.
    assert commit_bytes(point, 8, 4) == pytest.approx(2 * states + 2.5 * token, rel=1e-3)
    assert deferred_bytes(point, 7) == pytest.approx((1 + 1 / 8) * states + (7 / 2 + 7 / 8 + 2) * token, rel=1e-3)
    assert once_bytes(point, 4) == pytest.approx(3 * states + (4 + 2.5 + 2 * 4) * token, rel=1e-3)
    # Without a window's worth of places every step folds all: one read, and one read and write.
    assert kept_bytes(point, 4, 4) == pytest.approx(once_bytes(point, 4), rel=1e-3)
    assert kept_bytes(point, 16, 4) < kept_bytes(point, 8, 4) < kept_bytes(point, 4, 4)
    assert deferred_bytes(point, 7) < point.problem().bytes_moved()


def test_a_time_is_that_of_a_layer_or_of_as_many_tokens() -> None:
    spec = WindowSpec("verify", (8,), 4, 3)
    call = lap_of(spec)[0]
    assert [way.per_call(call) for way in ways_of(spec)] == [3, 3]
    assert Deferred(7).per_call(lap_of(WindowSpec("deferred", (7,)))[0]) == 1
    lap = Lap([lambda: None] * 6, 1, per_call=0.5)
    assert lap.per_unit(12.0, 6) == 4.0


def test_what_is_new_in_each_sample_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from la_bench.cpu_timing import time_on_cpu

    monkeypatch.setitem(la_bench.timing.COPY_BYTES, "cpu", 1 << 20)
    log: list[str] = []
    lap = Lap([lambda: log.append("call")] * 4, 1, renew=lambda: log.append("renew"))
    time_on_cpu({"a": lap}, 2, CopyProbe(CPU), Effort(0.1, 2, 2), lambda done: None)
    assert log == ["renew", "call", "call"] * 3


def test_once_holds_no_more_than_the_drafts() -> None:
    lap = lap_of(VERIFY)
    assert Once(VERIFY).places == lap[0].windows["once"].k.shape[2] == 4
