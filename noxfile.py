"""Every developer command is a session; a bare `nox` runs what CI runs.

The sessions install with pip, and all that need torch share one environment, because torch is what takes long. Pinned
versions are in `constraints.txt`; they hold for development, not for users of the packages.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
CORE, REF, TRITON, CUTE = "packages/la-core", "packages/la-ref", "packages/la-triton", "packages/la-cute"
BENCH = "bench"
CUTE_JIT = f"{CUTE}[jit]"
DISTRIBUTIONS = (CORE, REF, TRITON, CUTE, BENCH)
REQUIRED_BACKENDS = ("ref",)
"""Backends that must pass on every machine; the others run where they can, and are listed as not run elsewhere."""

CONSTRAINTS = "constraints.txt"
SHARED_TOOLS = (
    *("pytest", "pytest-xdist", "hypothesis", "mypy", "-r", "docs/requirements.txt"),
    # Prebuilt kernels are linked with it. No version in the constraints: a torch for GPUs asks for one of its own.
    'nvidia-cuda-runtime>=13,<14; sys_platform == "linux"',
)

IN_PARALLEL = ("--numprocesses", "auto", "--maxprocesses", "8", "--dist", "worksteal")
"""One process of tests for each core, up to 8."""

FEW_THREADS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
"""Two threads of torch in each process, so that what threads change can show; they sleep while they have no work.
By default they spin instead, which takes most of a machine whose cores are all in use.
"""

HAS_PREBUILT = sys.platform == "linux" and platform.machine() == "x86_64"
"""Whether this is a platform for which la-cute's kernels are built ahead of time."""

MOST_WHEEL_BYTES = 20_000_000
"""What the wheel with prebuilt kernels may take."""

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
# tests come last, so that their summary ends the log.
nox.options.sessions = ["lint", "types", "docs", "report", "costs", "records", "build", "install", "tests"]


def shared_python(session: nox.Session) -> str:
    """The interpreter of the environment that all sessions with torch share; made or brought up to date first."""
    home = ROOT / ".nox" / "shared"
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    needs = [ROOT / CONSTRAINTS, ROOT / "docs/requirements.txt", *(ROOT / d / "pyproject.toml" for d in DISTRIBUTIONS)]
    state = hashlib.sha256(b"".join(path.read_bytes() for path in needs) + repr(SHARED_TOOLS).encode()).hexdigest()
    stamp = home / "installed"
    if not stamp.exists() or stamp.read_text() != state:
        session.log(f"preparing the shared environment in {home.relative_to(ROOT)} (about 1 GB with a CPU-only torch)")
        session.run(sys.executable, "-m", "venv", "--clear", str(home), external=True, silent=True)
        editable = [part for path in (CORE, REF, TRITON, CUTE_JIT, BENCH) for part in ("-e", path)]
        session.run(
            *(str(python), "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS),
            *editable,
            *SHARED_TOOLS,
            external=True,
        )
        stamp.write_text(state)
    return str(python)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """The whole conformance suite on every installed backend, and the tests of each package.

    On Linux la-triton's suite runs first, on CPU tensors under Triton's interpreter; of many alike tests, one in six.
    Arguments go to pytest, and there is one run then, in one process: nox -s tests -- shared_tests --backend NAME
    """
    python = shared_python(session)
    if session.posargs:
        session.run(python, "-m", "pytest", *session.posargs, external=True)
        return
    if sys.platform == "linux":
        session.run(
            *(python, "-m", "pytest", "shared_tests", "packages/la-triton"),
            *("--backend", "triton", "--require-backend", "triton", "--sample", "6", *IN_PARALLEL),
            env={"TRITON_INTERPRET": "1", **FEW_THREADS},
            external=True,
        )
    required = (f"--require-backend={name}" for name in REQUIRED_BACKENDS)
    session.run(python, "-m", "pytest", *required, *IN_PARALLEL, env=FEW_THREADS, external=True)


@nox.session(venv_backend="none")
def report(session: nox.Session) -> None:
    """Compare all installed backends on serving workloads; leaves report/report.html, report.md and rows.jsonl.

    Arguments go to la-bench compare: nox -s report -- --quick
    """
    python = shared_python(session)
    session.run(python, "-m", "la_bench", "compare", *session.posargs, external=True)


@nox.session(venv_backend="none")
def costs(session: nox.Session) -> None:
    """Cost of a call from Python: within 3 times torch.add. Cost of la-ref on this CPU, against `s.mul_(a)`.

    The limit of 4 holds where both take turns over one pool of 64 slots; the best of three processes counts, since
    `mul_` depends on the pages that a process happens to get. The other arrangements are printed without a limit: there
    la-ref can take more than 4 times as long.
    """
    python = shared_python(session)
    session.run(python, "-m", "la_bench", "host", "--max-ratio", "3", external=True)
    for left in (2, 1, 0):
        try:
            session.run(python, "-m", "la_bench", "ref", "--max-ratio", "4", external=True)
            break
        except CommandFailed:
            if left == 0:
                raise


@nox.session(venv_backend="none")
def records(session: nox.Session) -> None:
    """List the records of runs on real cards, and which are stale: their sources have changed since."""
    session.run(shared_python(session), "-m", "la_bench", "records", *session.posargs, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting and the text checks; pass --fix to let ruff mend what it can."""
    session.install("--constraint", CONSTRAINTS, "ruff", "pre-commit")
    if "--fix" in session.posargs:
        session.run("ruff", "check", "--fix", ".", success_codes=[0, 1])
        session.run("ruff", "format", ".")
    session.run("pre-commit", "run", "--all-files", "--show-diff-on-failure")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy --strict over all packages, as the oldest supported Python sees them."""
    python = shared_python(session)
    sources = [f"{path}/src" for path in DISTRIBUTIONS]
    session.run(python, "-m", "mypy", *sources, "docs/generate.py", external=True)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation without warnings and check what is generated; pass --write to regenerate it."""
    python = shared_python(session)
    session.run(python, "docs/generate.py", *([] if "--write" in session.posargs else ["--check"]), external=True)
    session.run(python, "-m", "sphinx", "-W", "-q", "-b", "html", "docs", "docs/_build/html", external=True)
    session.log("open docs/_build/html/index.html")


@nox.session(venv_backend="none")
def prebuild(session: nox.Session) -> None:
    """Build la-cute's kernels ahead of time, for every architecture, unless they are up to date; a few minutes.

    Needs gcc and Python's header files, on Linux for x86-64, and no GPU. Arguments go to la_cute.prebuild:
    nox -s prebuild -- sm_90a
    """
    session.run(shared_python(session), "-m", "la_cute.prebuild", *session.posargs, external=True)


@nox.session
def build(session: nox.Session) -> None:
    """Wheels and sdists of all packages, into dist/: of la-cute a wheel for any platform, and one with kernels.

    The latter needs what `prebuild` needs, and is left out on other platforms than Linux for x86-64.
    """
    session.install("--constraint", CONSTRAINTS, "build")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for path in DISTRIBUTIONS:
        session.run("python", "-m", "build", "--outdir", "dist", path, silent=True)
    if HAS_PREBUILT:
        session.run(shared_python(session), "-m", "la_cute.prebuild", external=True)
        # What an earlier build has left there would go into the wheel.
        shutil.rmtree(ROOT / CUTE / "build", ignore_errors=True)
        session.run("python", "-m", "build", "--wheel", "--outdir", "dist", CUTE, silent=True)
        size = _wheel("la-cute").stat().st_size
        if size > MOST_WHEEL_BYTES:
            session.error(f"la-cute's wheel has {size:,} bytes, more than {MOST_WHEEL_BYTES:,}")
    session.log("built " + ", ".join(sorted(path.name for path in (ROOT / "dist").iterdir())))


def _wheel(name: str) -> Path:
    """The wheel of a distribution in dist/ that pip would take: one for this platform before one for any."""
    wheels = (ROOT / "dist").glob(f"{name.replace('-', '_')}-*.whl")
    return min(wheels, key=lambda path: path.name.endswith("-any.whl"))


CHECKS = {
    CORE: """
import la_core, torch
assert la_core.list_backends() == [], la_core.list_backends()
try:
    la_core.decode(*[torch.ones(1, 1, 4)] * 3, torch.zeros(1, 4, 4), torch.tensor([0]), torch.ones(1))
except la_core.BackendUnavailable as reason:
    assert "python3 -m pip install la-ref" in str(reason), reason
else:
    raise SystemExit("decode ran without a backend")
""",
    REF: """
import la_core, torch
assert [info.name for info in la_core.list_backends() if info.error is None] == ["ref"]
s = torch.zeros(1, 4, 4)
out = la_core.decode(*[torch.ones(1, 1, 4)] * 3, s, torch.tensor([0]), torch.ones(1), softmax_scale=1.0)
assert bool((s == 1).all()) and bool((out == 4).all())
""",
    TRITON: """
import la_core, sys, torch
problem = la_core.DecodeProblem.contiguous(B=1, P=1, H=1, K=64, V=64)
assert [info.name for info in la_core.list_backends() if info.error is None] == ["triton"]
assert "set TRITON_INTERPRET=1" in str(la_core.explain_choice(problem, backend="triton"))
if sys.platform == "linux":
    from la_triton.compile_offline import main
    raise SystemExit(main(["sm_90"]))
""",
    CUTE: """
import importlib.util, la_core, sys
from la_cute import compiled_kernel_cache, prebuilt_kernels
from la_cute.kernel_keys import keys_of_problem
problem = la_core.DecodeProblem.contiguous(B=1, P=1, H=1, K=128, V=128)
assert [info.name for info in la_core.list_backends() if info.error is None] == ["cute"]
assert "runs cuda tensors, got cpu" in str(la_core.explain_choice(problem, backend="cute"))
assert importlib.util.find_spec("cutlass") is None
def on_a_gpu(**sizes):
    return la_core.DecodeProblem.contiguous(B=1, P=1, H=8, device="cuda", arch=(9, 0), **sizes)
assert 'python3 -m pip install "la-cute[jit]"' in prebuilt_kernels.refusal(on_a_gpu(K=256, V=256))
if "--prebuilt" in sys.argv:
    problem = on_a_gpu(K=128, V=128)
    assert prebuilt_kernels.refusal(problem) is None
    for key in keys_of_problem(problem):
        assert callable(compiled_kernel_cache.compiled_kernel(key))
    assert compiled_kernel_cache.kernel_origins() == {"prebuilt": 2}
    assert "cutlass" not in sys.modules
""",
    CUTE_JIT: """
import sys
if sys.platform == "linux":
    from la_cute.compile_offline import main
    raise SystemExit(main(["sm_90a"]))
""",
    BENCH: """
import subprocess, sys
subprocess.run([sys.executable, "-m", "la_bench", "--help"], check=True, stdout=subprocess.DEVNULL)
""",
}
"""What each distribution must be able to do alone in an environment: import, discover, decode; and la-cute beside its
compiler.
"""


@nox.session
def install(session: nox.Session) -> None:
    """Each wheel alone with its dependencies: import, discover, decode. Needs dist/ from `build`.

    torch stays in the environment between wheels; everything else that a wheel brought is removed after its check.
    """
    wheels = ROOT / "dist"
    if not wheels.exists():
        session.error("dist/ is missing: run `nox -s build` first")
    session.install("--constraint", CONSTRAINTS, "torch")
    for path, check in CHECKS.items():
        before = _installed(session)
        name, bracket, extra = (Path(path).name if path != BENCH else "la-bench").partition("[")
        wheel = f"{_wheel(name)}{bracket}{extra}"
        session.install("--constraint", CONSTRAINTS, "--find-links", str(wheels), wheel)
        session.run("python", "-c", check, *(["--prebuilt"] if HAS_PREBUILT else []))
        session.run("python", "-m", "pip", "check")
        session.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", *sorted(_installed(session) - before))


def _installed(session: nox.Session) -> set[str]:
    listed = session.run("python", "-m", "pip", "list", "--format=freeze", silent=True, log=False)
    return {line.split("==")[0] for line in str(listed).splitlines() if "==" in line}
