"""Bytes of optimizer state, as the runtime's optimizers allocate them, and passes of an update."""

from __future__ import annotations

from typing import Any

from shardwright.core.amount import named, noted

# A fused SGD keeps nothing of a table, row-wise Adagrad one fp32 sum of squares per row of each
# shard; Adagrad keeps one fp32 per element, Adam two.
TABLE_STATE_BYTES_PER_ROW = {"none": 0, "sgd": 0, "rowwise_adagrad": 4}
TABLE_STATE_BYTES_PER_ELEMENT = {"adagrad": 4, "adam": 8}

# Values per element and one step counter per flat tensor (torch.optim keeps it as an fp32 tensor).
DENSE_STATES_PER_ELEMENT = {"sgd": 0, "adagrad": 1, "adam": 2}
DENSE_STEP_BYTES = {"sgd": 0, "adagrad": 4, "adam": 4}


def dense_state_bytes(weight_bytes: Any, kind: str) -> Any:
    """Bytes of state for one flat tensor of ``weight_bytes``, padding apart."""
    source = f"optimizer {kind}"
    states = noted(
        DENSE_STATES_PER_ELEMENT[kind], "states_per_element", "", source, like=weight_bytes
    )
    step = noted(DENSE_STEP_BYTES[kind], "step_counter_bytes", "B", source, like=weight_bytes)
    return named("optimizer_state_bytes", weight_bytes * states + step, "B")


def dense_padding_state_bytes(padding_bytes: Any, kind: str) -> Any:
    """Bytes of state that belong to padding."""
    return padding_bytes * DENSE_STATES_PER_ELEMENT[kind]


def table_state_bytes(rows: Any, columns: Any, kind: str) -> Any:
    """Bytes of state for a shard of a table."""
    source = f"optimizer {kind}"
    if kind in TABLE_STATE_BYTES_PER_ELEMENT:
        size = TABLE_STATE_BYTES_PER_ELEMENT[kind]
        per_element = noted(size, "state_bytes_per_element", "B", source, like=rows)
        return named("optimizer_state_bytes", rows * columns * per_element, "B")
    size = TABLE_STATE_BYTES_PER_ROW[kind]
    per_row = noted(size, "state_bytes_per_row", "B", source, like=rows)
    return named("optimizer_state_bytes", rows * per_row, "B")


def table_passes(kind: str, c: Any, like: Any) -> Any:
    """How many touches of a row its update costs; none without an optimizer."""
    if kind == "none":
        return noted(0, "update_passes", "touches", "no optimizer", like=like)
    return c[f"{kind}_passes"]
