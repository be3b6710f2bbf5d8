from __future__ import annotations

from typing import Any

import msgspec
import pytest
from recordings import chain, unit

from shardwright.core.errors import InputError
from shardwright.job.job import Job, parse_job, read_job
from shardwright.job.model_of_job import beyond_positions, check_model, model_of, tables_of


def _job(count: int = 3, **sections: Any) -> Job:
    return parse_job(
        {
            "tables": [{"name": f"t{i}", "rows": 10 + i, "dim": 16} for i in range(count)],
            "model": {"bottom": [8, 16], "top": [6, 1]},
        }
        | sections
    )


def test_tables_of_a_dlrm_are_named_as_its_parameters() -> None:
    found = tables_of(_job(2))
    assert [(t.name, t.tensor.fqn, t.tensor.shape) for t in found] == [
        ("t0", "tables.t0.weight", (10, 16)),
        ("t1", "tables.t1.weight", (11, 16)),
    ]


def test_tables_alone_have_their_own_names_and_no_optimizer_but_their_own() -> None:
    tables = [{"name": "a", "rows": 3, "dim": 16}, {"name": "b", "rows": 3, "dim": 16}]
    job = parse_job({"tables": [tables[0], tables[1] | {"optimizer": "adam"}]})
    assert [(t.fqn, t.optimizer) for t in tables_of(job)] == [("a", "none"), ("b", "adam")]


@pytest.mark.parametrize(
    ("optimizer", "of_tables"),
    [("sgd", "sgd"), ("adagrad", "rowwise_adagrad"), ("adam", "rowwise_adagrad")],
)
def test_tables_and_units_follow_the_optimizer_of_the_job(optimizer: str, of_tables: str) -> None:
    made = model_of(_job(train={"optimizer": optimizer}), chain([unit("bottom"), unit("top")]))
    assert {table.optimizer for table in made.tables} == {of_tables}
    assert {each.optimizer for each in made.units} == {optimizer}


def test_a_table_keeps_an_optimizer_of_its_own() -> None:
    tables = [{"name": "t", "rows": 3, "dim": 16, "optimizer": "rowwise_adagrad"}]
    job = parse_job({"tables": tables, "model": {}, "train": {"optimizer": "sgd"}})
    assert tables_of(job)[0].optimizer == "rowwise_adagrad"


def test_tensors_are_those_of_tables_then_of_units() -> None:
    made = model_of(_job(1), chain([unit("bottom"), unit("top")]))
    assert [t.fqn for t in made.tensors] == ["tables.t0.weight", "bottom.w", "top.w"]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"dtype": "fp64"}, "'t'.dtype: expected fp32, fp16 or bf16 for dlrm, got fp64."),
        ({"dtype": "bf16", "kind": "hash"}, "expected 'fp32' for kind 'hash', got 'bf16'."),
    ],
)
def test_a_table_of_another_dtype_than_a_run_has_is_refused(keys: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        check_model(_job(tables=[{"name": "t", "rows": 3, "dim": 16, **keys}]))
    assert str(caught.value).endswith(text)


def with_keys(**keys: Any) -> Job:
    return _job(tables=[{"name": "t", "rows": 3, "dim": 16, **keys}])


ASKED_FOR = {
    "pooled": (False, "true for dlrm, got False. It has no place for a sequence: pool it by sum"),
    "num_poolings": ([2.0], "1 for dlrm, got (2.0,). Name as many features of the table: each has"),
    "batch_sizes": ([5], "for dlrm, got (5,). Every sample has a bag of each feature, which may"),
    "output_dtype": ("fp16", '"fp32" for dlrm, got fp16. What rows travel in is planner.estimator'),
}


@pytest.mark.parametrize("key", ASKED_FOR)
def test_what_the_interaction_of_a_dlrm_cannot_take_is_refused_with_the_reason(key: str) -> None:
    value, text = ASKED_FOR[key]
    with pytest.raises(InputError) as caught:
        check_model(with_keys(**{key: value}))
    assert str(caught.value).startswith(f"tables 't'.{key}: expected ")
    assert text in str(caught.value)
    assert str(caught.value).endswith(" Without [model] the tables are planned alone.")


def test_keys_that_say_what_a_dlrm_does_are_taken() -> None:
    batch = _job().batch.size
    asked = {"num_poolings": [1.0], "batch_sizes": [batch], "output_dtype": "fp32", "pooled": True}
    check_model(with_keys(**asked))


def test_rows_of_a_table_in_half_precision_come_back_in_fp32() -> None:
    (table,) = tables_of(with_keys(dtype="bf16"))
    assert table.output_dtype == "fp32"
    assert tables_of(with_keys())[0].output_dtype is None


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_tables_of_a_run_may_be_in_half_precision(dtype: str) -> None:
    check_model(_job(tables=[{"name": "t", "rows": 3, "dim": 16, "dtype": dtype}]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"bottom": [8]}},
            "model.bottom: expected 16 as its last width, the tables' dim, got 8. "
            "Let model.bottom end with 16.",
        ),
        (
            {"model": {"bottom": []}},
            "model.bottom: expected 16 as its last width, the tables' dim, got no layer. "
            "Let model.bottom end with 16.",
        ),
        (
            {"model": {"bottom": [16], "top": []}},
            "model.top: expected at least one width, got no layer.",
        ),
        (
            {
                "tables": [
                    {"name": "a", "rows": 3, "dim": 16},
                    {"name": "b", "rows": 3, "dim": 8},
                ]
            },
            "tables 'b'.dim: expected 16, as the first table's, got 8. "
            "Products need equal dims: set model.interaction to 'cat' or 'dcn', or model.kind to "
            "'tables' for tables alone.",
        ),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_model(_job(**changes))
    assert str(caught.value) == message


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    widths = {"kind": "transformer", "layers": 2, "dim": 12, "heads": 5, "vocab": 7}
    with pytest.raises(InputError) as caught:
        check_model(parse_job({"model": widths}))
    assert str(caught.value) == "model.heads: expected a divisor of model.dim = 12, got 5."


@pytest.mark.parametrize(
    ("model", "tokens", "said"),
    [
        ("llama2-7b", 4096, ()),
        (
            "llama2-7b",
            8192,
            ("batch.sequence 8,192 is beyond the 4,096 positions that llama2-7b was made for",),
        ),
        ("gpt2", 1024, ()),
    ],
)
def test_samples_beyond_the_positions_of_a_model_are_noted(
    model: str, tokens: int, said: tuple[str, ...]
) -> None:
    assert beyond_positions(read_job(model, [f"batch.sequence={tokens}"])) == said


def test_samples_beyond_learned_positions_are_refused() -> None:
    with pytest.raises(InputError, match=r"batch.sequence: expected at most the 1024 positions of"):
        read_job("gpt2", ["batch.sequence=1025"])


def test_a_configuration_that_is_no_longer_there_is_not_asked() -> None:
    job = read_job("llama2-7b")
    model = msgspec.structs.replace(job.model, hf_config="gone/config.json")
    assert beyond_positions(msgspec.structs.replace(job, model=model)) == ()
