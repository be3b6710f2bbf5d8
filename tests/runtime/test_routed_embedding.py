"""What stands in for a user's embedding takes what torch's takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.core.errors import InputError
from shardwright.runtime.embeddings.modules import RoutedEmbedding


class Rows(nn.Module):
    """A whole table: ids [N, 1] -> rows [N, 1, D]."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.table = weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


@pytest.mark.parametrize("like", [nn.Embedding(5, 3), nn.EmbeddingBag(5, 3, mode="sum")])
def test_ids_are_integers_of_either_width(like: nn.Embedding | nn.EmbeddingBag) -> None:
    routed = RoutedEmbedding("words", like, Rows(like.weight.detach()))
    ids = torch.tensor([[1, 4], [0, 1]])
    for given in (ids, ids.int()):
        assert torch.equal(routed(given), like(given))


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        (torch.tensor([1.5]), "float32"),
        (torch.tensor([True]), "bool"),
        ([1, 2], "list"),
    ],
)
def test_what_are_no_ids_is_named(ids: object, kind: str) -> None:
    routed = RoutedEmbedding("words", nn.Embedding(5, 3), Rows(torch.zeros(5, 3)))
    wanted = f"ids of 'words': expected a tensor of int64 or int32, got {kind}."
    with pytest.raises(InputError, match=wanted):
        routed(ids)


@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False)])
def test_padding_is_in_no_bag(mode: str, weighted: bool) -> None:
    like = nn.EmbeddingBag(5, 3, mode=mode, padding_idx=2)
    table = like.weight.detach().clone().fill_(7.0).requires_grad_()  # padding is not zeros here
    like.weight.data.fill_(7.0)
    routed = RoutedEmbedding("words", like, Rows(table))
    ids = torch.tensor([[1, 4, 2], [2, 2, 2], [0, 2, 0], [3, 1, 0]])
    weights = {"per_sample_weights": torch.rand(4, 3)} if weighted else {}
    found, true = routed(ids, **weights), like(ids, **weights)
    assert torch.allclose(found, true, rtol=1e-6)
    scale = torch.rand(4, 3)
    (found * scale).sum().backward()
    (true * scale).sum().backward()
    assert table.grad is not None
    assert torch.allclose(table.grad, like.weight.grad, rtol=1e-6)
    assert not table.grad[2].any()
