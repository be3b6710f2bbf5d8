"""Which keys of a job are read when: one table, from which refusals come.

A key that nothing reads would be ignored without a word, and who wrote it would believe that it did
something. So one that is given although its row says that nothing reads it is refused, with what it
stands beside and what to do instead.
"""
# What makes a row: whether a key is read follows from other keys alone. Where values have to fit
# one another (degrees that divide, ranks that multiply) the check stands beside its section. The
# first row that refuses is the one that is told, so rows follow the order in which keys decide:
# what a kind of model has comes first, for most others depend on it.

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from shardwright.core.errors import InputError, expected
from shardwright.job.memory import PLANNED, Fsdp2Section, MemorySection
from shardwright.job.model import KINDS, WIDTHS, ModelSection
from shardwright.job.parallel import ParallelSection
from shardwright.job.planner import EstimatorSection
from shardwright.job.train import CheckpointSection, DataSection, TrainSection

if TYPE_CHECKING:
    from shardwright.job.job import Job


def _plain(value: Any) -> str:
    return repr(msgspec.to_builtins(value))


def _listed(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


class Rule(msgspec.Struct, frozen=True):
    """``keys``, by their paths in a job, are not read ``beside`` what that says of a job and the
    last step of a path; it says nothing where they are. What was ``wanted`` and ``found`` is then
    told with it. A key may always have its default, or say what is so anyway, ``allowed``."""

    keys: tuple[str, ...]
    beside: Callable[[Job, str], str]
    wanted: str = "none beside {}, which does not read it"
    remedy: str = ""
    found: Callable[[Any], str] | str = _plain
    allowed: Any = UNSET


def refuse_unread(job: Job, where: str, section: str = "") -> None:
    """InputError at the first key of the job, or of one ``section``, that nothing would read."""
    for rule in RULES:
        for key in rule.keys:
            if not key.startswith(section):
                continue
            # Once a job is decoded, a key that was given as its default and one that was left out
            # are the same; nor does it harm to say what is so anyway.
            value, usual = given(job, key)
            if value in (usual, rule.allowed):
                continue
            # Asked last: a rule may look into its own section, which is there only if one of its
            # keys is given.
            if beside := rule.beside(job, key.rpartition(".")[2]):
                said = rule.found
                found = said.format(beside) if isinstance(said, str) else said(value)
                wanted = rule.wanted.format(beside)
                raise InputError(expected(f"{where}: {key}", wanted, found, rule.remedy))


def given(job: Job, key: str) -> tuple[Any, Any]:
    """What a key says, and what it says by default; nothing in a section that is not there."""
    *way, name = key.split(".")
    section: Any = job
    for step in way:
        section = getattr(section, step)
    # A section that is not there has no key that could be refused.
    if section is UNSET:
        return UNSET, UNSET
    return getattr(section, name), _usual(section.__class__, name)


@cache
def _usual(section: Any, name: str) -> Any:
    field = next(f for f in msgspec.structs.fields(section) if f.name == name)
    # msgspec keeps mutable defaults as factories, though the struct is frozen.
    made = field.default_factory
    return field.default if made is msgspec.NODEFAULT else made()


def _of(section: str, keys: str | type[msgspec.Struct]) -> tuple[str, ...]:
    """Paths of a section's keys: those in a text, or all."""
    # All keys of a section by its type, so that a key that is added to it has its row at once.
    names = keys.split() if isinstance(keys, str) else keys.__struct_fields__
    return tuple(f"{section}.{name}" for name in names)


# What a key stands beside, where nothing reads it


def _of_another(job: Job, name: str) -> str:
    """A kind of model without such a key."""
    return "" if name in job.model.traits.keys else job.model.kind


def _undivided(job: Job, name: str) -> str:
    return "" if name in job.model.traits.divided_by else job.model.kind


def _undivided_function(job: Job, name: str) -> str:
    return _undivided(job, name) if job.model.traits.is_function else ""


def _no_function(job: Job, _: str) -> str:
    return "" if job.model.traits.is_function else job.model.kind


def _no_clicks(job: Job, _: str) -> str:
    return "" if job.model.traits.reads_clicks else job.model.kind


def _no_step(job: Job, _: str) -> str:
    return "" if job.model.traits.has_step else job.model.kind


def _no_tables(job: Job, _: str) -> str:
    """A kind of model without tables: a module of the user's own may have some."""
    traits = job.model.traits
    return "" if traits.lists_tables or traits.is_function else job.model.kind


def _none_listed(job: Job, _: str) -> str:
    return "" if job.model.traits.lists_tables else job.model.kind


def _no_update(job: Job, _: str) -> str:
    """An optimizer to which no update of rows is alike: embeddings of a module then stay dense."""
    train = job.train
    if not job.model.traits.is_function or train.table_optimizer is not UNSET:
        return ""
    return "" if train.optimizer == "sgd" else train.optimizer


def _as_planned(job: Job, name: str) -> str:
    """A kind whose steps are always planned, of what a plan does not choose in ``[memory]``."""
    traits = job.model.traits
    read = traits.has_blocks if name == "checkpointing" else traits.has_step
    chosen = name in ("checkpointing", "zero", "offload") and read
    return "" if traits.is_estimated or chosen else job.model.kind


def _of_data(*kinds: str) -> Callable[[Job, str], str]:
    """A run's kind of data that is none of ``kinds``."""

    def beside(job: Job, _: str) -> str:
        return "" if job.data.kind in kinds or not job.model.traits.has_step else job.data.kind

    return beside


def _of_profile(*names: str) -> Callable[[Job, str], str]:
    """Constants of ``names``, by which tables alone are priced."""

    def beside(job: Job, _: str) -> str:
        profile = job.planner.constants
        return profile if profile in names and not job.model.traits.has_step else ""

    return beside


def _of_decay(*names: str) -> Callable[[Job, str], str]:
    """How learning rates fall, if not by one of ``names``."""

    def beside(job: Job, _: str) -> str:
        assert job.train.schedule is not UNSET, "where its keys are"
        return "" if job.train.schedule.decay in names else job.train.schedule.decay

    return beside


def _of_routing(name: str) -> Callable[[Job, str], str]:
    def beside(job: Job, _: str) -> str:
        routing = _parallel(job).routing
        return "" if routing == name else routing

    return beside


def _memory(job: Job) -> MemorySection:
    assert job.memory is not UNSET, "one of its keys is given"
    return job.memory


def _parallel(job: Job) -> ParallelSection:
    assert job.parallel is not UNSET, "one of its keys is given"
    return job.parallel


def _keeps_whole(job: Job, _: str) -> str:
    section = _memory(job)
    ours = section.runtime == "shardwright" and section.zero in (1, 2)
    return f"zero = {section.zero}" if ours else ""


def _kinds_elsewhere(job: Job, _: str) -> str:
    chosen = {"embeddings": job.embeddings, "planner.kinds": job.planner.kinds}
    return next((key for key, value in chosen.items() if value is not UNSET), "")


UNREAD = "which does not read it"
NO_KEY, BESIDE_KIND = "no such key for kind '{}'", f"none beside model.kind '{{}}', {UNREAD}"


def _of_model() -> Iterator[Rule]:
    for name in ModelSection.__struct_fields__:
        if owner := next((kind for kind in KINDS if name in KINDS[kind].keys), ""):
            remedy = f"It belongs to kind '{owner}'."
            yield Rule(_of("model", name), _of_another, NO_KEY, remedy, _listed)
    remedy = 'Set model.interaction to "dcn", or leave it out.'
    yield Rule(
        _of("model", "cross_layers cross_rank"),
        lambda job, _: "a cross network" if job.model.interaction != "dcn" else "",
        "no such key but for {}",
        remedy,
    )
    yield Rule(
        tuple(f"model.{name}" for name in WIDTHS),
        lambda job, _: "hf_config" if job.model.hf_config is not UNSET else "",
        "no widths beside {}, which has them all",
        found=_listed,
    )


def _of_run() -> Iterator[Rule]:
    """Of ``[train]``, ``[data]`` and ``[checkpoint]``, and of costs that no step has."""
    yield Rule(
        ("data.python",),
        lambda job, _: "" if job.data.kind == "python" else job.data.kind,
        "none beside data.kind '{}'",
    )
    beside = "none beside train.optimizer '{}' without train.table_optimizer, " + UNREAD
    of_tables = (*_of("train", "table_learning_rate overlap"), "planner.dedup")
    yield Rule(of_tables, _no_tables, BESIDE_KIND)
    yield Rule(of_tables, _no_update, beside)
    yield Rule(("train.table_optimizer",), _no_tables, BESIDE_KIND)
    yield Rule(("planner.tables",), _no_function, BESIDE_KIND)
    remedy = "Each table names its own: optimizer under [[tables]]."
    yield Rule(("train.optimizer",), _no_step, BESIDE_KIND, remedy)
    run = (("data", DataSection), ("train", TrainSection), ("checkpoint", CheckpointSection))
    for section, kind in run:
        yield Rule(_of(section, kind), _no_step, BESIDE_KIND)
    beside = f"none beside planner.constants '{{}}', {UNREAD}"
    yield Rule(("planner.estimator.count_ephemeral",), _of_profile("cluster"), beside)
    yield Rule(_of("planner.estimator", EstimatorSection), _of_profile("additive"), beside)
    yield Rule(("planner.dedup",), _of_profile("additive", "torchrec-1.9"), beside)
    yield Rule(("planner.options",), _of_profile("additive"), beside)
    beside, logs = f"none beside data.kind '{{}}', {UNREAD}", ("criteo", "columns", "synthetic")
    yield Rule(_of("data", "rows test_rows skip_bad_rows"), _of_data(*logs), beside)
    yield Rule(_of("data", "label dense ids"), _of_data("columns"), beside)
    yield Rule(("data.drop_negatives",), _of_data("criteo", "columns"), beside)
    yield Rule(("data.drift",), _of_data("synthetic"), beside)
    yield Rule(_of("data", "days cache zipf test_batch"), _of_data(*logs), beside)
    yield Rule(_of("train", "metrics_every forward"), _no_clicks, BESIDE_KIND)
    yield Rule(
        _of("planner", "proposers partitioner"),
        lambda job, _: "" if job.planner.search == "proposers" else job.planner.search,
        f"none beside planner.search '{{}}', {UNREAD}",
    )
    yield Rule(
        ("data.test_path",),
        lambda job, _: "" if job.data.days is UNSET else "data.days",
        "none beside {}, of which the last is held out",
    )
    yield Rule(
        ("data.drift",),
        lambda job, _: "data.days" if job.data.days is UNSET else "",
        "none without {}, between which the law drifts",
        allowed=0.0,
    )
    beside, remedy = "none beside decay '{}'", "Only decay 'polynomial' and 'cosine' reads it."
    falling = _of("train.schedule", "decay_start decay_steps end_factor")
    yield Rule(falling, _of_decay("polynomial", "cosine"), beside, remedy)
    remedy = "Only decay 'polynomial' reads it."
    yield Rule(("train.schedule.power",), _of_decay("polynomial"), beside, remedy)


def _of_kinds() -> Iterator[Rule]:
    """Of what chooses kinds for tables."""
    yield Rule(
        ("embeddings", "planner.kinds"),
        _none_listed,
        "none for a {}, which has no [[tables]]",
        found="some",
    )
    yield Rule(
        ("embeddings.kind",),
        lambda job, _: "" if job.planner.kinds is UNSET else "planner.kinds",
        "none beside {}, of which a plan chooses",
    )
    yield Rule(
        ("study",),
        _kinds_elsewhere,
        "none beside {}, for a study gives the tables their kinds",
        found="both",
    )


def _of_steps() -> Iterator[Rule]:
    """Of ``[memory]``: how a step is run."""
    anyway = {"fp32_logits": False, "fsdp2": Fsdp2Section(), "checkpointing": PLANNED.policy}
    for name in MemorySection.__struct_fields__:
        is_so = PLANNED.policy if name == "checkpointing" else getattr(PLANNED, name)
        wanted = f"{is_so!r}, as steps of kind '{{}}' are planned and run"
        allowed = anyway.get(name, is_so)
        yield Rule(_of("memory", name), _as_planned, wanted, found=repr, allowed=allowed)
    yield Rule(
        ("memory.reshard_after_forward",),
        _keeps_whole,
        "false or nothing beside {}, which keeps parameters whole",
        found="true",
        allowed=False,
    )
    yield Rule(
        ("memory.fsdp2",),
        lambda job, _: "" if (runtime := _memory(job).runtime) == "fsdp2" else runtime,
        "nothing beside runtime = '{}'",
        "These are settings of memory.runtime = 'fsdp2'.",
        "a table",
        Fsdp2Section(),
    )
    yield Rule(
        ("memory.fp32_logits",),
        lambda job, _: "chunked" if _memory(job).loss == "chunked" else "",
        "false or nothing beside loss = '{}'",
        "Its logits are never there as a whole; those of a chunk are in fp32 anyway.",
        "true",
        False,
    )


def _of_ranks() -> Iterator[Rule]:
    """Of ``[parallel]``: what divides a model."""
    yield Rule(("parallel",), _no_step, "no such section for kind '{}'", found="one")
    only_one = "1 for kind '{}'"
    only = "Only a llama is divided by it."
    both = "A llama is divided by it, or a module of your own."
    share = f"{only} Give one rank's share of the sequence as batch.sequence."
    # Before the general row: for a module of one's own there is another way out, and the first row
    # that refuses is the one that is told.
    yield Rule(("parallel.context",), _undivided_function, only_one, share)
    yield Rule(("parallel.context",), _undivided, only_one, only)
    yield Rule(("parallel.sequence",), _undivided, NO_KEY)
    yield Rule(("parallel.expert",), _undivided, only_one, both)
    yield Rule(_of("parallel", "routing expert_load"), _undivided, NO_KEY)
    yield Rule(("parallel.pipeline",), _undivided, only_one, both)
    yield Rule(_of("parallel", "schedule chunks"), _undivided, NO_KEY)
    yield Rule(("parallel.parallelize_plan",), _undivided, NO_KEY, found="one")
    yield Rule(("parallel.tensor",), _undivided, only_one, both)
    yield Rule(
        ("parallel.sequence",),
        lambda job, _: "tensor" if _parallel(job).tensor == 1 else "",
        "false where {} is 1",
        found="true",
        allowed=False,
    )
    for name, routing in (("capacity_factor", "capacity"), ("skew", "skewed")):
        wanted, found = f"it only beside routing = '{routing}'", "routing = '{}'"
        yield Rule(_of("parallel", name), _of_routing(routing), wanted, found=found)
    yield Rule(
        ("parallel.chunks",),
        lambda job, _: "a pipeline" if _parallel(job).pipeline == 1 else "",
        "1 without {}",
        allowed=1,
    )


RULES = (*_of_model(), *_of_run(), *_of_kinds(), *_of_steps(), *_of_ranks())
