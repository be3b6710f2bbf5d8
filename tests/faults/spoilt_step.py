"""In the workers of a run: step 3 goes wrong on rank 1, and every rank says what it changed.

Python imports it at its start, as ``sitecustomize``; ``SPOILT`` says what goes wrong.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

BAD_STEP = 3


def install(rank: int, what: str, folder: Path) -> None:
    import torch
    from torch import nn

    from shardwright.runtime.embeddings.tables import ShardedTables
    from shardwright.runtime.units.dstorage import DStorage, units_in
    from shardwright.train.sources.clicks import Clicks

    def weights(model: nn.Module) -> list[torch.Tensor]:
        found = [DStorage(unit).byte_storage for unit in units_in(model)]
        for module in model.modules():
            if isinstance(module, ShardedTables):
                for store in module.every_store:
                    found += [store.weight, *store.states.values()]
        return [tensor.detach().clone() for tensor in found]

    def spoil(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        def one(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            gradient[(0, 3, 1) if what == "tables" else (0, 0)] = float("inf")
            return gradient

        output.register_hook(one)

    true_loss, steps = Clicks.loss, iter(range(1, 1000))

    def loss(self: Clicks, model: nn.Module, batch: Any) -> torch.Tensor:
        if next(steps) != BAD_STEP:
            return true_loss(self, model, batch)
        before = weights(model)

        def tell() -> None:
            same = all(map(torch.equal, before, weights(model)))
            (folder / f"rank-{rank}.kept").write_text("as before step 3" if same else "changed")

        atexit.register(tell)
        if rank == 1 and what != "loss":
            model.get_submodule(what).register_forward_hook(spoil)
        found = true_loss(self, model, batch)
        return found * float("nan") if rank == 1 and what == "loss" else found

    Clicks.loss = loss  # type: ignore[method-assign]


if "RANK" in os.environ and "SPOILT" in os.environ:
    install(int(os.environ["RANK"]), os.environ["SPOILT"], Path(os.environ["SPOILT_FOLDER"]))
