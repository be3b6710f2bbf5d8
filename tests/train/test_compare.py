from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET

from shardwright.core.cluster import Calibration
from shardwright.core.errors import MismatchError
from shardwright.core.measurement import Curve, Measurement
from shardwright.core.timeline import PEAK, Event, decode, encode
from shardwright.estimate.recordings import plan
from shardwright.job.job import parse_job
from shardwright.job.plan import Plan
from shardwright.report.comparison_sheets import time_verdict
from shardwright.report.table import comparison_summary, text_of
from shardwright.train.compare import compare


@pytest.fixture(scope="module")
def made() -> Plan:
    tables = [{"name": f"t{i}", "rows": 100 * (i + 1), "dim": 8} for i in range(4)]
    return plan(parse_job({"model": {"bottom": [8], "top": [4, 1]}, "tables": tables}))


def measured(made: Plan, events: list[Event]) -> Measurement:
    return Measurement(
        schema="shardwright.measurement/1",
        plan_fingerprint=made.fingerprint,
        world_size=made.world_size,
        steps=10,
        memory_steps=(3, 4, 5),
        time_steps=(6, 7),
        timeline=encode(events),
        curve=Curve(),
        quality=None,
        samples_per_second=1.0,
        bad_rows=0,
        versions={},
        machine={},
    )


def test_a_run_that_did_what_was_predicted_has_no_failures(made: Plan) -> None:
    found = compare(made, measured(made, decode(made.timeline)))
    assert found.failures == ()
    assert found.exact
    assert {line.rank for line in found.peaks} == {0, 1}
    assert all(line.predicted == line.measured for line in found.peaks)


def test_one_byte_more_of_a_weight_fails_and_is_named(made: Plan) -> None:
    events = [
        msgspec.structs.replace(e, bytes=e.bytes + 1)
        if (e.kind, e.name, e.rank) == ("weight", "top", 1)
        else e
        for e in decode(made.timeline)
    ]
    (failure,) = compare(made, measured(made, events)).failures
    assert failure.startswith("rank 1: weight of top predicted")


def test_a_weight_nobody_predicted_fails(made: Plan) -> None:
    extra = Event(0, 0, "setup", "weight", "stowaway", 4)
    (failure,) = compare(made, measured(made, [*decode(made.timeline), extra])).failures
    assert failure == "rank 0: weight of stowaway predicted 0 B, measured 4 B"


def test_a_weight_that_is_missing_fails(made: Plan) -> None:
    events = [e for e in decode(made.timeline) if (e.kind, e.name) != ("weight", "bottom")]
    assert len(compare(made, measured(made, events)).failures) == made.world_size


@pytest.mark.parametrize(("factor", "fails"), [(1.05, False), (0.95, False), (1.3, True)])
def test_a_peak_fails_outside_the_tolerance_only(made: Plan, factor: float, fails: bool) -> None:
    events = [
        msgspec.structs.replace(e, bytes=round(e.bytes * factor)) if e.name == PEAK else e
        for e in decode(made.timeline)
    ]
    failures = compare(made, measured(made, events)).failures
    assert bool(failures) is fails
    assert all("more than 10% apart" in text for text in failures)


@pytest.mark.parametrize(("factor", "fails"), [(1 / 1.1, True), (1.1, False)])
def test_the_tolerance_is_a_share_of_what_was_measured(
    made: Plan, factor: float, fails: bool
) -> None:
    """Predicted 110 of 100 is off by a tenth, 100 of 110 by a twelfth of the 110."""
    events = [
        msgspec.structs.replace(e, bytes=round(e.bytes * factor)) if e.name == PEAK else e
        for e in decode(made.timeline)
    ]
    assert bool(compare(made, measured(made, events), tolerance=0.095).failures) is fails


def test_a_run_without_peaks_fails(made: Plan) -> None:
    events = [e for e in decode(made.timeline) if e.name != PEAK]
    assert compare(made, measured(made, events)).failures == (
        "rank 0: no peak measured",
        "rank 1: no peak measured",
    )


def test_a_phase_that_was_not_measured_fails(made: Plan) -> None:
    events = [e for e in decode(made.timeline) if (e.name, e.phase) != (PEAK, "reduce")]
    assert compare(made, measured(made, events)).failures == (
        "rank 0: phase reduce was predicted and not measured",
        "rank 1: phase reduce was predicted and not measured",
    )


def test_a_run_too_short_to_be_measured_says_only_that(made: Plan) -> None:
    short = msgspec.structs.replace(measured(made, []), memory_steps=(), steps=2)
    found = compare(made, short)
    (failure,) = found.failures
    assert failure.startswith("Memory was not measured: it is followed on steps 3 to 5")
    assert (found.exact, found.peaks) == ((), ())


def test_seconds_are_shown_and_never_fail(made: Plan) -> None:
    events = [
        msgspec.structs.replace(e, duration=100.0) if e.kind == "time" else e
        for e in decode(made.timeline)
    ]
    found = compare(made, measured(made, events))
    assert found.failures == ()
    assert {line.measured for line in found.seconds} == {100.0}


def test_a_measurement_of_another_plan_is_refused(made: Plan) -> None:
    other = msgspec.structs.replace(measured(made, []), plan_fingerprint="0" * 64)
    with pytest.raises(MismatchError, match="expected one of plan"):
        compare(made, other)


def test_exchanges_beside_compute_are_compared_where_a_job_lets_them_travel(made: Plan) -> None:
    assert compare(made, measured(made, decode(made.timeline))).exchanges is UNSET
    replace = msgspec.structs.replace
    tables = tuple(replace(table, sharding_types=("row_wise",)) for table in made.job.tables)
    train = replace(made.job.train, overlap="rows")
    other = plan(replace(made.job, tables=tables, train=train))
    events = [
        msgspec.structs.replace(e, duration=2 * e.duration) if e.kind == "exposed" else e
        for e in decode(other.timeline)
    ]
    found = compare(other, measured(other, events))
    assert isinstance(found.exchanges, tuple)
    names = {(line.phase, line.name, line.kind) for line in found.exchanges}
    assert ("exchange_rows", "rows", "hidden") in names
    for line in found.exchanges:
        times = 2 if line.kind == "exposed" else 1
        assert line.measured == times * (line.predicted or 0)
    shown = text_of(comparison_summary(found))
    assert "Exchanges while ranks compute" in shown
    assert "Exchanges while ranks compute" not in text_of(
        comparison_summary(compare(made, measured(made, decode(made.timeline))))
    )


@pytest.mark.parametrize(
    ("calibrated", "ran", "said"),
    [
        ("0.4", "0.5", ""),
        ("1.0", "1.0", ""),
        ("1.5", "0.0", "Not judged: c.toml was made on a busy machine (load 1.5 of others on 2 co"),
        ("0.0", "1.5", "Not judged: the machine was busy during the run (load 1.5 of others on 2"),
        ("0.0", "", "Not judged: what else the machine did during the run is not known."),
    ],
)
def test_seconds_are_judged_where_the_machine_was_quiet_when_calibrated_and_when_it_ran(
    made: Plan, calibrated: str, ran: str, said: str
) -> None:
    facts = {"cores": "2", "load": calibrated}
    file = Calibration("shardwright.cluster/1", "2026-11", 2, "cpu", "gloo", facts, {}, {})
    section = msgspec.structs.replace(made.job.cluster, file="c.toml", measured=file)
    job = msgspec.structs.replace(made.job, cluster=section)
    slower = [msgspec.structs.replace(e, duration=9 * e.duration) for e in decode(made.timeline)]
    run = measured(made, slower)
    run = msgspec.structs.replace(run, machine={"cores": "2"} | ({"load": ran} if ran else {}))
    found = time_verdict(compare(msgspec.structs.replace(made, job=job), run))
    assert found is not None
    assert said in found.sentence
    assert ("Not judged" in found.sentence) == bool(said)
    assert found.held == bool(said)  # nine times slower
