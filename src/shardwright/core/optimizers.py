"""The optimizers: what each keeps for a tensor, what its step takes, and how it is made.

One row of ``OPTIMIZERS`` is all that the planner, the estimator, a run and ``fit`` know of an
optimizer. Rules are those of ``torch.optim`` (read and measured with torch 2.13), of torchao's and
of bitsandbytes' 8-bit Adam. A tensor is what a rank holds of a parameter, with its local shape.
"""

# A step is written as the local names of torch's own code, because that is what decides the peak:
# a list that is still bound while the next one is made counts twice, and Python frees at the
# rebinding, not at the last use. So rows bind, drop and move names in the order of torch's source,
# and tests hold them to the real optimizers under the tracker.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from shardwright.core.errors import InputError, UnsupportedError, not_one_of
from shardwright.core.optimizer_states import (
    BLOCK_ELEMENTS,
    CODES,
    COUNTER,
    HOST_UPDATE_PASSES,
    UPDATE_PASSES,
    OptimizerState,
    columns,
    eight_bit,
    room_of,
    rows,
    single,
    vector,
    whole,
)
from shardwright.core.tensor import TensorSpec, element_bytes

Implementation = Literal["foreach", "fused", "for_loop"]


# ---- steps ---------------------------------------------------------------------------------------


class Names(Protocol):
    """The local names of a step: each holds one tensor or one list of them."""

    def bind(self, name: str, *sizes: int) -> None:
        """Make tensors of so many bytes, then let the name hold them instead of what it held."""

    def drop(self, name: str) -> None:
        """The name holds nothing any more."""

    def move(self, name: str, to: str) -> None:
        """What ``name`` holds is held by ``to`` instead of what that held."""

    def passing(self, name: str, size: int) -> None:
        """A tensor that an expression makes and no name holds."""


Step = Callable[["Optimizer", Sequence[TensorSpec], Names], None]


@dataclass(frozen=True, slots=True, eq=False)
class Optimizer:
    """A row of the table.

    ``make`` is the class ("module:Class"), called with parameters, ``lr`` and ``settings``; "" of
    what is estimated alone. ``steps`` has what each implementation takes, PyTorch's choice on a
    CUDA device first. ``elementwise`` optimizers update every element alone, so flat tensors too;
    others may update ``block`` elements together, so flat tensors that are cut between blocks.
    An update of more than one kernel takes as long as so many ``passes`` over the weight in fp32,
    and as ``host_passes`` on the host; another one reads and writes once what there is.
    Beside other runtimes than ours one is ``elsewhere`` another.
    One that ``takes`` some tensors alone leaves the others to ``rest``. ``decoupled`` weight decay
    takes no memory, another one a copy of the gradient. ``shared_bytes`` are kept once for all
    tensors; ``smaller`` is the optimizer of the same update that keeps less.

    A job chooses the ``implementation`` (the first one where it is None) and the place: with
    ``offload`` states live, and are updated, on the host, which is not the device ``on_gpu``.
    """

    name: str
    make: str = ""
    states: tuple[OptimizerState, ...] = ()
    steps: Mapping[Implementation, Step] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    state_dtype: str = ""
    elementwise: bool = True
    block: int = 1
    passes: int = 0
    host_passes: int = 0
    elsewhere: str = ""
    decoupled: bool = False
    takes: Callable[[TensorSpec], bool] | None = None
    rest: str = ""
    tables: bool = False
    smaller: str = ""
    shared_bytes: int = 0
    assumption: str = ""
    implementation: Implementation | None = None
    offload: bool = False
    on_gpu: bool = False

    @property
    def first(self) -> Implementation:
        """PyTorch's choice among its implementations."""
        return next(iter(self.steps))

    @property
    def runs(self) -> Implementation:
        """How a run has it: fused where it can be."""
        return "fused" if "fused" in self.steps else self.first

    @property
    def step(self) -> Step:
        """What a step takes under the implementation that was chosen."""
        return self.steps[self.implementation or self.first]

    @property
    def fused(self) -> bool:
        """Whether a step is one kernel."""
        return self.step is nothing

    def of(self, tensor: TensorSpec) -> Optimizer:
        """The optimizer that updates ``tensor``: Muon leaves some to AdamW."""
        if self.takes is None or self.takes(tensor):
            return self
        rest = OPTIMIZERS[self.rest]
        return replace(rest, implementation=self.implementation, offload=self.offload)

    @property
    def beside_others(self) -> Optimizer:
        """What another runtime than ours has of the same update."""
        if not self.elsewhere:
            return self
        other = OPTIMIZERS[self.elsewhere]
        text = f"{self.name} is {other.name}: ours updates units of our own runtime"
        assumption = "; ".join(filter(None, (text, other.assumption)))
        return replace(
            other, implementation=self.implementation, offload=self.offload, assumption=assumption
        )

    def assumptions(self) -> tuple[str, ...]:
        """What is taken for granted about it."""
        offloaded = "states on the host are updated there; no buffer on the device"
        return tuple(a for a in (self.assumption, offloaded if self.offload else "") if a)

    def value_dtype(self, tensor: TensorSpec) -> str:
        """The dtype of an average: the optimizer's own, or that of the tensor."""
        return self.state_dtype or tensor.dtype

    def value_bytes(self, tensor: TensorSpec) -> int:
        """Bytes of a tensor of averages."""
        return tensor.numel * element_bytes(self.value_dtype(tensor))

    @property
    def kept(self) -> tuple[OptimizerState, ...]:
        """The states that its settings ask for."""
        return tuple(s for s in self.states if not s.when or self.settings.get(s.when))

    @property
    def values_per_element(self) -> int:
        """States as large as the parameter."""
        return sum(state.elements is whole for state in self.kept)

    @property
    def quantized(self) -> int:
        """Averages that are codes of large tensors, and whole ones of others."""
        return sum(state.dtype == "uint8" for state in self.kept)

    @property
    def copies_gradient(self) -> bool:
        """Whether a weight decay is added to the gradient."""
        return bool(self.settings.get("weight_decay")) and not self.decoupled

    @property
    def trains_shards(self) -> bool:
        """Whether a run can give it the flat tensors of sharded units."""
        together = self.elementwise or self.block > 1
        return bool(self.make) and together and not self.state_dtype


def each(step: Callable[[Optimizer, TensorSpec, Names], None]) -> Step:
    """A step over one tensor after the other; its names outlive the pass."""

    def over(optimizer: Optimizer, tensors: Sequence[TensorSpec], names: Names) -> None:
        for tensor in tensors:
            step(optimizer, tensor, names)

    return over


def alike(step: Step, *, ranks: bool = False) -> Step:
    """A step over lists of one dtype each, of matrices or of vectors alone where ``ranks``."""

    def over(optimizer: Optimizer, tensors: Sequence[TensorSpec], names: Names) -> None:
        # Lists of one dtype, since foreach kernels take no others.
        found: dict[tuple[str, bool], list[TensorSpec]] = {}
        for tensor in tensors:
            matrix = ranks and len(tensor.shape) > 1
            found.setdefault((tensor.dtype, matrix), []).append(tensor)
        # As torch groups lists: dtypes in the order in which they first come, matrices before
        # vectors. Which list is stepped last decides what is still bound when a peak is reached.
        order = {dtype: place for place, (dtype, _) in reversed(list(enumerate(found)))}
        for key in sorted(found, key=lambda key: (order[key[0]], not key[1])):
            step(optimizer, found[key], names)

    return over


def nothing(optimizer: Optimizer, tensors: Sequence[TensorSpec], names: Names) -> None:
    """A fused kernel takes nothing."""


def _values(optimizer: Optimizer, tensors: Iterable[TensorSpec]) -> list[int]:
    return [optimizer.value_bytes(tensor) for tensor in tensors]


def _sgd(optimizer: Optimizer, tensor: TensorSpec, names: Names) -> None:
    names.drop("grad")
    if optimizer.copies_gradient:
        names.bind("grad", tensor.nbytes)
    if optimizer.settings.get("nesterov"):
        names.bind("grad", tensor.nbytes)
    elif optimizer.settings.get("momentum"):
        names.drop("grad")


def _sgd_lists(optimizer: Optimizer, tensors: Sequence[TensorSpec], names: Names) -> None:
    names.drop("grads")
    if optimizer.copies_gradient:
        names.bind("grads", *(tensor.nbytes for tensor in tensors))
    if optimizer.settings.get("momentum") and not optimizer.settings.get("nesterov"):
        names.drop("grads")


def _adam(optimizer: Optimizer, tensor: TensorSpec, names: Names) -> None:
    names.drop("grad")
    if optimizer.copies_gradient:
        names.bind("grad", tensor.nbytes)
    names.bind("root", optimizer.value_bytes(tensor))
    names.bind("denom", optimizer.value_bytes(tensor))
    names.drop("root")


def _adam_lists(optimizer: Optimizer, tensors: Sequence[TensorSpec], names: Names) -> None:
    if optimizer.copies_gradient:
        names.bind("grads", *(tensor.nbytes for tensor in tensors))
        names.drop("grads")
    names.bind("exp_avg_sq_sqrt", *_values(optimizer, tensors))


def _adagrad(optimizer: Optimizer, tensor: TensorSpec, names: Names) -> None:
    names.drop("grad")
    if optimizer.copies_gradient:
        names.bind("grad", tensor.nbytes)
    names.bind("std", optimizer.value_bytes(tensor))


def _adagrad_lists(optimizer: Optimizer, tensors: Sequence[TensorSpec], names: Names) -> None:
    if optimizer.copies_gradient:
        names.bind("grads", *(tensor.nbytes for tensor in tensors))
    names.bind("std", *_values(optimizer, tensors))
    if optimizer.copies_gradient:
        names.move("grads", "numerator")
    else:
        names.bind("numerator", *_values(optimizer, tensors))


def _adafactor(optimizer: Optimizer, tensor: TensorSpec, names: Names) -> None:
    item, numel = element_bytes(tensor.dtype), tensor.numel
    names.passing("norm", item)
    over_rows, over_columns = rows(tensor), columns(tensor)
    if over_rows is None or over_columns is None:
        names.bind("grad_squared", numel * item)
        names.bind("var_estimate", numel * item)
    else:
        names.bind("row_mean", over_rows * item)
        names.bind("col_mean", over_columns * item)
        names.bind("var_estimate", numel * item)
        names.passing("mean", over_rows // max(1, tensor.shape[-2]) * item)
    names.move("var_estimate", "update")
    names.passing("norm", item)


def _adafactor_lists(optimizer: Optimizer, tensors: Sequence[TensorSpec], names: Names) -> None:
    item = element_bytes(tensors[0].dtype)
    sizes = [tensor.nbytes for tensor in tensors]
    for _ in tensors:
        names.passing("norm", item)
    if len(tensors[0].shape) > 1:
        over_rows = [rows(tensor) or 0 for tensor in tensors]
        names.bind("row_means", *(count * item for count in over_rows))
        names.drop("row_means")
        names.bind("col_means", *((columns(tensor) or 0) * item for tensor in tensors))
        names.drop("col_means")
        names.bind("var_estimates", *sizes)
        both = zip(tensors, over_rows, strict=True)
        names.bind("means", *(count // max(1, t.shape[-2]) * item for t, count in both))
        names.drop("means")
    else:
        names.bind("grads_squared", *sizes)
        names.drop("grads_squared")
        names.bind("var_estimates", *sizes)
    names.move("var_estimates", "updates")
    for _ in tensors:
        names.passing("norm", item)


def _in_blocks(optimizer: Optimizer, tensors: Sequence[TensorSpec], names: Names) -> None:
    """Buffers of a chunk, which all tensors share."""
    for name, size in room_of(tensors, optimizer.block, on_gpu=optimizer.on_gpu).items():
        names.bind(name, size)


NEWTON_SCHULZ_STEPS = 5  # torch.optim.Muon's default
NEWTON_SCHULZ_DTYPE = "bf16"


def _muon(optimizer: Optimizer, tensor: TensorSpec, names: Names) -> None:
    """A matrix at a time: its update, made orthogonal by Newton-Schulz iterations in bf16."""
    names.bind("update", tensor.nbytes)
    item = element_bytes(NEWTON_SCHULZ_DTYPE)
    if tensor.dtype != NEWTON_SCHULZ_DTYPE:
        names.bind("ortho_grad", tensor.numel * item)
    names.bind("norm", item)
    names.passing("clamped", item)
    names.drop("norm")
    gram = min(tensor.shape) ** 2 * item
    for _ in range(NEWTON_SCHULZ_STEPS):
        names.bind("gram_matrix", gram)
        names.bind("gram_update", gram)
        names.bind("ortho_grad", tensor.numel * item)
    names.drop("gram_matrix")
    names.drop("gram_update")
    names.move("ortho_grad", "update")


def orthogonalized(tensor: TensorSpec) -> bool:
    """Whether Muon takes a tensor: a matrix of a hidden layer, going by its name."""
    parts = tensor.fqn.split(".")
    apart = parts[0] in ("output", "head") or any(p == "lm_head" or "embed" in p for p in parts)
    return len(tensor.shape) == 2 and not apart


# ---- the table -----------------------------------------------------------------------------------

_AVERAGES = (
    OptimizerState("exp_avg"),
    OptimizerState("exp_avg_sq"),
    OptimizerState("max_exp_avg_sq", when="amsgrad"),
)
_ADAM: dict[Implementation, Step] = {
    "foreach": alike(_adam_lists),
    "for_loop": each(_adam),
    "fused": nothing,
}
_SGD = Optimizer(
    "sgd",
    "torch.optim:SGD",
    states=(OptimizerState("momentum_buffer", when="momentum"),),
    steps={"foreach": alike(_sgd_lists), "for_loop": each(_sgd), "fused": nothing},
    tables=True,
)
_ADAMW = Optimizer(
    "adamw",
    "torch.optim:AdamW",
    states=(COUNTER, *_AVERAGES),
    steps=_ADAM,
    decoupled=True,
    smaller="adamw_8bit",
)
_ROWS = (
    Optimizer("none", tables=True),
    _SGD,
    replace(_SGD, name="sgd_momentum", settings={"momentum": 0.9}, tables=False),
    replace(_ADAMW, name="adam", make="torch.optim:Adam", decoupled=False, tables=True),
    _ADAMW,
    replace(_ADAMW, name="adamw_bf16", make="", state_dtype="bf16"),
    Optimizer(
        "adamw_8bit",
        "shardwright.runtime.adamw_8bit:AdamW8bit",
        states=(
            OptimizerState("step", single, "fp32"),
            *eight_bit("exp_avg", even=False, otherwise="fp32", codes=False),
            *eight_bit("exp_avg_sq", even=False, otherwise="fp32", codes=False),
        ),
        steps={"fused": _in_blocks},
        elementwise=False,
        block=BLOCK_ELEMENTS,
        passes=UPDATE_PASSES,
        host_passes=HOST_UPDATE_PASSES,
        elsewhere="adamw_8bit_torchao",
        decoupled=True,
    ),
    Optimizer(
        "adamw_8bit_torchao",
        states=(
            OptimizerState("step", single, "fp32", place="host"),
            *eight_bit("exp_avg", even=True, otherwise="", codes=True),
            *eight_bit("exp_avg_sq", even=True, otherwise="", codes=True),
        ),
        steps={"fused": nothing},
        elementwise=False,
        assumption="the compiled 8-bit update keeps nothing between its kernels",
    ),
    Optimizer(
        "adamw_8bit_bitsandbytes",  # counts steps in a plain number, has two kinds of codes for all
        states=(
            *eight_bit("exp_avg", even=False, otherwise="fp32", codes=False),
            *eight_bit("exp_avg_sq", even=False, otherwise="fp32", codes=False),
        ),
        steps={"fused": nothing},
        elementwise=False,
        shared_bytes=2 * CODES * element_bytes("fp32"),
    ),
    Optimizer(
        "muon",
        "torch.optim:Muon",
        states=(OptimizerState("momentum_buffer"),),
        steps={"foreach": each(_muon), "for_loop": each(_muon)},
        elementwise=False,
        takes=orthogonalized,
        rest="adamw",
        assumption=(
            "Muon takes the matrices that are neither embedding nor output layer, AdamW the rest"
        ),
    ),
    Optimizer(
        "adafactor",
        "torch.optim:Adafactor",
        states=(
            COUNTER,
            OptimizerState("variance", vector),
            OptimizerState("row_var", rows),
            OptimizerState("col_var", columns),
        ),
        steps={"for_loop": each(_adafactor), "foreach": alike(_adafactor_lists, ranks=True)},
        elementwise=False,
    ),
    Optimizer(
        "adagrad",
        "torch.optim:Adagrad",
        states=(COUNTER, OptimizerState("sum")),
        steps={"foreach": alike(_adagrad_lists), "for_loop": each(_adagrad), "fused": nothing},
        tables=True,
    ),
    Optimizer("rowwise_adagrad", states=(OptimizerState("sum", rows),), tables=True),
    Optimizer(
        "partial_rowwise_adam",
        states=(OptimizerState("exp_avg"), OptimizerState("exp_avg_sq", rows)),
        tables=True,
    ),
)
OPTIMIZERS = {row.name: row for row in _ROWS}
DENSE = tuple(row.name for row in _ROWS if row.steps)
TABLES = tuple(row.name for row in _ROWS if row.tables)
MADE = tuple(row.name for row in _ROWS if row.make and not row.rest)
TRAINED = tuple(row.name for row in _ROWS if row.trains_shards)

UPDATED = tuple(name for name in TABLES if name != "none")  # what a run does to rows
BY_ROW = tuple(
    row.name for row in _ROWS if row.tables and any(s.elements is rows for s in row.states)
)

if TYPE_CHECKING:
    OptimizerName: TypeAlias = str
    TableOptimizer: TypeAlias = str
    TableUpdate: TypeAlias = str
else:  # what a job may say; errors list the names
    OptimizerName, TableOptimizer = Literal[DENSE], Literal[TABLES]
    TableUpdate = Literal[UPDATED]


def optimizer_named(
    name: str,
    implementation: Implementation | None = None,
    *,
    offload: bool = False,
    among: Sequence[str] = DENSE,
) -> Optimizer:
    """The optimizer of a name as a job writes it.

    Raises InputError for a name that is not ``among`` the known ones, UnsupportedError for an
    implementation that it does not have.
    """
    if name not in among:
        raise InputError(not_one_of("train.optimizer", name, among))
    row = OPTIMIZERS[name]
    if implementation and implementation not in row.steps:
        wanted = f"one that {name} has: {', '.join(row.steps)}"
        raise UnsupportedError("memory.implementation", wanted, f"'{implementation}'")
    return replace(row, implementation=implementation, offload=offload)


def trained(name: str) -> Optimizer:
    """The optimizer as a run has it; InputError where none has."""
    row = optimizer_named(name, among=TRAINED)
    return replace(row, implementation=row.runs)
