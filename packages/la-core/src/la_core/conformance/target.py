"""A backend on a device, as the subject of a test or a benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from la_core.backends.backend_contract import Backend
from la_core.backends.discover_backends import load_backend
from la_core.conformance.decode_cases import DecodeCase
from la_core.conformance.decode_inputs import DecodeInputs, judge_decode, make_decode_inputs
from la_core.ops.decode import decode
from la_core.spec.decode_checks import check_decode
from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.errors import UnsupportedByBackend


class ConformanceError(AssertionError):
    """A backend did something that the contract does not allow."""


class DeclaredRefusal(Exception):
    """The backend refuses a case, as it declares and with its reason: nothing is wrong, and nothing was tested."""


SIZES = ((64, 128), (128, 64), (64, 64), (128, 128), (128, 256), (256, 128), (256, 256), (32, 64), (16, 32), (16, 16))
"""Pairs of K and V, one of which every backend should run."""


@dataclass(frozen=True)
class Target:
    """One backend on one device.

    Attributes
    ----------
    name
        The backend's name.
    device
        `cpu`, `cuda` or `cuda:N`.
    """

    name: str
    device: str

    def __str__(self) -> str:
        return f"{self.name}-{self.device}"

    @property
    def backend(self) -> Backend:
        """The backend; raises BackendUnavailable with the reason if it cannot be loaded."""
        return load_backend(self.name)

    def inputs(self, case: DecodeCase) -> DecodeInputs:
        """Fresh tensors of a case on this device, fitted to the sizes that the backend runs.

        Raises
        ------
        DeclaredRefusal
            The backend runs the case at no size, and really refuses it.
        """
        inputs = make_decode_inputs(case, self.device)
        return inputs if self.backend.refusal(self.problem(inputs)) is None else self._inputs(self.fit(case))

    def fit(self, case: DecodeCase) -> DecodeCase:
        """The case, or, if the backend does not run its K and V, the same with sizes that it runs."""
        candidates = (case, *(replace(case, K=k, V=v) for k, v in SIZES))
        return next((candidate for candidate in candidates if not self.refuses(candidate)), case)

    def problem(self, inputs: DecodeInputs) -> DecodeProblem:
        """The facts of the call that `inputs` are for."""
        return check_decode(*inputs.tensors(), out=inputs.out)

    def decode(self, inputs: DecodeInputs) -> torch.Tensor:
        """Make the call on this backend."""
        return decode(*inputs.tensors(), softmax_scale=inputs.softmax_scale, out=inputs.out, backend=self.name)

    def refuses(self, case: DecodeCase) -> bool:
        """True if the backend declares that it will not run the case."""
        return self.backend.refusal(self.problem(make_decode_inputs(case, self.device))) is not None

    def assert_conforms(self, case: DecodeCase) -> None:
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
        errors = judge_decode(inputs, self.decode)
        if errors:
            raise ConformanceError(f"{self}, case {case.id}:\n  " + "\n  ".join(errors))

    def _inputs(self, case: DecodeCase) -> DecodeInputs:
        inputs = make_decode_inputs(case, self.device)
        refusal = self.backend.refusal(self.problem(inputs))
        if refusal is not None:
            self._assert_refused(inputs, refusal)
            raise DeclaredRefusal(f"{self} {refusal}")
        return inputs

    def _assert_refused(self, inputs: DecodeInputs, refusal: str) -> None:
        try:
            self.decode(inputs)
        except UnsupportedByBackend as reason:
            if refusal not in str(reason):
                raise ConformanceError(f"{self} must refuse with its reason, {refusal!r}; it says {reason}") from reason
            return
        raise ConformanceError(f"{self} declares that it refuses this call ({refusal}), but ran it")
