"""Any interleaving of the operators over many steps equals the recurrence, request by request, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from la_core.conformance.compare import value_errors
from la_core.conformance.tolerances import window_out_tolerance, window_state_tolerance
from la_core.conformance.window_cases import DECODE, VERIFY
from la_core.conformance.window_judge import judged
from la_core.conformance.window_target import WindowTarget
from la_core.conformance.window_truth import TrueValue, value_of_slot
from la_core.spec.kv_window import KVWindow

P, H, G, LAYERS = 4, 2, 1, 2
SMALL = replace(VERIFY, B=1, P=P, H=H, G=G, K=16, V=32, io_dtype=torch.float32, offsets=(0,), starts=(0,), lengths=(0,))
Rows = list[int]


class Engine:
    """A serving engine with a few layers over one set of cursors, and what each request's states must be.

    Every operator is called for all layers, as in a model. All numbers are float32, so that only arithmetic is judged.
    """

    def __init__(self, windows: WindowTarget, N: int, layout: str, seed: int) -> None:
        case = windows.fit(replace(SMALL, state_layout=layout))  # type: ignore[arg-type]
        self.windows, self.N, self.K, self.V = windows, N, case.K, case.V
        self.random = torch.Generator().manual_seed(seed)
        pool = self._draw(LAYERS, P * H, self.V, self.K)
        self.s = pool if layout == "vk" else pool.mT.contiguous().mT
        self.slopes = torch.stack([torch.tensor([0.05, 0.7]), torch.tensor([0.0, 3.0])]).to(windows.device)
        self.window = KVWindow.allocate(
            P=P, N=N, H=H, G=G, K=self.K, V=self.V, layers=LAYERS, dtype=torch.float32, device=windows.device
        )
        self.window.k.fill_(torch.nan)
        self.window.v.fill_(torch.nan)
        self.true = [[self._stored(layer, slot) for slot in range(P)] for layer in range(LAYERS)]
        self.stores = [0] * P
        self.pending = [0] * P

    def join(self, slot: int) -> None:
        """Another request gets the slot: its state is set and its window cleared."""
        self.windows.clear(self.window, self._offsets([slot]))
        for layer in range(LAYERS):
            self.s[layer, slot * H : (slot + 1) * H] = self._draw(H, self.V, self.K)
            self.true[layer][slot] = self._stored(layer, slot)
        self.stores[slot] = self.pending[slot] = 0

    def decode(self, rows: Rows, recurrent: bool) -> None:
        """A step of one token; without a window only where nothing is pending."""
        for layer in range(LAYERS):
            q, k, v = self._tokens(len(rows), 1)
            arguments = (q[:, 0], k[:, 0], v[:, 0], self.s[layer], self._offsets(rows), self.slopes[layer])
            out = self.windows.decode(*arguments, window=None if recurrent else self.window.layer(layer))
            self._bring_in(layer, rows, k, v, [1] * len(rows))
            self._judge(layer, rows, q, out[:, None], [[self.true[layer][slot]] if slot >= 0 else [] for slot in rows])
        if recurrent:
            self._stored_once_more([slot for slot in rows if slot >= 0])
        else:
            self.windows.advance(self.window, self._offsets(rows))
            for slot in rows:
                if slot >= 0 and self.pending[slot] == self.N:
                    self._stored_once_more([slot])
                    self.pending[slot] = 0
                elif slot >= 0:
                    self.pending[slot] += 1

    def verify(self, rows: Rows, T: int, drafts: list[int] | None, accepted: list[int], ends: str) -> None:
        """Drafts, after room was made for them. What follows: `advance`, `commit`, `commit_layers`, or nothing."""
        self.fold(rows, T, one_by_one=True)
        offsets = self._offsets(rows)
        counts = None if drafts is None else torch.tensor(drafts, device=self.windows.device)
        limits = [T] * len(rows) if drafts is None else drafts
        taken = [min(a, limit) for a, limit in zip(accepted, limits, strict=True)]
        for layer in range(LAYERS):
            q, k, v = self._tokens(len(rows), T)
            for b, limit in enumerate(limits):
                for tensor in (q, k, v):
                    tensor[b, limit:] = torch.nan
            arguments = (q, k, v, self.s[layer], offsets, self.slopes[layer], self.window.layer(layer))
            out = self.windows.verify(*arguments, draft_lengths=counts)
            seen = [
                self._after_each(layer, slot, k[b, :n], v[b, :n])
                for b, (slot, n) in enumerate(zip(rows, limits, strict=True))
            ]
            self._judge(layer, rows, q, out, seen)
            if ends != "nothing":
                self._bring_in(layer, rows, k, v, taken)
        if ends == "advance":
            self.windows.advance(self.window, offsets, torch.tensor(taken, device=self.windows.device))
            for slot, count in zip(rows, taken, strict=True):
                if slot >= 0 and self.pending[slot] < self.N:
                    self.pending[slot] += count
                elif slot >= 0:
                    raise AssertionError("a window that had room is not full")
        elif ends != "nothing":
            self._commit(rows, taken, in_one_launch=ends == "commit_layers")

    def fold(self, rows: Rows, room: int | None, one_by_one: bool) -> None:
        """Bring pending tokens in and clear, of rows that lack room only if `room` is given."""
        offsets = self._offsets(rows)
        if one_by_one or room is not None:
            for layer in range(LAYERS):
                pool = (self.s[layer], offsets, self.slopes[layer])
                self.windows.fold(self.window.layer(layer), *pool, room=room)
        else:
            self.windows.commit_layers(self.window, self.s, offsets, self.slopes, 0)
        self.windows.clear(self.window, offsets, room=room)
        lacking = [slot for slot in rows if slot >= 0 and (room is None or self.pending[slot] + room > self.N)]
        self._stored_once_more(lacking)
        for slot in lacking:
            self.pending[slot] = 0

    def check(self) -> None:
        """The pending tokens are as many as they should be, and every slot's value is that of its request."""
        assert self.window.length.tolist() == self.pending
        for layer in range(LAYERS):
            for slot in range(P):
                value = value_of_slot(self.window.layer(layer), self.s[layer], slot, self.slopes[layer])
                true = self.true[layer][slot]
                tolerance = window_state_tolerance(torch.float32, self.slopes[layer], true.tokens, self.stores[slot])
                row = judged(f"slot {slot} of layer {layer}", value.value, true, tolerance)
                assert not list(value_errors("value", [row]))

    def _commit(self, rows: Rows, accepted: list[int], in_one_launch: bool) -> None:
        offsets, counts = self._offsets(rows), torch.tensor(accepted, device=self.windows.device)
        if in_one_launch:
            self.windows.commit_layers(self.window, self.s, offsets, self.slopes, counts)
        else:
            for layer in range(LAYERS):
                self.windows.commit(self.window.layer(layer), self.s[layer], offsets, self.slopes[layer], counts)
        self.windows.clear(self.window, offsets)
        self._stored_once_more([slot for slot in rows if slot >= 0])
        for slot in rows:
            if slot >= 0:
                self.pending[slot] = 0

    def _bring_in(self, layer: int, rows: Rows, k: torch.Tensor, v: torch.Tensor, counts: list[int]) -> None:
        for b, slot in enumerate(rows):
            if slot >= 0:
                after = self._after_each(layer, slot, k[b, : counts[b]], v[b, : counts[b]])
                self.true[layer][slot] = after[-1] if after else self.true[layer][slot]

    def _after_each(self, layer: int, slot: int, k: torch.Tensor, v: torch.Tensor) -> list[TrueValue]:
        """The true states after each of some tokens; nothing for a padding row."""
        values = []
        if slot >= 0:
            true = self.true[layer][slot]
            for t in range(k.shape[0]):
                true = true.after(k[t], v[t], self.slopes[layer])
                values.append(true)
        return values

    def _judge(self, layer: int, rows: Rows, q: torch.Tensor, out: torch.Tensor, seen: list[list[TrueValue]]) -> None:
        """Output t of each row is what its query reads from `seen`; all others are zero."""
        judged_rows = []
        for b, slot in enumerate(rows):
            for t in range(out.shape[1]):
                if slot < 0 or t >= len(seen[b]):
                    assert not bool(out[b, t].any()), f"out of row {b}, token {t} must be zero"
                    continue
                true = seen[b][t].output(q[b, t], self.K**-0.5)
                tolerance = window_out_tolerance(
                    torch.float32, self.K, self.slopes[layer], true.tokens, self.stores[slot]
                )
                judged_rows.append(judged(f"row {b}, token {t}", out[b, t], true, tolerance))
        assert not list(value_errors("out", judged_rows))

    def _tokens(self, B: int, T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._draw(B, T, G, self.K), self._draw(B, T, G, self.K), self._draw(B, T, H, self.V)

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.windows.device)

    def _stored(self, layer: int, slot: int) -> TrueValue:
        return TrueValue.of_states(self.s[layer, slot * H : (slot + 1) * H])

    def _stored_once_more(self, slots: Rows) -> None:
        for slot in slots:
            self.stores[slot] += 1

    def _offsets(self, rows: Rows) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=self.windows.device)


rows_of_a_step = st.lists(st.integers(-2, P - 1), min_size=1, max_size=P, unique=True)
counts_of_rows = st.lists(st.integers(0, 8), min_size=P, max_size=P)


class Interleavings(RuleBasedStateMachine):
    """What an engine may do, in any order."""

    windows: WindowTarget

    @initialize(N=st.sampled_from((1, 3, 4, 8)), layout=st.sampled_from(("vk", "kv")), seed=st.integers(0, 999))
    def start(self, N: int, layout: str, seed: int) -> None:
        self.engine = Engine(self.windows, N, layout, seed)

    @rule(rows=rows_of_a_step)
    def decode(self, rows: Rows) -> None:
        self.engine.decode(rows, recurrent=False)

    @rule(rows=rows_of_a_step)
    def decode_without_a_window(self, rows: Rows) -> None:
        self.engine.decode([slot if slot < 0 or not self.engine.pending[slot] else -9 - slot for slot in rows], True)

    @rule(
        rows=rows_of_a_step,
        T=st.integers(1, 8),
        drafts=st.one_of(st.none(), counts_of_rows),
        accepted=counts_of_rows,
        ends=st.sampled_from(("advance", "advance", "commit", "commit_layers", "nothing")),
    )
    def verify(self, rows: Rows, T: int, drafts: list[int] | None, accepted: list[int], ends: str) -> None:
        T = min(T, self.engine.N)
        ragged = None if drafts is None else [min(n, T) for n in drafts[: len(rows)]]
        self.engine.verify(rows, T, ragged, accepted[: len(rows)], ends)

    @rule(rows=rows_of_a_step, one_by_one=st.booleans(), room=st.one_of(st.none(), st.integers(1, 8)))
    def fold(self, rows: Rows, one_by_one: bool, room: int | None) -> None:
        self.engine.fold(rows, None if room is None else min(room, self.engine.N), one_by_one)

    @rule(slot=st.integers(0, P - 1))
    def another_request_joins(self, slot: int) -> None:
        self.engine.join(slot)

    @invariant()
    def values_are_those_of_the_recurrence(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()


def test_any_interleaving_equals_the_recurrence(windows: WindowTarget) -> None:
    windows.needs("decode_window", "verify", "commit", "advance")
    machine = type("Machine", (Interleavings,), {"windows": windows})
    # A run of the machine makes some 100 calls, where any other random test makes one.
    few = max(settings.default.max_examples // 6, 1)
    run_state_machine_as_test(machine, settings=settings(max_examples=few, stateful_step_count=15))


@pytest.mark.many
@pytest.mark.parametrize("N", [4, 1, 7])
def test_a_slot_lives_through_both_paths_in_turn(windows: WindowTarget, N: int) -> None:
    """20 steps that alternate plain decode and speculation with random accepts: no path loses which state is live."""
    windows.needs("decode_window", "verify", "commit", "advance")
    engine = Engine(windows, N, "vk", seed=N)
    random = torch.Generator().manual_seed(N)
    for step in range(20):
        rows = torch.randperm(P, generator=random).tolist()[: 1 + step % P]
        accepted = torch.randint(0, N + 1, (len(rows),), generator=random).tolist()
        if step % 2:
            engine.verify(rows, min(N, 4), None, accepted, ends=("advance", "commit")[step % 3 == 0])
        else:
            engine.decode(rows, recurrent=False)
        engine.check()
    engine.fold(list(range(P)), None, one_by_one=True)
    engine.decode(list(range(P)), recurrent=True)
    engine.check()


@pytest.mark.many
@pytest.mark.parametrize("N", [4, 1, 8])
def test_a_window_that_is_only_decoded_into(windows: WindowTarget, N: int) -> None:
    """Rows at different phases over more than two periods: every (N + 1)-th token of a slot writes its state."""
    windows.needs("decode_window", "advance")
    engine = Engine(windows, N, "kv", seed=N)
    for step in range(2 * N + 5):
        rows = [slot for slot in range(P) if step >= slot]
        before = engine.s.clone()
        full = {slot for slot in rows if engine.pending[slot] == N}
        engine.decode([*rows, -1], recurrent=False)
        engine.check()
        was, now = (s.unflatten(1, (P, H)) for s in (before, engine.s))
        assert {slot for slot in range(P) if not torch.equal(was[:, slot], now[:, slot])} == full


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_step_over_a_16_bit_pool_is_right_given_the_one_before(
    windows: WindowTarget, state_dtype: torch.dtype
) -> None:
    windows.needs("decode_window", "advance")
    inputs = windows.inputs(replace(DECODE, state_dtype=state_dtype))
    for step in range(11):
        random = torch.Generator().manual_seed(step)
        for tensor in (inputs.q, inputs.k, inputs.v):
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        windows.assert_right(inputs)
        windows.advance(inputs.window, inputs.s_offsets)
