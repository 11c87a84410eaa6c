"""The correctness gate: judges a variant on a workload's own shapes, dtypes, slopes and padding before it is timed."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from la_bench.roofline import FLOOR_FACTOR
from la_bench.tensors import DecodeCall
from la_bench.variants import PeerVariant, Variant
from la_bench.workloads import Workload
from la_core.conformance.compare import worst_out_error, worst_state_error
from la_core.conformance.decode_cases import DecodeCase
from la_core.conformance.decode_inputs import DecodeInputs, judge_decode, make_decode_inputs, untouched_errors
from la_core.conformance.decode_truth import DecodeTruth
from la_core.conformance.tolerances import UNIT_ROUNDOFF


@dataclass(frozen=True)
class Verdict:
    """What the gate found.

    Attributes
    ----------
    faults
        A sentence for everything that is wrong; empty for a right variant.
    out_error, state_error
        Relative L2 error against float64 in the worst (row, head); a floor has no output.
    """

    faults: tuple[str, ...]
    out_error: float | None
    state_error: float


@dataclass(frozen=True)
class _InputsWithTruth(DecodeInputs):
    """Inputs whose truth has been computed: it takes far longer than a call and is the same for every variant."""

    known_truth: DecodeTruth

    def truth(self) -> DecodeTruth:
        return self.known_truth


class Gate:
    """Judges any number of variants on the first batch of one workload."""

    def __init__(self, workload: Workload, device: torch.device, seed: int) -> None:
        self.case = gate_case(workload, seed)
        self.device = device
        self.truth = make_decode_inputs(self.case).truth()

    def judge(self, variant: Variant) -> Verdict:
        """Make one call on fresh, poisoned tensors and compare everything; what the call raises propagates."""
        # The same values in every layout, hence the same truth.
        case = replace(self.case, state_layout=variant.layout(self.case.state_layout))
        plain = make_decode_inputs(case, self.device)
        if variant.facts.kind == "floor":
            return _judge_floor(variant, plain)
        truth = allowed_truth(variant, self.truth, case.io_dtype, case.K)
        inputs = _InputsWithTruth(
            **{field.name: getattr(plain, field.name) for field in fields(plain)}, known_truth=truth
        )
        outputs: list[torch.Tensor] = []

        def call(inputs: DecodeInputs) -> torch.Tensor:
            outputs.append(variant.run(_decode_call(inputs)))
            return outputs[0]

        faults = tuple(judge_decode(inputs, call))
        if outputs[0].shape != self.truth.out.shape:
            return Verdict(faults, float("inf"), float("inf"))
        return Verdict(
            faults,
            worst_out_error(outputs[0], self.truth),
            worst_state_error(inputs.s, inputs.s_offsets, self.truth),
        )


def allowed_truth(variant: Variant, truth: DecodeTruth, io_dtype: torch.dtype, k_size: int) -> DecodeTruth:
    """The truth by which a variant is judged: with larger magnitudes, and so more allowance, for a peer that rounds
    v times k to the dtype of q, k and v.

    Its state may be off by the unit roundoff u of that dtype; in its output K such errors add up like a random walk,
    so that they come to u / sqrt(K) of the magnitude. Magnitudes count 6 and 2 * sqrt(K) + 8 units of 2**-24 each.
    """
    if not (isinstance(variant, PeerVariant) and getattr(variant.peer, "rounds_products", False)):
        return truth
    units = UNIT_ROUNDOFF[io_dtype] / UNIT_ROUNDOFF[torch.float32]
    of_state = 1 + units / 6
    of_out = 1 + 2 * units / k_size**0.5 / (2 * k_size**0.5 + 8)
    magnitudes = {row: magnitude * of_state for row, magnitude in truth.state_magnitude.items()}
    return replace(truth, out_magnitude=truth.out_magnitude * of_out, state_magnitude=magnitudes)


def floor_faults(before: torch.Tensor, after: torch.Tensor) -> tuple[tuple[str, ...], float]:
    """Faults of a floor, and the relative L2 error of its worst state, from its states [N, V, K] before and after."""
    expected = before.double() * FLOOR_FACTOR
    error = (after.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1).clamp_min(1e-300)
    worst = float(error.nan_to_num(nan=torch.inf).max()) if len(error) else 0.0
    if worst <= 2 * UNIT_ROUNDOFF[before.dtype]:
        return (), worst
    return (f"states must be multiplied by {FLOOR_FACTOR:g}; the worst is off by {worst:.3g}",), worst


def _judge_floor(variant: Variant, inputs: DecodeInputs) -> Verdict:
    heads = inputs.decay_scales.shape[0]
    rows = torch.tensor(
        [slot * heads + h for slot in inputs.live_slots() for h in range(heads)], device=inputs.s.device
    )
    buffers = {name: buffer.clone() for name, buffer in inputs.buffers.items()}
    before = inputs.s[rows]
    variant.run(_decode_call(inputs))
    faults, error = floor_faults(before, inputs.s[rows])
    return Verdict((*faults, *untouched_errors(inputs, buffers)), None, error)


def _decode_call(inputs: DecodeInputs) -> DecodeCall:
    assert inputs.out is not None
    return DecodeCall(*inputs.tensors(), out=inputs.out)


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
