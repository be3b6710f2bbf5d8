"""Where in a user's code an error came from, and which id a lookup of torch's refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.core.errors import InputError
from shardwright.estimate.own_model import naming_errors
from shardwright.trace.checks import wrong_id


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.bags = nn.EmbeddingBag(7, 4)
        self.free = nn.Parameter(torch.zeros(5, 4))

    def forward(self, words: Tensor, bags: Tensor, free: Tensor) -> Tensor:
        found: Tensor = self.words(words).mean(1) + self.bags(bags)
        return found + functional.embedding(free, self.free)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])

    def forward(self, words: Tensor, bags: Tensor, free: Tensor) -> Tensor:
        for part in self.parts:
            found: Tensor = part(words, bags, free)
        return found


def _ids() -> dict[str, Tensor]:
    return {
        "words": torch.zeros(2, 3, dtype=torch.int64),
        "bags": torch.zeros(2, 6, dtype=torch.int64),
        "free": torch.zeros(2, dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("which", "place", "value", "said"),
    [
        ("words", (1, 2), 9, "ids of 'parts.0.words', position [1, 2]: expected ids from 0 to 8"),
        ("words", (0, 1), -1, "ids of 'parts.0.words', position [0, 1]: expected ids from 0 to 8"),
        ("bags", (1, 2), 400, "ids of 'parts.0.bags', position 8: expected ids from 0 to 6"),
        ("free", (1,), 5, "ids of 'parts.0', position 1: expected ids from 0 to 4"),
    ],
)
def test_an_id_that_is_no_row_of_a_unit_s_embedding_is_named(
    which: str, place: tuple[int, ...], value: int, said: str
) -> None:
    ids, model = _ids(), Model()
    ids[which][place] = value
    with pytest.raises(InputError) as caught, naming_errors("model.python 'own:build'"):
        model(**ids)
    message = str(caught.value)
    assert message.startswith("model.python 'own:build', test_places.py:")
    assert f" (forward): {said}, got {value}." in message
    assert "\n" not in message


def test_other_errors_of_a_lookup_are_said_as_they_are() -> None:
    with pytest.raises(RuntimeError) as caught:
        nn.Embedding(3, 4)(torch.zeros(2))
    assert wrong_id(caught.value) is None
    with pytest.raises(ValueError, match="own") as own:
        raise ValueError("own")
    assert wrong_id(own.value) is None
