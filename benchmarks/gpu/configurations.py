"""The jobs whose memory and seconds are measured, those of most worth first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpu.rows import Setting
from shardwright.job.job import Job, parse_job

LLAMA: dict[str, Any] = {
    "kind": "llama",
    "layers": 16,
    "dim": 2048,
    "heads": 32,
    "kv_heads": 8,
    "ffn_dim": 8192,
    "vocab": 128256,
}
LARGER = {**LLAMA, "layers": 28, "dim": 3072, "heads": 24}
PLAN = {
    "words": "rowwise",
    **{f"layers.*.attention.{name}": "colwise" for name in ("wq", "wk", "wv")},
    "layers.*.attention.wo": "rowwise",
    "layers.*.w1": "colwise",
    "layers.*.w3": "colwise",
    "layers.*.w2": "rowwise",
    "output": "colwise_rep",
}
# What ``small`` takes in place of the sizes above.
SMALL_LLAMA = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 128, "vocab": 512}
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab": 200, "dim": 64, "layers": 2},
    "bert": {"vocab": 200, "dim": 64, "layers": 2},
    "vit": {"size": 32, "dim": 64, "layers": 2},
    "resnet": {"size": 32, "width": 8, "depths": [1, 1, 1, 1]},
    "lstm": {"vocab": 200, "dim": 32},
    "t5": {"vocab": 200, "dim": 64, "ffn_dim": 96, "heads": 2, "layers": 1},
    "tensor_parallel": {"vocab": 256, "dim": 64, "layers": 2, "ffn": 96},
}
T5 = {"vocab": 32128, "dim": 768, "ffn_dim": 3072, "heads": 12, "layers": 12}


@dataclass(frozen=True)
class Configuration:
    """A job on ``ranks``, of which rank 0 is measured; ``replicas`` or ``tensor`` of them share
    otherwise than by shards. With one rank it is NCCL's."""

    name: str
    model: dict[str, Any]
    batch: tuple[int, int]  # samples, and tokens each
    memory: dict[str, Any] = field(default_factory=dict)
    ranks: int = 8
    replicas: int = 1
    tensor: int = 1
    optimizer: str = "adamw"
    seconds: float = 6.0

    def runs_on(self, setting: Setting) -> bool:
        """Whether there is anything to see of it: a CPU has neither this allocator nor compiles
        what a GPU runs."""
        return setting.device == "cuda" or not (self.compiled or self.memory.get("allocator"))

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled, which takes a process by itself."""
        return bool(self.memory.get("compile"))

    @property
    def environment(self) -> dict[str, str]:
        """What a process has to be started with."""
        found = {"SHARDWRIGHT_ROW": self.name} if self.compiled else {}
        allocator = self.memory.get("allocator")
        # two names, of which torch 2.11 knows both and reads the newer one first
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        return {**found, **{name: str(allocator) for name in names if allocator}}

    def job(self, setting: Setting) -> Job:
        """As it is estimated and run."""
        model, (size, sequence), memory = self.model, self.batch, dict(self.memory)
        cluster: dict[str, Any] = {"world_size": self.ranks, "preset": "h100-8"}
        if setting.small:
            size, sequence = min(size, 2), min(sequence, 16)
            name = str(model.get("python", "")).rpartition(":")[2]
            model = {**model, "arguments": SMALL[name]} if name else {**model, **SMALL_LLAMA}
        if setting.device == "cpu":
            cluster = {"world_size": self.ranks, "compute_device": "cpu"}
            memory = {**memory, "lowering": "cpu"}
        else:
            memory |= {"lowering": "cuda"}
        if self.ranks == 1:
            cluster["local_world_size"] = 1
        parallel: dict[str, Any] = {}
        if self.replicas > 1:
            parallel["data_replicate"] = self.replicas
        if self.tensor > 1:
            parallel |= {"tensor": self.tensor, "parallelize_plan": PLAN}
        batch = {"size": size}
        if sequence > 1:
            batch["sequence"] = sequence
        return parse_job(
            {
                "model": model,
                "cluster": cluster,
                "batch": batch,
                "memory": memory,
                "parallel": parallel,
                "train": {"optimizer": self.optimizer},
            }
        )


def _own(function: str, **arguments: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"python": f"gpu.modules:{function}"}
    return {**found, "arguments": arguments} if arguments else found


FSDP2, OURS = {"runtime": "fsdp2"}, {"runtime": "shardwright"}
FULL, SELECTIVE = {"checkpointing": "full"}, {"checkpointing": "selective_op"}
NONE = {"checkpointing": "none"}
BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
FUSED = {"implementation": "fused"}
TOKENS = (2, 4096)


def memory_configurations() -> Iterator[Configuration]:
    """Rank 0 of several ranks that are not there, and the one rank of NCCL."""
    yield Configuration("fsdp2 of 8", LLAMA, TOKENS, FSDP2 | NONE)
    yield Configuration("ours of 8", LLAMA, TOKENS, OURS | NONE | FUSED)
    yield Configuration("fsdp2 of 8, full", LLAMA, TOKENS, FSDP2 | FULL)
    yield Configuration("ours of 8, full", LLAMA, TOKENS, OURS | FULL | FUSED)
    yield Configuration("fsdp2 of 8, selective", LLAMA, TOKENS, FSDP2 | SELECTIVE)
    yield Configuration("fsdp2 of NCCL", LLAMA, (1, 4096), FSDP2 | FULL | FUSED, ranks=1)
    yield Configuration("ours of NCCL", LLAMA, (1, 4096), OURS | FULL | FUSED, ranks=1)
    yield Configuration("gpt2", _own("gpt2"), (16, 1024), FSDP2 | NONE | BF16)
    yield Configuration("bert", _own("bert"), (32, 512), FSDP2 | NONE | BF16)
    yield Configuration("vit", _own("vit"), (128, 1), FSDP2 | NONE | BF16)
    yield Configuration("resnet", _own("resnet"), (128, 1), FSDP2 | NONE | FP32)
    yield Configuration("t5", _own("t5", **T5), (16, 512), FSDP2 | NONE | BF16)
    yield Configuration("lstm", _own("lstm"), (128, 64), OURS | NONE | BF16)
    yield Configuration("fsdp2 of 64, full", LARGER, TOKENS, FSDP2 | FULL, ranks=64)
    yield Configuration("ours of 64, full", LARGER, TOKENS, OURS | FULL | FUSED, ranks=64)
    yield Configuration("fsdp2 of 2 x 4", LLAMA, TOKENS, FSDP2 | FULL, replicas=2)
    yield Configuration("ours of 2 x 4", LLAMA, TOKENS, OURS | FULL | FUSED, replicas=2)
    yield Configuration(
        "tensor 2 x 4", _own("tensor_parallel"), TOKENS, FSDP2 | NONE | BF16, tensor=2
    )
    yield Configuration("fsdp2, fp32", LLAMA, (1, 2048), FSDP2 | NONE | FP32)
    yield Configuration("ours, fp32", LLAMA, (1, 2048), OURS | NONE | FP32)
    yield Configuration("fsdp2, fused", LLAMA, (1, 2048), FSDP2 | NONE | FUSED)
    yield Configuration("ours, foreach", LLAMA, (1, 2048), OURS | NONE)
    yield Configuration("ours, 8 bits", LLAMA, (1, 2048), OURS | NONE, optimizer="adamw_8bit")
    yield Configuration("ours, zero 2", LLAMA, (1, 2048), OURS | NONE | FUSED | {"zero": 2})
    yield Configuration("ours, kept", LLAMA, (1, 2048), OURS | {"reshard_after_forward": False})
    segments = {"allocator": "expandable_segments:True"}
    yield Configuration("fsdp2, expandable", LLAMA, TOKENS, FSDP2 | NONE | segments)
    yield Configuration("ours, expandable", LLAMA, TOKENS, OURS | NONE | FUSED | segments)
    compiled = {"compile": "blocks"}
    yield Configuration("fsdp2, compiled", LLAMA, TOKENS, FSDP2 | NONE | compiled, seconds=40)
    yield Configuration("fsdp2, compiled, full", LLAMA, TOKENS, FSDP2 | FULL | compiled, seconds=40)


def timed_configurations() -> Iterator[Configuration]:
    """One rank of NCCL, and one that shards nothing ("ddp" of a single rank)."""
    alone = {"runtime": "ddp", "param_dtype": "bf16"}
    for name, runtime in (("fsdp2 of one", FSDP2), ("ours of one", OURS), ("alone", alone)):
        yield Configuration(f"{name}, full", LLAMA, TOKENS, runtime | FULL | FUSED, ranks=1)
    yield Configuration("fsdp2 of one, none", LLAMA, (1, 4096), FSDP2 | NONE | FUSED, ranks=1)
    yield Configuration("ours of one, none", LLAMA, (1, 4096), OURS | NONE | FUSED, ranks=1)
    yield Configuration("alone, none", LLAMA, (1, 4096), alone | NONE | FUSED, ranks=1)
    yield Configuration(
        "fsdp2 of one, selective", LLAMA, (1, 4096), FSDP2 | SELECTIVE | FUSED, ranks=1
    )
    yield Configuration(
        "fsdp2 of one, fp32", LLAMA, (1, 2048), FSDP2 | FP32 | FULL | FUSED, ranks=1
    )
    own = FSDP2 | NONE | BF16 | FUSED
    yield Configuration("gpt2 of one", _own("gpt2"), (16, 1024), own, ranks=1)
    yield Configuration("bert of one", _own("bert"), (32, 512), own, ranks=1)
    yield Configuration("vit of one", _own("vit"), (128, 1), own, ranks=1)
    yield Configuration("resnet of one", _own("resnet"), (128, 1), own | FP32, ranks=1)
    yield Configuration("t5 of one", _own("t5", **T5), (16, 512), own, ranks=1)
    compiled = {"compile": "blocks"}
    yield Configuration(
        "alone, compiled", LLAMA, (1, 4096), alone | NONE | FUSED | compiled, ranks=1, seconds=40
    )
