"""What each rank does: apply the plan, train, measure, evaluate, leave a record.

Runs under torchrun and never imports the planner.
"""

# The order of setting up is part of the result. The seed is set before the model is made, so that
# it is one on all ranks; only then does each rank draw its own numbers, anew after every start,
# unless the checkpoint has the generators' states. Making batches may draw too, which must not
# shift what the model draws: states from before are put back. What may fail on one rank alone
# (memory, the record) is done ``together``: all ranks raise the first one's error, and nobody waits
# for a dead peer.

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from msgspec import UNSET
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map

from shardwright.core.document import write_atomically, write_document
from shardwright.core.errors import (
    InputError,
    MismatchError,
    RunError,
    ShardwrightError,
    expected,
)
from shardwright.core.quantities import counted
from shardwright.estimate.own_model import Batch, inputs_of
from shardwright.job.job import checkpoint_folder, named_files, run_in, table_folder
from shardwright.job.plan import Plan, read_plan
from shardwright.launcher.folder import (
    check_inputs,
    record_file,
    scores_file,
)
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.runtime import comm, data_workers
from shardwright.runtime.apply import apply
from shardwright.runtime.checkpoint.agreement import together
from shardwright.runtime.checkpoint.folders import complete_steps
from shardwright.runtime.comm import Comm
from shardwright.runtime.devices import Devices
from shardwright.runtime.guard import Guard
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters
from shardwright.runtime.saving import load_checkpoint, random_states, set_random_states
from shardwright.tracker.announce import thread_rank
from shardwright.train.hosts import Hosts
from shardwright.train.loop import Measured, measure, metered
from shardwright.train.profiling import Profiler
from shardwright.train.resuming import RunStart, batches_after, changes, lasting, start_after
from shardwright.train.room import check_room
from shardwright.train.sources import task_of
from shardwright.train.steps import Steps
from shardwright.train.writers import Progress, writers


@dataclass(eq=False)
class Training:
    """One rank of a run, up to its record and its scores of what is held out."""

    plan: Plan
    folder: Path
    rank: int
    heartbeat: Heartbeat
    resume: bool = False
    mesh: DeviceMesh | None = None
    shown: bool = False  # on stderr, too, what goes to the folder
    profile: int = 0  # steps of which a trace is kept

    def __post_init__(self) -> None:
        self.job, self.task = self.plan.job, task_of(self.plan.job)
        self.device = torch.device("cpu")
        if self.plan.cluster.compute_device == "cuda":
            # Threads share one environment, so theirs is the rank itself.
            here = os.environ.get("LOCAL_RANK", "0") if thread_rank() is None else self.rank
            self.device = torch.device("cuda", int(here))
            torch.cuda.set_device(self.device)
        self.meter = metered(self.rank, self.heartbeat, self.device.type)
        self.progress = Progress()
        # how the task calls its model, where ids of a next batch travel
        self.inputs_of = inputs_of(self.task, self.job) if self.plan.modes.asked else None

    def run(self) -> None:
        """Train to the end and leave a record, and scores of what is held out."""
        if self.rank == 0:
            saved = complete_steps(checkpoint_folder(self.job, self.folder)) if self.resume else ()
            step = saved[-1] if saved else 0
            log = self.job.train.log or ()
            self.progress = Progress(writers(self.folder, log, step=step, shown=self.shown))
        with closing(self.progress), data_workers.outliving_signals(), data_workers.naming_lost():
            self._run()

    def _run(self) -> None:
        train = self.job.train
        mesh = self.mesh or init_device_mesh(self.device.type, (self.plan.world_size,))
        profiler = Profiler(self.meter, mesh, self.folder, self.profile) if self.profile else None
        self.guard = Guard(Comm(mesh, self.meter), skip=train.not_finite == "skip")
        # Before the model is made, which is what would fail.
        together(self.guard.comm, "memory", self._check_room, partial(_unforeseen, "memory"))
        torch.manual_seed(train.seed)  # one model on all ranks
        # Without numbers where that can be: only what this rank keeps is filled in by apply.
        empty = self.task.model(self.device)
        rows = table_folder(self.job, self.folder)
        model = apply(empty, self.plan, mesh, probe=self.meter, guard=self.guard, folder=rows)
        parameters = optimizer_parameters(model, per_unit=True)
        optimizer = make_optimizer(train.optimizer, parameters, train.learning_rate)
        start = self._resumed(model, optimizer)
        states = random_states()
        taken = (self.task, self.rank, self.plan.world_size, start)
        batches = batches_after(*taken)
        if start.step:
            set_random_states(states)  # whatever making batches drew
        self.meter.number = self.meter.first = start.step
        with measure(self.plan, model, optimizer, meter=self.meter) as measured:
            measured.losses += start.losses
            steps = Steps(self, model, optimizer, measured, start)
            saves = steps.saves
            with saves.listening() if saves else nullcontext():
                if saves:
                    batches = lasting(batches, partial(batches_after, *taken), saves)
                steps.run(batches, profiler)
        if saves:
            saves.finish(train.steps)
        # Written twice: all of it is there before held-out rows are read, of which a bad one must
        # not cost the record of what was trained; profiles of the evaluation come only with it.
        leave = partial(self._leave_record, steps, measured, profiler)
        together(self.guard.comm, "record", leave, partial(_unforeseen, "the record"))
        try:
            self._evaluate(model, profiler)
        except InputError as error:
            kept = "measured.json and the checkpoint" if saves else "measured.json"
            kept = f"What was trained is kept in {self.folder}: {kept}."
            raise InputError(f"{error} {kept}") from error
        leave()

    def _leave_record(self, steps: Steps, measured: Measured, profiler: Profiler | None) -> None:
        start, scoring = steps.start, steps.scoring
        saved = steps.saves.figures(start.resumed) if steps.saves else UNSET
        bad = start.bad_rows + self.task.bad_rows
        record = msgspec.structs.replace(
            measured.record(bad, saved, self.guard.skipped),
            profile=tuple(profiler.found) if profiler else (),
            scores=tuple(scoring.found) if scoring else (),
        )
        write_document(record, record_file(self.folder, self.rank))

    def _check_room(self) -> None:
        section = self.job.checkpoint
        check_room(self.plan, self.rank, self.device, section is not UNSET and section.overlap)

    def _resumed(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> RunStart:
        """Go on from the newest checkpoint, if there is one and the run is to be resumed."""
        rank, world_size = self.rank, self.plan.world_size
        folder, start = checkpoint_folder(self.job, self.folder), RunStart()
        if self.resume and complete_steps(folder):
            found = load_checkpoint(folder, model, optimizer, random_state=True)
            start = start_after(found, rank, world_size)
            others = ", ".join(changes(self.job, found, world_size))
            text = f"going on after {folder}/step-{found.step}" + (others and f": {others}")
            self.progress.say(text)
            # A checkpoint of as many ranks has each one's generators; of others there is nothing to
            # go on with.
            if found.random_state:
                return start
        # What modules draw, as dropout does, is other numbers on every rank and after every start.
        # By step as well: with the same seed after every restart, dropout would repeat its masks.
        torch.manual_seed(self.job.train.seed + world_size * start.step + rank)
        return start

    def tensors(self, batch: Batch) -> Batch:
        """The batch as tensors on the device."""

        def there(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(value)
            if not isinstance(value, torch.Tensor):
                return value
            value = value.to(self.device)
            self.meter.holds(value, "input")
            return value

        return tree_map(there, batch)

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, profiler: Profiler | None) -> None:
        self.heartbeat.mark("evaluate")
        model.eval()
        parts = {"validation": getattr(self.task, "validation", None), "test": self.task.held_out}
        for part, held_out in parts.items():
            rows = list(self._scores(model, part, held_out, profiler)) if held_out else []
            # The test part has a file of every rank, if without rows; only validation may be
            # missing.
            if rows or part == "test":
                whole = io.BytesIO()
                np.save(whole, np.concatenate(rows or [np.empty((0, 3))]), allow_pickle=False)
                write_atomically(scores_file(self.folder, self.rank, part), whole.getvalue())

    def _scores(
        self,
        model: nn.Module,
        part: str,
        held_out: Callable[[int, int], Iterator[Any]],
        profiler: Profiler | None,
    ) -> Iterator[NDArray[np.float64]]:
        """Those of every batch that is held out."""
        batches = iter(held_out(self.rank, self.plan.world_size))
        phase = self.meter.phase if profiler else lambda _: nullcontext()
        given = next(batches, None)
        if given and profiler:
            profiler.start(part)
        while given:
            with phase("forward"):
                found = self.task.scores(model, self.tensors(given[0]), given[1])
            yield found
            with phase("load"):
                given = next(batches, None)
            if profiler and profiler.is_on:
                profiler.counted()
        if profiler and profiler.is_on:
            profiler.stop()


def _unforeseen(where: str, error: Exception) -> ShardwrightError:
    return RunError(f"{where}: {error}")


def check_ranks(plan_path: Path) -> Plan:
    """The plan of a run; InputError or MismatchError unless torchrun started as many ranks."""
    world_size = int(os.environ.get("WORLD_SIZE", "-1"))
    if int(os.environ.get("RANK", "-1")) < 0 or world_size < 1:
        raise InputError(
            expected("RANK and WORLD_SIZE", "to be set by torchrun", "none", "Use torchrun.")
        )
    plan = read_plan(plan_path)
    # Threads are started by our launcher alone: a torchrun of one's own would start a process for
    # each.
    if plan.job.train.in_one_process:
        wanted = "'distributed' under a torchrun of your own"
        remedy = "Use shardwright train, or plan again without it."
        raise InputError(expected("train.forward", wanted, "'parallel'", remedy))
    if plan.world_size != world_size:
        raise MismatchError(
            expected(
                str(plan_path),
                f"a plan for {counted(world_size, 'rank')}, as torchrun started",
                f"one for {plan.world_size}",
                f"Start {plan.world_size} ranks or plan again.",
            )
        )
    return plan


def train_rank(
    plan: Plan,
    plan_path: Path,
    folder: Path,
    rank: int,
    store: dist.Store,
    heartbeat: Heartbeat,
    *,
    resume: bool = False,
    hosts: Hosts | None = None,
    profile: int = 0,
) -> None:
    """The body of a worker: join those who met in ``store`` and train. ``hosts`` of a run that no
    launcher sees to: rank 0 gets what all of them measured."""
    plan = _run_in(plan, plan_path, folder)
    backend = "gloo"
    if plan.cluster.compute_device == "cuda":  # shards in host memory travel from there
        on_host = any(unit.offloaded is True for unit in plan.units)
        # One group with a backend for each device: NCCL moves nothing that lies in host memory.
        backend = "cpu:gloo,cuda:nccl" if on_host else "nccl"
    comm.start(backend, plan.job.train.timeout, rank, plan.world_size, store)
    try:
        shown = hosts is not None
        training = Training(
            plan, folder, rank, heartbeat, resume=resume, shown=shown, profile=profile
        )
        training.run()
        if hosts:  # nobody else waits until every rank has left its record
            hosts.bring(training.guard.comm)
        heartbeat.mark("done")
    finally:
        comm.stop()


def _run_in(plan: Plan, plan_path: Path, folder: Path) -> Plan:
    """The plan of a run in ``folder``, whose fingerprint stays."""
    plan = msgspec.structs.replace(plan, job=run_in(plan.job, folder))
    check_inputs(folder, named_files(plan.job), plan_path)
    return plan


@contextmanager
def threads_of(
    plan_path: Path, folder: Path, *, resume: bool = False
) -> Iterator[list[Callable[[Heartbeat], None]]]:
    """What every rank of a plan does, each in a thread of this process."""
    plan = _run_in(read_plan(plan_path), plan_path, folder)
    devices = Devices(plan.world_size, timedelta(seconds=plan.job.train.timeout))

    def train(rank: int, heartbeat: Heartbeat) -> None:
        with devices.rank(rank):
            Training(plan, folder, rank, heartbeat, resume=resume).run()
            heartbeat.mark("done")

    with devices.here():
        yield [partial(train, rank) for rank in range(plan.world_size)]
