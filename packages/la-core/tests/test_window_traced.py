"""The window operators under torch.compile: one operator each in the graph, the eager result, the eager errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from la_core import SpecViolation, advance, clear, commit, commit_layers, decode, fold, verify
from la_core.conformance.compare import same_bits
from la_core.conformance.window_error_cases import (
    WINDOW_ERROR_CASES,
    WINDOW_VALUE_ERROR_CASES,
    Arguments,
    call_window_operator,
    legal_window_arguments,
)

CASES = {case.id: case for case in (*WINDOW_ERROR_CASES, *WINDOW_VALUE_ERROR_CASES)}

TRACED = (
    "verify-window-is-a-tuple",
    "verify-draft_lengths-is-a-list",
    "commit-s_offsets-on-another-device",
    "advance-accepted-is-5",
    "fold-room-is-5",
    "fold-s-requires-grad",
)
WHEN_RUN = ("decode-window-of-another-pool", "commit-accepted-of-other-B", "clear-offset-twice", "verify-no-room")
"""Kinds of wrong calls by when they are found: a compilation takes too long to try every case."""

OPERATORS = ("decode_window", "advance", "commit", "clear", "verify")


@pytest.fixture(autouse=True)
def _no_stale_graphs() -> None:
    torch._dynamo.reset()


def _arguments() -> Arguments:
    arguments = legal_window_arguments("verify")
    window = arguments["window"]
    # Room for three drafts once the windows are folded, and a token pending before.
    window.length.copy_(torch.tensor([1, 0, 2]))
    stacked = legal_window_arguments("commit_layers")
    return {**arguments, "stacked": stacked["window"], "pools": stacked["s"]}


def _step(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Three steps of a model: inputs are computed, cursors are moved between."""
    window, pool = a["window"], (a["s"], a["s_offsets"], a["decay_scales"])
    token = decode(a["q"][:, 0] * 2, a["k"][:, 0], a["v"][:, 0], *pool, window=window) + 1
    advance(window, a["s_offsets"])
    fold(window, *pool, room=3)
    clear(window, a["s_offsets"], room=3)
    drafts = verify(a["q"] * 2, a["k"], a["v"], *pool, window, draft_lengths=a["draft_lengths"])
    commit(window, *pool, a["draft_lengths"], room=2)
    advance(window, a["s_offsets"], a["draft_lengths"], room=2)
    verify(a["q"][:, :2], a["k"][:, :2], a["v"][:, :2], *pool, window)
    commit(window, *pool, 2)
    clear(window, a["s_offsets"])
    slopes = a["decay_scales"].expand(2, -1).contiguous()
    commit_layers(a["stacked"], a["pools"], a["s_offsets"], slopes, 0, room=4)
    commit_layers(a["stacked"], a["pools"], a["s_offsets"], slopes, 0)
    return token, drafts * 2


def _written(a: Arguments) -> list[torch.Tensor]:
    return [a["s"], a["pools"], *a["window"].tensors()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_is_the_eager_step(backend: str) -> None:
    eager, compiled, untouched = _arguments(), _arguments(), _arguments()
    expected = _step(eager)
    got = torch.compile(_step, backend=backend, fullgraph=True)(compiled)
    for now, then in zip((*got, *_written(compiled)), (*expected, *_written(eager)), strict=True):
        assert same_bits(now, then)
    assert not any(same_bits(now, then) for now, then in zip(_written(compiled), _written(untouched), strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_graph_holds_one_operator_for_each_call() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(_step, backend=keep, fullgraph=True)(_arguments())
    (graph,) = graphs
    targets = [str(node.target) for node in graph.graph.nodes]
    assert [targets.count(f"la_core.{name}.default") for name in OPERATORS] == [1, 2, 5, 2, 2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("id", [*TRACED, *WHEN_RUN, "decode-window.v-inside-s"])
def test_a_wrong_call_raises_the_eager_sentence(id: str) -> None:
    case = CASES[id]
    arguments = legal_window_arguments(case.op)
    case.change(arguments)
    with pytest.raises(SpecViolation) as raised:
        torch.compile(lambda: call_window_operator(case.op, arguments), backend="eager")()
    assert str(raised.value) == case.sentence.format(device="cpu")


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operators_are_declared_as_they_behave(name: str) -> None:
    """torch's own check of schema, fake implementation and mutation."""
    a = legal_window_arguments("verify")
    k, v, start, length = a["window"].tensors()
    length.copy_(torch.tensor([1, 0, 2]))
    pool = (a["s"], a["s_offsets"], a["decay_scales"])
    options = ("ref", None)
    token = (a["q"][:, 0].clone(), a["k"][:, 0].clone(), a["v"][:, 0].clone())
    arguments: dict[str, tuple[Any, ...]] = {
        "decode_window": (*token, *pool, k, v, start, length, 0.5, a["out"][:, 0].clone(), *options),
        "verify": (a["q"], a["k"], a["v"], *pool, k, v, start, length, None, 0.5, a["out"], *options),
        "commit": ("commit", k, v, start, length, *pool, a["draft_lengths"], 0, None, *options),
        "advance": (k, start, length, a["s_offsets"], a["draft_lengths"], 0, 2, *options),
        "clear": (k, start, length, a["s_offsets"], 2, *options),
    }
    if name == "verify":
        length.zero_()
    torch.library.opcheck(getattr(torch.ops.la_core, name).default, arguments[name])
