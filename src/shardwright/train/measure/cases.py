"""What is timed: memory and arithmetic of one rank, collectives of all, embedding rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from shardwright.core.block import Block, GroupKey
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
from shardwright.train.measure.samples import (
    BUFFERS,
    FLOAT,
    OVERLAPPED,
    PARTS,
    WIDTHS,
    Bench,
    Run,
    collective_case,
    overlap_case,
    row_case,
)

_LIMITS = (  # of a control group, by version
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


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


def memory(device: torch.device) -> dict[str, Run]:
    """An update and a copy; an amount is the bytes of the arrays that are touched."""
    weight = torch.zeros(LARGE // FLOAT, device=device)
    gradient = torch.ones_like(weight)
    return {
        "update": Run(2 * LARGE, lambda: weight.add_(gradient, alpha=-0.1)),
        "copy": Run(2 * LARGE, lambda: weight.copy_(gradient)),
        "fresh": Run(FRESH, lambda: torch.empty(FRESH // FLOAT, device=device).fill_(1.0)),
    }


def link(device: torch.device) -> dict[str, Run]:
    """An accelerator's way to its host's memory, and that memory itself."""
    near = torch.zeros(LARGE // FLOAT, device=device)
    pinned = torch.zeros(LARGE // FLOAT, pin_memory=True)
    other = torch.ones(LARGE // FLOAT)
    return {
        "link": Run(LARGE, lambda: near.copy_(pinned, non_blocking=True)),
        "host": Run(2 * LARGE, lambda: pinned.copy_(other)),
    }


def compute(device: torch.device) -> dict[str, Run]:
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

        runs[f"layer {samples}x{fan_in}x{fan_out}"] = Run(2.0 * samples * fan_in * fan_out, layer)
    return runs


def operations(device: torch.device) -> dict[str, Run]:
    """A step of a chain of tiny layers; an amount is the operations a plan counts for it."""
    chain = nn.Sequential(*(m for _ in range(CHAIN) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))
    chain.to(device)
    batch = torch.randn(WIDTH, WIDTH, device=device, requires_grad=True)

    def step() -> None:
        chain.zero_grad()
        chain(batch).sum().backward()

    return {"operations": Run(CHAIN * OPERATIONS_OF_A_LAYER, step)}


LAYER = 256


def collectives(comm: Comm) -> dict[str, Run]:
    """Every collective over every size of the full buffer; an amount is the buffer's bytes."""
    device = comm.mesh.device_type
    full = torch.zeros(BUFFERS[-1] // FLOAT, device=device)
    other = torch.zeros_like(full)
    runs = {}
    for nbytes in BUFFERS:
        for name in CROSSINGS:
            work = _work(comm, name, full, other, nbytes)
            runs[collective_case(name, nbytes)] = Run(nbytes, work, together=True)
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


def overlaps(comm: Comm, bench: Bench) -> dict[str, Run]:
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
            runs[overlap_case(collective, nbytes, part)] = Run(nbytes, both, together=True)
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


def accesses(device: torch.device, owners: int) -> dict[str, Run]:
    """Reads of random rows, fused updates of them, and ids on their way to ``owners`` ranks."""
    runs = {}
    random = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        weight = torch.zeros(rows_of(width), width, device=device)
        rows = torch.randint(rows_of(width), (IDS,), generator=random).to(device)
        out = torch.empty(IDS, width, device=device)
        runs[row_case(width)] = Run(IDS, partial(torch.index_select, weight, 0, rows, out=out))
    runs |= _updates(device, random)
    for name, cut in (("ids addressed", False), ("ids sorted", True)):
        runs[name] = Run(IDS, _travel(device, owners, cut, random))
    return runs


def _updates(device: torch.device, random: torch.Generator) -> dict[str, Run]:
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
        runs[optimizer] = Run(IDS, partial(store.update, looked, gradient, 0.1, 1))
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


def parsing(folder: Path, rank: int) -> dict[str, Run]:
    """Reading a click log of this rank's own; an amount is rows."""
    path = folder / f"rank-{rank}.tsv"
    tables = (CLICK_TABLE,) * 26
    ClickModel(cardinalities=tables).write(path, CLICK_ROWS)
    reader = ClickReader(CriteoLog(path, tables), CLICK_BATCH)
    return {"click rows": Run(CLICK_BATCH, lambda: next(reader))}
