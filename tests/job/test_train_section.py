"""Learning rates over a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.core.errors import InputError
from shardwright.job.job import parse_job
from shardwright.job.train import TrainSection, rate_factor


def train(steps: int = 100, **schedule: Any) -> TrainSection:
    given = {"train": {"steps": steps, "schedule": schedule}, "model": {"python": "own:build"}}
    return parse_job(given).train


def factors(given: TrainSection) -> list[float]:
    return [rate_factor(given, step) for step in range(1, given.steps + 1)]


def by_torch(make: Any, steps: int) -> list[float]:
    """Of a rate of 1, as torch's own schedulers have it after so many steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def test_without_a_schedule_rates_stay() -> None:
    assert factors(TrainSection(steps=5)) == [1.0] * 5


def test_a_warm_up_is_a_line_to_1() -> None:
    assert factors(train(6, warmup_steps=4)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_polynomial_decay_is_torchs(power: float) -> None:
    given = train(50, decay="polynomial", decay_steps=30, power=power)
    schedule = torch.optim.lr_scheduler.PolynomialLR
    wanted = by_torch(lambda o: schedule(o, total_iters=30, power=power), 50)
    assert factors(given) == pytest.approx(wanted, abs=1e-12)


def test_cosine_decay_is_torchs() -> None:
    given = train(40, decay="cosine", end_factor=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR
    wanted = by_torch(lambda o: schedule(o, T_max=40, eta_min=0.1), 40)
    assert factors(given) == pytest.approx(wanted, abs=1e-12)


def test_the_rates_of_the_original_dlrm() -> None:
    """Warm-up of 100 steps, then (left / 900)^2: its LRPolicyScheduler's figures of some steps."""
    given = train(1000, warmup_steps=100, decay="polynomial", power=2.0)
    for step, wanted in ((1, 0.01), (50, 0.5), (100, 1.0), (101, (899 / 900) ** 2), (550, 0.25)):
        assert rate_factor(given, step) == pytest.approx(wanted)
    assert rate_factor(given, 1000) == 0.0


def test_between_warm_up_and_decay_rates_stay() -> None:
    given = train(10, warmup_steps=2, decay="polynomial", decay_start=6, decay_steps=2)
    assert factors(given) == [0.5, 1, 1, 1, 1, 1, 0.5, 0, 0, 0]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"decay_steps": 3}, "decay_steps: expected none beside decay 'none', got 3"),
        ({"decay": "cosine", "power": 2.0}, "power: expected none beside decay 'cosine', got 2.0"),
        (
            {"warmup_steps": 5, "decay": "cosine", "decay_start": 4},
            "decay_start: expected 5 or more, the end of the warm-up, got 4",
        ),
        ({"warmup_steps": 100, "decay": "cosine"}, "a start before the run's last step, 100"),
        ({"end_factor": 2.0, "decay": "cosine"}, "end_factor"),
    ],
)
def test_what_no_step_would_follow_is_refused(schedule: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=r"train\.schedule") as caught:
        train(**schedule)
    assert words in str(caught.value)
