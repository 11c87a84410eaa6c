"""What is timed beside the backends: names, overlap, and the in-place floor."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

import la_bench.grid
import la_bench.timing
from la_bench.accuracy import floor_faults
from la_bench.comparison import Bench, Comparison
from la_bench.environment import read_environment
from la_bench.grid import GRID_QUICK, GridPoint
from la_bench.roofline import FLOOR_FACTOR
from la_bench.rows import Row
from la_bench.run_grid import GridSubject, GridTensors
from la_bench.tensors import DecodeCall
from la_bench.timing import CopyProbe, Lap, Timing
from la_bench.variants import FLOOR, BackendVariant, PeerVariant, backend_variants, floor_variants
from la_bench.write_report import render_report
from la_core import DecodeProblem
from la_core.backends.choose_backend import current_defaults

triton = pytest.importorskip("triton")


def test_overlap_where_device_and_backend_can() -> None:
    names = ("ref", "triton", "never-heard-of")
    assert [v.name for v in backend_variants(names, None)] == list(names)
    assert [v.name for v in backend_variants(names, (8, 0))] == list(names)
    with_overlap = [v.name for v in backend_variants(names, (9, 0))]
    assert with_overlap == ["ref", "triton", "triton+overlap", "never-heard-of"]
    assert [v.name for v in floor_variants((9, 0))] == [FLOOR, f"{FLOOR}+overlap"]
    assert [v.name for v in floor_variants((8, 0))] == [FLOOR]
    assert floor_variants(None) == []


def test_overlap_holds_inside_and_nowhere_else() -> None:
    plain, overlapping = backend_variants(("triton",), (9, 0))
    for variant, expected in ((plain, False), (overlapping, True)):
        with variant.inside():
            assert current_defaults.get().overlap == expected
        assert not current_defaults.get().overlap
        assert variant.facts.overlap == expected


def test_a_floor_that_leaves_states_out_is_found() -> None:
    before = torch.randn(6, 16, 16)
    after = before * FLOOR_FACTOR
    assert floor_faults(before, after)[0] == ()
    after[4, 3] = before[4, 3]
    assert "states must be multiplied by 0.999" in floor_faults(before, after)[0][0]


def test_the_floor_says_what_it_cannot_do() -> None:
    from la_bench.inplace_floor import refusal

    def of(**facts: int) -> str | None:
        return refusal(DecodeProblem.contiguous(**{"B": 2, "P": 4, "H": 2, "K": 128, "V": 64, **facts}))

    assert of() is None
    assert "power of two" in str(of(K=96))
    assert "65535 rows" in str(of(B=70000))


FLOOR_PROGRAM = """
import torch
from la_bench.accuracy import Gate
from la_bench.inplace_floor import TILES, bind_floor
from la_bench.roofline import FLOOR_FACTOR
from la_bench.variants import FloorVariant
from la_bench.workloads import make_workload
from dataclasses import replace

workload = make_workload("ling-2.6-flash-tp4/light", "cpu", 3)
batch = next(batch for batch in workload.batches if -1 in batch)
gate = Gate(replace(workload, batches=(batch,)), torch.device("cpu"), 0)
assert gate.judge(FloorVariant()).faults == ()
for layout in ("vk", "kv"):
    for tiles in TILES:
        s = torch.randn(3 * 2, 16, 32) if layout == "vk" else torch.randn(3 * 2, 32, 16).transpose(1, 2)
        before = s.clone()
        bind_floor(s, torch.tensor([2, -1, 0, 7]).int(), 2, tiles, False)()
        assert torch.equal(s[2:4], before[2:4])
        assert torch.allclose(s[[0, 1, 4, 5]], before[[0, 1, 4, 5]] * FLOOR_FACTOR), (layout, tiles)
"""


def test_the_floor_multiplies_the_named_states_and_no_others() -> None:
    environment = {"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", FLOOR_PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("pointer", ["*fp32", "*bf16"])
def test_the_floor_moves_states_in_pieces_of_16_bytes(pointer: str, overlap: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from la_bench.inplace_floor import floor_kernel

    constants = {
        "LINES": 128,
        "LINE": 128,
        "ROWS": 8,
        "LOAD_EVICTION": "evict_last",
        "STORE_EVICTION": "",
        "OVERLAP": overlap,
    }
    types = {"p_s": pointer, "p_offsets": "*i32", "factor": "fp32", "P": "i32", "H": "i32", "s_row": "i32"}
    signature = {name: types.get(name, "constexpr") for name in floor_kernel.arg_names}
    positions = {(floor_kernel.arg_names.index(name),): value for name, value in constants.items()}
    attributes = {(0,): [["tt.divisibility", 16]]}
    kernel = triton.compile(
        ASTSource(fn=floor_kernel, signature=signature, constexprs=positions, attrs=attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False, "launch_pdl": overlap},
    )
    ptx = kernel.asm["ptx"]
    pieces = 8 * 128 * {"*fp32": 4, "*bf16": 2}[pointer] // 16 // 32
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) == pieces
    assert len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) == pieces
    assert ("griddepcontrol.wait" in ptx) == overlap


class HalfAsFast:
    """Times nothing: each lap takes half of what the one before took, from 8 us on."""

    def time(self, laps: Mapping[str, Lap], *rest: object) -> Timing:
        taken = {name: [8e-6 / 2**n] * 3 for n, name in enumerate(laps)}
        return Timing(taken, copy_seconds=[1e-3])

    def host(self, laps: Mapping[str, Lap]) -> dict[str, list[float]]:
        return {name: [5e-6, 6e-6, 7e-6] for name in laps}


class TunedRef(BackendVariant):
    """la-ref, which as far as anybody can tell chose tiles."""

    def prepare(self, calls: Sequence[DecodeCall], timer: object) -> None:
        self.best = f"best of {len(calls)}"

    def tiles(self, call: DecodeCall) -> str | None:
        return self.best


class Floor(BackendVariant):
    """Multiplies the states in torch."""

    def __init__(self, *, overlap: bool) -> None:
        super().__init__("ref")
        self.facts = replace(self.facts, name=f"floor{overlap}", kind="floor", overlap=overlap)

    def run(self, call: DecodeCall) -> torch.Tensor:
        heads = call.decay_scales.shape[0]
        call.s.view(-1, heads, 128, 128)[call.s_offsets.long()] *= FLOOR_FACTOR
        return call.out


def test_results_of_a_gpu_hold_floors_peers_tiles_and_host_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(la_bench.grid.LAP_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(la_bench.timing.COPY_BYTES, "cpu", 8 << 20)
    cpu = torch.device("cpu")
    overlapping = BackendVariant("ref", overlap=True)
    floors = [Floor(overlap=False), Floor(overlap=True)]
    variants = [*floors, TunedRef("ref"), PeerVariant("torch-naive", None), overlapping, PeerVariant("fla", None)]
    environment = read_environment(cpu, seed=0, quick=True)
    bench = Bench(variants, cpu, environment, CopyProbe(cpu), GRID_QUICK, HalfAsFast())  # type: ignore[arg-type]
    point = GridPoint(2, 3, device_type="cpu")
    rows = Comparison(GridSubject(point, GridTensors([point], cpu, 0)), bench).rows(lambda *_: None, lambda _: None)
    assert [row.status for row in rows] == ["ok"] * 5 + ["unavailable"]
    floor, _, ref, naive, overlap = (row.result for row in rows[:5])
    assert floor is not None
    assert (floor.time_us, floor.out_error, floor.share_of_floor) == (pytest.approx(8.0), None, 1.0)
    assert ref is not None
    assert (ref.tiles, ref.host_us, ref.calls_per_sample) == ("best of 4", pytest.approx(6.0), point.calls)
    # 8, 4, 2, 1 and 0.5 us: the floor of plain calls is the first, of overlapping ones the second.
    assert (ref.share_of_floor, ref.speedup_vs_peer, ref.speedup_vs_ref) == (4.0, 0.5, 1.0)
    assert naive is not None
    assert (naive.share_of_floor, naive.speedup_vs_peer) == (8.0, 1.0)
    assert overlap is not None
    assert (overlap.share_of_floor, overlap.speedup_vs_peer) == (8.0, 2.0)


def test_the_report_of_workloads_with_floors_and_peers(make_row: Callable[..., Row]) -> None:
    rows = [
        make_row(backend="ref"),
        make_row(backend="triton", time_us=100.0, against=(1.5, 0.95), host_us=8.0),
        make_row(backend="in-place floor", time_us=95.0, kind="floor"),
        make_row(backend="sglang", time_us=150.0, kind="peer", against=(1.0, 0.63), host_us=41.0),
        make_row(backend="cula", status="refused", reason="cula has no padding rows", kind="peer"),
    ]
    text = render_report(rows)["report.md"]
    summary = text.split("## Plots")[0]
    assert "Backends that were timed: ref, triton. Of 1 workload, triton is the fastest on 1." in summary
    assert "triton is 1.50x as fast as the fastest peer (sglang) and at 95 % of the in-place floor." in summary
    assert "Peers that were timed: sglang; not timed: cula." in summary
    assert "| speed-up vs ref | share of floor | vs fastest peer |" in summary
    assert "| ring-mini-linear-2.0/medium | triton | 100 us | 3000 % | 15.00x | 95 % | 1.50x |" in summary
    assert "| share of floor | vs ref | vs fastest peer | host time |" in text
    assert "| in-place floor | 95.0 us |" in text
    assert "- **sglang**: Differs." in text
    alone = render_report([make_row(backend="ref")])["report.md"]
    assert "| share of floor |" not in alone
