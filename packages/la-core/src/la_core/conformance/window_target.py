"""A backend on a device, as the subject of a test of the window operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import la_core
from la_core.backends.choose_backend import refusal_of
from la_core.conformance.target import SIZES, ConformanceError, DeclaredRefusal, Target
from la_core.conformance.window_cases import ADVANCE, COMMIT, DECODE, VERIFY, WindowCase
from la_core.conformance.window_inputs import WindowInputs, make_window_inputs
from la_core.conformance.window_judge import judge_window
from la_core.spec.errors import UnsupportedByBackend
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_checks import check_window_call
from la_core.spec.window_problem import WindowProblem


@dataclass(frozen=True)
class WindowTarget:
    """The window operators of a target; each method is the public function on that backend."""

    target: Target

    def __str__(self) -> str:
        return str(self.target)

    @property
    def device(self) -> str:
        """Where the tensors lie."""
        return self.target.device

    def inputs(self, case: WindowCase) -> WindowInputs:
        """Fresh tensors of a case, fitted to the sizes that the backend runs.

        Raises
        ------
        DeclaredRefusal
            The backend runs the case at no size, and really refuses it.
        """
        inputs = make_window_inputs(case, self.device)
        return inputs if self.refusal(inputs) is None else self._inputs(self.fit(case))

    def fit(self, case: WindowCase) -> WindowCase:
        """The case, or, if the backend does not run its K and V, the same with sizes that it runs."""
        problem = self.problem(make_window_inputs(case, self.device))
        for k_size, v_size in ((case.K, case.V), *SIZES):
            # advance has no sizes, and its problem none to refuse.
            fitted = replace(problem, K=k_size, V=v_size) if problem.K else problem
            if refusal_of(self.target.backend, fitted) is None:
                return replace(case, K=k_size, V=v_size)
        return case

    def refuses(self, case: WindowCase) -> bool:
        """True if the backend declares that it will not run the case."""
        return self.refusal(make_window_inputs(case, self.device)) is not None

    def refusal(self, inputs: WindowInputs) -> str | None:
        """Why the backend will not make this call; None if it will."""
        return refusal_of(self.target.backend, self.problem(inputs))

    def problem(self, inputs: WindowInputs) -> WindowProblem:
        """The facts of the call that `inputs` are for."""
        return problem_of(inputs)

    def run(self, inputs: WindowInputs) -> torch.Tensor | None:
        """Make the call that `inputs` are for."""
        case = inputs.case
        tokens = (inputs.q, inputs.k, inputs.v, inputs.s, inputs.s_offsets, inputs.decay_scales)
        pool = (inputs.window, inputs.s, inputs.s_offsets, inputs.decay_scales)
        if case.op == "decode":
            return self.decode(*tokens, window=inputs.window, softmax_scale=case.softmax_scale, out=inputs.out)
        if case.op == "verify":
            counts = inputs.counts
            return self.verify(
                *tokens, inputs.window, draft_lengths=counts, softmax_scale=case.softmax_scale, out=inputs.out
            )
        if case.op == "fold":
            self.fold(*pool, room=case.room)
        elif case.op == "commit":
            commit = self.commit_layers if case.L else self.commit
            commit(*pool, 0 if inputs.counts is None else inputs.counts, room=case.room)
        elif case.op == "advance":
            accepted = 1 if inputs.counts is None else inputs.counts
            self.advance(inputs.window, inputs.s_offsets, accepted, room=case.room)
        else:
            self.clear(inputs.window, inputs.s_offsets, room=case.room)
        return None

    def run_unchecked(self, inputs: WindowInputs) -> torch.Tensor | None:
        """The same call as the backend gets it, past the checks of values that la_core makes where it can read them."""
        backend: Any = self.target.backend
        case, problem, window, counts, out = inputs.case, self.problem(inputs), inputs.window, inputs.counts, inputs.out
        scale = case.K**-0.5 if case.softmax_scale is None else case.softmax_scale
        tokens = (inputs.q, inputs.k, inputs.v, inputs.s, inputs.s_offsets, inputs.decay_scales, window)
        if out is None and case.op in ("decode", "verify"):
            out = torch.full(inputs.v.shape, torch.nan, dtype=problem.out_dtype, device=self.device)
        if case.op == "decode":
            backend.decode_window(problem, *tokens, scale, out)
        elif case.op == "verify":
            backend.verify(problem, *tokens, counts, scale, out)
        elif case.op in ("fold", "commit"):
            pool = (window, inputs.s, inputs.s_offsets, inputs.decay_scales)
            backend.commit(problem, *pool, 0 if counts is None else counts, case.room)
        else:
            accepted = 0 if case.op == "clear" else 1 if counts is None else counts
            backend.advance(problem, window, inputs.s_offsets, accepted, case.room, case.op == "clear")
        return out

    def decode(self, *arguments: torch.Tensor, window: KVWindow | None = None, **options: Any) -> torch.Tensor:
        """:func:`la_core.decode`, with a window or without."""
        return la_core.decode(*arguments, window=window, **options, backend=self.target.name)

    def verify(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """:func:`la_core.verify`."""
        return la_core.verify(*arguments, **options, backend=self.target.name)

    def fold(self, *arguments: Any, **options: Any) -> None:
        """:func:`la_core.fold`."""
        la_core.fold(*arguments, **options, backend=self.target.name)

    def commit(self, *arguments: Any, **options: Any) -> None:
        """:func:`la_core.commit`."""
        la_core.commit(*arguments, **options, backend=self.target.name)

    def commit_layers(self, *arguments: Any, **options: Any) -> None:
        """:func:`la_core.commit_layers`."""
        la_core.commit_layers(*arguments, **options, backend=self.target.name)

    def advance(self, *arguments: Any, **options: Any) -> None:
        """:func:`la_core.advance`."""
        la_core.advance(*arguments, **options, backend=self.target.name)

    def clear(self, *arguments: Any, **options: Any) -> None:
        """:func:`la_core.clear`."""
        la_core.clear(*arguments, **options, backend=self.target.name)

    def needs(self, *ops: str) -> None:
        """Go on only if the backend states that it implements `ops`, by the names of `capabilities`.

        Raises
        ------
        DeclaredRefusal
            It does not, and says so when it is asked.
        ConformanceError
            It does not state it, and runs it.
        """
        for op in ops:
            if op not in self.target.backend.capabilities.ops:
                self._inputs(_EXAMPLES[op])
                raise ConformanceError(f"{self} runs {op}, which its capabilities do not state")

    def assert_conforms(self, case: WindowCase) -> None:
        """The backend runs the case and does what the contract says, or refuses it as it declares.

        Raises
        ------
        ConformanceError
            With a sentence for everything that is wrong.
        """
        try:
            inputs = self._inputs(case)
        except DeclaredRefusal:
            return
        self.assert_right(inputs)

    def assert_right(
        self, inputs: WindowInputs, call: Callable[[WindowInputs], torch.Tensor | None] | None = None
    ) -> None:
        """One call with the present values does what the contract says.

        By default that of la_core; but a row without room never comes through it where values can be read, so the
        backend is then called past it.
        """
        truth = inputs.truth()
        if call is None:
            call = self.run_unchecked if self.device == "cpu" and truth.no_room else self.run
        errors = judge_window(inputs, call, truth)
        if errors:
            raise ConformanceError(f"{self}, case {inputs.case.id}:\n  " + "\n  ".join(errors))

    def _inputs(self, case: WindowCase) -> WindowInputs:
        inputs = make_window_inputs(case, self.device)
        refusal = self.refusal(inputs)
        if refusal is not None:
            self._assert_refused(inputs, refusal)
            raise DeclaredRefusal(f"{self} {refusal}")
        return inputs

    def _assert_refused(self, inputs: WindowInputs, refusal: str) -> None:
        if inputs.case.op == "verify":
            # A row without room is refused before a backend is asked.
            inputs.window.length.zero_()
        try:
            self.run(inputs)
        except UnsupportedByBackend as reason:
            if refusal not in str(reason):
                raise ConformanceError(f"{self} must refuse with its reason, {refusal!r}; it says {reason}") from reason
            return
        raise ConformanceError(f"{self} declares that it refuses this call ({refusal}), but ran it")


_EXAMPLES = {"decode_window": DECODE, "verify": VERIFY, "commit": COMMIT, "advance": ADVANCE}


def problem_of(inputs: WindowInputs) -> WindowProblem:
    """The facts of the call that `inputs` are for, on any backend."""
    case = inputs.case
    arguments: dict[str, Any] = {"window": inputs.window, "s_offsets": inputs.s_offsets}
    if case.op not in ("advance", "clear"):
        arguments |= {"s": inputs.s, "decay_scales": inputs.decay_scales}
    if case.op in ("decode", "verify"):
        arguments |= {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": inputs.out}
    if isinstance(inputs.counts, torch.Tensor):
        arguments["draft_lengths" if case.op == "verify" else "accepted"] = inputs.counts
    return check_window_call("commit_layers" if case.op == "commit" and case.L else case.op, **arguments)


def on_all_rows(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Counts or slots for every row, with the dtype and device of other ones."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)
