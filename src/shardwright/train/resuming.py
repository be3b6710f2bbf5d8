"""Where a run begins: at the start of its data, or where a checkpoint ended."""

# A run that goes on must see every row once: a row that is dealt twice or left out shows nowhere
# but in the quality. So a checkpoint says how rows were dealt, as counts by number of ranks and
# batch, and what was read is dealt on from there, also among another number of ranks. Bad rows
# count as taken. Losses are kept as bytes of float64: the curve of a resumed run is equal bit by
# bit to that of one that was not interrupted.

from __future__ import annotations

import base64
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, to_builtins

from shardwright.core.document import to_kind
from shardwright.core.errors import InputError, MismatchError, expected
from shardwright.core.measurement import Scores
from shardwright.data.reading import DealtRows, split
from shardwright.estimate.own_model import Batch, Task, importable, python_function, with_names_of
from shardwright.job.job import Job, checkpoint_folder, data_files
from shardwright.launcher.folder import measurement_file
from shardwright.runtime.checkpoint.files import MANIFEST, read_manifest
from shardwright.runtime.checkpoint.folders import complete_steps, step_folder
from shardwright.runtime.saves import Saves
from shardwright.runtime.saving import Resumed, random_states, set_random_states

RATE = "learning_rate"


class DataPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank is in its data, with its losses and bad rows so far: plain values.

    ``before`` is what other numbers of ranks have taken, ``taken`` this rank's rows since, dealt by
    ``batch``. ``losses`` are float64, in base64; ``resumed`` the steps that runs went on from.
    """

    before: tuple[tuple[int, tuple[int, ...]], ...]
    batch: int
    taken: int
    bad_rows: int
    losses: str
    resumed: tuple[int, ...]
    scores: tuple[Scores, ...] = ()


@dataclass(frozen=True, slots=True)
class RunStart:
    """Where a rank begins: after ``step``, and what was ``dealt``, lost and left out until then."""

    step: int = 0
    dealt: tuple[DealtRows, ...] = ()
    losses: tuple[float, ...] = ()
    bad_rows: int = 0
    resumed: tuple[int, ...] = ()
    scores: tuple[Scores, ...] = ()

    def place(
        self,
        batch: int,
        rank: int,
        world_size: int,
        losses: Sequence[float],
        bad_rows: int,
        scores: Sequence[Scores] = (),
    ) -> dict[str, Any]:
        """Where it has come to, as a checkpoint keeps it; ``bad_rows`` are those since."""
        before, taken = split(self.dealt, batch, world_size)
        steps = len(losses) - len(self.losses)
        return msgspec.to_builtins(
            DataPlace(
                tuple((each.batch, each.taken) for each in before),
                batch,
                # Bad rows are taken too: the reader has passed them.
                taken[rank] + steps * batch + bad_rows,
                self.bad_rows + bad_rows,
                base64.b64encode(np.array(losses, np.float64).tobytes()).decode(),
                self.resumed,
                tuple(scores),
            )
        )


def start_after(found: Resumed, rank: int, world_size: int) -> RunStart:
    """Where a rank goes on; InputError for a checkpoint that no run of a job has saved.

    Of another number of ranks, each has the mean of their losses as its own.
    """
    try:
        places = [to_kind(extra, DataPlace) for extra in found.extras]
        losses = np.array([np.frombuffer(base64.b64decode(p.losses)) for p in places])
    except (msgspec.ValidationError, ValueError) as error:
        where, remedy = f"step-{found.step}", "Name another checkpoint.folder."
        wanted = "a checkpoint of shardwright train"
        raise InputError(expected(where, wanted, f"another: {error}", remedy)) from None
    first = places[0]
    before = (DealtRows(batch, taken) for batch, taken in first.before)
    dealt = (*before, DealtRows(first.batch, tuple(place.taken for place in places)))
    # Of other ranks no loss is anyone's own: each gets the mean, and so the mean over ranks, which
    # is what the curve shows, stays what it was.
    same = len(places) == world_size
    return RunStart(
        found.step,
        tuple(each for each in dealt if any(each.taken)),
        tuple((losses[rank] if same else losses.mean(0)).tolist()),
        # Each count to one of the new ranks, so that the sum over ranks stays.
        sum(place.bad_rows for place in places[rank::world_size]),
        (*first.resumed, found.step),
        first.scores,
    )


def batches_after(task: Task, rank: int, world_size: int, start: RunStart) -> Iterator[Batch]:
    """The batches of a rank that it has not had yet.

    A task whose ``batches`` does not take what was ``dealt`` gives them all again.
    """
    # A task of the user's own need not know of it; then the same ranks skip what they had.
    if "dealt" in inspect.signature(task.batches).parameters:
        return task.batches(rank, world_size, start.dealt)  # type: ignore[call-arg]
    batches = task.batches(rank, world_size)
    skip(batches, start.dealt, rank, world_size, "Task.batches", "dealt")
    return batches


def skip(
    batches: Iterator[Batch],
    dealt: Sequence[DealtRows],
    rank: int,
    world_size: int,
    where: str,
    parameter: str,
) -> None:
    """Leave out the batches that a rank has had; InputError where others had them."""
    if not dealt:
        return
    if len(dealt) > 1 or dealt[0].world_size != world_size:
        ranks = ", then ".join(str(each.world_size) for each in dealt)
        raise _other_ranks(where, ranks, world_size, parameter)
    # Made and thrown away: only making a batch moves an iterator of somebody else's on.
    for _ in islice(batches, dealt[0].taken[rank] // dealt[0].batch):
        pass


def lasting(
    batches: Iterator[Batch], again: Callable[[], Iterator[Batch]], saves: Saves
) -> Iterator[Batch]:
    """Batches until the run is saved, although a worker that loads them was lost: other ranks are
    in the step that this one has no batch for, and cannot save before it is over. Those after it
    are made ``again``, as for a run that is resumed."""
    # A loader's worker that is killed raises in the step that needs its batch. That step cannot be
    # left out, for the other ranks are in it: its batch is made here, then all of them save and
    # stop.
    for number in count():
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            if not saves.is_of_lost_worker(error):
                raise
            # Loading again draws what the lost worker had drawn: states go back, so that the model
            # does not see other numbers than without the loss.
            states = random_states()
            batches = islice(again(), number, None)
            batch = next(batches)
            set_random_states(states)
        yield batch


def _other_ranks(where: str, ranks: str, world_size: int, parameter: str) -> InputError:
    remedy = f"Let the function have a parameter '{parameter}', or take as many ranks."
    wanted = f"the data of {ranks} ranks to go on with"
    return InputError(expected(where, wanted, f"{world_size} ranks", remedy))


def facts_of(job: Job, fingerprint: str) -> dict[str, str]:
    """What a checkpoint says of the job that saved it, the same on every rank."""
    return {"plan": fingerprint, RATE: _rate_of(job), "data": _data_of(job)}


def _rate_of(job: Job) -> str:
    train = job.train
    text = repr(train.learning_rate)
    if train.schedule is not UNSET:
        known = to_builtins(train.schedule).items()
        text += f" ({', '.join(f'{key} {value}' for key, value in known)})"
    return text


def _data_of(job: Job) -> str:
    """What is dealt, and in which order."""
    data, file = job.data, data_files(job).train
    found = sorted(Path(file).iterdir()) if file and Path(file).is_dir() else [Path(file)]
    # Sizes and not digests: a log of terabytes would be read once more before every start.
    sizes = [path.stat().st_size for path in found if file and path.is_file()]
    size = sum(sizes) if sizes else None
    python = data.python if isinstance(data.python, str) else ""
    text = f"{size} bytes, in sequences of {job.batch.sequence}" if size is not None else python
    chosen = "".join(
        f", {name} {value}"
        for name, value in (("days", data.days), ("drop_negatives", data.drop_negatives))
        if value is not UNSET
    )
    return f"{data.kind}, {text}, seed {data.seed}{chosen}"


def changes(job: Job, found: Resumed, world_size: int) -> Iterator[str]:
    """What is not as it was where the checkpoint was saved, in words; MismatchError where rows
    would be lost or seen twice."""
    data, was = _data_of(job), found.facts.get("data", "")
    # Refused and not told: which rows were dealt means nothing in other data.
    if data != was:
        remedy = "Restore the data, or begin in another folder."
        raise MismatchError(expected("data", f"those of step-{found.step}: {was}", data, remedy))
    if found.world_size != world_size:
        yield f"{world_size} ranks instead of {found.world_size}"
    rate = _rate_of(job)
    if (old := found.facts.get(RATE, rate)) != rate:
        yield f"{RATE} {rate} instead of {old}"


def check_resume(job: Job, folder: Path, world_size: int, *, resume: bool) -> None:
    """Raise InputError where a run would begin beside checkpoints, has finished, or cannot go on
    with the data of as many other ranks."""
    saved = checkpoint_folder(job, folder)
    found, where = complete_steps(saved), str(saved)
    if found and not resume:
        before = read_manifest(step_folder(saved, found[-1]) / MANIFEST, found[-1]).world_size
        remedy = (
            "Go on with --resume, for more steps with --set train.steps=N beside it; or choose "
            "another --out, or remove the checkpoints."
        )
        if before != world_size:
            remedy += " -n is the number of ranks."
        got = f"one with step-{found[-1]} of {before} ranks"
        raise InputError(expected(where, "a folder without checkpoints", got, remedy))
    steps, is_over = job.train.steps, measurement_file(folder).exists()
    # A run that was saved at its last step and never measured has still its evaluation to do.
    if found and (found[-1] > steps or (found[-1] == steps and is_over)):
        remedy = "Nothing is left to train: more steps are --set train.steps=N."
        wanted = f"a checkpoint before step {steps}"
        raise InputError(expected(where, wanted, f"step-{found[-1]}", remedy))
    if found and isinstance(job.data.python, str):
        manifest = read_manifest(step_folder(saved, found[-1]) / MANIFEST, found[-1])
        if manifest.world_size != world_size:
            _check_goes_on(job.data.python, manifest.world_size, world_size)


def _check_goes_on(name: str, before: int, world_size: int) -> None:
    """InputError unless a function of batches takes where to start."""
    where = f"data.python '{name}'"
    with importable():
        if not with_names_of(python_function(name, where), {"start": 0}):
            raise _other_ranks(where, str(before), world_size, "start")
