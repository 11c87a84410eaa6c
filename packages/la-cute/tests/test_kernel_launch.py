"""How prebuilt kernels are launched, `kernel_launch.c`: around a driver and a runtime that only write down."""

from __future__ import annotations

import ctypes
import importlib.metadata
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier

import pytest
from native_code import linked

from la_cute import prebuild


def _headers() -> Path | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return Path(importlib.metadata.distribution(prebuild.CUDA_RUNTIME).locate_file("nvidia/cu13/include"))
    return None


pytestmark = [
    linked,
    pytest.mark.skipif(_headers() is None, reason="not run: the headers of nvidia-cuda-runtime are not installed"),
]

CUDA_THAT_WRITES_DOWN = """
#include <cuda.h>
#include <string.h>

unsigned long no_entry_point, missing, get_context_result, get_function_result, launch_result, context = 1;
_Atomic unsigned long entry_points, lookups, driver_launches, runtime_launches, wrong_functions;
unsigned long launched_function, launched_parameters;
CUlaunchConfig config;

static CUresult get_context(CUcontext current, unsigned long long *number) {
    *number = context;
    return current ? CUDA_ERROR_INVALID_VALUE : (CUresult)get_context_result;
}

static CUresult get_function(CUfunction *function, CUkernel kernel) {
    lookups++;
    *function = (CUfunction)((unsigned long)kernel * 1000 + context);
    return (CUresult)get_function_result;
}

static CUresult launch(const CUlaunchConfig *given, CUfunction function, void **parameters, void **extra) {
    if (launch_result || extra) return CUDA_ERROR_INVALID_VALUE;
    driver_launches++;
    if ((unsigned long)function != (unsigned long)parameters * 1000 + context) wrong_functions++;
    config = *given;
    launched_function = (unsigned long)function;
    launched_parameters = (unsigned long)parameters;
    return CUDA_SUCCESS;
}

int cudaGetDriverEntryPointByVersion(
    const char *symbol, void **function, unsigned version, unsigned long long flags, int *found) {
    if (no_entry_point || version != 12000 || flags) return 1;
    entry_points++;
    if (!strcmp(symbol, "cuCtxGetId")) *function = get_context;
    if (!strcmp(symbol, "cuKernelGetFunction")) *function = get_function;
    if (!strcmp(symbol, "cuLaunchKernelEx")) *function = missing ? 0 : launch;
    return 0;
}

int RUNTIME_LAUNCH(const void *launch, const void *kernel, void **parameters) {
    runtime_launches++;
    return 719;
}
"""
"""`RUNTIME_LAUNCH` is the name of the runtime's function: `__real_cudaLaunchKernelExC`, or that to be wrapped."""

COMPILED_FUNCTION = """
#include <tvm/ffi/c_api.h>

extern _Atomic unsigned long driver_launches;
int cudaLaunchKernelExC(const void *launch, const void *kernel, void **parameters);
const char *cudaGetErrorName(int error) { return "error"; }
const char *cudaGetErrorString(int error) { return "error"; }

int __tvm_ffi_launch(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
    unsigned long launch[16] = {0};
    result->type_index = kTVMFFIInt;
    result->v_int64 = 1000 * cudaLaunchKernelExC(launch, (void*)1, (void**)1) + driver_launches;
    return 0;
}
"""


def _launch_fields(shared_bytes: type) -> tuple[tuple[str, type], ...]:
    return (
        ("shape", ctypes.c_uint * 6),
        ("shared_bytes", shared_bytes),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _RuntimeLaunch(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = _launch_fields(ctypes.c_size_t)


class _DriverLaunch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = _launch_fields(ctypes.c_uint)


GIVEN = _RuntimeLaunch((ctypes.c_uint * 6)(2, 3, 4, 32, 5, 6), 7, 8, 9, 2)


class Cuda:
    """The library, and what it wrote down."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def launch(self, kernel: int = 1) -> int:
        """Launch a kernel with `GIVEN`, and parameters at its own number: what the caller gets."""
        launch = self.library.__getattr__("__wrap_cudaLaunchKernelExC")
        result: int = launch(ctypes.byref(GIVEN), ctypes.c_void_p(kernel), ctypes.c_void_p(kernel))
        return result

    def __getitem__(self, name: str) -> int:
        return ctypes.c_ulong.in_dll(self.library, name).value

    def __setitem__(self, name: str, value: int) -> None:
        ctypes.c_ulong.in_dll(self.library, name).value = value

    @property
    def counts(self) -> tuple[int, int, int]:
        """Functions that were looked up, launches of the driver, and of the runtime."""
        return self["lookups"], self["driver_launches"], self["runtime_launches"]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    (folder / "cuda.c").write_text(CUDA_THAT_WRITES_DOWN)
    source = Path(prebuild.__file__).with_name("kernel_launch.c")
    command = ["gcc", "-shared", "-fPIC", "-O2", f"-I{_headers()}", "-DRUNTIME_LAUNCH=__real_cudaLaunchKernelExC"]
    command += ["-o", "launch.so", str(source), "cuda.c", "-Wl,--no-undefined", "-Wl,-Bsymbolic"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "launch.so"


@pytest.fixture
def cuda(library: Path, tmp_path: Path) -> Cuda:
    """A library of its own: what it has looked up stays."""
    return Cuda(Path(shutil.copy(library, tmp_path / "launch.so")))


def test_libraries_of_kernels_are_linked_so_that_the_driver_launches(tmp_path: Path) -> None:
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="not run: apache-tvm-ffi is not installed")
    pytest.importorskip("cutlass", reason="not run: the CuTe DSL is not installed")
    (tmp_path / "cuda.c").write_text(CUDA_THAT_WRITES_DOWN)
    (tmp_path / "function.c").write_text(COMPILED_FUNCTION)
    includes = [f"-I{folder}" for folder in (*prebuild.include_folders(), _headers())]
    command = ["gcc", "-c", "-fPIC", *includes, "-DRUNTIME_LAUNCH=cudaLaunchKernelExC", "cuda.c", "function.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    library = prebuild.link([tmp_path / "cuda.o", tmp_path / "function.o"], tmp_path)
    assert tvm_ffi.load_module(str(library))["launch"]() == 1


def test_a_kernel_is_launched_by_the_driver_as_the_runtime_was_asked_to(cuda: Cuda) -> None:
    assert cuda.launch(7) == 0
    assert cuda.counts == (1, 1, 0)
    config = _DriverLaunch.in_dll(cuda.library, "config")
    assert [*config.shape] == [*GIVEN.shape]
    for name in ("shared_bytes", "stream", "attributes", "attribute_count"):
        assert getattr(config, name) == getattr(GIVEN, name)
    assert (cuda["launched_function"], cuda["launched_parameters"]) == (7001, 7)


def test_a_function_is_looked_up_once_for_each_kernel_and_context(cuda: Cuda) -> None:
    for turn in range(3):
        for kernel in (1, 2, 3):
            for context in (1, 2):
                cuda["context"] = context
                assert cuda.launch(kernel) == 0
                assert cuda["launched_function"] == kernel * 1000 + context
        assert cuda.counts == (6, 6 * (turn + 1), 0)
        assert cuda["entry_points"] == 3


@pytest.mark.parametrize(
    "failing", ["no_entry_point", "missing", "get_context_result", "get_function_result", "launch_result"]
)
def test_what_the_driver_does_not_do_the_runtime_does(cuda: Cuda, failing: str) -> None:
    cuda[failing] = 1
    assert cuda.launch() == 719
    assert cuda.counts[1:] == (0, 1)
    cuda[failing] = 0
    assert cuda.launch() == 0
    assert cuda.counts[1:] == (1, 1)


def test_more_kernels_than_there_is_room_for_are_launched_all_the_same(cuda: Cuda) -> None:
    kernels = range(8, 8 * 4001, 8)
    assert {cuda.launch(kernel) for kernel in kernels} == {0, 719}
    _, by_driver, by_runtime = cuda.counts
    assert by_driver + by_runtime == len(kernels)
    assert 900 < by_driver <= 1024


def test_threads_share_what_is_looked_up(cuda: Cuda) -> None:
    kernels, threads = [8 * n for n in range(1, 101)], 8
    together = Barrier(threads)

    def launch_all(_: int) -> set[int]:
        together.wait()
        return {cuda.launch(kernel) for _ in range(8) for kernel in kernels}

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(launch_all, range(threads))) == [{0}] * threads
    lookups, by_driver, by_runtime = cuda.counts
    # Each thread looks for a function once at most.
    assert len(kernels) <= lookups <= threads * len(kernels)
    assert (by_driver, by_runtime, cuda["wrong_functions"]) == (8 * threads * len(kernels), 0, 0)
