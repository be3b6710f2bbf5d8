"""The peak of the last rank: states, what stays beside them, and the worst moment of a step."""

from __future__ import annotations

from collections import Counter

import msgspec

from published.megatron.blocks import chunk_blocks
from published.megatron.description import Run
from published.megatron.kept import BlockMemory
from published.megatron.lasting import gathered_part, lasting_parts
from published.megatron.schedule import Turn, turns
from published.megatron.states import Part, fp8_copies, state_parts
from published.megatron.weights import rank_weights


class Phase(msgspec.Struct, frozen=True):
    """The most that is alive in a phase, and where."""

    name: str
    bytes: int
    at: str


class Estimate(msgspec.Struct, frozen=True):
    """``peak`` is the most over all phases, ``steady`` what is alive between two steps, ``parts``
    what the peak is made of."""

    peak: int
    steady: int
    phases: tuple[Phase, ...]
    parts: tuple[Part, ...]
    parameters: int


class _Path(msgspec.Struct, frozen=True):
    """A chunk's blocks as one: bytes kept, and its peaks above what was alive before."""

    saved: int
    forward: int
    forward_at: str
    backward: int
    backward_at: str


def estimate(run: Run) -> Estimate:
    """Predict the memory of the last rank."""
    weights = rank_weights(run)
    states = state_parts(run, weights)
    lasting = (*states, *fp8_copies(run, weights), *lasting_parts(run))
    resident = sum(part.bytes for part in lasting if part.forward)
    paths = [_path(chunk_blocks(run, chunk)) for chunk in run.chunks]
    phases = [
        *_walk(resident, paths, turns(run)),
        Phase("optimizer", sum(part.bytes for part in lasting), "end of the step"),
    ]
    if run.optimizer.fsdp:
        moving = gathered_part(run, weights)
        lasting = (*lasting, moving)
        phases = [msgspec.structs.replace(p, bytes=p.bytes + moving.bytes) for p in phases]
    worst = max(phases, key=lambda phase: phase.bytes)
    settled = [part for part in lasting if worst.name == "optimizer" or part.forward]
    rest = worst.bytes - sum(part.bytes for part in settled)
    activations = Part(
        f"activations and temporaries: {worst.at}",
        "activation",
        rest,
        "modelled",
        "what every block keeps, in the order of the schedule",
        stays=False,
    )
    return Estimate(
        peak=worst.bytes,
        steady=sum(part.bytes for part in lasting if part.stays),
        phases=tuple(phases),
        parts=(*settled, activations),
        parameters=sum(weight.elements for weight in weights),
    )


def _walk(resident: int, paths: list[_Path], order: tuple[Turn, ...]) -> list[Phase]:
    """Run the schedule: what is alive is the sum of all micro-batches between their forward and
    their backward."""
    alive = Counter[int]()
    worst: dict[str, Phase] = {}
    for turn in order:
        path = paths[turn.chunk]
        if turn.direction == "backward":
            alive[turn.chunk] -= 1
        before = resident + sum(count * paths[chunk].saved for chunk, count in alive.items())
        forward = turn.direction == "forward"
        phase = Phase(
            turn.direction,
            before + (path.forward if forward else path.backward),
            f"{path.forward_at if forward else path.backward_at} of chunk {turn.chunk}",
        )
        if turn.direction not in worst or phase.bytes > worst[turn.direction].bytes:
            worst[turn.direction] = phase
        if forward:
            alive[turn.chunk] += 1
    return list(worst.values())


def _path(blocks: list[BlockMemory]) -> _Path:
    saved = forward = backward = 0
    forward_at = backward_at = "nothing"
    for index, block in enumerate(blocks):
        saved += block.saved
        if saved + block.forward_extra > forward:
            forward, forward_at = saved + block.forward_extra, f"{block.block} {index}"
        if saved + block.backward_extra > backward:
            backward, backward_at = saved + block.backward_extra, f"{block.block} {index}"
    return _Path(saved, forward, forward_at, backward, backward_at)
