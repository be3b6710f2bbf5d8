"""Kinds of embeddings beside 26 EmbeddingBags and beside what the machine can do at all.

    python benchmarks/embeddings.py --output validation/cpu-2-cores/embeddings.json

26 tables of 1,000,000 x 16 fp32, batch 2,048, one id in each bag: forward without gradients, and a
step of full tables, which is forward, backward and the exact update, ours on one rank of the
runtime. Where fbgemm_gpu is installed its CPU kernels take part, with weights of their own. Floors
are the bare gather of as many rows into memory that is there, a copy of as many bytes, and the
matrix products that a hash network needs at the speed of a large one. Contestants take turns; each
has a batch of its own in every round, in a step the same one as its peer. Figures are medians of
the process's CPU time with one thread, for the machine may be shared; ratios are medians of the
rounds'. Hash networks are measured for the first 4 of the 26 tables, which are alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from peer_tables import build
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwright as sw
from shardwright.core.kinds import EmbeddingsSection, flops, parameters, settled
from shardwright.core.model import TableSpec
from shardwright.models.embeddings import Embeddings
from shardwright.runtime.embeddings.update import EPSILON

TABLES, ROWS, DIM, BATCH = 26, 1_000_000, 16, 2048
ZIPF = 1.05
LAWS = {"uniform": 0.0, "zipf": ZIPF}
NETWORKS = 4  # tables whose hash networks are measured
KINDS: dict[str, dict[str, object]] = {
    "full": {},
    "hash": {"kind": "hash", "collisions": 200},
    "double_hash": {"kind": "double_hash", "collisions": 200},
    "qr": {"kind": "qr", "collisions": 200},
    "memcom": {"kind": "memcom", "collisions": 200},
    "mixed_dim": {"kind": "mixed_dim", "width": 4},
    "tt": {"kind": "tt"},
    "robe": {"kind": "robe", "collisions": 200},
}
OPTIMIZERS = ("sgd", "rowwise_adagrad")
RATE = 0.05
Call = Callable[..., object]


def tables(**keys: object) -> tuple[TableSpec, ...]:
    """The study's tables, of one kind."""
    bare = [TableSpec(f"t{i}", ROWS, DIM) for i in range(TABLES)]
    return settled(bare, EmbeddingsSection(**keys))  # type: ignore[arg-type]


def batch(random: np.random.Generator, zipf: float) -> torch.Tensor:
    """Ids [B, F]; uniform where ``zipf`` is 0."""
    draw = random.random((BATCH, TABLES))
    if zipf:  # inverse of the law's distribution, then ids without an order
        power = 1 - zipf
        rank = (1 + draw * ((ROWS + 1) ** power - 1)) ** (1 / power) - 1
        return torch.from_numpy((rank.astype(np.int64) * 7919 + np.arange(TABLES)) % ROWS)
    return torch.from_numpy((draw * ROWS).astype(np.int64))


def bags(weight: torch.Tensor) -> Call:
    """The peer: an EmbeddingBag for each table, whose rows are stacked."""
    own = [nn.EmbeddingBag(ROWS, DIM, mode="sum", _weight=part) for part in weight.split(ROWS)]
    offsets = torch.arange(BATCH)

    def run(ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([bag(ids[:, f], offsets) for f, bag in enumerate(own)], 1)

    return run


def gather(weight: torch.Tensor) -> Call:
    """The floor: one gather of rows whose places are known, into memory that is there."""
    out = torch.empty(BATCH * TABLES, DIM)
    return lambda places: torch.index_select(weight, 0, places, out=out)


def fbgemm(weight: torch.Tensor, optimizer: str) -> nn.Module | None:
    """The peer: FBGEMM's merged tables with an update of their own, None where it is not there. It
    takes ids feature by feature."""
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except (ImportError, OSError):
        return None
    kinds = {"sgd": "EXACT_SGD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD"}
    found = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=EmbOptimType[kinds[optimizer]],
        learning_rate=RATE,
        eps=EPSILON,
    )
    for own, part in zip(found.split_embedding_weights(), weight.split(ROWS), strict=True):
        own.copy_(part)
    return found


def by_feature(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, F] as FBGEMM takes them."""
    return ids.t().reshape(-1), torch.arange(ids.numel() + 1)


def measure(contestants: dict[str, Call], zipf: float, rounds: int) -> dict[str, list[float]]:
    """Seconds of every contestant in every round."""
    random, seconds = np.random.default_rng(0), {name: [] for name in contestants}
    first = torch.arange(TABLES) * ROWS
    for number in range(rounds + 3):
        for name, run in contestants.items():
            ids = batch(random, zipf)
            given = (ids,)
            if name == "gather":
                given = ((ids + first).view(-1),)
            elif name == "fbgemm":
                given = by_feature(ids)
            begin = time.process_time()
            run(*given)
            if number >= 3:
                seconds[name].append(time.process_time() - begin)
    return seconds


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Their median and the least of them."""
    median, least = statistics.median(seconds), min(seconds)
    return {"milliseconds": round(median * 1e3, 3), "least": round(least * 1e3, 3)}


def against(seconds: dict[str, list[float]], floor: str) -> dict[str, object]:
    """Medians in milliseconds, and each one's median ratio to ``floor`` in the same round."""
    return {
        name: milliseconds(own)
        | {
            f"of_{floor}": round(
                statistics.median(a / b for a, b in zip(own, seconds[floor], strict=True)), 3
            ),
        }
        for name, own in seconds.items()
    }


def lookups(rounds: int) -> dict[str, dict[str, object]]:
    """Every kind but the hash network, with its peers and floors, by how ids are spread."""
    modules = {name: Embeddings(tables(**keys)) for name, keys in KINDS.items()}
    (weight,) = modules["full"].weights.values()
    weight = weight.detach()
    nbytes = BATCH * TABLES * (2 * DIM * 4 + 8)
    source, target = torch.empty(2, nbytes // 2, dtype=torch.uint8).unbind()
    contestants: dict[str, Call] = {
        "gather": gather(weight),
        "copy": lambda _: target.copy_(source),
        "embedding_bags": bags(weight.clone()),
        **modules,
    }
    if (peer := fbgemm(weight, "sgd")) is not None:
        contestants["fbgemm"] = peer
    return {
        name: _beside(against(measure(contestants, zipf, rounds), "gather"))
        for name, zipf in LAWS.items()
    }


def _beside(found: dict[str, object]) -> dict[str, object]:
    """Figures of kinds, and those of which something is claimed."""
    times = {name: own["milliseconds"] for name, own in found.items()}  # type: ignore[index]
    claimed = {"qr_of_full": round(times["qr"] / times["full"], 3)}
    if "fbgemm" in times:
        claimed["full_of_fbgemm"] = round(times["full"] / times["fbgemm"], 3)
    return {"kinds": found, **claimed}


def steps(optimizer: str, rounds: int) -> dict[str, dict[str, object]]:
    """A step of full tables, on one rank of our runtime and of FBGEMM, by how ids are spread:
    lookup, backward and the exact update of the rows, from the same weights and batches."""
    weight = torch.rand(TABLES * ROWS, DIM, generator=torch.Generator().manual_seed(0)) * 1e-3
    names = [f"t{i}" for i in range(TABLES)]
    specs = [
        {"name": name, "rows": ROWS, "dim": DIM, "pooling": "sum", "features": (name,)}
        for name in names
    ]
    whole = dict(zip(names, weight.split(ROWS), strict=True))
    mesh = init_device_mesh("cpu", (1,))
    ours = build(specs, dict.fromkeys(names, "table_wise"), mesh, optimizer, RATE, whole)
    peer = fbgemm(weight, optimizer)
    del weight, whole
    found = {name: _stepped(ours, peer, zipf, rounds) for name, zipf in LAWS.items()}
    if peer is not None:
        own = sw.full_state_dict(ours)[names[0]]
        apart = (own - peer.split_embedding_weights()[0]).abs().max().item()
        assert apart < 1e-6, f"weights are {apart} from FBGEMM's"
    return found


def _stepped(
    ours: nn.Module, peer: nn.Module | None, zipf: float, rounds: int
) -> dict[str, object]:
    random, seconds = np.random.default_rng(0), {"ours": [], "fbgemm": []}
    gradient = torch.randn(BATCH, TABLES, DIM, generator=torch.Generator().manual_seed(1)) * 1e-3
    for number in range(rounds + 3):
        ids, own = batch(random, zipf), gradient.clone()
        taken = {"ours": _seconds(lambda ids=ids, own=own: ours(ids).backward(own))}
        if peer is not None:
            given, own = by_feature(ids), gradient.flatten(1).clone()
            taken["fbgemm"] = _seconds(lambda given=given, own=own: peer(*given).backward(own))
        if number >= 3:
            for name, took in taken.items():
                seconds[name].append(took)
    found: dict[str, object] = {name: milliseconds(own) for name, own in seconds.items() if own}
    if peer is not None:
        pairs = zip(seconds["ours"], seconds["fbgemm"], strict=True)
        found["ours_of_fbgemm"] = round(statistics.median(a / b for a, b in pairs), 3)
    return found


def _seconds(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def naive(module: Embeddings) -> Call:
    """A hash network as first written down: each id hashed on its own, every id computed."""
    random = np.random.default_rng(1)
    factors, shifts = random.integers(1, 2**31 - 1, (2, 1024))
    networks = [
        [(layer.weight, layer.bias) for layer in own.layers]
        for own in module.kinds.of_table.values()
    ]

    def run(ids: torch.Tensor) -> torch.Tensor:
        found = []
        for column, layers in zip(ids.unbind(1), networks, strict=True):
            hashed = np.stack(
                [((factors * i + shifts) % (2**31 - 1)) % 10**6 for i in column.tolist()]
            )
            rows = torch.from_numpy(2 * hashed / (10**6 - 1) - 1).float()
            for number, (weight, bias) in enumerate(layers):
                rows = nn.functional.mish(rows) if number else rows
                rows = nn.functional.linear(rows, weight, bias)
            found.append(rows)
        return torch.stack(found, 1)

    return run


def as_published(module: Embeddings, ids: torch.Tensor) -> float:
    """How many times as long as ours the same takes with Python's integers, one table's ids."""
    column, own = ids[:, 0], next(iter(module.kinds.of_table.values()))
    random = np.random.default_rng(1)
    factors, shifts = random.integers(1, 2**31 - 1, (2, 1024)).tolist()
    begin = time.process_time()
    rows = torch.tensor(
        [
            [
                2 * (((a * i + b) % (2**31 - 1)) % 10**6) / (10**6 - 1) - 1
                for a, b in zip(factors, shifts, strict=True)
            ]
            for i in column.tolist()
        ]
    )
    for number, layer in enumerate(own.layers):
        rows = layer(nn.functional.mish(rows) if number else rows)
    middle = time.process_time()
    own(column)
    return (middle - begin) / (time.process_time() - middle)


def networks(rounds: int) -> dict[str, object]:
    """Hash networks: ours, the naive form, and matrix products of as many operations."""
    module = Embeddings(tables(kind="dhe")[:NETWORKS])

    def narrow(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found: torch.Tensor = module(ids)
        return found

    contestants: dict[str, Call] = {"ours": module, "naive": naive(module), "bfloat16": narrow}
    random = np.random.default_rng(2)
    seconds: dict[str, list[float]] = {name: [] for name in ("floor", *contestants)}
    different = []
    for number in range(rounds + 1):
        ids = batch(random, ZIPF)[:, :NETWORKS]
        rows = [len(column.unique()) for column in ids.unbind(1)]
        taken = {"floor": floor_of(module, rows)}
        for name, run in contestants.items():
            begin = time.process_time()
            run(ids)
            taken[name] = time.process_time() - begin
        taken["floor"] = (taken["floor"] + floor_of(module, rows)) / 2  # before and after
        if number:
            different.append(sum(rows) / ids.numel())
            for name, own in taken.items():
                seconds[name].append(own)
    found = against(seconds, "floor")
    times = {
        f"naive_of_{name}": statistics.median(
            a / b for a, b in zip(seconds["naive"], seconds[name], strict=True)
        )
        for name in ("ours", "bfloat16")
    }
    gigaflop = flops(module.kinds.tables[0]) * TABLES * BATCH / 1e9  # of all tables
    return {
        "forward": found,
        **{name: round(ratio, 3) for name, ratio in times.items()},
        "python_of_ours": round(as_published(module, batch(random, ZIPF)), 3),
        "different_ids": round(statistics.median(different), 4),
        "gigaflop_of_26_tables": round(gigaflop, 1),
    }


def floor_of(module: Embeddings, rows: list[int]) -> float:
    """Seconds of the bare matrix products of every network for so many different ids."""
    total = 0.0
    for own, count in zip(module.kinds.of_table.values(), rows, strict=True):
        for layer in own.layers:
            given, out = (
                torch.ones(count, layer.in_features),
                torch.empty(count, layer.out_features),
            )
            begin = time.process_time()
            torch.mm(given, layer.weight.t(), out=out)
            total += time.process_time() - begin
    return total


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--network-rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kinds = {**KINDS, "dhe": {"kind": "dhe"}}
    with torch.no_grad():
        found = {
            "torch": torch.__version__,
            "threads": options.threads,
            "cores": os.cpu_count(),
            "parameters": {
                name: sum(map(parameters, tables(**keys))) for name, keys in kinds.items()
            },
            **lookups(options.rounds),
            "dhe": networks(options.network_rounds),
        }
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        found["steps"] = {name: steps(name, options.rounds) for name in OPTIMIZERS}
        dist.destroy_process_group()
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
