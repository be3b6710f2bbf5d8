"""Sharded tables beside whole ones in float64, over random tables, cuts and batches."""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.core.block import Block
from shardwright.core.errors import InputError, PeerError, RunError
from shardwright.core.model import TableSpec
from shardwright.core.option import shard_runs
from shardwright.core.sharding import TYPES, ShardingType, traits
from shardwright.job.planner import IN_FULL, Communication
from shardwright.runtime.embeddings.route import Pooling, Table
from shardwright.runtime.embeddings.shard import make_tables
from shardwright.runtime.embeddings.tables import ShardedTables
from shardwright.runtime.embeddings.update import EPSILON
from shardwright.runtime.guard import Guard
from shardwright.runtime.saving import load_checkpoint, save_checkpoint
from shardwright.runtime.state import full_state_dict

STEPS, RATE = 5, 0.05
FIRST, SECOND = 0.9, 0.999
Given = dict[str, tuple[torch.Tensor, ...]]
Overlap = Literal["none", "rows", "ids"]  # also ids of the step to come


@dataclass
class Whole:
    """A table on one process in float64, with what its optimizer keeps."""

    table: Table
    weight: torch.Tensor
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    updates: int = 0

    def step(self, gradient: torch.Tensor, looked: torch.Tensor, rate: float) -> None:
        """Update the rows that were looked up."""
        self.updates += 1
        g, w, kind = gradient[looked], self.weight, self.table.optimizer
        squares = g.square().mean(1, keepdim=True) if "row" in kind else g.square()
        if kind == "sgd":
            w[looked] -= rate * g
        elif "adagrad" in kind:
            running = self._kept("sum", squares)
            running[looked] += squares
            w[looked] -= rate * g / (running[looked].sqrt() + EPSILON)
        else:
            mean, square = self._kept("mean", g), self._kept("square", squares)
            mean[looked] = FIRST * mean[looked] + (1 - FIRST) * g
            square[looked] = SECOND * square[looked] + (1 - SECOND) * squares
            size = (square[looked] / (1 - SECOND**self.updates)).sqrt() + EPSILON
            w[looked] -= rate * mean[looked] / (1 - FIRST**self.updates) / size

    def _kept(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self.states.setdefault(name, like.new_zeros(len(self.weight), like.shape[1]))

    def look_up(self, ids: torch.Tensor, lengths: torch.Tensor, weights: Any) -> torch.Tensor:
        """What a feature of the table comes to."""
        rows = self.weight[ids]
        if weights is not None:
            rows = rows * weights.double().unsqueeze(1)
        if self.table.pooling == "none":
            return rows
        bag = torch.arange(len(lengths)).repeat_interleave(lengths)
        out = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, bag, rows)
        if self.table.pooling == "mean":
            out = out / lengths.clamp(min=1).unsqueeze(1)
        return out


def drawn_tables(rnd: random.Random, optimizer: str) -> list[Table]:
    """A few tables of any sizes, some replicated, with a feature or two each."""
    return [
        Table(
            f"model.t{n}.weight",
            f"t{n}",
            rnd.choice([1, 2, 3, 5, 17, 40]),
            rnd.choice([1, 2, 3, 4, 8]),
            tuple(f"f{n}.{k}" for k in range(rnd.choice([1, 1, 2]))),
            optimizer,
            _pooling(rnd),
            replicated=(copied := rnd.random() < 0.2),
            by_rows=copied and rnd.random() < 0.5,
            dedup=rnd.random() < 0.5,
        )
        for n in range(rnd.randint(1, 5))
    ]


def _pooling(rnd: random.Random) -> Pooling:
    found: Pooling = rnd.choice(["sum", "mean", "none"])
    return found


def drawn_blocks(table: Table, rnd: random.Random, ranks: int) -> Iterator[Block]:
    """Column ranges of any widths, each cut into rows anywhere, on any ranks."""
    if table.replicated:
        for rank in range(ranks):
            yield Block(table.fqn, "parameter", (0, 0), (table.rows, table.dim), rank)
        return
    for column, columns in _parts(table.dim, rnd):
        for row, rows in _parts(table.rows, rnd):
            place = rnd.randrange(ranks)
            yield Block(table.fqn, "parameter", (row, column), (rows, columns), place)


def _parts(size: int, rnd: random.Random) -> Iterator[tuple[int, int]]:
    cuts = sorted({0, size, *(rnd.randrange(size) for _ in range(rnd.randint(0, 3)))})
    for low, high in itertools.pairwise(cuts):
        yield low, high - low


def blocks_of(table: Table, kind: ShardingType, ranks: int, local: int) -> list[Block]:
    """The table cut as a sharding type does, as evenly as it goes."""
    spec = TableSpec(table.name, table.rows, table.dim)
    width = table.dim // 2 if table.dim % 2 == 0 and traits(kind).cuts_columns else table.dim
    shapes = [s for run in shard_runs(spec, kind, ranks, local, width) for s in run.shapes()]
    return [
        Block(table.fqn, "parameter", (s.row, s.column), (s.rows, s.columns), number % ranks)
        for number, s in enumerate(shapes)
        if s.rows
    ]


def batch_of(tables: Sequence[Table], seed: int, longest: int, weighted: bool) -> Given:
    """Ids of every feature, in bags of up to ``longest``."""
    rnd, torch_rnd = random.Random(seed), torch.Generator().manual_seed(seed)
    bags, given = rnd.choice([0, 1, 3, 6]), {}
    for table in tables:
        for feature in table.features:
            lengths = [1 if longest == 1 else rnd.randint(0, longest) for _ in range(bags)]
            offsets = torch.tensor([0, *lengths]).cumsum(0)
            ids = torch.randint(table.rows, (sum(lengths),), generator=torch_rnd)
            given[feature] = (ids, offsets)
            if weighted and table.pooling == "sum":
                given[feature] += (torch.randn(len(ids), generator=torch_rnd),)
    return given


class Beside:
    """Sharded tables and whole ones, fed with the same batches."""

    def __init__(
        self,
        mesh: DeviceMesh,
        tables: Sequence[Table],
        blocks: Sequence[Block],
        communication: Communication = IN_FULL,
        overlap: Overlap = "none",
    ) -> None:
        self.rank, self.size, self.tables = mesh.get_rank(), mesh.size(), tables
        self.overlap = overlap
        self.coming: tuple[int, Given] = (-1, {})
        start = torch.Generator().manual_seed(len(tables))
        weights = {t.fqn: torch.randn(t.rows, t.dim, generator=start) for t in tables}
        self.whole = {t.fqn: Whole(t, weights[t.fqn].double()) for t in tables}

        def initial(fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
            (row, column), (rows, columns) = offsets, sizes
            return weights[fqn][row : row + rows, column : column + columns]

        folder = Path(tempfile.gettempdir())
        self.sharded = make_tables(
            tables, blocks, mesh, initial, RATE, folder=folder, communication=communication
        )
        self.sharded.overlap = overlap != "none"

    def found(self, given: Given, seed: int, longest: int, weighted: bool) -> Any:
        """What the sharded tables give; the ids of the step to come may travel from then on."""
        if self.coming[0] == seed:
            given = self.coming[1]
        if self.overlap != "none":
            self.sharded.start(given)
        found = self.sharded(given)
        if self.overlap == "ids":
            draw = (seed + 1) * self.size + self.rank
            self.coming = (seed + 1, batch_of(self.tables, draw, longest, weighted))
            self.sharded.ask(self.coming[1])
            self.sharded.advance()
        return found

    def step(self, seed: int, longest: int, weighted: bool, alone: int = 0) -> float:
        """One step of both, or of the whole tables ``alone`` with batches of so many ranks; how far
        the rows that came back are apart."""
        worst, ranks = 0.0, alone or self.size
        gradients = {t.fqn: torch.zeros_like(self.whole[t.fqn].weight) for t in self.tables}
        looked: dict[str, list[torch.Tensor]] = {t.fqn: [] for t in self.tables}
        for rank in range(ranks):
            given = batch_of(self.tables, seed * ranks + rank, longest, weighted)
            own_turn = rank == self.rank and not alone
            found = self.found(given, seed, longest, weighted) if own_turn else None
            loss = torch.zeros(())
            for table in self.tables:
                whole = self.whole[table.fqn]
                leaf = whole.weight.clone().requires_grad_()
                for feature in table.features:
                    ids, offsets, *rest = given[feature]
                    args = (ids, offsets.diff(), rest[0] if rest else None)
                    rows = Whole(table, leaf).look_up(*args)
                    draw = torch.Generator().manual_seed(seed + len(feature))
                    factor = torch.randn(rows.shape, generator=draw)
                    (rows * factor.double()).sum().div(ranks).backward()
                    looked[table.fqn].append(ids)
                    if found is not None:
                        worst = max(worst, apart(found[feature], rows))
                        loss = loss + (found[feature] * factor).sum()
                if leaf.grad is not None:
                    gradients[table.fqn] += leaf.grad
            if found is not None:
                own = loss
        if not alone:
            own.backward()
        for fqn, whole in self.whole.items():
            whole.step(gradients[fqn], torch.cat(looked[fqn]).unique(), self.sharded.learning_rate)
        return worst

    def apart(self) -> float:
        """How far the weights are apart (collective)."""
        found = full_state_dict(self.sharded)
        assert set(found) == set(self.whole)
        return max(apart(found[fqn], whole.weight) for fqn, whole in self.whole.items())


def apart(found: torch.Tensor, true: torch.Tensor) -> float:
    """The largest difference, of numbers above 1 as a share of them; infinite for other shapes."""
    if found.shape != true.shape:
        return float("inf")
    difference = (found.detach().double() - true.detach()).abs() / true.detach().abs().clamp(min=1)
    return float(difference.max()) if true.numel() else 0.0


def on_disk(tables: Sequence[Table], blocks: Sequence[Block], rnd: random.Random) -> list[Table]:
    """Some of the tables with their rows on disk, a few of them in memory."""
    return [
        table
        if table.replicated or rnd.random() < 0.2
        else replace(
            table,
            cache={
                block.offsets: 4 * block.sizes[0] + 60 * rnd.randrange(block.sizes[0] + 1)
                for block in blocks
                if block.tensor == table.fqn
            },
        )
        for table in tables
    ]


def random_cuts(
    mesh: DeviceMesh,
    optimizer: str,
    seeds: Sequence[int],
    disk: bool = False,
    communication: Communication = IN_FULL,
    overlap: Overlap = "none",
) -> list[float]:
    """How far random tables under random cuts are from whole ones after some steps."""
    found = []
    for seed in seeds:
        rnd = random.Random(seed)
        tables = drawn_tables(rnd, optimizer)
        blocks = [block for table in tables for block in drawn_blocks(table, rnd, mesh.size())]
        tables = on_disk(tables, blocks, rnd) if disk else tables
        beside = Beside(mesh, tables, blocks, communication, overlap)
        longest, weighted = rnd.choice([1, 4]), rnd.random() < 0.5
        rows = [beside.step(100 * seed + step, longest, weighted) for step in range(STEPS)]
        found.append(max(*rows, beside.apart()))
    return found


def typed_cuts(
    mesh: DeviceMesh,
    optimizer: str,
    kind: ShardingType,
    local: int,
    dedup: bool = False,
    overlap: Overlap = "none",
) -> float:
    """How far tables cut as a sharding type does are from whole ones; with ``dedup`` every bag has
    one id, as rows that travel once need it."""
    replicated = traits(kind).replicated
    tables = [
        Table("t0", "t0", 17, 8, ("f0",), optimizer, "sum", replicated=replicated),
        Table("t1", "t1", 5, 4, ("f1",), optimizer, "mean", replicated=replicated),
        Table("t2", "t2", 3, 2, ("f2",), optimizer, "none", replicated=replicated),
    ]
    tables = [replace(table, dedup=dedup) for table in tables]
    blocks = [b for table in tables for b in blocks_of(table, kind, mesh.size(), local)]
    beside = Beside(mesh, tables, blocks, overlap=overlap)
    longest = 1 if dedup else 4
    weights = [not dedup and (overlap == "ids" or s % 2 == 0) for s in range(STEPS)]
    rows = [beside.step(s, longest, weighted) for s, weighted in enumerate(weights)]
    return max(*rows, beside.apart())


def batches_that_change(mesh: DeviceMesh, seeds: Sequence[int]) -> tuple[float, list[int], str]:
    """How far whole tables on a rank each are from their references after steps of ``seeds``; how
    many ids each step could send beside their counts; what a wrong id after them is called."""
    tables = [Table(f"t{n}", f"t{n}", 9, 4 + n % 2, (f"f{n}", f"g{n}")) for n in range(3)]
    blocks = [
        Block(table.fqn, "parameter", (0, 0), (table.rows, table.dim), number % mesh.size())
        for number, table in enumerate(tables)
    ]
    beside = Beside(mesh, tables, blocks)
    worst, beside_counts = 0.0, []
    ids = beside.sharded.ids
    for seed in seeds:
        beside_counts.append(sum(ids.out) if ids else 0)
        worst = max(worst, beside.step(seed, 1, weighted=False))
    given = batch_of(tables, seeds[-1], 1, weighted=False)
    if mesh.get_rank() == mesh.size() - 1:
        given["f1"] = (torch.tensor([3, 9]), torch.tensor([0, 1, 2]))
    said = ""
    try:
        beside.sharded(given)
    except (InputError, PeerError) as error:
        said = str(error)
    worst = max(worst, beside.step(seeds[-1], 1, weighted=False))  # goes on as if nothing was
    return max(worst, beside.apart()), beside_counts, said


def too_large_for_half(mesh: DeviceMesh, replicated: bool) -> tuple[str, float]:
    """What a run says of a gradient on rank 0 that has no number in fp16, and how far the rows of
    its table are from where they started."""
    tables = [Table(f"t{n}", f"t{n}", 6, 4, (f"f{n}",)) for n in range(2)]
    tables += [replace(tables[0], fqn="t2", name="t2", features=("f2",), replicated=replicated)]
    blocks = [b for t in tables for b in _laid_out(t, mesh.size())]
    beside = Beside(mesh, tables, blocks, ("fp32", "fp16"))
    ids = torch.arange(2 if mesh.get_rank() == 0 else 0)  # the others ask for nothing
    found = beside.sharded(dict.fromkeys(("f0", "f1", "f2"), ids))
    try:
        sum(found.values(), torch.zeros(())).mul(1e5 if len(ids) else 1.0).sum().backward()
    except RunError as error:
        return str(error), beside.apart()
    return "", beside.apart()


def large_replicas(
    mesh: DeviceMesh, optimizer: str, pooling: Pooling, asked: Sequence[tuple[int, int]]
) -> tuple[float, list[bool]]:
    """How far replicas by rows are from whole tables, beside a dense one and one that is cut where
    bags are pooled, after steps of a seed and the longest bag each; of each group of replicas
    whether its gradient was dense."""
    copied = {"replicated": True, "by_rows": True}
    tables = [Table("t0", "t0", 70_000, 4, ("f0",), optimizer, pooling, **copied)]
    others = [
        Table("t1", "t1", 30, 4, ("f1", "f2"), optimizer, "mean", replicated=True),
        Table("t2", "t2", 5, 8, ("f3",), optimizer, "mean", **copied),
        Table("t3", "t3", 5, 4, ("f4",), optimizer, "mean"),
    ]
    tables += others if pooling != "none" else []
    blocks = [b for table in tables for b in _laid_out(table, mesh.size())]
    beside = Beside(mesh, tables, blocks)
    rows = [beside.step(seed, longest, weighted=True) for seed, longest in asked]
    stores = beside.sharded.replicas.stores
    return max(*rows, beside.apart()), [store.gradient_bytes > 0 for store in stores]


def _laid_out(table: Table, ranks: int) -> list[Block]:
    kind: ShardingType = "data_parallel" if table.replicated else "row_wise"
    return blocks_of(table, kind, ranks, ranks)


def saved(mesh: DeviceMesh, optimizer: str, seed: int, folder: Path, disk: bool = False) -> None:
    """Two steps, then a checkpoint."""
    beside = _for_saving(mesh, optimizer, seed, disk)
    for step in range(2):
        beside.step(step, 3, weighted=True)
    save_checkpoint(folder, beside.sharded, step=2)


def resumed(
    mesh: DeviceMesh, optimizer: str, seed: int, folder: Path, ranks: int, disk: bool = False
) -> float:
    """Two more steps after what ``ranks`` saved under other cuts: how far from one process."""
    beside = _for_saving(mesh, optimizer, seed, disk)
    for step in range(2):
        beside.step(step, 3, weighted=True, alone=ranks)
    load_checkpoint(folder, beside.sharded)
    for step in range(2, 4):
        beside.step(step, 3, weighted=True)
    return beside.apart()


def _for_saving(mesh: DeviceMesh, optimizer: str, seed: int, disk: bool) -> Beside:
    tables = [
        Table("a", "a", 17, 8, ("a",), optimizer, "sum"),
        Table("b", "b", 5, 3, ("b", "c"), optimizer, "mean"),
        Table("d", "d", 9, 8, ("d",), optimizer, "none", replicated=seed % 2 == 0),
    ]
    rnd = random.Random(seed)
    blocks = [block for table in tables for block in drawn_blocks(table, rnd, mesh.size())]
    return Beside(mesh, on_disk(tables, blocks, rnd) if disk else tables, blocks)


class Keyed:
    """Features all at once, as TorchRec's KeyedJaggedTensor has them."""

    def __init__(self, given: Given) -> None:
        self.given = given

    def keys(self) -> list[str]:
        return list(self.given)

    def values(self) -> torch.Tensor:
        return torch.cat([part[0] for part in self.given.values()])

    def lengths(self) -> torch.Tensor:
        return torch.cat([part[1].diff() for part in self.given.values()])

    def weights_or_none(self) -> torch.Tensor | None:
        return None


TABLES = (
    Table("t0", "t0", 7, 4, ("t0",), "adagrad", "sum"),
    Table("t1", "t1", 5, 2, ("f1", "g1"), "sgd", "none"),
)


def _made(mesh: DeviceMesh, tables: Sequence[Table] = TABLES, **options: Any) -> ShardedTables:
    def initial(fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        whole = torch.arange(100.0).view(10, 10) / 100
        return whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    blocks = [b for table in tables for b in _laid_out(table, mesh.size())]
    return make_tables(tables, blocks, mesh, initial, RATE, **options)


FORMS: dict[str, Any] = {
    "offsets": lambda ids: (ids.view(-1), torch.arange(0, ids.numel() + 1, ids.shape[1])),
    "int32": lambda ids: (ids.int().view(-1), torch.arange(0, ids.numel() + 1, ids.shape[1]).int()),
    "dense": lambda ids: ids,
    "jagged": lambda ids: Keyed({"": FORMS["offsets"](ids)}),
}


def forms(mesh: DeviceMesh) -> list[dict[str, torch.Tensor]]:
    """The same ids in every form they may come in."""
    module = _made(mesh)
    ids = {name: torch.tensor([[0, 3], [4, 1], [2, 2]]) for name in ("t0", "f1", "g1")}
    given: list[Any] = [{name: form(each) for name, each in ids.items()} for form in FORMS.values()]
    given.append(Keyed({name: FORMS["offsets"](each) for name, each in ids.items()}))
    with torch.no_grad():
        return [module(each) for each in given]


WRONG: dict[str, Any] = {
    "too large": {"f1": (torch.tensor([0, 4, 5]), torch.tensor([0, 1, 3]))},
    "negative": {"t0": torch.tensor([0, -1])},
    "float": {"t0": torch.tensor([0.5])},
    "offsets": {"t0": (torch.tensor([1, 2]), torch.tensor([0, 1]))},
    "none": {"t0": None},
    "weights": {"t0": (torch.tensor([1]), torch.tensor([0, 1]), torch.ones(2))},
    "no weights": {"t0": (torch.tensor([1]), torch.tensor([0, 1]), [1.0])},
    "float offsets": {"t0": (torch.tensor([1]), torch.tensor([0.0, 1.0]))},
    "cube": {"t0": torch.zeros(2, 2, 2).long()},
    "meta": {"t0": torch.zeros(2, device="meta").long()},
}


def refused(
    mesh: DeviceMesh, wrongs: Sequence[str], replicated: bool, dtype: str
) -> dict[str, str]:
    """What every rank says where the last one has ids that are none, wrong by wrong."""
    return {wrong: _refused(mesh, wrong, replicated, dtype) for wrong in wrongs}


def _refused(mesh: DeviceMesh, wrong: str, replicated: bool, dtype: str) -> str:
    given: dict[str, Any] = {name: torch.zeros(2).long() for name in ("t0", "f1", "g1")}
    tables = [replace(table, replicated=replicated, dtype=dtype) for table in TABLES]
    module = _made(mesh, tables)
    module(given)
    if replicated and mesh.get_local_rank() == 0:
        with torch.no_grad():
            module(given)  # which needs no other rank
    if mesh.get_local_rank() == mesh.size() - 1:
        given |= WRONG[wrong]
    try:
        module(given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refused_in_halves(mesh: DeviceMesh) -> list[str]:
    """The same of the shards of two replicas, whose tables are each their own."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return [
        _refused(grid["shard"], "too large", replicated, "fp32") for replicated in (False, True)
    ]


def refused_ahead(mesh: DeviceMesh, wrongs: Sequence[str]) -> dict[str, tuple[list[float], str]]:
    """What comes of each of these."""
    return {wrong: _refused_ahead(mesh, wrong) for wrong in wrongs}


def _refused_ahead(mesh: DeviceMesh, wrong: str) -> tuple[list[float], str]:
    """Where the last rank has ids that are none in the batch to come: rows of the batch before it,
    which is looked up after these were asked for, and what every rank says of it then."""
    fine: dict[str, Any] = {name: torch.zeros(2).long() for name in ("t0", "f1", "g1")}
    module = _made(mesh)
    coming = fine | (WRONG[wrong] if mesh.get_rank() == mesh.size() - 1 else {})
    module(fine)
    module.ask(coming)
    found = module(fine)["t0"].flatten().tolist()
    try:
        module(coming)
    except Exception as error:
        return found, f"{type(error).__name__}: {error}"
    return found, "accepted"


def learning_weights(mesh: DeviceMesh) -> list[float]:
    """How far the gradients of weights of ids are from those of torch's bag, and the weights of
    the table after them."""
    module = _made(mesh, TABLES[:1])
    bag = nn.EmbeddingBag(7, 4, mode="sum", _weight=full_state_dict(module)["t0"].clone())
    ids, offsets = torch.tensor([1, 6, 0, 1]), torch.tensor([0, 3, 3, 4])
    ours, theirs = (torch.tensor([0.5, 2.0, -1.0, 3.0], requires_grad=True) for _ in range(2))
    found = module({"t0": (ids, offsets, ours)})["t0"]
    true = bag(ids, offsets[:-1], per_sample_weights=theirs)
    for rows in (found, true):
        rows.square().sum().backward()
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=RATE, eps=EPSILON)
    optimizer.step()
    assert ours.grad is not None
    assert theirs.grad is not None
    after = full_state_dict(module)["t0"]
    return [apart(found, true), apart(ours.grad, theirs.grad), apart(after, bag.weight)]


def half(mesh: DeviceMesh, dtype: str, optimizer: str) -> tuple[str, str, float]:
    """Dtypes of weights and of rows that come back, and how far a step is from one in float64."""
    table = Table("t0", "t0", 7, 4, ("t0",), optimizer, "sum", dtype, "bf16")
    module = _made(mesh, [table])
    whole = Whole(table, full_state_dict(module)["t0"].double())
    ids = torch.tensor([1, 6, 0, 1])
    rows = module({"t0": (ids, torch.tensor([0, 3, 4]))})["t0"]
    rows.float().sum().backward()
    gradient = torch.zeros(7, 4, dtype=torch.float64)
    gradient.index_add_(0, ids, torch.ones(4, 4, dtype=torch.float64))
    whole.step(gradient, ids.unique(), RATE)
    weight = full_state_dict(module)["t0"]
    return str(weight.dtype), str(rows.dtype), apart(weight, whole.weight)


def accumulated(mesh: DeviceMesh, optimizer: str) -> float:
    """How far two backwards under a guard are from one of all bags."""
    given = batch_of(TABLES, 5, 4, weighted=False)
    found = []
    for parts in (1, 2):
        guard = Guard(mesh)
        tables = [
            Table(t.fqn, t.name, t.rows, t.dim, t.features, optimizer, t.pooling) for t in TABLES
        ]
        module = _made(mesh, tables, guard=guard)
        halves = [_bags(given, part, parts) for part in range(parts)]
        for each in halves:
            sum(rows.sum() for rows in module(each).values()).backward()
        guard.settle()
        found.append(full_state_dict(module))
    return max(apart(found[0][name], found[1][name].double()) for name in found[0])


def _bags(given: Given, part: int, parts: int) -> Given:
    """Every ``parts``-th bag of each feature."""
    chosen: Given = {}
    for name, (ids, offsets) in given.items():
        bags = [ids[a:b] for a, b in itertools.pairwise(offsets)][part::parts]
        lengths = torch.tensor([0, *map(len, bags)])
        chosen[name] = (torch.cat([ids[:0], *bags]), lengths.cumsum(0))
    return chosen


def scheduled(mesh: DeviceMesh) -> list[float]:
    """How far rows move under a rate that warms up and decays by a polynomial."""
    module = _made(mesh, TABLES[1:])
    moved = []
    for step in range(6):
        warm, rest = min(1.0, (step + 1) / 2), max(0.0, 1 - max(0, step - 2) / 3)
        module.learning_rate = 0.1 * warm * rest**2
        before = full_state_dict(module)["t1"]
        rows = module({"f1": torch.tensor([0]), "g1": torch.tensor([], dtype=torch.int64)})
        rows["f1"].sum().backward()
        moved.append(apart(full_state_dict(module)["t1"], before.double()))
    return moved


def beside_peers(mesh: DeviceMesh, hosts: int) -> dict[str, float]:
    """How far the benchmark's tables, one of each sharding type, are from whole ones after a step
    of SGD on a mesh of ``hosts``."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import peer_tables

    if hosts > 1:
        mesh = DeviceMesh("cpu", torch.arange(mesh.size()).view(hosts, -1))
    specs = [
        {"name": kind, "rows": 10, "dim": 6, "pooling": "sum", "features": [f"of {kind}"]}
        for kind in TYPES
    ]
    whole = {kind: torch.arange(60.0).view(10, 6) / 60 for kind in TYPES}
    types = {kind: kind for kind in TYPES}
    module = peer_tables.build(specs, types, mesh, "sgd", RATE, whole)
    ids, offsets = torch.tensor([9, 0, 9, 4]), torch.tensor([0, 3, 3, 4])
    found = module({f"of {kind}": (ids, offsets) for kind in TYPES})
    sum(rows.sum() for rows in found.values()).backward()
    true = whole[TYPES[0]].double().index_add(0, ids, torch.full((4, 6), -RATE).double())
    return {kind: apart(peer_tables.full_weight(module, kind), true) for kind in TYPES}
