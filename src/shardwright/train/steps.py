"""The steps of a rank: a batch in, an updated model out; then what is counted, said and saved."""

# All ranks do the same steps, also those that a rank would leave out: a loss or gradient that is
# not finite anywhere, and what a rank wishes for at the end of a step (save, stop), are settled by
# one number of all ranks before the first update. A rank that acted on its own would leave the
# others in a collective. Where ids of the next batch travel ahead, that batch is already there when
# a step is saved: random states and the count of bad rows are then those from before it was made,
# for a run that goes on from here makes it again.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from msgspec import UNSET
from torch import nn

from shardwright.core.measurement import Scores, scores_text
from shardwright.estimate.own_model import Batch, FunctionCall, InputsOf, naming_errors
from shardwright.job.job import checkpoint_folder
from shardwright.job.train import rate_factor
from shardwright.launcher.exhausted import out_of_memory
from shardwright.runtime.comm import Comm
from shardwright.runtime.embeddings.shard import start_sparse_data_dist
from shardwright.runtime.model_parts import tables_in
from shardwright.runtime.saves import Saves
from shardwright.runtime.saving import random_states, set_random_states
from shardwright.train.loop import Measured
from shardwright.train.profiling import Profiler
from shardwright.train.resuming import RunStart, facts_of
from shardwright.train.room import out_of_memory_at

if TYPE_CHECKING:
    from shardwright.train.training import Training


class Following(NamedTuple):
    """The batch of the next step; rows left out, and random states, before it was made."""

    batch: Batch
    bad_rows: int
    states: Any


class Steps:
    """Those of a ``Training``, from its start on."""

    def __init__(
        self,
        of: Training,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        measured: Measured,
        start: RunStart,
    ) -> None:
        self.of, self.job, self.task = of, of.job, of.task
        self.meter, self.guard = of.meter, of.guard
        self.model, self.optimizer = model, optimizer
        self.measured, self.start = measured, start
        self.tables = list(tables_in(model))
        every = self.job.train.metrics_every
        self.scoring = Scoring(self.guard.comm, every, start.scores) if every else None
        self.following: Following | None = None  # the batch whose ids are under way
        self.saves = self._saves()

    def run(self, batches: Iterator[Batch], profiler: Profiler | None) -> None:
        """All that are left; StoppedError after the one in which ranks were asked to stop."""
        steps, before = self.job.train.steps, self.start.step
        for step in range(self.start.step + 1, steps + 1):
            self._set_rates(step)
            loss, words = self._done(step, batches)
            was_left_out = not math.isfinite(loss)
            if was_left_out:  # as the one before
                loss = self.measured.losses[-1] if self.measured.losses else 0.0
            with self.measured.between(loss):
                if profiler:
                    profiler.after(step, steps)
                new = self._scored(step, was_left_out=was_left_out)
                if self.saves:
                    with self._before_following():
                        self.saves.after(step, words)
            seconds = self.of.progress.due(anyway=new is not None or step == steps)
            if seconds is not None:
                self._tell(step, loss, new, seconds / (step - before))
                before = step

    def _done(self, step: int, batches: Iterator[Batch]) -> tuple[float, Sequence[int]]:
        """A step, and in words what of it the user's code or the memory did not bear."""
        try:
            with self._errors():
                return self._step(batches, is_last=step == self.job.train.steps)
        except Exception as error:
            if not out_of_memory(error):
                raise
            of, phase = self.of, self.of.heartbeat.reading().phase
            where = f"step {step}, {phase}, on rank {of.rank}"
            what = (self.model, self.optimizer)
            raise out_of_memory_at(error, of.plan, of.rank, where, *what) from error

    def _errors(self) -> AbstractContextManager[None]:
        own = isinstance(self.job.model.python, str)
        return naming_errors(FunctionCall.of(self.job).where) if own else nullcontext()

    def _step(self, batches: Iterator[Batch], *, is_last: bool) -> tuple[float, Sequence[int]]:
        """The loss of this rank, and what all ranks wish for at the end of the step."""
        following, self.following = self.following, None
        # kept to the end of the step, as a plan counts it
        batch = self.of.tensors(next(batches)) if following is None else following.batch
        # Nothing else may hold the batch: it has to go when the step is over, as a plan counts.
        del following
        loss = self.task.loss(self.model, batch)
        # After the forward, so that ids travel during the backward. Not in the last step: a batch
        # would be read that nobody trains on, and counted as dealt.
        if self.of.inputs_of is not None and not is_last:
            self.following = self._asked(batches, self.of.inputs_of)
        value = loss.item()
        # Before the backward: a loss that is not finite is told as such, and not as a gradient of
        # whatever layer has one first.
        self.guard.look([loss.detach()], ["loss"], lambda: [loss.detach()])
        loss.backward()
        # Tables are updated here, or nothing is.
        words = self.guard.settle(self.saves.words(self.meter.number) if self.saves else ())
        if self.guard.fault is None:
            self.optimizer.step()
        # Powers of two, so that a run in which every step is left out does not fill its log.
        elif self.guard.skipped.bit_count() == 1:  # the 1st, 2nd, 4th, ... time
            self.of.progress.say(f"{self.guard.fault} Skipped {self.guard.skipped} steps so far.")
        self.optimizer.zero_grad()
        return value, words

    def _asked(self, batches: Iterator[Batch], inputs: InputsOf) -> Following:
        """The next batch, whose ids travel while this one is computed (collective)."""
        with self.meter.phase("load"):
            states = random_states() if self.job.checkpoint is not UNSET else None
            bad_rows = self.task.bad_rows
            batch = self.of.tensors(next(batches))
        arguments, keywords = inputs(batch)
        start_sparse_data_dist(self.model, *arguments, **keywords)
        return Following(batch, bad_rows, states)

    @contextmanager
    def _before_following(self) -> Iterator[None]:
        """Random states are those of before the next batch was made, which a run that goes on from
        here makes again."""
        if self.following is None or self.following.states is None:
            yield
            return
        now = random_states()
        # Only for the time of saving: the run itself goes on with what making the batch has drawn.
        set_random_states(self.following.states)
        yield
        set_random_states(now)

    def _set_rates(self, step: int) -> None:
        """The learning rates of a step are those of the job, whatever a checkpoint had."""
        train = self.job.train
        factor = rate_factor(train, step)
        # In every step: a schedule changes them, and a checkpoint brings those of its own run,
        # while a job that is resumed with another rate means it.
        for group in self.optimizer.param_groups:
            group["lr"] = train.learning_rate * factor
        for tables in self.tables:
            tables.learning_rate = (train.table_learning_rate or train.learning_rate) * factor

    def _scored(self, step: int, *, was_left_out: bool) -> Scores | None:
        """What all ranks scored since the last time, where the job asks for it after ``step``."""
        if not self.scoring:
            return None
        scored = getattr(self.task, "scored", None)
        # A step that updated nothing counts in no score, as in no loss.
        if scored and not was_left_out:
            self.scoring.add(*scored)
        return self.scoring.after(step)

    def _tell(self, step: int, loss: float, new: Scores | None, seconds: float) -> None:
        text = f"loss on rank 0 {loss:.4f}"
        if self.scoring and self.scoring.found:
            text += f"; {scores_text(self.scoring.found[-1])}"
        steps = self.job.train.steps
        entry: dict[str, Any] = {"step": step, "steps": steps, "loss": loss, "text": text}
        if step > self.start.step + 1:  # the first took what only the first takes
            entry["seconds_per_step"] = seconds
        if new:
            entry["scores"] = new
        self.of.progress.write(entry)

    def _saves(self) -> Saves | None:
        if self.job.checkpoint is UNSET:
            return None
        of = self.of

        def extra() -> dict[str, Any]:
            # Ids that travel ahead have been read already: what a checkpoint says must be from
            # before, or the rows of that batch would be lost.
            read = self.following  # not trained on yet
            bad_rows = self.task.bad_rows if read is None else read.bad_rows
            scores = self.scoring.found if self.scoring else ()
            place = (self.job.batch.size, of.rank, of.plan.world_size)
            return self.start.place(*place, self.measured.losses, bad_rows, scores)

        return Saves(
            checkpoint_folder(self.job, of.folder),
            self.model,
            self.optimizer,
            self.job.checkpoint,
            extra=extra,
            facts=facts_of(self.job, of.plan.fingerprint),
            say=of.progress.say,
            step=self.start.step,
        )


# ---- scores --------------------------------------------------------------------------------------

# How well clicks were told is found from sums that add up over ranks: clicks and other rows by the
# logit that they were given, in ``BINS`` equal bins, and five totals. A mean of ranks' AUCs is no
# AUC, and all logits of a run are too many to keep. All figures but AUC are exact; for AUC pairs
# within one bin count half, which is wrong by half of them at most, and that is said with it.
BINS = 8192
EDGE = 16.0  # logits beyond it, on either side, fall into the last bin
TOTALS = ("rows", "clicks", "log_loss", "predicted", "right")  # behind both halves of the bins
SIZE = 2 * BINS + len(TOTALS)


class Scoring:
    """Adds up every batch on its rank, and every so many steps over all ranks: one collective then,
    and none on other steps."""

    def __init__(self, comm: Comm, every: int, before: tuple[Scores, ...] = ()) -> None:
        self.found = list(before)
        self._comm, self._every = comm, every
        self._sums = torch.zeros(SIZE, dtype=torch.float64, device=comm.mesh.device_type)

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """A batch: ``logits`` [B] as they were before the update, ``labels`` [B] of 0 and 1."""
        logits, labels = logits.detach().double(), labels.double()
        width = 2 * EDGE / BINS
        bins = ((logits + EDGE) / width).floor().clamp(0, BINS - 1).long()
        self._sums.scatter_add_(0, bins + BINS * labels.long(), torch.ones_like(logits))
        clicks = labels.sum()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        right = ((logits >= 0) == (labels > 0.5)).sum()
        totals = (clicks.new_tensor(len(labels)), clicks, loss, logits.sigmoid().sum(), right)
        self._sums[2 * BINS :] += torch.stack([total.double() for total in totals])

    def after(self, step: int) -> Scores | None:
        """The scores of all ranks since the last ones, where ``step`` has some."""
        # By the number of the step, so that all ranks come to the collective together.
        if step % self._every:
            return None
        self._comm.all_reduce("scores", self._sums)
        sums = self._sums.tolist()
        self._sums.zero_()
        if not sums[2 * BINS]:  # every step was left out
            return None
        self.found.append(scores_of(step, sums))
        return self.found[-1]


def scores_of(step: int, sums: Sequence[float]) -> Scores:
    """The figures of ``sums`` [SIZE]: bins of other rows, bins of clicks, totals."""
    others, clicked = sums[:BINS], sums[BINS : 2 * BINS]
    rows, clicks, loss, predicted, right = sums[2 * BINS :]
    share = clicks / rows
    # AUC and normalized entropy are left out where all labels are alike: both would divide by 0.
    found = Scores(step, int(rows), loss / rows, right / rows, max(share, 1 - share))
    if not 0 < clicks < rows:
        return (
            found if not clicks else msgspec.structs.replace(found, calibration=predicted / clicks)
        )
    pairs = clicks * (rows - clicks)
    below = ordered = tied = 0.0
    for other, click in zip(others, clicked, strict=True):
        ordered += click * below
        tied += click * other
        below += other
    base = -(share * math.log(share) + (1 - share) * math.log1p(-share))
    return msgspec.structs.replace(
        found,
        auc=(ordered + tied / 2) / pairs,
        auc_error=tied / 2 / pairs,
        normalized_entropy=loss / rows / base,
        calibration=predicted / clicks,
    )
