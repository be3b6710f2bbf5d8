"""Reference figures of TorchRec 1.9.2's planner, and the values of this package they stand for.

The files are those of the folder that SHARDWRIGHT_ORACLES names, else the ones carried here. A
field that nobody compares is an error, so that no figure is passed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardwright.core.batch import Batch
from shardwright.core.cluster import Cluster
from shardwright.core.model import TableSpec
from shardwright.job.planner import EstimatorSection
from shardwright.planner.pricing.evaluate import PricingContext
from shardwright.torchrec.profile import (
    BACKWARD,
    BANDWIDTHS,
    DDR_CAP,
    HBM_CAP,
    SSD_CAP,
    TORCHREC,
)

Kind = Literal["shards", "plans", "imbalance"]
Record = dict[str, Any]

FIGURES = Path(__file__).parent / "figures"
FILE_FIELDS = {"generator", "torchrec", "torch", "problems", "cases"}
CAPACITIES = {"hbm_cap": HBM_CAP, "ddr_cap": DDR_CAP, "ssd_cap": SSD_CAP}
TOPOLOGY_FIELDS = {
    *("world_size", "local_world_size", "pod_size", "compute_device"),
    *CAPACITIES,
    *BANDWIDTHS,
    *BACKWARD,
}


def folder() -> Path:
    """Where the figures are."""
    named = os.environ.get("SHARDWRIGHT_ORACLES")
    found = Path(named) if named else FIGURES
    if not any(found.glob("*.json")):
        raise FileNotFoundError(f"{found}: expected a folder of JSON figures")
    return found


@cache
def _read(path: Path) -> Record:
    document: Record = json.loads(path.read_text())
    check_fields(document, FILE_FIELDS, str(path))
    return document


def cases(kind: Kind) -> list[Record]:
    """Every case of a kind: of all files in the order of their names.

    A case has an ``id`` that is its own; where it gives the number of a problem of its file it has
    the problem itself.
    """
    found: list[Record] = []
    files = sorted(folder().glob(f"*_{kind}.json"))
    for path in files:
        for number, case in enumerate(_read(path)["cases"]):
            name = str(case.get("id", number))
            full = {**case, "id": name if len(files) == 1 else f"{path.stem}-{name}"}
            if isinstance(case.get("problem"), int):
                full["problem"] = _read(path)["problems"][case["problem"]]
            found.append(full)
    assert len({case["id"] for case in found}) == len(found), f"{kind}: two cases share an id"
    return found


def check_fields(record: Record, known: set[str], where: str) -> None:
    """Fail at a field that this loader does not know."""
    unknown = sorted(set(record) - known)
    assert not unknown, f"{where}: unknown fields {', '.join(unknown)}"


def given(record: Record | None) -> Record:
    """The fields of a record that say something."""
    return {name: value for name, value in (record or {}).items() if value is not None}


def table(record: Record) -> TableSpec:
    """A table; a field that TableSpec does not have is an error."""
    fields = given(record)
    if "cache" in fields:
        fields["cache"] = given(fields["cache"])
    return msgspec.convert(fields, TableSpec)


def cluster(record: Record) -> Cluster:
    """A topology: TorchRec's defaults where it says nothing; no HBM on a CPU."""
    check_fields(record, TOPOLOGY_FIELDS, "topology")
    fields = given(record)
    world = fields["world_size"]
    local = fields.get("local_world_size", world)
    device = fields.get("compute_device", "cuda")
    capacities = {name: fields.get(name, default) for name, default in CAPACITIES.items()}
    if device == "cpu":
        capacities["hbm_cap"] = 0
    constants = {
        name: msgspec.structs.replace(constant, value=fields.get(name, constant.value))
        for name, constant in TORCHREC.items()
    }
    return Cluster(
        name="torchrec-1.9",
        world_size=world,
        local_world_size=local,
        compute_device=device,
        group=fields.get("pod_size", 1) * local,
        constants=constants,
        **capacities,
    )


def estimator(record: Record | None, qcomm: Any = None, fused: Any = None) -> EstimatorSection:
    """What a step keeps alive, the dtypes on the wire and the parameters of the sharder."""
    communication = None if qcomm is None else tuple(qcomm)
    return EstimatorSection(**given(record), **given(fused), communication=communication)


def setting(case: Record) -> PricingContext:
    """The machine, the batch of a rank and the estimator of a case."""
    found = estimator(case.get("estimator"), case.get("qcomm"), case.get("fused_params"))
    return PricingContext(cluster(case["topology"]), Batch(case["batch_size"]), found)


def repeated(rows: list[list[Any]]) -> Iterator[list[Any]]:
    """Run-length-encoded rows, whose last element is the count, one by one."""
    for *values, count in rows:
        for _ in range(count):
            yield values
