"""The HTML of a report in a browser: plots and tables are there, and a phone does not have to scroll sideways."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from la_bench.rows import Row, from_json_lines
from la_bench.write_report import render_report

CHROMIUM = shutil.which("chromium")
RECORDS = Path(__file__).parents[1] / "records" / "nvidia-h200"
GRID = RECORDS / "2026-11-29-la-triton-2" / "grid-all-peers.jsonl"
WINDOWS = RECORDS / "2026-11-30-full-2"
DESKTOP, PHONE = 1280, 390
SECONDS = 60

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (a Debian package)"),
    pytest.mark.skipif(os.name != "posix", reason="talks to chromium through file descriptors"),
]

MEASURE = """
(() => {
  const details = [...document.querySelectorAll("details")];
  const folded = details.filter(e => !e.open).length;
  details.forEach(e => { e.open = true; });
  const width = document.documentElement.clientWidth;
  const boxes = [...document.querySelectorAll("body *")].filter(e => !e.closest(".table") && !e.closest("svg"));
  const visible = (e) => e.getBoundingClientRect().width > 100 && e.getBoundingClientRect().height > 50;
  return JSON.stringify({
    inner: window.innerWidth,
    page: document.documentElement.scrollWidth,
    folded,
    wide: boxes.filter(e => e.getBoundingClientRect().right > width + 1).map(e => e.outerHTML.slice(0, 80)),
    plots: [...document.querySelectorAll("figure svg")].filter(visible).length,
    marks: [...document.querySelectorAll("figure svg")].map(e => e.querySelectorAll("path").length),
    letters: Math.min(...[...document.querySelectorAll("figure svg text")].map(e => e.getBoundingClientRect().height)),
    tables: [...document.querySelectorAll(".table table")].filter(visible).length,
    headings: [...document.querySelectorAll("h2")].map(e => e.textContent),
    background: getComputedStyle(document.body).backgroundColor,
    text: getComputedStyle(document.querySelector("figure svg text")).fill,
  });
})()
"""

# The browser reads from descriptor 3 and writes to 4, whatever the ends of the pipes are called here.
PLUMBING = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A page in headless Chromium, driven over its debugging pipe: no port, and no library."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", PLUMBING, str(to_browser), str(from_browser), CHROMIUM, "--headless"),
                *("--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
                *("--no-first-run", f"--user-data-dir={profile}"),
            ],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """Give a command and wait for what it returns."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], SECONDS)[0], "chromium does not answer"
            part = os.read(self._answers, 1 << 16)
            assert part, "chromium ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def show(self, file: Path, width: int, scheme: str = "light") -> dict[str, Any]:
        """Open a file at a width and measure the page."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.send("Page.navigate", url=file.as_uri())
        deadline = time.monotonic() + SECONDS
        while self._value("document.readyState + location.href") != f"complete{file.as_uri()}":
            assert time.monotonic() < deadline, "the page was not loaded"
            time.sleep(0.05)
        measured: dict[str, Any] = json.loads(self._value(MEASURE))
        return measured

    def _value(self, expression: str) -> str:
        return str(self.send("Runtime.evaluate", expression=expression)["result"]["value"])

    def picture(self, file: Path) -> None:
        """The whole page as a PNG file."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End the browser."""
        os.close(self._commands)
        os.close(self._answers)
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("chromium"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a recorded grid with all peers: the widest tables and the most lines there are."""
    file = tmp_path_factory.mktemp("grid") / "report.html"
    return report_of(GRID, file)


def report_of(record: Path, file: Path) -> Path:
    file.write_text(render_report(from_json_lines(record.read_text()))["report.html"], encoding="utf-8")
    return file


@pytest.fixture
def workloads(tmp_path: Path, make_row: Callable[..., Row]) -> Path:
    rows = [
        make_row(workload, backend, time_us=microseconds)
        for workload in ("ring-mini-linear-2.0/medium", "minicpm-sala/heavy")
        for backend, microseconds in (("ref", 1500.0), ("swift", 500.0))
    ]
    rows.append(make_row(backend="shy", status="refused", reason="a-very-long-word-" * 20))
    file = tmp_path / "report.html"
    file.write_text(render_report(rows)["report.html"], encoding="utf-8")
    return file


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_a_grid_in_a_browser(width: int, browser: Browser, grid: Path) -> None:
    page = browser.show(grid, width)
    assert page["inner"] == width
    assert page["page"] <= width
    assert page["wide"] == []
    # Two plots for each of four numbers of heads, host time and accuracy.
    assert page["plots"] == 10
    assert min(page["marks"]) > 10
    # Three tables for each number of heads, the summary, host time, what was not timed, and two of the environment.
    assert page["tables"] >= 17
    # The complete tables, which are opened here before the page is measured.
    assert page["folded"] == 4
    assert page["headings"][0] == "Plots"
    assert {f"H = {H}" for H in (8, 16, 32, 64)} < set(page["headings"])
    assert page["letters"] >= 8


@pytest.mark.parametrize(("record", "heads", "plots"), [("deferred", 2, 4), ("verify", 1, 4), ("commit", 1, 4)])
def test_reports_with_a_window_in_a_browser(
    record: str, heads: int, plots: int, browser: Browser, tmp_path: Path
) -> None:
    file = report_of(WINDOWS / f"{record}.jsonl", tmp_path / "report.html")
    for width in (DESKTOP, PHONE):
        page = browser.show(file, width)
        assert page["page"] <= width
        assert page["wide"] == []
        assert page["plots"] == plots
        assert min(page["marks"]) > 10
        assert page["folded"] == heads
        assert page["tables"] >= 3 * heads + 5
        assert page["letters"] >= 8


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_workloads_in_a_browser(width: int, browser: Browser, workloads: Path) -> None:
    page = browser.show(workloads, width)
    assert page["page"] <= width
    assert page["wide"] == []
    assert page["plots"] == 3
    assert page["tables"] >= 6


def test_dark_mode_changes_page_and_plots(browser: Browser, grid: Path) -> None:
    light, dark = (browser.show(grid, DESKTOP, scheme) for scheme in ("light", "dark"))
    assert (light["background"], dark["background"]) == ("rgb(255, 255, 255)", "rgb(20, 24, 31)")
    assert light["text"] != dark["text"]


if __name__ == "__main__":
    # python bench/tests/test_browser.py REPORT.html FOLDER: pictures to look at.
    import tempfile

    with tempfile.TemporaryDirectory() as profile:
        opened = Browser(Path(profile))
        for one_width in (DESKTOP, PHONE):
            for one_scheme in ("light", "dark"):
                opened.show(Path(sys.argv[1]).resolve(), one_width, one_scheme)
                opened.picture(Path(sys.argv[2], f"{one_width}-{one_scheme}.png"))
        opened.close()
