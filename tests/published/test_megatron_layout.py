from __future__ import annotations

from typing import Any

import pytest
from gpt import GPT
from published.megatron.arguments import describe
from published.megatron.description import Device, Run
from published.megatron.flags import Flags, layer_pattern
from published.megatron.layout import even_stages, expand, hybrid_layers
from published.megatron.schedule import turns

from shardwright.core.errors import InputError

H100 = Device("H100", 80 * 2**30, "hopper")
ARGUMENTS = {**GPT, "micro-batch-size": 1, "global-batch-size": 64, "vocab-size": 1024}


def _run(**more: Any) -> Run:
    given = {name.replace("_", "-"): value for name, value in more.items()}
    return describe({**ARGUMENTS, **given}, world=8, device=H100)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("Et*2|tmL", "Ett|tmL"),
        ("Et*2|(tt|)*2tmL", "Ett|tt|tt|tmL"),
        ("Et|(tt|)*2mL", "Et|tt|tt|mL"),
        ("E,t, t|L", "Ett|L"),
    ],
)
def test_a_layout_is_written_out(short: str, long: str) -> None:
    assert expand(short) == long


@pytest.mark.parametrize("text", ["E(t|L", "Et)|L", "t*"])
def test_a_broken_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        expand(text)


def test_a_layout_of_a_test_file_may_carry_the_backslashes_of_a_shell() -> None:
    run = _run(
        num_layers=14,
        pipeline_model_parallel_size=4,
        pipeline_model_parallel_layout=r"Et*2\|\(tt\|\)*5t\|tL",
    )
    assert [len(chunk.layers) for chunk in run.chunks] == [2, 1]
    assert [chunk.first for chunk in run.chunks] == [6, 13]


@pytest.mark.parametrize(
    ("layers", "stages", "flags", "expected"),
    [
        (12, 4, {}, (3, 3, 3, 3)),
        (6, 8, {"embedding": True, "loss": True}, (0, 1, 1, 1, 1, 1, 1, 0)),
        (8, 4, {"first": 2, "last": 2}, (2, 2, 2, 2)),
        (10, 4, {"first": 1, "last": 3}, (1, 3, 3, 3)),
    ],
)
def test_layers_are_divided_over_stages(
    layers: int, stages: int, flags: dict[str, Any], expected: tuple[int, ...]
) -> None:
    given = {"embedding": False, "loss": False, "first": None, "last": None, **flags}
    assert even_stages(layers, stages, **given) == expected


def test_virtual_stages_give_the_last_rank_every_fourth_layer() -> None:
    run = _run(pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=1)
    assert [chunk.first for chunk in run.chunks] == [3, 7, 11]
    assert [chunk.loss for chunk in run.chunks] == [False, False, True]


def test_letters_of_a_hybrid_model_are_layers_and_slashes_begin_predictions() -> None:
    layers, predictors = hybrid_layers("job", "M-*E/*E")
    assert layers == (("mamba",), ("mlp",), ("attention",), ("moe",))
    assert predictors == ((("attention",), ("moe",)),)


def test_an_unknown_letter_of_a_hybrid_model_is_named() -> None:
    with pytest.raises(InputError, match=r"hybrid-layer-pattern: expected letters .* got Q"):
        hybrid_layers("job", "MQ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", (True, True, True)),
        ("2", (True, False, True)),
        ("([0]*1+[1]*2)", (False, True, True)),
        ("[1,0,0]", (True, False, False)),
    ],
)
def test_a_pattern_says_which_layers_have_experts(text: str, expected: tuple[bool, ...]) -> None:
    assert layer_pattern("job", text, 3) == expected


@pytest.mark.parametrize("text", ["__import__('os')", "[0]*2", "x", "[1]+1"])
def test_a_pattern_that_is_no_list_of_the_right_length_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        layer_pattern("job", text, 3)


def test_flags_are_found_under_dashes_or_underscores_and_texts_are_numbers() -> None:
    flags = Flags({"--hidden_size": "512", "swiglu": "false", "lr": "1e-2"}, "job")
    assert flags.integer("hidden-size", 0) == 512
    assert not flags.on("swiglu")
    assert flags.number("lr", 0.0) == 0.01
    with pytest.raises(InputError, match="job: lr: expected a whole number"):
        flags.integer("lr", 0)


def test_a_flag_that_nothing_knows_is_listed() -> None:
    run = _run(quantum_entanglement=True, log_interval=1)
    assert run.ignored == ("quantum-entanglement",)


def _most(run: Run) -> int:
    alive = most = 0
    for turn in turns(run):
        alive += 1 if turn.direction == "forward" else -1
        most = max(most, alive)
    assert alive == 0
    return most


def test_the_last_rank_alternates_without_virtual_stages() -> None:
    assert _most(_run(pipeline_model_parallel_size=4)) == 1


def test_the_last_rank_of_virtual_stages_first_runs_all_chunks_but_one() -> None:
    run = _run(pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=1)
    assert _most(run) == 2 * 4 + 1
    assert [turn.chunk for turn in turns(run)][:9] == [0] * 4 + [1] * 4 + [2]


def test_more_ranks_than_the_test_has_are_taken_where_the_degrees_need_them() -> None:
    assert _run(tensor_model_parallel_size=4, pipeline_model_parallel_size=4).parallel.world == 16


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"hidden_size": None}, "hidden-size"),
        ({"encoder_num_layers": 4}, "encoder"),
        ({"perform_rl_step": True}, "reinforcement"),
        ({"export_kd_teacher_load": "x"}, "distillation"),
        ({"inference_max_seq_length": 4}, "inference"),
        ({"recompute_granularity": "some"}, "recompute-granularity"),
    ],
)
def test_a_run_that_no_table_describes_is_refused_by_name(
    flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        _run(**flags)
