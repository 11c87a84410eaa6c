"""Compiled kernels on disk: found again by another process, never trusted blindly."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from la_core import BackendUnavailable, DecodeProblem, UnsupportedByBackend, decode_problem

if sys.platform != "linux":
    pytest.skip("not run: the CuTe DSL is there for Linux alone", allow_module_level=True)

import tvm_ffi

from la_cute import compiled_kernel_cache as cache
from la_cute import prebuilt_kernels, warmup
from la_cute.decode_compile import compile_decode
from la_cute.decode_compile_key import DecodeCompileKey, decode_compile_key
from la_cute.decode_launch import DecodeLaunch
from la_cute.decode_tiles import choose_decode_tiles
from la_cute.kernel_keys import keys_of_problem
from la_cute.window_problems import window_problems

PROBLEM = DecodeProblem.contiguous(B=8, P=8, H=8, K=64, V=64, device="cuda", arch=(9, 0))


def _key(**changes: Any) -> DecodeCompileKey:
    problem = replace(PROBLEM, **changes)
    return decode_compile_key(problem, choose_decode_tiles(problem), aligned=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache on disk, none in memory, and nothing built ahead of time."""
    path = tmp_path / "kernels"
    monkeypatch.setenv(prebuilt_kernels.ENV_PREBUILT, "0")
    monkeypatch.setenv(cache.ENV_CACHE_DIR, str(path))
    monkeypatch.setattr(cache, "_kernels", {})
    return path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[DecodeCompileKey]:
    """The keys that are compiled."""
    keys: list[DecodeCompileKey] = []

    def count(key: DecodeCompileKey, options: str = "") -> Any:
        keys.append(key)
        return compile_decode(key, options)

    monkeypatch.setattr("la_cute.decode_compile.compile_decode", count)
    return keys


def test_a_kernel_is_compiled_once_and_then_found_on_disk(
    folder: Path, compiled: list[DecodeCompileKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cache.compiled_kernel(_key())
    assert isinstance(first, tvm_ffi.Function), "what was kept, not what the compiler returned"
    assert cache.compiled_kernel(_key()) is first
    assert cache.kernel_origins() == {"compiled": 1}
    monkeypatch.setattr(cache, "_kernels", {})
    assert callable(cache.compiled_kernel(_key()))
    assert cache.kernel_origins() == {"disk": 1}
    assert len(compiled) == cache.kernels_made() == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.suffix for path in folder.iterdir()] == [".o"]


def test_another_process_compiles_nothing(folder: Path) -> None:
    cache.compiled_kernel(_key())
    code = (
        "import la_cute.compiled_kernel_cache as cache, la_cute.decode_compile as compiler\n"
        "import la_cute.decode_compile_key as d, la_cute.decode_tiles as t\n"
        "from la_core import DecodeProblem\n"
        "compiler.compile_decode = None\n"
        "problem = DecodeProblem.contiguous(B=8, P=8, H=8, K=64, V=64, device='cuda', arch=(9, 0))\n"
        "key = d.decode_compile_key(problem, t.choose_decode_tiles(problem), aligned=True)\n"
        "print(callable(cache.compiled_kernel(key)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("damage", [b"", b"no object file", None])
def test_a_damaged_entry_is_set_aside_and_made_again(
    folder: Path, compiled: list[DecodeCompileKey], monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    cache.compiled_kernel(_key())
    (path,) = folder.glob("*.o")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if damage is None else damage)
    monkeypatch.setattr(cache, "_kernels", {})
    assert callable(cache.compiled_kernel(_key()))
    assert len(compiled) == 2
    assert len(list(folder.glob("*.damaged"))) == 1
    assert [one.read_bytes() for one in folder.glob("*.o")] == [content]


def test_an_entry_that_cannot_be_loaded_is_set_aside_and_made_again(
    folder: Path, compiled: list[DecodeCompileKey]
) -> None:
    """Its digest is right, its content is no object file."""
    folder.mkdir(mode=0o700)
    content = b"no object file"
    path = folder / f"{cache._entry(_key())}-{hashlib.sha256(content).hexdigest()[:32]}.o"
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="la-cute cannot load"):
        assert callable(cache.compiled_kernel(_key()))
    assert len(compiled) == 1
    assert len(list(folder.glob("*.damaged"))) == 1


def test_sources_versions_and_keys_have_entries_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {cache._entry(_key()), cache._entry(_key(arch=(10, 0))), cache._entry(_key(overlap=True))}
    monkeypatch.setattr(cache, "sources", lambda: "other sources")
    entries.add(cache._entry(_key()))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.0.0")
    entries.add(cache._entry(_key()))
    monkeypatch.setattr(cache, "_processor", lambda: "another")
    entries.add(cache._entry(_key()))
    assert len(entries) == 6


def test_what_was_compiled_of_sources_that_are_gone_is_not_kept(
    folder: Path, compiled: list[DecodeCompileKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process runs what it has imported; a file edited since must not get that under its name."""
    monkeypatch.setattr(prebuilt_kernels, "source_hash", lambda package: "edited since")
    assert prebuilt_kernels.sources() != "edited since"
    assert callable(cache.compiled_kernel(_key()))
    assert len(compiled) == 1
    assert list(folder.glob("*.o")) == []


def test_a_folder_that_others_can_write_to_is_not_used(folder: Path, compiled: list[DecodeCompileKey]) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write to it"):
        assert callable(cache.compiled_kernel(_key()))
    assert list(folder.iterdir()) == []
    assert len(compiled) == 1


def test_an_unusable_folder_costs_a_warning_and_no_call(folder: Path, compiled: list[DecodeCompileKey]) -> None:
    folder.write_text("a file")
    with pytest.warns(RuntimeWarning, match="cannot use"):
        assert callable(cache.compiled_kernel(_key()))


def test_an_empty_name_means_no_cache_on_disk(
    folder: Path, compiled: list[DecodeCompileKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.ENV_CACHE_DIR, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    assert isinstance(cache.compiled_kernel(_key()), tvm_ffi.Function)
    assert not folder.exists()


def test_warmup_makes_ready_what_every_batch_needs(folder: Path, compiled: list[DecodeCompileKey]) -> None:
    assert warmup(replace(PROBLEM, B=600)) == cache.kernels_made() == len(compiled)
    for rows in (1, 2, 63, 64, 65, 500, 600):
        for key in keys_of_problem(replace(PROBLEM, B=rows)):
            cache.compiled_kernel(key)
    assert cache.kernels_made() == len(compiled)


def test_warmup_makes_ready_what_windows_need(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(cache, "_make", lambda key: made.append(key) or cache.Kernel(print, "compiled"))
    assert warmup(replace(PROBLEM, B=64), places=16, layers=40) == len(made) == len(set(made))
    assert {key.op for key in made} == {"decode", "decode_window", "verify", "commit", "advance"}
    for window in window_problems(replace(PROBLEM, B=33), 16, (None, torch.int64)):
        assert set(keys_of_problem(window)) <= set(made)
        if window.op == "commit":
            assert set(keys_of_problem(replace(window, L=40))) <= set(made)


def test_a_window_kernel_is_kept_on_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (key,) = keys_of_problem(window_problems(PROBLEM, 8, (None,))[-1])
    assert isinstance(cache.compiled_kernel(key), tvm_ffi.Function)
    monkeypatch.setattr(cache, "_kernels", {})
    assert callable(cache.compiled_kernel(key))
    assert cache.kernel_origins() == {"disk": 1}


def test_warmup_of_what_is_not_run_says_why() -> None:
    with pytest.raises(UnsupportedByBackend, match=r"warmup: backend 'cute' runs K and V .* got K = 96"):
        warmup(replace(PROBLEM, K=96))


def test_warmup_follows_the_problem(folder: Path, compiled: list[DecodeCompileKey]) -> None:
    """Calls at addresses that are not aligned do not overlap."""
    warmup(replace(PROBLEM, B=1, overlap=True))
    assert {(key.aligned, key.overlap) for key in compiled} == {(True, True), (False, False)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="not run: asks what happens without a GPU")
def test_warmup_without_a_gpu_asks_for_an_architecture() -> None:
    with pytest.raises(BackendUnavailable, match="no GPU is here, and the problem names no arch"):
        warmup(replace(PROBLEM, arch=None))


def test_launches_of_a_model_compile_for_tiles_and_alignments_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over batches, pools, heads and strides. What is compiled is counted; nothing runs."""
    made: list[DecodeCompileKey] = []
    calls: list[tuple[Any, ...]] = []

    def make(key: DecodeCompileKey) -> cache.Kernel:
        made.append(key)
        return cache.Kernel(lambda *arguments: calls.append(arguments), "compiled")

    monkeypatch.setattr(cache, "_make", make)
    tiles = set()
    for rows, slots, heads, gap in itertools.product((1, 2, 7, 64, 300), (8, 500), (1, 8), (0, 1, 64)):
        q = torch.empty(rows, heads, 64 + gap, dtype=torch.bfloat16)[..., :64]
        s = torch.empty(slots * heads, 64, 64)
        offsets, decays = torch.empty(rows, dtype=torch.int32), torch.empty(heads)
        problem = replace(decode_problem(q, q, q, s, offsets, decays, q), device=PROBLEM.device, arch=(9, 0))
        tiles.add(choose_decode_tiles(problem))
        DecodeLaunch(problem).decode(q, q, q, s, offsets, decays, 0.5, q)
        assert calls[-1][-1] == slots
    assert len(made) == len(set(made)) <= len(tiles) + 1
    assert [key.aligned for key in made].count(False) == 1


@pytest.mark.parametrize(
    ("strides", "shift", "aligned"),
    [((512, 64), 0, True), ((513, 64), 0, False), ((512, 66), 0, False), ((512, 64), 2, False), ((512, 64), 4, True)],
)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_inputs_in_pieces_of_four_take_the_aligned_kernel(
    monkeypatch: pytest.MonkeyPatch, name: str, strides: tuple[int, int], shift: int, aligned: bool
) -> None:
    monkeypatch.setattr(cache, "_kernels", {})
    monkeypatch.setattr(cache, "_make", lambda key: cache.Kernel(lambda *arguments: None, "compiled"))
    inputs = {one: torch.empty(2, 8, 64, dtype=torch.bfloat16) for one in "qkv"}
    inputs[name] = torch.empty(4096, dtype=torch.bfloat16).as_strided((2, 8, 64), (*strides, 1), shift)
    s, offsets, decays = torch.empty(8 * 8, 64, 64), torch.empty(2, dtype=torch.int32), torch.empty(8)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    out = torch.empty(2, 8, 64, dtype=torch.bfloat16)
    problem = replace(decode_problem(q, k, v, s, offsets, decays, out), device=PROBLEM.device, arch=(9, 0))
    DecodeLaunch(problem).decode(q, k, v, s, offsets, decays, 0.5, out)
    assert [key.aligned for key in cache._kernels] == [aligned]
