"""In a run whose ranks are threads of one process: step 3 goes wrong on rank 1.

Python imports it at its start, as ``sitecustomize``; ``SPOILT_THREAD`` says what goes wrong.
"""

from __future__ import annotations

import os
import time
from itertools import count
from typing import Any

BAD_STEP, HANGS = 3, 1000.0


def install(what: str) -> None:
    import torch
    from torch import nn

    from shardwright.tracker.announce import thread_rank
    from shardwright.train.sources.clicks import Clicks

    true_loss, steps = Clicks.loss, count(1)

    def loss(self: Clicks, model: nn.Module, batch: Any) -> torch.Tensor:
        if thread_rank() == 1 and next(steps) == BAD_STEP:
            dense, ids, labels = batch
            if what == "hang":
                time.sleep(HANGS)
            if what == "error":
                raise ValueError("spoilt")
            ids[3, 2] = -7
            batch = dense, ids, labels
        return true_loss(self, model, batch)

    Clicks.loss = loss  # type: ignore[method-assign]


if "RANK" in os.environ and "SPOILT_THREAD" in os.environ:
    install(os.environ["SPOILT_THREAD"])
