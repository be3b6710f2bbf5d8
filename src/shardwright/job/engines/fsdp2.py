"""A layout as a snippet of Python for torch's own FSDP2: mesh, tensor ranks, checkpointing, units,
a step. It needs torch alone.
"""

# The snippet is of llamas whose modules have Meta's names (models/llama, and the older models of
# TorchTitan): units are the embedding, the blocks and what is behind them, as an estimate has them.

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec import UNSET

from shardwright.core.errors import expected
from shardwright.core.tensor import TORCH_NAMES
from shardwright.job.engines.layout import ANY, Engine, EngineLayout, started
from shardwright.job.memory import COSTLY, PRODUCTS

OPTIMIZERS = {
    "adamw": "AdamW(parameters, lr={lr}{how})",
    "adam": "Adam(parameters, lr={lr}{how})",
    "sgd": "SGD(parameters, lr={lr}{how})",
    "sgd_momentum": "SGD(parameters, lr={lr}, momentum=0.9{how})",
}
HOW = {"fused": ", fused=True", "foreach": ", foreach=True", "for_loop": ", foreach=False"}
LINE = 100  # characters
# A llama's own that parallelize_module has no style for, or that would need one more sum.
UNCUT = ("qk_norm", "tied_embeddings", "moe_layers", "kv_lora_rank", "post_norms", "logit_cap")

IMPORTS = (
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "checkpoint_wrapper"),
    ("torch.distributed.device_mesh", "init_device_mesh"),
    (
        "torch.distributed.fsdp",
        "CPUOffloadPolicy MixedPrecisionPolicy OffloadPolicy fully_shard",
    ),
    ("torch.distributed.tensor", "Replicate Shard"),
    (
        "torch.distributed.tensor.parallel",
        "ColwiseParallel PrepareModuleInput RowwiseParallel SequenceParallel loss_parallel "
        "parallelize_module",
    ),
    ("torch.nn.functional", "cross_entropy"),
    ("torch.utils.checkpoint", "CheckpointPolicy create_selective_checkpoint_contexts"),
)

MESH = '''

def mesh_of(device="cuda"):
    """Ranks of a tensor are neighbours, then those that share a copy."""
    return init_device_mesh(device, {sizes}, mesh_dim_names={names})


def parallelize(model, mesh):
    """The model, divided, checkpointed and sharded in place, before it has an optimizer."""
'''

TENSOR = """\
    part = {part}
    inner = {{
        **dict.fromkeys(("attention.wq", "attention.wk", "attention.wv"), ColwiseParallel()),
        **dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), ColwiseParallel()),
        "attention.wo": RowwiseParallel(output_layouts=part),
        "feed_forward.w2": RowwiseParallel(output_layouts=part),
    }}
    outer = {{
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
        "output": ColwiseParallel(
            input_layouts=part, output_layouts={logits}, use_local_output={local}
        ),
    }}
"""

SEQUENCE = """\
    outer["norm"] = inner["attention_norm"] = inner["ffn_norm"] = SequenceParallel()
    for name, inputs in (("attention", 3), ("feed_forward", 1)):  # tokens are gathered before
        inner[name] = PrepareModuleInput(
            input_layouts=(part, None, None)[:inputs],
            desired_input_layouts=(Replicate(), None, None)[:inputs],
        )
"""

CUT = """\
    table = model.tok_embeddings
    if not isinstance(table, nn.Embedding):  # the one that parallelize_module knows
        rows = nn.Embedding(*table.weight.shape, device="meta")
        rows.weight = table.weight
        model.tok_embeddings = rows
    parallelize_module(model, mesh["tensor"], outer)
    for block in model.layers.values():
        block.attention.heads //= {tensor}
        block.attention.kv_heads //= {tensor}
        parallelize_module(block, mesh["tensor"], inner)
"""

CHECKPOINTS = """\
    for name, block in list(model.layers.items()){picked}:
        again = checkpoint_wrapper(block, preserve_rng_state=False{context})
        model.layers[name] = again
"""

SHARDS = '''\
    policy = {{
        "mesh": mesh[{axes}],
        "mp_policy": MixedPrecisionPolicy({dtypes}),
        "offload_policy": {offload},
    }}
    for block in {units}:
        fully_shard(block, reshard_after_forward={reshards}, **policy)
{head}    return fully_shard(model, **policy)


def optimizer_of(model):
    parameters = model.parameters()
    return torch.optim.{optimizer}


def loss(logits, targets):
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
{compiled}

def step(model, optimizer, batches):
    """One update by {microbatches} x {samples} samples of {sequence} tokens a data rank."""
    for tokens, targets in batches:
{backward}
    optimizer.step()
    optimizer.zero_grad()
'''

HEAD = """\
    fully_shard([model.norm, model.output], reshard_after_forward={last}, **policy)
"""

SELECTIVE = '''
KEPT = {{{kept}}}  # results that are not computed again
PRODUCTS = {{{products}}}  # of these every second one


def selective():
    """Counts anew for each forward and each recomputation, which have to count alike."""
    count = {{False: 0, True: 0}}

    def keep(ctx, operator, *args, **kwargs):
        name = operator._schema.name
        if name in PRODUCTS:
            count[ctx.is_recompute] += 1
        kept = count[ctx.is_recompute] % 2 if name in PRODUCTS else name in KEPT
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(keep)
'''


def _more(layout: EngineLayout) -> Iterator[str]:
    degrees, shape = layout.degrees, layout.shape
    if layout.memory.loss == "parallel" and degrees.tensor == 1:
        yield expected("memory.loss", "'gathered' without parallel.tensor", "'parallel'")
    if degrees.tensor == 1:
        return
    for key in UNCUT:
        if value := getattr(shape, key):
            found = "some" if isinstance(value, tuple) else str(value)
            yield expected(f"model.{key}", "none beside parallel.tensor in a snippet", found)
    for key in ("kv_heads", "vocab", "ffn_dim"):
        if getattr(shape, key) % degrees.tensor:
            wanted = f"a multiple of parallel.tensor {degrees.tensor}"
            yield expected(f"model.{key}", wanted, str(getattr(shape, key)))


def _written(layout: EngineLayout) -> str:
    degrees, memory = layout.degrees, layout.memory
    axes = {"replicate": degrees.data_replicate, "shard": degrees.data_shard}
    axes = {name: size for name, size in axes.items() if size > 1 or name == "shard"}
    every = {**axes, "tensor": degrees.tensor} if degrees.tensor > 1 else axes
    cut = _tensor(layout) if degrees.tensor > 1 else ""
    body = [_selective(layout), MESH.format(sizes=tuple(every.values()), names=_quoted((*every,)))]
    body += [cut, _checkpoints(layout.said["memory.checkpointing"])]
    if memory.compile:
        body.append("    for block in model.layers.values():\n        block.compile()\n")
    text = "".join([*body, _shards(layout, tuple(axes))])
    return started(layout, "SCRIPT.py") + _head(layout) + _imports(text) + text


def _imports(text: str) -> str:
    """Of what a text names."""
    lines = ["import torch"] + (["from torch import nn"] if re.search(r"\bnn\.", text) else [])
    for module, names in IMPORTS:
        found = [name for name in names.split() if re.search(rf"\b{name}\b", text)]
        line = f"from {module} import {', '.join(found)}"
        if len(line) > LINE:
            line = f"from {module} import (\n" + "".join(f"    {n},\n" for n in found) + ")"
        lines += [line] if found else []
    return "\n".join(lines) + "\n"


def _head(layout: EngineLayout) -> str:
    return f'''\
"""FSDP2 as a job says it, for {layout.degrees.world_size} ranks.

mesh = mesh_of()
model = parallelize(model, mesh)  # a llama with Meta's names, its parameters in fp32
optimizer = optimizer_of(model)
step(model, optimizer, batches)
"""

'''


def _tensor(layout: EngineLayout) -> str:
    apart = layout.memory.loss == "parallel"
    whole = TENSOR.format(
        part="Shard(1)" if layout.degrees.sequence else "Replicate()",
        logits="Shard(-1)" if apart else "Replicate()",
        local=not apart,
    )
    sequence = SEQUENCE if layout.degrees.sequence else ""
    return whole + sequence + CUT.format(tensor=layout.degrees.tensor)


def _checkpoints(policy: str) -> str:
    kind, _, rest = policy.partition(":")
    if kind == "none":
        return ""
    picked = f"[{int(rest) - 1}::{rest}]" if kind == "layers" else ""
    picked = f"[:{rest}]" if kind == "first" else picked
    context = ", context_fn=selective" if kind in ("selective", "save") else ""
    return CHECKPOINTS.format(picked=picked, context=context)


def _selective(layout: EngineLayout) -> str:
    kind, _, rest = layout.said["memory.checkpointing"].partition(":")
    if kind not in ("selective", "save"):
        return ""
    products = PRODUCTS if kind == "selective" else ()
    kept = COSTLY if kind == "selective" else [_operator(name) for name in rest.split(",")]
    return SELECTIVE.format(kept=_lines(kept), products=_lines(products))


def _operator(name: str) -> str:
    """``aten.mm`` as the dispatcher writes it."""
    space, _, rest = name.strip().replace("::", ".").partition(".")
    return f"{space}::{rest.partition('.')[0]}"


def _lines(names: Iterable[str]) -> str:
    return "".join(f"\n    {_quoted(name)}," for name in sorted(names)) + "\n"


def _quoted(value: object) -> str:
    return repr(value).replace("'", '"')


def _shards(layout: EngineLayout, axes: tuple[str, ...]) -> str:
    degrees, memory = layout.degrees, layout.memory
    dtypes = ", ".join(
        f"{key}=torch.{TORCH_NAMES[layout.said[f'memory.{key}']]}"
        for key in ("param_dtype", "reduce_dtype")
    )
    apart, tied = memory.loss == "parallel", layout.shape.tied_embeddings
    line = f"(loss(model(tokens), targets) / {degrees.microbatches}).backward()"
    backward = f"        with loss_parallel():\n            {line}" if apart else f"        {line}"
    return SHARDS.format(
        axes=_quoted(axes if len(axes) > 1 else axes[0]),
        dtypes=dtypes,
        offload="CPUOffloadPolicy()" if memory.offload == "all" else "OffloadPolicy()",
        reshards=memory.reshard_after_forward is not False,
        # A head that is the embedding shares the root with it.
        units="model.layers.values()" if tied else "(model.tok_embeddings, *model.layers.values())",
        head="" if tied else HEAD.format(last=memory.reshard_after_forward is True),
        optimizer=OPTIMIZERS[layout.job.train.optimizer].format(
            lr=layout.job.train.learning_rate, how=HOW[layout.said["memory.implementation"]]
        ),
        compiled="\n\nloss = torch.compile(loss)\n" if memory.compile is True else "",
        microbatches=degrees.microbatches,
        samples=layout.samples,
        sequence=layout.job.batch.sequence,
        backward=backward,
    )


FSDP2 = Engine(
    "FSDP2",
    "torch 2.11 to 2.13",
    {
        **{f"parallel.{key}": (ANY,) for key in ("data_replicate", "data_shard", "tensor")},
        "parallel.sequence": (ANY,),
        "parallel.microbatches": (ANY,),
        "memory.runtime": ("fsdp2",),
        "memory.checkpointing": ("none", "full", "selective", "layers:*", "first:*", "save:*"),
        "memory.param_dtype": (ANY,),
        "memory.reduce_dtype": (ANY,),
        "memory.implementation": tuple(HOW),
        "memory.reshard_after_forward": (ANY,),
        "memory.compile": (ANY,),
        "memory.offload": ("none", "all"),
        "memory.loss": ("gathered", "parallel"),
        "train.optimizer": tuple(OPTIMIZERS),
        "model": (ANY,),
        "model.lora": (UNSET,),
        "model.kind": ("llama",),
    },
    _more,
    _written,
)
