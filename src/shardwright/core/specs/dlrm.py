"""DLRM: a bottom MLP on the dense features, one embedding per table, an interaction, a top MLP.

The widths, parameter order and allocations are those of ``shardwright.models.dlrm``, which the
tests hold against this description. Interaction ``dot`` (Naumov et al., 2019): with the stack T of
the bottom output and the F embeddings, the F(F+1)/2 products below the diagonal of T Tᵀ follow the
bottom output; ``cat`` concatenates everything.
"""

from __future__ import annotations

import itertools

import msgspec

from shardwright.core.batch import INDEX_BYTES
from shardwright.core.errors import InputError, expected
from shardwright.core.job import Job
from shardwright.core.model import Allocation, ModelSpec, Stage, TableSpec, UnitSpec, Work
from shardwright.core.tensor import TensorSpec

RUNNABLE_OPTIMIZERS = ("sgd", "rowwise_adagrad")
# What a DLRM's tables do not have: they are read as they are, unweighted, straight from memory.
PLAIN: dict[str, object] = {
    "batch_sizes": None,
    "output_dtype": None,
    "module_weighted": False,
    "constraint_weighted": False,
    "cache": None,
    "kv_l1_mb": None,
}
FLOAT = 4  # the dense part computes in fp32


def spec(job: Job) -> ModelSpec:
    """The DLRM of ``job`` as a :class:`ModelSpec`."""
    section = job.model
    if job.batch.sequence != 1:
        raise InputError(
            expected("batch.sequence", "1, for dlrm has no sequences", str(job.batch.sequence))
        )
    tables = tuple(_resolved(table, job) for table in job.tables)
    dim = _shared_dim(tables, section.bottom)
    if not section.top:
        raise InputError(expected("model.top", "at least one width", "no layer"))
    features = len(tables)
    width = interaction_width(features, dim, section.interaction)
    bottom = (section.dense_features, *section.bottom)
    top = (width, *section.top)
    stages = (
        _mlp("bottom", bottom, last_relu=True, saved_input=None),
        Stage("tables", "route", backward=(Work("tables", frees=("gradient.stack",)),)),
        _interaction(features, dim, section.interaction, _incoming("bottom", len(section.bottom))),
        _mlp("top", top, last_relu=False, saved_input="interaction"),
        _loss(section.top[-1], _incoming("top", len(section.top))),
    )
    optimizer = job.train.optimizer
    return ModelSpec(
        kind="dlrm",
        tables=tables,
        units=(
            UnitSpec("bottom", mlp_tensors("bottom", bottom), optimizer),
            UnitSpec("top", mlp_tensors("top", top), optimizer),
        ),
        stages=stages,
        inputs=(
            Allocation("dense", "input", section.dense_features * FLOAT),
            Allocation("ids", "input", features * INDEX_BYTES),
            Allocation("labels", "input", FLOAT),
        ),
        buffers=pair_buffers(features) if section.interaction == "dot" else (),
    )


def interaction_width(features: int, dim: int, interaction: str) -> int:
    """Inputs of the top MLP."""
    if interaction == "dot":
        return dim + features * (features + 1) // 2
    return dim * (features + 1)


def pair_buffers(features: int) -> tuple[TensorSpec, ...]:
    """Row and column indices of the products below the diagonal."""
    pairs = features * (features + 1) // 2
    return (
        TensorSpec("pair_rows", (pairs,), "int64"),
        TensorSpec("pair_columns", (pairs,), "int64"),
    )


def mlp_tensors(name: str, widths: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    """Weights and biases of a Sequential of Linear and ReLU; a Linear sits at every even index."""
    tensors: list[TensorSpec] = []
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        tensors.append(TensorSpec(f"{name}.{2 * layer}.weight", (fan_out, fan_in)))
        tensors.append(TensorSpec(f"{name}.{2 * layer}.bias", (fan_out,)))
    return tuple(tensors)


def _resolved(table: TableSpec, job: Job) -> TableSpec:
    if table.optimizer not in (None, *RUNNABLE_OPTIMIZERS):
        raise InputError(
            expected(
                f"tables '{table.name}'.optimizer",
                f"one of {', '.join(RUNNABLE_OPTIMIZERS)} for dlrm",
                str(table.optimizer),
            )
        )
    for key, plain in PLAIN.items():
        if getattr(table, key) != plain:
            raise InputError(
                expected(
                    f"tables '{table.name}'.{key}",
                    "none for dlrm",
                    str(getattr(table, key)),
                    "Leave [model] out to plan the tables alone.",
                )
            )
    optimizer = table.optimizer or ("sgd" if job.train.optimizer == "sgd" else "rowwise_adagrad")
    return msgspec.structs.replace(table, fqn=f"tables.{table.name}.weight", optimizer=optimizer)


def _shared_dim(tables: tuple[TableSpec, ...], bottom: tuple[int, ...]) -> int:
    dim = tables[0].dim
    for table in tables:
        if table.dim != dim:
            raise InputError(
                expected(
                    f"tables '{table.name}'.dim",
                    f"{dim}, as the first table's",
                    str(table.dim),
                    "dlrm stacks all embeddings: give every table the same dim.",
                )
            )
    if not bottom or bottom[-1] != dim:
        raise InputError(
            expected(
                "model.bottom",
                f"{dim} as its last width, the tables' dim",
                str(bottom[-1]) if bottom else "no layer",
                f"Let model.bottom end with {dim}.",
            )
        )
    return dim


def _mlp(name: str, widths: tuple[int, ...], *, last_relu: bool, saved_input: str | None) -> Stage:
    """Linear keeps its input, ReLU its output; a linear output dies as soon as ReLU is done.

    ``saved_input`` names the allocation that the first layer keeps and needs a gradient for; None
    where the input is the batch, which needs none.
    """
    pairs = list(itertools.pairwise(widths))
    forward: list[Work] = []
    backward: list[Work] = []
    for layer, (fan_in, fan_out) in enumerate(pairs):
        relu = last_relu or layer < len(pairs) - 1
        flops = 2 * fan_in * fan_out
        linear = Allocation(f"{name}.{layer}.linear", "activation", fan_out * FLOAT)
        forward.append(Work(f"{name}.{layer}", flops, (linear,)))
        if relu:
            output = Allocation(f"{name}.{layer}.relu", "activation", fan_out * FLOAT)
            forward.append(Work(f"{name}.{layer}.relu", fan_out, (output,), (linear.name,)))
    for layer, (fan_in, fan_out) in reversed(list(enumerate(pairs))):
        relu = last_relu or layer < len(pairs) - 1
        incoming = _incoming(name, layer + 1)
        if relu:
            before = Allocation(f"gradient.{name}.{layer}.linear", "temporary", fan_out * FLOAT)
            done = (incoming, f"{name}.{layer}.relu")
            backward.append(Work(f"{name}.{layer}.relu", fan_out, (before,), done))
            incoming = before.name
        own = f"gradient.{name}.{layer}"  # parameters' gradients stay until the unit's is summed
        weight = Allocation(f"{own}.weight", "unreduced_gradient", 0, fan_in * fan_out * FLOAT)
        bias = Allocation(f"{own}.bias", "unreduced_gradient", 0, fan_out * FLOAT)
        takes = [weight, bias]
        flops = 2 * fan_in * fan_out
        if layer > 0 or saved_input:
            takes.append(Allocation(_incoming(name, layer), "temporary", fan_in * FLOAT))
            flops *= 2
        gone = [incoming]
        if not relu:
            gone.append(f"{name}.{layer}.linear")
        if layer == 0 and saved_input:
            gone.append(saved_input)
        backward.append(Work(f"{name}.{layer}", flops, tuple(takes), tuple(gone)))
    return Stage(name, "gather", tuple(forward), tuple(backward))


def _incoming(name: str, layer: int) -> str:
    """The gradient of what goes into layer ``layer``, or comes out of the one before it."""
    return f"gradient.{name}.{layer}"


def _interaction(features: int, dim: int, interaction: str, of_bottom: str) -> Stage:
    stacked = features + 1
    width = interaction_width(features, dim, interaction)
    pairs = features * stacked // 2
    rows = stacked * dim * FLOAT
    joined = Allocation("interaction", "activation", width * FLOAT)
    if interaction == "cat":
        flat = Allocation("interaction.flat", "activation", features * dim * FLOAT)
        joining = (
            Work("interaction.flat", 0, (flat,)),
            Work("interaction.cat", 0, (joined,), (flat.name, "rows")),
        )
        views = Allocation("gradient.stack", "temporary", rows)  # of the joined gradient
        splitting = (
            Work("interaction.cat", 0, (), (_incoming("top", 0),)),
            Work("interaction.views", 0, (views,)),
        )
        return Stage("interaction", "none", joining, splitting)
    stack = Allocation("interaction.stack", "activation", rows)
    products = Allocation("interaction.products", "temporary", stacked * stacked * FLOAT)
    lower = Allocation("interaction.pairs", "activation", pairs * FLOAT)
    forward = (
        Work("interaction.stack", 0, (stack,)),
        Work("interaction.bmm", 2 * stacked * stacked * dim, (products,)),
        Work("interaction.pairs", 0, (lower,), (products.name,)),
        Work("interaction.cat", 0, (joined,), (lower.name, "rows")),
    )
    of_products = Allocation("gradient.products", "temporary", stacked * stacked * FLOAT)
    of_stack = Allocation("gradient.stack", "temporary", rows)
    other = Allocation("gradient.stack.other", "temporary", rows)
    of_dense = Allocation(of_bottom, "temporary", dim * FLOAT)
    backward = (
        Work("interaction.pairs", 0, (of_products,)),
        Work(
            "interaction.bmm",
            4 * stacked * stacked * dim,
            (of_stack, other),
            (of_products.name, other.name, stack.name),
        ),
        Work("interaction.stack", 0, (of_dense,), (_incoming("top", 0),)),
    )
    return Stage("interaction", "none", forward, backward)


def _loss(outputs: int, of_top: str) -> Stage:
    gradient = Allocation(of_top, "temporary", outputs * FLOAT)
    forward = (Work("loss", 10 * outputs, (Allocation("loss", "output", 0, FLOAT),)),)
    backward = (Work("loss", 10 * outputs, (gradient,)),)
    return Stage("loss", "none", forward, backward)
