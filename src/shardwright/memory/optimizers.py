"""What an optimizer keeps for a tensor, state by state, in bytes.

The rules are those of ``torch.optim`` (read and measured with torch 2.13), of torchao's and
bitsandbytes' 8-bit Adam, and of the fp32 copies of mixed-precision training as in Megatron-LM. A
tensor is what a rank holds of a parameter, with its local shape.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from shardwright.core.errors import InputError, UnsupportedError, expected
from shardwright.core.tensor import TensorSpec, element_bytes
from shardwright.cost.optimizer import DENSE_STATES_PER_ELEMENT, DENSE_STEP_BYTES

Method = Literal["sgd", "adam", "adagrad", "adafactor", "muon"]
Implementation = Literal["for_loop", "foreach", "fused"]
Library = Literal["torch", "torchao", "bitsandbytes"]
Place = Literal["device", "host"]

IMPLEMENTATIONS: tuple[Implementation, ...] = ("for_loop", "foreach", "fused")

# torchao/optim/adam.py and bitsandbytes/optim/optimizer.py: tensors of fewer elements keep whole
# states. torchao keeps them as well where the blocks do not divide the tensor.
MIN_8BIT_ELEMENTS = 4096
BLOCK_ELEMENTS = {"torchao": 256, "bitsandbytes": 256}  # early bitsandbytes: 2048
SCALE_BYTES = 4  # one fp32 per block
CODE_BYTES = 256 * 4  # the fp32 values of the 256 codes; torchao has its own with every state

ASSUMPTIONS: dict[str, str] = {
    "muon": "Muon takes the matrices that are neither embedding nor output layer, AdamW the rest",
    "torchao": "the compiled 8-bit update keeps nothing between its kernels",
    "offload": "states on the host are updated there; no buffer on the device",
}


class State(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of state: an allocation of its own."""

    name: str
    bytes: int
    place: Place = "device"


class OptimizerRule(msgspec.Struct, frozen=True):
    """An optimizer, as far as its memory goes.

    ``state_dtype`` is that of the averages (that of the gradient where empty). With ``master``
    parameters of less than fp32 have an fp32 copy, which is what is updated. With ``offload`` all
    of it lives on the host. ``coupled_decay`` is a weight decay that is added to the gradient;
    decoupled decay takes no memory.
    """

    method: Method
    implementation: Implementation = "foreach"
    momentum: bool = False
    nesterov: bool = False
    coupled_decay: bool = False
    amsgrad: bool = False
    state_dtype: str = ""
    library: Library = "torch"
    master: bool = False
    offload: bool = False

    def value_bytes(self, tensor: TensorSpec) -> int:
        """Bytes of an element of an average."""
        return element_bytes(self.state_dtype or self.updated_dtype(tensor))

    def updated_dtype(self, tensor: TensorSpec) -> str:
        """The dtype of what the step updates: the parameter or its fp32 copy."""
        return "fp32" if self.master else tensor.dtype

    def of(self, tensor: TensorSpec) -> OptimizerRule:
        """The rule that updates ``tensor``: Muon leaves some to AdamW."""
        if self.method == "muon" and not orthogonalized(tensor):
            return msgspec.structs.replace(self, method="adam", momentum=False)
        return self

    def assumptions(self) -> tuple[str, ...]:
        """What is taken for granted about this optimizer."""
        named = {"muon": self.method == "muon", "torchao": self.library == "torchao"}
        named["offload"] = self.offload
        return tuple(ASSUMPTIONS[name] for name, holds in named.items() if holds)


OPTIMIZERS: dict[str, OptimizerRule] = {
    "sgd": OptimizerRule("sgd"),
    "sgd_momentum": OptimizerRule("sgd", momentum=True),
    "adam": OptimizerRule("adam"),
    "adamw": OptimizerRule("adam"),
    "adamw_bf16": OptimizerRule("adam", state_dtype="bf16"),
    "adamw_8bit": OptimizerRule("adam", implementation="fused", library="torchao"),
    "adamw_8bit_bitsandbytes": OptimizerRule(
        "adam", implementation="fused", library="bitsandbytes"
    ),
    "muon": OptimizerRule("muon", momentum=True, nesterov=True),
    "adafactor": OptimizerRule("adafactor", implementation="for_loop"),
    "adagrad": OptimizerRule("adagrad"),
}


def optimizer_rule(
    name: str,
    implementation: str = "",
    *,
    master: bool = False,
    offload: bool = False,
) -> OptimizerRule:
    """The rule of a name as a job writes it.

    Without an implementation it is PyTorch's on a CUDA device: lists (``foreach``) where it has
    them. Raises InputError for an unknown name, UnsupportedError for a pair that does not exist.
    """
    if name not in OPTIMIZERS:
        names = ", ".join(OPTIMIZERS)
        raise InputError(expected("[memory] optimizer", f"one of {names}", f"'{name}'"))
    rule = OPTIMIZERS[name]
    if implementation:
        rule = _implemented(name, rule, implementation)
    if rule.library != "torch" and master:
        raise UnsupportedError(
            expected(
                "[memory] optimizer",
                "an optimizer that can update an fp32 copy of the parameters",
                f"'{name}'",
                "Keep the parameters in fp32 or take adamw.",
            )
        )
    return msgspec.structs.replace(rule, master=master, offload=offload)


def _implemented(name: str, rule: OptimizerRule, implementation: str) -> OptimizerRule:
    where = "[memory] optimizer implementation"
    for known in IMPLEMENTATIONS:
        if known != implementation:
            continue
        lacking = {"adafactor": "fused", "muon": "fused"}.get(rule.method) == known
        if lacking or (rule.library != "torch" and known != "fused"):
            remedy = "Leave it out, for there is only one."
            raise UnsupportedError(expected(where, f"one that {name} has", f"'{known}'", remedy))
        return msgspec.structs.replace(rule, implementation=known)
    names = ", ".join(IMPLEMENTATIONS)
    raise InputError(expected(where, f"one of {names}", f"'{implementation}'"))


def orthogonalized(tensor: TensorSpec) -> bool:
    """Whether Muon takes a tensor: a matrix of a hidden layer, going by its name."""
    parts = tensor.fqn.split(".")
    apart = parts[0] in ("output", "head") or any(p == "lm_head" or "embed" in p for p in parts)
    return len(tensor.shape) == 2 and not apart


def states(rule: OptimizerRule, tensor: TensorSpec) -> tuple[State, ...]:
    """Every tensor that is kept for ``tensor``, as the first step makes them."""
    rule = rule.of(tensor)
    kept = [*_counter(rule), *_averages(rule, tensor)]
    if rule.master and element_bytes(tensor.dtype) < element_bytes("fp32"):
        kept.append(State("master", tensor.numel * element_bytes("fp32")))
    if rule.offload:
        kept = [State(each.name, each.bytes, "host") for each in kept]
    return tuple(kept)


def state_bytes(rule: OptimizerRule, tensor: TensorSpec, place: Place = "device") -> int:
    """Bytes that are kept for ``tensor`` in one place."""
    return sum(each.bytes for each in states(rule, tensor) if each.place == place)


def shared_state_bytes(rule: OptimizerRule) -> int:
    """Bytes that are kept once for all tensors: what bitsandbytes' two kinds of codes stand for."""
    return 2 * CODE_BYTES if rule.library == "bitsandbytes" else 0


def _counter(rule: OptimizerRule) -> list[State]:
    """The number of steps: an fp32 tensor per parameter, which only fused kernels read on the
    device. The optimizers of mixed precision and bitsandbytes have a plain number instead."""
    if rule.method in ("sgd", "muon") or rule.master or rule.library == "bitsandbytes":
        return []
    on_device = rule.implementation == "fused" and rule.library == "torch"
    return [State("step", DENSE_STEP_BYTES["adam"], "device" if on_device else "host")]


def _averages(rule: OptimizerRule, tensor: TensorSpec) -> list[State]:
    whole = tensor.numel * rule.value_bytes(tensor)
    if rule.method in ("sgd", "muon"):
        return [State("momentum_buffer", whole)] if rule.momentum else []
    if rule.method == "adagrad":
        return [State("sum", DENSE_STATES_PER_ELEMENT["adagrad"] * whole)]
    if rule.method == "adafactor":
        return _factors(tensor, rule.value_bytes(tensor))
    names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if rule.amsgrad else [])]
    assert len(names) == DENSE_STATES_PER_ELEMENT["adam"] + rule.amsgrad
    if rule.library == "torch":
        return [State(name, whole) for name in names]
    return [each for name in names for each in _quantized(rule, tensor, name)]


def factor_elements(shape: tuple[int, ...]) -> tuple[int, int]:
    """Elements of Adafactor's row and column factors, over the last two dimensions."""
    numel = math.prod(shape)
    return (numel // shape[-1], numel // shape[-2]) if numel else (0, 0)


def _factors(tensor: TensorSpec, size: int) -> list[State]:
    if len(tensor.shape) < 2:
        return [State("variance", tensor.numel * size)]
    rows, columns = factor_elements(tensor.shape)
    return [State("row_var", rows * size), State("col_var", columns * size)]


def _quantized(rule: OptimizerRule, tensor: TensorSpec, name: str) -> list[State]:
    """An average in one byte per element, with a scale per block."""
    numel, block = tensor.numel, BLOCK_ELEMENTS[rule.library]
    uneven = rule.library == "torchao" and numel % block
    if numel < MIN_8BIT_ELEMENTS or uneven:
        # bitsandbytes keeps fp32 whatever the parameter, torchao the parameter's dtype
        dtype = "fp32" if rule.library == "bitsandbytes" else tensor.dtype
        return [State(name, numel * element_bytes(dtype))]
    kept = [State(name, numel), State(f"{name}_scale", -(-numel // block) * SCALE_BYTES)]
    if rule.library == "torchao":
        kept.append(State(f"{name}_codes", CODE_BYTES))
    return kept
