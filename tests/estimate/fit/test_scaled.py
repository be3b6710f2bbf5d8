"""``fit`` of modules of one's own: recordings drawn between two that were made, where they are what
a trace gives, and sizes that a module does not run with."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from combinations import rare, slow
from torch import nn

from shardwright.core.recording import Recording
from shardwright.estimate.fit import fit
from shardwright.estimate.fit.variants import Scaled
from shardwright.estimate.footprint import footprint
from shardwright.estimate.recordings import recorded
from shardwright.job.job import Job, parse_job

WIDTH = 16


class Net(nn.Module):
    """Layers of a kind, of which ``squares`` keeps what grows with the square of the batch."""

    def __init__(self, squares: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.squares = squares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers(x))
        return (x @ x.T).square() if self.squares else x.square()


def net(batch: int, squares: bool = False) -> Any:
    """Of the mean of the result."""
    return Net(squares), torch.randn(batch, WIDTH)


def job_of(size: int, *, squares: bool = False) -> Job:
    name = f"{__name__}:net"
    return parse_job(
        {
            "model": {"python": name, "arguments": {"squares": squares}},
            "cluster": {"preset": "local", "world_size": 2, "ddr_cap": 40_000},
            "batch": {"size": size},
        }
    )


@pytest.mark.parametrize("squares", [False, True])
def test_a_recording_that_is_drawn_is_that_of_a_trace(squares: bool) -> None:
    traced: list[int] = []

    def record(job: Job, routed: tuple[str, ...] | None = ()) -> Recording:
        traced.append(job.batch.size)
        return recorded(job, routed)

    scaled = Scaled(record)
    jobs = [job_of(size, squares=squares) for size in (8, 16, 11)]
    found = [scaled(job) for job in jobs]
    assert traced == [8, 16]
    assert (found[2] == recorded(jobs[2])) is not squares
    assert scaled.agree({11}) is not squares
    assert scaled.agree({8, 16})


def test_what_does_not_lie_on_a_line_of_whole_numbers_is_traced() -> None:
    made = {2: 5, 4: 8, 3: 7}

    def record(job: Job, routed: tuple[str, ...] | None = ()) -> Recording:
        return Recording((), (), inputs=made[job.batch.size], operators=("aten::mm",))

    scaled = Scaled(record)
    assert [scaled(job_of(size)).inputs for size in (2, 4, 3)] == [5, 8, 7]
    assert not any(scaled.drawn.values())


@pytest.mark.parametrize("squares", [slow(True), rare(False)])
def test_answers_are_those_of_tracing_every_batch(squares: bool) -> None:
    job = job_of(8, squares=squares)
    found, plain = fit(job), fit(job, footprint)
    same = {"seconds": 0.0, "estimates": 0}
    assert msgspec.structs.replace(found, **same) == msgspec.structs.replace(plain, **same)


class Positions(nn.Module):
    """Words with an embedding of their place, looked up or sliced, for 24 of them."""

    def __init__(self, sliced: bool) -> None:
        super().__init__()
        self.words, self.sliced = nn.Embedding(50, 8), sliced
        self.places = nn.Embedding(24, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        counted = torch.arange(ids.shape[1])
        places = self.places.weight[: ids.shape[1]] if self.sliced else self.places(counted)
        return (self.words(ids) + places).square()


def with_positions(batch: int, sequence: int, sliced: bool) -> Any:
    """Of the mean of the result."""
    return Positions(sliced), torch.zeros(batch, sequence, dtype=torch.long)


@pytest.mark.parametrize("sliced", [False, True])
def test_no_sequence_is_longer_than_a_models_positions(sliced: bool) -> None:
    given = parse_job(
        {
            "model": {"python": f"{__name__}:with_positions", "arguments": {"sliced": sliced}},
            "cluster": {"preset": "local", "world_size": 2, "ddr_cap": "1 MiB"},
            "batch": {"size": 2, "sequence": 8},
        }
    )
    longest = fit(given).longest_sequence
    assert longest is not None
    assert (longest.size, longest.refused) == (24, True)
