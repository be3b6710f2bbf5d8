"""What of exchanges is hidden behind compute, where a job lets them travel."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plans import plan

from shardwright.core.amount import leaf
from shardwright.core.timeline import decode, exchange_seconds, phase_seconds
from shardwright.cost.pipeline import hidden_seconds
from shardwright.estimate.recordings import described
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import Plan
from shardwright.planner.explain import STATISTICS, draft_of, explain_statistic
from shardwright.planner.problem import make_problem
from shardwright.planner.step_draft import StepDraft
from shardwright.planner.strategy.steps import step_bound
from shardwright.report.plan_sheets import hidden_line
from shardwright.report.traces import run_trace

seconds = st.floats(0, 10)


def _job(overlap: str, bottom: int = 64) -> Job:
    tables = [
        {"name": f"t{i}", "rows": 1000 * (i + 1), "dim": 8, "sharding_types": ["row_wise"]}
        for i in range(3)
    ]
    return parse_job(
        {
            "model": {"bottom": [bottom, 8], "top": [16, 1]},
            "tables": tables,
            "batch": {"size": 512},
            "cluster": {"world_size": 2},
            "train": {"overlap": overlap},
        }
    )


def _plan(overlap: str, bottom: int = 64) -> Plan:
    return plan(_job(overlap, bottom))


@given(st.lists(st.tuples(seconds, seconds), max_size=4), st.floats(0, 1))
def test_no_more_is_hidden_than_is_computed_meanwhile_nor_than_its_share(
    exchanges: list[tuple[float, float]], share: float
) -> None:
    exchanges = sorted(exchanges, key=lambda pair: pair[1])
    hidden = hidden_seconds(exchanges, share)
    assert 0 <= hidden <= share * math.fsum(s for s, _ in exchanges) * (1 + 1e-12) + 1e-300
    assert hidden <= max((window for _, window in exchanges), default=0.0)
    amounts = [(leaf(s, f"s{i}"), leaf(w, f"w{i}")) for i, (s, w) in enumerate(exchanges)]
    explained = hidden_seconds(amounts, leaf(share, "overlap"))
    assert getattr(explained, "value", explained) == hidden


def test_one_exchange_hides_behind_what_another_leaves() -> None:
    assert hidden_seconds([(4.0, 1.0), (4.0, 10.0)], 0.5) == 1 + 2
    assert hidden_seconds([(4.0, 2.5), (40.0, 10.0)], 0.5) == 10


@pytest.mark.parametrize("bottom", [1, 64])
def test_a_step_takes_less_by_what_is_hidden(bottom: int) -> None:
    serial, made = _plan("none", bottom), _plan("rows", bottom)
    assert {t.sharding_type for t in made.tables} == {"row_wise"}
    assert not exchange_seconds(decode(serial.timeline))
    exchanges = exchange_seconds(decode(made.timeline))
    before, after = (phase_seconds(decode(each.timeline)) for each in (serial, made))
    overlap = made.cluster.constants["overlap"].value
    for rank in range(2):
        hidden = {n: s for (r, _, n, k), s in exchanges.items() if r == rank and k == "hidden"}
        assert set(hidden) == {"rows", "row_gradients"}
        for phase, name in (("exchange_rows", "rows"), ("reduce", "row_gradients")):
            total = hidden[name] + exchanges[rank, phase, name, "exposed"]
            assert 0 < hidden[name] <= overlap * total * (1 + 1e-9)
            assert before[rank, phase] - after[rank, phase] == pytest.approx(hidden[name])
        less = serial.ranks[rank].seconds - made.ranks[rank].seconds
        assert less == pytest.approx(math.fsum(hidden.values()))


def test_windows_are_what_is_computed_before_rows_are_needed_and_after_their_gradients() -> None:
    draft = draft_of(_plan("rows"))
    assert isinstance(draft, StepDraft)
    ((rows,), (gradients,)) = (crossing.legs for crossing in draft.crossings)
    spent = draft.dense_seconds["bottom"]
    assert rows.window == {"bottom": pytest.approx(spent["forward"])}
    assert 0 < gradients.window["bottom"] <= spent["backward"]


class Twice(torch.nn.Module):
    """Names a table first that it looks up last."""

    def __init__(self) -> None:
        super().__init__()
        self.late = torch.nn.Embedding(4000, 16)
        self.soon = torch.nn.Embedding(4000, 16)
        self.before, self.between = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = self.before(x) + self.soon(ids)
        return torch.tanh(self.between(x)) + self.late(ids)


def twice(batch: int) -> Any:
    return Twice(), (torch.randn(batch, 16), torch.randint(4000, (batch,)))


def test_what_hides_behind_least_hides_first_whatever_the_order_of_tables() -> None:
    document = {
        "model": {"python": f"{__name__}:twice"},
        "cluster": {"preset": "local", "world_size": 2},
        "batch": {"size": 64},
        "train": {"overlap": "rows", "table_optimizer": "sgd"},
        "planner": {"tables": dict.fromkeys(("late", "soon"), "row_wise")},
    }
    draft = draft_of(plan(parse_job(document)))
    assert [exchange.path for exchange in draft.exchanges] == ["late", "soon"]
    (rows, _) = draft.crossings
    assert [leg.exchange.path for leg in rows.legs] == ["soon", "late"]
    soon, late = (math.fsum(leg.window.values()) for leg in rows.legs)
    assert 0 < soon < late


def test_no_second_of_compute_hides_two_exchanges() -> None:
    draft = draft_of(_plan("ids_and_rows", 1))
    *_, ids = draft.crossings
    others = sum(crossing.hidden for crossing in draft.crossings[:-1])
    assert ids.name == "ids"
    whole = math.fsum(ids.legs[0].window.values())
    assert all(hidden >= 0 for hidden in ids.hidden)
    assert all(ids.hidden + others <= whole * (1 + 1e-9))
    assert ids.taken == pytest.approx(others)


def test_ids_hide_behind_the_whole_step_before() -> None:
    made = _plan("ids_and_rows")
    exchanges = exchange_seconds(decode(made.timeline))
    ids = exchanges[0, "exchange_ids", "ids", "hidden"]
    assert ids > 0
    assert made.max_rank_seconds < _plan("rows").max_rank_seconds


@pytest.mark.parametrize("overlap", ["rows", "ids_and_rows"])
def test_every_statistic_of_hidden_exchanges_is_explained(overlap: str) -> None:
    made = _plan(overlap)
    for name in STATISTICS:
        explain_statistic(made, name)
    found = explain_statistic(made, "ranks", rank=1)
    lines = [step.name for explanation in found for step in explanation.steps]
    assert "less_hidden_rows" in lines
    assert ("less_hidden_ids" in lines) == (overlap == "ids_and_rows")


def test_the_plan_and_its_timeline_say_what_is_hidden() -> None:
    made = _plan("rows")
    assert "hides exchanges behind compute: " in hidden_line(made)
    assert hidden_line(_plan("none")) == ""
    assert "planned, beside compute" in run_trace(made)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["rows", "ids_and_rows"])
@pytest.mark.parametrize("bottom", [1, 64])
def test_no_plan_of_a_job_beats_its_bound_with_what_is_hidden(overlap: str, bottom: int) -> None:
    job, replace = _job(overlap, bottom), msgspec.structs.replace
    free = replace(job, tables=tuple(replace(t, sharding_types=None) for t in job.tables))
    bound = step_bound(make_problem(free, described(free)))
    types = ["table_wise", "row_wise", "data_parallel"]
    for kinds in itertools.combinations_with_replacement(types, 3):
        tables = zip(job.tables, kinds, strict=True)
        cut = tuple(replace(table, sharding_types=(kind,)) for table, kind in tables)
        assert bound <= plan(replace(job, tables=cut)).max_rank_seconds * (1 + 1e-9)
