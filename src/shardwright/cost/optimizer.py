"""Bytes of optimizer state, as the runtime's optimizers allocate them, and what an update moves."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from shardwright.core.amount import named, noted
from shardwright.core.optimizer_states import Elements, single
from shardwright.core.optimizer_states import rows as by_row
from shardwright.core.optimizers import OPTIMIZERS
from shardwright.core.tensor import element_bytes

# An update reads parameter and gradient and writes the parameter; every state is read and written.
PARAMETER_PASSES = 3
STATE_PASSES = 2


def dense_state_bytes(
    weight_bytes: Any, kind: str, tensors: int = 1, elements: Elements | None = None
) -> Any:
    """Bytes of state for ``tensors`` flat ones of ``weight_bytes`` together, padding apart; where
    an optimizer quantizes some, for these ``elements``."""
    source = f"optimizer {kind}"
    states = _averages_bytes(weight_bytes, kind, elements)
    # A counter of steps is one number for each tensor that the optimizer is given, so a unit that
    # is cut into several flat tensors has as many.
    numbers = [state for state in OPTIMIZERS[kind].kept if state.elements is single]
    nbytes = tensors * sum(element_bytes(state.dtype) for state in numbers)
    step = noted(nbytes, "step_counter_bytes", "B", source, like=weight_bytes)
    return named("optimizer_state_bytes", states + step, "B")


def dense_padding_state_bytes(
    padding_bytes: Any, kind: str, elements: Elements | None = None
) -> Any:
    """Bytes of state that belong to padding, which may have such ``elements``."""
    return _averages_bytes(padding_bytes, kind, elements)


def _averages_bytes(weight_bytes: Any, kind: str, elements: Elements | None) -> Any:
    """Bytes of states as large as ``weight_bytes``; or for every average of whole ``elements`` in
    fp32, of the others a code of one byte, and an fp32 scale for each of their blocks."""
    row, source = OPTIMIZERS[kind], f"optimizer {kind}"
    if elements is None or not row.quantized:
        states = row.values_per_element + row.quantized
        return weight_bytes * noted(states, "states_per_element", "", source, like=weight_bytes)
    like = weight_bytes
    value = noted(element_bytes("fp32"), "value_bytes", "B", "fp32", like=like)
    code = noted(element_bytes("uint8"), "code_bytes", "B", "uint8", like=like)
    states = noted(row.quantized, "states_per_element", "", source, like=like)
    each = elements.whole * value + elements.quantized * code + elements.blocks * value
    return states * each


def dense_update_bytes(weight_bytes: Any, kind: str, *, on_host: bool = False) -> Any:
    """Bytes that an update of ``weight_bytes`` reads and writes, on an accelerator or ``on_host``;
    what computes more than it moves takes as long as one of so many."""
    row = OPTIMIZERS[kind]
    own = row.host_passes if on_host else row.passes
    passes = own or PARAMETER_PASSES + STATE_PASSES * row.values_per_element
    what = "read parameter and gradient, write parameter; read and write each state"
    if own:
        what = "as measured on a core" if on_host else "what its kernels read and write"
    return weight_bytes * noted(passes, "update_passes", "", what, like=weight_bytes)


LIKE = {"partial_rowwise_adam": "adagrad"}  # of which a row is touched as often: one wide state


def table_state_bytes(rows: Any, columns: Any, kind: str) -> Any:
    """Bytes of state for a shard of a table, which is fp32 whatever the table is."""
    source, size = f"optimizer {kind}", element_bytes("fp32")
    per_element = OPTIMIZERS[kind].values_per_element * size
    per_row = sum(state.elements is by_row for state in OPTIMIZERS[kind].kept) * size
    parts: list[Any] = []
    if per_element:
        each = noted(per_element, "state_bytes_per_element", "B", source, like=rows)
        parts.append(rows * columns * each)
    if per_row or not per_element:
        parts.append(rows * noted(per_row, "state_bytes_per_row", "B", source, like=rows))
    return named("optimizer_state_bytes", reduce(add, parts), "B")


def table_passes(kind: str, c: Any, like: Any) -> Any:
    """How many touches of a row its update costs; none without an optimizer."""
    if kind == "none":
        return noted(0, "update_passes", "touches", "no optimizer", like=like)
    return c[f"{LIKE.get(kind, kind)}_passes"]
