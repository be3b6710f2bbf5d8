"""A moving average of a sharded model's weights, kept in another one that is sharded alike."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardwright.core.errors import InputError, MismatchError, UnsupportedError, check_type
from shardwright.runtime.embeddings.disk import DiskStore
from shardwright.runtime.embeddings.tables import ShardedTables

ALIKE = "Make both by one function, and shard them alike."


@torch.no_grad()
def average_weights(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Let the weights of ``average`` be ``decay`` times themselves plus the rest of ``model``'s::

        average = sw.apply(build(), plan, mesh)
        sw.average_weights(average, model, 0.0)  # begin with a copy
        for batch in batches:
            train(model, batch)
            sw.average_weights(average, model, 0.999)

    Parameters and rows of tables, on every rank what it keeps, so that nothing travels; buffers are
    those of ``model``. Both models are made alike and sharded alike. ``average`` takes as much
    memory as weights do, which no plan counts. MismatchError where the two differ,
    UnsupportedError for tables on disk.
    """
    check_type(average, nn.Module, "average")
    check_type(model, nn.Module, "model")
    if not 0 <= decay <= 1:
        raise InputError("decay", "a share from 0 to 1", str(decay))
    into, source = dict(_weights(average)), dict(_weights(model))
    for name in sorted({*into} ^ {*source}):
        raise MismatchError(name, "a weight of both models", "one of one", ALIKE)
    for name, weight in into.items():
        if weight.shape != source[name].shape or weight.dtype != source[name].dtype:
            found = f"{list(source[name].shape)} in one, {list(weight.shape)} in the other"
            raise MismatchError(name, "the same part in both models", found, ALIKE)
    if into:
        torch._foreach_lerp_(list(into.values()), [source[name] for name in into], 1 - decay)
    for buffer, other in zip(average.buffers(), model.buffers(), strict=True):
        buffer.copy_(other)


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight that is averaged, as this rank keeps it, by name."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    for path, part in model.named_modules():
        if not isinstance(part, ShardedTables):
            continue
        for number, store in enumerate(part.every_store):
            if isinstance(store, DiskStore):
                wanted = "tables in memory, for an average of all their rows"
                raise UnsupportedError(f"tables '{path}'", wanted, "some on disk")
            yield f"{path}, store {number}", store.weight
