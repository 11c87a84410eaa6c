"""Batch, pool, strides, offsets and scale are run-time values: a first call with special ones leaves no trace."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import pytest
import torch

from la_core.conformance.compare import same_bits
from la_core.conformance.decode_cases import NON_IDENTITY, DecodeCase
from la_core.conformance.target import Target


@pytest.mark.parametrize("order", list(itertools.permutations((1.0, 0.5, 0.0, None))), ids=str)
def test_scales_in_every_order(target: Target, order: tuple[float | None, ...]) -> None:
    for scale in order:
        target.assert_conforms(replace(NON_IDENTITY, softmax_scale=scale))


def test_scale_zero_still_updates_the_state(target: Target) -> None:
    zero, one = (target.inputs(replace(NON_IDENTITY, softmax_scale=scale)) for scale in (0.0, 1.0))
    out = target.decode(zero)
    target.decode(one)
    assert bool((out == 0).all())
    assert same_bits(zero.s, one.s)


@pytest.mark.parametrize("sizes", [(1, 3, 16, 17, 32), (32, 1), (16, 1, 16), (17, 16)], ids=str)
def test_batch_sizes_in_any_order(target: Target, sizes: tuple[int, ...]) -> None:
    for rows in sizes:
        for slots in (rows, 64, 500):
            target.assert_conforms(replace(NON_IDENTITY, B=rows, P=slots, H=1, offsets=None))


def test_strides_of_one_and_of_sixteen(target: Target) -> None:
    """Sizes and strides that a compiler likes to specialise on."""
    for heads, k_size, v_size in ((1, 64, 64), (16, 64, 64), (1, 1, 1), (1, 16, 1)):
        for gap in (0, 1, 15, 16):
            target.assert_conforms(
                replace(NON_IDENTITY, H=heads, K=k_size, V=v_size, pool_gap=gap, out_gap=gap, fused_qkv=True)
            )


def test_two_users_share_a_process_and_a_shape(target: Target) -> None:
    """No state lives outside of the tensors: interleaved users get what each would get alone."""
    cases = [replace(NON_IDENTITY, seed=seed, decays=(0.1 * seed, 0.2, 0.3, 0.4)) for seed in (1, 2)]
    alone = []
    for case in cases:
        inputs = target.inputs(case)
        alone.append([target.decode(inputs).clone() for _ in range(3)])
    users = [target.inputs(case) for case in cases]
    for step in range(3):
        for user, inputs in enumerate(users):
            assert same_bits(target.decode(inputs), alone[user][step])


def test_eight_threads_make_calls_together(target: Target) -> None:
    cases = [DecodeCase(B=n, P=n + 3, H=2, K=64, V=64, seed=n) for n in range(1, 9)]
    expected = []
    for case in cases:
        inputs = target.inputs(case)
        expected.append((target.decode(inputs), inputs.s))
    got: list[tuple[torch.Tensor, torch.Tensor] | BaseException] = [RuntimeError("never ran")] * len(cases)
    start = threading.Barrier(len(cases))

    def work(n: int) -> None:
        try:
            inputs = target.inputs(cases[n])
            start.wait()
            for _ in range(20):
                inputs = target.inputs(cases[n])
                out = target.decode(inputs)
            if target.device == "cuda":
                torch.cuda.synchronize()
            got[n] = (out, inputs.s)
        except BaseException as reason:  # the main thread reports it
            got[n] = reason

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, (out, s) in zip(got, expected, strict=True):
        assert not isinstance(result, BaseException), result
        assert same_bits(result[0], out)
        assert same_bits(result[1], s)
