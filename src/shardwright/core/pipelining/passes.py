"""One pass of a microbatch through a rank's piece of the model."""

from __future__ import annotations

from typing import Literal

import msgspec

# A backward may be split: the gradient of the input first, for the rank before waits for it, the
# gradients of the weights when there is time.
PassKind = Literal["forward", "backward", "input_backward", "weight_backward"]


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """``chunk`` counts the pieces of the model on one rank, from its first to its last stage."""

    kind: PassKind
    chunk: int
    microbatch: int
