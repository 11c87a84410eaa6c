"""The correctness gate: judges a backend on a workload's own shapes, dtypes, slopes and padding before it is timed."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from la_bench.workloads import Workload
from la_core import decode
from la_core.conformance.compare import worst_out_error, worst_state_error
from la_core.conformance.decode_cases import DecodeCase
from la_core.conformance.decode_inputs import DecodeInputs, judge_decode, make_decode_inputs
from la_core.conformance.decode_truth import DecodeTruth


@dataclass(frozen=True)
class Verdict:
    """What the gate found.

    Attributes
    ----------
    faults
        A sentence for everything that is wrong; empty for a right backend.
    out_error, state_error
        Relative L2 error against float64 in the worst (row, head).
    """

    faults: tuple[str, ...]
    out_error: float
    state_error: float


@dataclass(frozen=True)
class _InputsWithTruth(DecodeInputs):
    """Inputs whose truth has been computed: it takes far longer than a call and is the same for every backend."""

    known_truth: DecodeTruth

    def truth(self) -> DecodeTruth:
        return self.known_truth


class Gate:
    """Judges any number of backends on the first batch of one workload."""

    def __init__(self, workload: Workload, device: torch.device, seed: int) -> None:
        self.case = gate_case(workload, seed)
        self.device = device
        self.truth = make_decode_inputs(self.case).truth()

    def judge(self, backend: str) -> Verdict:
        """Make one call on fresh, poisoned tensors and compare everything; what the call raises propagates."""
        plain = make_decode_inputs(self.case, self.device)
        inputs = _InputsWithTruth(
            **{field.name: getattr(plain, field.name) for field in fields(plain)}, known_truth=self.truth
        )
        outputs: list[torch.Tensor] = []

        def call(inputs: DecodeInputs) -> torch.Tensor:
            outputs.append(decode(*inputs.tensors(), out=inputs.out, backend=backend))
            return outputs[0]

        faults = tuple(judge_decode(inputs, call))
        if outputs[0].shape != self.truth.out.shape:
            return Verdict(faults, float("inf"), float("inf"))
        return Verdict(
            faults,
            worst_out_error(outputs[0], self.truth),
            worst_state_error(inputs.s, inputs.s_offsets, self.truth),
        )


def gate_case(workload: Workload, seed: int) -> DecodeCase:
    """The first batch in a pool just large enough, with unused slots before, between and behind the used ones.

    Slots keep their order, so that the case looks up the pool as the workload does.
    """
    batch, model = workload.batches[0], workload.model
    used = sorted(slot for slot in batch if slot >= 0)
    place = {slot: rank + 1 + (rank >= len(used) // 2) for rank, slot in enumerate(used)}
    return DecodeCase(
        B=len(batch),
        P=len(used) + 3,
        H=model.heads,
        K=model.head_size,
        V=model.head_size,
        out_dtype=torch.bfloat16,
        offsets=tuple(place.get(slot, slot) for slot in batch),
        decays=tuple(model.slopes(model.linear_layers[0]).tolist()),
        fused_qkv=True,
        seed=seed,
    )
