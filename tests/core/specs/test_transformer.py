from __future__ import annotations

from typing import Any

import pytest
from shardwright.core.specs.transformer import feed_forward_width, spec

from shardwright.core.errors import InputError
from shardwright.core.job import Job, parse_job
from shardwright.core.model import Stage, Work
from shardwright.lab.recordings import described


def _job(size: int = 2, sequence: int = 5, **model: Any) -> Job:
    widths = {"kind": "transformer", "layers": 2, "dim": 12, "heads": 3, "vocab": 7}
    return parse_job(
        {"model": widths | model, "batch": {"size": size, "sequence": sequence}},
    )


def _stage(job: Job, name: str) -> Stage:
    return next(stage for stage in spec(job).stages if stage.name == name)


def _flops(works: tuple[Work, ...]) -> dict[str, int]:
    return {work.name: work.flops_per_sample for work in works}


def test_stages_come_in_forward_order() -> None:
    found = [(stage.name, stage.access) for stage in described(_job()).stages]
    assert found == [
        ("embed", "gather"),
        ("layers.0", "gather"),
        ("layers.1", "gather"),
        ("head", "gather"),
        ("loss", "none"),
    ]


def test_every_gather_stage_is_a_unit_and_only_blocks_may_be_merged() -> None:
    made = spec(_job())
    assert [(unit.name, unit.series) for unit in made.units] == [
        ("embed", ""),
        ("layers.0", "layers"),
        ("layers.1", "layers"),
        ("head", ""),
    ]
    assert [u.name for u in made.units] == [s.name for s in made.stages if s.access == "gather"]


def test_there_are_no_tables_and_no_buffers() -> None:
    made = spec(_job())
    assert (made.kind, made.tables, made.buffers) == ("transformer", (), ())


def test_tensors_are_those_of_each_unit_in_the_order_of_its_forward() -> None:
    assert [(t.fqn, t.shape) for t in spec(_job(layers=1)).tensors] == [
        ("embed.token.weight", (7, 12)),
        ("embed.position.weight", (5, 12)),
        ("layers.0.norm1.weight", (12,)),
        ("layers.0.norm1.bias", (12,)),
        ("layers.0.qkv.weight", (36, 12)),
        ("layers.0.qkv.bias", (36,)),
        ("layers.0.proj.weight", (12, 12)),
        ("layers.0.proj.bias", (12,)),
        ("layers.0.norm2.weight", (12,)),
        ("layers.0.norm2.bias", (12,)),
        ("layers.0.up.weight", (48, 12)),
        ("layers.0.up.bias", (48,)),
        ("layers.0.down.weight", (12, 48)),
        ("layers.0.down.bias", (12,)),
        ("head.norm.weight", (12,)),
        ("head.norm.bias", (12,)),
        ("head.vocab.weight", (7, 12)),
    ]


def test_the_feed_forward_is_four_times_as_wide_unless_it_is_told() -> None:
    assert feed_forward_width(_job(dim=6).model) == 24
    assert feed_forward_width(_job(dim=6, ffn_dim=5).model) == 5
    shapes = {t.fqn: t.shape for t in spec(_job(dim=6, ffn_dim=5)).tensors}
    assert shapes["layers.1.up.weight"] == (5, 6)
    assert shapes["layers.1.down.weight"] == (6, 5)


def test_a_linear_takes_two_flops_per_weight_and_token_forward_and_twice_that_backward() -> None:
    stage = _stage(_job(), "layers.0")
    forward, backward = _flops(stage.forward), _flops(stage.backward)
    for layer, weights in (("qkv", 36 * 12), ("proj", 12 * 12), ("up", 48 * 12), ("down", 12 * 48)):
        assert forward[f"layers.0.{layer}"] == 2 * 5 * weights
        assert backward[f"layers.0.{layer}"] == 4 * 5 * weights


def test_attention_grows_with_the_square_of_the_sequence() -> None:
    short, long = (_stage(_job(sequence=n), "layers.0") for n in (5, 10))
    name = "layers.0.attention"
    assert _flops(long.forward)[name] == 4 * _flops(short.forward)[name] == 4 * 10 * 10 * 12
    assert _flops(short.backward)[name] == 10 * 5 * 5 * 12


def test_a_sample_brings_its_inputs_and_its_targets() -> None:
    found = {i.name: (i.kind, i.nbytes(2)) for i in spec(_job()).inputs}
    assert found == {"inputs": ("input", 2 * 5 * 8), "targets": ("input", 2 * 5 * 8)}


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_units_have_the_optimizer_of_the_job(optimizer: str) -> None:
    job = parse_job({"model": {"kind": "transformer"}, "train": {"optimizer": optimizer}})
    assert {unit.optimizer for unit in spec(job).units} == {optimizer}


@pytest.mark.parametrize("layers", [1, 3])
def test_a_step_frees_all_that_it_takes_but_the_loss_and_parameters_gradients(
    layers: int,
) -> None:
    made = spec(_job(layers=layers))
    stages = made.stages
    held: set[str] = set()
    for direction in ("forward", "backward"):
        for stage in stages if direction == "forward" else reversed(stages):
            for work in getattr(stage, direction):
                taken = {item.name for item in work.takes}
                assert len(taken) == len(work.takes)
                assert not taken & held
                held |= taken
                assert set(work.frees) <= held
                held -= set(work.frees)
    gradients = {f"gradient.{tensor.fqn}" for unit in made.units for tensor in unit.tensors}
    assert held == {"loss"} | gradients


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        spec(_job(heads=5))
    assert str(caught.value) == "model.heads: expected a divisor of model.dim = 12, got 5."
