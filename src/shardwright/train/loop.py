"""A training loop is measured step by step, that of ``train`` and one of a user's own; of these a
``Run`` lasts: saved, stopped by signals, resumed.
"""

# A step is measured from the end of the one before, so loading its batch belongs to it; what is
# done in ``between`` (saving, scoring) belongs to none. The meter finds phases by hooks: a loop
# says only where a step ends. ``comm.step`` is set for messages of collectives alone, and taken
# back when the loop is over, or errors after it would name a step.

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import UNSET, UnsetType
from torch import nn

from shardwright import __version__
from shardwright.core.document import decode_json
from shardwright.core.measurement import RECORD_SCHEMA, Measurement, Record, Saved
from shardwright.core.timeline import Phase
from shardwright.job.plan import Plan
from shardwright.job.train import CheckpointSection
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.runtime.checkpoint.agreement import rank_and_size
from shardwright.runtime.checkpoint.folders import complete_steps
from shardwright.runtime.comm import Comm, flat
from shardwright.runtime.meter import Meter, comm_of
from shardwright.runtime.saves import Saves
from shardwright.runtime.saving import Resumed, load_checkpoint
from shardwright.train.records import merge
from shardwright.train.writers import Progress, check_log, writers


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
            self.losses.append(_plain(loss))
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
        # A record of every rank, and a group of shards has only those of one replica.
        comm = self._comm if mesh.ndim == 1 else Comm(flat(mesh))
        # Bytes in a tensor and no pickled object: nothing that came over a network is ever
        # unpickled.
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
    # Kernels run behind the host: without waiting for them a phase would end when it was launched.
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


class Run:
    """A loop over ``model``, which runs ``plan``, as ``shardwright train`` has one::

        with sw.Run(plan, model, optimizer, "runs/mine", every="10 min") as run:
            for step in run.steps(1000):
                loss = loss_of(model, batch(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.end(loss)

    It goes on after the newest checkpoint in ``folder``, if there is one: then ``resumed`` says
    what it found, and ``steps`` begins behind it. ``extra`` gives plain values of this rank to be
    saved beside the model, such as a place in the data: ``resumed.extra["own"]``. SIGTERM and
    Ctrl-C end it after a step that is saved, by StoppedError; its ``exit_code`` is 75. Progress is
    in ``progress.jsonl`` there; ``log`` may name ``"tensorboard"`` and ``"wandb"``, too.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: Path | str,
        *,
        every: str = "10 min",
        keep: int = 2,
        extra: Callable[[], Any] = lambda: None,
        log: Sequence[str] = (),
    ) -> None:
        check_log(log, "log")
        self.plan, self.folder = plan, Path(folder)
        self.resumed: Resumed | None = None
        self._what = (model, optimizer)
        self._section = CheckpointSection(every=every, keep=keep)
        self._extra = extra
        self._log = log
        self._progress = Progress()
        self._count = 0
        self._around = ExitStack()

    def __enter__(self) -> Run:
        model, optimizer = self._what
        comm = comm_of(model)
        self._rank, _ = rank_and_size(comm)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._heartbeat = Heartbeat.create(self.folder, self._rank)
        self.meter = metered(self._rank, self._heartbeat, comm.mesh.device_type)
        saved = self.folder / "checkpoints"
        if complete_steps(saved):
            self.resumed = load_checkpoint(saved, model, optimizer, random_state=True)
            self.meter.number = self.meter.first = self.resumed.step
        # Taken over only when everything was entered: an error on the way closes what was opened
        # before it.
        with ExitStack() as around:
            if self._rank == 0:
                found = writers(self.folder, self._log, step=self.meter.first)
                self._progress = around.enter_context(closing(Progress(found)))
            measuring = measure(self.plan, model, optimizer, meter=self.meter)
            self.measured = around.enter_context(measuring)
            if self.resumed:
                self.measured.losses += self.resumed.extra["losses"]
            self._saves = Saves(
                saved,
                model,
                optimizer,
                self._section,
                extra=lambda: {"losses": self.measured.losses, "own": self._extra()},
                facts={"plan": self.plan.fingerprint},
                say=self._say,
                step=self.meter.first,
            )
            around.enter_context(self._saves.listening())
            self._around = around.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._around.__exit__(*error)

    def steps(self, count: int) -> Iterator[int]:
        """The numbers of the steps up to ``count`` that are left; the last one is saved."""
        self._count = count
        yield from range(self.meter.number, count + 1)
        self._saves.finish(count)

    def end(self, loss: torch.Tensor | float | None = None) -> None:
        """A step is over (collective); ``loss`` is this rank's, for the curve."""
        number = self.meter.number
        if loss is not None and self._progress.due(anyway=number >= self._count) is not None:
            entry = {"step": number, "steps": self._count, "loss": _plain(loss)}
            self._progress.write(entry)
        # Agreeing and saving between two steps: it belongs to none, and the phases of a step stay
        # comparable.
        with self.measured.between(loss):
            self._saves.after(number, self._saves.agreed(number))

    def gather(self) -> Measurement:
        """What all ranks measured (collective), for ``sw.compare``."""
        return self.measured.gather()

    def _say(self, text: str) -> None:
        self._progress.say(text)
        if self._rank == 0:
            print(text, file=sys.stderr, flush=True)


def _plain(loss: torch.Tensor | float) -> float:
    return loss.item() if isinstance(loss, torch.Tensor) else loss
