"""The runtime a job names, as a machine for a rank's step."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UnsetType

from shardwright.core.llama import LLAMA_EXPERTS
from shardwright.core.optimizers import Optimizer, optimizer_named
from shardwright.core.tensor import TensorSpec
from shardwright.estimate.llama import KEPT
from shardwright.heap.flat import FlatUnits
from shardwright.heap.fsdp2 import FSDP2
from shardwright.heap.ledger import Ledger
from shardwright.heap.machine import Machine, Megatron, Reduces, Replicated, Sharding, Shares
from shardwright.heap.rank_step import MakeMachine
from shardwright.job.job import Job, memory_of
from shardwright.job.memory import WHOLE, MemorySection, Runtime
from shardwright.job.parallel import Degrees
from shardwright.tracker.private import fsdp2_holds_all_reduced


def sharding(
    section: MemorySection,
    degrees: Degrees,
    on_gpu: bool,
    experts: tuple[str, ...] = LLAMA_EXPERTS,
    block: int = 1,
) -> Sharding:
    """How a job's parameters lie on its data ranks.

    A pipeline keeps its units whole and reduces once, as TorchTitan does it, unless the job says
    otherwise; FSDP alone reduces every microbatch. FSDP2 keeps the root's own parameters, and by
    default TorchTitan the head's, whose backward comes next; our runtime by default the root's.
    ``experts`` are patterns of the units that the expert degree divides, ``block`` elements are
    those that the optimizer quantizes together.
    """
    wanted = section.reshard_after_forward
    resharded = degrees.pipeline == 1 if wanted == "default" else bool(wanted)
    if section.runtime == "fsdp2":
        kept = frozenset(KEPT if wanted == "default" else ("",))
    else:
        kept = frozenset(("",) if wanted == "default" else ())
    return Sharding(
        shards=degrees.shards,
        expert_shards=degrees.expert_shards,
        replicas=degrees.data_replicate,
        param_dtype=section.param_dtype or "",
        reduce_dtype=section.reduce_dtype or "",
        reshard_after_forward=resharded,
        kept=kept,
        prefetch=1 if on_gpu else 0,
        zero=section.stage,
        reduces=_reduces(section, degrees),
        shares=_shares(section),
        on_gpu=on_gpu,
        offload=section.on_host,
        twice=section.twice,
        reduce_scatter_inputs=section.fsdp2_settings.reduce_scatter_max_input_buffers,
        holds_all_reduced=holds_all_reduced(section, degrees),
        experts=experts,
        block=block,
    )


def holds_all_reduced(section: MemorySection, degrees: Degrees) -> bool:
    """What the job says of FSDP2's sums over replicas, else what the torch here does: to ask it
    takes a second of imports, so that nobody does where there are no such sums."""
    told = section.fsdp2_settings.holds_all_reduced
    if not isinstance(told, UnsetType):
        return told
    return section.runtime != "fsdp2" or degrees.data_replicate == 1 or fsdp2_holds_all_reduced()


def _shares(section: MemorySection) -> Shares:
    if section.runtime not in WHOLE:
        return "all"
    return "states" if section.zero == 1 else "nothing"


def _reduces(section: MemorySection, degrees: Degrees) -> Reduces:
    """FSDP2 in a pipeline reduces when all is over; ours where it is set to wait, unit by unit, as
    it does where whole gradients are accumulated."""
    if degrees.pipeline == 1 and section.stage != 1:
        return "each"
    return "end" if section.runtime == "fsdp2" else "last"


def machine_of(section: MemorySection, found: Sharding) -> MakeMachine:
    """A function that makes the machine of a runtime for a heap and units."""

    def make(
        heap: Ledger, units: dict[str, tuple[TensorSpec, ...]], frozen: frozenset[str]
    ) -> Machine:
        return MACHINES[section.runtime](heap, units, found, frozen)

    return make


MACHINES: dict[Runtime, Callable[..., Machine]] = {
    "shardwright": FlatUnits,
    "fsdp2": FSDP2,
    "ddp": Replicated,
    "megatron": Megatron,
}


def optimizer_of(job: Job) -> Optimizer:
    """The optimizer of a job; on whole parameters in less than fp32 it has no copies. Ours updates
    what is on the host there, as it does elsewhere. Beside other runtimes than ours it may be
    another one."""
    section = memory_of(job)
    other = section.runtime != "shardwright"
    found = optimizer_named(
        job.train.optimizer, section.implementation, offload=other and section.offload != "none"
    )
    return found.beside_others if other else found
