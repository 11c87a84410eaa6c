"""A declared "no" is really refused, a declared "yes" really runs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from la_core import UnsupportedByBackend, decode, decode_problem
from la_core.conformance.decode_cases import NON_IDENTITY
from la_core.conformance.decode_inputs import make_decode_inputs
from la_core.conformance.target import Target

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("k_size", [1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("v_size", [1, 8, 16, 48, 64, 128, 256, 512])
def test_every_size_runs_or_is_refused(target: Target, k_size: int, v_size: int) -> None:
    target.assert_conforms(replace(NON_IDENTITY, H=2, K=k_size, V=v_size))


@pytest.mark.parametrize(("io", "state", "out"), list(itertools.product(DTYPES, repeat=3)), ids=str)
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
def test_declared_dtypes_and_layouts_are_what_runs(
    target: Target, io: torch.dtype, state: torch.dtype, out: torch.dtype, state_layout: str
) -> None:
    sizes = target.fit(replace(NON_IDENTITY, io_dtype=target.backend.capabilities.io_dtypes[0]))
    case = replace(sizes, io_dtype=io, state_dtype=state, out_dtype=out, state_layout=state_layout)
    declared = target.backend.capabilities
    allowed = (
        io in declared.io_dtypes
        and state in declared.state_dtypes
        and out in declared.out_dtypes
        and state_layout in declared.state_layouts
    )
    assert target.refuses(case) == (not allowed)
    target.assert_conforms(case)


def test_refused_calls_write_nothing(target: Target) -> None:
    """If the backend has a limit at all, crossing it leaves out and s as they are."""
    for k_size in (1, 7, 48, 96, 1000):
        case = replace(NON_IDENTITY, K=k_size, out_dtype=torch.float32)
        inputs = make_decode_inputs(case, target.device)
        reason = target.backend.refusal(target.problem(inputs))
        if reason is None:
            assert target.decode(inputs) is inputs.out
            continue
        before = {name: buffer.clone() for name, buffer in inputs.buffers.items()}
        with pytest.raises(UnsupportedByBackend) as raised:
            target.decode(inputs)
        assert reason in str(raised.value)
        assert target.name in str(raised.value)
        assert all(torch.equal(b.nan_to_num(7), inputs.buffers[n].nan_to_num(7)) for n, b in before.items())


def test_a_device_that_no_backend_has_is_refused(target: Target) -> None:
    arguments = [t.to("meta") for t in target.inputs(NON_IDENTITY).tensors()]
    assert target.backend.refusal(decode_problem(*arguments)) is not None
    with pytest.raises(UnsupportedByBackend, match="meta"):
        decode(*arguments, backend=target.name)
