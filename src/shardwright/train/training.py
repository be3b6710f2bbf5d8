"""What each rank does: apply the plan, train, measure, evaluate, leave a record.

Runs under torchrun and never imports the planner.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from shardwright.core.exhausted import out_of_memory
from shardwright.core.scores import Scores, scores_text
from shardwright.core.thread_rank import thread_rank
from shardwright.core.timeline import Phase
from shardwright.estimate.own_model import Batch, Call, InputsOf, inputs_of, naming_errors
from shardwright.job.job import checkpoint_folder, named_files, run_in, table_folder
from shardwright.job.plan import Plan, read_plan
from shardwright.job.train import rate_factor
from shardwright.launcher.folder import (
    check_inputs,
    record_file,
    scores_file,
)
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.launcher.progress import Writer
from shardwright.runtime import comm, data_workers
from shardwright.runtime.apply import apply
from shardwright.runtime.checkpoint.agreement import together
from shardwright.runtime.checkpoint.folders import complete_steps
from shardwright.runtime.comm import Comm
from shardwright.runtime.devices import Devices
from shardwright.runtime.embeddings.ahead import start_sparse_data_dist
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.guard import Guard
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters
from shardwright.runtime.random_state import random_states, set_random_states
from shardwright.runtime.saves import Saves
from shardwright.runtime.saving import load_checkpoint
from shardwright.train.hosts import Hosts
from shardwright.train.loop import Measured, measure, metered
from shardwright.train.profiling import Profiler
from shardwright.train.resuming import (
    Start,
    batches_after,
    changes,
    facts_of,
    lasting,
    start_after,
)
from shardwright.train.room import check_room, out_of_memory_at
from shardwright.train.scoring import Scoring
from shardwright.train.sources import task_of
from shardwright.train.writers import PROGRESS_SECONDS, writers


class Training:
    """One rank of a run."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        rank: int,
        heartbeat: Heartbeat,
        *,
        resume: bool = False,
        mesh: DeviceMesh | None = None,
        shown: bool = False,
        profile: int = 0,
    ) -> None:
        self.plan = plan
        self.resume = resume
        self.mesh = mesh
        self.job = plan.job
        self.folder = folder
        self.rank = rank
        self.task = task_of(plan.job)
        self.heartbeat = heartbeat
        self.shown = shown
        self.writers: list[Writer] = []
        self.device = torch.device("cpu")
        if plan.cluster.compute_device == "cuda":
            here = os.environ.get("LOCAL_RANK", "0") if thread_rank() is None else rank
            self.device = torch.device("cuda", int(here))
            torch.cuda.set_device(self.device)
        self._errors: Callable[[], AbstractContextManager[None]] = nullcontext
        if isinstance(plan.job.model.python, str):
            self._errors = partial(naming_errors, Call.of(plan.job).where)
        self.meter = metered(rank, heartbeat, self.device.type)
        self.profile = profile  # steps
        self.profiler: Profiler | None = None
        self.scoring: Scoring | None = None
        # how the task calls its model, where ids of a next batch travel
        self._inputs_of = inputs_of(self.task, self.job) if plan.modes.asked else None
        self._following: _Following | None = None  # the batch whose ids are under way

    def run(self) -> None:
        """Train to the end and leave a record, and scores of what is held out."""
        if self.rank == 0:
            saved = complete_steps(checkpoint_folder(self.job, self.folder)) if self.resume else ()
            step = saved[-1] if saved else 0
            log = self.job.train.log or ()
            self.writers = writers(self.folder, log, step=step, shown=self.shown)
        try:
            with data_workers.outliving_signals():
                self._run()
        finally:
            for writer in self.writers:
                writer.close()

    def _run(self) -> None:
        mesh = self.mesh or init_device_mesh(self.device.type, (self.plan.world_size,))
        if self.profile:
            self.profiler = Profiler(self.meter, mesh, self.folder, self.profile)
        self.guard = Guard(Comm(mesh, self.meter), skip=self.job.train.not_finite == "skip")
        together(self.guard.comm, "memory", self._check_room, partial(_unforeseen, "memory"))
        torch.manual_seed(self.job.train.seed)  # one model on all ranks
        empty = self.task.model(self.device)
        rows = table_folder(self.job, self.folder)
        model = apply(empty, self.plan, mesh, probe=self.meter, guard=self.guard, folder=rows)
        self.tables = [part for part in model.modules() if isinstance(part, ShardedTables)]
        parameters = optimizer_parameters(model, per_unit=True)
        rate = self.job.train.learning_rate
        optimizer = make_optimizer(self.job.train.optimizer, parameters, rate)
        self.start = self._resumed(model, optimizer)
        if every := self.job.train.metrics_every:
            self.scoring = Scoring(self.guard.comm, every, self.start.scores)
        states = random_states()
        taken = (self.task, self.rank, self.plan.world_size, self.start)
        batches = batches_after(*taken)
        if self.start.step:
            set_random_states(states)  # whatever making batches drew
        self.meter.number = self.meter.first = self.start.step
        with measure(self.plan, model, optimizer, meter=self.meter) as measured:
            measured.losses += self.start.losses
            saves = self._saves(model, optimizer, measured)
            with saves.listening() if saves else nullcontext():
                if saves:
                    batches = lasting(batches, partial(batches_after, *taken), saves)
                self._train(model, optimizer, batches, measured, saves)
        saved = UNSET
        if saves:
            saves.finish(self.job.train.steps)
            saved = saves.figures(self.start.resumed)

        def leave_record() -> None:
            bad = self.start.bad_rows + self.task.bad_rows
            record = msgspec.structs.replace(
                measured.record(bad, saved, self.guard.skipped),
                profile=tuple(self.profiler.found) if self.profiler else (),
                scores=tuple(self.scoring.found) if self.scoring else (),
            )
            write_document(record, record_file(self.folder, self.rank))

        # all are there before held-out rows are read, of which one may be bad
        together(self.guard.comm, "record", leave_record, partial(_unforeseen, "the record"))
        try:
            self._evaluate(model)
        except InputError as error:
            kept = "measured.json and the checkpoint" if saves else "measured.json"
            kept = f"What was trained is kept in {self.folder}: {kept}."
            raise InputError(f"{error} {kept}") from error
        leave_record()

    def _check_room(self) -> None:
        section = self.job.checkpoint
        check_room(self.plan, self.rank, self.device, section is not UNSET and section.overlap)

    def _resumed(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Start:
        """Go on from the newest checkpoint, if there is one and the run is to be resumed."""
        rank, world_size = self.rank, self.plan.world_size
        folder, start = checkpoint_folder(self.job, self.folder), Start()
        if self.resume and complete_steps(folder):
            found = load_checkpoint(folder, model, optimizer, random_state=True)
            start = start_after(found, rank, world_size)
            others = ", ".join(changes(self.job, found, world_size))
            self._say(f"going on after {folder}/step-{found.step}" + (others and f": {others}"))
            if found.random_state:
                return start
        # What modules draw, as dropout does, is other numbers on every rank and after every start.
        torch.manual_seed(self.job.train.seed + world_size * start.step + rank)
        return start

    def _saves(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, measured: Measured
    ) -> Saves | None:
        if self.job.checkpoint is UNSET:
            return None

        def extra() -> dict[str, Any]:
            ranks = (self.rank, self.plan.world_size)
            read = self._following  # not trained on yet
            found = (measured.losses, self.task.bad_rows if read is None else read.bad_rows)
            scores = self.scoring.found if self.scoring else ()
            return self.start.place(self.job.batch.size, *ranks, *found, scores)

        return Saves(
            checkpoint_folder(self.job, self.folder),
            model,
            optimizer,
            self.job.checkpoint,
            extra=extra,
            facts=facts_of(self.job, self.plan.fingerprint),
            say=self._say,
            step=self.start.step,
        )

    def _write(self, entry: Mapping[str, Any]) -> None:
        for writer in self.writers:
            writer.update(entry)

    def _say(self, text: str) -> None:
        self._write({"said": text})

    def _train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[Batch],
        measured: Measured,
        saves: Saves | None,
    ) -> None:
        steps = self.job.train.steps
        shown, before = 0.0, self.start.step
        for step in range(self.start.step + 1, steps + 1):
            self._set_rates(optimizer, step)
            try:
                with self._errors():
                    is_last = step == steps
                    loss, words = self._one_step(model, optimizer, batches, saves, is_last=is_last)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                beat = self.heartbeat.reading()
                where = f"step {step}, {beat.phase}, on rank {self.rank}"
                raise out_of_memory_at(
                    error, self.plan, self.rank, where, model, optimizer
                ) from error
            self._was_left_out = not math.isfinite(loss)
            if self._was_left_out:  # as the one before
                loss = measured.losses[-1] if measured.losses else 0.0
            with measured.between(loss):
                if self.profiler:
                    self.profiler.after(step, steps)
                new = self._scored(step)
                if saves:
                    with self._before_following():
                        saves.after(step, words)
            now = time.monotonic()
            if self.writers and (new or now - shown > PROGRESS_SECONDS or step == steps):
                took = (now - shown) / (step - before)
                shown, before = now, step
                text = f"loss on rank 0 {loss:.4f}"
                if self.scoring and self.scoring.found:
                    text += f"; {scores_text(self.scoring.found[-1])}"
                entry: dict[str, Any] = {"step": step, "steps": steps, "loss": loss, "text": text}
                if step > self.start.step + 1:  # the first took what only the first takes
                    entry["seconds_per_step"] = took
                if new:
                    entry["scores"] = new
                self._write(entry)

    def _set_rates(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """The learning rates of a step are those of the job, whatever a checkpoint had."""
        train = self.job.train
        factor = rate_factor(train, step)
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate * factor
        for tables in self.tables:
            tables.learning_rate = (train.table_learning_rate or train.learning_rate) * factor

    def _scored(self, step: int) -> Scores | None:
        """What all ranks scored since the last time, where the job asks for it after ``step``."""
        if not self.scoring:
            return None
        scored = getattr(self.task, "scored", None)
        if scored and not self._was_left_out:
            self.scoring.add(*scored)
        return self.scoring.after(step)

    def _one_step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterator[Batch],
        saves: Saves | None,
        *,
        is_last: bool,
    ) -> tuple[float, Sequence[int]]:
        """The loss of this rank, and what all ranks wish for at the end of the step."""
        following, self._following = self._following, None
        # kept to the end of the step, as a plan counts it
        batch = self._tensors(next(batches)) if following is None else following.batch
        del following
        loss = self.task.loss(model, batch)
        if self._inputs_of is not None and not is_last:
            self._following = self._asked(model, batches, self._inputs_of)
        value = loss.item()
        self.guard.look([loss.detach()], ["loss"], lambda: [loss.detach()])
        loss.backward()
        # Tables are updated here, or nothing is.
        words = self.guard.settle(saves.words(self.meter.number) if saves else ())
        if self.guard.fault is None:
            optimizer.step()
        elif self.guard.skipped.bit_count() == 1:  # the 1st, 2nd, 4th, ... time
            self._say(f"{self.guard.fault} Skipped {self.guard.skipped} steps so far.")
        optimizer.zero_grad()
        return value, words

    def _asked(self, model: nn.Module, batches: Iterator[Batch], inputs: InputsOf) -> _Following:
        """The next batch, whose ids travel while this one is computed (collective)."""
        with self.meter.phase("load"):
            states = random_states() if self.job.checkpoint is not UNSET else None
            bad_rows = self.task.bad_rows
            batch = self._tensors(next(batches))
        arguments, keywords = inputs(batch)
        start_sparse_data_dist(model, *arguments, **keywords)
        return _Following(batch, bad_rows, states)

    @contextmanager
    def _before_following(self) -> Iterator[None]:
        """Random states are those of before the next batch was made, which a run that goes on from
        here makes again."""
        if self._following is None or self._following.states is None:
            yield
            return
        now = random_states()
        set_random_states(self._following.states)
        yield
        set_random_states(now)

    def _tensors(self, batch: Batch) -> Batch:
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
    def _evaluate(self, model: nn.Module) -> None:
        self.heartbeat.mark("evaluate")
        model.eval()
        parts = {"validation": getattr(self.task, "validation", None), "test": self.task.held_out}
        for part, held_out in parts.items():
            rows = list(self._scores(model, part, held_out)) if held_out else []
            if rows or part == "test":
                whole = io.BytesIO()
                np.save(whole, np.concatenate(rows or [np.empty((0, 3))]), allow_pickle=False)
                write_atomically(scores_file(self.folder, self.rank, part), whole.getvalue())

    def _scores(
        self, model: nn.Module, part: str, held_out: Callable[[int, int], Iterator[Any]]
    ) -> Iterator[NDArray[np.float64]]:
        """Those of every batch that is held out."""
        batches = iter(held_out(self.rank, self.plan.world_size))
        profiler, phase = self.profiler, self.meter.phase if self.profiler else _unmeasured
        given = next(batches, None)
        if given and profiler:
            profiler.start(part)
        while given:
            with phase("forward"):
                found = self.task.scores(model, self._tensors(given[0]), given[1])
            yield found
            with phase("load"):
                given = next(batches, None)
            if profiler and profiler.is_on:
                profiler.counted()
        if profiler and profiler.is_on:
            profiler.stop()


class _Following(NamedTuple):
    """The batch of the next step; rows left out, and random states, before it was made."""

    batch: Batch
    bad_rows: int
    states: Any


def _unmeasured(_: Phase) -> AbstractContextManager[None]:
    return nullcontext()


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
    if plan.job.train.in_one_process:
        wanted = "'distributed' under a torchrun of your own"
        remedy = "Use shardwright train, or plan again without it."
        raise InputError(expected("train.forward", wanted, "'parallel'", remedy))
    if plan.world_size != world_size:
        raise MismatchError(
            expected(
                str(plan_path),
                f"a plan for {world_size} rank{'s' * (world_size > 1)}, as torchrun started",
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
