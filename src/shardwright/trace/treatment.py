"""How a model is run while it is recorded: kernels, checkpointing, compiled, in fp8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch import nn

from shardwright.trace.checkpointing import apply_checkpointing, policy
from shardwright.trace.float8 import apply_float8
from shardwright.trace.lowering import lowering
from shardwright.trace.lowering.kernels import kernels


class Treatment(msgspec.Struct, frozen=True):
    """Names as a job writes them; ``float8`` is a recipe, empty for none. ``attention`` and
    ``rms_norm`` are kernels of an accelerator."""

    device: str = "cuda"
    checkpointing: str = "none"
    compile: bool = False
    compiled_loss: bool = False
    float8: str = ""
    attention: str = "flash"
    rms_norm: str = "fused"

    @contextmanager
    def applied(
        self, model: nn.Module, blocks: Sequence[nn.Module], treated: Sequence[int]
    ) -> Iterator[AppliedTreatment]:
        """``model`` treated so inside; ``treated`` are the blocks that a policy picks."""
        chosen = policy(self.checkpointing).of_a_block
        picked = [blocks[place] for place in treated]
        others = [block for place, block in enumerate(blocks) if place not in treated]
        result = AppliedTreatment(self)
        if chosen.kind != "none":
            result.checkpointed = dict.fromkeys(picked, chosen.name)
        with ExitStack() as stack:
            if self.float8:
                stack.enter_context(apply_float8(model, self.float8))
            if self.compile:
                from shardwright.trace.compiled import apply_compile  # seconds of imports

                own = kernels(self.device, self.attention, self.rms_norm)
                for its, name in ((picked, chosen), (others, policy("none"))):
                    done = stack.enter_context(apply_compile(its, name, own))
                    result.compiled.append(done)
            else:
                stack.enter_context(apply_checkpointing(picked, chosen))
            yield result


@dataclass(slots=True)
class AppliedTreatment:
    """A treatment at work. ``checkpointed`` blocks each have a policy's name."""

    treatment: Treatment
    compiled: list[Any] = field(default_factory=list)
    checkpointed: dict[nn.Module, str] = field(default_factory=dict)

    def around(self) -> AbstractContextManager[Any]:
        """The context of a forward and a backward."""
        if self.treatment.device == "cpu":
            return nullcontext()
        own = self.treatment
        return lowering(own.device, own.attention, own.rms_norm)

    @property
    def notes(self) -> list[str]:
        """What could not be done as asked."""
        return list(dict.fromkeys(note for each in self.compiled for note in each.notes))
