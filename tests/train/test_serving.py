from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.cli.main import main
from shardwright.core.errors import InputError, MismatchError
from shardwright.core.model import TableSpec
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import write_plan
from shardwright.models.dlrm import DLRM
from shardwright.models.embeddings import Embeddings
from shardwright.train.serving import packed_embeddings, saved_embeddings, write_packed


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


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_packed_tables_are_read_as_they_were_written(kind: Any, tmp_path: Path) -> None:
    tables = [TableSpec("b", 300, 7), TableSpec("a", 20, 7)]
    made, path = Embeddings(tables, seed=3).materialised(kind), tmp_path / "new" / "tables"
    write_packed(made, path)
    ids = torch.stack([torch.arange(20) + 280, torch.arange(20)], 1)
    assert torch.equal(packed_embeddings(path)(ids), made(ids))


def test_a_run_is_packed_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = _job(cluster={"preset": "local", "world_size": 1}, embeddings={"kind": "qr"})
    write_plan(plan(job), tmp_path / "plan.json")
    command = ["pack", str(tmp_path), "--kind", "int4"]
    assert main(command) == 2
    assert "expected the checkpoints of the run, got none" in capsys.readouterr().err
    model = DLRM(job)
    sw.save_checkpoint(tmp_path / "checkpoints", model, None, step=3)
    assert main([*command, "--out", str(tmp_path / "plan.json")]) == 2
    assert "expected a new file or an earlier file of tables" in capsys.readouterr().err
    assert main(command) == main(command) == 0  # over the earlier one
    said = capsys.readouterr().out
    path = tmp_path / "tables.safetensors"
    assert f"{path}: 2 tables, 600 rows of int4" in said
    assert ", replacing the earlier one" in said
    ids = torch.randint(300, (20, 2))
    learned = saved_embeddings(tmp_path / "checkpoints", job.tables)
    assert torch.equal(packed_embeddings(path)(ids), learned.materialised("int4")(ids))


def test_a_file_without_packed_tables_is_refused(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path, DLRM(_job()), None, step=3)
    (saved,) = tmp_path.rglob("rank-0.safetensors")
    with pytest.raises(InputError, match="expected packed tables, got a file without"):
        packed_embeddings(saved)
    text = tmp_path / "text"
    text.write_text("no tables")
    with pytest.raises(InputError, match="expected a safetensors file"):
        packed_embeddings(text)
