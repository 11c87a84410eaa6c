"""decode under torch.compile: one operator in the graph, the eager result, the eager errors."""

from __future__ import annotations

import pytest
import torch

from la_core import SpecViolation, decode
from la_core.conformance.compare import same_bits
from la_core.conformance.decode_error_cases import (
    DECODE_ERROR_CASES,
    DECODE_OFFSET_ERROR_CASES,
    Arguments,
    legal_arguments,
)

TRACED = ("k-is-a-list", "decay_scales-is-none", "softmax_scale-is-a-tensor", "q-requires-grad", "s-on-another-device")
WHEN_RUN = ("s-is-4d", "decay_scales-of-length-3", "s_offsets-are-floats", "v-last-stride-2", "offset-twice")
SHARED = ("out-overlaps-q", "out-and-q-interleave", "out-expanded")
"""Kinds of wrong calls by when they are found: a compilation takes too long to try every case."""

CASES = {case.id: case for case in (*DECODE_ERROR_CASES, *DECODE_OFFSET_ERROR_CASES)}


@pytest.fixture(autouse=True)
def _no_stale_graphs() -> None:
    torch._dynamo.reset()


def _around(arguments: Arguments, pool: torch.Tensor) -> torch.Tensor:
    """A model's way of calling: scaled inputs, the pool as a view of a larger one, the output used further."""
    inputs = {**arguments, "q": arguments["q"] * 2, "s": pool[1:].view(-1, *pool.shape[2:])}
    return decode(**inputs) + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_call_is_the_eager_call(backend: str, given: bool) -> None:
    arguments = legal_arguments()
    if not given:
        del arguments["out"]
    pool = torch.randn(4, 4, 128, 64)
    pools = [pool.clone(), pool.clone()]
    expected = _around(arguments, pools[0])
    got = torch.compile(_around, backend=backend, fullgraph=True)(arguments, pools[1])
    assert same_bits(got, expected)
    assert same_bits(pools[0], pools[1])
    assert not same_bits(pools[0], pool)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_graph_holds_one_operator() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(_around, backend=keep, fullgraph=True)(legal_arguments(), torch.randn(4, 4, 128, 64))
    (graph,) = graphs
    assert [str(node.target) for node in graph.graph.nodes].count("la_core.decode.default") == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [*TRACED, *WHEN_RUN, *SHARED])
def test_a_wrong_call_raises_the_eager_sentence(case: str) -> None:
    arguments = legal_arguments()
    CASES[case].change(arguments)
    with pytest.raises(SpecViolation) as raised:
        torch.compile(lambda: decode(**arguments), backend="eager")()
    assert str(raised.value) == CASES[case].sentence.format(device="cpu")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [*TRACED, *WHEN_RUN])
def test_a_functionalised_graph_refuses_all_but_shared_memory(case: str) -> None:
    """There torch gives the operator copies of what it writes, and judges sharing by rules of its own."""
    arguments = legal_arguments()
    CASES[case].change(arguments)
    with pytest.raises(SpecViolation) as raised:
        torch.compile(lambda: decode(**arguments), backend="aot_eager")()
    assert str(raised.value) == CASES[case].sentence.format(device="cpu")


def test_the_operator_is_declared_as_it_behaves() -> None:
    """torch's own check of schema, fake implementation and mutation."""
    a = legal_arguments()
    torch.library.opcheck(
        torch.ops.la_core.decode.default,
        (a["q"], a["k"], a["v"], a["s"], a["s_offsets"], a["decay_scales"], 0.5, a["out"], "ref", None),
    )
