"""A training loop is measured step by step: that of ``train``, and one of a user's own."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
from msgspec import UNSET, UnsetType
from torch import nn

from shardwright import __version__
from shardwright.core.document import decode_json
from shardwright.core.measurement import RECORD_SCHEMA, Measurement, Record, Saved
from shardwright.core.timeline import Phase
from shardwright.job.plan import Plan
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.runtime.checkpoint.agreement import rank_and_size
from shardwright.runtime.comm import Comm, flat
from shardwright.runtime.meter import Meter, comm_of
from shardwright.train.records import merge


class Measured:
    """What a loop on this rank took so far; ``measure`` makes one."""

    def __init__(self, plan: Plan, comm: Comm, meter: Meter) -> None:
        self.plan = plan
        self._comm = comm
        self._meter = meter
        self.losses: list[float] = []  # of every step, also of runs that this one goes on from
        self._begin()

    def _begin(self) -> None:
        self._meter.begin()
        self._comm.step = self._meter.number  # for messages about lost peers

    def step(self, loss: torch.Tensor | float | None = None) -> None:
        """A step is over and the next one begins; ``loss`` is this rank's, for the curve."""
        with self.between(loss):
            pass

    @contextmanager
    def between(self, loss: torch.Tensor | float | None = None) -> Iterator[None]:
        """The same, and what is done inside belongs to no step."""
        self._meter.end()
        if loss is not None:
            self.losses.append(loss.item() if isinstance(loss, torch.Tensor) else loss)
        yield
        self._begin()

    def record(
        self, bad_rows: int = 0, saved: Saved | UnsetType = UNSET, skipped: int = 0
    ) -> Record:
        """What this rank measured."""
        meter = self._meter
        return Record(
            schema=RECORD_SCHEMA,
            plan_fingerprint=self.plan.fingerprint,
            rank=meter.rank,
            events=(*meter.exact, *meter.events()),
            losses=tuple(self.losses),
            seconds_per_step=meter.seconds_per_step,
            memory_steps=meter.memory_steps,
            time_steps=meter.time_steps,
            bad_rows=bad_rows,
            versions={
                "shardwright": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            machine={
                "system": platform.system(),
                "processor": platform.machine(),
                "cores": str(os.cpu_count()),
                "threads_per_rank": str(torch.get_num_threads()),
            },
            saved=saved,
            skipped=skipped or UNSET,
            busy_seconds=meter.busy_seconds_per_step,
        )

    def gather(self) -> Measurement:
        """What all ranks measured (collective), the same on every rank."""
        mesh, text = self._comm.mesh, msgspec.json.encode(self.record())
        comm = self._comm if mesh.ndim == 1 else Comm(flat(mesh))  # replicas, too
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(comm.mesh.device_type)
        sizes = own.new_empty(comm.size, dtype=torch.int64)
        comm.all_gather("sizes of records", sizes, sizes.new_tensor([len(text)]))
        lengths = sizes.tolist()
        texts = comm.gather_uneven("records", own, lengths).cpu().split(lengths)
        return merge(self.plan, [decode_json(t.numpy().tobytes(), Record) for t in texts])


@contextmanager
def measure(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    meter: Meter | None = None,
) -> Iterator[Measured]:
    """Measure a loop over ``model``, which runs ``plan``, step by step::

        with sw.measure(plan, model, optimizer) as measured:
            for x, y in batches:
                loss = loss_of(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                measured.step(loss)
        print(sw.compare(plan, measured.gather()))

    Memory is followed on steps 3 to 5, which slows them; seconds are those of the steps after, or
    where there are none of the steps before, the first apart. What is loaded between two steps
    belongs to the second one.
    """
    comm = comm_of(model)
    if meter is None:
        meter = metered(rank_and_size(comm)[0], None, comm.mesh.device_type)
    events = (run.event for run in plan.timeline)
    meter.beside = frozenset(event.name for event in events if event.kind == "hidden")
    try:
        with meter.watching(model, optimizer):
            yield Measured(plan, comm, meter)
    finally:
        comm.step = None


def metered(rank: int, heartbeat: Heartbeat | None, device_type: str) -> Meter:
    """A meter for a rank's loop, by which a ``heartbeat`` beats."""
    meter = Meter(rank, None, None if device_type == "cpu" else torch.cuda.synchronize)

    def beat(phase: Phase | None) -> None:
        assert heartbeat is not None
        if phase is None:
            heartbeat.begin(step=meter.number)
        else:
            heartbeat.mark(phase, meter.number)

    if heartbeat is not None:
        meter.listener = beat
    return meter
