"""Batch, pool, phases, draft lengths, layers and scale are run-time values: a first call with special ones leaves no
trace in later ones.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest
import torch

from la_core.conformance.compare import same_bits
from la_core.conformance.window_cases import ADVANCE, CLEAR, COMMIT, DECODE, FOLD, LAYERS, RAGGED, VERIFY, WindowCase
from la_core.conformance.window_target import WindowTarget

SMALL = {"H": 1, "K": 64, "V": 64}


@pytest.mark.parametrize("base", [DECODE, VERIFY], ids=lambda case: case.op)
@pytest.mark.parametrize("order", [(1.0, 0.5, None, 0.0), (0.0, None, 0.5, 1.0)], ids=str)
def test_scales_in_both_orders(windows: WindowTarget, base: WindowCase, order: tuple[float | None, ...]) -> None:
    """A scale baked into a kernel would serve every later call of the shape."""
    for scale in order:
        windows.assert_conforms(windows.fit(replace(base, softmax_scale=scale, **SMALL)))


def test_scale_zero_still_writes_the_token_and_the_state(windows: WindowTarget) -> None:
    for base in (DECODE, VERIFY):
        zero, one = (windows.inputs(replace(base, softmax_scale=scale)) for scale in (0.0, 1.0))
        out = windows.run(zero)
        windows.run(one)
        assert out is not None
        assert bool((out == 0).all())
        assert same_bits(zero.s, one.s)
        assert same_bits(zero.window.k, one.window.k)


@pytest.mark.many
@pytest.mark.parametrize("base", [DECODE, VERIFY, FOLD, COMMIT, ADVANCE, CLEAR], ids=lambda case: case.op)
@pytest.mark.parametrize("sizes", [(1, 3, 16, 17, 32), (17, 16, 1)], ids=str)
def test_batch_and_pool_sizes_in_any_order(windows: WindowTarget, base: WindowCase, sizes: tuple[int, ...]) -> None:
    drawn = replace(base, offsets=None, starts=None, lengths=None, counts=None, counts_dtype=torch.int32, **SMALL)
    for rows in sizes:
        for slots in (rows, 500):
            windows.assert_conforms(windows.fit(replace(drawn, B=rows, P=slots)))


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0)], ids=str)
def test_phases_of_a_window_in_both_orders(windows: WindowTarget, order: tuple[int, ...]) -> None:
    """A batch of empty windows first, or a batch of full ones: neither says anything about the next."""
    for base in (DECODE, FOLD, CLEAR):
        for length in order:
            windows.assert_conforms(windows.fit(replace(base, lengths=(length,) * 4, **SMALL)))


@pytest.mark.parametrize("order", [(1, 2, 3, 4, 8), (8, 4, 3, 2, 1)], ids=str)
def test_draft_lengths_and_drafts_in_both_orders(windows: WindowTarget, order: tuple[int, ...]) -> None:
    for T in order:
        for counts in (None, (T,) * 4, (1, T, 0, T)):
            case = replace(VERIFY, T=T, lengths=(0,) * 4, counts=counts, **SMALL)
            windows.assert_conforms(windows.fit(case))


@pytest.mark.parametrize("order", [(1, 2, 5), (5, 1)], ids=str)
def test_layers_in_both_orders(windows: WindowTarget, order: tuple[int, ...]) -> None:
    for layers in order:
        windows.assert_conforms(windows.fit(replace(LAYERS, L=layers, **SMALL)))
    windows.assert_conforms(windows.fit(replace(COMMIT, **SMALL)))


def test_accepted_as_number_and_as_tensor_in_any_order(windows: WindowTarget) -> None:
    for base, counts in itertools.permutations(
        [(ADVANCE, 1), (ADVANCE, (1, 2, 0, 3)), (COMMIT, 2), (COMMIT, (1, 2, 0, 3))], 2
    ):
        for one in (base, counts):
            case = replace(one[0], lengths=(0, 2, 1, 3), counts=one[1], **SMALL)
            windows.assert_conforms(windows.fit(case))


def test_rooms_in_both_orders(windows: WindowTarget) -> None:
    for rooms in ((None, 1, 2, 3, 4), (4, 3, 2, 1, None)):
        for room in rooms:
            for base in (FOLD, CLEAR, COMMIT, LAYERS, ADVANCE):
                windows.assert_conforms(windows.fit(replace(base, room=room, **SMALL)))


def test_strides_of_one_and_of_sixteen(windows: WindowTarget) -> None:
    """Sizes and strides that a compiler likes to specialise on."""
    for heads, k_size, v_size in ((1, 64, 64), (16, 64, 64), (1, 1, 1), (1, 16, 1)):
        for gap in (0, 1, 16):
            gaps = {"pool_gap": gap, "out_gap": gap, "window_gap": gap, "fused_qkv": True}
            for base in (DECODE, RAGGED, COMMIT):
                one = {"B": 1, "P": 2, "offsets": (1,), "H": heads, "K": k_size, "V": v_size}
                cut = {name: getattr(base, name)[:1] for name in ("starts", "lengths", "counts") if getattr(base, name)}
                windows.assert_conforms(replace(base, **one, **cut, **gaps))


def test_two_users_share_a_process_and_a_shape(windows: WindowTarget) -> None:
    """No state lives outside of the tensors: interleaved users get what each would get alone."""
    windows.needs("decode_window", "advance")
    cases = [replace(DECODE, seed=seed, decays=(0.1 * seed,), **SMALL) for seed in (1, 2)]
    alone = []
    for case in cases:
        inputs = windows.inputs(case)
        outs = []
        for _ in range(6):
            out = windows.run(inputs)
            assert out is not None
            outs.append(out.clone())
            windows.advance(inputs.window, inputs.s_offsets)
        alone.append(outs)
    users = [windows.inputs(case) for case in cases]
    for step in range(6):
        for user, inputs in enumerate(users):
            out = windows.run(inputs)
            assert out is not None
            assert same_bits(out, alone[user][step])
            windows.advance(inputs.window, inputs.s_offsets)


def test_eight_threads_make_calls_together(windows: WindowTarget) -> None:
    cases = [replace(base, seed=seed, **SMALL) for seed in (0, 1) for base in (DECODE, RAGGED, COMMIT, LAYERS)]
    expected = [windows.inputs(case) for case in cases]
    outs = [windows.run(inputs) for inputs in expected]
    failures: list[BaseException] = []
    start = threading.Barrier(len(cases))

    def work(n: int) -> None:
        try:
            start.wait()
            for _ in range(3):
                inputs = windows.inputs(cases[n])
                out = windows.run(inputs)
                if windows.device != "cpu":
                    torch.cuda.synchronize()
                theirs = outs[n]
                assert theirs is None or (out is not None and same_bits(out, theirs))
                assert same_bits(inputs.s, expected[n].s)
                assert same_bits(inputs.window.k, expected[n].window.k)
        except BaseException as reason:  # the main thread reports it
            failures.append(reason)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_the_first_call_of_a_kind_is_one_step(windows: WindowTarget) -> None:
    """Dtypes and sizes that no other test has: a kernel that is tried out on its first call would take several."""
    unseen = {"H": 3, "N": 11, "io_dtype": torch.float16, "window_dtype": torch.float32, "decays": (0.3, 0.2, 0.1)}
    for base in (DECODE, RAGGED, COMMIT, LAYERS):
        case = replace(base, **unseen, offsets_dtype=torch.int64, state_dtype=torch.float16)  # type: ignore[arg-type]
        windows.assert_conforms(windows.fit(replace(case, starts=(10, 6, 3, 5))))
