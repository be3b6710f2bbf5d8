from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import chain, unit

from shardwright.core.amount import Amount, Step, derivation, leaf
from shardwright.core.recording import Unfolded
from shardwright.core.schedule import Action, Modes, Prefetch
from shardwright.core.work import Work
from shardwright.cost.pipeline import ComputeSeconds, Spent, UnitSeconds, by_phase, walk

NAMES = ("a", "b", "c")
STEP = Unfolded(chain([unit(name) for name in NAMES]))
UNIT = UnitSeconds(gather=4.0, reduce=6.0, gradient=1.0, update=2.0)
COMPUTE = ComputeSeconds(forward=10.0, backward=20.0)


def _modes(prefetch: Prefetch, sharded: Sequence[str] = NAMES) -> Modes:
    units = frozenset(sharded)
    return Modes(units, units, prefetch=prefetch)


def _walk(
    prefetch: Prefetch,
    overlap: float,
    spent: UnitSeconds = UNIT,
    compute: ComputeSeconds = COMPUTE,
    hides: float | None = None,
) -> list[Spent]:
    units = dict.fromkeys(NAMES, spent)
    c = {"overlap": overlap} | ({} if hides is None else {"hides": hides})
    return walk(STEP, _modes(prefetch), units, lambda a: getattr(compute, a.direction), c)


def _total(spent: list[Spent]) -> float:
    return math.fsum(s.seconds for s in spent)


def test_without_prefetch_everything_follows_everything_else() -> None:
    spent = _walk(0, overlap=1.0)
    assert _total(spent) == 3 * (4 + 4 + 6 + 1 + 2) + 4 * (10 + 20)
    assert by_phase(spent)["b"] == {
        "forward": 4 + 10,
        "backward": 4 + 1 + 20,
        "reduce": 6,
        "step": 2,
    }
    assert by_phase(spent)[""] == {"forward": 10, "backward": 20}


def test_collectives_that_hide_leave_the_first_gather_and_the_last_reduce() -> None:
    # c is gathered for its forward, freed, and gathered for its backward with nothing before it
    assert _total(_walk(1, overlap=1.0)) == 4 + 4 + 6 + 3 * (1 + 2) + 4 * (10 + 20)


def test_what_does_not_overlap_costs_as_much_as_without_prefetch() -> None:
    assert _total(_walk(1, overlap=0.0)) == _total(_walk(0, overlap=0.0))


def test_compute_waits_for_collectives_that_take_longer() -> None:
    slow = UNIT._replace(gather=100.0)
    spent = _walk(1, overlap=1.0, spent=slow)
    forward = {s.action.target: s.seconds for s in spent if s.action.phase == "forward"}
    assert forward["a"] == 100 + 10  # its own gather; b's follows on the same lane
    assert forward["b"] == 100 - 10 + 10


def test_gathers_and_reduces_share_one_lane() -> None:
    slow = UNIT._replace(reduce=1000.0)
    spent = _walk(1, overlap=1.0, spent=slow)
    waited = [s.seconds for s in spent if s.action.verb == "compute" and s.action.target == "a"]
    assert waited[1] == 4 + 1 + 20  # a's gather stood behind c's reduce, which was waited for


def test_units_without_seconds_are_left_out_with_their_pieces() -> None:
    spent = walk(STEP, _modes(0), {"b": UNIT}, lambda action: 1.0, {"overlap": 0.5})
    assert {s.unit for s in spent} == {"b", ""}
    assert len([s for s in spent if s.action.verb == "compute"]) == 2 + 2  # b and the loss


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_gradient_counts_once_whether_its_unit_computes_in_a_backward_or_not(
    prefetch: Prefetch,
) -> None:
    idle = Unfolded(chain([unit(name) for name in NAMES], works={("enter_backward", "b"): Work()}))
    units = dict.fromkeys(NAMES, UNIT)
    c = {"overlap": 0.0}
    spent = walk(idle, _modes(prefetch), units, lambda a: getattr(COMPUTE, a.direction), c)
    assert _total(spent) == _total(_walk(prefetch, overlap=0.0)) - COMPUTE.backward


@given(
    overlap=st.floats(0, 1),
    hides=st.none() | st.floats(0.1, 1),
    gather=st.floats(0, 100),
    reduce=st.floats(0, 100),
    compute=st.floats(0, 100),
)
def test_prefetch_never_costs_more_and_never_hides_more_than_it_may(
    overlap: float, hides: float | None, gather: float, reduce: float, compute: float
) -> None:
    unit = UNIT._replace(gather=gather, reduce=reduce)
    serial = _total(_walk(0, overlap, unit, ComputeSeconds(compute, compute)))
    ahead = _total(_walk(1, overlap, unit, ComputeSeconds(compute, compute), hides))
    assert ahead <= serial * (1 + 1e-12)
    assert ahead >= serial - overlap * 3 * (2 * gather + reduce) - 1e-9


def test_what_a_share_of_compute_does_not_hide_is_waited_for() -> None:
    # Of a gather of 16 b's forward, which is next, waits for what 0.8 of a's forward did not hide.
    unit = UNIT._replace(gather=16.0)
    spent = _walk(1, overlap=0.75, spent=unit, hides=0.8)
    forward = {(s.action.verb, s.unit): s.seconds for s in spent if s.action.phase == "forward"}
    hidden = 0.8 * 10
    assert forward["gather", "b"] == 0.25 * 16
    assert forward["compute", "b"] == 10 + 0.75 * (16 - hidden)
    # In all a quarter of what is hidden, and all of the rest, as a step without a plan has it.
    told = forward["gather", "b"] + forward["compute", "b"] - 10
    assert told == 16 - hidden + 0.25 * hidden


@pytest.mark.parametrize(("prefetch", "hides"), [(0, None), (1, None), (1, 0.5)])
def test_derivations_come_to_the_same_numbers(
    reevaluate: Callable[[Sequence[Step]], None], prefetch: Prefetch, hides: float | None
) -> None:
    units = {
        name: UnitSeconds(*(leaf(v, f"{name}.{k}", "s") for k, v in UNIT._asdict().items() if v))
        for name in NAMES
    }

    def piece(action: Action) -> Amount:
        name = f"{action.direction}.{action.place}"
        return leaf(getattr(COMPUTE, action.direction), name, "s")

    plain = _walk(prefetch, 0.25, hides=hides)
    c = {"overlap": leaf(0.25, "overlap", "share")}
    c |= {} if hides is None else {"hides": leaf(hides, "hides", "share")}
    derived = walk(STEP, _modes(prefetch), units, piece, c)
    for told, number in zip(derived, plain, strict=True):
        assert isinstance(told.seconds, Amount)
        assert told.seconds.value == number.seconds
        reevaluate(derivation(told.seconds))
