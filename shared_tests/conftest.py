"""Which backends the suite runs, on which devices, and an honest account of both.

pytest shared_tests                          every installed backend
pytest shared_tests --backend NAME           one backend; may be given again, or as A,B
pytest shared_tests --require-backend NAME   fail if it is absent or passes no test
pytest shared_tests --sample 6               one in six of many alike tests, for slow machines
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections import defaultdict
from collections.abc import Generator
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import la_core
from la_core.backends.discover_backends import load_backend
from la_core.conformance.source_hash import folder_hash, source_hash
from la_core.conformance.target import DeclaredRefusal, Target
from la_core.conformance.window_target import WindowTarget

settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("default"), derandomize=False, max_examples=1000)
settings.register_profile("quick", parent=settings.get_profile("default"), max_examples=10)
settings.load_profile("default")

COMPILERS = {"triton": "triton", "cutlass_dsl": "nvidia-cutlass-dsl"}
"""Distributions whose versions a record names."""

NO_GPU = "not run: no CUDA device"

TARGET = "target"
"""The property of a report that names the backend and device which its test is about."""

_plan = pytest.StashKey["_Plan"]()


class _Plan:
    """What this run covers, decided once from the options."""

    def __init__(self, config: pytest.Config) -> None:
        self.required = _names(config.getoption("--require-backend"))
        asked = _names(config.getoption("--backend"))
        infos = {info.name: info for info in la_core.list_backends()}
        self.not_run: dict[str, str] = {}
        self.targets: list[Target] = []
        self.versions: dict[str, str] = {}
        devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
        for name in dict.fromkeys([*(asked or infos), *self.required]):
            if name not in infos:
                self.not_run[name] = "not installed"
            elif infos[name].error is not None:
                self.not_run[name] = f"unusable: {infos[name].error}"
            else:
                self.versions[name] = infos[name].distribution
                usable = [d for d in devices if d in load_backend(name).capabilities.device_types]
                self.targets += [Target(name, device) for device in usable]
                for device in load_backend(name).capabilities.device_types:
                    if device not in usable:
                        self.not_run[f"{name} on {device}"] = f"no {device} device on this machine"
        for name in infos if asked else ():
            if name not in asked:
                self.not_run[name] = "not asked for"
        self.outcomes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        # A name that was asked for must be there: a run that tests nothing has not passed.
        self.must_pass = list(dict.fromkeys([*asked, *self.required]))
        self.missing = [name for name in self.must_pass if not any(t.name == name for t in self.targets)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Also called in the process that sums up what the workers of pytest-xdist have run."""
        target = dict(report.user_properties).get(TARGET)
        if target is not None and (report.when == "call" or report.outcome != "passed"):
            self.outcomes[str(target)][report.outcome].append(report.nodeid)


def _names(values: list[str]) -> list[str]:
    names = [name.strip() for value in values for name in value.split(",")]
    if "" in names:
        raise pytest.UsageError("--backend and --require-backend take names, got an empty one")
    return names


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("Lightning Attention conformance")
    group.addoption("--backend", action="append", default=[], metavar="NAME", help="test this backend (default: all)")
    group.addoption(
        "--require-backend", action="append", default=[], metavar="NAME", help="fail if this backend passes no test"
    )
    group.addoption("--outcomes", metavar="FILE", help="write every backend's passed and failed tests as JSON")
    group.addoption(
        "--sample", type=int, default=1, metavar="N", help="of the tests marked `many`, run one in N, the others not"
    )
    group.addoption(
        "--enough-failures", type=int, default=0, metavar="N", help="run no more tests of a backend that failed N"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_plan] = _Plan(config)
    config.pluginmanager.register(config.stash[_plan])


def pytest_report_header(config: pytest.Config) -> list[str]:
    plan = config.stash[_plan]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [
        f"la-core {la_core.__version__}, spec revision {la_core.SPEC_REVISION}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {', '.join(gpus) or 'no GPU'}",
        "backends: " + (", ".join(f"{target} ({plan.versions[target.name]})" for target in plan.targets) or "none"),
        *(f"not run: {what} ({reason})" for what, reason in plan.not_run.items()),
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" not in metafunc.fixturenames:
        return
    targets = metafunc.config.stash[_plan].targets
    parameters: list[object] = list(targets)
    if metafunc.definition.get_closest_marker("needs_gpu"):
        parameters = [target for target in targets if target.device == "cuda"]
        if not torch.cuda.is_available():
            parameters = [
                pytest.param(Target(name, "cuda"), marks=pytest.mark.skip(reason=NO_GPU))
                for name in dict.fromkeys(target.name for target in targets)
                if "cuda" in load_backend(name).capabilities.device_types
            ]
        parameters = parameters or [pytest.param(None, marks=pytest.mark.skip(reason="not run: no backend for CUDA"))]
    metafunc.parametrize("target", parameters, ids=str, scope="session")


@pytest.fixture(scope="session")
def windows(target: Target) -> WindowTarget:
    """The window operators of the target."""
    return WindowTarget(target)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of the suite do not depend on a backend: a run for named backends leaves them out.

    They take longest and come first, so that with pytest-xdist no process waits for them at the end.
    """
    items.sort(key=lambda item: "tests_of_the_suite" not in item.nodeid)
    _leave_a_sample(items, config.getoption("--sample"))
    if config.getoption("--backend"):
        ours = [item for item in items if "tests_of_the_suite" in item.nodeid]
        if ours:
            config.hook.pytest_deselected(items=ours)
            items[:] = [item for item in items if item not in ours]


def _leave_a_sample(items: list[pytest.Item], one_in: int) -> None:
    """For slow machines, such as an interpreter: list most of many alike tests as not run."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for item in items:
        if one_in > 1 and item.get_closest_marker("many"):
            target = getattr(item, "callspec", None) and item.callspec.params.get("target")
            test = item.nodeid.partition("[")[0], str(target)
            if counts[test] % one_in:
                item.add_marker(pytest.mark.skip(reason=f"not run: one in {one_in} of these is (--sample)"))
            counts[test] += 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, DeclaredRefusal):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: not run: {call.excinfo.value}")
    target = getattr(item, "callspec", None) and item.callspec.params.get("target")
    if target is not None:
        report.user_properties.append((TARGET, str(target)))
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--enough-failures")
    target = getattr(item, "callspec", None) and item.callspec.params.get("target")
    if limit and target and len(item.config.stash[_plan].outcomes[str(target)]["failed"]) >= limit:
        pytest.skip(f"not run: {target} has failed {limit} tests already")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # A worker of pytest-xdist has run a part; who started it sums up.
    plan = session.config.stash[_plan]
    if not session.config.option.collectonly:
        passed = {t.name for t in plan.targets if plan.outcomes[str(t)]["passed"]}
        plan.missing += [name for name in plan.must_pass if name not in passed and name not in plan.missing]
    if plan.missing and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    path = session.config.getoption("--outcomes")
    if path:
        outcomes = {target: dict(by_outcome) for target, by_outcome in plan.outcomes.items()}
        record = {"environment": _environment(plan), "outcomes": outcomes, "not_run": plan.not_run}
        Path(path).write_text(json.dumps(record, indent=1) + "\n")


def _environment(plan: _Plan) -> dict[str, object]:
    """What ran: versions, machine, settings, and hashes of this suite and the sources of la_core and each backend."""
    modules = {"la_core": la_core.__name__, **{t.name: type(t.backend).__module__ for t in plan.targets}}
    suite = folder_hash(Path(__file__).parent)
    settings_of_backends = ("LA_", "TRITON_", "CUTE_")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "la_core": la_core.__version__,
        "spec_revision": la_core.SPEC_REVISION,
        "backends": plan.versions,
        "sources_sha256": {"shared_tests": suite, **{name: source_hash(module) for name, module in modules.items()}},
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(settings_of_backends)},
        "torch": torch.__version__,
        **{name: _version(distribution) for name, distribution in COMPILERS.items()},
        "python": platform.python_version(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    plan = config.stash[_plan]
    terminalreporter.section("backends")
    for target in plan.targets:
        counts = ", ".join(f"{len(plan.outcomes[str(target)][o])} {o}" for o in ("passed", "failed", "skipped"))
        terminalreporter.line(f"{target}: {counts}")
    for what, reason in plan.not_run.items():
        terminalreporter.line(f"{what}: NOT RUN, {reason}")
    caught: dict[str, list[str]] = {}
    for report in terminalreporter.getreports("passed"):
        caught |= dict(report.user_properties).get("caught_by", {})
    if caught:
        terminalreporter.section("wrong backends, and the first test that caught each")
        for fault, tests in caught.items():
            names = ", ".join(re.sub(r"^.*::(\w+).*$", r"\1", test) for test in tests)
            terminalreporter.line(f"{fault}: {names}")
    for name in plan.missing:
        terminalreporter.line(f"{name}: MISSING, was asked for and passed no test", red=True)
