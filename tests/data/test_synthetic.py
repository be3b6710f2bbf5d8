"""The click generator: its law is what is written, whatever the chunks, and can be learned."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.batch import expected_distinct
from shardwright.core.errors import InputError
from shardwright.data.logs import BagColumn, ColumnLog, CriteoLog
from shardwright.data.quality import auc, bayes_auc
from shardwright.data.reading import evaluation_batches
from shardwright.data.synthetic import ClickModel, ClickRows, facts

MODEL = ClickModel()
SMALL = ClickModel(cardinalities=tuple(range(1, 27)), seed=3)


def arrays(rows: ClickRows) -> list[np.ndarray]:
    batch = rows.batch
    parts = (batch.dense, batch.ids, batch.labels, rows.integers, rows.hashes)
    return [*parts, rows.probabilities]


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(0, 300), st.integers(0, 60), st.integers(0, 60))
def test_a_row_is_the_same_in_whatever_range_it_is_made(start: int, left: int, right: int) -> None:
    whole = arrays(SMALL.rows(start, start + left + right))
    parts = SMALL.rows(start, start + left), SMALL.rows(start + left, start + left + right)
    for one, two in zip(whole, zip(*map(arrays, parts), strict=True), strict=True):
        np.testing.assert_array_equal(one, np.concatenate(two))


def test_another_seed_makes_other_rows() -> None:
    one, two = SMALL.rows(0, 200), dataclasses.replace(SMALL, seed=4).rows(0, 200)
    assert (one.integers != two.integers).mean() > 0.3
    assert np.corrcoef(one.probabilities, two.probabilities)[0, 1] < 0.5


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("model", [MODEL, SMALL], ids=["default", "tiny tables"])
def test_the_reader_gives_back_the_rows_and_their_probabilities(
    tmp_path: Path, model: ClickModel
) -> None:
    path = tmp_path / "clicks.tsv"
    model.write(path, 9000, start=50)
    made = model.rows(50, 9050)
    [(batch, _)] = evaluation_batches(CriteoLog(path, model.cardinalities), 10_000)
    np.testing.assert_array_equal(batch.dense, made.batch.dense)
    np.testing.assert_array_equal(batch.ids, made.batch.ids)
    np.testing.assert_array_equal(batch.labels, made.batch.labels)
    np.testing.assert_allclose(
        model.probability(batch.dense, batch.ids), made.probabilities, rtol=0, atol=1e-6
    )


def test_the_facts_are_those_of_the_rows_written(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    written = MODEL.write(path, 9000, start=7)
    log = CriteoLog(path, MODEL.cardinalities)
    assert (log.spelling, log.count()) == ("tsv", 9000)
    made = MODEL.rows(7, 9007)
    assert written == facts(made.probabilities)
    assert written.rows == 9000
    assert written.bayes_auc == bayes_auc(made.probabilities)
    assert written.click_rate == pytest.approx(made.batch.labels.mean(), abs=0.02)


def test_labels_follow_their_probabilities() -> None:
    rows = MODEL.rows(0, 20_000)
    p, labels = rows.probabilities, rows.batch.labels
    for low in np.arange(0.0, 1.0, 0.1):
        inside = (p >= low) & (p < low + 0.1)
        spread = math.sqrt((p[inside] * (1 - p[inside])).sum())
        assert abs(labels[inside].sum() - p[inside].sum()) < 4 * spread
    assert auc(labels, p) == pytest.approx(bayes_auc(p), abs=0.01)


@pytest.mark.parametrize("seed", range(4))
def test_every_seed_is_about_as_hard_and_as_unbalanced_as_real_clicks(seed: int) -> None:
    found = facts(ClickModel(seed=seed).rows(0, 8000).probabilities)
    assert 0.82 < found.bayes_auc < 0.89
    assert 0.18 < found.click_rate < 0.32


@pytest.mark.slow
def test_a_table_of_biases_from_100_000_rows_explains_much_of_the_signal() -> None:
    train, test = MODEL.rows(0, 100_000), MODEL.rows(100_000, 110_000)
    score = np.zeros(10_000)
    for f, size in enumerate(MODEL.cardinalities):
        clicks = np.bincount(train.batch.ids[:, f], train.batch.labels, minlength=size)
        seen = np.bincount(train.batch.ids[:, f], minlength=size)
        rate = (clicks + 20 * train.batch.labels.mean()) / (seen + 20)
        score += np.log(rate / (1 - rate))[test.batch.ids[:, f]]
    assert auc(test.batch.labels, score) > 0.5 + 0.8 * (bayes_auc(test.probabilities) - 0.5)


def test_ids_are_in_their_tables_and_hashes_look_like_32_bits() -> None:
    rows = MODEL.rows(0, 5000)
    assert (rows.batch.ids >= 0).all()
    assert (rows.batch.ids < np.array(MODEL.cardinalities)).all()
    present = rows.hashes[rows.hashes >= 0]
    assert present.max() < 1 << 32
    assert 0.3 < (present >= 1 << 31).mean() < 0.7


def test_an_id_is_always_written_as_the_same_hash() -> None:
    rows = MODEL.rows(0, 5000)
    for f in (0, 2, 8):
        present = rows.hashes[:, f] >= 0
        pairs = set(zip(rows.batch.ids[present, f], rows.hashes[present, f], strict=True))
        assert len(pairs) == len({i for i, _ in pairs})


def test_popularity_falls_with_rank_as_the_exponent_says() -> None:
    model = dataclasses.replace(MODEL, zipf=1.5, missing_categories=(0.0,) * 26)
    counts = Counter(model.rows(0, 40_000).batch.ids[:, 2].tolist())
    frequent = [n for _, n in counts.most_common(3)]
    size = MODEL.cardinalities[2]
    law = [(r**-0.5 - (r + 1) ** -0.5) / (1 - (size + 1) ** -0.5) for r in (1, 2, 3)]
    assert frequent == pytest.approx([40_000 * share for share in law], rel=0.06)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("parts", [1, 4])
def test_a_batch_has_as_many_different_ids_as_a_prediction_says(parts: int) -> None:
    ids = 768
    batches = [MODEL.rows(ids * k, ids * (k + 1)).batch.ids for k in range(8)]
    for column, (rows, empty) in enumerate(
        zip(MODEL.cardinalities, MODEL.missing_categories, strict=True)
    ):
        if empty or rows < ids:
            continue
        in_a_part = [len({i for i in b[:, column] if i * parts < rows}) for b in batches]
        found = expected_distinct(ids // parts, rows // parts, MODEL.zipf, parts)
        assert found == pytest.approx(np.mean(in_a_part), rel=0.12)


@pytest.mark.parametrize("zipf", [0.0, 1.0, 2.0])
def test_every_id_of_a_small_table_turns_up(zipf: float) -> None:
    rows = dataclasses.replace(SMALL, zipf=zipf).rows(0, 20_000)
    for f, size in enumerate(SMALL.cardinalities):
        assert len(np.unique(rows.batch.ids[:, f])) == size


def test_fields_are_empty_as_often_as_asked() -> None:
    rows = MODEL.rows(0, 20_000)
    np.testing.assert_allclose((rows.integers < 0).mean(axis=0), MODEL.missing_integers, atol=0.015)
    empty = (rows.hashes < 0).mean(axis=0)
    np.testing.assert_allclose(empty, MODEL.missing_categories, atol=0.015)


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_all_or_no_fields_may_be_empty(tmp_path: Path, chance: float) -> None:
    model = ClickModel(missing_integers=(chance,) * 13, missing_categories=(chance,) * 26)
    rows = model.rows(0, 100)
    assert (rows.hashes < 0).all() == (rows.integers < 0).all() == (chance == 1.0)
    assert model.write(tmp_path / "clicks.tsv", 100).rows == 100


def test_without_scales_every_row_has_the_base_probability() -> None:
    model = ClickModel(bias_scale=0.0, interaction_scale=0.0, dense_scale=0.0, base=-1.0)
    np.testing.assert_allclose(model.rows(0, 10).probabilities, 1 / (1 + math.e))


def test_a_table_of_ten_million_rows_costs_no_memory() -> None:
    model = ClickModel(cardinalities=(10_131_227,) * 26)
    assert model.rows(0, 2000).batch.ids.max() > 5_000_000


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    path.mkdir()
    with pytest.raises(InputError, match=r"clicks\.tsv: expected a file that can be written, got"):
        SMALL.write(path, 10)
    assert [p.name for p in tmp_path.iterdir()] == ["clicks.tsv"]
    with pytest.raises(InputError, match="No such file or directory"):
        SMALL.write(tmp_path / "absent" / "clicks.tsv", 10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cardinalities": (3, 4)}, "cardinalities: expected 26 values, got 2"),
        ({"cardinalities": (0,) * 26}, r"cardinalities\[0\]: expected 1 to 2.14748e\+09, got 0"),
        ({"missing_integers": (2.0,) * 13}, r"missing_integers\[0\]: expected 0 to 1, got 2"),
        ({"missing_categories": (0.0,)}, "missing_categories: expected 26 values, got 1"),
        ({"zipf": -1.0}, "zipf: expected 0 to 1000, got -1"),
        ({"bias_scale": math.nan}, "bias_scale: expected 0 to 1000, got nan"),
        ({"pairs": ((1, 26),)}, r"pairs\[1\]: expected 0 to 25, got 26"),
        ({"pairs": ((1, 1),)}, r"pairs: expected two different columns, got \(1, 1\)"),
    ],
)
def test_a_model_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ClickModel(**fields)


def test_rows_and_ids_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rows: expected 0 <= start <= stop, got 5 and 4"):
        SMALL.rows(5, 4)
    with pytest.raises(InputError, match="rows: expected at least 2, got 1"):
        SMALL.write(tmp_path / "clicks.tsv", 1)
    ids = np.zeros((1, 26), dtype=np.int64)
    with pytest.raises(InputError, match=r"ids, C2: expected 0 to 1, got 2 to 2\. Read with"):
        SMALL.probability(np.zeros((1, 13)), ids + 2 * (np.arange(26) == 1))
    with pytest.raises(InputError, match=r"dense: expected shape \[rows, 13\], got \[1, 12\]"):
        SMALL.probability(np.zeros((1, 12)), ids)
    with pytest.raises(InputError, match="ids: expected 2 rows, as dense has, got 1"):
        SMALL.probability(np.zeros((2, 13)), ids)


NAMED = ClickModel(seed=5).named(
    ["item", "seen", "word", "small"], [1000, 50, 20, 30], [1.0, 3.0, 2.25, 0.5], 2
)


@pytest.mark.slow
def test_named_columns_come_back_with_their_bags_and_probabilities(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    written = NAMED.write(path, 4000, start=50)
    made = NAMED.rows(50, 4050)
    features = [BagColumn(*each) for each in zip(NAMED.names, NAMED.cardinalities, strict=True)]
    label, *dense = NAMED.header[:3]
    [(batch, _)] = evaluation_batches(ColumnLog(path, label, dense, features), 10_000)
    assert written == facts(made.probabilities)
    np.testing.assert_array_equal(batch.labels, made.batch.labels)
    np.testing.assert_allclose(batch.dense, made.batch.dense, rtol=0, atol=1e-6)
    assert isinstance(batch.ids, dict)
    assert isinstance(made.batch.ids, dict)
    for name, bags in batch.ids.items():
        for read, wanted in zip(bags, made.batch.ids[name], strict=True):
            np.testing.assert_array_equal(read, wanted)


def test_bags_have_the_asked_length_on_average_by_one_more_or_less() -> None:
    ids = NAMED.rows(0, 20_000).batch.ids
    assert isinstance(ids, dict)
    for (_, offsets, *_), length in zip(ids.values(), NAMED.lengths, strict=True):
        counts = np.diff(offsets)
        assert {math.floor(length), math.ceil(length)} == set(counts.tolist())
        assert counts.mean() == pytest.approx(length, abs=0.02)


def test_named_rows_are_the_same_in_whatever_range_they_are_made() -> None:
    whole, later = NAMED.rows(0, 90), NAMED.rows(40, 90)
    np.testing.assert_array_equal(whole.probabilities[40:], later.probabilities)
    assert isinstance(whole.batch.ids, dict)
    assert isinstance(later.batch.ids, dict)
    for name, (ids, offsets, *_) in later.batch.ids.items():
        every, ends, *_ = whole.batch.ids[name]
        np.testing.assert_array_equal(ids, every[ends[40] :])
        np.testing.assert_array_equal(np.diff(offsets), np.diff(ends)[40:])


def test_labels_of_named_rows_follow_from_their_bags() -> None:
    rows = NAMED.rows(0, 20_000)
    found = facts(rows.probabilities)
    assert found.bayes_auc > 0.65
    assert auc(rows.batch.labels, rows.probabilities) == pytest.approx(found.bayes_auc, abs=0.02)


@pytest.mark.slow
def test_every_column_has_random_numbers_of_its_own() -> None:
    many = ClickModel().named([f"t{i}" for i in range(1200)], [50] * 1200, [1.0] * 1200, 1)
    ids = many.rows(0, 200).batch.ids
    assert isinstance(ids, dict)
    assert len({column.tobytes() for column, *_ in ids.values()}) == 1200


def test_without_drift_rows_do_not_depend_on_the_days() -> None:
    plain, days = ClickModel(), ClickModel(days=4, total=400)
    assert np.array_equal(plain.rows(0, 400).probabilities, days.rows(0, 400).probabilities)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("named", [False, True])
def test_what_ids_are_worth_drifts_from_day_to_day_and_stays_within_one(named: bool) -> None:
    law = {"days": 4, "drift": 0.5, "total": 40_000}
    if named:
        few = (("a", "b", "c"), (400, 30, 20), (1.0, 2.0, 1.0), 3)
        still, drifting = ClickModel().named(*few), ClickModel(**law).named(*few)
    else:
        still, drifting = ClickModel(), ClickModel(**law)
    likeness = []
    for day in range(4):
        one, two = (
            np.log(p / (1 - p))
            for p in (
                model.rows(10_000 * day, 10_000 * day + 3000).probabilities
                for model in (still, drifting)
            )
        )
        likeness.append(float(np.corrcoef(one, two)[0, 1]))
        assert abs(one.std() / two.std() - 1) < 0.2  # as hard to tell on every day
    assert likeness[0] == pytest.approx(1)
    assert likeness == sorted(likeness, reverse=True)
    assert likeness[3] < 0.3  # by half a turn from one day to the next, three days on: opposed
    last = drifting.rows(9_000, 10_010)
    assert np.array_equal(last.probabilities[:1000], still.rows(9_000, 10_000).probabilities)
    assert not np.allclose(last.probabilities[1000:], still.rows(10_000, 10_010).probabilities)


@pytest.mark.slow
def test_the_best_scores_of_a_part_are_those_of_its_rows() -> None:
    model = ClickModel(days=2, drift=0.3, total=30_000)
    assert model.facts(10_000, 30_000) == facts(model.rows(10_000, 30_000).probabilities)


def test_a_heavier_tail_spreads_rows_over_more_ids() -> None:
    def distinct(zipf: float) -> int:
        ids = ClickModel(zipf=zipf).rows(0, 4000).batch.ids
        assert isinstance(ids, np.ndarray)
        return len(np.unique(ids[:, 2]))

    assert distinct(0.5) > distinct(1.05) > distinct(1.5)
