"""The native way of a call, `decode_call.c`, around a kernel of Python: which tensors it lets through, and how."""

from __future__ import annotations

import gc
import platform
import shutil
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from la_cute.prebuilt_kernels import DECODE_CALL

pytest.importorskip("cutlass", reason="not run: the CuTe DSL is not installed")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("gcc") is None,
    reason="not run: native code is linked by gcc, on Linux for x86-64",
)

NAMES = ("q", "k", "v", "s", "s_offsets", "decay_scales", "out")
SLOTS = 7
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`decode_call` of a library that has no kernels."""
    import tvm_ffi

    from la_cute.prebuild import link

    made: Callable[..., Any] = tvm_ffi.load_module(link([], tmp_path_factory.mktemp("library")))[DECODE_CALL]
    return made


class Kernel:
    """Remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(tuple(torch.from_dlpack(a) if hasattr(a, "__dlpack__") else a for a in arguments))


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def memory() -> torch.Tensor:
    """Bytes that begin at a multiple of 256."""
    whole = torch.zeros(1 << 16, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 256 :]


def _tensors(memory: torch.Tensor, **at: int) -> Tensors:
    """Two rows of one head, one behind the other in memory, or where `at` says."""
    shapes = {
        "q": ((2, 1, 64), torch.bfloat16),
        "k": ((2, 1, 64), torch.bfloat16),
        "v": ((2, 1, 64), torch.bfloat16),
        "s": ((SLOTS, 8, 64), torch.float32),
        "s_offsets": ((2,), torch.int32),
        "decay_scales": ((1,), torch.float32),
        "out": ((2, 1, 64), torch.bfloat16),
    }
    made, start = {}, 0
    for name, (shape, dtype) in shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        first = at.get(name, start)
        made[name] = memory[first : first + tensor.nbytes].view(dtype).view(shape)
        start += -(-tensor.nbytes // 256) * 256
    return made


def _call(make: Callable[..., Any], kernel: Any, tensors: Tensors, state_mask: int = 15, io_mask: int = 7) -> Any:
    import tvm_ffi

    extents = [tensors[name].nbytes for name in NAMES]
    return make(tvm_ffi.convert(kernel), SLOTS, state_mask, io_mask, *extents)


def test_a_kernel_gets_its_arguments_in_its_order(
    make: Callable[..., Any], kernel: Kernel, memory: torch.Tensor
) -> None:
    tensors = _tensors(memory)
    function = _call(make, kernel, tensors)
    for scale in (0.5, -2.0):
        assert function(*tensors.values(), scale) is True
    order = ("s_offsets", "s", "decay_scales", "q", "k", "v", "out")
    for (*given, scale, slots), expected in zip(kernel.calls, (0.5, -2.0), strict=True):
        assert (scale, slots) == (expected, SLOTS)
        for tensor, name in zip(given, order, strict=True):
            assert tensor.data_ptr() == tensors[name].data_ptr()
            assert (tensor.shape, tensor.stride(), tensor.dtype) == (
                tensors[name].shape,
                tensors[name].stride(),
                tensors[name].dtype,
            )


@pytest.mark.parametrize(("written", "name"), [(w, n) for w in ("s", "out") for n in NAMES if n != w])
def test_what_is_written_lies_apart(
    make: Callable[..., Any], kernel: Kernel, memory: torch.Tensor, written: str, name: str
) -> None:
    """A tensor that shares a byte of it is not let through, and one that only touches it is."""
    apart = _tensors(memory)
    function = _call(make, kernel, apart, 0, 0)
    start, size, own = 9 << 12, apart[written].nbytes, apart[name].nbytes

    def passes(at: int) -> Any:
        tensors = {**apart, written: memory[start : start + size], name: memory[at : at + own]}
        return function(*tensors.values(), 1.0)

    assert [passes(at) for at in (start + 1 - own, start, start + size - 1)] == [False] * 3
    assert kernel.calls == []
    assert [passes(at) for at in (start - own, start + size)] == [True] * 2
    assert len(kernel.calls) == 2


@pytest.mark.parametrize(("name", "bits"), [("q", 7), ("k", 7), ("v", 7), ("s", 15)])
def test_addresses_are_those_that_the_kernel_can_take(
    make: Callable[..., Any], kernel: Kernel, memory: torch.Tensor, name: str, bits: int
) -> None:
    apart = _tensors(memory)
    function = _call(make, kernel, apart)
    step = apart[name].element_size()
    for shift in range(0, 32, step):
        moved = _tensors(memory, **{name: (1 << 15) + shift})
        assert function(*moved.values(), 1.0) is (shift & bits == 0)
    assert len(kernel.calls) == len(range(0, 32, bits + 1))
    assert _call(make, kernel, apart, 0, 0)(*_tensors(memory, **{name: (1 << 15) + step}).values(), 1.0) is True


def test_other_arguments_are_not_let_through(make: Callable[..., Any], kernel: Kernel, memory: torch.Tensor) -> None:
    tensors = _tensors(memory)
    function = _call(make, kernel, tensors)
    given = list(tensors.values())
    for n in range(len(given)):
        for other in (None, 3, "q"):
            assert function(*given[:n], other, *given[n + 1 :], 1.0) is False
    assert function(*given, 1) is False
    assert function(*given) is False
    assert kernel.calls == []


def test_what_a_kernel_raises_is_raised(make: Callable[..., Any], memory: torch.Tensor) -> None:
    def kernel(*arguments: Any) -> None:
        raise ValueError("no such launch")

    tensors = _tensors(memory)
    with pytest.raises(ValueError, match="no such launch"):
        _call(make, kernel, tensors)(*tensors.values(), 1.0)


@pytest.mark.parametrize("arguments", [(), (1, 2, 3), ("kernel", *range(10))])
def test_what_makes_calls_refuses_other_facts(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"^decode_call takes a kernel and ten whole numbers$"):
        make(*arguments)


@pytest.mark.parametrize("wrong", range(10))
def test_what_makes_calls_takes_whole_numbers(make: Callable[..., Any], kernel: Kernel, wrong: int) -> None:
    import tvm_ffi

    for other in (1.0, None, "1"):
        numbers = [other if n == wrong else 1 for n in range(10)]
        with pytest.raises(TypeError, match="ten whole numbers"):
            make(tvm_ffi.convert(kernel), *numbers)


def test_a_kernel_is_kept_as_long_as_its_call(make: Callable[..., Any], memory: torch.Tensor) -> None:
    kernel, tensors = Kernel(), _tensors(memory)
    alive = weakref.ref(kernel)
    function = _call(make, kernel, tensors)
    del kernel
    gc.collect()
    assert alive() is not None
    assert function(*tensors.values(), 1.0) is True
    del function
    gc.collect()
    assert alive() is None
