"""What an estimate says of how a step is run, and what it assumes of an accelerator."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.heap.allocator.replay import ASSUMPTION
from shardwright.job.job import Job, memory_of
from shardwright.job.memory import MemorySection

OWN_DTYPE = "the module's"  # whose parameters each have the one that they were made in


def assumptions_on_gpu(operators: Iterable[Iterable[str]]) -> list[str]:
    """What is assumed of an accelerator: operators whose kernels nobody has compared take there
    what they take on a CPU."""
    from shardwright.trace.lowering import unknown_operators

    unknown = [unknown_operators(tuple(each)) for each in operators]
    return [*(f"as on a CPU: {', '.join(names)}" for names in unknown if names), ASSUMPTION]


def settings_of(job: Job, device: str, policy: str = "") -> dict[str, str]:
    """What a step is run with on ``device``, and checkpointed by a plan's ``policy``; of the rest
    what is not by default. Of tables alone, without a step on any, the batch."""
    batch = {"batch": str(job.batch.size)}
    if not device:
        return batch
    section, usual = memory_of(job), MemorySection()
    rest = ("zero", "compile", "float8", "offload", "loss", "implementation", "allocator")
    values = {name: getattr(section, name) for name in rest}
    changed = {
        name: str(list(value) if isinstance(value, tuple) else value)
        for name, value in values.items()
        if value != getattr(usual, name)
    }
    return {
        "runtime": section.runtime,
        "checkpointing": policy or section.policy,
        "lowering": device,
        "param_dtype": section.param_dtype or OWN_DTYPE,
        "reduce_dtype": section.reduce_dtype or OWN_DTYPE,
        "optimizer": job.train.optimizer,
        **batch,
        "sequence": str(job.batch.sequence),
        **changed,
    }
