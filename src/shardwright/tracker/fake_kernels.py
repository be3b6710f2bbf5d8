"""Results that torch's fake kernels give no memory, as large as the real kernels make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwright.tracker.private import FakeTensor, OpOverload, operator_name

PAGE = 4096  # oneDNN cuts its workspace by pages
LINE, ALIASED = 16, 256  # floats in a cache line; rows of a multiple of these get a line more
STATES, CELLS, GATES = 3, 2, 4  # buffers of an LSTM: over both widths, over its own; its gates


def complete(function: OpOverload, arguments: Sequence[Any], result: Any) -> None:
    """Give the results of a fake kernel the memory that the real one's have."""
    known = _WORKSPACES.get(operator_name(function))
    if known is None or not isinstance(result[known[0]], FakeTensor):
        return
    storage = result[known[0]].untyped_storage()
    if not storage.nbytes():
        storage.resize_(known[1](arguments))


def lstm_workspace(arguments: Sequence[Any]) -> int:
    """Bytes of the workspace of oneDNN's LSTM layer in fp32 (3.x, AVX2; ``set_offsets`` and
    ``init_conf`` of its src/cpu/rnn/rnn_utils): gates, states, cells and the gradients' places."""
    inputs, hidden = arguments[0], int(arguments[10])
    steps, samples, wide = inputs.shape  # also where the module's own are batch first
    training = arguments[15]
    rows = samples * torch.float32.itemsize
    sizes = [
        steps * rows * _padded(GATES * hidden),
        steps * rows * _padded(hidden),
        *[2 * (steps + 1) * rows * _padded(max(wide, hidden))] * STATES,
        *[2 * (steps + 1) * rows * hidden] * CELLS,
    ]
    return sum(-(-size // PAGE) * PAGE for size in sizes) if training else 0


def _padded(width: int) -> int:
    """Floats of a row."""
    padded = -(-width // LINE) * LINE
    return padded + LINE if padded % ALIASED == 0 else padded


# By operator, which of its results, and their bytes by its arguments.
_WORKSPACES: dict[str, tuple[int, Callable[[Sequence[Any]], int]]] = {
    "aten::mkldnn_rnn_layer": (3, lstm_workspace),
}
