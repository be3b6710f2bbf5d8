"""TorchRec models on no device, small enough to see through."""

from __future__ import annotations

import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own modules
    import torch
    from torch import nn
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
    )
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import Topology
    from torchrec.modules.embedding_configs import DataType

META = torch.device("meta")


def sharders() -> list[Any]:
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


class Model(nn.Module):
    """Three bags, of which one has two features, two sequences, and a dense layer."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        bags = [("t0", 1000, 64, ["a"]), ("t1", 50_000, 128, ["b", "c"]), ("t2", 7, 256, ["d"])]
        self.sparse = nn.ModuleDict(
            {
                "ebc": EmbeddingBagCollection(
                    device=META,
                    is_weighted=weighted,
                    tables=[
                        EmbeddingBagConfig(
                            name=name,
                            num_embeddings=rows,
                            embedding_dim=dim,
                            feature_names=features,
                        )
                        for name, rows, dim, features in bags
                    ],
                )
            }
        )
        self.ec = EmbeddingCollection(
            device=META,
            tables=[
                EmbeddingConfig(
                    name=f"s{i}",
                    num_embeddings=2000 * (i + 1),
                    embedding_dim=64,
                    feature_names=[f"e{i}"],
                    data_type=DataType.FP16 if i else DataType.FP32,
                )
                for i in range(2)
            ],
        )
        self.over = nn.Linear(100, 10, device=META)


def one_bag(rows: int = 100, dim: int = 8) -> nn.Module:
    config = EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"]
    )
    return nn.Sequential(EmbeddingBagCollection(device=META, tables=[config]))


def one_sequence(rows: int = 100, dim: int = 8) -> nn.Module:
    config = EmbeddingConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])
    return nn.Sequential(EmbeddingCollection(device=META, tables=[config]))


def topology(ranks: int = 4, device: str = "cuda", **given: Any) -> Topology:
    return Topology(ranks, device, **given)
