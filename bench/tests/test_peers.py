"""Peers are found by path without their packages, called their own way, and judged like everything else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import la_bench.grid
from la_bench.accuracy import Gate, Verdict, allowed_truth
from la_bench.comparison import outcome_of
from la_bench.errors import UsageError
from la_bench.grid import GridPoint
from la_bench.peers import PEERS, load_peer, select_peers
from la_bench.peers.peer import Peer, PeerRefusal, PeerUnavailable
from la_bench.run_grid import GridSubject, GridTensors
from la_bench.tensors import DecodeCall
from la_bench.variants import BackendVariant, PeerVariant, peer_variants
from la_bench.workloads import Workload, make_workload
from la_core import DecodeProblem
from la_core.conformance.compare import out_errors, state_errors

CPU = torch.device("cpu")

STEP = """
def step(q, k, v, states, decays):  # states [B, H, V, K]
    new = states.float() * torch.exp(-decays)[:, None, None] + v.float()[..., None] * k.float()[..., None, :]
    return new, (new @ q.float()[..., None])[..., 0]
"""

SGLANG = f"""
from dataclasses import dataclass
import torch
{STEP}
@dataclass
class SegLaMeta:
    batch_size: int
    max_q_length: int
    q_offsets: torch.Tensor
    s_offsets: torch.Tensor
    q_lengths: torch.Tensor
    s_scales: torch.Tensor

def seg_la_fwd(q, k, v, s, decay_scales, meta, softmax_scale=None):
    live = meta.s_offsets >= 0
    slots = meta.s_offsets[live].long()
    new, o = step(q[live], k[live], v[live], s[slots].transpose(2, 3), decay_scales)
    s[slots] = new.transpose(2, 3).to(s.dtype)
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    out[live] = (o * softmax_scale).to(q.dtype)
    return out
"""

VLLM = f"""
import torch
from einops import rearrange
from vllm.triton_utils import tl, triton
{STEP}
def linear_decode_forward_triton(q, k, v, kv_caches, slope_rate, slot_idx, BLOCK_SIZE=32):
    live = slot_idx >= 0
    slots = slot_idx[live].long()
    new, o = step(*(t[live].squeeze(2) for t in (q, k, v)), kv_caches[slots].transpose(2, 3), slope_rate)
    kv_caches[slots] = new.transpose(2, 3).to(kv_caches.dtype)
    output = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    output[live] = o.to(q.dtype).unsqueeze(2)
    return rearrange(output, "b h n d -> b n (h d)").squeeze(1).contiguous()
"""

FLA = f"""
import torch
from fla.utils import guard
{STEP}
@guard
def fused_recurrent(q, k, v, g_gamma, scale, initial_state, output_final_state, state_v_first=False):
    states = initial_state if state_v_first else initial_state.transpose(2, 3)
    new, o = step(q[:, 0], k[:, 0], v[:, 0], states, -g_gamma)
    return (o * scale).to(q.dtype).unsqueeze(1), new if state_v_first else new.transpose(2, 3).contiguous()
"""

CULA = f"""
import torch
from cula.utils import USE_FAST_MATH
assert USE_FAST_MATH
{STEP}
cleared = []

class _get_compiled_kernel:
    @staticmethod
    def cache_clear():
        cleared.append(1)

def linear_attention_decode(q, k, v, s, out, softmax_scale, a, b, c, d, e, s_offsets, decay_scales, K, KS, VS):
    h0_indices = s_offsets.long()
    pool = s.view(-1, q.shape[1], K, K)
    new, o = step(q, k, v, pool[h0_indices[:]], decay_scales)
    pool[h0_indices] = new
    out.copy_(o * softmax_scale)
"""

CULA_WITHOUT_POOL = CULA.replace("h0_indices[:]", "torch.arange(len(q))").replace(
    "pool[h0_indices]", "pool[torch.arange(len(q))]"
)


@pytest.fixture
def fakes(tmp_path: Path) -> dict[str, Path]:
    """Files that have the peers' names and signatures, in plain torch."""
    files = {"sglang": "seg_la.py", "vllm": "lightning_attn.py", "cula": "la_decode.py"}
    sources = {"sglang": SGLANG, "vllm": VLLM, "cula": CULA}
    for name, file in files.items():
        (tmp_path / file).write_text(sources[name])
    package = tmp_path / "fla"
    for folder in (package, package / "ops", package / "ops" / "common"):
        folder.mkdir()
        (folder / "__init__.py").write_text("raise AssertionError('the package must not be imported')\n")
    (package / "utils.py").write_text("from fla import __version__\ndef guard(function):\n    return function\n")
    (package / "ops" / "common" / "fused_recurrent.py").write_text(FLA)
    return {**{name: tmp_path / file for name, file in files.items()}, "fla": tmp_path}


@pytest.fixture(autouse=True)
def forget() -> None:
    for name in [name for name in sys.modules if name == "fla" or name.startswith("fla.")]:
        del sys.modules[name]


def on_grid(variant: PeerVariant, layout: str = "vk", state_dtype: torch.dtype = torch.float32) -> Verdict:
    point = GridPoint(2, 3, state_dtype, layout, "cpu")  # type: ignore[arg-type]
    subject = GridSubject(point, GridTensors([point], CPU, seed=0))
    subject.start_judging()
    return subject.judge(variant)


@pytest.fixture
def small_lap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(la_bench.grid.LAP_BYTES, "cpu", 1 << 20)


@pytest.fixture
def workload() -> Workload:
    whole = make_workload("ling-2.6-flash-tp4/light", "cpu", seed=3)
    padded = next(batch for batch in whole.batches if -1 in batch)
    return replace(whole, batches=(padded,))


@pytest.mark.usefixtures("small_lap")
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("name", list(PEERS))
def test_every_peer_passes_the_gate_of_a_grid(name: str, layout: str, fakes: dict[str, Path]) -> None:
    variant = PeerVariant(name, fakes.get(name))
    assert isinstance(variant.peer, Peer)
    verdict = on_grid(variant, layout)
    assert verdict.faults == ()
    assert verdict.state_error < 1e-6
    assert variant.facts.kind == "peer"
    assert variant.facts.note


@pytest.mark.parametrize("name", ["sglang", "vllm", "fla"])
def test_padding_is_forgiven_where_a_peer_leaves_it(name: str, fakes: dict[str, Path], workload: Workload) -> None:
    verdict = Gate(workload, CPU, seed=0).judge(PeerVariant(name, fakes[name]))
    assert verdict.faults == ()


def test_a_wrong_peer_is_found(fakes: dict[str, Path], workload: Workload) -> None:
    fakes["sglang"].write_text(SGLANG.replace("torch.exp(-decays)", "torch.exp(decays)"))
    verdict = Gate(workload, CPU, seed=0).judge(PeerVariant("sglang", fakes["sglang"]))
    assert any("state of" in fault for fault in verdict.faults)


@pytest.mark.usefixtures("small_lap")
def test_a_peer_that_writes_another_slot_is_found(fakes: dict[str, Path]) -> None:
    more = "pool[h0_indices] = new\n    pool[(h0_indices + 1) % len(pool)] *= 2"
    fakes["cula"].write_text(CULA.replace("pool[h0_indices] = new", more))
    faults = on_grid(PeerVariant("cula", fakes["cula"])).faults
    assert any("slots outside of the named ones changed, the first is" in fault for fault in faults)


@pytest.mark.usefixtures("small_lap")
def test_cula_without_slots_gets_neighbouring_states(fakes: dict[str, Path]) -> None:
    fakes["cula"].write_text(CULA_WITHOUT_POOL)
    variant = PeerVariant("cula", fakes["cula"])
    assert "fast math (its own default)" in str(variant.facts.note)
    assert isinstance(variant.peer, Peer)
    assert not variant.peer.pooled
    assert "ignores s_offsets" in str(variant.facts.note)
    assert on_grid(variant).faults == ()


def test_cula_forgets_code_compiled_for_other_shapes(fakes: dict[str, Path]) -> None:
    peer = PeerVariant("cula", fakes["cula"]).peer
    assert isinstance(peer, Peer)
    cleared = sys.modules["la_bench_peer_cula"].cleared
    peer.bind(make_call(slots=4))
    peer.bind(make_call(slots=4))
    assert cleared == []
    peer.bind(make_call(slots=5))
    assert cleared == [1]


def make_call(slots: int) -> DecodeCall:
    q = torch.randn(2, 2, 128).bfloat16()
    pool = torch.zeros(slots * 2, 128, 128)
    return DecodeCall(q, q, q, pool, torch.tensor([1, 0]).int(), torch.ones(2), torch.empty_like(q))


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
def test_a_module_is_found_below_its_package(folder: bool, tmp_path: Path) -> None:
    place = tmp_path / "sglang" / "kernels" / "ops" / "attention" / "linear"
    place.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("raise AssertionError('the package must not be imported')\n")
    (place / "seg_la.py").write_text(SGLANG)
    peer = load_peer("sglang", tmp_path if folder else place / "seg_la.py")
    assert isinstance(peer, Peer)
    assert peer.file == place / "seg_la.py"
    assert "sglang" not in sys.modules


def test_stand_ins_are_gone_after_loading(fakes: dict[str, Path]) -> None:
    before = {name: sys.modules.get(name) for name in ("cula", "cula.utils", "vllm", "vllm.triton_utils", "einops")}
    load_peer("cula", fakes["cula"])
    load_peer("vllm", fakes["vllm"])
    assert {name: sys.modules.get(name) for name in before} == before


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import no_such_module\n", "seg_la.py cannot be imported: ModuleNotFoundError: No module named"),
        ("raise RuntimeError('no driver')\n", "seg_la.py cannot be imported: RuntimeError: no driver"),
        ("import sys\nsys.exit('no GPU, no kernel')\n", "seg_la.py cannot be imported: SystemExit: no GPU, no kernel"),
        ("seg_la_fwd = print\n", "seg_la.py has no SegLaMeta: another version, or another file"),
    ],
    ids=["missing", "raises", "exits", "other"],
)
def test_a_peer_that_cannot_be_loaded_says_why(source: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "seg_la.py").write_text(source)
    reason = load_peer("sglang", tmp_path / "seg_la.py")
    assert isinstance(reason, PeerUnavailable)
    assert sentence in str(reason)
    assert outcome_of(reason).status == "unavailable"
    variant = PeerVariant("sglang", tmp_path / "seg_la.py")
    with pytest.raises(PeerUnavailable, match=r"cannot be imported|has no"):
        variant.check(DecodeProblem.contiguous(B=1, P=2, H=1, K=128, V=128, device="cuda"), padded=False)


def test_a_package_of_a_peer_that_exits_says_why(fakes: dict[str, Path]) -> None:
    (fakes["fla"] / "fla" / "utils.py").write_text("raise SystemExit(3)\n")
    assert "cannot be imported: SystemExit: 3" in str(load_peer("fla", fakes["fla"]))
    assert "fla" not in sys.modules


def test_a_peer_that_is_not_installed_says_how_to_pass_it(tmp_path: Path) -> None:
    assert "Pass --peer cula=PATH, a la_decode.py or the folder of cula" in str(load_peer("cula", None))
    assert "holds none of fla/ops/common/fused_recurrent.py" in str(load_peer("fla", tmp_path))


def test_a_path_that_was_given_must_lead_to_a_peer(tmp_path: Path) -> None:
    (missing,) = peer_variants(["cula"], {})
    assert isinstance(missing, PeerVariant)
    assert isinstance(missing.peer, PeerUnavailable)
    with pytest.raises(UsageError, match=r"--peer cula=.*: .* holds none of cula/ops/la_decode.py"):
        peer_variants(["cula"], {"cula": tmp_path})


def refusals(name: str, path: Path | None) -> Callable[..., str | None]:
    variant = PeerVariant(name, path)

    def refusal(padded: bool = False, **facts: object) -> str | None:
        sizes = {"B": 2, "P": 4, "H": 2, "K": 128, "V": 128, "device": "cuda", **facts}
        try:
            variant.check(DecodeProblem.contiguous(**sizes), padded=padded)  # type: ignore[arg-type]
        except PeerRefusal as reason:
            return str(reason)
        return None

    return refusal


def test_refusals(fakes: dict[str, Path]) -> None:
    cula, fla, sglang = (refusals(name, fakes[name]) for name in ("cula", "fla", "sglang"))
    assert cula() is None
    assert outcome_of(PeerRefusal("because")).status == "refused"
    assert "cula has no padding rows" in str(cula(padded=True))
    assert sglang(padded=True) is None
    assert "does not keep states in bfloat16" in str(cula(state_dtype=torch.bfloat16))
    assert "runs CUDA tensors only" in str(sglang(device="cpu"))
    assert "needs as many of them as rows" in str(fla(B=5))
    assert "K = V = 128 only" in str(sglang(K=64))
    assert "as many heads of q and k" in str(sglang(G=1))
    assert refusals("torch-naive", None)(device="cpu") is None


def test_rounded_products_widen_the_allowance_and_no_more(workload: Workload) -> None:
    variant = SimpleNamespace(rounds_products=True)
    gate = Gate(workload, CPU, seed=0)
    peer = PeerVariant("torch-naive", None)
    peer.peer = variant  # type: ignore[assignment]
    truth = allowed_truth(peer, gate.truth, torch.bfloat16, 128)
    decays = torch.tensor(gate.case.decays)
    assert allowed_truth(BackendVariant("ref"), gate.truth, torch.bfloat16, 128) is gate.truth
    off = gate.truth.out * 1.02
    assert list(out_errors(gate.truth.out.float(), truth, decays, 128)) == []
    assert list(out_errors(off.float(), truth, decays, 128))
    row = min(gate.truth.states)
    s, one = gate.truth.states[row].float(), torch.zeros(1, dtype=torch.int32)
    only = replace(truth, states={0: truth.states[row]}, state_magnitude={0: truth.state_magnitude[row]})
    assert list(state_errors(s * (1 + 2**-10), one, only, decays)) == []
    assert list(state_errors(s * 1.02, one, only, decays))


def test_selection(tmp_path: Path) -> None:
    assert select_peers((), {}, by_default=False) == ()
    assert select_peers((), {}, by_default=True) == tuple(PEERS)
    assert select_peers(("none",), {}, by_default=True) == ()
    assert select_peers(("fla", "cula"), {}, by_default=True) == ("cula", "fla")
    assert select_peers((), {"vllm": tmp_path}, by_default=False) == ("vllm",)
    with pytest.raises(UsageError, match=r"no peer is called 'nonsense'\. Known: cula"):
        select_peers(("nonsense",), {}, by_default=False)
    with pytest.raises(UsageError, match="there is no such file"):
        select_peers((), {"vllm": tmp_path / "none"}, by_default=False)
