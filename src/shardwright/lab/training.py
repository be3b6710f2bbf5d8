"""What each rank does: apply the plan, train, measure, evaluate, leave a record.

Runs under torchrun and never imports the planner. Memory is metered on steps 3 to 5, seconds on
the steps after them, so that neither disturbs the other.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map

from shardwright import __version__
from shardwright.core.document import write_document
from shardwright.core.errors import InputError, MismatchError, expected
from shardwright.core.job import named_files
from shardwright.core.measurement import RECORD_SCHEMA, Record
from shardwright.core.plan import Plan, read_plan
from shardwright.core.timeline import Event, Phase
from shardwright.lab.tasks import task_of
from shardwright.lab.tasks.task import Batch
from shardwright.launcher.folder import check_inputs, record_file, scores_file
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.launcher.progress import ProgressLog
from shardwright.runtime import comm
from shardwright.runtime.apply import apply
from shardwright.runtime.guard import Guard
from shardwright.runtime.meter import Meter, exact_events
from shardwright.runtime.optimizer import make_optimizer, optimizer_parameters

MEMORY_STEPS = (3, 4, 5)
PROGRESS_SECONDS = 0.2


class Training:
    """One rank of a run."""

    def __init__(self, plan: Plan, folder: Path, rank: int, heartbeat: Heartbeat) -> None:
        self.plan = plan
        self.job = plan.job
        self.folder = folder
        self.rank = rank
        self.task = task_of(plan.job)
        self.heartbeat = heartbeat
        self.step = 0
        self.device = torch.device("cpu")
        if plan.cluster.compute_device == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        on_cpu = self.device.type == "cpu"
        self.meter = Meter(rank, self._listen, None if on_cpu else torch.cuda.synchronize)
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.exact: list[Event] = []

    def _listen(self, phase: Phase | None) -> None:
        if phase is None:
            self.heartbeat.begin(step=self.step)
        else:
            self.heartbeat.mark(phase, self.step)

    def run(self) -> None:
        """Train to the end and leave a record, and scores of what is held out."""
        mesh = init_device_mesh(self.device.type, (self.plan.world_size,))
        self.ranks = comm.Comm(mesh)
        self.guard = Guard(self.ranks)
        torch.manual_seed(self.job.train.seed)  # one model on all ranks
        empty = self.task.model(self.device)
        model = apply(empty, self.plan, mesh, probe=self.meter, guard=self.guard)
        parameters = optimizer_parameters(model, per_unit=True)
        rate = self.job.train.learning_rate
        optimizer = make_optimizer(self.job.train.optimizer, parameters, rate)
        torch.manual_seed(self.job.train.seed + self.rank)  # of what modules draw, as dropout does
        self._train(model, optimizer, self.task.batches(self.rank, self.plan.world_size))
        self._evaluate(model)
        self._leave_record()

    def _train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Batch]
    ) -> None:
        progress = ProgressLog(self.folder) if self.rank == 0 else None
        steps = self.job.train.steps
        shown = 0.0
        for self.step in range(1, steps + 1):
            self.ranks.step = self.step  # for messages about lost peers
            began = time.perf_counter()
            with self._measured(model, optimizer):
                loss = self._one_step(model, optimizer, batches)
            self.losses.append(loss)
            if self._is_timed(self.step):
                self.step_seconds.append(time.perf_counter() - began)
            now = time.monotonic()
            if progress and (now - shown > PROGRESS_SECONDS or self.step == steps):
                shown = now
                text = f"loss on rank 0 {loss:.4f}"
                progress.append({"step": self.step, "steps": steps, "loss": loss, "text": text})

    def _measured(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[None]:
        if self.step in MEMORY_STEPS:
            return self.meter.metered_step(optimizer, model)
        return self.meter.timed_step(keep=self._is_timed(self.step))

    def _is_timed(self, step: int) -> bool:
        """Steps after the metered ones; in a short run those before them, the first apart."""
        last = MEMORY_STEPS[-1]
        if self.job.train.steps > last:
            return step > last
        return 1 < step < MEMORY_STEPS[0] or self.job.train.steps == 1

    def _one_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Batch]
    ) -> float:
        meter = self.meter
        with meter.phase("load"):
            batch = self._tensors(next(batches))
        with meter.phase("forward"):
            loss = self.task.loss(model, batch)
        value = loss.item()
        self.guard.look([loss.detach()], ["loss"], lambda: [loss.detach()])
        with meter.phase("backward"):
            loss.backward()
        if self.step in MEMORY_STEPS and not self.exact:
            self.exact = exact_events(self.rank, model, optimizer)
        with meter.phase("step"):
            self.guard.settle()  # tables are updated here, or nothing is
            optimizer.step()
            optimizer.zero_grad()
        return value

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
        rows = [
            self.task.scores(model, self._tensors(batch), numbers)
            for batch, numbers in self.task.held_out(self.rank, self.plan.world_size)
        ]
        found = np.concatenate(rows) if rows else np.empty((0, 3))
        np.save(scores_file(self.folder, self.rank), found, allow_pickle=False)

    def _leave_record(self) -> None:
        steps = range(1, self.job.train.steps + 1)
        record = Record(
            schema=RECORD_SCHEMA,
            plan_fingerprint=self.plan.fingerprint,
            rank=self.rank,
            events=(*self.exact, *self.meter.events()),
            losses=tuple(self.losses),
            seconds_per_step=statistics.median(self.step_seconds) if self.step_seconds else 0.0,
            memory_steps=tuple(s for s in steps if s in MEMORY_STEPS),
            time_steps=tuple(s for s in steps if self._is_timed(s)),
            bad_rows=self.task.bad_rows,
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
        )
        write_document(record, record_file(self.folder, self.rank))


def train_rank(plan_path: Path, folder: Path, store: Path | None, heartbeat: Heartbeat) -> None:
    """The body of a worker: join the others (by ``store``, or torchrun's environment) and train."""
    rank, world_size = (int(os.environ.get(name, "-1")) for name in ("RANK", "WORLD_SIZE"))
    if rank < 0 or world_size < 1:
        raise InputError(
            expected("RANK and WORLD_SIZE", "to be set by torchrun", "none", "Use torchrun.")
        )
    plan = read_plan(plan_path)
    check_inputs(folder, named_files(plan.job), plan_path)
    if plan.world_size != world_size:
        raise MismatchError(
            expected(
                str(plan_path),
                f"a plan for {world_size} ranks, as torchrun started",
                f"one for {plan.world_size}",
                f"Start {plan.world_size} ranks or plan again.",
            )
        )
    backend = "nccl" if plan.cluster.compute_device == "cuda" else "gloo"
    comm.start(backend, plan.job.train.timeout, rank, world_size, store)
    try:
        Training(plan, folder, rank, heartbeat).run()
        heartbeat.mark("done")
    finally:
        comm.stop()
