"""The three evaluations of a cost formula side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardwright.core.amount import Amount, Step, derivation, leaf, named
from shardwright.cost.clock import reached
from shardwright.cost.presets import PRESETS

Case = Callable[[Any], Any]
Sample = dict[str, float]


def _parts(result: Any) -> dict[str, Any]:
    return result if isinstance(result, dict) else {"result": result}


def _arrays(samples: Sequence[Sample]) -> dict[str, Any]:
    return {name: np.array([sample[name] for sample in samples]) for name in samples[0]}


@pytest.fixture(scope="session")
def agree(
    reevaluate: Callable[[Sequence[Step]], None],
) -> Callable[[Case, Sequence[Sample], str], None]:
    """Fails unless plain numbers, arrays and Amounts give one result, which is explained."""

    def check(case: Case, samples: Sequence[Sample], preset: str) -> None:
        told = PRESETS[preset].constants | PRESETS[preset].clock
        constants = reached({name: c.value for name, c in told.items()})
        leaves = reached({name: leaf(c.value, name) for name, c in told.items()})
        vectors = _parts(case(SimpleNamespace(c=constants, **_arrays(samples))))
        for index, sample in enumerate(samples):
            plain = _parts(case(SimpleNamespace(c=constants, **sample)))
            inputs = {name: leaf(value, name) for name, value in sample.items()}
            explained = _parts(case(SimpleNamespace(c=leaves, **inputs)))
            assert plain.keys() == vectors.keys() == explained.keys()
            for part, value in plain.items():
                vector = np.broadcast_to(vectors[part], len(samples))
                assert vector[index] == pytest.approx(value, rel=1e-13, abs=0), part
                found = explained[part]
                assert (found.value if isinstance(found, Amount) else found) == value, part
                if isinstance(found, Amount):
                    assert type(found.value) is type(value), part
                    reevaluate(derivation(named("result_of_test", found)))

    return check
