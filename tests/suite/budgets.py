"""What each folder of tests costs, and what it may cost.

Costs are processor seconds of a test and of every process that it starts, in multiples of a loop
that each worker times before its first and after its last test: seconds alone differ twofold
between machines and beside other work, and the loop with them. No clock on the wall is read.
``BUDGETS`` says what the daily tests of a folder took when it was last looked at, and a fifth more;
one that takes half as much again fails the run. Whoever adds to a folder makes something else in it
cheaper, or raises its figure here and says why. ``make test-products`` has no budgets.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

BUDGETS: dict[str, float] = {
    "distributed": 4_200,
    "faults": 1_250,
    "planner": 2_600,
    "estimate": 2_050,  # layouts of advise beside those of memory
    "train": 800,
    "cli": 820,
    "tests": 860,  # examples of every public name
    "trace": 400,
    "core": 200,
    "job": 100,
    "models": 250,
    "runtime": 220,
    "torchrec": 320,
    "heap": 140,
    "cost": 130,
    "report": 130,
    "published": 150,  # seconds and layouts that fit, beside memory
    "benchmarks": 700,  # a GPU's stages with small rows, a study
    "data": 100,
    "tracker": 70,
    "conformance": 70,
    "launcher": 60,
    "golden": 155,
}
MOST = 1.5  # times its budget
LOOP = 2_000_000


def reference_seconds() -> float:
    """Processor seconds of a loop of integers."""
    begin = time.process_time()
    total = 0
    for number in range(LOOP):
        total += number * number % 7
    return time.process_time() - begin


def tree_seconds() -> float:
    """Processor seconds of this process and of all that it has started, those that have ended
    included."""
    tick = os.sysconf("SC_CLK_TCK")
    children: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as stat:
                pid, (parent, *times) = _stat(stat.read())
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(parent, []).append(pid)
        spent[pid] = sum(times) / tick
    total, left = 0.0, [os.getpid()]
    while left:
        pid = left.pop()
        total += spent.get(pid, 0.0)
        left += children.get(pid, [])
    return total


def _stat(text: str) -> tuple[int, tuple[int, ...]]:
    """A process, its parent, and its ticks: user, system, and both of children that were waited
    for. Its name, in parentheses, may have spaces."""
    fields = text.rpartition(")")[2].split()
    return int(text.partition(" ")[0]), (int(fields[1]), *map(int, fields[11:15]))


class Meter:
    """In a process that runs tests: says with each of them what it took."""

    def __init__(self) -> None:
        self.loops = [reference_seconds()]
        self.last: float | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self.last is None:  # importing and collecting is no test's
            self.last = tree_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown" and self.last is not None:
            now = tree_seconds()
            report.user_properties.append(("processor seconds", max(0.0, now - self.last)))
            self.last = now
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.loops.append(reference_seconds())
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["loops"] = self.loops


class Ledger:
    """In the process that prints: what folders took, beside their budgets."""

    def __init__(self, meter: Meter | None, dearest: int, is_daily: bool) -> None:
        self.meter = meter  # of this process, where it runs tests itself
        self.is_daily = is_daily
        self.dearest = dearest
        self.functions: Counter[str] = Counter()  # seconds, all cases together
        self.seconds: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()
        self.loops: list[float] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "processor seconds":
                folder = folder_of(report.nodeid)
                self.seconds[folder] += float(str(value))
                self.functions[report.nodeid.partition("[")[0]] += float(str(value))
                self.tests[folder] += 1

    def pytest_testnodedown(self, node: Any) -> None:
        self.loops += getattr(node, "workeroutput", {}).get("loops", [])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.loops += self.meter.loops if self.meter else []
        if self.over() and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def over(self) -> list[str]:
        """Folders whose daily tests took half as much again as their budget, or more; none is known
        to where no worker came to its end."""
        if not self.loops or not self.is_daily:
            return []
        return [f for f, most in BUDGETS.items() if self.multiples(f) > MOST * most]

    def multiples(self, folder: str) -> float:
        """What a folder took, in multiples of the loop."""
        return self.seconds[folder] * len(self.loops) / sum(self.loops)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.loops or not self.seconds:
            return
        loop = sum(self.loops) / len(self.loops)
        terminalreporter.section(f"processor time of folders, in loops of {loop:.3f} s")
        line = "{:<14} {:>6} {:>9} {:>9} {:>9}".format
        terminalreporter.write_line(line("folder", "tests", "seconds", "loops", "budget"))
        for folder, seconds in self.seconds.most_common():
            loops, most = self.multiples(folder), BUDGETS.get(folder, 0.0)
            row = line(folder, self.tests[folder], f"{seconds:.0f}", f"{loops:.0f}", f"{most:.0f}")
            terminalreporter.write_line(row + ("  OVER" if folder in self.over() else ""))
        total = self.seconds.total()
        tests = self.tests.total()
        terminalreporter.write_line(
            line(
                "all", tests, f"{total:.0f}", f"{total / loop:.0f}", f"{sum(BUDGETS.values()):.0f}"
            )
        )
        for function, seconds in self.functions.most_common(self.dearest):
            terminalreporter.write_line(f"{seconds:>9.1f} s  {function}")
        for folder in self.over():
            terminalreporter.write_line(
                f"tests/{folder}: expected at most {MOST * BUDGETS[folder]:.0f} loops of processor "
                f"time, got {self.multiples(folder):.0f}. Make something in it cheaper, or raise "
                "its budget in tests/suite/budgets.py and say why.",
                red=True,
            )


def folder_of(nodeid: str) -> str:
    """The folder of tests/ in which a test is; files of tests/ itself are one."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "tests"


def register(config: pytest.Config) -> None:
    """Measure what this run takes; on a system without /proc nothing is."""
    if not Path("/proc/self/stat").exists():
        return
    is_worker = hasattr(config, "workerinput")
    alone = not is_worker and not getattr(config.option, "numprocesses", None)
    meter = Meter() if is_worker or alone else None
    if meter is not None:
        config.pluginmanager.register(meter, "meter of processor time")
    if not is_worker:
        config.pluginmanager.register(
            Ledger(meter, config.getoption("dearest"), "not product" in config.option.markexpr),
            "ledger of processor time",
        )
