"""Kinds of embeddings trained on the same rows with several seeds, each in a folder of its own.

What is finished is not done again: a study that was stopped goes on where it was.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec
from msgspec import UNSET

from shardwright.core.errors import EXIT_OK, InputError, expected
from shardwright.core.kinds import EmbeddingsSection, members_of, nbytes, parameters, settled
from shardwright.core.measurement import Measurement, read_measurement
from shardwright.core.model import TableSpec
from shardwright.estimate.recordings import plan
from shardwright.job.job import DataSection, Job, run_in
from shardwright.job.plan import Plan, read_plan, sealed
from shardwright.job.tables import check_constraints, free_tables, with_kinds
from shardwright.launcher.ending import RunOutcome, decode_outcome
from shardwright.launcher.folder import measurement_file, outcome_file, plan_file
from shardwright.launcher.launch import hold
from shardwright.planner.problem import batch_of
from shardwright.train.session import run, scores_of
from shardwright.train.sources import source_of
from shardwright.train.sources.clicks import is_folder
from study.found import SCHEMA, KindStudy, Lookup, Study, Trial, read_study
from study.section import StudySection, kind_names, section_of
from study.seen import Quarters, as_log, quarters

Done = Callable[[Study], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind as it is trained: its name, the job with it, and its tables at the size at which
    lookups are timed."""

    name: str
    section: EmbeddingsSection
    job: Job
    sized: tuple[TableSpec, ...]


def study_file(folder: Path) -> Path:
    """What a study found so far."""
    return folder / "study.json"


def variants_of(job: Job, section: StudySection) -> list[Variant]:
    """The job with every kind of its study; InputError for a kind that its tables cannot have."""
    if not job.model.traits.reads_clicks:
        wanted = "'dlrm', which learns from clicks"
        raise InputError(expected("model.kind", wanted, f"'{job.model.kind}'"))
    if not _compared(job, section):
        above = min(each.above for each in section.kinds)
        wanted = f"tables of more than {above:,} rows that name no kind of their own"
        raise InputError(expected("study.kinds", wanted, "none", "Or say above = ROWS of a kind."))
    sized = job.tables
    if section.rows is not UNSET:
        sized = tuple(msgspec.structs.replace(t, rows=section.rows) for t in job.tables)
    found = []
    for number, (name, each) in enumerate(zip(kind_names(section), section.kinds, strict=True)):
        where = f"study.kinds[{number}]"
        tables = with_kinds(job.tables, each, job.planner, where, job.model.kind)
        members = tuple(member for table in tables for member in members_of(table))
        check_constraints(job.planner.constraints, members, where)
        own = msgspec.structs.replace(job, tables=tables, embeddings=each, study=UNSET)
        found.append(Variant(name, each, own, settled(sized, each)))
    return found


def study(
    job: Job, folder: Path, stream: TextIO, done: Done, given: Path | None = None
) -> RunOutcome:
    """Train every kind of the job's study with every seed under ``folder``, and call ``done`` with
    what was found after each; words and progress go to ``stream``. The outcome is that of the last
    run, or of the one that did not end well, after which nothing more is done.

    InputError: the data cannot be used, nothing is held out, or a folder cannot be written.
    """
    section = section_of(job, "job" if given is None else str(given))
    variants = variants_of(job, section)
    _check_held_out(job)
    source_of(job).check()
    with hold(folder, secrets.token_hex(6)):
        return _Going(job, section, folder, stream, done, given, variants).go()


class _Going:
    """A study under way."""

    def __init__(
        self,
        job: Job,
        section: StudySection,
        folder: Path,
        stream: TextIO,
        done: Done,
        given: Path | None,
        variants: list[Variant],
    ) -> None:
        self.job, self.section, self.folder, self.given = job, section, folder, given
        self.stream, self.done, self.variants = stream, done, variants
        first = job.train.seed
        self.seeds = tuple(range(first, first + section.seeds))
        self.trials: dict[str, list[Trial]] = {variant.name: [] for variant in variants}
        self.plans: dict[str, Plan] = {}
        self.last: Measurement | None = None

    def go(self) -> RunOutcome:
        """All seeds, of each all kinds."""
        self.data = self._data()
        self.lookups = self._lookups()
        self.quarters: Quarters | None = None
        runs = [(seed, variant) for seed in self.seeds for variant in self.variants]
        for number, (seed, variant) in enumerate(runs, 1):
            self._say(f"[{number}/{len(runs)}] {variant.name}, seed {seed}")
            folder = self.folder / f"{_slug(variant.name)}-seed-{seed}"
            own = self._job_of(variant, seed, folder)
            outcome = self._finished(own, folder) or self._trained(own, folder, variant)
            if outcome.code != EXIT_OK:
                return outcome
            self._score(folder, own, variant, seed)
            self.done(self._found())
        return outcome

    def _say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def _data(self) -> DataSection:
        """The rows that all runs read: those that are made up are made once."""
        data = self.job.data
        if data.kind != "synthetic":
            return data
        bare = msgspec.structs.replace(data, cache=UNSET)
        job = msgspec.structs.replace(run_in(self.job, self.folder), data=bare)
        self._say(f"making {data.rows:,} rows up, for all runs")
        source_of(job).prepare(self._say)
        cache = str(self.folder / "data" / "rows") if data.cache is UNSET else data.cache
        return msgspec.structs.replace(as_log(job), cache=cache)

    def _job_of(self, variant: Variant, seed: int, folder: Path) -> Job:
        """A kind's job with a seed, whose files lie in a folder of its own."""
        train = msgspec.structs.replace(variant.job.train, seed=seed, out=str(folder))
        if train.table_folder:
            named = Path(train.table_folder) / folder.name
            train = msgspec.structs.replace(train, table_folder=str(named))
        checkpoint = variant.job.checkpoint
        if checkpoint is not UNSET and checkpoint.folder:
            named = Path(checkpoint.folder) / folder.name
            checkpoint = msgspec.structs.replace(checkpoint, folder=str(named))
        return msgspec.structs.replace(
            variant.job, train=train, data=self.data, checkpoint=checkpoint
        )

    def _finished(self, job: Job, folder: Path) -> RunOutcome | None:
        """How the run of ``job`` ended that is there already, if it ended well."""
        if self._planned(job, folder) is None or not measurement_file(folder).exists():
            return None
        with suppress(OSError, InputError):
            outcome = decode_outcome(outcome_file(folder).read_bytes())
            if outcome.code == EXIT_OK:
                self._say(f"trained before, in {folder}")
                return outcome
        return None

    def _planned(self, job: Job, folder: Path) -> Plan | None:
        """The plan in a run's folder, if it is one of ``job``."""
        with suppress(InputError):
            found = read_plan(plan_file(folder))
            if found.job == job:
                return found
        return None

    def _trained(self, job: Job, folder: Path, variant: Variant) -> RunOutcome:
        made = before = self._planned(job, folder)
        if made is None:
            if variant.name not in self.plans:
                self.plans[variant.name] = plan(job)
            made = sealed(msgspec.structs.replace(self.plans[variant.name], job=job))
        return run(made, folder, self.stream, given=self.given, resume=before is not None).outcome

    def _lookups(self) -> dict[str, Lookup]:
        """Those that an earlier start of this study measured, and the others."""
        found, rows = {}, self.section.rows
        with suppress(InputError):
            before = read_study(study_file(self.folder))
            same = before.rows == rows and before.batch == self.job.batch.size
            kinds = {each.name: each for each in before.kinds if same}
            for variant in self.variants:
                own = kinds.get(variant.name)
                if own and own.lookup.parameters == sum(map(parameters, variant.sized)):
                    found[variant.name] = own.lookup
        left = {each.name: each.sized for each in self.variants if each.name not in found}
        if left:
            from study.lookups import measure_lookups

            self._say(f"timing lookups of {', '.join(left)}")
            found |= measure_lookups(left, self.job.batch.size, batch_of(self.job).zipf)
        return found

    def _score(self, folder: Path, job: Job, variant: Variant, seed: int) -> None:
        """Add the trial of a finished run."""
        self.last = read_measurement(measurement_file(folder))
        scores = scores_of(folder, self.last.world_size, "test")
        assert self.last.quality is not None
        assert scores is not None
        if self.quarters is None:
            trained = job.train.steps * job.batch.size * self.last.world_size
            self._say("counting how often ids were seen")
            self.quarters = quarters(self.job, job, _compared(self.job, self.section), trained)
        quality = {"all": self.last.quality}
        if self.quarters:
            quality |= self.quarters.quality(scores)
        self.trials[variant.name].append(Trial(seed, quality))  # type: ignore[arg-type]

    def _found(self) -> Study:
        assert self.last is not None
        return Study(
            schema=SCHEMA,
            model=self.job.model.name,
            world_size=self.last.world_size,
            batch=self.job.batch.size,
            steps=self.job.train.steps,
            seeds=self.seeds,
            kinds=tuple(
                KindStudy(
                    name=each.name,
                    section=each.section,
                    parameters=sum(map(parameters, each.job.tables)),
                    nbytes=sum(map(nbytes, each.job.tables)),
                    lookup=self.lookups[each.name],
                    trials=tuple(self.trials[each.name]),
                )
                for each in self.variants
            ),
            rows=self.section.rows,
            seen=self.quarters.seen if self.quarters else UNSET,
            versions=self.last.versions,
            machine=self.last.machine,
        )


def _compared(job: Job, section: StudySection) -> tuple[TableSpec, ...]:
    """The tables whose kinds a study changes."""
    return free_tables(job.tables, min(section.kinds, key=lambda each: each.above), ("full",))


def _slug(name: str) -> str:
    """A kind's name as a part of a folder's."""
    return re.sub(r"[^\w.]+", "-", name)


def _check_held_out(job: Job) -> None:
    """InputError unless rows are held out that kinds can be compared on."""
    data = job.data
    there = data.days is not UNSET or is_folder(job)
    there = there or bool(data.test_rows if data.kind == "synthetic" else data.test_path)
    if not there:
        key = "data.test_rows" if data.kind == "synthetic" else "data.test_path"
        wanted = "rows that are held out, on which kinds are compared"
        raise InputError(expected(key, wanted, "none"))
