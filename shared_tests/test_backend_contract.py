"""What a backend object must be, whatever it computes."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch

import la_core
from la_core.backends.backend_contract import Backend, DirectBackend
from la_core.backends.capabilities import TABLE_HEADER
from la_core.conformance.decode_cases import NON_IDENTITY
from la_core.conformance.target import Target


def _problem(target: Target, **changes: object) -> la_core.DecodeProblem:
    sizes = {"B": 2, "P": 4, "H": 4, "K": 64, "V": 128, "device": torch.device(target.device)}
    return la_core.DecodeProblem.contiguous(**{**sizes, **changes})  # type: ignore[arg-type]


def test_it_is_a_backend_of_this_spec(target: Target) -> None:
    assert isinstance(target.backend, Backend)
    assert target.backend.name == target.name
    assert target.backend.spec_revision == la_core.SPEC_REVISION


@pytest.mark.parametrize("method", ["refusal", "decode"])
def test_signatures_are_those_of_the_protocol(target: Target, method: str) -> None:
    """Explicit parameters of the same names and order: no `**kwargs` that would swallow a misspelt one."""
    ours = inspect.signature(getattr(target.backend, method)).parameters
    protocol = list(inspect.signature(getattr(Backend, method)).parameters)[1:]
    assert list(ours) == protocol
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in ours.values())


def test_a_direct_way_has_the_signature_of_the_protocol(target: Target) -> None:
    offer = getattr(target.backend, "direct_decode", None)
    protocol = list(inspect.signature(DirectBackend.direct_decode).parameters)[1:]
    assert offer is None or list(inspect.signature(offer).parameters) == protocol


def test_capabilities_are_well_formed(target: Target) -> None:
    declared = target.backend.capabilities
    assert "decode" in declared.ops
    assert target.device in declared.device_types
    assert declared.io_dtypes
    assert set(declared.io_dtypes) <= {torch.bfloat16, torch.float16, torch.float32}
    assert set(declared.state_layouts) <= {"vk", "kv"}
    assert len(declared.table_row()) == len(TABLE_HEADER)
    assert all(declared.table_row())


def test_refusal_is_pure(target: Target) -> None:
    """The same sentence each time, and none that runs into the next."""
    for changes in ({}, {"K": 7}, {"V": 4096}, {"io_dtype": torch.float16}, {"B": 0}, {"P": 10**9}):
        problem = _problem(target, **changes)
        first = target.backend.refusal(problem)
        assert first == target.backend.refusal(problem) == target.backend.refusal(_problem(target, **changes))
        assert first is None or (first.strip() == first and first and not first.endswith("."))


def test_run_time_values_are_never_a_reason_to_refuse(target: Target) -> None:
    answers = {
        target.backend.refusal(_problem(target, B=b, P=p)) for b in (0, 1, 3, 64, 70_000) for p in (0, 1, 500, 10**6)
    }
    assert len(answers) == 1


def test_choice_can_explain_itself(target: Target) -> None:
    choice = la_core.explain_choice(target.problem(target.inputs(NON_IDENTITY)), backend=target.name)
    assert choice.backend is target.backend
    assert f"{target.name}: ok" in str(choice)
    assert f"chosen: {target.name}" in str(choice)


def test_import_touches_no_gpu_and_starts_no_compiler(target: Target) -> None:
    code = (
        "import sys, la_core\n"
        "from la_core.backends.discover_backends import installed_names, load_backend\n"
        "import torch\n"
        "assert sys.argv[1] in installed_names()\n"
        "load_backend(sys.argv[1])\n"
        "assert not torch.cuda.is_initialized(), 'CUDA was initialised'\n"
        "import threading\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, target.name],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
