"""How the compiler's host code launches a kernel is how the emulated launch does it: asked of the machine code itself.

A kernel's host code is linked with a stand-in for the CUDA runtime that writes down the launch instead of making it.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from native_code import linked

from la_core import DecodeProblem
from la_core.ops.decode_values import TENSORS
from la_core.spec.decode_problem import StateLayout
from la_cute import prebuild
from la_cute.decode_compile_key import decode_compile_key
from la_cute.decode_tiles import choose_decode_tiles
from la_cute.kernel_keys import KernelKey
from la_cute.prebuilt_kernels import load_decode_call
from la_cute.window_compile_key import cursors_compile_key, window_compile_key
from la_cute.window_problems import window_problems
from la_cute.window_tiles import choose_window_tiles

pytest.importorskip("cutlass", reason="not run: the CuTe DSL is not installed")

import numpy as np
import tvm_ffi
import tvm_ffi.libinfo
from cutlass.cute.export.aot_config import get_libdir
from emulated_kernel import Arguments, Placed, kernel_parameters, launch_shape
from emulated_window import ARGUMENTS, window_launch_shape, window_parameters
from ptx_arithmetic import Array
from ptx_emulator import parse_ptx

pytestmark = linked

CUDA_THAT_WRITES_DOWN = r"""
#include <stddef.h>
#include <string.h>

struct attribute { int id; char pad[4]; char value[64]; };
struct launch {
    unsigned grid[3], block[3];
    size_t shared_bytes;
    void *stream;
    struct attribute *attributes;
    unsigned attribute_count;
};

unsigned recorded_shape[8];                  /* grid, block, bytes of shared memory, whether it overlaps */
void *recorded_stream;
unsigned char recorded_parameters[24][64];
unsigned parameter_bytes[24], parameter_count;  /* set before */

enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

int _cudaLaunchKernelEx(const struct launch *launch, const void *kernel, void **parameters) {
    memcpy(recorded_shape, launch->grid, sizeof launch->grid);
    memcpy(recorded_shape + 3, launch->block, sizeof launch->block);
    recorded_shape[6] = launch->shared_bytes;
    recorded_stream = launch->stream;
    recorded_shape[7] = 0;
    for (unsigned n = 0; n < launch->attribute_count; n++)
        if (launch->attributes[n].id == PROGRAMMATIC_STREAM_SERIALIZATION)
            recorded_shape[7] = launch->attributes[n].value[0];
    for (unsigned n = 0; n < parameter_count; n++)
        memcpy(recorded_parameters[n], parameters[n], parameter_bytes[n]);
    return 0;
}

static int zero(int *value) { *value = 0; return 0; }
int _cudaGetDevice(int *device) { return zero(device); }
int _cudaSetDevice(int device) { return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 200 * 1024; return 0; }
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) { return zero(value); }
int _cudaFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) { return 0; }
int _cudaLibraryLoadData(void **library) { *library = recorded_shape; return 0; }
int _cudaLibraryGetKernel(void **kernel) { *kernel = recorded_shape; return 0; }
int cudaLibraryUnload(void *library) { return 0; }
const char *cudaGetErrorName(int error) { return "error"; }
const char *cudaGetErrorString(int error) { return "error"; }
int CuteDSLRT_TVMFFISetRaisedCudaError(void) { return -1; }
"""


MOST_PARAMETERS = 24

DECODE_CALL_FILE = Path(prebuild.__file__).with_name("decode_call.c")


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_DTYPES = {torch.int32: (0, 32), torch.int64: (0, 64), torch.float32: (2, 32), torch.bfloat16: (4, 16)}


class _CudaTensor:
    """Says that it lies on the first CUDA device, at an address that nobody may follow."""

    def __init__(self, placed: Placed, dtype: torch.dtype) -> None:
        numbers = ctypes.c_int64 * len(placed.shape)
        self._sizes, self._strides = numbers(*placed.shape), numbers(*placed.strides)
        self._tensor = _DLTensor(
            placed.address,
            (2, 0),
            len(placed.shape),
            (*_DTYPES[dtype], 1, 0),
            ctypes.addressof(self._sizes),
            ctypes.addressof(self._strides),
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **options: Any) -> Any:
        return _capsule(self._tensor, b"dltensor")

    def write(self, address: int) -> None:
        """Write the DLTensor, which is what stands before its context, to an address."""
        ctypes.memmove(address, ctypes.addressof(self._tensor), _DLTensor.context.offset)


def _capsule(content: ctypes.Structure, name: bytes) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(content), name, None)


STREAM, OTHER_STREAM = 0x5EED0, 0x5EED1


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
def _tensor_from_object(one: _CudaTensor, address: int) -> int:
    one.write(address)
    return 0


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def _current_work_stream(device_type: int, device: int, stream: Any) -> int:
    stream[0] = STREAM
    return 0 if (device_type, device) == (2, 0) else -1


class _ExchangeTable(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("previous", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3),
        ("tensor_from_object", type(_tensor_from_object)),
        ("current_work_stream", type(_current_work_stream)),
    )


_EXCHANGE_TABLE = _ExchangeTable((1, 3), None, (None,) * 3, _tensor_from_object, _current_work_stream)
EXCHANGE, _EXCHANGE_NAME = "__dlpack_c_exchange_api__", b"dlpack_exchange_api"


class _ExchangedTensor(_CudaTensor):
    """Can be read through the function table of DLPack too."""


setattr(_ExchangedTensor, EXCHANGE, _capsule(_EXCHANGE_TABLE, _EXCHANGE_NAME))


def _problem(B: int, G: int, overlap: bool, **changes: Any) -> DecodeProblem:
    problem = DecodeProblem.contiguous(
        B=B, P=5, H=6, G=G, K=64, V=128, io_dtype=torch.bfloat16, device="cuda", arch=(9, 0), **changes
    )
    return replace(problem, overlap=overlap)


@pytest.mark.parametrize(
    ("problem", "aligned"),
    [
        (_problem(3, 6, False), False),
        (_problem(256, 6, True), True),
        (_problem(40_000, 3, True), True),
        (_problem(4, 2, False, state_layout="kv", offsets_dtype=torch.int64), True),
        (_problem(32_768, 1, True, state_layout="kv"), False),
    ],
    ids=["vk", "vk-overlap-of-a-crowd", "vk-overlap-rows-along-z", "kv", "kv-overlap"],
)
def test_host_code_launches_as_the_emulated_kernel_is_launched(
    problem: DecodeProblem, aligned: bool, tmp_path: Path
) -> None:
    key = decode_compile_key(problem, choose_decode_tiles(problem), aligned=aligned)
    B, H, G, K, V, P = problem.B, problem.H, problem.G, problem.K, problem.V, problem.P
    inner = (K, 1) if problem.state_layout == "vk" else (1, V)
    # Every address, size and stride is another number; only the strides of the pool and of q, k and v must be aligned.
    shapes: Shapes = {
        "s_offsets": (problem.offsets_dtype, (B,), (1,)),
        "s": (problem.state_dtype, (P * H, V, K), (K * V + 4, *inner)),
        "decay_scales": (torch.float32, (H,), (1,)),
        "q": (problem.io_dtype, (B, G, K), (G * K + 100, K + 4, 1)),
        "k": (problem.io_dtype, (B, G, K), (G * K + 200, K + 8, 1)),
        "v": (problem.io_dtype, (B, H, V), (H * V + 300, V + 12, 1)),
        "out": (problem.out_dtype, (B, H, V), (H * V + 401, V + 17, 1)),
    }
    arguments = _arguments(shapes)
    grid, shared_bytes = launch_shape(key, B, H)
    for direct in (False, True):
        given = [shapes[name] for name in arguments]
        shape, parameters = _launch(key, tmp_path, given, (0.3, P), arguments, direct=direct)
        assert shape == (*grid, 32 * key.tiles.num_warps, 1, 1, shared_bytes, int(key.overlap))
        _assert_same(parameters, kernel_parameters(arguments, 0.3, P))


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("op", list(ARGUMENTS))
def test_host_code_launches_window_kernels_as_the_emulated_ones_are_launched(
    op: str, layout: StateLayout, tmp_path: Path
) -> None:
    one = _problem(40_000 if layout == "vk" else 3, 2, layout == "vk", state_layout=layout)
    counts_dtype = torch.int32 if layout == "vk" else None
    problem = next(found for found in window_problems(one, 11, (counts_dtype,)) if found.op == op)
    key: KernelKey
    if problem.op == "advance":
        key = cursors_compile_key(problem)
    else:
        key = window_compile_key(problem, choose_window_tiles(problem), aligned=True)
        # A call of so many rows would not overlap by itself.
        key = key._replace(overlap=op != "commit" and one.overlap)
    B, H, G, K, V, P, N, T = problem.B, problem.H, problem.G, problem.K, problem.V, problem.P, problem.N, 3
    inner = (K, 1) if layout == "vk" else (1, V)
    tokens, steps = ((T,), (1000,)) if op == "verify" else ((), ())
    bf16, int32 = torch.bfloat16, torch.int32
    shapes: Shapes = {
        "s_offsets": (int32, (B,), (1,)),
        "s": (torch.float32, (P * H, V, K), (K * V + 4, *inner)),
        "decay_scales": (torch.float32, (H,), (1,)),
        "q": (bf16, (B, *tokens, G, K), (G * K + 9100, *steps, K + 4, 1)),
        "k": (bf16, (B, *tokens, G, K), (G * K + 9200, *steps, K + 8, 1)),
        "v": (bf16, (B, *tokens, H, V), (H * V + 9300, *steps, V + 12, 1)),
        "out": (bf16, (B, *tokens, H, V), (H * V + 9401, *steps, V + 17, 1)),
        "window_k": (bf16, (P, N, G, K), (N * G * K + 300, G * K + 16, K + 4, 1)),
        "window_v": (bf16, (P, N, H, V), (N * H * V + 400, H * V + 24, V + 8, 1)),
        "start": (int32, (P,), (1,)),
        "length": (int32, (P,), (1,)),
    }
    if counts_dtype is not None:
        shapes["counts"] = (counts_dtype, (B,), (1,))
    numbers: dict[str, tuple[Any, ...]] = {
        "decode_window": (0.3,),
        "verify": (0.3,),
        "commit": (5, 7, 2, 1 << 33, (1 << 34) + 4, (1 << 35) + 8),
        "advance": (5, N, 7, 1),
    }
    arguments = _arguments({name: shapes[name] for name in ARGUMENTS[op] if name in shapes})
    given = [shapes.get(name) for name in ARGUMENTS[op]]
    shape, parameters = _launch(key, tmp_path, given, numbers[op], arguments)
    grid, threads, shared_bytes = window_launch_shape(key, arguments, numbers[op])
    assert shape == (*grid, threads, 1, 1, shared_bytes, int(op in ("decode_window", "verify") and one.overlap))
    _assert_same(parameters, window_parameters(key, arguments, numbers[op]))


Shape = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
Shapes = dict[str, Shape]


def _arguments(shapes: Shapes) -> Arguments:
    return {
        name: Placed(0x7E12_3456_7800 + (n << 36), shape, strides)
        for n, (name, (_, shape, strides)) in enumerate(shapes.items())
    }


def _launch(
    key: KernelKey,
    folder: Path,
    given: list[Shape | None],
    numbers: tuple[Any, ...],
    arguments: Arguments,
    direct: bool = False,
) -> tuple[tuple[int, ...], list[tuple[int, bytes]]]:
    """What host code hands to CUDA: grid, block, shared memory and overlap; size and bytes of each parameter.

    With `direct`, a call of decode goes through `decode_call.c`.
    """
    function = key.compile(f"--keep-ptx --dump-dir={folder}")
    function.export_to_c(str(folder / "kernel.o"), function_name="kernel", export_only_tvm_ffi_symbols=True)
    (folder / "cuda.c").write_text(CUDA_THAT_WRITES_DOWN)
    archives = (Path(get_libdir()) / "libcuda_dialect_runtime_static.a", tvm_ffi.libinfo.find_libtvm_ffi())
    name = "direct.so" if direct else "kernel.so"
    native = (str(DECODE_CALL_FILE), *(f"-I{include}" for include in prebuild.include_folders())) if direct else ()
    command = ("gcc", "-shared", "-fPIC", "-o", name, "kernel.o", "cuda.c", *native, *map(str, archives))
    # Its own functions, whatever the process has loaded under the same names.
    subprocess.run([*command, "-Wl,--no-undefined", "-Wl,-Bsymbolic"], cwd=folder, check=True)
    module = tvm_ffi.load_module(str(folder / name))
    library = ctypes.CDLL(str(folder / name))
    sizes = list(parse_ptx(function.artifacts.PTX).parameters.values())
    ctypes.c_uint.in_dll(library, "parameter_count").value = len(sizes)
    (ctypes.c_uint * MOST_PARAMETERS).in_dll(library, "parameter_bytes")[: len(sizes)] = [*sizes]
    places = iter(arguments.values())
    kind = _ExchangedTensor if direct else _CudaTensor
    tensors = [None if one is None else kind(next(places), one[0]) for one in given]
    kernel = module["kernel"]
    if direct:
        scale, slots = numbers
        by_name = dict(zip(arguments, tensors, strict=True))
        make = load_decode_call(folder / name).make
        call = make(kind, kernel, kernel.__chandle__(), slots, 0, 0, (1,) * len(TENSORS))
        stream = ctypes.c_void_p.in_dll(library, "recorded_stream")
        for before in (None, OTHER_STREAM):
            stream.value = None
            with _env_stream(before):
                assert call(*(by_name[name] for name in TENSORS), scale) is True
            assert stream.value == STREAM
    else:
        kernel(*(tensor and tvm_ffi.from_dlpack(tensor) for tensor in tensors), *numbers)
    shape = tuple((ctypes.c_uint * 8).in_dll(library, "recorded_shape"))
    recorded = (ctypes.c_ubyte * 64 * MOST_PARAMETERS).in_dll(library, "recorded_parameters")
    return shape, [(size, bytes(part)) for size, part in zip(sizes, recorded, strict=False)]


@contextmanager
def _env_stream(stream: int | None) -> Iterator[None]:
    """tvm-ffi's stream of the first CUDA device is this one, and is so in the end."""
    ffi = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    ffi.TVMFFIEnvGetStream.restype = ctypes.c_void_p
    ffi.TVMFFIEnvSetStream(2, 0, ctypes.c_void_p(stream), None)
    try:
        yield
        assert ffi.TVMFFIEnvGetStream(2, 0) == stream
    finally:
        ffi.TVMFFIEnvSetStream(2, 0, None, None)


FUNCTIONS_THAT_REFUSE = """
#include <Python.h>

static int refuse(void) {
    PyErr_SetString(PyExc_BufferError, "not for DLPack");
    return -1;
}

int refuse_tensor(void *object, void *tensor) { return refuse(); }
int refuse_stream(int type, int device, void **stream) { return refuse(); }
"""


def test_a_direct_call_does_without_what_dlpack_lacks(tmp_path: Path) -> None:
    (tmp_path / "refuse.c").write_text(FUNCTIONS_THAT_REFUSE)
    command = ["gcc", "-shared", "-fPIC", f"-I{prebuild.PYTHON_HEADER.parent}", "-o", "refuse.so", "refuse.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "refuse.so"))
    refuse_tensor = ctypes.cast(library.refuse_tensor, type(_tensor_from_object))
    refuse_stream = ctypes.cast(library.refuse_stream, type(_current_work_stream))
    make = load_decode_call(prebuild.link([], tmp_path)).make
    calls: list[int] = []
    kernel = tvm_ffi.convert(lambda *arguments: calls.append(len(arguments)))

    def answer(version: int, tensor_from_object: Any, current_work_stream: Any) -> Any:
        """What a call answers to tensors with such a table; None if there are no calls."""
        table = _ExchangeTable((version, 3), None, (None,) * 3, tensor_from_object, current_work_stream)
        kind: Any = type("Kind", (_CudaTensor,), {EXCHANGE: _capsule(table, _EXCHANGE_NAME)})
        call = make(kind, kernel, kernel.__chandle__(), 1, 0, 0, (1,) * len(TENSORS))
        tensors = (kind(Placed(4096 * n, (2,), (1,)), torch.float32) for n in range(1, 8))
        with _env_stream(OTHER_STREAM):
            return call and call(*tensors, 1.0)

    assert answer(2, _tensor_from_object, _current_work_stream) is None
    assert answer(1, type(_tensor_from_object)(), _current_work_stream) is None
    assert answer(1, refuse_tensor, _current_work_stream) is False
    assert answer(1, _tensor_from_object, refuse_stream) is False
    assert not calls
    assert answer(1, _tensor_from_object, _current_work_stream) is True
    assert calls == [len(TENSORS) + 2]


def test_a_stream_is_put_back_after_a_failed_launch(tmp_path: Path) -> None:
    make = load_decode_call(prebuild.link([], tmp_path)).make

    def failing(*arguments: Any) -> None:
        raise RuntimeError("no launch")

    kernel = tvm_ffi.convert(failing)
    tensors = [_ExchangedTensor(Placed(4096 * n, (2,), (1,)), torch.float32) for n in range(1, 8)]
    call = make(_ExchangedTensor, kernel, kernel.__chandle__(), 1, 0, 0, (1,) * len(TENSORS))
    with _env_stream(OTHER_STREAM), pytest.raises(RuntimeError, match="no launch"):
        call(*tensors, 1.0)


def _assert_same(parameters: list[tuple[int, bytes]], expected: list[Array]) -> None:
    assert [size for size, _ in parameters] == [numbers.nbytes for numbers in expected]
    # Numbers are compared: what lies between them is left as it was.
    got = [np.frombuffer(part, numbers.dtype, 1) for (_, part), numbers in zip(parameters, expected, strict=True)]
    assert got == expected
