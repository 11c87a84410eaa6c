"""The simulated engine keeps the rules that real ones keep."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from la_bench.trace import CAPTURED_SIZES, Load, captured_size, sample_steps, simulate

LOAD = Load(live=12, slots=16, mean_tokens=20)
STEPS = list(islice(simulate(LOAD, seed=3), 3000))


def test_no_slot_has_two_owners() -> None:
    for step in STEPS:
        assert len(set(step.slots)) == len(step.slots)
        assert all(0 <= slot < LOAD.slots for slot in step.slots)


def test_a_request_keeps_its_slot_and_gains_one_token_a_step() -> None:
    slot_of: dict[int, int] = {}
    tokens_of: dict[int, int] = {}
    for step in STEPS:
        for request, slot, tokens in zip(step.requests, step.slots, step.tokens, strict=True):
            assert slot_of.setdefault(request, slot) == slot
            assert tokens == tokens_of.get(request, 0) + 1
            tokens_of[request] = tokens


def test_requests_come_and_go_and_hand_their_slots_on() -> None:
    owners: dict[int, set[int]] = {}
    for step in STEPS:
        for request, slot in zip(step.requests, step.slots, strict=True):
            owners.setdefault(slot, set()).add(request)
    assert set(owners) == set(range(LOAD.slots))
    assert all(len(requests) > 10 for requests in owners.values())
    # A finished request never comes back.
    seen: set[int] = set()
    running: set[int] = set()
    for step in STEPS:
        new = set(step.requests) - running
        assert not new & seen
        seen |= new
        running = set(step.requests)


def test_the_load_is_as_asked() -> None:
    settled = STEPS[500:]
    mean = sum(len(step.slots) for step in settled) / len(settled)
    assert 0.7 * LOAD.live < mean < 1.3 * LOAD.live
    assert max(len(step.slots) for step in settled) <= LOAD.slots


def test_offsets_are_neither_sorted_nor_contiguous() -> None:
    settled = [step.slots for step in STEPS[500:] if len(step.slots) > 4]
    unsorted = sum(list(slots) != sorted(slots) for slots in settled)
    gaps = sum(max(slots) - min(slots) >= len(slots) for slots in settled)
    assert unsorted > 0.9 * len(settled)
    assert gaps > 0.5 * len(settled)


def test_padding_is_negative_behind_the_live_rows_and_reaches_a_captured_size() -> None:
    padded = 0
    for step in STEPS:
        if not step.slots:
            continue
        offsets = step.offsets
        assert len(offsets) in CAPTURED_SIZES
        assert offsets[: len(step.slots)] == step.slots
        assert all(offset < 0 for offset in offsets[len(step.slots) :])
        padded += len(offsets) > len(step.slots)
    assert padded > 0


@pytest.mark.parametrize(
    ("rows", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (60, 64), (65, 72), (512, 512)]
)
def test_captured_sizes(rows: int, size: int) -> None:
    assert captured_size(rows) == size


def test_more_rows_than_any_graph_holds() -> None:
    with pytest.raises(ValueError, match="no captured batch size holds 513 rows"):
        captured_size(513)


@pytest.mark.parametrize("sizes", [(0, 4), (5, 4), (4, 513)])
def test_an_impossible_load_is_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="a load needs"):
        Load(live=sizes[0], slots=sizes[1])


def test_the_seed_decides_everything() -> None:
    assert list(islice(simulate(LOAD, seed=3), 3000)) == STEPS
    assert list(islice(simulate(LOAD, seed=4), 3000)) != STEPS


def test_sampled_steps_have_live_rows_and_mostly_new_owners() -> None:
    steps = sample_steps(Load(live=2, slots=32, mean_tokens=20), count=8, seed=0)
    assert len(steps) == 8
    assert all(step.slots for step in steps)
    kept = [set(a.requests) & set(b.requests) for a, b in pairwise(steps)]
    assert sum(map(len, kept)) <= 0.25 * sum(len(step.requests) for step in steps)
