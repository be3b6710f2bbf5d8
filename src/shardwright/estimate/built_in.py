"""Recordings of the built-in models that train on this runtime: DLRM and a small GPT."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.core.batch import expected_distinct
from shardwright.core.recording import Recording, Series
from shardwright.job.job import Job
from shardwright.job.model_of_job import placed_tables, reads_bags
from shardwright.models.dlrm import DLRM
from shardwright.models.kinds import HashNetwork
from shardwright.models.transformer import Transformer, next_token_loss
from shardwright.planner.problem import batch_of
from shardwright.trace.checkpointing import policy, treated
from shardwright.trace.composed import Composer, Shortened
from shardwright.trace.faked import settle
from shardwright.trace.module import TracedModule, held_tensors, record, storage_bytes
from shardwright.trace.tables import RoutedRows
from shardwright.trace.treatment import Treatment

BLOCKS = "layers"  # of a transformer


def built_in_recording(job: Job, treatment: Treatment) -> Recording:
    """A step of ``job``'s model on one rank, its tables apart."""
    model: DLRM | Transformer
    if job.model.traits.reads_clicks:
        model, of = DLRM(job, device="meta"), _dlrm
        model.tables = _stand_in(job)
        _expect_distinct(model, job)
    else:
        model, of = Transformer(job, device="meta"), _transformer
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        settle(model, mode, torch.float32)
        return of(model, job, treatment)


def _dlrm(model: DLRM, job: Job, treatment: Treatment) -> Recording:
    batch = job.batch.size
    dense = torch.empty(batch, job.model.dense_features)
    labels = torch.empty(batch)
    ids = _bags(job) if reads_bags(job) else torch.empty(batch, len(job.tables), dtype=torch.int64)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), labels)

    units: dict[str, Sequence[nn.Module]] = {"bottom": [model.bottom]}
    if model.kinds is not None and any(True for _ in model.kinds.parameters()):
        units["kinds"] = [model.kinds]
    if any(True for _ in model.interact.parameters()):
        units["interact"] = [model.interact]
    units["top"] = [model.top]
    with treatment.applied(model, [], []) as applied:
        subject = TracedModule(
            model, (dense, ids), units, loss, extra=(labels,), around=applied.around
        )
        return record(subject)


def _stand_in(job: Job) -> RoutedRows:
    """For the tables that are placed."""
    of = [(name, table) for table in placed_tables(job) for name in table.feature_names]
    dims = {name: table.dim for name, table in of}
    each = {name for name, table in of if not table.pooled}
    return RoutedRows(of[0][1].dim if of else 0, dims=dims, each=each)


def _expect_distinct(model: DLRM, job: Job) -> None:
    """Hash networks compute as many rows as there are expected to be different ids."""
    for table in job.tables:
        network = None if model.kinds is None else model.kinds.of_table.get(table.name)
        if isinstance(network, HashNetwork):
            network.distinct = partial(_expected, table.rows, batch_of(job).zipf_of(table))


def _expected(rows: int, zipf: float, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = expected_distinct(len(ids), rows, zipf)
    return ids.new_empty(count), torch.empty_like(ids)


def _bags(job: Job) -> dict[str, tuple[torch.Tensor, ...]]:
    """Of every feature ids, offsets and perhaps weights."""
    found: dict[str, tuple[torch.Tensor, ...]] = {}
    for table in job.tables:
        for name, length in zip(table.feature_names, table.pooling_factors, strict=True):
            ids = torch.empty(round(length * job.batch.size), dtype=torch.int64)
            offsets = torch.empty(job.batch.size + 1, dtype=torch.int64)
            weights = (torch.empty(len(ids)),) if table.weighted else ()
            found[name] = (ids, offsets, *weights)
    return found


def _transformer(model: Transformer, job: Job, treatment: Treatment) -> Recording:
    tokens, targets = (
        torch.empty(job.batch.size, job.batch.sequence, dtype=torch.int64) for _ in range(2)
    )

    alone = Series(BLOCKS, (f"{BLOCKS}.0",), (f"{BLOCKS}.0",))  # one block repeats no other

    def run(shortened: Shortened) -> Recording:
        units: dict[str, Sequence[nn.Module]] = shortened.units
        blocks = shortened.blocks or list(model.layers)
        places = shortened.places or range(len(blocks))
        with treatment.applied(model, blocks, treated(places, every)) as applied:
            return record(
                TracedModule(
                    model,
                    (tokens,),
                    units,
                    lambda logits: next_token_loss(logits, targets),
                    series=shortened.series or (alone,),
                    extra=(targets,),
                    around=applied.around,
                    checkpointed=applied.checkpointed,
                )
            )

    apart = ("embed", "head", *(alone.names if len(model.layers) == 1 else ()))
    every = policy(treatment.checkpointing).every
    found = Composer(model, run, every, apart=apart).recording()
    whole = [tensor for tensor in held_tensors(model) if not isinstance(tensor, nn.Parameter)]
    return msgspec.structs.replace(found, buffers=storage_bytes(whole))
