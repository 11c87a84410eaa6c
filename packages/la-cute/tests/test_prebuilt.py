"""Kernels built ahead of time: which ones, that they need no compiler, and that none is used which should not be."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from native_code import linked

from la_core import DecodeProblem, UnsupportedByBackend
from la_core.spec.window_problem import WindowProblem
from la_cute import compiled_kernel_cache as cache
from la_cute import prebuilt_kernels
from la_cute.backend import backend
from la_cute.decode_compile_key import ARCHES, DecodeCompileKey
from la_cute.decode_launch import DecodeLaunch
from la_cute.kernel_keys import KernelKey, key_of_decode, keys_of_problem
from la_cute.prebuilt_keys import FAMILIES, KINDS, LAYOUTS, WINDOW_ARCHES, family_of, function_name, prebuilt_keys
from la_cute.window_compile_key import CursorsCompileKey
from la_cute.window_problems import window_problems

PROBLEM = DecodeProblem.contiguous(B=8, P=8, H=8, K=64, V=64, device="cuda", arch=(9, 0))

NO_COMPILER = 'and no compiler to make one: run python3 -m pip install "la-cute[jit]"'

FAKE_CUDA_TENSORS = '''
import ctypes, tvm_ffi

class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
                ("dtype", ctypes.c_uint8 * 4), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]

class Fake:
    """Says that it lies on the first CUDA device."""

    def __init__(self, code, bits, *shape):
        sizes, strides = (ctypes.c_int64 * len(shape))(*shape), (ctypes.c_int64 * len(shape))()
        step = 1
        for axis in reversed(range(len(shape))):
            strides[axis], step = step, step * shape[axis]
        self.keep = sizes, strides
        self.tensor = Tensor(4096, (ctypes.c_int32 * 2)(2, 0), len(shape), (ctypes.c_uint8 * 4)(code, bits, 1, 0),
                             ctypes.addressof(sizes), ctypes.addressof(strides), 0, None, None)

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **ignored):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

fakes = [Fake(0, 32, 8), Fake(2, 32, 64, 64, 64), Fake(2, 32, 8), *(Fake(4, 16, 8, 8, 64) for _ in range(4))]
arguments = [*map(tvm_ffi.from_dlpack, fakes), 1.0, 8]
'''
"""The arguments of PROBLEM's kernel, for a machine without a GPU: nothing may follow their addresses."""


def _key(aligned: bool = True, **changes: Any) -> DecodeCompileKey:
    return key_of_decode(replace(PROBLEM, **changes), aligned=aligned)


def _window_problem(op: str) -> WindowProblem:
    return next(one for one in window_problems(PROBLEM, 8, (None,)) if one.op == op)


def _window_key(op: str) -> KernelKey:
    return keys_of_problem(_window_problem(op))[0]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with two kernels for sm_90a."""
    from la_cute.prebuild import build_library

    folder = tmp_path_factory.mktemp("prebuilt")
    with ThreadPoolExecutor(1) as workers:
        build_library(folder, "sm_90a-decode", [_key(True), _key(False)], workers)
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same library in a folder that a test may spoil, seen by this process; nothing in memory or on disk."""
    copy = tmp_path / "prebuilt"
    shutil.copytree(built, copy)
    monkeypatch.setattr(prebuilt_kernels, "FOLDER", copy)
    monkeypatch.setattr(cache, "_kernels", {})
    monkeypatch.setenv(cache.ENV_CACHE_DIR, "")
    monkeypatch.delenv(prebuilt_kernels.ENV_PREBUILT, raising=False)
    prebuilt_kernels.find_library.cache_clear()
    yield copy
    prebuilt_kernels.find_library.cache_clear()


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", None)
    monkeypatch.setattr(prebuilt_kernels, "compiler_installed", lambda: False)
    monkeypatch.setattr(cache, "compiler_installed", lambda: False)


def _run_without_compiler(folder: Path, code: str) -> str:
    """What a new process prints in which neither the compiler nor its loader can be imported."""
    start = (
        "import sys\n"
        "sys.modules['cutlass'] = None\n"
        "from pathlib import Path\n"
        "from la_cute import prebuilt_kernels\n"
        f"prebuilt_kernels.FOLDER = Path({str(folder)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _library(folder: Path) -> Path:
    (library,) = folder.glob("sm_90a-decode-*.so")
    return library


def _manifest(folder: Path) -> Path:
    return folder / "sm_90a-decode.json"


def _change_manifest(folder: Path, **changes: Any) -> None:
    path = _manifest(folder)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("arch", list(ARCHES))
def test_what_is_prebuilt_is_all_that_common_calls_can_need(arch: str) -> None:
    families = {family: prebuilt_keys(arch, family) for family in FAMILIES}
    assert all(family_of(key) == family for family, keys in families.items() for key in keys)
    assert bool(families["window"]) == (arch in WINDOW_ARCHES)
    keys = families["decode"] + families["window"]
    assert len(set(map(function_name, keys))) == len(keys)
    assert {key.arch for key in keys} == {arch}
    overlaps = {key.overlap for key in keys if not isinstance(key, CursorsCompileKey)}
    assert overlaps == ({False} if arch == "sm_80" else {False, True})
    names = set(map(function_name, keys))
    for rows, heads in ((1, 8), (3, 16), (17, 8), (64, 64), (200, 32), (777, 16), (4096, 64)):
        for state_dtype, layout in itertools.product((torch.float32, torch.bfloat16), ("vk", "kv")):
            problem = DecodeProblem.contiguous(
                B=rows, P=rows, H=heads, K=128, V=128, state_dtype=state_dtype, device="cuda", arch=ARCHES[arch]
            )
            problem = replace(problem, state_layout=layout, overlap=rows % 2 == 1)
            assert names.issuperset(map(function_name, keys_of_problem(problem)))
            if arch in WINDOW_ARCHES:
                for window in window_problems(problem, 7 if rows % 2 else 15, (None, torch.int32)):
                    assert names.issuperset(map(function_name, keys_of_problem(window)))


def test_the_kernels_of_decode_are_prebuilt_for_every_batch_and_number_of_heads() -> None:
    """Of every kind that is prebuilt at all; as many heads as fill a large slot, and fewer."""
    names = set(map(function_name, prebuilt_keys("sm_90a", "decode")))
    sizes = itertools.product((1, 2, 3, 4, 7, 8, 16, 31, 64, 100, 256, 513), (1, 2, 8, 16, 32, 48, 64, 128, 256))
    ways = itertools.product(KINDS, LAYOUTS, (False, True))
    for (rows, heads), ((size, io_dtype, state_dtype), layout, overlap) in itertools.product(sizes, ways):
        dtypes = {"io_dtype": io_dtype, "out_dtype": io_dtype, "state_dtype": state_dtype}
        problem = replace(PROBLEM, B=rows, P=rows, H=heads, G=heads, K=size, V=size, state_layout=layout, **dtypes)
        problem = replace(problem, overlap=overlap)
        assert names.issuperset(map(function_name, keys_of_problem(problem))), problem


@pytest.mark.parametrize("arch", list(ARCHES))
def test_one_prebuilt_kernel_serves_all_batches_at_addresses_that_are_not_aligned(arch: str) -> None:
    """Of each kind, layout and so on; the bits that it gives are those of every other tile."""
    for family in FAMILIES:
        keys = [key for key in prebuilt_keys(arch, family) if not isinstance(key, CursorsCompileKey)]
        unaligned = [key for key in keys if not key.aligned]
        assert len({key._replace(tiles=None) for key in unaligned}) == len(unaligned)
        assert not any(key.overlap for key in unaligned)


@pytest.mark.parametrize("op", ["decode", "decode_window", "verify", "commit", "advance"])
def test_every_value_of_a_key_is_in_the_name_of_its_function(op: str) -> None:
    """Also values that a key or its tiles get later."""
    key: Any = _key() if op == "decode" else _window_key(op)
    tiles = [replace(key.tiles, **{field.name: "other"}) for field in fields(key.tiles)] if op != "advance" else []
    keys = [
        key,
        *(key._replace(tiles=one) for one in tiles),
        *(key._replace(**{name: "other"}) for name in key._fields if name != "tiles"),
    ]
    assert len(set(map(function_name, keys))) == len(keys)
    assert all(re.fullmatch(r"\w+", function_name(one)) for one in keys)


@linked
def test_window_kernels_are_loaded_and_refused_without_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_compiler: None
) -> None:
    from la_cute.prebuild import build_library

    keys = [key for op in ("verify", "advance") for key in keys_of_problem(_window_problem(op))]
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as workers:
        patch.delitem(sys.modules, "cutlass")
        build_library(tmp_path, "sm_90a-window", keys, workers)
    monkeypatch.setattr(prebuilt_kernels, "FOLDER", tmp_path)
    monkeypatch.setattr(cache, "_kernels", {})
    prebuilt_kernels.find_library.cache_clear()
    try:
        assert all(callable(cache.compiled_kernel(key)) for key in keys)
        assert cache.kernel_origins() == {"prebuilt": 3}
        assert backend.refusal(_window_problem("verify")) is None
        assert backend.refusal(_window_problem("advance")) is None
        reason = f"has no prebuilt kernel for this call, {NO_COMPILER}"
        assert backend.refusal(_window_problem("commit")) == reason
        with pytest.raises(
            UnsupportedByBackend, match=r"^commit: backend 'cute' has no prebuilt kernel .*la-cute\[jit\]"
        ):
            cache.compiled_kernel(_window_key("commit"))
        with pytest.raises(UnsupportedByBackend, match=r"^decode: backend 'cute' has no prebuilt kernel for this call"):
            cache.compiled_kernel(_window_key("decode_window"))
        assert backend.refusal(PROBLEM) == f"has no prebuilt decode kernels for sm_90a, {NO_COMPILER}"
    finally:
        prebuilt_kernels.find_library.cache_clear()


@linked
def test_a_process_without_the_compiler_loads_a_prebuilt_kernel(built: Path) -> None:
    code = (
        "from la_core import DecodeProblem\n"
        "from la_cute import compiled_kernel_cache as cache, decode_launch\n"
        "problem = DecodeProblem.contiguous(B=8, P=8, H=8, K=64, V=64, device='cuda', arch=(9, 0))\n"
        "assert prebuilt_kernels.refusal(problem) is None\n"
        "launch = decode_launch.DecodeLaunch(problem)\n"
        "print(type(launch._prepare(True)).__name__, type(launch._prepare(False)).__name__)\n"
        "print(dict(cache.kernel_origins()))\n"
    )
    assert _run_without_compiler(built, code) == "Function Function\n{'prebuilt': 2}\n"


@linked
def test_calls_go_a_direct_way_once_a_prebuilt_kernel_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extents = tuple(range(1, 8))
    launch = DecodeLaunch(PROBLEM)
    assert launch.direct(extents) is None
    launch._prepare(False)
    assert launch.direct(extents) is None
    launch._prepare(True)
    assert callable(launch.direct(extents))
    monkeypatch.setattr(cache, "_kernels", {})
    monkeypatch.setenv(prebuilt_kernels.ENV_PREBUILT, "0")
    launch._prepare(True)
    monkeypatch.delenv(prebuilt_kernels.ENV_PREBUILT)
    assert launch.direct(extents) is None


@linked
@pytest.mark.parametrize(("gap", "masks"), [(0, (15, 7)), (1, (0, 0))], ids=["aligned", "unaligned"])
def test_the_direct_way_gets_the_kernel_and_the_addresses_that_it_can_take(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gap: int, masks: tuple[int, int]
) -> None:
    launch = DecodeLaunch(replace(PROBLEM, s_row_stride=PROBLEM.s_row_stride + gap))
    kernels = {aligned: launch._prepare(aligned) for aligned in (True, False)}
    monkeypatch.setattr("la_cute.decode_launch.decode_call_of", lambda key: lambda *facts: facts)
    facts = launch.direct(tuple(range(1, 8)))
    kernel = kernels[gap == 0]
    assert facts == (torch.Tensor, kernel, kernel.__chandle__(), PROBLEM.P, *masks, tuple(range(1, 8)))


@linked
@pytest.mark.parametrize(("name", "value"), [("implementation", SimpleNamespace(name="pypy")), ("abiflags", "t")])
def test_there_is_no_direct_way_in_another_interpreter(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    launch = DecodeLaunch(PROBLEM)
    launch._prepare(True)
    monkeypatch.setattr(sys, name, value)
    assert launch.direct(tuple(range(1, 8))) is None


def test_launches_of_the_compiler_go_through_the_function_that_is_wrapped() -> None:
    """`kernel_launch.c` takes the place of this one function of the runtime, and of no other."""
    export = pytest.importorskip("cutlass.cute.export.aot_config", reason="not run: the CuTe DSL is not installed")
    archive = Path(export.get_libdir(), "libcuda_dialect_runtime_static.a").read_bytes()
    assert {*re.findall(rb"\0(cudaLaunch\w*)", archive)} == {b"cudaLaunchKernelExC"}


@linked
def test_a_prebuilt_kernel_comes_before_the_disk_and_the_compiler(folder: Path) -> None:
    assert callable(cache.compiled_kernel(_key()))
    assert cache.kernel_origins() == {"prebuilt": 1}


@linked
def test_a_prebuilt_kernel_is_not_used_when_the_environment_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(prebuilt_kernels.ENV_PREBUILT, "0")
    assert callable(cache.compiled_kernel(_key()))
    assert cache.kernel_origins() == {"compiled": 1}


@linked
def test_a_library_of_other_sources_is_not_used(folder: Path, without_compiler: None) -> None:
    _change_manifest(folder, sources="0" * 64)
    reason = f"has prebuilt decode kernels for sm_90a made from other sources, {NO_COMPILER}"
    assert backend.refusal(PROBLEM) == reason
    with pytest.raises(UnsupportedByBackend, match=re.escape(f"decode: backend 'cute' {reason}.")):
        cache.compiled_kernel(_key())


@linked
def test_where_there_is_a_compiler_a_library_of_other_sources_is_passed_over(folder: Path) -> None:
    _change_manifest(folder, sources="0" * 64)
    assert callable(cache.compiled_kernel(_key()))
    assert cache.kernel_origins() == {"compiled": 1}


@linked
@pytest.mark.parametrize(
    "damage", ["library", "empty library", "no library", "", "{}", "[]", '{"functions": [], "glibc": [2, 34]}']
)
def test_a_damaged_library_is_not_used(folder: Path, without_compiler: None, damage: str) -> None:
    """A manifest that is given is the text in its file."""
    library, manifest = _library(folder), _manifest(folder)
    if damage == "library":
        content = bytearray(library.read_bytes())
        content[len(content) // 2] ^= 1
        library.write_bytes(content)
    elif damage == "empty library":
        library.write_bytes(b"")
    elif damage == "no library":
        library.unlink()
    else:
        manifest.write_text(damage)
    with pytest.warns(RuntimeWarning, match="la-cute does not use"):
        assert backend.refusal(PROBLEM) == f"has damaged prebuilt decode kernels for sm_90a, {NO_COMPILER}"
    with pytest.raises(UnsupportedByBackend, match="damaged"):
        cache.compiled_kernel(_key())


@linked
def test_a_library_for_another_interface_of_tvm_ffi_is_not_used(folder: Path, without_compiler: None) -> None:
    made_with = json.loads(_manifest(folder).read_text())["made_with"]
    _change_manifest(folder, made_with={**made_with, "apache-tvm-ffi": "0.0.9"})
    here = ".".join(importlib.metadata.version("apache-tvm-ffi").split(".")[:2])
    reason = f"has prebuilt decode kernels for sm_90a that need apache-tvm-ffi 0.0, got {here}, {NO_COMPILER}"
    assert backend.refusal(PROBLEM) == reason


@linked
def test_another_release_with_the_same_interface_is_fine(folder: Path) -> None:
    made_with = json.loads(_manifest(folder).read_text())["made_with"]
    _change_manifest(folder, made_with={**made_with, "apache-tvm-ffi": f"{made_with['apache-tvm-ffi']}.999"})
    cache.compiled_kernel(_key())
    assert cache.kernel_origins() == {"prebuilt": 1}


@linked
def test_without_a_compiler_what_is_not_prebuilt_is_refused(
    folder: Path, without_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prebuilt_kernels.refusal(PROBLEM) is None
    missing = f"has no prebuilt kernel for this call, {NO_COMPILER}"
    for changes in ({"K": 256}, {"io_dtype": torch.float32}, {"overlap": True}, {"offsets_dtype": torch.int64}):
        assert backend.refusal(replace(PROBLEM, **changes)) == missing
    assert (
        backend.refusal(replace(PROBLEM, arch=(10, 3))) == f"has no prebuilt decode kernels for sm_103a, {NO_COMPILER}"
    )
    assert backend.refusal(replace(PROBLEM, arch=(7, 5))) == "needs compute capability 8.0 or newer, got 7.5"
    with pytest.raises(UnsupportedByBackend, match=re.escape(missing)):
        cache.compiled_kernel(_key(K=256))
    monkeypatch.setenv(prebuilt_kernels.ENV_PREBUILT, "0")
    assert backend.refusal(PROBLEM) == f"may use no prebuilt kernel (LA_CUTE_PREBUILT=0), {NO_COMPILER}"


@linked
def test_a_problem_needs_the_kernel_for_any_address_as_well(folder: Path, without_compiler: None) -> None:
    _change_manifest(folder, functions=[function_name(_key(aligned=True))])
    missing = f"has no prebuilt kernel for this call, {NO_COMPILER}"
    assert backend.refusal(PROBLEM) == missing
    prebuilt_kernels.find_library.cache_clear()
    _change_manifest(folder, functions=[function_name(_key(aligned=False))])
    assert backend.refusal(PROBLEM) == missing
    assert prebuilt_kernels.refusal(replace(PROBLEM, s_row_stride=64 * 64 + 1)) is None


def test_where_there_is_a_compiler_every_kernel_can_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prebuilt_kernels, "compiler_installed", lambda: True)
    monkeypatch.setattr(prebuilt_kernels, "FOLDER", tmp_path)
    assert prebuilt_kernels.refusal(replace(PROBLEM, K=256)) is None


def test_code_for_8_0_serves_the_cards_of_8_6_and_8_9(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = [_key(aligned, arch=(8, 0)) for aligned in (True, False)]
    library = prebuilt_kernels.Library(tmp_path / "sm_80.so", frozenset(map(function_name, keys)))
    none = prebuilt_kernels.Library(tmp_path / "none.so", flaw="has none")
    monkeypatch.setattr(
        prebuilt_kernels, "find_library", lambda folder, arch, family: library if arch == "sm_80" else none
    )
    monkeypatch.setattr(prebuilt_kernels, "compiler_installed", lambda: False)
    monkeypatch.delenv(prebuilt_kernels.ENV_PREBUILT, raising=False)
    for arch in ((8, 0), (8, 6), (8, 9)):
        assert prebuilt_kernels.refusal(replace(PROBLEM, arch=arch)) is None
    assert prebuilt_kernels.refusal(replace(PROBLEM, arch=(9, 0))) == f"has none, {NO_COMPILER}"


@linked
@pytest.mark.skipif(torch.cuda.is_available(), reason="not run: asks what happens without a GPU")
def test_a_call_without_a_gpu_names_the_error_of_cuda(built: Path) -> None:
    code = FAKE_CUDA_TENSORS + (
        "from la_core import DecodeProblem\n"
        "from la_cute.decode_launch import DecodeLaunch\n"
        "problem = DecodeProblem.contiguous(B=8, P=8, H=8, K=64, V=64, device='cuda', arch=(9, 0))\n"
        "try:\n"
        "    DecodeLaunch(problem)._prepare(True)(*arguments)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert re.search(r"cudaError(InsufficientDriver|NoDevice|StubLibrary)", _run_without_compiler(built, code))


@linked
def test_an_error_of_a_launch_names_the_error_of_cuda(tmp_path: Path) -> None:
    """What a compiled function does with the number that a launch returned, by a function that does only that."""
    from la_cute.prebuild import link

    source, compiled = tmp_path / "launch.c", tmp_path / "launch.o"
    source.write_text(
        "#include <tvm/ffi/c_api.h>\n"
        "void CuteDSLRT_TVMFFISetRaisedCudaError(void*, int);\n"
        "int __tvm_ffi_fail(void* self, const TVMFFIAny* arguments, int count, TVMFFIAny* result) {\n"
        "  CuteDSLRT_TVMFFISetRaisedCudaError((void*)TVMFFIErrorSetRaisedFromCStrParts, (int)arguments[0].v_int64);\n"
        "  return -1;\n"
        "}\n"
    )
    import tvm_ffi
    from tvm_ffi.libinfo import include_paths

    includes = [f"-I{path}" for path in include_paths()]
    subprocess.run(["gcc", "-c", "-fPIC", *includes, "-o", str(compiled), str(source)], check=True)
    fail = tvm_ffi.load_module(link([compiled], tmp_path))["fail"]
    for number, words in (
        (2, "cudaErrorMemoryAllocation: out of memory"),
        (719, "cudaErrorLaunchFailure: unspecified"),
    ):
        with pytest.raises(RuntimeError, match=rf"decode: {words}.* \(CUDA error {number}\)"):
            fail(number)


@linked
@pytest.mark.skipif(shutil.which("objdump") is None, reason="not run: reads machine code with objdump")
def test_host_code_is_for_every_processor(built: Path) -> None:
    """The compiler's own host code holds AVX instructions where it runs on a processor that has them."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(_library(built))], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split("\t")[1].split()[0] for line in listing.splitlines() if line.count("\t") == 1}
    assert "movups" in names
    assert [name for name in names if re.fullmatch(r"v(mov|xor|ins|bro|cvt|add|pack|perm|pxor|zero)\w*", name)] == []


@linked
@pytest.mark.parametrize("aligned", [True, False])
def test_prebuilt_and_just_compiled_kernels_are_the_same_machine_code(
    built: Path, tmp_path: Path, aligned: bool
) -> None:
    from la_cute.decode_compile import compile_decode

    kernel = compile_decode(_key(aligned), f"--keep-cubin --dump-dir={tmp_path}").artifacts.CUBIN
    assert len(kernel) > 1000
    assert kernel in _library(built).read_bytes()


@linked
def test_a_library_shows_its_functions_and_nothing_else(built: Path) -> None:
    listing = subprocess.run(["nm", "-D", str(_library(built))], capture_output=True, text=True, check=True).stdout
    shown = {line.split()[-1] for line in listing.splitlines() if " T " in line}
    kernels = {f"__tvm_ffi_{function_name(_key(aligned))}" for aligned in (True, False)}
    assert shown == kernels | {f"PyInit_{prebuilt_kernels.DECODE_CALL}"}


@linked
def test_a_library_is_built_again_only_when_something_has_changed(folder: Path) -> None:
    from la_cute.prebuild import is_current

    assert is_current(folder, "sm_90a-decode")
    assert not is_current(folder, "sm_90a-window")
    assert not is_current(folder, "sm_80-decode")
    _change_manifest(folder, sources="0" * 64)
    assert not is_current(folder, "sm_90a-decode")


@linked
def test_a_library_is_not_made_of_sources_that_change_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from la_cute.prebuild import build_library

    prebuilt_kernels.sources()
    monkeypatch.setattr(prebuilt_kernels, "source_hash", lambda package: "edited since")
    with ThreadPoolExecutor(1) as workers, pytest.raises(RuntimeError, match="have changed since"):
        build_library(tmp_path, "sm_90a-decode", [_key(True)], workers)
    assert list(tmp_path.iterdir()) == []


@linked
def test_a_new_library_takes_the_place_of_the_old(folder: Path) -> None:
    from la_cute.prebuild import build_library

    old = _library(folder)
    with ThreadPoolExecutor(1) as workers:
        new = build_library(folder, "sm_90a-decode", [_key(True)], workers)
    assert _library(folder) == new != old


def test_what_belongs_to_no_library_is_removed(tmp_path: Path) -> None:
    from la_cute.prebuild import remove_others

    left = ["__init__.py", "sm_80-window.json", "sm_90a-decode-0f.so", "sm_90a-decode.json"]
    for name in (*left, "sm_90a.json", "sm_90a-0f.so", "sm_90a-window.json", "sm_90a-window-0f.so"):
        (tmp_path / name).touch()
    remove_others(tmp_path, "sm_90a", ["sm_90a-decode"])
    assert sorted(path.name for path in tmp_path.iterdir()) == left


@linked
def test_a_call_reads_only_the_library_of_its_operator(
    folder: Path, without_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    digest = prebuilt_kernels.library_digest
    monkeypatch.setattr(prebuilt_kernels, "library_digest", lambda path: read.append(path.name) or digest(path))
    for path in (_library(folder), _manifest(folder)):
        shutil.copy(path, path.with_name(path.name.replace("decode", "window")))
    assert backend.refusal(PROBLEM) is None
    assert read == [_library(folder).name]
    assert backend.refusal(_window_problem("verify")) == f"has no prebuilt kernel for this call, {NO_COMPILER}"
    assert len(read) == 2


@pytest.mark.parametrize(
    ("versions", "installed"),
    [({}, True), ({"nvidia-cutlass-dsl": "4.9.0"}, False), ({"nvidia-cutlass-dsl-libs-cu13": None}, False)],
)
def test_a_compiler_is_there_if_all_of_it_is_and_in_the_right_version(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], installed: bool
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = versions.get(name, "none given")
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name) if found == "none given" else found

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert prebuilt_kernels.compiler_installed.__wrapped__() == installed
