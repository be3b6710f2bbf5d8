"""Published step times: what of a row is predicted, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
from published.times import compare, job_of, ordered, why_not

ROW: dict[str, Any] = {
    "source": "somebody/else:page 1",
    "model": "llama",
    "layers": 4,
    "hidden": 512,
    "heads": 8,
    "kv_heads": 8,
    "head_dim": 64,
    "ffn": 1536,
    "glu": True,
    "vocab": 1000,
    "experts": 0,
    "gpu": "H100-80",
    "gpus": 16,
    "zero": 3,
    "tp": 2,
    "pp": 2,
    "vpp": 1,
    "cp": None,
    "sp": True,
    "micro_batch": 1,
    "global_batch": 32,
    "seq": 256,
    "dtype": "bf16",
    "checkpointing": "full",
    "compile": None,
    "framework": "somebody's",
    "step_time_s": 0.5,
}


FIELDS = list(ROW)


def document(*changes: dict[str, Any]) -> dict[str, Any]:
    return {"fields": FIELDS, "rows": [[(ROW | change)[f] for f in FIELDS] for change in changes]}


def test_a_row_is_a_job_of_as_many_microbatches() -> None:
    job = job_of(ROW)
    assert job["parallel"] == {
        "data_shard": 4,
        "tensor": 2,
        "pipeline": 2,
        "context": 1,
        "microbatches": 8,
        "sequence": True,
        "schedule": "1f1b",
    }
    assert job["batch"] == {"size": 8, "sequence": 256}


def test_what_a_framework_does_otherwise_is_said_by_keys() -> None:
    usual = {"attention_backend": "flash", "masked_softmax_fusion": True, "rms_norm_fusion": True}
    assert job_of(ROW | {"zero": 1})["memory"]["megatron"] == usual
    other = job_of(ROW | {"zero": 1, "framework": "AA-scaling, kernel fused"})["memory"]["megatron"]
    assert (other["attention_backend"], other["rms_norm_fusion"]) == ("local", False)
    assert other["parallel_output"] is False
    assert other["account_for_loss_in_pipeline_split"] is True


def test_rows_are_predicted_and_their_errors_stated() -> None:
    found = compare(document({}, {"checkpointing": "none", "step_time_s": 0.1}), "rows.json")
    assert found["all"]["rows"] == 2
    for row in found["rows"]:
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1, abs=1e-3)
        assert sum(row["parts"].values()) == pytest.approx(row["predicted"], abs=1e-2)
    assert found["sources"]["somebody/else"]["fitted_on"] is False


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gpu": "Z1"}, "no preset is a Z1"),
        ({"zero": 3, "dtype": "fp8"}, "fp8 of Transformer Engine under FSDP, which no job says"),
        ({"dtype": "mxfp8"}, "dtype mxfp8"),
        ({"vocab": None}, "vocab is not stated"),
        ({"checkpointing": "unknown"}, "checkpointing is not known"),
    ],
)
def test_what_is_not_predicted_says_why(change: dict[str, Any], why: str) -> None:
    assert why_not(ROW | change) == why
    assert compare(document(change), "rows.json")["left_out"] == {why: 1}


def test_pairs_that_are_close_are_not_told_apart() -> None:
    row = {"source": "a:1", "model": "m", "gpus": 8, "global_batch": 8}
    fast = row | {"measured": 1.0, "predicted": 2.0}
    slow = row | {"measured": 2.0, "predicted": 3.0}
    close = row | {"measured": 1.04, "predicted": 1.0}
    assert ordered([fast, slow]) == (1, 1)
    assert ordered([fast, close]) == (0, 0)
    assert ordered([slow, close | {"predicted": 4.0}]) == (0, 1)
