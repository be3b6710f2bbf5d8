"""Which layers share a unit, without a job: the planner's own choice on a recording by hand."""

from __future__ import annotations

from collections.abc import Sequence

from recordings import At, chain, model_of_chain, unit

from shardwright.core.work import Work
from shardwright.job.planner import DenseSection
from shardwright.planner.unit_choice import DenseContext
from shardwright.planner.units import FREE, Arrangement, UnitSpace, worthwhile


def choose_units(
    nbytes: Sequence[int],
    flops: Sequence[int],
    context: DenseContext,
    *,
    memory: int | None = None,
    operations: int = 1,
    section: DenseSection = FREE,
) -> Arrangement | None:
    """The fastest units for sharded layers of ``nbytes`` weights and ``flops`` forward FLOPs each;
    None if nothing fits ``memory`` bytes per rank.

    Layers compute in ``operations`` calls, twice as many and twice the FLOPs backward. Activations
    are not counted, nor a loss.
    """
    layers = [unit(f"layers.{k}", size // 4, "layers") for k, size in enumerate(nbytes)]
    works: dict[At, Work] = {("loss", ""): Work(), ("backward", ""): Work()}
    for layer, work in zip(layers, flops, strict=True):
        works["enter", layer.name] = Work(operations, work)
        works["enter_backward", layer.name] = Work(2 * operations, 2 * work)
    model = model_of_chain(chain(layers, works=works))
    space = UnitSpace(model, context, {"layers": "shard"}, section)
    found = [a for a in space.arrangements if memory is None or a.footprint <= memory]
    fastest = min(found, key=lambda a: a.seconds, default=None)
    return fastest and next(worthwhile(found, fastest, fastest.seconds), fastest)
