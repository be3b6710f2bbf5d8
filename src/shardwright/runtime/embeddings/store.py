"""The rows a rank keeps: one tensor per width, with the optimizer's state beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from shardwright.core.plan import TablePlan
from shardwright.core.timeline import Kind
from shardwright.runtime.embeddings import update
from shardwright.runtime.embeddings.route import Held
from shardwright.runtime.probe import Probe

InitialBlock = Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor]


class Store:
    """``weight`` [R, width] fp32 of all blocks of one width on this rank, each at its base row.

    ``state`` holds one fp32 for each row whose table uses row-wise Adagrad; tables are laid out so
    that the two optimizers' rows need no more than a row mask.
    """

    def __init__(
        self,
        held: tuple[Held, ...],
        width: int,
        tables: tuple[TablePlan, ...],
        initial: InitialBlock,
        probe: Probe,
        device: torch.device,
    ) -> None:
        self.held = held
        self.width = width
        self.tables = tables
        rows = sum(item.rows for item in held)
        self.weight = torch.empty(rows, width, device=device)
        for item in held:
            block = item.block
            self.weight[item.base : item.base + item.rows] = initial(
                block.tensor, block.offsets, block.sizes
            )
        kinds = {tables[item.feature].optimizer for item in held}
        self.optimizer = kinds.pop() if kinds else "sgd"
        assert not kinds, "a plan gives one optimizer to all tables"
        self.state = torch.zeros(rows if self.optimizer == "rowwise_adagrad" else 0, device=device)
        for tensor, kind in self.lasting():
            probe.holds(tensor, kind)

    def lasting(self) -> Iterator[tuple[torch.Tensor, Kind]]:
        """The memory of the store, and what it is for."""
        yield self.weight, "weight"
        yield self.state, "optimizer_state"

    def block_view(self, item: Held) -> torch.Tensor:
        """The weights of one block, sharing storage."""
        return self.weight[item.base : item.base + item.rows]

    def state_view(self, item: Held) -> torch.Tensor:
        """The optimizer state of one block, empty where there is none."""
        return self.state[item.base : item.base + item.rows]

    def update(self, rows: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
        """Apply summed-over-ranks gradients [N, width] to ``rows`` [N]."""
        if self.optimizer == "sgd":
            update.sgd(self.weight, rows, gradient, rate)
        else:
            update.rowwise_adagrad(self.weight, self.state, rows, gradient, rate)

    def update_all(self, gradient: torch.Tensor, rate: float) -> None:
        """Apply a dense gradient of the whole store."""
        if self.optimizer == "sgd":
            update.dense_sgd(self.weight, gradient, rate)
        else:
            update.dense_rowwise_adagrad(self.weight, self.state, gradient, rate)
