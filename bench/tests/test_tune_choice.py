"""From times of tiles to a choice: candidates that are left out, ranges of states, and the tables that show them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import pytest
import torch

from la_bench.cli import main
from la_bench.errors import UsageError
from la_bench.grid import GridPoint
from la_bench.timing import spread
from la_bench.tune import TileTime, TunedPoint, _narrowed, choice_table, ranges


@dataclass(frozen=True)
class Tiles:
    block_v: int
    num_warps: int
    eviction: str = ""


SMALL, MIDDLE, LARGE = Tiles(8, 4, "evict_last"), Tiles(16, 2), Tiles(64, 4, "evict_first")


def point(B: int, seconds: Mapping[Tiles, float | None], dtype: torch.dtype = torch.float32) -> TunedPoint:
    times = tuple(
        TileTime(tiles, None, "wrong") if one is None else TileTime(tiles, spread([one * 0.9, one, one * 1.1]))
        for tiles, one in seconds.items()
    )
    return TunedPoint(GridPoint(8, B, dtype), False, SMALL, times)


def test_one_choice_holds_as_far_as_it_is_near_the_best() -> None:
    """The middle tiles are never the best, and spare a range."""
    tuned = [
        point(1, {SMALL: 1.00, MIDDLE: 1.015, LARGE: 3.0}),
        point(2, {SMALL: 1.00, MIDDLE: 1.015, LARGE: 2.0}),
        point(4, {SMALL: 1.10, MIDDLE: 1.010, LARGE: 1.0}),
        point(8, {SMALL: 1.50, MIDDLE: 1.300, LARGE: 1.0}),
    ]
    found = ranges(tuned, within=1.02)
    assert [(one.last.units, one.tiles) for one in found] == [(32, MIDDLE), (64, LARGE)]
    assert found[0].costs == pytest.approx((1.015, 1.015, 1.01))
    assert [(one.last.units, one.tiles) for one in ranges(tuned, within=1.001)] == [(16, SMALL), (64, LARGE)]


def test_of_tiles_that_hold_as_far_the_fastest_are_taken() -> None:
    tuned = [point(1, {SMALL: 1.01, MIDDLE: 1.0}), point(2, {SMALL: 1.01, MIDDLE: 1.0})]
    assert [one.tiles for one in ranges(tuned)] == [MIDDLE]


def test_what_was_not_timed_holds_nothing() -> None:
    tuned = [point(1, {SMALL: None, MIDDLE: 1.0}), point(2, {SMALL: None, MIDDLE: None}), point(4, {SMALL: 1.0})]
    assert [(one.last.units, one.tiles) for one in ranges(tuned)] == [(8, MIDDLE), (32, SMALL)]
    assert tuned[0].cost_of_choice is None
    assert ranges([point(1, {SMALL: None})]) == []
    assert choice_table([point(1, {SMALL: None})]).rows == ()


def test_the_table_of_the_choice_counts_in_64_kib() -> None:
    dtype = torch.bfloat16
    tuned = [
        point(1, {SMALL: 1.0, LARGE: 3.0}, dtype),
        point(2, {SMALL: 1.0, LARGE: 1.01}, dtype),
        point(4, {SMALL: 2.0, LARGE: 1.0}, dtype),
    ]
    table = choice_table(tuned)
    assert table.columns == ("units up to", "tiles", "of the best")
    # 16 states of 32 KiB are 8 units.
    assert table.rows == (("8", "2 KiB, 4 warps, evict_last", "1.00"), ("more", "16 KiB, 4 warps, evict_first", "1.00"))


def test_candidates_can_be_narrowed() -> None:
    candidates: tuple[Hashable, ...] = (SMALL, MIDDLE, LARGE, "no shape")
    assert _narrowed(candidates, (), 512) == candidates
    assert _narrowed(candidates, ((4, 4), (4, 2), (32, 4)), 512) == [SMALL, LARGE]
    with pytest.raises(UsageError) as raised:
        _narrowed(candidates, ((5, 5),), 512)
    assert str(raised.value) == ("--tiles names no candidate. There are, as KiB of a block x warps: 4x4, 8x2, 32x4.")
    with pytest.raises(UsageError, match="as KiB of a block x warps: none"):
        _narrowed(("no shape",), ((5, 5),), 512)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--window", "7"], "belong to --op deferred, verify or commit"),
        (["--op", "deferred", "--drafts", "4"], "deferred decode has no drafts"),
        (["--op", "verify", "--window", "3"], "must hold the 4 drafts"),
        (["--op", "commit", "--overlap"], "--overlap belongs to --op decode, deferred and verify"),
    ],
    ids=["decode", "deferred", "verify", "commit"],
)
def test_options_that_do_not_belong_together(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *options]) == 2
    assert sentence in capsys.readouterr().err


def test_tiles_are_blocks_and_warps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--tiles", "8"])
    assert "must be KiB x warps such as 8,16x2,4, got '8'" in capsys.readouterr().err
