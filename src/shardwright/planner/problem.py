"""What is to be planned, with everything that does not depend on the choice worked out once."""

# One problem is searched, bounded, explained and refused, so that all of these see the same choices
# at the same prices.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
from msgspec import UNSET

from shardwright.core.batch import MADE_UP_ZIPF, Batch
from shardwright.core.cluster import TIERS, Cluster
from shardwright.core.errors import InputError, UnsupportedError
from shardwright.core.footprint import Extra
from shardwright.core.model import ModelSpec, TableSpec
from shardwright.cost import reservation
from shardwright.cost.clock import has_clock
from shardwright.heap.classes import outside
from shardwright.heap.rank_step import Chunk
from shardwright.job.job import Job, checkpointing_of, degrees_of, memory_of
from shardwright.job.model_of_job import beyond_positions, placed_tables, step_dtypes
from shardwright.job.planner import reservation_kind, trained_communication
from shardwright.planner import profiles
from shardwright.planner.choices import Rules, Tables, table_choices, uncut_notes
from shardwright.planner.pricing.evaluate import PricingContext
from shardwright.planner.unit_choice import DenseContext, UnitChoice
from shardwright.planner.units import UnitSpace

HIDDEN = "of a collective beside compute the share 'overlap' of its seconds costs none of it"
HIDDEN_BY_CLOCK = (
    "the share 'hides' of compute hides collectives, and loses 'slows' of their seconds"
)


@dataclass(frozen=True)
class Problem:
    """A job on its cluster, and every choice there is.

    Where it is not ``slow``, kernels with weights in host memory are among them only as far as they
    can help while HBM is not scarce. Steps of plans that are not ``sure`` need no more than perhaps
    fit: their live bytes and the least of what else is on the device.
    """

    job: Job
    context: PricingContext
    model: ModelSpec
    tables: Tables
    unit_space: UnitSpace
    reserved: reservation.Reservation
    assumptions: tuple[str, ...]
    slow: bool = True
    sure: bool = True

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        return self.context.cluster

    @cached_property
    def chunk(self) -> Chunk:
        """The recorded step, ready to be run on a heap."""
        return Chunk(self.model.step.recording)

    @property
    def units(self) -> tuple[tuple[UnitChoice, ...], ...]:
        """The ways to place every unit of the model, alone."""
        return tuple(self.unit_space.choices((unit,)) for unit in self.model.units)

    @property
    def batch(self) -> Batch:
        """The batch of one rank."""
        return self.context.batch

    @property
    def values(self) -> Mapping[str, float]:
        """The machine's constants by name."""
        return self.context.values

    @property
    def on_accelerator(self) -> bool:
        """Whether steps run on a device with an allocator and a context of its own."""
        device = memory_of(self.job).lowering or self.cluster.compute_device
        return device == "cuda" and self.model.is_trained

    @cached_property
    def extras(self) -> tuple[Extra, ...]:
        """What fills a rank's device beside torch's tensors."""
        return outside(degrees_of(self.job, self.cluster.world_size), self.on_accelerator)

    @cached_property
    def outside(self) -> tuple[int, int]:
        """The least and the most bytes of that."""
        return sum(each.low for each in self.extras), sum(each.high for each in self.extras)

    @property
    def capacity(self) -> tuple[int, int, int]:
        """Bytes per rank of HBM, DDR and SSD that may be filled."""
        return self.reserved.capacities[0]

    @property
    def decisive_capacity(self) -> int:
        """Bytes per rank of the memory that weights live in."""
        return self.capacity[TIERS.index(self.cluster.decisive_tier)]

    def capacity_with(self, nbytes: int) -> tuple[int, int, int]:
        """``capacity`` with ``nbytes`` of the memory that weights live in."""
        hbm, ddr, ssd = self.capacity
        return (hbm, nbytes, ssd) if self.cluster.decisive_tier == "ddr" else (nbytes, ddr, ssd)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The tables in an order that does not depend on how a job lists them."""
        return canonical_order(self.model.tables)


def batch_of(job: Job) -> Batch:
    """What one rank gets in a step, with how often ids of its data repeat."""
    zipf = MADE_UP_ZIPF if job.data.kind == "synthetic" else 0.0  # 0 where it is not known
    if job.data.zipf is not UNSET:
        zipf = job.data.zipf
    return Batch(job.batch.size, job.batch.sequence, zipf)


def canonical_order(tables: Sequence[TableSpec]) -> tuple[int, ...]:
    """Positions of ``tables`` by everything but their names, then by name."""

    def key(index: int) -> tuple[bytes, str]:
        table = tables[index]
        # By everything but the name: a job that only names its tables otherwise should get the same
        # plan.
        bare = msgspec.structs.replace(table, name="", fqn="")
        return msgspec.json.encode(bare), table.name

    return tuple(sorted(range(len(tables)), key=key))


def make_problem(
    job: Job,
    model: ModelSpec,
    *,
    slow: bool = True,
    sure: bool = True,
    known: Problem | None = None,
) -> Problem:
    """Enumerate once what each table and unit could be; ``known`` is the problem of the same job
    with fewer choices."""
    if model.is_trained:
        trained_communication(job.planner.estimator)
    cluster, assumptions = profiles.cluster_of(job)
    batch = batch_of(job)
    dedup = None if job.planner.dedup is UNSET else job.planner.dedup
    context = PricingContext(cluster, batch, job.planner.estimator, dedup)
    param_dtype, reduce_dtype = step_dtypes(job)
    section = memory_of(job)
    degrees = degrees_of(job, cluster.world_size)
    dense = DenseContext(
        cluster.world_size,
        cluster.linked,
        context.values,
        section.stage,
        section.offload,
        cluster.compute_device != "cpu",
        degrees.data_replicate,
        section.twice,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
    )
    unit_space = UnitSpace(model, dense, job.planner.units, job.planner.dense)
    # The space of units is kept with the model: a search that has to be made again, for what
    # perhaps fits, has the same units at the same prices without pricing any anew.
    if model.is_trained:  # what is sure to fit and what perhaps fits are chosen from the same
        unit_space = model.known.setdefault(msgspec.msgpack.encode(job), unit_space)
    unit_space.check()
    _check_pinned_ranks(job, cluster)
    reserved = reserve(job, model, cluster)
    capacity = reserved.capacities[0]
    priced = known.tables if known else ()
    rules = Rules(job, model, context)
    tables = table_choices(rules, slow=slow, capacity=capacity, known=priced)
    told = (*_assumptions(job, unit_space), *_rates(unit_space), *_range(cluster, model))
    notes = (*beyond_positions(job), *assumptions, *told)
    return Problem(job, context, model, tables, unit_space, reserved, notes, slow, sure)


def _range(cluster: Cluster, model: ModelSpec) -> Iterator[str]:
    """How far a clock is off, of what it was fitted to: models without tables."""
    if has_clock(cluster.constants) and model.is_trained and not model.tables:
        its = cluster.constants["range"]
        times = f"{1 / (1 + its.value):.2f} to {1 + its.value:.2f} times"
        yield f"80 of 100 runs are to take {times} the seconds of a step (clock {its.source})"


def _rates(space: UnitSpace) -> Iterator[str]:
    """Dtypes whose products a machine's constants tell no rate of."""
    rates, homes = space.context.c, space.model.step.units if space.model.units else ()
    dtypes = dict.fromkeys(space.dtype_of(home) for home in homes)
    for dtype in dtypes:
        if dtype != "fp32" and f"{dtype}_compute_rate" not in rates:
            yield f"products in {dtype} take as long as in fp32 (no {dtype}_compute_rate is known)"


def _assumptions(job: Job, unit_space: UnitSpace) -> tuple[str, ...]:
    model = unit_space.model
    notes = list(model.recording.notes) if model.recording else []
    if job.planner.constants == "cluster":
        if model.tables:
            notes.append("ids spread evenly over the rows of a table cut by rows")
        travels = model.is_trained and job.train.overlap not in (UNSET, "none")
        if 1 in unit_space.prefetches or travels:
            clock = has_clock(unit_space.context.c)
            notes.append(HIDDEN_BY_CLOCK if clock else HIDDEN)
        else:
            notes.append(
                "phases of a step follow one another: no overlap of communication and compute"
            )
        if any(unit.checkpointed for unit in model.units) and len(checkpointing_of(job)) > 1:
            notes.append("the lower bound is that of plans with the same checkpointing")
    if not model.is_trained:
        notes += uncut_notes(job, model.tables)
        if job.planner.constants == "cluster" and reservation_kind(job) == "none":
            notes.append("nothing is reserved for a dense part: planner.reservation is not given")
        bare = [
            t.name
            for t, given in zip(model.tables, placed_tables(job), strict=True)
            if given.optimizer is None
        ]
        if bare and job.planner.constants != "additive":
            which = (
                f"table {bare[0]} names no optimizer: its"
                if len(bare) == 1
                else f"{len(bare)} tables name no optimizer, {bare[0]} first: their"
            )
            notes.append(f"{which} state is counted as 0 bytes")
    return tuple(notes)


def reserve(job: Job, model: ModelSpec, cluster: Cluster) -> reservation.Reservation:
    """What tables may not use; a model with stages has its dense part simulated instead."""
    kind = reservation_kind(job)
    section = job.planner.reservation
    if not model.is_trained and kind == "traced" and section.nbytes:
        kind = "absolute"  # the trace has been made, and stands in the job
    if not model.is_trained and kind == "traced":
        raise UnsupportedError(
            "planner.reservation.kind",
            "another kind for tables alone",
            "'traced'",
            "There is no dense part to trace: name its function in model.python, or say its "
            "bytes in planner.reservation.nbytes with kind 'absolute'.",
        )
    # A trace knows the dense part to the byte, so nothing is set aside by rule.
    if kind == "traced":
        return reservation.Reservation((cluster.capacity,))
    section = msgspec.structs.replace(section, kind=kind)
    batch = Batch(job.batch.size)
    if cluster.compute_device != "cpu" or job.planner.constants == "torchrec-1.9":
        return reservation.reserve(
            section, (cluster.capacity,), cluster.compute_device, model.tables, batch
        )
    # TorchRec's rules take shares of HBM only: on a CPU its host's memory stands in that place.
    hbm, ddr, ssd = cluster.capacity
    found = reservation.reserve(section, ((ddr, hbm, ssd),), "cuda", model.tables, batch)
    ddr, hbm, ssd = found.capacities[0]
    return reservation.Reservation(
        ((hbm, ddr, ssd),),
        found.dense and (found.dense[1], found.dense[0]),
        found.kjt and (found.kjt[1], found.kjt[0]),
    )


def _check_pinned_ranks(job: Job, cluster: Cluster) -> None:
    rules = job.planner.constraints
    for name, ranks in rules.ranks.items():
        if max(ranks) >= cluster.world_size:
            where = f"planner.constraints.ranks.{name}"
            raise InputError(where, f"ranks below {cluster.world_size}", str(max(ranks)))
    for index, group in enumerate(rules.apart):
        if len(group) > cluster.world_size:
            wanted = f"at most {cluster.world_size} tables, one per rank"
            raise InputError(f"planner.constraints.apart[{index}]", wanted, str(len(group)))


def hosts_of(cluster: Cluster) -> int:
    """How many groups of ranks are linked closely."""
    return max(cluster.world_size // cluster.group, 1)
