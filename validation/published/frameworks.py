"""Who predicts the rows of which framework."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from published.prediction import Prediction
from shardwright.core.errors import UnsupportedError

Predictor = Callable[[Mapping[str, Any]], Prediction]

FRAMEWORKS = {
    "torchtitan": "predict_torchtitan",
    "megatron": "predict_megatron",
    "reported": "predict_reported",
}
"""Lists of a file of published rows, and the functions of the modules that are named for them."""


def predictor(framework: str) -> Predictor:
    """The function that predicts the rows of a framework; a framework whose module is not there
    leaves every row out."""
    name = f"published.{framework}_rows"
    if importlib.util.find_spec(name) is None:
        return _absent(f"{framework}: no predictor for its rows in this version")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return _absent(f"{framework}: its predictor cannot be loaded: {error}")
    function: Predictor = getattr(module, FRAMEWORKS[framework])
    return function


def _absent(reason: str) -> Predictor:
    def refuse(row: Mapping[str, Any]) -> Prediction:
        raise UnsupportedError(reason)

    return refuse
