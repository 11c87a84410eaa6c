"""decode under torch.compile: one operator in the graph, the eager result, the eager errors."""

from __future__ import annotations

import pytest
import torch

from la_core import SpecViolation, decode
from la_core.conformance.compare import same_bits
from la_core.conformance.decode_error_cases import Arguments, legal_arguments


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_wrong_call_raises_the_eager_sentence_when_it_runs() -> None:
    arguments = legal_arguments()
    arguments["decay_scales"] = arguments["decay_scales"][:3]
    with pytest.raises(SpecViolation, match=r"decode: decay_scales must be \[H\] = \(4\)"):
        torch.compile(lambda: decode(**arguments), backend="eager", fullgraph=True)()


def test_the_operator_is_declared_as_it_behaves() -> None:
    """torch's own check of schema, fake implementation and mutation."""
    a = legal_arguments()
    torch.library.opcheck(
        torch.ops.la_core.decode.default,
        (a["q"], a["k"], a["v"], a["s"], a["s_offsets"], a["decay_scales"], 0.5, a["out"], "ref", None),
    )
