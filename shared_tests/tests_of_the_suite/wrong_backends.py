"""Backends that are wrong on purpose, each in one way that real kernels have been wrong, and one that is right.

All share one plain loop over rows; a fault is a place where it deviates. The ones in `RIGHT` deviate nowhere and must
pass the whole suite, which shows that the others are caught for their fault and not for the loop around it.
"""

from __future__ import annotations

from typing import Any

import torch

from la_core.backends.capabilities import Capabilities
from la_core.spec.decode_problem import DecodeProblem

SIXTEEN_BITS = (torch.bfloat16, torch.float16)

RIGHT: dict[str, dict[str, Any]] = {
    "right": {},
    "right_for_k128_v128": {"k_sizes": (128,), "v_sizes": (128,), "sizes_text": "K = V = 128"},
    "right_for_16_bits": {"io_dtypes": SIXTEEN_BITS, "out_dtypes": SIXTEEN_BITS},
    "right_for_vk": {"state_layouts": ("vk",)},
}
"""Backends without a fault, by what they declare: a limit that is declared is no fault."""

FAULTS = {
    "offsets_ignored": "row b uses slot b, padding rows too",
    "identity_offsets": "live row b uses slot b",
    "offsets_in_32_bits": "int64 offsets lose their upper half",
    "offsets_modulo_pool": "an offset beyond the pool lands on a live slot",
    "neighbours_decay": "head h decays like head h + 1",
    "mean_decay": "all heads decay alike",
    "decay_never": "the old state is kept as it is",
    "decay_twice": "the old state decays twice",
    "decay_sign": "the old state grows",
    "decay_rounded_to_bf16": "the factor exp(-d) is rounded to 16 bits",
    "state_transposed": "the state's memory is read and written as [K, V]",
    "layout_ignored": "a pool with V contiguous is taken for one with K contiguous",
    "output_from_old_state": "the output does not see the new token",
    "output_from_rounded_state": "the output is computed from the state as stored",
    "scale_two_percent_off": "the output is 2 % too large",
    "scale_forgotten": "the output is not scaled",
    "scale_of_first_call": "the first call's scale serves all later ones",
    "padding_writes_last_slot": "slot -1 wraps to the last one",
    "padding_writes_slot_0": "negative slots are clamped to 0",
    "padding_reads_slot_0": "padding rows multiply slot 0 by zero",
    "padding_output_unwritten": "the output of padding rows is left as it was",
    "padding_zero_is_scaled": "the zero of padding rows goes through the scale, which may be negative or infinite",
    "padding_state_cleared": "a padding row zeroes the slot that its number wraps to",
    "state_rounded_to_bf16": "a float32 state goes through 16 bits",
    "bf16_state_truncated": "a bf16 state is stored by dropping bits",
    "fp16_state_truncated": "an fp16 state is stored by dropping bits",
    "bf16_out_truncated": "a bf16 output is stored by dropping bits",
    "nan_states_cleared": "NaN in a named state is taken for zero",
    "rows_beyond_256": "rows from 256 on are taken for padding",
    "offsets_beyond_in_32_bits": "an int64 offset beyond the pool is cut to 32 bits",
    "last_v_rows_skipped": "the last rows of V keep the old state",
    "wrong_q_head_when_grouped": "head h uses head h % G of q and k",
    "one_extra_slot_written": "the slot behind the last row's is rewritten",
    "row_stride_ignored": "a pool with gaps is copied, and the copy is updated",
    "out_stride_ignored": "an output with gaps is written as if it had none",
    "sum_order_by_batch": "large batches sum over K in another order",
    "inputs_scaled_in_place": "q is scaled where it lies",
    "fp16_taken_for_bf16": "the bits of fp16 inputs are read as bf16",
    "runs_what_it_refuses": "declares a limit and does not keep it",
    "refuses_what_it_declares": "declares a dtype and raises on it",
    "first_state_kept": "a slot's state is remembered from an earlier call",
}


class WrongBackend:
    """A plain loop over rows with one fault."""

    spec_revision = 1

    def __init__(self, fault: str, **limits: Any) -> None:
        self.name = fault if fault in RIGHT else f"wrong_{fault}"
        self.fault = fault
        self.capabilities = Capabilities(ops=("decode",), device_types=("cpu", "cuda"), **limits)
        self.first_scale: float | None = None
        self.remembered: dict[tuple[int, ...], torch.Tensor] = {}

    def refusal(self, problem: DecodeProblem) -> str | None:
        return self.capabilities.decode_refusal(problem)

    def decode(
        self,
        problem: DecodeProblem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        fault, H, P = self.fault, problem.H, problem.P
        if fault == "refuses_what_it_declares" and problem.io_dtype is torch.float16:
            raise RuntimeError("no kernel for float16")
        if fault == "scale_of_first_call":
            self.first_scale = softmax_scale if self.first_scale is None else self.first_scale
            softmax_scale = self.first_scale
        softmax_scale *= {"scale_two_percent_off": 1.02}.get(fault, 1.0)
        if fault == "scale_forgotten":
            softmax_scale = 1.0
        if fault == "inputs_scaled_in_place":
            q.mul_(softmax_scale)
            softmax_scale = 1.0
        if fault == "fp16_taken_for_bf16" and problem.io_dtype is torch.float16:
            q, k, v = (t.view(torch.bfloat16) for t in (q, k, v))
        if fault == "row_stride_ignored":
            s = s.contiguous() if problem.state_layout == "vk" else s.transpose(1, 2).contiguous().transpose(1, 2)
        if fault == "out_stride_ignored":
            out = out.as_strided(out.shape, (H * problem.V, problem.V, 1))
        if fault == "layout_ignored" and problem.K == problem.V:
            s = s.as_strided(s.shape, (s.stride(0), problem.K, 1))
        alpha = self._decays(decay_scales)
        group = H // problem.G
        heads = torch.arange(H, device=q.device)
        heads = heads % problem.G if fault == "wrong_q_head_when_grouped" else heads // group
        for b, offset in enumerate(s_offsets.tolist()):
            slot = self._slot(b, offset, P)
            if slot is None:
                self._padding(s, out, b, offset, H, P, softmax_scale)
                continue
            rows = s[slot * H : (slot + 1) * H]
            new, out_row = self._step(
                rows, q[b, heads].float(), k[b, heads].float(), v[b].float(), alpha, problem.B, problem.state_dtype
            )
            if fault == "first_state_kept":
                new = self.remembered.setdefault((slot, *rows.shape), new)
            self._store(rows, new)
            out_row = out_row * softmax_scale
            if fault == "bf16_out_truncated" and out.dtype is torch.bfloat16:
                out_row = _cut(out_row, torch.bfloat16)
            out[b] = out_row.to(out.dtype)
            if fault == "one_extra_slot_written" and b == problem.B - 1 and slot + 1 < P:
                s[(slot + 1) * H].add_(1)

    def _decays(self, decay_scales: torch.Tensor) -> torch.Tensor:
        if self.fault == "neighbours_decay":
            decay_scales = decay_scales.roll(-1)
        if self.fault == "mean_decay":
            decay_scales = decay_scales.mean().expand_as(decay_scales)
        power = {"decay_never": 0.0, "decay_twice": 2.0, "decay_sign": -1.0}.get(self.fault, 1.0)
        alpha = torch.exp(-power * decay_scales)
        return alpha.bfloat16().float() if self.fault == "decay_rounded_to_bf16" else alpha

    def _slot(self, b: int, offset: int, slots: int) -> int | None:
        if self.fault == "offsets_ignored":
            return b if b < slots else None
        if self.fault == "offsets_in_32_bits":
            offset = (offset + 2**31) % 2**32 - 2**31
        if self.fault == "rows_beyond_256" and b >= 256:
            return None
        if self.fault == "offsets_beyond_in_32_bits" and offset >= slots:
            offset %= 2**32
        if self.fault == "offsets_modulo_pool" and offset >= slots > 0:
            offset %= slots
        if self.fault == "padding_writes_last_slot" and offset < 0 < slots:
            return slots - 1
        if self.fault == "padding_writes_slot_0" and offset < 0 < slots:
            return 0
        if not 0 <= offset < slots:
            return None
        return b % slots if self.fault == "identity_offsets" else offset

    def _padding(
        self, s: torch.Tensor, out: torch.Tensor, b: int, offset: int, H: int, slots: int, scale: float
    ) -> None:
        if self.fault == "padding_output_unwritten":
            return
        if self.fault == "padding_state_cleared" and -slots <= offset < 0:
            s[(slots + offset) * H].zero_()
        out[b] = 0.0 * scale if self.fault == "padding_zero_is_scaled" else 0
        if self.fault == "padding_reads_slot_0" and slots > 0:
            out[b] = (s[0].sum() * 0).to(out.dtype)

    def _step(
        self,
        rows: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        alpha: torch.Tensor,
        batch: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New states [H, V, K] and unscaled output [H, V] in float32."""
        old = rows.float()
        if self.fault == "nan_states_cleared":
            old = old.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        if self.fault == "state_transposed":
            old = old.reshape(old.shape[0], old.shape[2], old.shape[1]).transpose(1, 2)
        new = alpha[:, None, None] * old + v[:, :, None] * k[:, None, :]
        seen = old if self.fault == "output_from_old_state" else new
        if self.fault == "output_from_rounded_state":
            seen = new.to(dtype).float()
        products = seen * q[:, None, :]
        if self.fault == "sum_order_by_batch" and batch > 16:
            products = products.flip(2).contiguous()
        return new, products.sum(2)

    def _store(self, rows: torch.Tensor, new: torch.Tensor) -> None:
        if self.fault == "state_transposed":
            new = new.transpose(1, 2).reshape(new.shape)
        if self.fault == "state_rounded_to_bf16":
            new = new.bfloat16().float()
        if self.fault == f"{_SHORT.get(rows.dtype)}_state_truncated":
            new = _cut(new, rows.dtype)
        if self.fault == "last_v_rows_skipped":
            new = torch.cat([new[:, :-1], rows[:, -1:].float()], dim=1)
        rows.copy_(new)


_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _cut(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 values cut to the bits that `dtype` holds, toward zero; for numbers that are normal in it."""
    dropped = {torch.bfloat16: 16, torch.float16: 13}[dtype]
    return (value.contiguous().view(torch.int32) & -(1 << dropped)).view(torch.float32)


class LyingBackend(WrongBackend):
    """Declares a limit on K that it does not keep to itself: `refusal` contradicts the capabilities."""

    def __init__(self) -> None:
        super().__init__("runs_what_it_refuses", state_dtypes=(torch.float32, torch.bfloat16))

    def refusal(self, problem: DecodeProblem) -> str | None:
        return None


_all = [LyingBackend() if fault == "runs_what_it_refuses" else WrongBackend(fault) for fault in FAULTS]
_all += [WrongBackend(name, **limits) for name, limits in RIGHT.items()]
backends = {backend.name: backend for backend in _all}


def __getattr__(name: str) -> WrongBackend:
    """`wrong_backends:wrong_decay_sign` and its like, for entry points."""
    if name not in backends:
        raise AttributeError(name)
    return backends[name]
