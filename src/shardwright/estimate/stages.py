"""Stages of a pipeline: which layers each rank holds, in which order it runs them, and a user's own
module as one stage has it.

The blocks of a module's stage are run with a stream that comes from the stage before, and what only
other stages run is not looked at.
"""

# A stage is recorded by running the whole module with few of its blocks: what comes before them
# runs unseen, and the first block is handed a fresh leaf in place of the stream, as a stage
# receives it from another rank. Two things must stay true. The recorder is told "unseen" exactly as
# long as other stages' code runs, or their activations count here. And nothing but the stream may
# reach the stage with a gradient: a real stage gets one tensor, so a module whose later blocks use
# an earlier result (``skipped``) is refused instead of estimated without that exchange.

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from shardwright.core.document import decode_json
from shardwright.core.errors import UnsupportedError, expected
from shardwright.core.recording import OF_UNITS, Piece, Recording
from shardwright.core.work import OperatorShapes
from shardwright.heap.rank_step import ENDING, ONE_PASS
from shardwright.job.parallel import ENDS_WEIGH, Degrees, dealt
from shardwright.job.pipelining import PassRun, expanded, order_in_runs, representative, stage_of
from shardwright.trace.checkpointing import Policy
from shardwright.trace.module import TracedModule, storage_bytes
from shardwright.trace.recorder import Recorder
from shardwright.trace.structure import Container, containers
from shardwright.tracker.private import own_children
from shardwright.tracker.tensors import map_tensors, tensors_in

HEAD = "head"  # the unit of what is behind the layers
KEPT = ("", HEAD)  # units that are not freed after their forward
WHERE = "parallel.pipeline"
REMEDY = "parallel.tensor, with a parallelize_plan, divides any module."


class RecordedStage(NamedTuple):
    """A stage's recording; parameters of the whole model; and bytes: what a microbatch brings from
    the stage before, and what its step names until the backward is over (``Chunk.named``)."""

    recording: Recording
    parameters: int
    received: int = 0
    named: int = 0


@dataclass(frozen=True, slots=True)
class ModelStage:
    """A stretch of the model; ``first`` has the embedding, ``last`` the head."""

    layers: tuple[int, int]
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class PipelineRank:
    """What a rank of the pipeline holds and does; ``microbatches`` is how many it really has."""

    rank: int
    stages: tuple[ModelStage, ...]
    runs: tuple[PassRun, ...]
    microbatches: int


def stages(layers: int, count: int, ends: tuple[int, int] = ENDS_WEIGH) -> list[ModelStage]:
    """Deal ``layers`` out to ``count`` stages, the first and last with less for the ``ends`` that
    are beside."""
    sizes = dealt(layers, count, ends)
    found, begin = [], 0
    for index, size in enumerate(sizes):
        found.append(ModelStage((begin, begin + size), index == 0, index == count - 1))
        begin += size
    return found


def stages_of_ranks(
    layers: int, degrees: Degrees, ends: tuple[int, int] = ENDS_WEIGH
) -> list[tuple[ModelStage, ...]]:
    """The stages of every rank of the pipeline, chunk by chunk."""
    dealt = stages(layers, degrees.pipeline * degrees.chunks, ends)
    return [
        tuple(
            dealt[stage_of(degrees.schedule, degrees.pipeline, rank, chunk)]
            for chunk in range(degrees.chunks)
        )
        for rank in range(degrees.pipeline)
    ]


def pipeline_ranks(
    layers: int, degrees: Degrees, ends: tuple[int, int] = ENDS_WEIGH
) -> list[PipelineRank]:
    """Every rank of the pipeline; without one a single rank that accumulates microbatches."""
    held = stages_of_ranks(layers, degrees, ends)
    if degrees.pipeline == 1:
        # what accumulates does so from the second on
        runs = (PassRun(ONE_PASS.passes, min(degrees.microbatches, 2)),)
        return [PipelineRank(0, held[0], runs, degrees.microbatches)]
    few = representative(degrees.schedule, degrees.pipeline, degrees.microbatches, degrees.chunks)
    runs_of = order_in_runs(degrees.schedule, degrees.pipeline, few, degrees.chunks)
    return [
        PipelineRank(rank, its, runs_of[rank], degrees.microbatches)
        for rank, its in enumerate(held)
    ]


def most_alive(runs: Sequence[PassRun], sizes: Sequence[int]) -> int:
    """The most bytes that are there at once, of so many for each microbatch of a chunk from its
    forward to its backward."""
    live = most = 0
    for each in expanded(runs):
        if each.kind == "forward":
            live += sizes[each.chunk]
        elif each.kind in ENDING:
            live -= sizes[each.chunk]
        most = max(most, live)
    return most


class StageResults:
    """What a stage behind another one keeps until its backward is over, as torch's pipelining does
    it: the result of the model; the gradient of the stream goes then, for it is sent."""

    def __init__(self, *, pipelined: bool) -> None:
        self.pipelined = pipelined
        self.results: list[torch.Tensor] = []

    def until_sent(self, result: torch.Tensor) -> torch.Tensor:
        """Keep a result, if there is a stage before that waits for a gradient."""
        if self.pipelined:
            self.results.append(result)
        return result

    def alone(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss without the logits that stay as long as it, which a step counts by itself: a
        recording ends before a runtime's backward does."""
        vars(loss).pop("logits", None)
        return loss

    def sent(self, stream: torch.Tensor) -> None:
        """The gradient of the stream is there."""
        self.results.clear()
        stream.grad = None


# ---- a user's own module -------------------------------------------------------------------------


class OwnBlocks(NamedTuple):
    """The blocks of a module, by name; ``alike``: any of them stands for any other."""

    path: str
    names: tuple[str, ...]
    alike: bool


def blocks_of(module: nn.Module) -> OwnBlocks:
    """Where the blocks of ``module`` repeat; UnsupportedError unless that is one place."""
    found = _container(module)
    numbers = tuple(f"{found.path}.{k}".lstrip(".") for k in range(len(found.names)))
    first, *more = found.stretches
    alike = not more and first.period == 1
    return OwnBlocks(found.path, found.names, alike and found.names == numbers)


def _container(module: nn.Module) -> Container:
    found = containers(module)
    if len(found) != 1:
        names = ", ".join(f"'{each.path or type(each.module).__name__}'" for each in found)
        wanted = "blocks that repeat in one list of modules, which stages share"
        raise UnsupportedError(expected(WHERE, wanted, names or "none", REMEDY))
    return found[0]


def moved(recording: Recording, blocks: OwnBlocks, by: int) -> Recording:
    """The recording of a stage as that of another one, whose blocks are ``by`` further."""
    if not by:
        return recording
    prefix = re.escape(f"{blocks.path}." if blocks.path else "")
    text = msgspec.json.encode(recording).decode()
    # A stage of alike blocks differs from another one in nothing but their numbers, which stand in
    # names all over the recording. To renumber its text is far quicker than to record the stage
    # once more.
    there = re.sub(rf'"{prefix}(\d+)(?=["./])', lambda m: _later(m, by), text)
    return decode_json(there, Recording)


def _later(match: re.Match[str], by: int) -> str:
    return f"{match[0][: -len(match[1])]}{int(match[1]) + by}"


class StageOf:
    """``module`` as one ``stage`` has it, once :meth:`cut`.

    A stage without blocks has one all the same, at whose door it ends or begins.
    """

    def __init__(self, module: nn.Module, stage: ModelStage) -> None:
        self.module, self.stage = module, stage
        self.container = _container(module)
        begin, end = stage.layers
        self.blocks = self.container.names[begin:end]
        # A stage without blocks has only the embedding or the head. Where its own code ends or
        # begins shows at the nearest block of the stage beside it, so that one is kept as a door
        # and never runs as the stage's.
        self.kept = (
            range(begin, end) if self.blocks else range(begin - stage.last, end + stage.first)
        )
        self.received = 0
        self.ran: set[nn.Module] = set()  # modules of this stage
        self.after: set[nn.Module] = set()  # modules of later ones
        # modules of earlier ones, '' for the whole one, to what they made gradients came
        self.skipped: set[str] = set()

    @contextmanager
    def cut(self) -> Iterator[None]:
        """The module has no other blocks inside."""
        modules = own_children(self.container.module)
        before = dict(modules)
        names = [self.container.names[k].rpartition(".")[2] for k in self.kept]
        modules.clear()
        modules.update({name: before[name] for name in names})
        try:
            yield
        finally:
            modules.clear()
            modules.update(before)

    def apart(self, chosen: Policy) -> list[str]:
        """Blocks of the stage that repeat no other."""
        units = {c.names[k] for c in containers(self.module, chosen) for k in c.units}
        return [name for name in self.blocks if name not in units]

    def run(self, subject: TracedModule, recorder: Recorder) -> Any:
        """One forward of the stage under ``recorder``: what it sends on, or its result."""
        self.ran, self.after, self.skipped = set(), set(), set()
        return _StageForward(self, subject, recorder).result()

    def of_stage(self, found: Recording, subject: TracedModule) -> Recording:
        """A recording without the parameters and inputs of other stages; parameters that nobody
        runs or trains are the first one's. UnsupportedError where the stage used more of what runs
        before it than the stream."""
        if self.skipped:
            wanted = "stages that use one tensor with a gradient of what runs before them"
            maker = next((f"'{name}'" for name in sorted(self.skipped) if name), "its own forward")
            got = f"the result of {maker} in a later stage"
            raise UnsupportedError(expected(WHERE, wanted, got, REMEDY))
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        touches = (touch for piece in found.pieces for touch in piece.touches)
        kept = {id(parameters[each.name]) for each in touches if each.what == "gradient"}
        kept |= {id(p) for part in self.module.modules() for p in self._held(part)}
        entered = {piece.unit for piece in found.pieces if piece.point == "enter"}
        units = []
        for unit in found.units:
            mine = [t for t in unit.tensors if unit.name or id(parameters[t.fqn]) in kept]
            names = {tensor.fqn for tensor in mine}
            frozen = tuple(name for name in unit.frozen if name in names)
            if unit.name in entered:
                changed = {"tensors": tuple(mine), "frozen": frozen}
                units.append(msgspec.structs.replace(unit, **changed))
        given = list(tensors_in((subject.inputs, dict(subject.keywords))))
        extra = list(subject.extra)
        own = (given if self.stage.first else []) + (extra if self.stage.last else [])
        # The module is called with all inputs wherever the stage is, for its code before the blocks
        # must run; but ids lie on the first rank alone and targets on the last.
        inputs = found.inputs - storage_bytes([*given, *extra]) + storage_bytes(own)
        found = msgspec.structs.replace(found, units=tuple(units), inputs=inputs)
        return found if self.stage.first else _behind(found)

    def _held(self, part: nn.Module) -> Iterator[nn.Parameter]:
        """Parameters of ``part`` that the stage has though they get no gradient in it."""
        above = any(inside is self.container.module for inside in part.modules())
        runs = part in self.ran or (self.stage.first and part not in self.after)
        for parameter in part.parameters(recurse=False):
            if (self.stage.first and not parameter.requires_grad) if above else runs:
                yield parameter


def _behind(found: Recording) -> Recording:
    """The root's unit of a stage that is not the first is that of what runs behind the blocks; one
    without parameters is none."""
    empty = not any(unit.tensors for unit in found.units if not unit.name)
    pieces: list[Piece] = []
    for piece in found.pieces:
        ours = not piece.unit and piece.point in OF_UNITS
        # A unit without parameters has nothing to gather: its touches belong to the piece before.
        if ours and empty:
            before = pieces.pop()
            touches, work = before.touches + piece.touches, before.work + piece.work
            told = (before.operators or OperatorShapes()) + (piece.operators or OperatorShapes())
            pieces.append(Piece(before.point, before.unit, touches, work, told))
        else:
            pieces.append(msgspec.structs.replace(piece, unit=HEAD) if ours else piece)
    units = (msgspec.structs.replace(unit, name=unit.name or HEAD) for unit in found.units)
    kept = tuple(unit for unit in units if unit.tensors or not empty)
    return msgspec.structs.replace(found, pieces=tuple(pieces), units=kept)


class _StageForward:
    """One forward of a stage."""

    def __init__(self, of: StageOf, subject: TracedModule, recorder: Recorder) -> None:
        self.of, self.stage, self.subject, self.recorder = of, of.stage, subject, recorder
        self.kept = StageResults(pipelined=not of.stage.first)
        self.sent: Any = None
        self.seen = of.stage.first  # whether what runs now is the stage's
        self.ended = False
        self.places: dict[nn.Module, int] = {}  # of the blocks in their list
        self.reached = -1  # the last of them that runs
        self.names = {part: name for name, part in of.module.named_modules()}
        self.inside: list[nn.Module] = []  # modules that run before the stage, innermost last
        self.before = ExitStack()

    def result(self) -> Any:
        module: Any = self.of.module
        # The forward is replaced on the object and called through the module, so that all hooks run
        # as they would; afterwards it is as it was, also where the object had one of its own.
        own, mine = module.forward, vars(module).get("forward")

        def forward(*arguments: Any, **keywords: Any) -> Any:
            with ExitStack() as around:
                self._watch(around)
                around.callback(self.before.close)
                if not self.seen:
                    self.recorder.unseen(True)
                    self.before.enter_context(_Made(self._made))
                try:
                    result = own(*arguments, **keywords)
                finally:
                    if not self.seen:
                        self.recorder.unseen(False)
                    self.seen = True
            return self.kept.until_sent(result) if self.stage.last else self.sent

        vars(module)["forward"] = forward
        try:
            return module(*self.subject.inputs, **self.subject.keywords)
        finally:
            if mine is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = mine

    def _watch(self, around: ExitStack) -> None:
        blocks = list(own_children(self.of.container.module).values())
        self.places = {block: place for place, block in enumerate(blocks) if block is not None}
        first, last = blocks[0], blocks[-1]
        assert first is not None
        assert last is not None
        # Global hooks see every module, also those that the code before the blocks calls; only by
        # what runs and what does not can parameters be told to belong to this stage.
        hooks = [register_module_forward_pre_hook(self._running)]
        if not self.stage.first:
            hooks.append(register_module_forward_hook(self._ran))
            if self.of.blocks:
                begins = first.register_forward_pre_hook(
                    self._begins, with_kwargs=True, prepend=True
                )
            else:
                begins = last.register_forward_hook(self._begins_behind)
            hooks.append(begins)
        if not self.stage.last:
            if self.of.blocks:
                hooks.append(last.register_forward_hook(self._ends))
            else:
                ends = first.register_forward_pre_hook(
                    self._ends_before, with_kwargs=True, prepend=True
                )
                hooks.append(ends)
        for hook in hooks:
            around.callback(hook.remove)

    def _running(self, module: nn.Module, _arguments: Any) -> None:
        # Blocks that run in another order than they are listed in, or twice, cannot be dealt to
        # stages by their list.
        place = self.places.get(module, self.reached)
        if place < self.reached:
            wanted = "blocks that run once each, in the order of their list"
            name = self.of.container.names[self.of.kept[place]]
            raise UnsupportedError(expected(WHERE, wanted, f"'{name}' after a later one", REMEDY))
        self.reached = place
        if self.seen:
            self.of.ran.add(module)
        elif self.ended:
            self.of.after.add(module)
        else:
            self.inside.append(module)

    def _ran(self, module: nn.Module, _arguments: Any, _result: Any) -> None:
        if not self.seen and self.inside and self.inside[-1] is module:
            self.inside.pop()

    def _made(self, tensor: torch.Tensor) -> None:
        """What an earlier stage made has no gradient here, for the stream is cut off from it."""
        name = self.names.get(self.inside[-1], "") if self.inside else ""
        # The stream is cut off from what made it, so a gradient that gets back here has come
        # another way: over a result that a real stage would not have.
        tensor.register_hook(lambda gradient: self.of.skipped.add(name))

    def _begins(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        if self.seen:
            return None
        given = tuple(arguments), keywords
        begun = self._begun(given, self.of.blocks[0])
        self.of.ran.update(module.modules())
        return begun

    def _begins_behind(self, module: nn.Module, _arguments: Any, result: Any) -> Any:
        if self.seen:
            return None
        return self._begun(result, self.of.container.names[-1])

    def _begun(self, given: Any, block: str) -> Any:
        """``given`` with what another rank would send in place of the stream, wherever it lies in
        tuples, lists and dictionaries."""
        stream = _stream(given, block)
        fresh = self._received(stream)
        return map_tensors(lambda value: fresh if value is stream else value, given)

    def _received(self, stream: torch.Tensor) -> torch.Tensor:
        self.before.close()
        # A leaf, as what is received from another rank is one: autograd ends here and leaves its
        # gradient, which goes to the stage before.
        fresh = torch.empty_like(stream.detach()).requires_grad_()
        fresh.register_post_accumulate_grad_hook(self.kept.sent)
        self.recorder.adopt(fresh)
        self.of.received = fresh.untyped_storage().nbytes()
        self.seen = True
        self.recorder.unseen(False)
        return fresh

    def _ends(self, module: nn.Module, _arguments: Any, result: Any) -> None:
        if self.seen and not self.ended:
            self._end(_stream(result, self.of.blocks[-1]))

    def _ends_before(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        if self.seen and not self.ended:
            self._end(_stream((arguments, keywords), self.of.container.names[0]))

    def _end(self, stream: torch.Tensor) -> None:
        self.sent, self.seen, self.ended = stream, False, True
        self.recorder.unseen(True)


class _Made(TorchFunctionMode):
    """Tells ``made`` of every tensor that a function makes and that gradients go back through."""

    def __init__(self, made: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.made = made

    def __torch_function__(
        self, function: Any, _types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                self.made(tensor)
        return result


def _stream(given: Any, block: str) -> torch.Tensor:
    """The tensor that a block is given or gives and that gradients go back through."""
    found = {id(t): t for t in tensors_in(given) if t.requires_grad}
    if len(found) != 1:
        wanted = "blocks that hand one tensor with a gradient to the next"
        raise UnsupportedError(expected(WHERE, wanted, f"{len(found)} at '{block}'", REMEDY))
    (only,) = found.values()
    return only
