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
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from shardwright.core.errors import InputError, expected
from shardwright.core.megatron import MegatronSettings
from shardwright.job.memory import PLANNED, Fsdp2Section, MemorySection
from shardwright.job.model import KINDS, WIDTHS, ModelSection
from shardwright.job.planner import EstimatorSection, ProposerSection, reservation_kind
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


def _with_step(job: Job, _: str) -> str:
    return job.model.kind if job.model.traits.has_step else ""


def _no_tables(job: Job, _: str) -> str:
    """A kind of model without tables: a module of the user's own may have some."""
    traits = job.model.traits
    return "" if traits.lists_tables or traits.is_function else job.model.kind


def _none_listed(job: Job, _: str) -> str:
    return "" if job.model.traits.lists_tables else job.model.kind


def _no_rows(job: Job, name: str) -> str:
    """A kind of model without tables; tables alone have their rows priced."""
    return _no_tables(job, name) if job.model.traits.has_step else ""


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


def _other(key: str | Callable[[Job], str], *values: str) -> Callable[[Job, str], str]:
    """What a key, or what follows from several, says that is none of ``values``."""
    said = attrgetter(key) if isinstance(key, str) else key

    def beside(job: Job, _: str) -> str:
        found: str = said(job)
        return "" if found in values else found

    return beside


def _where(key: str, value: Any, words: str = "") -> Callable[[Job, str], str]:
    """The key, or ``words`` for it, where that is what it says."""
    return lambda job, _: (words or key) if attrgetter(key)(job) == value else ""


def _of_proposer(job: Job, _: str) -> str:
    """The first key of an entry that proposers of its kind do not have."""
    for entry in job.planner.proposers:
        usual = ProposerSection(entry.kind)
        for name, kinds in PROPOSED_BY.items():
            if entry.kind not in kinds and getattr(entry, name) != getattr(usual, name):
                return f"{name} beside kind '{entry.kind}'"
    return ""


def _pair_without_replicas(job: Job, _: str) -> str:
    replicas = 1 if job.parallel is UNSET else job.parallel.data_replicate
    alone = job.memory is not UNSET and job.memory.twice and replicas == 1
    return "parallel.data_replicate" if alone else ""


def _keeps_whole(job: Job, _: str) -> str:
    section = job.memory
    assert section is not UNSET, "one of its keys is given"
    ours = section.runtime == "shardwright" and section.zero in (1, 2)
    return f"zero = {section.zero}" if ours else ""


def _kinds_of_tables(job: Job) -> bool:
    section = job.embeddings
    return job.planner.kinds is not UNSET or (section is not UNSET and section.kind is not UNSET)


def _kinds_elsewhere(job: Job, _: str) -> str:
    chosen = {"embeddings": job.embeddings, "planner.kinds": job.planner.kinds}
    return next((key for key, value in chosen.items() if value is not UNSET), "")


LOGS, DRAWN = ("criteo", "columns"), ("synthetic", "text", "python")  # rows as they are, or drawn
# Of an estimate that adds up shards; communication is of every exchange of rows.
SUMMED = " ".join(n for n in EstimatorSection.__struct_fields__ if n != "communication")
RESERVED_BY = {
    "percentage": ("percentage", "heuristic", "inference"),
    # A trace of tables alone is kept there.
    "nbytes": ("absolute", "traced"),
    "dense_bytes": ("heuristic", "inference"),
}
PROPOSED_BY = {
    "use_depth": ("greedy", "uniform"),
    "threshold": ("greedy",),
    "max_proposals": ("grid",),
    "bins_per_device": ("dynamic_programming",),
}
UNREAD = "which does not read it"
NO_KEY, BESIDE_KIND = "no such key for kind '{}'", f"none beside model.kind '{{}}', {UNREAD}"


def _no_sequences(job: Job, _: str) -> str:
    """Samples that are no tokens; a function of the user's own may ask how many there are."""
    text = job.model.traits.reads_text or job.model.python is not UNSET
    return "" if text else job.model.kind


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
        ("model.arguments",),
        _where("model.python", UNSET),
        "none without {}, whose function gets them",
    )
    yield Rule(("batch.sequence",), _no_sequences, "1, for kind '{}' has no sequences")
    yield Rule(
        tuple(f"model.{name}" for name in WIDTHS),
        lambda job, _: "hf_config" if job.model.hf_config is not UNSET else "",
        "no widths beside {}, which has them all",
        found=_listed,
    )


def _of_run() -> Iterator[Rule]:
    """Of ``[train]``, ``[data]`` and ``[checkpoint]``, and of costs that no step has."""
    yield Rule(("data.python",), _other("data.kind", "python"), "none beside data.kind '{}'")
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
    yield Rule(
        _of("planner.estimator", SUMMED),
        _with_step,
        "none beside model.kind '{}', whose steps are simulated",
        "Leave it out, or leave [model] out to plan the tables alone.",
    )
    remedy = "Leave [model] out to plan the tables alone."
    wanted = "'cluster' for kind '{}', whose dense part is planned too"
    yield Rule(("planner.constants",), _with_step, wanted, remedy)
    yield Rule(("planner.estimator.communication",), _no_rows, BESIDE_KIND)
    beside = f"none beside planner.constants '{{}}', {UNREAD}"
    for keys, read in (
        (("planner.estimator.count_ephemeral",), ("torchrec-1.9", "additive")),
        (_of("planner.estimator", EstimatorSection), ("cluster", "torchrec-1.9")),
        (("planner.dedup",), ("cluster",)),
        (("planner.options",), ("cluster", "torchrec-1.9")),
    ):
        yield Rule(keys, _other("planner.constants", *read), beside)
    beside, logs = f"none beside data.kind '{{}}', {UNREAD}", (*LOGS, "synthetic")
    why = "Only rows of kind 'synthetic' are made up."
    yield Rule(_of("data", "rows test_rows drift"), _other("data.kind", "synthetic"), beside, why)
    columns = _of("data", "label dense ids logarithm scale missing header")
    yield Rule(columns, _other("data.kind", "columns"), beside)
    yield Rule(("data.drop_negatives",), _other("data.kind", *LOGS), beside)
    some = _of("data", "skip_bad_rows days cache zipf test_batch")
    yield Rule(some, _other("data.kind", *logs), beside)
    yield Rule(_of("train", "metrics_every forward"), _no_clicks, BESIDE_KIND)
    yield Rule(
        _of("data", "test_path test_rows"),
        lambda job, _: "" if job.data.days is UNSET else "data.days",
        "none beside {}, of which the last is held out",
    )
    yield Rule(
        ("data.seed",),
        lambda job, _: "" if job.data.drop_negatives else _other("data.kind", *DRAWN)(job, _),
        "none beside data.kind '{}' without data.drop_negatives, which are drawn from it",
    )
    yield Rule(
        ("data.drift",),
        _where("data.days", UNSET),
        "none without {}, between which the law drifts",
        allowed=0.0,
    )
    beside, remedy = "none beside decay '{}'", "Only decay 'polynomial' and 'cosine' reads it."
    falling = _of("train.schedule", "decay_start decay_steps end_factor")
    yield Rule(falling, _other("train.schedule.decay", "polynomial", "cosine"), beside, remedy)
    remedy = "Only decay 'polynomial' reads it."
    yield Rule(
        ("train.schedule.power",), _other("train.schedule.decay", "polynomial"), beside, remedy
    )


def _of_search() -> Iterator[Rule]:
    """Of ``[planner]``: who proposes, who places, and what is reserved."""
    yield Rule(
        _of("planner", "proposers partitioner"),
        _other("planner.search", "proposers"),
        f"none beside planner.search '{{}}', {UNREAD}",
    )
    yield Rule(
        ("planner.dense.checkpointing",),
        lambda job, _: "" if job.model.traits.has_blocks else job.model.kind,
        "none for kind '{}', which has no blocks",
        found=_listed,
    )
    yield Rule(("planner.proposers",), _of_proposer, f"no {{}}, {UNREAD}", found="one")
    for names, kind in (
        ("sort_by balance_modules", "greedy"),
        ("max_search_count tolerance", "memory_balanced"),
    ):
        yield Rule(
            _of("planner.partitioner", names),
            _other("planner.partitioner.kind", kind),
            f"none beside planner.partitioner.kind '{{}}', {UNREAD}",
        )
    beside = f"none beside planner.reservation.kind '{{}}', {UNREAD}"
    for name, kinds in RESERVED_BY.items():
        yield Rule((f"planner.reservation.{name}",), _other(reservation_kind, *kinds), beside)
    once = _other(reservation_kind, "heuristic")
    yield Rule(("planner.reservation.multiplier",), once, beside, allowed=1.0)
    yield Rule(
        ("planner.reservation.kind",),
        lambda job, _: (
            _with_step(job, _) if reservation_kind(job) in RESERVED_BY["dense_bytes"] else ""
        ),
        "traced, percentage, absolute or none for kind '{}'",
        "Its dense part is simulated to the byte; no multiplier is needed.",
    )
    yield Rule(
        ("model.python",),
        lambda job, _: (
            "" if job.model.traits.has_step else _other(reservation_kind, "traced")(job, _)
        ),
        "none beside planner.reservation.kind '{}', which traces no dense part",
        'Set planner.reservation.kind to "traced".',
    )


def _of_kinds() -> Iterator[Rule]:
    """Of what chooses kinds for tables."""
    yield Rule(
        ("embeddings", "planner.kinds"),
        _none_listed,
        "none for a {}, which has no [[tables]]",
        found="some",
    )
    yield Rule(
        ("embeddings.above",),
        lambda job, _: "" if _kinds_of_tables(job) else "embeddings.kind or planner.kinds",
        "none without {}",
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
    settings: dict[str, Any] = {"fsdp2": Fsdp2Section(), "megatron": MegatronSettings()}
    anyway = {"fp32_logits": False, "attention": "flash", "rms_norm": "fused", **settings}
    for name in MemorySection.__struct_fields__:
        is_so = PLANNED.policy if name == "checkpointing" else getattr(PLANNED, name)
        wanted = f"{is_so!r}, as steps of kind '{{}}' are planned and run"
        allowed = anyway.get(name, is_so)
        yield Rule(_of("memory", name), _as_planned, wanted, found=repr, allowed=allowed)
    yield Rule(
        ("memory.zero",), _pair_without_replicas, "one stage, or a pair beside {} of 2 or more"
    )
    yield Rule(
        ("memory.reshard_after_forward",),
        _keeps_whole,
        "false or nothing beside {}, which keeps parameters whole",
        found="true",
        allowed=False,
    )
    of_megatron = _where("memory.runtime", "megatron", "megatron")
    for runtime, usual in settings.items():
        yield Rule(
            (f"memory.{runtime}",),
            _other("memory.runtime", runtime),
            "nothing beside runtime = '{}'",
            f"These are settings of memory.runtime = '{runtime}'.",
            "a table",
            usual,
        )
    yield Rule(
        ("memory.megatron",),
        lambda job, _: job.model.kind if job.model.traits.is_function else "",
        "none for kind '{}', whose layers are its own",
        found="a table",
    )
    yield Rule(
        ("memory.float8",),
        of_megatron,
        "false or nothing beside runtime = '{}'",
        "Its products in 8 bits are memory.megatron.fp8_format.",
    )
    for key, its in (("attention", "attention_backend"), ("rms_norm", "rms_norm_fusion")):
        yield Rule(
            (f"memory.{key}",),
            lambda job, name: "" if job.model.traits.is_function else of_megatron(job, name),
            "nothing beside runtime = '{}'",
            f"Of Megatron-LM's own layers it is memory.megatron.{its}.",
        )
    named = "Its logits are never there as a whole; those of a chunk are in fp32 anyway."
    copied = "Its loss copies logits to fp32 anyway, and lets go of them."
    for key, value, why in (("loss", "chunked", named), ("runtime", "megatron", copied)):
        beside, wanted = _where(f"memory.{key}", value, value), f"false or nothing beside {key}"
        yield Rule(("memory.fp32_logits",), beside, f"{wanted} = '{{}}'", why, "true", False)


def _of_ranks() -> Iterator[Rule]:
    """Of ``[parallel]``: what divides a model."""
    yield Rule(("parallel",), _no_step, "no such section for kind '{}'", found="one")
    only_one = "1 for kind '{}'"
    only = "Only a llama is divided by it."
    both = "A llama is divided by it, or a module of your own."
    share = f"{only} Give one rank's share of the sequence as batch.sequence."
    # Before the general row, for a module of one's own has another way out.
    yield Rule(("parallel.context",), _undivided_function, only_one, share)
    yield Rule(("parallel.context",), _undivided, only_one, only)
    yield Rule(("parallel.sequence",), _undivided, NO_KEY)
    yield Rule(("parallel.expert",), _undivided, only_one, both)
    yield Rule(_of("parallel", "routing expert_load expert_tensor"), _undivided, NO_KEY)
    for key, why in (
        ("parallel.expert_tensor", "which cuts experts by tensor or expert"),
        ("model.mtp_layers", "which has no blocks for further tokens"),
    ):
        of_another = _other(lambda job: (job.memory or MemorySection()).runtime, "megatron")
        yield Rule((key,), of_another, f"none beside memory.runtime '{{}}', {why}")
    yield Rule(("parallel.pipeline",), _undivided, only_one, both)
    yield Rule(_of("parallel", "schedule chunks"), _undivided, NO_KEY)
    yield Rule(("parallel.parallelize_plan",), _undivided, NO_KEY, found="one")
    yield Rule(("parallel.tensor",), _undivided, only_one, both)
    yield Rule(
        ("parallel.sequence",),
        _where("parallel.tensor", 1, "tensor"),
        "false where {} is 1",
        found="true",
        allowed=False,
    )
    for names, routing in (("capacity_factor", "capacity"), ("skew expert_load", "skewed")):
        wanted, found = f"it only beside routing = '{routing}'", "routing = '{}'"
        yield Rule(_of("parallel", names), _other("parallel.routing", routing), wanted, found=found)
    yield Rule(
        ("parallel.routing",),
        _where("parallel.expert", 1),
        "'even' where {} is 1, for every rank has all experts",
    )
    alone = _where("parallel.pipeline", 1, "a pipeline")
    yield Rule(("parallel.chunks",), alone, "1 without {}", allowed=1)
    yield Rule(("parallel.schedule",), alone, "none without {}, whose passes it orders")


RULES = (*_of_model(), *_of_run(), *_of_search(), *_of_kinds(), *_of_steps(), *_of_ranks())
