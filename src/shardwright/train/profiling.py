"""A rank's profile of some steps: torch's trace of them, and what of it is kept.

Kernels are what the device computed, or without one the operators that the CPU spent time in, less
that of others inside them, and the collectives. A collective on a device is there when its kernel
is, which spins until the last rank's has come; one of the CPU when the host is.
"""

# torch's trace has its own clock, in microseconds, and every rank another one. One mark that is put
# into the trace and read from perf_counter at the same time ties the two, and an exchange of clocks
# ties the ranks. Kernels of collectives are found by who launched them: their names say nothing of
# which call they are.

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile, record_function

from shardwright.core.document import write_atomically
from shardwright.core.measurement import Meeting, RankProfile
from shardwright.launcher.folder import trace_file
from shardwright.runtime.comm.ways import clock_offset
from shardwright.runtime.meter import MEMORY_STEPS, OUTSIDE, Meter

_CLOCK = "shardwright: clock"  # a mark that is on torch's clock and on ours
_MICRO = 1e6
_COLLECTIVE = "nccl"  # in the name of a device's kernel of a collective
_OWN = ("phases", "collectives")  # rows of the trace that torch does not write
_DOUBLE = ("gloo:", "c10d::", "record_param_comms")  # operators of collectives, counted as these

Event = dict[str, Any]


class Profiler:
    """Follows up to ``steps`` steps of each stage of a run, and writes a trace of each.

    It is the meter's watcher while it is on. ``start`` and ``stop`` are collective.
    """

    def __init__(self, meter: Meter, mesh: DeviceMesh, folder: Path, steps: int) -> None:
        self.steps = steps
        self.found: list[RankProfile] = []
        self._meter, self._mesh, self._folder = meter, mesh, folder
        self._torch: profile | None = None

    def after(self, step: int, last: int) -> None:
        """Begin or end with training ``step``, of which the run's ``last`` is one: from the step
        behind those whose memory is followed, or in a short run from its second."""
        # Behind the steps whose memory is followed, which slows them: their profile would be of the
        # meter.
        first = self._meter.first + MEMORY_STEPS[-1] + 1
        first = first if first <= last else self._meter.first + 2
        if self.is_on:
            self.counted(is_last=step == last)
        elif step + 1 == first <= last:
            self.start("training")

    @property
    def is_on(self) -> bool:
        """Whether steps are followed now."""
        return self._torch is not None

    def start(self, stage: str) -> None:
        """Follow what comes."""
        self._stage, self._count = stage, 0
        self._spans: list[tuple[str, float, float]] = []
        self._meetings: list[Meeting] = []
        activities = [ProfilerActivity.CPU]
        if self._mesh.device_type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._torch = profile(activities=activities, acc_events=True)
        # Before the clocks are compared: starting takes long on some ranks, and an exchange that
        # waits for one of them would measure its delay.
        self._torch.start()
        self._offset, self._error = clock_offset(self._mesh)
        with record_function(_CLOCK):
            self._mark = perf_counter()
        self._meter.watcher = self

    def stop(self) -> None:
        """Follow nothing more; the trace is written, and what it says is kept."""
        assert self._torch is not None
        followed, self._torch, self._meter.watcher = self._torch, None, None
        followed.stop()
        path = trace_file(self._folder, self._meter.rank, self._stage)
        followed.export_chrome_trace(str(path))
        trace = msgspec.json.decode(path.read_bytes())
        events: list[Event] = trace["traceEvents"]
        mark = next(event["ts"] for event in events if event["name"] == _CLOCK)
        # from torch's microseconds to seconds that all ranks share, and back
        zero = self._mark + self._offset - mark / _MICRO
        rows = list(self._rows(zero))
        meetings = self._meetings
        kernels = kernels_of([*events, *rows])
        if self._mesh.device_type == "cuda":
            meetings = on_device(meetings, events, zero - self._offset)
        phases: dict[str, float] = defaultdict(float)
        for phase, since, until in self._spans:
            phases[phase] += until - since
        self.found.append(
            RankProfile(
                self._stage,
                self._meter.rank,
                self._count,
                {name: tuple(own) for name, own in kernels.items()},
                dict(phases),
                tuple(shifted(meeting, self._offset) for meeting in meetings),
                self._error,
            )
        )
        events.extend(rows)
        write_atomically(path, msgspec.json.encode(trace))

    def counted(self, *, is_last: bool = False) -> None:
        """One step more is over, the last one or as many as are followed: then it stops."""
        self._count += 1
        if is_last or self._count == self.steps:
            self.stop()

    def passed(self, phase: str, since: float, until: float) -> None:
        """Keep it."""
        self._spans.append((phase, since, until))

    def met(self, meeting: Meeting, phase: str) -> None:
        """Keep it, unless it belongs to no step."""
        if phase != OUTSIDE:
            self._meetings.append(msgspec.structs.replace(meeting, phase=phase))

    def _rows(self, zero: float) -> Iterator[Event]:
        """Phases and collectives as rows of the trace."""
        rank = self._meter.rank
        spans = [(_OWN[0], name, since, until, {}) for name, since, until in self._spans]
        for m in self._meetings:
            about = {"kind": m.kind, "bytes": m.bytes, "group": m.group, "number": m.number}
            spans.append((_OWN[1], m.label, m.began, m.ended, about))
        for row, name, since, until, about in spans:
            place = {"ph": "X", "cat": row, "pid": f"shardwright, rank {rank}", "tid": row}
            start = (since + self._offset - zero) * _MICRO
            yield {
                **place,
                "name": name,
                "ts": start,
                "dur": (until - since) * _MICRO,
                "args": about,
            }


def shifted(meeting: Meeting, offset: float) -> Meeting:
    """The same on a clock that is ``offset`` ahead."""
    moments = {name: getattr(meeting, name) + offset for name in ("arrived", "began", "ended")}
    return msgspec.structs.replace(meeting, **moments)


def kernels_of(events: Iterable[Event]) -> dict[str, list[float]]:
    """Seconds of every call of each kernel of a device; without any, of each operator of the CPU
    and each of our collectives, less what is inside it."""
    found: dict[str, list[float]] = defaultdict(list)
    operators: dict[Any, list[Event]] = defaultdict(list)
    collectives: list[Event] = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found[event["name"]].append(event["dur"] / _MICRO)
        elif event.get("cat") == "cpu_op" and not event["name"].startswith(_DOUBLE):
            operators[event["tid"]].append(event)
        elif event.get("cat") == _OWN[1]:
            collectives.append({**event, "name": event["args"]["kind"]})
    # A device's kernels are all that there is to say; the CPU's operators beside them only launch.
    if found:
        return dict(found)
    # all of a CPU's collectives are waited for by the thread that calls most operators
    busiest = max(operators, key=lambda thread: len(operators[thread]), default=None)
    operators[busiest] += collectives
    for own in operators.values():
        _add_alone(own, found)
    return dict(found)


def _add_alone(events: Sequence[Event], found: dict[str, list[float]]) -> None:
    """Add each operator of a thread without those that it calls."""
    around: list[tuple[float, int]] = []  # end and number of the operators that are on
    alone = [event["dur"] for event in events]
    # Of events that begin together the longest first: it is the one around the others.
    order = sorted(range(len(events)), key=lambda n: (events[n]["ts"], -events[n]["dur"]))
    for number in order:
        event = events[number]
        while around and around[-1][0] <= event["ts"]:
            around.pop()
        if around:
            # Only from the innermost: those further out have lost it with that one's own time.
            alone[around[-1][1]] -= event["dur"]
        around.append((event["ts"] + event["dur"], number))
    for event, micro in zip(events, alone, strict=True):
        found[event["name"]].append(max(micro, 0.0) / _MICRO)


def on_device(meetings: Sequence[Meeting], events: Iterable[Event], zero: float) -> list[Meeting]:
    """Each collective when its kernels ran, which were launched after it had begun and before the
    next one had; ``zero`` seconds is where the events' microseconds begin. Those without a kernel,
    such as of one rank, are left out.
    """
    launches: dict[Any, float] = {}
    kernels: list[Event] = []
    for event in events:
        if event.get("cat") == "cuda_runtime" or event.get("cat") == "cuda_driver":
            launches[event["args"].get("correlation")] = event["ts"] / _MICRO + zero
        elif event.get("cat") == "kernel" and _COLLECTIVE in event["name"].lower():
            kernels.append(event)
    order = sorted(meetings, key=lambda meeting: meeting.arrived)
    arrivals = [meeting.arrived for meeting in order]
    spans: Mapping[int, list[float]] = defaultdict(list)
    for kernel in kernels:
        launched = launches.get(kernel["args"].get("correlation"))
        # The last collective that had begun when the kernel was launched.
        place = -1 if launched is None else bisect_right(arrivals, launched) - 1
        if place >= 0:
            start = kernel["ts"] / _MICRO + zero
            spans[place] += [start, start + kernel["dur"] / _MICRO]
    return [
        msgspec.structs.replace(order[place], arrived=min(span), began=min(span), ended=max(span))
        for place, span in sorted(spans.items())
    ]
