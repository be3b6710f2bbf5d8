"""What an engine is asked for: the layout of a job, every default filled in, and what an engine can
do of it.
"""

# An engine's limits are a table of the values that it takes, and a key without a row has to be at
# its usual value. So a key that is new here is refused by every engine until somebody looks whether
# the engine has it, where a table of refusals would let it through and the run be another one.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from shardwright.core.errors import InputError, expected
from shardwright.core.llama import MAX_WORLD, LlamaShape
from shardwright.core.megatron import MegatronSettings
from shardwright.job.job import Job, degrees_of, memory_of, parallel_of
from shardwright.job.memory import WHOLE, MemorySection, float8_scaling
from shardwright.job.parallel import Degrees, capacity_of, fixed_world

ANY = "*"
HEAD, PORT = "HOST", 29_500  # where several hosts meet; torchrun's usual port
Limits = Mapping[str, tuple[Any, ...]]

# What an estimate assumes, or which device it is of: no engine is asked for it.
ASSUMED = ("memory.lowering", "memory.allocator", "memory.fsdp2", "memory.megatron")
# Not of the model's tensors: what a shape came from, and numbers that its kernels compute with.
NO_WIDTH = ("dtype", "unread", "norm_eps", "rope_theta")
_ALONE = Degrees(1, 1, 1, False, 1, 1, 1, "1f1b", 1, 1)


class EngineLayout(NamedTuple):
    """``job`` as ``said``: every key that may differ between engines with its value; ``samples``
    are those of a microbatch on a data rank."""

    job: Job
    degrees: Degrees
    memory: MemorySection
    said: Mapping[str, Any]
    samples: int

    @property
    def shape(self) -> LlamaShape:
        """Of its model, a llama."""
        assert self.job.model.shape is not UNSET, "other models are refused before"
        return self.job.model.shape

    @property
    def data(self) -> int:
        """Ranks with batches of their own."""
        return self.degrees.data_replicate * self.degrees.data_shard

    @property
    def host(self) -> int:
        """Ranks of a host; all, where the job does not say."""
        return min(self.job.cluster.local_world_size or MAX_WORLD, self.degrees.world_size)

    @property
    def hosts(self) -> int:
        """How many hosts its ranks fill."""
        return -(-self.degrees.world_size // self.host)


class Engine(NamedTuple):
    """One that runs jobs: what a key may say (``limits``), what must hold of several keys
    (``more``, as lines), how a layout is written, and of which version all this was read. ``usual``
    are keys that a job which does not give them has there otherwise than by their first limit."""

    title: str
    version: str
    limits: Limits
    more: Callable[[EngineLayout], Iterator[str]]
    written: Callable[[EngineLayout], str]
    usual: Mapping[str, Callable[[Job], Any]] = {}

    def takes(self, key: str, value: object) -> bool:
        """Whether the limits of a key have a value."""
        return any(is_allowed(value, each) for each in self.limits.get(key, ()))

    def cannot(self, layout: EngineLayout) -> Iterator[str]:
        """Why it does not run a layout, a line for each reason."""
        usual = _usual()
        kind = layout.said["model.kind"]
        if not any(
            is_allowed(kind, each) for each in self.limits["model.kind"]
        ):  # of which nothing else can be asked
            yield self._refused("model.kind", self.limits["model.kind"], kind)
            return
        for key, value in layout.said.items():
            allowed = self.limits.get(key, self.limits.get(key.partition(".")[0], ()))
            allowed = allowed or (usual.get(key, _width(key)),)
            if not any(is_allowed(value, each) for each in allowed):
                yield self._refused(key, allowed, value)
        yield from self.more(layout)

    def _refused(self, key: str, allowed: tuple[Any, ...], value: Any) -> str:
        wanted = " or ".join(map(_word, allowed))
        return expected(key, f"{wanted} for {self.title} ({self.version})", _word(value))


def layout_of(job: Job) -> EngineLayout:
    """The layout of a job; InputError where its ranks are not known or its degrees do not fit."""
    world = job.cluster.world_size or fixed_world(parallel_of(job))
    if world is None:
        remedy = "Set cluster.world_size, or -n."
        raise InputError(expected("job: cluster.world_size", "a number of ranks", "none", remedy))
    degrees, memory = degrees_of(job, world), memory_of(job)
    said = _said(degrees, memory, job)
    return EngineLayout(job, degrees, memory, said, job.batch.size // degrees.microbatches)


def _said(degrees: Degrees, memory: MemorySection, job: Job | None) -> dict[str, Any]:
    found = {f"parallel.{key}": value for key, value in msgspec.structs.asdict(degrees).items()}
    found |= {f"memory.{key}": value for key, value in msgspec.structs.asdict(memory).items()}
    for key in ASSUMED:
        del found[key]
    settings = memory.fsdp2_settings
    if memory.runtime in WHOLE:  # which gather nothing
        found["memory.reshard_after_forward"] = "default"
    found |= {
        "memory.checkpointing": memory.policy.replace("selective_op", "selective"),
        "memory.float8": float8_scaling(memory) or False,
        "memory.implementation": memory.implementation or "foreach",
        "memory.fp32_logits": bool(memory.fp32_logits),
        "memory.fsdp2.buffers": settings.reduce_scatter_max_input_buffers,
        "memory.fsdp2.group": settings.separate_reduce_scatter_group,
        "parallel.capacity_factor": None,
        **{
            f"memory.megatron.{key}": value
            for key, value in msgspec.structs.asdict(
                memory.megatron_settings or MegatronSettings()
            ).items()
        },
    }
    if job is None:
        return found | {"train.optimizer": "adamw", "model.kind": "llama"}
    section = parallel_of(job)
    # Skewed loads are assumed and not set; a capacity is set.
    found["parallel.capacity_factor"] = capacity_of(section)
    found |= {"train.optimizer": job.train.optimizer, "model.kind": job.model.kind}
    if job.model.shape is not UNSET:
        widths = msgspec.structs.asdict(job.model.shape)
        widths["v_head_dim"] = job.model.shape.value_dim
        found |= {f"model.{key}": widths[key] for key in widths if key not in NO_WIDTH}
    return found


@cache
def _usual() -> Mapping[str, Any]:
    return _said(_ALONE, MemorySection(), None)


@cache
def _width(key: str) -> Any:
    """What a width is of a plain llama."""
    found = {field.name: field.default for field in msgspec.structs.fields(LlamaShape)}
    return found.get(key.partition(".")[2])


def is_allowed(value: Any, allowed: Any) -> bool:
    """Whether a value is one that a limit allows."""
    if isinstance(value, str) and isinstance(allowed, str):
        return fnmatchcase(value, allowed)
    return allowed == ANY or (value == allowed and type(value) is type(allowed))


def _word(value: Any) -> str:
    if value is UNSET or value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def the_other_way(table: Mapping[Any, Any]) -> dict[Any, Any]:
    """Ours by theirs as theirs by ours."""
    return {ours: theirs for theirs, ours in table.items()}


def torchrun(layout: EngineLayout) -> str:
    """What starts its ranks, by the same line on each host."""
    if layout.hosts == 1:
        return f"torchrun --nproc-per-node {layout.host}"
    meet = f"--rdzv-backend c10d --rdzv-endpoint {HEAD}:{PORT} --rdzv-id mine"
    return f"torchrun --nnodes {layout.hosts} --nproc-per-node {layout.host} {meet}"


def started(layout: EngineLayout, script: str) -> str:
    """How a ``script`` is started, as a comment."""
    line = f"# {torchrun(layout)} {script}\n"
    return line.replace(" --rdzv-backend", " \\\n#   --rdzv-backend")


def flag_lines(head: str, flags: Iterator[str]) -> str:
    """A command of a shell with a flag a line."""
    return " \\\n  ".join([head, *flags]) + "\n"
