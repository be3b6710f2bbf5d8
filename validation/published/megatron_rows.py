"""Predictions for the rows of Megatron-LM's functional tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from published.devices import device_of, ranks_of
from published.megatron.arguments import describe
from published.megatron.description import Run
from published.megatron.estimate import estimate
from published.prediction import Prediction
from shardwright.core.errors import InputError, UnsupportedError, expected

FAMILIES = {
    "t5": "an encoder beside the decoder is not described",
    "bert": "an encoder-only model is not described",
    "retro": "a retrieval model is not described",
    "mimo": "a model with a vision encoder is not described",
    "multimodal": "a model with a vision encoder is not described",
    "vision": "a vision model is not described",
}
"""Families of tests that are left out, by how their name begins."""


def predict_megatron(row: Mapping[str, Any]) -> Prediction:
    """Predict the peak of the last rank, whose writer logged the row."""
    source = str(row.get("source", ""))
    family, test = test_of(source)
    for name, reason in FAMILIES.items():
        if family.lower().startswith(name):
            raise UnsupportedError(f"{family}: {reason}")
    measured = row.get("max_alloc_bytes")
    if not isinstance(measured, int | float) or measured <= 0:
        raise InputError(expected("max_alloc_bytes", "a number of bytes", repr(measured)))
    arguments = row.get("args")
    if not isinstance(arguments, Mapping) or not arguments:
        raise InputError(expected("args", "the arguments of the run", "none"))
    platform = str(row.get("platform") or "")
    run, assumptions = _run(arguments, row.get("env"), test, platform)
    told = estimate(run)
    steady = row.get("steady_alloc_bytes")
    return Prediction(
        family=family,
        platform=platform,
        predicted=told.peak,
        measured=int(measured),
        parts={part.name: part.bytes for part in told.parts},
        assumptions=assumptions,
        capacity=run.device.capacity,
        phase=max(told.phases, key=lambda phase: phase.bytes).name,
        steady=told.steady,
        measured_steady=int(steady) if isinstance(steady, int | float) else None,
        parameters=told.parameters,
        configuration=f"{family}/{test}",
    )


def test_of(source: str) -> tuple[str, str]:
    """Family and name of the test that a row's source names."""
    path = source.rsplit(":", 1)[-1].split("/test_cases/", 1)[-1]
    folders = path.split("/")[:-1]
    if len(folders) < 2:
        return folders[0] if folders else "unknown", path
    return folders[-2], folders[-1]


def old_engine(test: str, platform: str) -> bool:
    """Whether the row came from a container whose Transformer Engine knows no deterministic flash
    or fused attention; read from rows, see ``memory/megatron/fitted.py``."""
    return platform.startswith("lts") and ("dracooci" in platform or "frozen" in test)


def _run(
    arguments: Mapping[str, Any], environment: Any, test: str, platform: str
) -> tuple[Run, tuple[str, ...]]:
    device, unnamed = device_of(platform)
    ranks, guessed = ranks_of(test, platform)
    run = describe(
        arguments,
        world=ranks,
        device=device,
        environment=environment if isinstance(environment, Mapping) else {},
        old_engine=old_engine(test, platform),
        where=test,
    )
    if run.parallel.world != ranks:
        guessed = f"{run.parallel.world} ranks: the fewest that the degrees of parallelism allow"
    notes = [*unnamed, guessed, *run.assumed]
    if run.shape.experts is not None:
        notes.append("tokens spread evenly over the experts")
    if run.ignored:
        notes.append("flags that nothing here depends on or knows: " + ", ".join(run.ignored))
    return run, tuple(notes)
