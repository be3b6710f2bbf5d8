"""Predictions beside measurements: errors, their distribution, and how far rows differ that
ought to be equal."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from published.megatron_rows import predict_megatron
from published.prediction import LeftOut, Prediction, Row
from published.reported_rows import predict_reported
from published.torchtitan_rows import predict_torchtitan
from shardwright.core.errors import InputError, ShardwrightError, expected

# Lists of a file of published rows, and what predicts their rows.
FRAMEWORKS: dict[str, Callable[[Mapping[str, Any]], Prediction]] = {
    "torchtitan": predict_torchtitan,
    "megatron": predict_megatron,
    "reported": predict_reported,
}
CAVEATS = (
    "megatron: values are those of the last rank, which holds the last pipeline stage and is "
    "usually not the one with the highest peak",
    "megatron: bytes that torch has allocated, not those that it has reserved",
    "megatron: the number of ranks is not among the arguments; it is read from the name of the "
    "test (8 where the name says nothing)",
    "megatron: tokens are taken to spread evenly over the experts; an uneven router needs more",
    "megatron: the counter is never reset, so loading a checkpoint may have made the peak",
    "megatron: two hybrids of attention and Mamba layers are left out, for no job describes them; "
    "a profile of their own, which is gone, was -2.7 and +5.9 % off",
    "megatron: one configuration on several platforms, or measured twice, is the noise floor",
    "torchtitan: pages do not say whether memory is allocated or reserved",
    "reported: what differs from the code that was measured stands among the assumptions of a row",
    "torchtitan: sequence length and some checkpointing policies are inferred, see the rows",
)
# What was read from measured rows, and from which.
FITTED: tuple[dict[str, Any], ...] = (
    {
        "what": "which tests ran on an old Transformer Engine, whose deterministic attention is "
        "unfused",
        "value": "lts rows of dracooci machines and of tests that resume from a frozen checkpoint",
        "rows": [
            "gpt/gpt3_mcore_te_tp1_pp1_frozen_resume_torch_dist_dist_optimizer",
            "gpt/gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings_interleaved_no_fusion",
            "gpt/gpt3_mcore_te_tp1_pp4_resume_torch_dist_persistent_disable_bias_linear",
            "gpt/gpt3_mcore_te_tp4_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_"
            "param_gather",
            "moe/gpt3_mcore_te_tp2_pp1_frozen_resume_torch_dist_te_8experts2parallel_dist_optimizer",
        ],
    },
    {
        "what": "deterministic attention that Transformer Engine picks on Blackwell",
        "value": "flash attention",
        "rows": [
            "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer_1node",
            "gpt/gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings_interleaved_no_fusion",
        ],
    },
    {
        "what": "ranks of a release test, which its arguments do not give",
        "value": "64",
        "rows": ["mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release"],
    },
)


def compare(document: Any, where: str) -> dict[str, Any]:
    """Predict every row of a file of published rows; the whole result as one object."""
    rows, left_out = _predict(_frameworks(document, where))
    return {
        "rows": [row.document() for row in rows],
        "left_out": [
            {"source": out.source, "framework": out.framework, "reason": out.reason}
            for out in left_out
        ],
        "distribution": distributions(rows),
        "noise_floor": noise_floor(rows),
        "fit_check": fit_check(rows),
        "fitted_on": list(FITTED),
        "caveats": list(CAVEATS),
    }


def _frameworks(document: Any, where: str) -> dict[str, Sequence[Any]]:
    if not isinstance(document, Mapping):
        raise InputError(expected(where, "an object with lists of rows", type(document).__name__))
    found = {name: document[name] for name in FRAMEWORKS if name in document}
    if not found:
        raise InputError(expected(where, f"a list named {' or '.join(FRAMEWORKS)}", "none"))
    for name, rows in found.items():
        if not isinstance(rows, list):
            raise InputError(expected(f"{where}: {name}", "a list", type(rows).__name__))
    return found


def _predict(frameworks: Mapping[str, Sequence[Any]]) -> tuple[list[Row], list[LeftOut]]:
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    for framework, items in frameworks.items():
        predict = FRAMEWORKS[framework]
        for index, item in enumerate(items):
            source = f"{framework}[{index}]"
            if isinstance(item, Mapping):
                source = str(item.get("source") or source)
            try:
                if not isinstance(item, Mapping):
                    raise InputError(expected(source, "an object", type(item).__name__))
                rows.append(Row(source, framework, predict(item)))
            except ShardwrightError as error:
                left_out.append(LeftOut(source, framework, str(error)))
            except Exception as error:  # one row must not cost the others
                reason = f"the row could not be predicted: {type(error).__name__}: {error}"
                left_out.append(LeftOut(source, framework, reason))
    return rows, left_out


def distributions(rows: Sequence[Row]) -> dict[str, Any]:
    """How far predictions are off: over all rows, by framework, and by family within it."""
    by_framework: dict[str, list[Row]] = defaultdict(list)
    by_family: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_framework[row.framework].append(row)
        by_family[row.prediction.family].append(row)
    return {
        "all": distribution(rows),
        "by_framework": {name: distribution(some) for name, some in by_framework.items()},
        "by_family": {name: distribution(some) for name, some in sorted(by_family.items())},
    }


def distribution(rows: Sequence[Row]) -> dict[str, Any]:
    """Median, 90th percentile and worst of the errors' sizes."""
    if not rows:
        return {"n": 0, "median": None, "p90": None, "worst": None, "worst_row": None}
    errors = sorted(abs(row.prediction.error) for row in rows)
    worst = max(rows, key=lambda row: abs(row.prediction.error))
    return {
        "n": len(rows),
        "median": round(statistics.median(errors), 6),
        "p90": round(quantile(errors, 0.9), 6),
        "worst": round(errors[-1], 6),
        "worst_row": worst.source,
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of the ordered values lies, between two of them linearly."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def noise_floor(rows: Iterable[Row]) -> dict[str, Any]:
    """The spread of measurements of one test over platforms and repetitions: no prediction that
    does not know the platform's software can be better than half of it."""
    tests: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        if row.prediction.configuration:
            tests[row.prediction.configuration].append(row.prediction.measured)
    spreads = {
        test: (max(some) - min(some)) / statistics.median(some)
        for test, some in tests.items()
        if len(some) > 1
    }
    if not spreads:
        return {"tests": 0, "median": None, "p90": None, "worst": None, "worst_test": None}
    ordered = sorted(spreads.values())
    worst = max(spreads, key=lambda test: spreads[test])
    return {
        "tests": len(spreads),
        "median": round(statistics.median(ordered), 6),
        "p90": round(quantile(ordered, 0.9), 6),
        "worst": round(ordered[-1], 6),
        "worst_test": worst,
    }


def fit_check(rows: Iterable[Row]) -> dict[str, Any]:
    """Rows that measured above their device's memory, and those among them called a fit."""
    checked = [row for row in rows if row.prediction.capacity is not None]
    above = [row for row in checked if row.prediction.measured > (row.prediction.capacity or 0)]
    return {
        "checked": len(checked),
        "measured_above_device": len(above),
        "called_a_fit": [row.source for row in above if row.prediction.verdict == "fits"],
    }
