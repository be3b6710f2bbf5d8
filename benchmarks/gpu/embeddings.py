"""Kinds of embeddings on this card, as ``benchmarks/embeddings.py`` measures them on a CPU.

26 tables of 1,000,000 x 16 fp32, batch 2,048, one id of each table: forward without gradients, and
an update, which is forward, backward and a step of SGD, of full tables, of quotient and remainder,
and of hash networks. Beside them is a step of full tables on one rank of the runtime, whose
backward makes the exact update. Floors are the bare gather of as many rows, their update, a copy of
as many bytes, and the matrix products that hash networks need. Every call has the next of 32
batches, whose rows no cache holds together. Entries are those of ``gpu/entries.py``; their shapes
are [batch, tables, dim].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpu.ceilings import precision
from gpu.entries import BF16, FP32, Case, Draw, Operands, error_of, measured
from gpu.rows import Row, Setting, group_of_one

BATCHES = 32
ONE_RANK = "full on one rank"
FEW = {"hashes": 16, "hidden": 16, "layers": 3}  # a hash network that two cores are soon done with
Tensor = torch.Tensor
Way = Callable[[], AbstractContextManager[object]]


def rows(setting: Setting) -> list[Row]:
    """Floors, then kinds by what is asked about them most."""

    def row(name: str, seconds: float, cases: Callable[[Study], Iterator[Case]]) -> Row:
        return Row(name, lambda: measured(setting, name, cases(Study(setting)), seconds), seconds)

    return [
        row("floors", 3, floors),
        row("full", 4, partial(kind, name="full")),
        row("qr", 3, partial(kind, name="qr")),
        row("dhe", 6, networks),
        Row(ONE_RANK, lambda: on_one_rank(setting, 4), 4),
        Row("values", lambda: values(setting), 2),
    ]


class Study:
    """Tables and batches of the CPU's benchmark, fewer and smaller where it says so."""

    def __init__(self, setting: Setting) -> None:
        import embeddings  # the benchmark, which needs more than torch
        import numpy as np

        self.of, self.setting, self.draw = embeddings, setting, Draw(setting)
        self.rows, self.batch = (self.draw.size(n) for n in (embeddings.ROWS, embeddings.BATCH))
        self.shape = self.batch, embeddings.TABLES, embeddings.DIM
        self.row = embeddings.DIM * 4  # bytes
        self.random = np.random.default_rng(0)

    def module(self, name: str, **how: Any) -> Any:
        """Tables of a kind in one module, with numbers of no meaning."""
        from shardwright.core.kinds import EmbeddingsSection, settled
        from shardwright.core.model import TableSpec
        from shardwright.models.embeddings import Embeddings

        keys = {**self.of.KINDS, "dhe": {"kind": "dhe"}}[name]
        keys |= FEW if name == "dhe" and self.setting.small else {}
        bare = [TableSpec(f"t{i}", self.rows, self.of.DIM) for i in range(self.of.TABLES)]
        tables = settled(bare, EmbeddingsSection(**keys))
        module = Embeddings(tables, device=self.setting.device, start=False, **how)
        with torch.no_grad():
            for own in module.parameters():
                own.uniform_(-0.05, 0.05)
        return module

    def turns(self, law: str, ready: Callable[[Tensor], Tensor] = lambda ids: ids) -> Any:
        """What gives operands: the ids [B, F] of the next batch, and always the same gradient."""
        drawn = (self.of.batch(self.random, self.of.LAWS[law]) for _ in range(BATCHES))
        ids = [ready((i[: self.batch] % self.rows).to(self.setting.device)) for i in drawn]
        gradient = self.draw.normal(*self.shape) * 1e-3
        batches = itertools.cycle(ids)
        return lambda: (next(batches), gradient)

    def case(
        self, op: str, make: Callable[[], Operands], run: Callable[..., object], **how: Any
    ) -> Case:
        """An entry, with as many turns as there are batches."""
        return Case(op, how.pop("dtype", "float32"), self.shape, make, run, turns=BATCHES, **how)


def floors(study: Study) -> Iterator[Case]:
    """What no kind of 26 full tables is faster than, and a module for each of them."""
    batch, count, dim = study.shape
    asked = batch * count
    first = torch.arange(count, device=study.setting.device) * study.rows
    weight = study.draw.normal(count * study.rows, dim)
    out = study.draw.normal(asked, dim)
    offsets = torch.arange(batch, device=study.setting.device)
    bags = [partial(_bag, part, offsets) for part in weight.split(study.rows)]

    def gather(places: Tensor, _: Tensor) -> Tensor:
        return torch.index_select(weight, 0, places, out=out)

    def update(places: Tensor, gradient: Tensor) -> None:
        weight.index_add_(0, places, gradient.view(asked, dim), alpha=-study.of.RATE)

    def scattered(places: Tensor, gradient: Tensor) -> None:
        change = gradient.view(asked, dim) * -study.of.RATE
        weight.scatter_add_(0, places.unsqueeze(1).expand(-1, dim), change)

    moved = asked * (2 * study.row + 8)
    for law in study.of.LAWS:
        more = {"ids": law}
        make = study.turns(law, lambda ids: (ids + first).view(-1))
        yield study.case("gather", make, gather, nbytes=moved, more=more)
        for op, run in (("index_add", update), ("scatter_add", scattered)):
            yield study.case(op, make, run, nbytes=asked * (3 * study.row + 8), more=more)
        by_table = study.turns(law)
        stacked = lambda ids, _: torch.stack([b(ids[:, f]) for f, b in enumerate(bags)], 1)  # noqa: E731
        yield study.case("embedding_bags", by_table, stacked, nbytes=moved, more=more)
    two = partial(lambda half: (study.draw.bytes(half), study.draw.bytes(half)), moved // 2)
    yield study.case("copy", two, lambda to, source: to.copy_(source), nbytes=moved)


def _bag(weight: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    return functional.embedding_bag(ids, weight, offsets, mode="sum")


def kind(study: Study, name: str) -> Iterator[Case]:
    """Forward and update of tables whose gradients are sparse."""
    module = study.module(name, sparse=True)
    numbers = sum(own.numel() for own in module.parameters())
    for law in study.of.LAWS:
        make, more = study.turns(law), {"ids": law, "parameters": numbers}
        yield study.case("forward", make, partial(_forward, module), more=more)
        yield study.case("update", make, _update(module, study.of.RATE), more=more)


def networks(study: Study) -> Iterator[Case]:
    """Hash networks of all tables, in fp32, tf32 and bf16, beside their products alone."""
    from shardwright.core.kinds import flops as flops_of

    module = study.module("dhe")
    numbers = sum(own.numel() for own in module.parameters())
    make, law = study.turns("zipf"), {"ids": "zipf", "parameters": numbers}
    ids, _ = make()
    different = [len(column.unique()) for column in ids.unbind(1)]
    law["different"] = sum(different)
    flops = sum(different) * flops_of(module.kinds.tables[0])
    autocast = partial(torch.autocast, study.setting.device, torch.bfloat16)
    ways: tuple[tuple[str, torch.dtype, Way], ...] = (
        ("float32", FP32, nullcontext),
        ("tf32", FP32, partial(precision, "tf32")),
        ("bfloat16", BF16, autocast),
    )
    for dtype, own, way in ways:
        for op, run, times in (
            ("products", _products(study, module, different, own), 1),
            ("forward", partial(_forward, module), 1),
            ("update", _update(module, 1e-4), 3),
        ):
            call = partial(_within, way, run)
            yield study.case(op, make, call, dtype=dtype, flops=times * flops, more=law)


def _within(way: Way, run: Callable[..., object], *given: Tensor) -> None:
    with way():
        run(*given)


def _forward(module: nn.Module, ids: Tensor, _: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(ids)
    return found


def _update(module: nn.Module, rate: float) -> Callable[[Tensor, Tensor], None]:
    """SGD's step is what torch's comes to, without the seconds of imports that its first takes."""
    parameters = list(module.parameters())

    def run(ids: Tensor, gradient: Tensor) -> None:
        rows = module(ids)
        rows.backward(gradient.to(rows.dtype))
        gradients = [own.grad for own in parameters]
        with torch.no_grad():
            if any(each.is_sparse for each in gradients):
                for own, each in zip(parameters, gradients, strict=True):
                    own.add_(each, alpha=-rate)
            else:
                torch._foreach_add_(parameters, gradients, alpha=-rate)
        for own in parameters:
            own.grad = None

    return run


def _products(
    study: Study, module: Any, different: list[int], dtype: torch.dtype
) -> Callable[[Tensor, Tensor], None]:
    """Every layer's product for so many different ids of its table, from memory that is there."""
    pairs = [
        (study.draw.normal(count, layer.in_features, dtype=dtype), layer.weight.detach().to(dtype))
        for own, count in zip(module.kinds.of_table.values(), different, strict=True)
        for layer in own.layers
    ]

    def run(_: Tensor, __: Tensor) -> None:
        for given, weight in pairs:
            torch.mm(given, weight.t())

    return run


def on_one_rank(setting: Setting, seconds: float) -> dict[str, Any]:
    """A step of full tables of the runtime, as of a job's one rank: lookup, backward and the exact
    update of the rows."""
    from peer_tables import build
    from torch.distributed.device_mesh import init_device_mesh

    study = Study(setting)
    names = [f"t{i}" for i in range(study.of.TABLES)]
    like = {"rows": study.rows, "dim": study.of.DIM, "pooling": "sum"}
    specs = [{"name": name, "features": (name,), **like} for name in names]

    def cases(mesh: Any) -> Iterator[Case]:
        for optimizer in study.of.OPTIMIZERS:
            whole = study.draw.normal(len(names), study.rows, study.of.DIM) * 1e-3
            weights = dict(zip(names, whole, strict=True))
            types = dict.fromkeys(names, "table_wise")
            module = build(specs, types, mesh, optimizer, study.of.RATE, weights)
            for law in study.of.LAWS:
                more = {"ids": law, "optimizer": optimizer}

                def run(ids: Tensor, gradient: Tensor, module: nn.Module = module) -> None:
                    module(ids).backward(gradient.clone())

                yield study.case("update", study.turns(law), run, more=more)

    with group_of_one(setting):
        return measured(setting, ONE_RANK, cases(init_device_mesh(setting.device, (1,))), seconds)


def values(setting: Setting) -> dict[str, Any]:
    """Whether what is made on the device starts as on a CPU, and makes the same rows: kinds that do
    not start so, and how far rows are apart at most, of the largest number of their kind."""
    from shardwright.core.kinds import EmbeddingsSection, settled
    from shardwright.core.model import TableSpec
    from shardwright.models.embeddings import Embeddings

    of, apart, otherwise, errors = Study(setting).of, {}, [], {}
    small = {"dhe": {"kind": "dhe", "hashes": 64, "hidden": 64}}
    for name, keys in (of.KINDS | small).items():
        bare = [TableSpec(f"t{i}", 3000 + i, of.DIM) for i in range(3)]
        tables = settled(bare, EmbeddingsSection(**keys))
        try:
            modules = (Embeddings(tables, device=device) for device in ("cpu", setting.device))
            same, apart[name] = _beside(*modules)
        except Exception as error:
            errors[name] = error_of(error)
        else:
            otherwise += [] if same else [name]
    found = {"kinds": len(apart), "start_otherwise": otherwise, "errors": errors}
    if apart:
        worst = max(apart, key=lambda name: apart[name])
        found |= {"apart": apart[worst], "furthest": worst}
    return found


def _beside(here: nn.Module, there: nn.Module) -> tuple[bool, float]:
    pairs = zip(here.parameters(), there.parameters(), strict=True)
    same = all(torch.equal(own, other.cpu()) for own, other in pairs)
    ids = torch.randint(3000, (512, 3))
    with torch.no_grad():
        wanted, found = here(ids), there(ids.to(next(there.buffers()).device)).cpu()
    return same, ((found - wanted).abs().max() / wanted.abs().max()).item()
