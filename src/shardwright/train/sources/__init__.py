"""Where the rows of a job come from, by the kind of its model, before and after a run.

One file for each, all with the same four functions: ``check`` raises before anything starts,
``prepare`` writes rows that are made up into the run folder, which is held by then, ``quality``
reads what the ranks scored. Free of torch, but for the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shardwright.core.errors import InputError, expected
from shardwright.core.measurement import Quality
from shardwright.job.job import Job

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Source(Protocol):
    """What each file of this folder offers."""

    def check(self, job: Job) -> None:
        """Raise InputError if the data cannot be what the model needs."""
        ...

    def prepare(self, job: Job, say: Callable[[str], None] = ...) -> None:
        """Write rows that are made up, into the run folder, and what takes long to read into a
        cache, if the job names one; ``say`` what is done."""
        ...

    def samples(self, job: Job) -> int | None:
        """Samples of one pass over what is trained on; None where it is not known, or long to
        count."""
        ...

    def quality(self, job: Job, scores: NDArray[np.float64], part: str = "test") -> Quality | None:
        """What all ranks' scores [n, 3] of a held-out part, in the order of their first column,
        come to."""
        ...


def source_of(job: Job) -> Source:
    """The source for the kind of model; tables alone have none."""
    if not job.model.traits.has_step:
        raise InputError(
            expected(
                "model.kind",
                "a model to train",
                "tables alone",
                "Kind 'dlrm' puts layers around tables (interaction = 'cat' takes any dims), "
                "'python' a module of your own; a loop of your own has sw.shard_embeddings.",
            )
        )
    from shardwright.train.sources import clicks, python, text

    return {"clicks": clicks, "function": python}.get(job.model.traits.source, text)
