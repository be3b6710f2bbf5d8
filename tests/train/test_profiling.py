"""Kernels and collectives are read off a trace in Chrome's format."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.core.measurement import Meeting
from shardwright.train.profiling import kernels_of, on_device


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": ts, "dur": dur, "args": args}


def micro(found: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: pytest.approx([s * 1e-6 for s in own]) for name, own in found.items()}


def test_an_operator_of_the_cpu_counts_without_those_that_it_calls() -> None:
    events = [
        event("cpu_op", "linear", 0, 100),
        event("cpu_op", "mm", 10, 60),
        event("cpu_op", "copy", 20, 5),
        event("cpu_op", "mm", 120, 7),
        event("python_function", "forward", 0, 500),
    ]
    assert kernels_of(events) == micro({"linear": [40], "mm": [55, 7], "copy": [5]})


def test_a_collective_counts_once_and_not_in_what_calls_it() -> None:
    events = [
        event("cpu_op", "Lookup", 0, 100),
        event("cpu_op", "gloo:all_to_all", 21, 10),
        event("collectives", "ids", 20, 70, kind="all_to_all"),
    ]
    events[2]["tid"] = "collectives"
    assert kernels_of(events) == micro({"Lookup": [30], "all_to_all": [70]})


def test_a_device_s_kernels_are_what_counts_where_there_are_any() -> None:
    events = [event("cpu_op", "mm", 0, 9), event("kernel", "gemm", 5, 30, correlation=1)]
    assert kernels_of(events) == micro({"gemm": [30]})


def test_a_collective_of_a_device_is_as_long_as_its_kernels() -> None:
    events = [
        event("cuda_runtime", "cudaLaunchKernel", 1_000_011, 2, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 1_000_015, 2, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 1_000_031, 2, correlation=3),
        event("kernel", "ncclDevKernel_SendRecv", 1_000_020, 500, correlation=1),
        event("kernel", "gemm", 1_000_600, 500, correlation=2),
        event("kernel", "ncclDevKernel_AllReduce", 1_002_000, 40, correlation=3),
    ]
    host = [(1, 4.000010), (2, 4.000030), (3, 4.000050)]  # the third has no kernel
    meetings = [Meeting("g", n, "all_to_all", "x", 8, at, at, at + 1e-6) for n, at in host]
    found = on_device(meetings, events, zero=3.0)
    assert [(m.number, m.began, m.ended) for m in found] == [
        (1, pytest.approx(4.000020), pytest.approx(4.000520)),
        (2, pytest.approx(4.002000), pytest.approx(4.002040)),
    ]
    assert all(m.arrived == m.began for m in found)
