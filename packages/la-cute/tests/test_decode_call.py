"""The native way of a call, `decode_call.c`, around a kernel of Python: which tensors it lets through, and how."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from native_code import linked

from la_cute import prebuild
from la_cute.prebuilt_kernels import DECODE_CALL, load_decode_call

pytest.importorskip("cutlass", reason="not run: the CuTe DSL is not installed")
pytestmark = linked

NAMES = ("q", "k", "v", "s", "s_offsets", "decay_scales", "out")
SLOTS = 7
SIZES = (1, 2, 3, 4, 5, 6, 7)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that has no kernels."""
    return prebuild.link([], tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def make(library: Path) -> Callable[..., Any]:
    """What makes calls."""
    made: Callable[..., Any] = load_decode_call(library).make
    return made


class Kernel:
    """Remembers what it was called with: address, shape, strides and dtype of tensors, and numbers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(tuple(_facts(one) if hasattr(one, "shape") else one for one in arguments))


def _facts(tensor: Any) -> tuple[Any, ...]:
    strides = tensor.stride() if isinstance(tensor, torch.Tensor) else tensor.strides
    return tensor.data_ptr(), tuple(tensor.shape), tuple(strides), str(tensor.dtype).removeprefix("torch.")


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

    extents = tuple(tensors[name].nbytes for name in NAMES)
    function = tvm_ffi.convert(kernel)
    return make(torch.Tensor, function, function.__chandle__(), SLOTS, state_mask, io_mask, extents)


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
        assert given == [_facts(tensors[name]) for name in order]


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


def test_what_a_kernel_raises_is_raised(make: Callable[..., Any], kernel: Kernel, memory: torch.Tensor) -> None:
    """And disturbs no later call."""

    def failing(*arguments: Any) -> None:
        raise ValueError("no such launch")

    tensors = _tensors(memory)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^no such launch$"):
            _call(make, failing, tensors)(*tensors.values(), 1.0)
        assert _call(make, kernel, tensors)(*tensors.values(), 1.0) is True


KERNEL_THAT_WAITS = """
#include <errno.h>
#include <poll.h>
#include <unistd.h>
#include <tvm/ffi/c_api.h>

static int entered, answered;

int __tvm_ffi_wait_for(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
    entered = (int)arguments[0].v_int64;
    answered = (int)arguments[1].v_int64;
    return 0;
}

int __tvm_ffi_kernel(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
    struct pollfd file = {answered, POLLIN, 0};
    int ready = write(entered, ".", 1) == 1;
    while (ready && (ready = poll(&file, 1, 5000)) < 0 && errno == EINTR) {}
    if (ready == 1) return 0;
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", "nobody answered");
    return -1;
}
"""


def test_a_kernel_runs_without_the_interpreters_lock(
    make: Callable[..., Any], memory: torch.Tensor, tmp_path: Path
) -> None:
    """A launch that waits for a function of Python ends."""
    import tvm_ffi

    (tmp_path / "kernel.c").write_text(KERNEL_THAT_WAITS)
    command = ["gcc", "-shared", "-fPIC", "-o", "kernel.so", "kernel.c", tvm_ffi.libinfo.find_libtvm_ffi()]
    includes = [f"-I{folder}" for folder in prebuild.include_folders()]
    subprocess.run([*command, *includes], cwd=tmp_path, check=True)
    module, tensors = tvm_ffi.load_module(str(tmp_path / "kernel.so")), _tensors(memory)
    asked, entered = os.pipe()
    answered, answer = os.pipe()
    module["wait_for"](entered, answered)
    kernel = module["kernel"]
    function = make(torch.Tensor, kernel, kernel.__chandle__(), SLOTS, 0, 0, (0,) * len(NAMES))

    def answer_once() -> None:
        os.read(asked, 1)
        os.write(answer, b".")

    thread = threading.Thread(target=answer_once)
    thread.start()
    try:
        assert function(*tensors.values(), 1.0) is True
    finally:
        thread.join()
        for file in (asked, entered, answered, answer):
            os.close(file)


def test_subclasses_of_tensors_are_let_through(make: Callable[..., Any], kernel: Kernel, memory: torch.Tensor) -> None:
    tensors = _tensors(memory)
    slopes = torch.nn.Parameter(tensors["decay_scales"], requires_grad=False)
    assert _call(make, kernel, tensors)(*{**tensors, "decay_scales": slopes}.values(), 1.0) is True


WRONG = (
    (),
    (torch.Tensor, None, 0, 1, 1, 1),
    (torch.Tensor, None, 0, 1, 1, 1, SIZES[1:]),
    (torch.Tensor, None, 0, 1.5, 1, 1, SIZES),
    (torch.Tensor, None, None, 1, 1, 1, SIZES),
    ("Tensor", None, 0, 1, 1, 1, SIZES),
)


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_what_makes_calls_refuses_other_facts(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        make(*arguments)


@pytest.mark.parametrize("table", [None, 3])
def test_there_are_no_calls_without_the_function_table_of_dlpack(make: Callable[..., Any], table: Any) -> None:
    kind = type("Kind", (), {} if table is None else {"__dlpack_c_exchange_api__": table})
    assert make(kind, None, 0, 1, 1, 1, SIZES) is None


def test_the_library_is_no_module_of_others(make: Callable[..., Any]) -> None:
    assert make.__name__ == "make"
    assert DECODE_CALL not in sys.modules


def test_a_library_loads_in_a_program_without_python(library: Path, tmp_path: Path) -> None:
    from tvm_ffi import libinfo

    load = "#include <dlfcn.h>\nint main(int n, char **names) { return !dlopen(names[1], RTLD_NOW); }"
    (tmp_path / "load.c").write_text(load)
    subprocess.run(["gcc", "-o", "load", "load.c", "-ldl"], cwd=tmp_path, check=True)
    folder = str(Path(libinfo.find_libtvm_ffi()).parent)
    done = subprocess.run([tmp_path / "load", library], env={"LD_LIBRARY_PATH": folder}, check=False)
    assert done.returncode == 0


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
