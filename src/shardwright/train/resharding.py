"""A checkpoint cut anew as another plan has it, in one process and piece by piece."""

# What is written must be what the other ranks would have saved, so the same code writes it: only
# where each part lies comes from the plan and not from a model. One rank after the other, into
# mapped files, so that memory holds no tensor as a whole. Nothing is written before every byte that
# is read has been checked, and the step gets its name when all is there.

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shardwright.core.block import Role
from shardwright.core.document import to_kind
from shardwright.core.errors import InputError, MismatchError, expected
from shardwright.job.plan import Plan
from shardwright.runtime.checkpoint.folders import (
    complete_steps,
    new_number,
    newest_step,
    room,
    step_folder,
    temporary_folder,
)
from shardwright.runtime.checkpoint.read import Stored, StoredTensor, copies_of, fill, open_stored
from shardwright.runtime.checkpoint.region import Box, TensorPart, dtype_of
from shardwright.runtime.checkpoint.write import commit, write_rank
from shardwright.runtime.embeddings.disk import mapped
from shardwright.runtime.model_parts import STATE
from shardwright.runtime.optimizer_dict import joined
from shardwright.runtime.saving import Resumed
from shardwright.train.resuming import DataPlace, start_after

Cuts = dict[str, list[tuple[int, Box]]]  # of each tensor: ranks, and what each has of it


@dataclass(frozen=True, slots=True)
class Resharded:
    """What was written: the checkpoint's folder, its step, and ranks before and after."""

    folder: str
    step: int
    tensors: int
    nbytes: int
    saved: int
    world_size: int


def reshard(checkpoint: Path, plan: Plan, out: Path) -> Resharded:
    """Write ``checkpoint``, a folder step-N or the newest of a folder of these, into ``out`` as the
    ranks of ``plan`` would have saved it.

    Every byte is verified first; tensors are copied between files, so none has to fit in memory.
    MismatchError for tensors of the plan that the checkpoint lacks or has in another shape,
    InputError for what is no checkpoint or a step that ``out`` has.
    """
    stored = _opened(checkpoint)
    step, world_size = stored.manifest.step, plan.world_size
    cuts = _cuts(stored, plan)
    # Of all ranks first: copying a damaged shard would give it a checksum that is right.
    stored.check_shards(range(stored.manifest.world_size))
    scalars = _scalars(stored, plan)
    facts = dict(stored.manifest.facts)
    if "plan" in facts:
        facts["plan"] = plan.fingerprint
    final, number, nbytes = step_folder(out, step), new_number(), 0
    with room(out, step, number):
        temporary = temporary_folder(out, step, number)
        for rank in range(world_size):
            held = list(_of_rank(stored, cuts, rank, temporary))
            fill(stored, copies_of(stored, held, False))
            write_rank(temporary, step, rank, world_size, held, scalars[rank])
            nbytes += sum(part.tensor.nbytes for part in held)
        commit(temporary, final, step, world_size, facts)
    return Resharded(
        str(final), step, len(stored.tensors), nbytes, stored.manifest.world_size, world_size
    )


def _opened(checkpoint: Path) -> Stored:
    name, _, number = checkpoint.name.partition("-")
    if name == "step" and number.isdecimal() and not complete_steps(checkpoint):
        return open_stored(checkpoint, int(number))
    step = newest_step(checkpoint)
    return open_stored(step_folder(checkpoint, step), step)


def _cuts(stored: Stored, plan: Plan) -> Cuts:
    """Where every part of every tensor is to lie; a part that several ranks keep is one's. What the
    plan does not know, buffers and numbers of the optimizer, is rank 0's."""
    planned: dict[tuple[str, Role], dict[Box, int]] = defaultdict(dict)
    for block in plan.expanded():
        # Replicas have the same box on many ranks, of which one writes it.
        planned[block.tensor, block.role].setdefault(Box(block.offsets, block.sizes), block.rank)
    _check(stored, plan, {name for name, role in planned if role == "parameter"})
    cuts: Cuts = {}
    for name, tensor in stored.tensors.items():
        parameter = name
        if name.startswith(STATE):
            parameter = name.removeprefix(STATE).rpartition("/")[0]
        own = planned.get((parameter, "parameter"), {})
        if name != parameter:
            # States are cut as their role says, which under ZeRO-1 and 2 is not how parameters lie.
            own = planned.get((parameter, "optimizer_state"), own)
        cuts[name] = list(_parts(tensor, stored.tensors.get(parameter, tensor), own))
    return cuts


def _parts(
    tensor: StoredTensor, parameter: StoredTensor, planned: dict[Box, int]
) -> Iterator[tuple[int, Box]]:
    """The parts of ``tensor``, which is a parameter or a state of it: of its shape, or of one
    number a row."""
    if tensor.shape == parameter.shape and planned:
        yield from ((rank, box) for box, rank in planned.items())
        return
    if tensor.shape == parameter.shape[:1]:
        first = [(r, box) for box, r in planned.items() if box.offsets[1:] == (0,)]
        yield from ((rank, Box(box.offsets[:1], box.sizes[:1])) for rank, box in first)
        if first:
            return
    yield 0, Box((0,) * len(tensor.shape), tensor.shape)


def _check(stored: Stored, plan: Plan, planned: set[str]) -> None:
    """Plan and checkpoint are of one model."""
    shapes = {tensor.fqn: tensor.shape for tensor in plan.model.tensors}
    for name in sorted(planned):
        found = stored.tensors.get(name)
        if found is None or found.shape != shapes[name]:
            wanted = f"'{name}' of shape {shapes[name]}, as planned"
            got = "none" if found is None else f"shape {found.shape}"
            remedy = "Plan the very model that was saved."
            raise MismatchError(expected(str(stored.folder), wanted, got, remedy))


def _of_rank(stored: Stored, cuts: Cuts, rank: int, folder: Path) -> Iterator[TensorPart]:
    """Room for what a rank has of every tensor, in a file."""
    own = [(name, box) for name, parts in cuts.items() for owner, box in parts if owner == rank]
    dtypes = {name: dtype_of(stored.tensors[name].dtype, name) for name, _ in own}
    like = {str(n): (box.sizes, dtypes[name]) for n, (name, box) in enumerate(own)}
    room = mapped(folder, like) if own else {}
    for (name, box), tensor in zip(own, room.values(), strict=True):
        yield TensorPart(name, stored.tensors[name].shape, box.offsets, box.sizes, tensor)


def _scalars(stored: Stored, plan: Plan) -> list[dict[str, Any]]:
    """What every rank says besides tensors. Random numbers stay where there are as many ranks;
    places in the data are those after what the saved ranks have taken."""
    before, ranks = [each.scalars for each in stored.lists], plan.world_size
    if len(before) == ranks:
        return before
    groups = [each["optimizer"] for each in before if each.get("optimizer") is not None]
    found = []
    for rank, extra in enumerate(_extras(stored, plan)):
        scalars = {**before[rank % len(before)], "extra": extra}
        # Generators belong to a rank of that number of ranks; a run on others draws anew.
        scalars.pop("random", None)
        if groups:
            scalars["optimizer"] = joined(groups)
        found.append(scalars)
    return found


def _extras(stored: Stored, plan: Plan) -> list[Any]:
    """Those of a run's ranks as places of others; a loop's own go to ranks in turn."""
    step, ranks = stored.manifest.step, plan.world_size
    extras = tuple(each.scalars.get("extra") for each in stored.lists)
    saved = Resumed(step, extras[0], stored.manifest.facts, len(extras), False, extras)
    try:
        first = to_kind(extras[0], DataPlace)
        starts = [start_after(saved, rank, ranks) for rank in range(ranks)]
    except (InputError, msgspec.ValidationError):
        return [extras[rank % len(extras)] for rank in range(ranks)]
    starts = [dataclasses.replace(each, resumed=first.resumed) for each in starts]
    return [
        each.place(plan.job.batch.size, rank, ranks, each.losses, 0)
        for rank, each in enumerate(starts)
    ]
