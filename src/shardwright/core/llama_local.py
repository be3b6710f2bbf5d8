"""The part of a Llama-style decoder that one rank holds under tensor, pipeline, context and expert
parallelism. Free of torch.

Sharding over data ranks (FSDP, ZeRO) is not described here: it cuts whatever the rank holds by
bytes.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from shardwright.core.errors import InputError, expected
from shardwright.core.llama import LlamaShape

Degree = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
LossKind = Literal["gathered", "parallel", "chunked"]


class LocalShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Degrees that divide a decoder, and which of its layers are here.

    ``tensor`` divides heads, widths and the vocabulary, ``context`` the sequence, ``expert`` the
    experts; with ``sequence_parallel`` the stream between attention and SwiGLU is divided by
    ``tensor`` too. Experts are then whole where ``expert`` is more than 1 and cut in width where it
    is 1, as TorchTitan does. ``layers`` are the first and one past the last; ``first`` has the
    embedding, ``last`` the norm and the head.

    ``expert_load`` is how many rows this rank's experts receive, relative to even routing; with a
    ``capacity_factor`` every expert takes exactly its even share times that factor, padded or cut.
    With ``fp32_logits`` what the loss is computed from is a copy in fp32, which stays until the
    backward is over.
    """

    tensor: Degree = 1
    sequence_parallel: bool = False
    context: Degree = 1
    expert: Degree = 1
    first: bool = True
    last: bool = True
    layers: tuple[int, int] | None = None
    expert_load: Annotated[float, msgspec.Meta(gt=0, le=1e4)] = 1.0
    capacity_factor: Annotated[float, msgspec.Meta(gt=0, le=1e4)] | None = None
    loss: LossKind = "gathered"
    fp32_logits: bool = False

    @property
    def whole(self) -> bool:
        """Whether nothing is divided, so that no collective stands in for another rank."""
        return self.tensor == self.context == self.expert == 1

    def layer_range(self, shape: LlamaShape) -> range:
        """The layers that are here."""
        return range(*(self.layers or (0, shape.layers)))

    def heads(self, shape: LlamaShape) -> int:
        """Heads of queries on this rank."""
        return shape.heads // self.tensor

    def kv_heads(self, shape: LlamaShape) -> int:
        """Heads of keys on this rank; where there are fewer than ranks, several hold the same."""
        return max(1, shape.kv_heads // self.tensor)

    def vocab(self, shape: LlamaShape) -> int:
        """Rows of the embedding and of the head on this rank; the last rank may have fewer."""
        return math.ceil(shape.vocab / self.tensor)

    def experts(self, shape: LlamaShape) -> int:
        """Experts on this rank."""
        return shape.experts // self.expert

    @property
    def expert_width_degree(self) -> int:
        """By what the width of an expert is divided."""
        return self.tensor if self.expert == 1 else 1

    @property
    def stream_degree(self) -> int:
        """By what the tokens of the stream between two sublayers are divided, beside context."""
        return self.tensor if self.sequence_parallel else 1

    def routed_rows(self, shape: LlamaShape, tokens: int) -> int:
        """Rows that this rank sends to experts, of ``tokens`` that its router sees."""
        sliced = self.tensor if self.expert > 1 else 1
        return math.ceil(tokens / sliced) * shape.experts_per_token

    def received_rows(self, shape: LlamaShape, rows: int) -> int:
        """Rows that this rank's experts work on where every rank sends ``rows``."""
        return received_rows(
            rows, shape.experts, self.expert, self.expert_load, self.capacity_factor
        )


def received_rows(
    rows: int, experts: int, degree: int, load: float, capacity_factor: float | None
) -> int:
    """Rows that the experts of one of ``degree`` ranks work on where every rank sends ``rows``."""
    if capacity_factor is not None:
        each = math.ceil(rows / experts * capacity_factor)
        return each * degree * (experts // degree)
    return math.ceil(rows * load)


def check_local(shape: LlamaShape, local: LocalShape, where: str = "parallel") -> None:
    """Refuse degrees that do not divide the model; InputError names the degree and the size."""
    if local.tensor > 1:
        _divides(shape.heads, local.tensor, f"{where}.tensor", "heads")
        most, least = max(shape.kv_heads, local.tensor), min(shape.kv_heads, local.tensor)
        _divides(most, least, f"{where}.tensor", "heads of keys, or a multiple of them")
        dense = shape.ffn_dim if len(shape.moe_layers) < shape.layers else 0
        for wide in (dense, shape.shared_ffn_dim):
            _divides(wide, local.tensor, f"{where}.tensor", "columns of the SwiGLU")
        if shape.moe_layers and local.expert == 1:
            _divides(shape.expert_ffn_dim, local.tensor, f"{where}.tensor", "columns of an expert")
    if local.expert > 1:
        if not shape.moe_layers:
            raise InputError(
                expected(f"{where}.expert", "1 for a model without experts", str(local.expert))
            )
        _divides(shape.experts, local.expert, f"{where}.expert", "experts")
    elif local.capacity_factor is not None or local.expert_load != 1.0:
        raise InputError(
            expected(
                f"{where}.expert",
                "more than 1 where experts have a capacity or a load",
                "1",
                "One rank's experts get exactly the rows of its tokens.",
            )
        )
    if local.context > 1 and shape.attention_cap:
        wanted = "1 for a model that caps scores of attention, as no kernel over a ring does"
        raise InputError(expected(f"{where}.context", wanted, str(local.context)))
    first, stop = local.layers or (0, shape.layers)
    if not 0 <= first <= stop <= shape.layers:
        raise InputError(
            expected("layers", f"a range of the {shape.layers} layers", f"{first} to {stop}")
        )


def _divides(size: int, degree: int, where: str, what: str) -> None:
    if size % degree:
        raise InputError(expected(where, f"a divisor of the {size} {what}", str(degree)))
