from __future__ import annotations

from typing import Any

import pytest
from shardwright.core.specs.dlrm import interaction_width, mlp_tensors, spec

from shardwright.core.errors import InputError
from shardwright.core.job import Job, parse_job
from shardwright.core.model import Stage, Work
from shardwright.lab.recordings import described


def _job(count: int = 3, **sections: Any) -> Job:
    return parse_job(
        {
            "tables": [{"name": f"t{i}", "rows": 10 + i, "dim": 16} for i in range(count)],
            "model": {"bottom": [8, 16], "top": [6, 1]},
        }
        | sections
    )


def _stage(job: Job, name: str) -> Stage:
    return next(stage for stage in spec(job).stages if stage.name == name)


def _flops(works: tuple[Work, ...]) -> dict[str, int]:
    return {work.name: work.flops_per_sample for work in works}


@pytest.mark.parametrize(
    ("features", "dim", "kind", "width"),
    [(26, 16, "dot", 367), (1, 4, "dot", 5), (3, 16, "dot", 22), (3, 16, "cat", 64)],
)
def test_the_interaction_has_its_width(features: int, dim: int, kind: str, width: int) -> None:
    assert interaction_width(features, dim, kind) == width


def test_a_linear_sits_at_every_even_index_with_weight_then_bias() -> None:
    assert [(t.fqn, t.shape, t.dtype) for t in mlp_tensors("top", (22, 6, 1))] == [
        ("top.0.weight", (6, 22), "fp32"),
        ("top.0.bias", (6,), "fp32"),
        ("top.2.weight", (1, 6), "fp32"),
        ("top.2.bias", (1,), "fp32"),
    ]


def test_tensors_are_those_of_tables_then_bottom_then_top() -> None:
    assert [(t.fqn, t.shape) for t in spec(_job(2)).tensors] == [
        ("tables.t0.weight", (10, 16)),
        ("tables.t1.weight", (11, 16)),
        ("bottom.0.weight", (8, 13)),
        ("bottom.0.bias", (8,)),
        ("bottom.2.weight", (16, 8)),
        ("bottom.2.bias", (16,)),
        ("top.0.weight", (6, 19)),
        ("top.0.bias", (6,)),
        ("top.2.weight", (1, 6)),
        ("top.2.bias", (1,)),
    ]


def test_stages_come_in_forward_order() -> None:
    found = [(stage.name, stage.access) for stage in described(_job()).stages]
    assert found == [
        ("bottom", "gather"),
        ("tables", "route"),
        ("interaction", "none"),
        ("top", "gather"),
        ("loss", "none"),
    ]


def test_a_linear_takes_two_flops_per_weight_forward() -> None:
    flops = _flops(_stage(_job(), "top").forward)
    assert (flops["top.0"], flops["top.1"]) == (2 * 22 * 6, 2 * 6 * 1)


def test_a_linear_takes_twice_as_many_flops_backward() -> None:
    flops = _flops(_stage(_job(), "top").backward)
    assert (flops["top.0"], flops["top.1"]) == (4 * 22 * 6, 4 * 6 * 1)


def test_the_first_linear_has_no_gradient_for_the_data() -> None:
    flops = _flops(_stage(_job(), "bottom").backward)
    assert (flops["bottom.0"], flops["bottom.1"]) == (2 * 13 * 8, 4 * 8 * 16)


def test_the_products_of_the_interaction_take_their_flops() -> None:
    stage = _stage(_job(), "interaction")
    assert _flops(stage.forward)["interaction.bmm"] == 2 * 4 * 4 * 16
    assert _flops(stage.backward)["interaction.bmm"] == 4 * 4 * 4 * 16


def test_concatenation_computes_nothing() -> None:
    stage = _stage(_job(model={"bottom": [16], "top": [1], "interaction": "cat"}), "interaction")
    assert sum(_flops(stage.forward + stage.backward).values()) == 0


def test_only_dot_has_index_buffers() -> None:
    assert [b.nbytes for b in spec(_job(3)).buffers] == [48, 48]
    assert spec(_job(model={"bottom": [16], "interaction": "cat"})).buffers == ()


def test_a_sample_brings_dense_features_ids_and_a_label() -> None:
    assert {i.name: i.nbytes(10) for i in spec(_job(3)).inputs} == {
        "dense": 10 * 13 * 4,
        "ids": 10 * 3 * 8,
        "labels": 10 * 4,
    }


@pytest.mark.parametrize(
    ("optimizer", "of_tables"),
    [("sgd", "sgd"), ("adagrad", "rowwise_adagrad"), ("adam", "rowwise_adagrad")],
)
def test_tables_follow_the_optimizer_of_the_job(optimizer: str, of_tables: str) -> None:
    made = spec(_job(train={"optimizer": optimizer}))
    assert {table.optimizer for table in made.tables} == {of_tables}
    assert {unit.optimizer for unit in made.units} == {optimizer}


def test_a_table_keeps_an_optimizer_of_its_own() -> None:
    tables = [{"name": "t", "rows": 3, "dim": 16, "optimizer": "rowwise_adagrad"}]
    made = spec(parse_job({"tables": tables, "train": {"optimizer": "sgd"}}))
    assert made.tables[0].optimizer == "rowwise_adagrad"


def test_a_table_of_another_dtype_than_the_run_has_is_refused() -> None:
    tables = [{"name": "t", "rows": 3, "dim": 16, "dtype": "bf16"}]
    with pytest.raises(InputError, match=r"tables 't'\.dtype: expected fp32 for dlrm, got bf16"):
        spec(parse_job({"tables": tables, "train": {}}))


@pytest.mark.parametrize("interaction", ["dot", "cat"])
def test_a_step_frees_all_that_it_takes_but_the_loss_and_parameters_gradients(
    interaction: str,
) -> None:
    model = {"bottom": [8, 16], "top": [6, 5, 1], "interaction": interaction}
    stages = spec(_job(model=model)).stages
    works = [work for stage in stages for work in (*stage.forward, *stage.backward)]
    taken = [item.name for work in works for item in work.takes]
    assert len(taken) == len(set(taken))
    freed = {name for work in works for name in work.frees}
    made = spec(_job(model=model))
    gradients = {f"gradient.{_linear(t.fqn)}" for unit in made.units for t in unit.tensors}
    assert set(taken) - freed == {"loss"} | gradients
    # the exchange takes the rows; concatenation hands the bottom a view of a gradient
    views = {"gradient.bottom.2"} if interaction == "cat" else set[str]()
    assert freed - set(taken) == {"rows"} | views


def _linear(fqn: str) -> str:
    """A layer by its own number: every second module of a stack is one."""
    stack, number, part = fqn.split(".")
    return f"{stack}.{int(number) // 2}.{part}"


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
            "dlrm stacks all embeddings: give every table the same dim.",
        ),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        spec(_job(**changes))
    assert str(caught.value) == message
