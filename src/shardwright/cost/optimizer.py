"""Bytes of optimizer state, as the runtime's optimizers allocate them."""

from __future__ import annotations

from typing import Any

from shardwright.core.amount import named, noted

# fp32 values per row of a table: a fused SGD keeps none, row-wise Adagrad one sum of squares.
TABLE_STATE_BYTES_PER_ROW = {"sgd": 0, "rowwise_adagrad": 4}

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
