"""What ranks time side by side: memory and arithmetic of one rank, collectives of all, embedding
rows; how they time it; and what they found, as values.
"""

# Ranks make the same calls in the same order, for a collective waits for all of them: how often a
# run is repeated, and when a section is over, are means of what all ranks found, never one's own.

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import nn

from shardwright.core.block import Block, GroupKey
from shardwright.core.cluster import Device
from shardwright.core.document import decode_json
from shardwright.core.work import Product
from shardwright.cost.network import CROSSINGS, Collective
from shardwright.data.logs import CriteoLog
from shardwright.data.reading import ClickReader
from shardwright.data.synthetic import ClickModel
from shardwright.runtime.comm import Comm, Pending
from shardwright.runtime.embeddings.bags import one_each
from shardwright.runtime.embeddings.route import HeldBlock, TableGroup, TablePiece
from shardwright.runtime.embeddings.routing import GroupRouting
from shardwright.runtime.embeddings.store import Store
from shardwright.runtime.embeddings.update import Looked
from shardwright.runtime.probe import Probe
from shardwright.train.room import GROUPS

FLOAT = 4
BUFFERS = tuple(2**k for k in (12, 14, 16, 18, 20, 22, 24, 25))  # 4 KiB to 32 MiB
OVERLAPPED: tuple[tuple[Collective, int], ...] = (  # buffers of a small layer and of a large one
    ("all_gather", 2**20),
    ("reduce_scatter", 2**20),
    ("all_gather", 2**23),
    ("reduce_scatter", 2**23),
)
PARTS = ("alone", "work", "both")
WIDTHS = (16, 64)  # elements of a row that is read


def collective_case(collective: Collective, nbytes: int) -> str:
    """The case of a collective over a full buffer."""
    return f"{collective} {nbytes}"


def overlap_case(collective: Collective, nbytes: int, part: str) -> str:
    """The case of a collective alone, of work that takes as long, or of both at once."""
    return f"overlap {collective} {nbytes} {part}"


def row_case(width: int) -> str:
    """The case of reading random rows."""
    return f"rows of {width}"


SCHEMA = "shardwright.samples/1"


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one run in each round; one run does ``amount`` of work (bytes, FLOPs, ids ...).

    ``together``: the ranks work on one thing, which is done when the slowest is.
    """

    amount: float
    together: bool
    seconds: tuple[float, ...]


class Samples(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's cases by name, and its machine: facts as text, memory in bytes by capacity."""

    schema: str
    rank: int
    world_size: int
    device: Device
    backend: str
    machine: dict[str, str]
    memory: dict[str, int]
    cases: dict[str, Case]


def samples_file(folder: Path, rank: int) -> Path:
    """What a rank timed."""
    return folder / f"rank-{rank}.samples.json"


class Times:
    """Seconds of every case of all ranks: the median over the rounds, and round by round.

    A round's seconds are the slowest rank's where ranks work together, else the ranks' mean.
    """

    def __init__(self, ranks: Sequence[Samples]) -> None:
        self.amounts = {name: case.amount for name, case in ranks[0].cases.items()}
        self._rounds: dict[str, list[float]] = {}
        for name, case in ranks[0].cases.items():
            rounds = zip(*(rank.cases[name].seconds for rank in ranks), strict=True)
            merge = max if case.together else statistics.fmean
            self._rounds[name] = [merge(values) for values in rounds]

    def medians(self) -> dict[str, float]:
        """Every case's median over its rounds."""
        return {name: statistics.median(values) for name, values in self._rounds.items()}

    def rounds(self, names: Iterable[str]) -> Iterator[dict[str, float]]:
        """Seconds of the cases ``names`` in each round that all of them have."""
        chosen = {name: self._rounds[name] for name in names}
        for values in zip(*chosen.values(), strict=False):
            yield dict(zip(chosen, values, strict=True))


def spread(values: Sequence[float], value: float) -> float:
    """Half of the distance between the quartiles of ``values``, as a share of ``value``."""
    if len(values) < 2 or not value:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / abs(value)


SAMPLE_SECONDS = 4e-3  # a run that is shorter is repeated, for clocks and barriers are coarse
MOST_REPEATS = 200
MOST_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Timed:
    """Something to time: ``work`` does ``amount`` of it; ``together`` with the other ranks."""

    amount: float
    work: Callable[[], object]
    together: bool = False


class Bench:
    """All ranks make the same calls in the same order; ``tick`` is called before every sample."""

    def __init__(self, comm: Comm, synchronize: Callable[[], None], tick: Callable[[], None]):
        self.comm = comm
        self.cases: dict[str, Case] = {}
        self._synchronize = synchronize
        self._tick = tick

    def agreed(self, value: float) -> float:
        """The mean of all ranks' values; no rank goes on before every rank is here."""
        mean = torch.tensor([value], device=self.comm.mesh.device_type)
        if self.comm.size > 1:
            self.comm.all_reduce("calibrate", mean)
        return mean.item() / self.comm.size

    def measure(self, runs: Mapping[str, Timed], seconds: float, least: int) -> None:
        """Time ``runs`` for about ``seconds``, in ``least`` rounds at least."""
        repeats = {name: self.repeats(run.work) for name, run in runs.items()}
        found: dict[str, list[float]] = {name: [] for name in runs}
        began = time.perf_counter()
        for done in range(MOST_ROUNDS):
            if self.agreed(time.perf_counter() - began) > seconds and done >= least:
                break
            for name, run in runs.items():
                found[name].append(self._sample(run.work, repeats[name]))
        for name, run in runs.items():
            self.cases[name] = Case(run.amount, run.together, tuple(found[name]))

    def seconds(self, work: Callable[[], object]) -> float:
        """How long ``work`` takes about, on every rank alike."""
        repeats = self.repeats(work)
        return self.agreed(statistics.median(self._sample(work, repeats) for _ in range(5)))

    def repeats(self, work: Callable[[], object]) -> int:
        """How often ``work`` is repeated in a sample, on every rank alike; it has run then."""
        self._sample(work, 1)
        once = self.agreed(self._sample(work, 1))
        return max(1, min(MOST_REPEATS, math.ceil(SAMPLE_SECONDS / max(once, 1e-9))))

    def _sample(self, work: Callable[[], object], repeats: int) -> float:
        """Seconds of one run: the median where runs can be timed one by one, for a run that another
        process interrupts is the exception; else the mean of runs that follow one another."""
        # A barrier before each sample: a collective's time is from the last rank's arrival, and a
        # rank that runs ahead would measure the others' delay.
        self._tick()
        self.agreed(0.0)
        self._synchronize()
        ends = [time.perf_counter()]
        for _ in range(repeats):
            work()
            ends.append(time.perf_counter())
        if self.comm.mesh.device_type == "cpu":
            return statistics.median(b - a for a, b in itertools.pairwise(ends))
        self._synchronize()
        return (time.perf_counter() - ends[0]) / repeats


# ---- what is timed -------------------------------------------------------------------------------


_LIMITS = tuple(Path(limit) for limit, _ in GROUPS)


def host_bytes(limits: tuple[Path, ...] = _LIMITS) -> int:
    """Bytes of the host's memory, or those its control group allows if they are fewer."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in limits:
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total


LARGE = 64 * 2**20  # bytes of an array that no cache keeps
FRESH = 80 * 2**20  # malloc takes more than 32 MiB from the system, unless up to 64 lie unused
LAYERS = ((128, 256, 256), (128, 512, 512), (512, 512, 512), (1024, 256, 256), (128, 1024, 1024))
CHAIN, WIDTH = 8, 16  # layers so small that calling them is all they cost
OPERATIONS_OF_A_LAYER = 4  # linear and ReLU, forward and backward


def memory(device: torch.device) -> dict[str, Timed]:
    """An update and a copy; an amount is the bytes of the arrays that are touched."""
    weight = torch.zeros(LARGE // FLOAT, device=device)
    gradient = torch.ones_like(weight)
    return {
        "update": Timed(2 * LARGE, lambda: weight.add_(gradient, alpha=-0.1)),
        "copy": Timed(2 * LARGE, lambda: weight.copy_(gradient)),
        "fresh": Timed(FRESH, lambda: torch.empty(FRESH // FLOAT, device=device).fill_(1.0)),
    }


def link(device: torch.device) -> dict[str, Timed]:
    """An accelerator's way to its host's memory, and that memory itself."""
    near = torch.zeros(LARGE // FLOAT, device=device)
    pinned = torch.zeros(LARGE // FLOAT, pin_memory=True)
    other = torch.ones(LARGE // FLOAT)
    return {
        "link": Timed(LARGE, lambda: near.copy_(pinned, non_blocking=True)),
        "host": Timed(2 * LARGE, lambda: pinned.copy_(other)),
    }


def products_file(folder: Path) -> Path:
    """The products of a job that ranks are to time."""
    return folder / "products.json"


def products(folder: Path, device: torch.device) -> dict[str, Timed]:
    """Those of a step of a job, each as often as it is there; an amount is FLOPs."""
    runs = {}
    for product in decode_json(products_file(folder).read_bytes(), list[Product]):
        left = torch.randn(product.m, product.k, device=device)
        right = torch.randn(product.k, product.n, device=device)

        def multiply(
            calls: int = product.calls, left: torch.Tensor = left, right: torch.Tensor = right
        ) -> None:
            for _ in range(calls):
                torch.mm(left, right)

        runs[f"layer {product.m}x{product.k}x{product.n}"] = Timed(product.flops, multiply)
    return runs


def compute(device: torch.device) -> dict[str, Timed]:
    """Layers of usual sizes, forward; an amount is FLOPs."""
    runs = {}
    for samples, fan_in, fan_out in LAYERS:
        batch = torch.randn(samples, fan_in, device=device)
        weight = torch.randn(fan_out, fan_in, device=device)
        bias = torch.zeros(fan_out, device=device)

        def layer(
            batch: torch.Tensor = batch, weight: torch.Tensor = weight, bias: torch.Tensor = bias
        ) -> None:
            nn.functional.linear(batch, weight, bias)

        runs[f"layer {samples}x{fan_in}x{fan_out}"] = Timed(2.0 * samples * fan_in * fan_out, layer)
    return runs


def operations(device: torch.device) -> dict[str, Timed]:
    """A step of a chain of tiny layers; an amount is the operations a plan counts for it."""
    chain = nn.Sequential(*(m for _ in range(CHAIN) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    chain.to(device)
    batch = torch.randn(WIDTH, WIDTH, device=device, requires_grad=True)

    def step() -> None:
        chain.zero_grad()
        chain(batch).sum().backward()

    return {"operations": Timed(CHAIN * OPERATIONS_OF_A_LAYER, step)}


LAYER = 256


def collectives(comm: Comm) -> dict[str, Timed]:
    """Every collective over every size of the full buffer; an amount is the buffer's bytes."""
    device = comm.mesh.device_type
    full = torch.zeros(BUFFERS[-1] // FLOAT, device=device)
    other = torch.zeros_like(full)
    runs = {}
    for nbytes in BUFFERS:
        for name in CROSSINGS:
            work = _work(comm, name, full, other, nbytes)
            runs[collective_case(name, nbytes)] = Timed(nbytes, work, together=True)
    return runs


def _work(
    comm: Comm, name: Collective, full: torch.Tensor, other: torch.Tensor, nbytes: int
) -> Callable[[], object]:
    """One call; buffers are cut to a whole number of elements for each rank, as units are."""
    share = max(nbytes // FLOAT // comm.size, 1)
    whole, shard = full[: share * comm.size], other[:share]
    sent = other[: share * comm.size]
    if name == "all_gather":  # units travel as bytes
        filled, part = whole.view(torch.uint8), shard.view(torch.uint8)
        return lambda: comm.all_gather("calibrate", filled, part)
    if name == "reduce_scatter":
        return lambda: comm.reduce_scatter("calibrate", shard, whole)
    if name == "all_reduce":
        return lambda: comm.all_reduce("calibrate", whole)
    return lambda: comm.all_to_all("calibrate", whole, sent)


def overlaps(comm: Comm, bench: Bench) -> dict[str, Timed]:
    """Each overlapped collective alone, work that takes as long alone, and both at once."""
    device = comm.mesh.device_type
    left, right = (torch.randn(LAYER, LAYER, device=device) for _ in range(2))
    out = torch.empty_like(left)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    unit = bench.seconds(lambda: compute(1))
    runs = {}
    for collective, nbytes in OVERLAPPED:
        begin = _begin(comm, collective, nbytes)
        count = max(1, round(bench.seconds(partial(_both, begin, _nothing)) / unit))
        work = partial(compute, count)
        works = (partial(_both, begin, _nothing), work, partial(_both, begin, work))
        for part, both in zip(PARTS, works, strict=True):
            runs[overlap_case(collective, nbytes, part)] = Timed(nbytes, both, together=True)
    return runs


def _begin(comm: Comm, collective: Collective, nbytes: int) -> Callable[[], Pending | None]:
    """Begins a collective over a full buffer of its own and does not wait for it."""
    share = nbytes // FLOAT // comm.size
    full = torch.zeros(share * comm.size, device=comm.mesh.device_type)
    shard = torch.zeros(share, device=comm.mesh.device_type)
    if collective == "all_gather":
        whole, part = full.view(torch.uint8), shard.view(torch.uint8)
        return lambda: comm.all_gather("calibrate", whole, part, wait=False)
    assert collective == "reduce_scatter"
    return lambda: comm.reduce_scatter("calibrate", shard, full, wait=False)


def _both(begin: Callable[[], Pending | None], work: Callable[[], None]) -> None:
    pending = begin()
    work()
    if pending is not None:
        pending.wait()


def _nothing() -> None:
    """No work beside a collective."""


FEATURES, BATCH = 8, 2048
IDS = FEATURES * BATCH
TABLE_BYTES = 64 * 2**20  # of a table that no cache keeps
CLICK_ROWS, CLICK_BATCH, CLICK_TABLE = 2048, 256, 1000


def rows_of(width: int) -> int:
    """Rows of the table of a width."""
    return TABLE_BYTES // FLOAT // width


def accesses(device: torch.device, owners: int) -> dict[str, Timed]:
    """Reads of random rows, fused updates of them, and ids on their way to ``owners`` ranks."""
    runs = {}
    random = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        weight = torch.zeros(rows_of(width), width, device=device)
        rows = torch.randint(rows_of(width), (IDS,), generator=random).to(device)
        out = torch.empty(IDS, width, device=device)
        runs[row_case(width)] = Timed(IDS, partial(torch.index_select, weight, 0, rows, out=out))
    runs |= _updates(device, random)
    for name, cut in (("ids addressed", False), ("ids sorted", True)):
        runs[name] = Timed(IDS, _travel(device, owners, cut, random))
    return runs


def _updates(device: torch.device, random: torch.Generator) -> dict[str, Timed]:
    width = WIDTHS[0]
    block = Block("table", "parameter", (0, 0), (rows_of(width), width), 0)
    looked = Looked(torch.randint(rows_of(width), (IDS,), generator=random).to(device))
    gradient = torch.zeros(IDS, width, device=device)
    runs = {}
    for optimizer in ("sgd", "rowwise_adagrad"):
        group = TableGroup(
            GroupKey(width, optimizer, "fp32", width), 1, (), {0: (HeldBlock(block, 0),)}
        )
        store = Store(group, 0, lambda *_: torch.tensor(0.0), Probe(), device)
        runs[optimizer] = Timed(IDS, partial(store.update, looked, gradient, 0.1, 1))
    return runs


def _travel(
    device: torch.device, owners: int, cut: bool, random: torch.Generator
) -> Callable[[], None]:
    """Ids made into requests, and the order of the answers undone, for tables on one rank each or
    for tables cut by rows; answers are one element wide, so that they hardly count."""
    shares = max(owners, 2)  # a single part is no cut
    chunk = rows_of(WIDTHS[0]) // shares
    pieces = []
    for feature in range(FEATURES):
        parts = (feature * owners // FEATURES,)
        if cut:
            parts = tuple(part * owners // shares for part in range(shares))
        starts = tuple(chunk * part for part in range(len(parts)))
        pieces.append(TablePiece(feature, 0, 1, chunk * shares, starts, parts, (0,) * len(parts)))
    group = TableGroup(GroupKey(1, "sgd", "fp32", 1), 0 if cut else FEATURES, tuple(pieces), {})
    routing = GroupRouting.of(group, owners, device)
    ids = torch.randint(chunk * shares, (FEATURES, BATCH), generator=random).to(device)
    bags = one_each(ids)
    out = torch.empty(FEATURES, BATCH, 1, device=device)
    answers = torch.zeros(IDS, 1, device=device)

    def travel() -> None:
        asked = routing.request(bags)
        routing.put(out, answers, asked)

    return travel


def parsing(folder: Path, rank: int) -> dict[str, Timed]:
    """Reading a click log of this rank's own; an amount is rows."""
    path = folder / f"rank-{rank}.tsv"
    tables = (CLICK_TABLE,) * 26
    ClickModel(cardinalities=tables).write(path, CLICK_ROWS)
    reader = ClickReader(CriteoLog(path, tables), CLICK_BATCH)
    return {"click rows": Timed(CLICK_BATCH, lambda: next(reader))}
