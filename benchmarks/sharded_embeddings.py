"""Our sharded tables beside TorchRec's, step by step in the same processes.

    python benchmarks/sharded_embeddings.py --output validation/cpu-2-cores/sharded_embeddings.json

Configuration A is 26 tables of 100,000 x 16 with one id in each bag, batch 2,048 a rank; B is eight
tables of 1,000,000 x 64 with Poisson(10) ids in a bag, batch 512; "small" is A with batch 16. Ids
follow Zipf's law with exponent 1.05 or are uniform. Every case runs in processes of its own, one
thread each; its contestants take turns step by step, from the same weights and the same batches. A
step is forward, backward and the rows' update. "dedup" is ours with rows that travel once to a rank
that asks for them several times, as a plan may choose; it needs bags of one id.
Where TorchRec is not installed ours runs alone. "half" is ours with rows as fp16 and their
gradients as bf16 on the wire, in the first two cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from peer_tables import build
from side_by_side import (
    RATE,
    SHAPES,
    Figures,
    Given,
    collection_of,
    first_of,
    joined,
    measure_all,
    over_torchrec,
    sharded_by_torchrec,
    take_turns,
)
from torch.distributed.device_mesh import DeviceMesh


class Asked(NamedTuple):
    """A rank's batch as each contestant takes it: feature by feature, and one after the other."""

    features: Given
    values: torch.Tensor
    lengths: torch.Tensor


Step = Callable[[Asked], None]


@dataclass(frozen=True)
class Case:
    """A run: its shape, how tables are cut and learn, which ids are asked for, how many ranks."""

    shape: str
    sharding: str
    optimizer: str = "sgd"
    ids: str = "zipf"
    ranks: int = 2


CASES = [
    *(Case("A", kind) for kind in ("table_wise", "row_wise", "column_wise", "data_parallel")),
    *(Case("A", kind, "rowwise_adagrad") for kind in ("table_wise", "row_wise", "column_wise")),
    *(Case("A", kind, ids="uniform") for kind in ("table_wise", "row_wise")),
    Case("A", "row_wise", ranks=4),
    *(Case("B", kind) for kind in ("table_wise", "row_wise")),
    *(Case("B", kind, "rowwise_adagrad") for kind in ("table_wise", "row_wise")),
    Case("small", "table_wise"),
    Case("small", "row_wise"),
]


def ours(case: Case, mesh: DeviceMesh, weights: Mapping[str, torch.Tensor], **options: Any) -> Step:
    """The tables of ``peer_tables``."""
    shape = SHAPES[case.shape]
    names = [f"t{i}" for i in range(shape.tables)]
    specs = [
        {"name": n, "rows": shape.rows, "dim": shape.dim, "pooling": "sum", "features": [f"f{i}"]}
        for i, n in enumerate(names)
    ]
    types = dict.fromkeys(names, case.sharding)
    module = build(specs, types, mesh, case.optimizer, RATE, weights, **options)
    gradient = torch.full((shape.batch, shape.dim), 1e-3)

    def step(given: Asked) -> None:
        found = module(given.features)
        torch.autograd.backward([*found.values()], [gradient] * len(found))

    return step


def theirs(case: Case) -> Step:
    """An EmbeddingBagCollection under DistributedModelParallel."""
    from torchrec import KeyedJaggedTensor

    shape = SHAPES[case.shape]
    module = collection_of(shape)
    sharded = sharded_by_torchrec(module, module, case.sharding, case.ranks, case.optimizer)
    dense = case.sharding == "data_parallel"
    gradient = torch.full((shape.batch, shape.dim * shape.tables), 1e-3)
    dense_optimizer = torch.optim.SGD(sharded.parameters(), lr=RATE) if dense else None

    def step(given: Asked) -> None:
        keys, values, lengths = [*given.features], given.values, given.lengths
        found = sharded(KeyedJaggedTensor(keys, values, lengths=lengths))
        found.values().backward(gradient)
        if dense_optimizer is not None:
            dense_optimizer.step()
            dense_optimizer.zero_grad()

    return step


def asked(case: Case, random: np.random.Generator) -> Asked:
    """One rank's batch."""
    given = SHAPES[case.shape].ids(case.ids, random)
    values, offsets = zip(*given.values(), strict=True)
    return Asked(given, torch.cat(values), torch.cat([each.diff() for each in offsets]))


def work(rank: int, ranks: int, store: str, case: Case, steps: int, peer: bool) -> Figures:
    """One rank of a case."""
    mesh, shape = joined(rank, ranks, store), SHAPES[case.shape]
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"t{i}": torch.empty(shape.rows, shape.dim).uniform_(-0.01, 0.01, generator=generator)
        for i in range(shape.tables)
    }
    make = partial(ours, case, mesh, weights)
    contestants: dict[str, Callable[[], Step]] = {"ours": make}
    if shape.length == 1 and case.sharding != "data_parallel":
        contestants["dedup"] = partial(make, dedup=True)
    if case in CASES[:2]:
        contestants["half"] = partial(make, communication=("fp16", "bf16"))
    if peer:
        contestants["torchrec"] = partial(theirs, case)
    return take_turns(contestants, partial(asked, case, np.random.default_rng(rank)), steps)


def run(case: Case, steps: int, peer: bool) -> dict[str, Any]:
    """What every contestant takes, and ours in parts of TorchRec's."""
    found = first_of(work, case.ranks, case, steps, peer)
    line: dict[str, Any] = asdict(case)
    for name, figures in found.items():
        del figures["gave"]
        line |= {f"{name}_{kind}": figure for kind, figure in figures.items()}
    for name in found if peer else ():
        if name != "torchrec":
            start = "" if name == "ours" else f"{name}_"
            for kind, ratio in over_torchrec(found, name).items():
                line[f"{start}{kind.removesuffix('_ms').removesuffix('_bytes')}_ratio"] = ratio
    return line


def cases(shape: str) -> Sequence[Case]:
    """Those of a shape, or all."""
    return [case for case in CASES if shape in ("", case.shape)]


if __name__ == "__main__":
    measure_all(__doc__, [*SHAPES], cases, run)
