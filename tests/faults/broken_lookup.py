"""In the workers of a run: rank 1 goes wrong in the middle of a lookup.

Python imports it at its start, as ``sitecustomize``; ``BROKEN`` says what happens: a signal's name
and the step of the lookup it comes in, or ``id``.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

LOOKUPS = 9  # that go well


def install(what: str, where: str) -> None:
    import torch

    from shardwright.runtime.embeddings.routing import GroupRouting
    from shardwright.runtime.embeddings.tables import ShardedTables

    owner, name = (GroupRouting, where) if where else (ShardedTables, "_read")
    right, calls = getattr(owner, name), itertools.count()

    def wrong(self: Any, given: Any, *rest: Any) -> Any:
        if next(calls) >= LOOKUPS:
            if where:
                os.kill(os.getpid(), getattr(signal, what))
            else:
                values = given if isinstance(given, torch.Tensor) else given.values
                (values() if callable(values) else values).view(-1)[-1] = 10**6
        return right(self, given, *rest)

    setattr(owner, name, wrong)


if os.environ.get("RANK") == "1" and "BROKEN" in os.environ:
    install(*os.environ["BROKEN"].partition(" ")[::2])
