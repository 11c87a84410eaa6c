"""Discovery, choice and their sentences, with made-up distributions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import la_core
from la_core import BackendUnavailable, DecodeProblem, SpecViolation, UnsupportedByBackend
from la_core.backends.discover_backends import installed_names, load_backend
from la_core.conformance.decode_error_cases import (
    DECODE_ERROR_CASES,
    DECODE_OFFSET_ERROR_CASES,
    DecodeErrorCase,
    legal_arguments,
)

Install = Callable[..., None]
GOOD = (Path(__file__).parent / "made_backend.py.txt").read_text(encoding="utf-8")
PROBLEM = DecodeProblem.contiguous(B=2, P=3, H=2, K=64, V=64)


def _call(**options: Any) -> torch.Tensor:
    return la_core.decode(
        torch.ones(2, 2, 64),
        torch.ones(2, 2, 64),
        torch.ones(2, 2, 64),
        torch.zeros(6, 64, 64),
        torch.tensor([1, 0]),
        torch.ones(2),
        **options,
    )


def test_an_explicit_name_is_obeyed(install: Install) -> None:
    install("made")
    assert bool((_call(backend="made") == 1).all())
    problem, scale = load_backend("made").calls[-1]  # type: ignore[attr-defined]
    assert (problem.B, problem.P, problem.H, problem.K, problem.V) == (2, 3, 2, 64, 64)
    assert scale == 0.125
    assert not bool((_call(backend="ref") == 1).all())


def test_auto_does_not_choose_a_name_it_does_not_know(install: Install) -> None:
    install("made")
    assert not bool((_call() == 1).all())
    choice = la_core.explain_choice(PROBLEM)
    assert choice.backend is load_backend("ref")
    assert "made: ok, but chosen only by name" in str(choice)


def test_use_backend_sets_the_default_and_restores_it(install: Install) -> None:
    install("made")
    with la_core.use_backend("made"):
        assert bool((_call() == 1).all())
        with la_core.use_backend("auto"):
            assert not bool((_call() == 1).all())
        assert bool((_call() == 1).all())
        assert not bool((_call(backend="ref") == 1).all())
    assert not bool((_call() == 1).all())


def test_a_refusal_is_raised_with_its_reason(install: Install) -> None:
    install("made")
    wide = [torch.ones(2, 2, 128), torch.ones(2, 2, 128), torch.ones(2, 2, 64), torch.zeros(6, 64, 128)]
    with pytest.raises(UnsupportedByBackend) as raised:
        la_core.decode(*wide, torch.tensor([1, 0]), torch.ones(2), backend="made")
    assert str(raised.value) == (
        "decode: backend 'made' runs K = 64, got K = 128. The call is legal (B=2 P=3 H=2 G=2 K=128 V=64 "
        "io/state/out fp32/fp32/fp32 layout vk on cpu): choose another backend, or 'auto'."
    )


@pytest.mark.parametrize("name", ["cute", "triton", "ref"])
def test_an_absent_backend_of_ours_comes_with_its_pip_line(
    name: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("la_core.backends.discover_backends._entry_points", {})
    monkeypatch.setattr("la_core.backends.discover_backends._loaded", {})
    with pytest.raises(BackendUnavailable) as raised:
        load_backend(name)
    assert str(raised.value) == (
        f"backend {name!r} is not installed (installed: none). Run: python3 -m pip install la-{name}"
    )


def test_an_unknown_name_lists_what_is_installed(install: Install) -> None:
    install("made")
    with pytest.raises(BackendUnavailable) as raised:
        _call(backend="cuet")
    assert str(raised.value) == (
        f"decode: backend 'cuet' is not installed (installed: {', '.join(installed_names())}). "
        "Check the name, or install the distribution that brings it."
    )


def test_two_backends_of_one_name_are_an_error(install: Install) -> None:
    install("made")
    install("made")
    with pytest.raises(BackendUnavailable) as raised:
        _call(backend="made")
    message = str(raised.value)
    assert message.startswith("decode: backend 'made' is claimed by made-dist")
    assert "made-dist1 1.1" in message
    assert "made-dist2 1.2" in message
    assert "python3 -m pip uninstall made-dist" in message


def test_a_failing_import_says_what_failed(install: Install) -> None:
    install("made", "import a_compiler_that_is_not_there\n")
    with pytest.raises(BackendUnavailable) as raised:
        _call(backend="made")
    assert str(raised.value) == (
        "decode: backend 'made' of made-dist1 1.1 is installed but failed to import: ModuleNotFoundError: "
        "No module named 'a_compiler_that_is_not_there'. Reinstall it: "
        "python3 -m pip install --force-reinstall made-dist1"
    )
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_another_spec_revision_is_refused(install: Install) -> None:
    install("made", "class B:\n    name = 'made'\n    spec_revision = 99\nbackend = B()\n")
    with pytest.raises(BackendUnavailable) as raised:
        _call(backend="made")
    assert str(raised.value) == (
        "decode: backend 'made' of made-dist1 1.1 implements spec revision 99, this la-core is revision 1. "
        "Install matching versions: python3 -m pip install --upgrade la-core made-dist1"
    )


def test_what_is_no_backend_says_what_it_lacks(install: Install) -> None:
    install("made", "backend = object()\n")
    with pytest.raises(BackendUnavailable, match=r"is not a backend: .* lacks name, spec_revision, capabilities, ref"):
        _call(backend="made")


def test_a_name_that_differs_from_the_entry_point_is_refused(install: Install) -> None:
    from_conftest = "class B:\n    name = 'other'\n    spec_revision = 1\n    capabilities = None\n"
    install("made", from_conftest + "    def refusal(self, p): ...\n    def decode(self): ...\nbackend = B()\n")
    with pytest.raises(BackendUnavailable, match=r"'made' of made-dist1 1\.1 calls itself 'other'"):
        _call(backend="made")


def test_listing_shows_broken_backends_with_their_reason(install: Install) -> None:
    install("made", "raise RuntimeError('no driver')\n")
    listed = {info.name: info for info in la_core.list_backends()}
    assert "no driver" in (listed["made"].error or "")
    assert listed["made"].distribution == "made-dist1 1.1"
    assert listed["ref"].error is None
    assert listed["ref"].spec_revision == la_core.SPEC_REVISION


def test_a_broken_preferred_backend_is_loud_and_the_next_one_runs(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("preferred", "raise RuntimeError('no driver')\n")
    monkeypatch.setattr("la_core.backends.choose_backend.PREFERENCE", {"cpu": ("preferred", "triton", "ref")})
    with pytest.warns(RuntimeWarning, match="decode runs on 'ref': unusable, backend 'preferred' .* no driver"):
        _call()


def test_no_usable_backend_gives_every_reason(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("la_core.backends.discover_backends._entry_points", {})
    monkeypatch.setattr("la_core.backends.discover_backends._loaded", {})
    with pytest.raises(BackendUnavailable) as raised:
        _call()
    assert str(raised.value) == (
        "decode: no usable backend for cpu tensors. ref: not installed; chosen: none (asked for 'auto'). "
        "Run: python3 -m pip install la-ref"
    )


def test_no_backend_that_runs_the_call_gives_every_reason(install: Install) -> None:
    meta = [t.to("meta") for t in (torch.ones(2, 2, 64),) * 3]
    with pytest.raises(UnsupportedByBackend, match="ref: refused, runs cpu and cuda tensors, got meta"):
        la_core.decode(*meta, torch.zeros(6, 64, 64, device="meta"), torch.tensor([1, 0], device="meta"),
                       torch.ones(2, device="meta"))  # fmt: skip


@pytest.mark.parametrize(("name", "came"), [(None, "a NoneType"), (3, "a int"), ("", "''")])
def test_a_backend_is_named_by_a_string(name: object, came: str) -> None:
    with pytest.raises(SpecViolation, match=f"backend must be a backend's name or 'auto'; got {came}"):
        _call(backend=name)


def test_backends_are_imported_only_when_picked(install: Install) -> None:
    install("made", "raise RuntimeError('imported')\n")
    _call()
    assert "made" in installed_names()


REFUSING = GOOD.replace("k_sizes=(64,)", "k_sizes=()")


@pytest.mark.parametrize("case", [*DECODE_ERROR_CASES, *DECODE_OFFSET_ERROR_CASES], ids=lambda case: case.id)
def test_a_wrong_call_is_wrong_whatever_the_backend_thinks_of_it(install: Install, case: DecodeErrorCase) -> None:
    """The same sentence from a backend that refuses everything, and for one that is not installed."""
    install("refusing", REFUSING)
    for backend in ("refusing", "cute"):
        arguments = legal_arguments()
        case.change(arguments)
        with pytest.raises(SpecViolation) as raised:
            la_core.decode(**arguments, backend=backend)
        assert str(raised.value) == case.sentence.format(device="cpu")


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


CALL = (
    "import torch, la_core\n"
    "la_core.decode(*[torch.ones(1, 1, 4)] * 3, torch.zeros(1, 4, 4), torch.tensor([0]), torch.ones(1){options})\n"
)


def test_la_backend_sets_the_default() -> None:
    assert _run(CALL.format(options=""), LA_BACKEND="ref").returncode == 0


def test_a_wrong_la_backend_is_named() -> None:
    done = _run(CALL.format(options=""), LA_BACKEND="cuet")
    assert "decode: LA_BACKEND=cuet: backend 'cuet' is not installed (installed: " in done.stderr
    assert _run(CALL.format(options=", backend='ref'"), LA_BACKEND="cuet").returncode == 0


def test_import_of_la_core_is_inert() -> None:
    """No backend, no compiler, no GPU, no thread; not even an attempt that fails where they are not installed."""
    code = (
        "import importlib.abc, sys\n"
        "class Watch(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        assert name.split('.')[0] not in ('la_ref', 'la_triton', 'la_cute', 'cutlass'), name\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import sys, threading, la_core, la_core.compat.cula, torch\n"
        "names = ('la_ref', 'la_triton', 'la_cute', 'triton', 'cutlass')\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in names]\n"
        "assert not heavy, heavy\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert threading.active_count() == 1\n"
    )
    done = _run(code)
    assert done.returncode == 0, done.stderr


def test_the_first_call_need_not_look_for_backends() -> None:
    """`import la_core` has read which backends are installed: another look reads no metadata."""
    code = (
        "import importlib.metadata, la_core\n"
        "from la_core.backends.discover_backends import installed_names\n"
        "def look(**group): raise AssertionError('a second look')\n"
        "importlib.metadata.entry_points = look\n"
        "assert 'ref' in installed_names()\n"
    )
    done = _run(code)
    assert done.returncode == 0, done.stderr
