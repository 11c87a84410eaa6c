"""Backends whose window operators are wrong on purpose, each in one way, and some that are right.

As in `wrong_backends.py`, all share one plain loop over rows, a fault is a place where it deviates, and the ones in
`RIGHT` deviate nowhere. Their decode without a window is right.
"""

from __future__ import annotations

from typing import Any

import torch
from wrong_backends import WrongBackend

from la_core.backends.capabilities import Capabilities
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_problem import WindowProblem

WINDOW_OPS = ("decode_window", "verify", "commit", "advance")

RIGHT: dict[str, dict[str, Any]] = {
    "right_window": {},
    "right_window_by_powers": {},
    "right_window_for_k128_v128": {"k_sizes": (128,), "v_sizes": (128,), "sizes_text": "K = V = 128"},
    "right_window_without_verify": {"ops": ("decode", "decode_window", "commit", "advance")},
}
"""Backends without a fault, by what they declare. `right_window_by_powers` brings in all tokens at once."""

FAULTS = {
    "fold_forgotten": "a full window is not brought into the state",
    "full_window_written": "the token that finds the window full takes the place of the oldest",
    "decay_power_one_more": "pending tokens decay once too often",
    "decay_power_one_less": "pending tokens decay once too little",
    "state_ages_by_one": "the state decays once, however many tokens are pending",
    "inverse_decay": "powers are taken as a quotient of exp(+d * j) by another",
    "pending_order_reversed": "the newest pending token decays like the oldest",
    "pending_tokens_ignored": "outputs come from the state and the new tokens alone",
    "pending_masked_by_zero": "places that are not pending are multiplied by zero",
    "wrap_forgotten": "tokens behind the last place are taken from the last place",
    "start_ignored": "the oldest token is taken from place 0",
    "window_of_the_row": "row b uses the window of slot b",
    "window_of_slot_0": "all rows use the window of the first row's slot",
    "window_heads_of_group": "head h uses head h % G of the window's k",
    "window_rounded_to_bf16": "a float32 window holds k and v in 16 bits",
    "token_place_off_by_one": "new tokens are written one place too far behind",
    "drafts_visible_backwards": "output t sees draft t + 1",
    "drafts_invisible": "output t sees draft t and the pending tokens, no draft before it",
    "draft_lengths_ignored": "all drafts of a row count",
    "drafts_masked_by_zero": "drafts behind the length are multiplied by zero",
    "outputs_behind_unwritten": "outputs behind the draft length are left as they were",
    "verify_writes_s": "the drafts come into the state",
    "verify_moves_cursors": "the drafts become pending",
    "no_room_is_zero": "a row without room gets zeros for an answer",
    "no_room_is_written": "a row without room overwrites its oldest tokens",
    "padding_writes_window_of_last_slot": "slot -1 wraps to the last one",
    "padding_writes_window_of_slot_0": "negative slots are clamped to 0",
    "padding_outputs_unwritten": "the outputs of padding rows are left as they were",
    "offsets_modulo_pool": "an offset beyond the pool lands on a live slot",
    "scale_of_first_call": "the first call's scale serves all later ones",
    "rejected_tokens_kept": "all rows keep as many drafts as the row that accepts most",
    "cursor_off_by_one": "one token more than the accepted ones becomes pending",
    "full_window_stays_full": "advance does not empty a window that decode has folded",
    "idle_row_loses_its_window": "advance empties a full window also where no token was accepted",
    "advance_of_the_row": "row b moves the cursors of slot b",
    "advance_moves_padding": "a padding row moves the cursors of the last slot",
    "clear_keeps_start": "a cleared window begins where it began",
    "clear_ignores_room": "clear empties windows that have room",
    "fold_ignores_room": "fold writes states whose window has room",
    "room_off_by_one": "a window that has just enough room is folded and cleared",
    "room_off_by_one_with_accepted": "commit and advance treat a window that has just enough room as one that lacks it",
    "room_of_pending_alone": "commit and advance with room do not count the accepted tokens",
    "advance_ignores_room": "a window that has been committed for lack of room is not cleared",
    "commit_ignores_accepted": "only pending tokens come in",
    "commit_of_first_row": "all rows accept what the first row accepts",
    "commit_moves_cursors": "commit clears the window",
    "commit_of_nothing_decays": "a row that accepts nothing decays once",
    "layers_share_slopes": "all layers decay by the slopes of layer 0",
    "layers_share_window": "all layers take the tokens of layer 0",
    "last_layer_forgotten": "the last layer is left as it is",
    "counts_unlimited": "counts beyond the room or below zero are taken as they are",
    "cursors_unlimited": "a length beyond the window is taken as it is",
    "states_truncated": "a 16-bit state is stored by dropping bits",
    "pending_states_rounded": "each pending token rounds the state to 16 bits",
}


class WrongWindowBackend(WrongBackend):
    """A plain loop over rows with one fault."""

    def __init__(self, fault: str, **limits: Any) -> None:
        super().__init__("right")
        self.name = fault if fault in RIGHT else f"wrong_{fault}"
        self.window_fault = fault
        self.capabilities = Capabilities(**{"ops": ("decode", *WINDOW_OPS), "device_types": ("cpu", "cuda"), **limits})

    def refusal(self, problem: Any) -> str | None:
        if isinstance(problem, WindowProblem):
            return self.capabilities.window_refusal(problem)
        return self.capabilities.decode_refusal(problem)

    def decode_window(
        self,
        problem: WindowProblem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        window: KVWindow,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        scale, N, H = self._scale(softmax_scale), problem.N, problem.H
        for b, slot in self._rows(problem, s_offsets, out):
            ring = self._ring(b, slot, s_offsets, problem.P)
            places = self._places(window, ring, N)
            rows = s[slot * H : (slot + 1) * H]
            value = self._value(rows, window, ring, places, decay_scales)
            new = self._after(value, k[b], v[b], decay_scales)
            self._output(out[b], new, q[b], scale)
            full = len(places) >= N
            if full and self.window_fault != "fold_forgotten":
                self._keep(rows, new)
            if not full or self.window_fault == "full_window_written":
                self._write(window, ring, len(places), N, k[b], v[b])
        self._write_of_padding(problem, window, k, v, s_offsets)

    def verify(
        self,
        problem: WindowProblem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        window: KVWindow,
        draft_lengths: torch.Tensor | None,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        scale, fault, N, H, T = self._scale(softmax_scale), self.window_fault, problem.N, problem.H, problem.T
        for b, slot in self._rows(problem, s_offsets, out):
            ring = self._ring(b, slot, s_offsets, problem.P)
            places = self._places(window, ring, N)
            drafts = T if draft_lengths is None or fault == "draft_lengths_ignored" else int(draft_lengths[b])
            drafts = drafts if fault == "counts_unlimited" else min(max(drafts, 0), T)
            if fault != "outputs_behind_unwritten":
                out[b].zero_()
            if len(places) + drafts > N and fault != "no_room_is_written":
                out[b, :drafts] = 0 if fault == "no_room_is_zero" else torch.nan
                continue
            rows = s[slot * H : (slot + 1) * H]
            start = value = self._value(rows, window, ring, places, decay_scales)
            if fault == "drafts_masked_by_zero":
                start = value = value + 0 * v[b].float().sum() * k[b].float().sum()
            values = []
            for t in range(drafts):
                value = self._after(start if fault == "drafts_invisible" else value, k[b, t], v[b, t], decay_scales)
                values.append(value)
                self._write(window, ring, len(places) + t, N, k[b, t], v[b, t])
            for t in range(drafts):
                seen = min(t + 1, drafts - 1) if fault == "drafts_visible_backwards" else t
                self._output(out[b, t], values[seen], q[b, t], scale)
            if fault == "verify_writes_s":
                rows.copy_(value)
            if fault == "verify_moves_cursors":
                window.length[ring] += drafts
        self._write_of_padding(problem, window, k[:, 0], v[:, 0], s_offsets)

    def commit(
        self,
        problem: WindowProblem,
        window: KVWindow,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        accepted: torch.Tensor | int,
        room: int | None,
    ) -> None:
        fault, N, H = self.window_fault, problem.N, problem.H
        stacked = window.k.ndim == 5
        for layer in range(problem.L - (fault == "last_layer_forgotten" and stacked)):
            its_window = window.layer(0 if fault == "layers_share_window" else layer) if stacked else window
            pool = s[layer] if stacked else s
            slopes = decay_scales[0 if fault == "layers_share_slopes" else layer] if stacked else decay_scales
            for b, slot in self._rows(problem, s_offsets, None):
                ring = self._ring(b, slot, s_offsets, problem.P)
                pending = len(self._places(its_window, ring, N))
                drafts = 0 if fault == "commit_ignores_accepted" else self._count(accepted, b, N - pending)
                fold = isinstance(accepted, int) and accepted == 0
                if not self._lacks_room(pending, drafts, room, N, fault == "fold_ignores_room", not fold):
                    continue
                rows = pool[slot * H : (slot + 1) * H]
                if pending + drafts:
                    places = self._places(its_window, ring, N, drafts)
                    self._keep(rows, self._value(rows, its_window, ring, places, slopes))
                elif fault == "commit_of_nothing_decays":
                    rows.copy_(rows.float() * torch.exp(-slopes)[:, None, None])
                if fault == "commit_moves_cursors":
                    window.length[ring] = 0

    def advance(
        self,
        problem: WindowProblem,
        window: KVWindow,
        s_offsets: torch.Tensor,
        accepted: torch.Tensor | int,
        room: int | None,
        clear: bool,
    ) -> None:
        fault, N = self.window_fault, problem.N
        if fault == "rejected_tokens_kept" and isinstance(accepted, torch.Tensor):
            live = (s_offsets >= 0) & (s_offsets < problem.P)
            accepted = int(accepted[live].max()) if bool(live.any()) else 0
        if fault == "advance_moves_padding" and bool((s_offsets < 0).any()) and problem.P:
            window.length[-1] = (window.length[-1] + 1) % (N + 1)
        for b, slot in self._rows(problem, s_offsets, None):
            slot = b if fault == "advance_of_the_row" and b < problem.P else slot
            length = int(window.length[slot])
            pending = length if fault == "cursors_unlimited" else min(max(length, 0), N)
            more = 0 if clear else self._count(accepted, b, N - pending)
            asked = clear or (room is not None and fault != "advance_ignores_room")
            if asked and self._lacks_room(pending, more, room, N, clear and fault == "clear_ignores_room", not clear):
                if fault != "clear_keeps_start":
                    window.start[slot] = (window.start[slot] + pending + more) % N
                window.length[slot] = 0
            elif clear:
                continue
            elif pending == N:
                taken = self._count(accepted, b, 1) > 0 or fault == "idle_row_loses_its_window"
                window.length[slot] = 0 if taken and fault != "full_window_stays_full" else N
            else:
                window.length[slot] = pending + more + (fault == "cursor_off_by_one")

    def _write_of_padding(
        self, problem: WindowProblem, window: KVWindow, k: torch.Tensor, v: torch.Tensor, s_offsets: torch.Tensor
    ) -> None:
        """Take the first padding row for one of a real slot; k [B, G, K], v [B, H, V]."""
        if self.window_fault.startswith("padding_writes") and problem.P and bool((s_offsets < 0).any()):
            slot = 0 if self.window_fault.endswith("slot_0") else problem.P - 1
            b = int((s_offsets < 0).int().argmax())
            self._write(window, slot, int(window.length[slot]), problem.N, k[b], v[b])

    def _scale(self, scale: float) -> float:
        if self.window_fault == "scale_of_first_call":
            self.first_scale = scale if self.first_scale is None else self.first_scale
            return self.first_scale
        return scale

    def _rows(self, problem: WindowProblem, s_offsets: torch.Tensor, out: torch.Tensor | None) -> list[tuple[int, int]]:
        """Live rows with their slots; clears the outputs of the others."""
        fault, slots, live = self.window_fault, problem.P, []
        for b, offset in enumerate(s_offsets.tolist()):
            if fault == "offsets_modulo_pool" and offset >= slots > 0:
                offset %= slots
            if 0 <= offset < slots:
                live.append((b, offset))
            elif out is not None and fault != "padding_outputs_unwritten":
                out[b].zero_()
        return live

    def _ring(self, b: int, slot: int, s_offsets: torch.Tensor, slots: int) -> int:
        """The slot whose window a row uses."""
        if self.window_fault == "window_of_the_row":
            return b % slots
        if self.window_fault == "window_of_slot_0":
            return max(int(s_offsets[0]), 0)
        return slot

    def _places(self, window: KVWindow, slot: int, N: int, drafts: int = 0) -> list[int]:
        start, length = int(window.start[slot]), int(window.length[slot])
        if self.window_fault == "start_ignored":
            start = 0
        # Even what is unlimited must fit into this machine.
        length = min(length, 4 * N) if self.window_fault == "cursors_unlimited" else min(max(length, 0), N)
        places = [start % N + i for i in range(length + drafts)]
        return [min(p, N - 1) if self.window_fault == "wrap_forgotten" else p % N for p in places]

    def _value(
        self, rows: torch.Tensor, window: KVWindow, slot: int, places: list[int], slopes: torch.Tensor
    ) -> torch.Tensor:
        """States [H, V, K] in float32 with the tokens at `places` brought in."""
        fault = self.window_fault
        value = rows.float()
        if fault == "pending_tokens_ignored":
            return value
        if fault == "pending_order_reversed":
            places = places[::-1]
        if fault == "pending_masked_by_zero":
            for place in range(window.k.shape[1]):
                value = value + 0 * (window.k[slot, place].float().sum() + window.v[slot, place].float().sum())
        if fault in ("right_window_by_powers", "inverse_decay"):
            return self._by_powers(value, window, slot, places, slopes)
        before = value
        alpha = torch.exp(-slopes)[:, None, None]
        for place in places:
            value = self._after(value, self._k(window.k[slot, place], rows.shape[0]), window.v[slot, place], slopes)
            if fault == "pending_states_rounded":
                value = value.bfloat16().float()
        if fault == "decay_power_one_more" and places:
            value = value * alpha
        if fault == "decay_power_one_less" and len(places) > 1:
            # The last token has no decay to lose: all before it have one less.
            last = self._after(torch.zeros_like(value), window.k[slot, places[-1]], window.v[slot, places[-1]], slopes)
            value = (value - last) / alpha.clamp_min(1e-30) + last
        if fault == "state_ages_by_one" and len(places) > 1:
            value = value + alpha * before - alpha ** len(places) * before
        return value

    def _by_powers(
        self, value: torch.Tensor, window: KVWindow, slot: int, places: list[int], slopes: torch.Tensor
    ) -> torch.Tensor:
        n = len(places)
        if not n:
            return value
        ages = torch.arange(n - 1, -1, -1, device=slopes.device)
        powers = torch.exp(-slopes[:, None] * ages)  # [H, n]
        if self.window_fault == "inverse_decay":
            powers = torch.exp(slopes[:, None] * (n - ages)) * torch.exp(-slopes[:, None] * n)
        keys = torch.stack([self._k(window.k[slot, place], value.shape[0]) for place in places]).float()
        values = torch.stack([window.v[slot, place] for place in places]).float()
        keys = keys.repeat_interleave(value.shape[0] // keys.shape[1], 1)
        tokens = (powers.t()[:, :, None, None] * values[:, :, :, None] * keys[:, :, None, :]).sum(0)
        return torch.exp(-slopes * n)[:, None, None] * value + tokens

    def _k(self, k: torch.Tensor, H: int) -> torch.Tensor:
        if self.window_fault == "window_heads_of_group":
            return k[torch.arange(H, device=k.device) % k.shape[0]]
        return k

    @staticmethod
    def _after(value: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        k = k.float().repeat_interleave(value.shape[0] // k.shape[0], 0)
        return torch.exp(-slopes)[:, None, None] * value + v.float()[:, :, None] * k[:, None, :]

    @staticmethod
    def _output(out: torch.Tensor, value: torch.Tensor, q: torch.Tensor, scale: float) -> None:
        q = q.float().repeat_interleave(value.shape[0] // q.shape[0], 0)
        out.copy_((value * q[:, None, :]).sum(2) * scale)

    def _keep(self, rows: torch.Tensor, value: torch.Tensor) -> None:
        if self.window_fault == "states_truncated" and rows.dtype is torch.bfloat16:
            value = (value.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32)
        rows.copy_(value)

    def _write(self, window: KVWindow, slot: int, n: int, N: int, k: torch.Tensor, v: torch.Tensor) -> None:
        fault = self.window_fault
        if fault == "window_rounded_to_bf16":
            k, v = k.bfloat16(), v.bfloat16()
        start = 0 if fault == "start_ignored" else int(window.start[slot])
        place = start + n + (fault == "token_place_off_by_one")
        place = min(place, N - 1) if fault == "wrap_forgotten" else place % N
        window.k[slot, place], window.v[slot, place] = k, v

    def _count(self, counts: torch.Tensor | int, b: int, most: int) -> int:
        if isinstance(counts, torch.Tensor):
            counts = int(counts[0 if self.window_fault == "commit_of_first_row" else b])
        return min(counts, most + 64) if self.window_fault == "counts_unlimited" else min(max(counts, 0), most)

    def _lacks_room(
        self, pending: int, more: int, room: int | None, N: int, ignored: bool, counts_accepted: bool
    ) -> bool:
        if room is None or ignored:
            return True
        more = 0 if self.window_fault == "room_of_pending_alone" else more
        strict = self.window_fault == ("room_off_by_one_with_accepted" if counts_accepted else "room_off_by_one")
        return pending + more + room + strict > N


_all = [WrongWindowBackend(fault) for fault in FAULTS]
_all += [WrongWindowBackend(name, **limits) for name, limits in RIGHT.items()]
backends = {backend.name: backend for backend in _all}


def __getattr__(name: str) -> WrongWindowBackend:
    """`wrong_window_backends:wrong_fold_forgotten` and its like, for entry points."""
    if name not in backends:
        raise AttributeError(name)
    return backends[name]
