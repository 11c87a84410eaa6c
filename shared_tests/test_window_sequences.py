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
from la_core.conformance.window_cases import DECODE, VERIFY, WindowCase
from la_core.conformance.window_judge import judged
from la_core.conformance.window_target import WindowTarget
from la_core.conformance.window_truth import TrueValue, pending_places, value_of_slot
from la_core.spec.errors import SpecViolation
from la_core.spec.kv_window import KVWindow

P, H, G, LAYERS = 4, 2, 1, 2
SMALL = replace(VERIFY, B=1, P=P, H=H, G=G, K=16, V=32, io_dtype=torch.float32, offsets=(0,), starts=(0,), lengths=(0,))
KINDS = (
    SMALL,
    replace(SMALL, io_dtype=torch.bfloat16),
    replace(SMALL, io_dtype=torch.float16),
    replace(SMALL, io_dtype=torch.bfloat16, window_dtype=torch.float32),
)
"""Dtypes of tokens and windows."""
MOST = 16
"""The most places and drafts."""
Rows = list[int]
Seen = list[TrueValue | None]
"""The states that each query of a row reads; None where there was no room."""


class Engine:
    """A serving engine with a few layers over one set of cursors, and what each request's states must be.

    Every operator is called for all layers, as in a model. States are float32 and a window holds its tokens exactly, so
    that arithmetic is judged, and the one rounding of an output.
    """

    def __init__(self, windows: WindowTarget, N: int, layout: str, seed: int, kind: WindowCase = SMALL) -> None:
        case = windows.fit(replace(kind, state_layout=layout))  # type: ignore[arg-type]
        self.windows, self.N, self.K, self.V, self.io_dtype = windows, N, case.K, case.V, case.io_dtype
        self.random = torch.Generator().manual_seed(seed)
        pool = self._draw(LAYERS, P * H, self.V, self.K)
        self.s = pool if layout == "vk" else pool.mT.contiguous().mT
        self.slopes = torch.stack([torch.tensor([0.05, 0.7]), torch.tensor([0.0, 3.0])]).to(windows.device)
        dtype = case.window_dtype or case.io_dtype
        self.window = KVWindow.allocate(
            P=P, N=N, H=H, G=G, K=self.K, V=self.V, layers=LAYERS, dtype=dtype, device=windows.device
        )
        self.window.k.fill_(torch.nan)
        self.window.v.fill_(torch.nan)
        self.true = [[self._stored(layer, slot) for slot in range(P)] for layer in range(LAYERS)]
        self.stores = [0] * P
        self.pending = [0] * P

    def fill(self) -> None:
        """As after some steps: every ring starts somewhere, and any number of its tokens is pending."""
        self.pending = torch.randint(0, self.N + 1, (P,), generator=self.random).tolist()
        self.window.start.copy_(torch.randint(0, self.N, (P,), generator=self.random))
        self.window.length.copy_(torch.tensor(self.pending))
        for layer in range(LAYERS):
            window = self.window.layer(layer)
            for slot, count in enumerate(self.pending):
                _, k, v = self._tokens(1, count)
                for i, place in enumerate(pending_places(window, slot)):
                    window.k[slot, place], window.v[slot, place] = k[0, i], v[0, i]
                self._bring_in(layer, [slot], k, v, [count])

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
            seen: list[Seen] = [[self.true[layer][slot]] if slot >= 0 else [] for slot in rows]
            self._judge(layer, rows, q, out[:, None], seen)
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

    def verify(
        self, rows: Rows, T: int, drafts: list[int] | None, accepted: list[int], ends: str, make_room: bool = True
    ) -> None:
        """Drafts, after room was made for them or not. What follows: `advance`, `commit`, `commit_layers`, or nothing;
        the commits also with room for as many drafts, and then `advance`.

        Rows without room: on a CPU the call is refused and made again with padding in their place; on a GPU they read
        NaN and accept nothing.
        """
        if make_room:
            self.fold(rows, T, one_by_one=True)
        counts = None if drafts is None else torch.tensor(drafts, device=self.windows.device)
        limits = [T] * len(rows) if drafts is None else drafts
        lacking = {slot for slot, n in zip(rows, limits, strict=True) if slot >= 0 and self.pending[slot] + n > self.N}
        if lacking and self.windows.device == "cpu":
            arguments = (self.s[0], self._offsets(rows), self.slopes[0], self.window.layer(0))
            with pytest.raises(SpecViolation, match="room"):
                self.windows.verify(*self._tokens(len(rows), T), *arguments, draft_lengths=counts)
            rows, lacking = [-9 - slot if slot in lacking else slot for slot in rows], set()
        offsets = self._offsets(rows)
        taken = [
            0 if slot in lacking else min(count, limit)
            for slot, count, limit in zip(rows, accepted, limits, strict=True)
        ]
        for layer in range(LAYERS):
            q, k, v = self._tokens(len(rows), T)
            for b, limit in enumerate(limits):
                for tensor in (q, k, v):
                    tensor[b, limit:] = torch.nan
            arguments = (self.s[layer], offsets, self.slopes[layer], self.window.layer(layer))
            out = self.windows.verify(q, k, v, *arguments, draft_lengths=counts)
            seen: list[Seen] = [
                [None] * limit if slot in lacking else [*self._after_each(layer, slot, k[b, :limit], v[b, :limit])]
                for b, (slot, limit) in enumerate(zip(rows, limits, strict=True))
            ]
            self._judge(layer, rows, q, out, seen)
            if ends != "nothing":
                self._bring_in(layer, rows, k, v, taken)
        if ends == "advance":
            self.windows.advance(self.window, offsets, torch.tensor(taken, device=self.windows.device))
            for slot, count in zip(rows, taken, strict=True):
                if slot >= 0:
                    self.pending[slot] += count
        elif ends != "nothing":
            room = T if ends.endswith("with room") else None
            self._commit(rows, taken, in_one_launch=ends.startswith("commit_layers"), room=room)

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

    def _commit(self, rows: Rows, accepted: list[int], in_one_launch: bool, room: int | None) -> None:
        """Bring pending tokens and accepted drafts in and clear; with `room` only where there is less, and advance."""
        offsets, counts = self._offsets(rows), torch.tensor(accepted, device=self.windows.device)
        if in_one_launch:
            self.windows.commit_layers(self.window, self.s, offsets, self.slopes, counts, room=room)
        else:
            for layer in range(LAYERS):
                pool = (self.s[layer], offsets, self.slopes[layer])
                self.windows.commit(self.window.layer(layer), *pool, counts, room=room)
        if room is None:
            self.windows.clear(self.window, offsets)
        else:
            self.windows.advance(self.window, offsets, counts, room=room)
        for slot, count in zip(rows, accepted, strict=True):
            if slot >= 0 and (room is None or self.pending[slot] + count + room > self.N):
                self._stored_once_more([slot])
                self.pending[slot] = 0
            elif slot >= 0:
                self.pending[slot] += count

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

    def _judge(self, layer: int, rows: Rows, q: torch.Tensor, out: torch.Tensor, seen: list[Seen]) -> None:
        """Output t of each row is what its query reads from `seen`, NaN for None; all others are zero."""
        judged_rows = []
        for b, slot in enumerate(rows):
            for t in range(out.shape[1]):
                where = f"row {b}, token {t}"
                if slot < 0 or t >= len(seen[b]):
                    assert not bool(out[b, t].any()), f"out of {where} must be zero"
                    continue
                states = seen[b][t]
                if states is None:
                    assert bool(out[b, t].isnan().all()), f"out of {where} must be NaN, as the window has no room"
                    continue
                true = states.output(q[b, t], self.K**-0.5)
                tolerance = window_out_tolerance(out.dtype, self.K, self.slopes[layer], true.tokens, self.stores[slot])
                judged_rows.append(judged(where, out[b, t], true, tolerance))
        assert not list(value_errors("out", judged_rows))

    def _tokens(self, B: int, T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shapes = ((B, T, G, self.K), (B, T, G, self.K), (B, T, H, self.V))
        q, k, v = (self._draw(*shape).to(self.io_dtype) for shape in shapes)
        return q, k, v

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
counts_of_rows = st.lists(st.integers(0, MOST), min_size=P, max_size=P)


ENDS = ("advance", "advance", "commit", "commit with room", "commit_layers", "commit_layers with room", "nothing")


class Interleavings(RuleBasedStateMachine):
    """What an engine may do, in any order."""

    windows: WindowTarget
    kinds: tuple[WindowCase, ...]
    places: tuple[int, int]

    @initialize(
        more=st.integers(0, 1),
        layout=st.sampled_from(("vk", "kv")),
        seed=st.integers(0, 999),
        kind=st.integers(0, len(KINDS) - 1),
        empty=st.booleans(),
    )
    def start(self, more: int, layout: str, seed: int, kind: int, empty: bool) -> None:
        self.engine = Engine(self.windows, self.places[more], layout, seed, self.kinds[kind % len(self.kinds)])
        if not empty:
            self.engine.fill()

    @rule(rows=rows_of_a_step)
    def decode(self, rows: Rows) -> None:
        self.engine.decode(rows, recurrent=False)

    @rule(rows=rows_of_a_step)
    def decode_without_a_window(self, rows: Rows) -> None:
        self.engine.decode([slot if slot < 0 or not self.engine.pending[slot] else -9 - slot for slot in rows], True)

    @rule(
        rows=rows_of_a_step,
        T=st.integers(0, MOST - 1),
        drafts=st.one_of(st.none(), counts_of_rows),
        accepted=counts_of_rows,
        ends=st.sampled_from(ENDS),
        make_room=st.booleans(),
    )
    def verify(
        self, rows: Rows, T: int, drafts: list[int] | None, accepted: list[int], ends: str, make_room: bool
    ) -> None:
        T = 1 + T % self.engine.N
        ragged = None if drafts is None else [n % (T + 1) for n in drafts[: len(rows)]]
        self.engine.verify(rows, T, ragged, accepted[: len(rows)], ends, make_room)

    @rule(rows=rows_of_a_step, one_by_one=st.booleans(), room=st.one_of(st.none(), st.integers(0, MOST - 1)))
    def fold(self, rows: Rows, one_by_one: bool, room: int | None) -> None:
        self.engine.fold(rows, None if room is None else 1 + room % self.engine.N, one_by_one)

    @rule(slot=st.integers(0, P - 1))
    def another_request_joins(self, slot: int) -> None:
        self.engine.join(slot)

    @invariant()
    def values_are_those_of_the_recurrence(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()


@pytest.mark.parametrize("places", [(1, 4), (3, 7), (8, 15), (12, MOST)], ids=str)
def test_any_interleaving_equals_the_recurrence(
    windows: WindowTarget, places: tuple[int, int], pytestconfig: pytest.Config
) -> None:
    windows.needs("decode_window", "verify", "commit", "advance")
    kinds = tuple(kind for kind in KINDS if not windows.refuses(windows.fit(kind)))
    assert kinds, "a backend with windows runs some dtype"
    machine = type("Machine", (Interleavings,), {"windows": windows, "kinds": kinds, "places": places})
    # A run of the machine makes some 100 calls, where any other random test makes one; a GPU has the time for more.
    runs = settings.default.max_examples if windows.device == "cuda" else settings.default.max_examples // 3
    runs = max(runs // pytestconfig.getoption("--sample"), 1)
    run_state_machine_as_test(machine, settings=settings(max_examples=runs, stateful_step_count=20))


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
