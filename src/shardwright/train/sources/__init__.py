"""What a job trains, one class for each kind of model: the rows before and after a run, and the
task of every rank.
"""

# A launcher asks about rows and never imports torch: it is up before the ranks are. So the classes
# for our own models load torch where a rank asks them for a model or a loss, and nowhere else.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from shardwright.core.errors import InputError, expected
from shardwright.core.measurement import Quality
from shardwright.job.job import Job

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardwright.estimate.own_model import Task


class Source(Protocol):
    """Where the rows of a job come from, and what trains on them."""

    def check(self) -> None:
        """Raise InputError if the data cannot be what the model needs, before anything starts."""
        ...

    def prepare(self, say: Callable[[str], None] = ...) -> None:
        """Write rows that are made up, into the run folder, and what takes long to read into a
        cache, if the job names one; ``say`` what is done."""
        ...

    def samples(self) -> int | None:
        """Samples of one pass over what is trained on; None where it is not known, or long to
        count."""
        ...

    def quality(self, scores: NDArray[np.float64], part: str = "test") -> Quality | None:
        """What all ranks' scores [n, 3] of a held-out part, in the order of their first column,
        come to."""
        ...

    def task(self) -> Task:
        """What a rank trains, on every rank its own."""
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
    if job.model.traits.is_function:
        from shardwright.train.sources.python import OwnModule

        return OwnModule(job)
    from shardwright.train.sources.clicks import Clicks
    from shardwright.train.sources.text import Language

    return Clicks(job) if job.model.traits.reads_clicks else Language(job)


def task_of(job: Job) -> Task:
    """What a rank trains, on every rank its own."""
    return source_of(job).task()
