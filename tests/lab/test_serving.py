from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.core.errors import MismatchError
from shardwright.core.job import Job, parse_job
from shardwright.core.model import TableSpec
from shardwright.lab.serving import saved_embeddings
from shardwright.models.dlrm import DLRM


def _job(**sections: Any) -> Job:
    tables = [{"name": name, "rows": 300, "dim": 8} for name in ("a", "b")]
    document = {"model": {"bottom": [8], "top": [4, 1]}, "tables": tables, **sections}
    return parse_job(document)


@pytest.mark.parametrize("kind", ["full", "qr", "memcom", "dhe", "robe", "mixed_dim"])
def test_a_checkpoint_gives_the_embeddings_that_were_trained(kind: str, tmp_path: Path) -> None:
    keys = {"hashes": 8, "hidden": 8} if kind == "dhe" else {}
    job = _job(embeddings={"kind": kind, **keys})
    model = DLRM(job)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    sw.save_checkpoint(tmp_path, model, None, step=3)
    found = saved_embeddings(tmp_path, job.tables)
    ids = torch.randint(300, (20, 2))
    rows = model._embedded(ids)
    wanted = rows if isinstance(rows, torch.Tensor) else torch.stack(list(rows), 1)
    assert (found(ids) - wanted).abs().max().item() <= 1e-6
    spread = (wanted.amax(-1) - wanted.amin(-1)).detach()
    served = found.materialised("int8")(ids)
    assert ((served - wanted).abs().amax(-1) <= 0.51 * spread / 255 + 1e-6).all()


def test_a_checkpoint_of_another_model_is_refused_by_the_table(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path, DLRM(_job()), None, step=3)
    with pytest.raises(MismatchError, match=r"1 that the checkpoint lacks \(tables.c.weight\)"):
        saved_embeddings(tmp_path, [TableSpec("c", 300, 8)])
