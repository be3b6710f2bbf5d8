from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from published.__main__ import main
from published.comparison import (
    compare,
    distribution,
    fit_check,
    noise_floor,
    quantile,
)
from published.devices import device_of, ranks_of
from published.megatron_rows import old_engine, test_of
from published.prediction import Prediction, Row
from published.sheet import SECTIONS, page

from shardwright.core.errors import EXIT_INPUT, InputError

test_of.__test__ = False  # type: ignore[attr-defined]
GIB = 2**30
ARGUMENTS = {
    "num-layers": 12,
    "hidden-size": 512,
    "num-attention-heads": 8,
    "seq-length": 1024,
    "micro-batch-size": 4,
    "global-batch-size": 32,
    "bf16": True,
    "train-iters": 50,
    "vocab-file": "bpe/vocab.json",
    "deterministic-mode": True,
    "use-distributed-optimizer": True,
}


def _row(test: str = "gpt/small", platform: str = "dev_dgx_h100", **more: Any) -> dict[str, Any]:
    return {
        "source": f"repository@commit:tests/functional_tests/test_cases/{test}/{platform}.json",
        "platform": platform,
        "max_alloc_bytes": 2.5 * GIB,
        "steady_alloc_bytes": 0.5 * GIB,
        "env": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        "args": ARGUMENTS,
        **more,
    }


def _compared(*rows: Any) -> dict[str, Any]:
    return compare({"megatron": list(rows)}, "file")


def _told(predicted: int, measured: int, capacity: int | None = 80 * GIB, test: str = "a") -> Row:
    told = Prediction("gpt", "A100", predicted, measured, {}, capacity=capacity, configuration=test)
    return Row(f"repository:{test}/{measured}.json", "megatron", told)


def test_a_row_is_shown_with_its_parts_and_what_was_taken_for_granted() -> None:
    (row,) = _compared(_row())["rows"]
    assert row["family"] == "gpt"
    assert row["predicted_bytes"] == sum(row["parts"].values())
    assert row["error"] == pytest.approx(
        row["predicted_bytes"] / row["measured_bytes"] - 1, abs=1e-6
    )
    assert any("--vocab-size 50257" in note for note in row["assumptions"])
    assert any("8 ranks" in note for note in row["assumptions"])


def test_states_stand_in_the_parts_by_their_closed_form() -> None:
    (row,) = _compared(_row())["rows"]
    parts, elements = row["parts"], row["parameters"]
    # bf16, fp32, and a copy and two moments in fp32, each shared by 8 ranks unit by unit.
    assert parts["gradient"] == 4 * elements
    states = parts["weight"] + parts["optimizer state"] - 2 * elements
    assert states == pytest.approx(12 * elements / 8, rel=1e-6)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (_row("t5/small"), "encoder"),
        (_row("multimodal-llava/small"), "vision"),
        (_row(args={}), "the arguments of the run"),
        (_row(args={**ARGUMENTS, "perform-rl-step": True}), "inference beside"),
        (_row(args={**ARGUMENTS, "num-attention-heads": 0}), "expected a number from 1"),
        (_row(max_alloc_bytes=None), "max_alloc_bytes"),
        ([1], "expected an object"),
        ({}, "max_alloc_bytes"),
    ],
)
def test_a_row_that_cannot_be_predicted_is_left_out_with_its_reason(row: Any, reason: str) -> None:
    result = _compared(row, _row())
    assert len(result["rows"]) == 1
    (out,) = result["left_out"]
    assert reason in out["reason"]


def test_no_set_of_arguments_breaks_the_comparison() -> None:
    values = [None, True, False, 0, 1, 3, -1, 2.5, "x", "([0]*3)", [1], {"a": 1}, ""]
    names = [
        *ARGUMENTS,
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "num-layers-per-virtual-pipeline-stage",
        "num-experts",
        "moe-layer-freq",
        "multi-latent-attention",
        "hybrid-layer-pattern",
        "pipeline-model-parallel-layout",
        "recompute-modules",
        "mtp-num-layers",
        "fp8-format",
    ]
    chance = random.Random(7)
    rows = []
    for _ in range(120):
        changed = {name: chance.choice(values) for name in chance.sample(names, 3)}
        rows.append(_row(args={**ARGUMENTS, **changed}))
    result = _compared(*rows)
    assert len(result["rows"]) + len(result["left_out"]) == len(rows)


def test_the_distribution_shows_median_ninth_tenth_and_worst() -> None:
    rows = [_told(100 + off, 100) for off in (0, -10, 20, 30)]
    told = distribution(rows)
    assert (told["n"], told["median"], told["worst"]) == (4, 0.15, 0.3)
    assert told["p90"] == pytest.approx(0.27)
    assert distribution([])["median"] is None


def test_quantiles_lie_between_values_linearly() -> None:
    assert quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert quantile([5.0], 0.9) == 5.0


def test_the_noise_floor_is_the_spread_of_one_test() -> None:
    floor = noise_floor(
        [_told(1, 100), _told(1, 110), _told(1, 50, test="alone"), _told(1, 9, test="")]
    )
    assert floor["tests"] == 1
    assert floor["worst"] == pytest.approx(10 / 105, abs=1e-6)


def test_a_row_above_its_device_that_is_called_a_fit_is_named() -> None:
    rows = [_told(10 * GIB, 90 * GIB), _told(90 * GIB, 90 * GIB), _told(1, 90 * GIB, None)]
    told = fit_check(rows)
    assert told == {
        "checked": 2,
        "measured_above_device": 2,
        "called_a_fit": [rows[0].source],
    }


@pytest.mark.parametrize(
    ("predicted", "verdict"),
    [(64 * GIB, "fits"), (65 * GIB, "perhaps"), (81 * GIB, "does not fit")],
)
def test_a_verdict_leaves_room_for_the_error(predicted: int, verdict: str) -> None:
    assert _told(predicted, 1).prediction.verdict == verdict


@pytest.mark.parametrize(
    ("test", "platform", "ranks"),
    [
        ("gpt3_small", "dev_dgx_h100", 8),
        ("gpt3_small_1node", "dev_dgx_gb200", 4),
        ("gpt3_small_1node", "dev_dgx_h100", 8),
        ("deepseek_fsdp_4node", "dev_dgx_gb200", 16),
        ("nightly_dgx_a100_1N8G_tp1", "dev", 8),
        ("lightning_dgx_gb200_1N4G", "dev_dgx_gb200", 4),
        ("lightning_dgx_gb200_2N8G", "dev_dgx_gb200", 8),
        ("mixtral_release_sm", "dev_dgx_h100", 64),
    ],
)
def test_ranks_are_read_from_the_name_of_a_test(test: str, platform: str, ranks: int) -> None:
    assert ranks_of(test, platform)[0] == ranks


def test_devices_are_read_from_the_name_of_a_platform() -> None:
    assert device_of("dev_dgx_gb200_2nd")[0].name == "GB200"
    assert device_of("lts_dgxa100_dracooci-ord")[0].name == "A100"
    device, notes = device_of("lts")
    assert device.name == "A100"
    assert notes


def test_old_containers_are_known_by_platform_and_test() -> None:
    assert old_engine("gpt3_frozen_resume", "lts_dgx_a100")
    assert old_engine("gpt3", "lts_dgxa100_dracooci")
    assert not old_engine("gpt3_frozen_resume", "dev_dgx_a100")


def test_a_source_names_family_and_test() -> None:
    assert test_of(str(_row()["source"])) == ("gpt", "small")
    assert test_of("nonsense")[0] == "unknown"


def _file(folder: Path, content: Any) -> str:
    path = folder / "rows.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_the_command_prints_one_object(tmp_path: Path, capsys: Any) -> None:
    path = _file(tmp_path, {"note": "x", "megatron": [_row()], "formulas": {}})
    assert main([path]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) >= {"rows", "left_out", "distribution", "noise_floor", "caveats", "fit_check"}
    assert set(told["distribution"]) >= {"all", "by_family"}


def test_the_command_writes_files_and_a_page_of_figures(tmp_path: Path, capsys: Any) -> None:
    path = _file(tmp_path, {"megatron": [_row(), _row("t5/small")]})
    assert main([path, "-o", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out)["all"]["n"] == 1
    written = json.loads((tmp_path / "out" / "megatron.json").read_text())
    assert len(written["rows"]) == len(written["left_out"]) == 1
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| gpt/small/dev_dgx_h100 | 2,560 |" in text


@pytest.mark.parametrize("name", ["README.md", "megatron.json"])
def test_rows_are_not_written_over_other_files(tmp_path: Path, capsys: Any, name: str) -> None:
    path = _file(tmp_path, {"megatron": [_row()]})
    (tmp_path / name).write_text("mine")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert main([path, "-o", str(tmp_path)]) == EXIT_INPUT
    assert f"{tmp_path / name}: expected a new file or an earlier " in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"megatron": 3}', b"\xff".decode("latin-1")])
def test_a_bad_file_is_one_line_and_code_2(content: str, tmp_path: Path, capsys: Any) -> None:
    assert main([_file(tmp_path, content)]) == EXIT_INPUT
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("shardwright: ")
    assert told.err.count("\n") == 1


def test_a_file_that_is_not_there_is_code_2(tmp_path: Path, capsys: Any) -> None:
    assert main([str(tmp_path / "absent.json")]) == EXIT_INPUT
    assert "absent.json" in capsys.readouterr().err


def test_a_framework_nobody_knows_is_refused() -> None:
    with pytest.raises(InputError, match="torchtitan or megatron"):
        compare({"deepspeed": []}, "file")


def test_the_page_can_be_made_of_nothing() -> None:
    assert "0 of 0 rows" in page(compare({"megatron": []}, "file"))


@pytest.mark.parametrize("name", SECTIONS)
def test_the_page_has_what_the_results_beside_it_say(name: str) -> None:
    folder = Path(__file__).parents[2] / "validation" / "published"
    told = json.loads((folder / f"{name}.json").read_text())
    carried = (folder / "README.md").read_text()
    assert all(part.strip() in carried for part in SECTIONS[name](told))
    assert SECTIONS[name](told)[0] in page(compare({"megatron": []}, "file"), {name: told})
