"""The states of everything that draws random numbers, as texts in a checkpoint."""

from __future__ import annotations

import base64
import logging
import random
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from shardwright.core.document import decode_json
from shardwright.core.errors import InputError
from shardwright.runtime.checkpoint.read import Stored

States = dict[str, str]

log = logging.getLogger(__name__)


def random_states() -> States:
    """Of torch's generators by device type, of Python's and of NumPy's."""
    states = {"cpu": _tensor_text(torch.get_rng_state())}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        of_device = torch.get_device_module(accelerator.type).get_rng_state()
        states[accelerator.type] = _tensor_text(of_device)
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = [name, keys.tolist(), *rest]
    for kind, state in (("python", random.getstate()), ("numpy", numpy_state)):
        states[kind] = msgspec.json.encode(state).decode()
    return states


def set_random_states(states: Mapping[str, str]) -> None:
    """Go on from ``states``; those of a device that is not here are left out."""
    for kind, text in states.items():
        if kind == "python":
            random.setstate(_python_state(text))
        elif kind == "numpy":
            np.random.set_state(_numpy_state(text))
        elif kind == "cpu":
            torch.set_rng_state(_tensor(text))
        elif torch.accelerator.is_available():
            torch.get_device_module(kind).set_rng_state(_tensor(text))


def restore(scalars: Mapping[str, Any], saved: int, world_size: int) -> bool:
    """Go on as one of ``saved`` ranks left off; False, which is logged, where there are others."""
    if saved != world_size or "random" not in scalars:
        log.warning("random numbers begin anew: the checkpoint is of %d ranks", saved)
        return False
    set_random_states(scalars["random"])
    return True


def check_random_states(stored: Stored) -> None:
    """Raise InputError unless generators take what a checkpoint says of them."""
    for rank, found in enumerate(stored.lists):
        states = found.scalars.get("random", {})
        for kind, take in _TRIED.items():
            try:
                if kind in states:
                    take(states[kind])
            except Exception as error:  # of any kind: a text can be anything
                where = f"{stored.folder}: random.{kind} of rank {rank}"
                found_text = f"one that is refused: {type(error).__name__}"
                raise InputError(where, "a generator's state", found_text) from None


def _tensor_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _python_state(text: str) -> Any:
    version, keys, gauss = decode_json(text, tuple[int, tuple[int, ...], float | None])
    return version, keys, gauss


def _numpy_state(text: str) -> Any:
    return decode_json(text, tuple[str, list[int], int, int, float])


# What takes a state on trial.
_TRIED = {
    "cpu": lambda text: torch.Generator().set_state(_tensor(text)),
    "python": lambda text: random.Random().setstate(_python_state(text)),
    "numpy": lambda text: np.random.RandomState().set_state(_numpy_state(text)),
}
