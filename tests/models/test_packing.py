from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright.core.errors import InputError, MismatchError, UnsupportedError
from shardwright.core.kinds import (
    PACKED,
    EmbeddingsSection,
    flops,
    nbytes,
    packed_bytes,
    parameters,
    settled,
)
from shardwright.core.model import KindName, TableSpec
from shardwright.estimate.recordings import plan
from shardwright.job.job import Job, parse_job
from shardwright.job.plan import write_plan
from shardwright.models.dlrm import DLRM
from shardwright.models.embeddings import Embeddings

EXAMPLE = Path(__file__).parents[2] / "examples" / "packing.py"
_spec = importlib.util.spec_from_file_location("packing", EXAMPLE)
assert _spec is not None
packing: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(packing)  # type: ignore[union-attr]
looked_up, packed, unpacked = packing.looked_up, packing.packed, packing.unpacked
packed_tables, write_packed = packing.packed_tables, packing.write_packed
packed_embeddings, saved_embeddings = packing.packed_embeddings, packing.saved_embeddings

DTYPES = {"int8": torch.float32, "int4": torch.float16}


def _rows(dim: int, size: float) -> torch.Tensor:
    rows = torch.randn(300, dim, generator=torch.Generator().manual_seed(dim)) * size
    rows[0], rows[1], rows[2] = 0, size, -size  # without any range
    rows[3] = rows[3].abs() + 100 * size  # far from zero
    return rows


def _ends(found: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    tail = found[:, -PACKED[kind].ends :].contiguous().view(DTYPES[kind]).double()
    return tail[:, 0], tail[:, 1]


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("dim", [1, 2, 3, 16, 127])
@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 500.0])
def test_no_entry_is_further_than_half_a_step_from_what_it_was(
    kind: str, dim: int, size: float
) -> None:
    rows = _rows(dim, size)
    found = packed(rows, kind, "rows")
    scale, offset = _ends(found, kind)
    steps = 2 ** PACKED[kind].bits - 1
    exact = rows.double()
    read = unpacked(found, kind, dim).double()
    rounding = exact.abs().amax(1) * 2**-23  # of reading it in fp32
    assert ((read - exact).abs().amax(1) <= scale / 2 + rounding).all()
    assert (offset <= exact.amin(1)).all()
    assert (offset + steps * scale >= exact.amax(1)).all()


@pytest.mark.parametrize("kind", PACKED)
def test_a_step_is_no_larger_than_the_range_and_the_dtype_of_its_ends_ask_for(kind: str) -> None:
    rows = _rows(64, 1.0)
    scale, _ = _ends(packed(rows, kind, "rows"), kind)
    spread = (rows.amax(1) - rows.amin(1)).double()
    eps = torch.finfo(DTYPES[kind]).eps
    least = spread + rows.abs().amax(1).double() * eps
    steps = 2 ** PACKED[kind].bits - 1
    assert (scale <= least / steps * (1 + 2 * eps) + torch.finfo(DTYPES[kind]).tiny).all()


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("dim", [1, 5, 16])
def test_a_lookup_reads_what_was_packed(kind: str, dim: int) -> None:
    found = packed(_rows(dim, 0.1), kind, "rows")
    ids = torch.randint(300, (7, 11), generator=torch.Generator().manual_seed(0))
    read = looked_up(found, ids, kind, dim)
    assert read.shape == (7, 11, dim)
    assert (read - unpacked(found[ids], kind, dim)).abs().max().item() <= 1e-6


def test_bytes_lie_as_torch_packs_them() -> None:
    rows = _rows(16, 1.0)
    byte = torch.ops.quantized.embedding_bag_byte_prepack(rows)
    nibble = torch.ops.quantized.embedding_bag_4bit_prepack(rows)
    for kind, theirs in (("int8", byte), ("int4", nibble)):
        assert theirs.shape[1] == packed_bytes(16, kind)
        ours = unpacked(packed(rows, kind, "rows"), kind, 16)
        scale, _ = _ends(theirs, kind)
        assert ((unpacked(theirs, kind, 16) - ours).abs().amax(1) <= 1.1 * scale).all()


@pytest.mark.parametrize("kind", PACKED)
def test_reading_an_entry_is_a_product_and_a_sum(kind: str) -> None:
    (table,) = settled([TableSpec("t", 300, 16)], EmbeddingsSection(kind=kind))  # type: ignore[arg-type]
    calls: list[int] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.addcmul.default:
                calls.append(2 * found.numel())
            return found

    own = packed(_rows(16, 1.0), kind, "rows")
    with Counted():
        unpacked(own, kind, 16)
    assert sum(calls) == 300 * flops(table)
    assert parameters(table) == 300 * 16


@pytest.mark.parametrize(
    ("kind", "bad", "words"),
    [
        ("int8", float("nan"), "numbers up to 3.40282e+38 for kind 'int8', got nan"),
        ("int8", float("inf"), "got inf"),
        ("int4", 7e4, "numbers up to 65504 for kind 'int4', got 70000"),
        ("int4", -7e4, "got 70000"),
    ],
)
def test_what_no_scale_reaches_is_refused(kind: str, bad: float, words: str) -> None:
    rows = torch.zeros(4, 4)
    rows[2, 1] = bad
    with pytest.raises(InputError) as error:
        packed(rows, kind, "table 'item'")
    assert str(error.value).startswith("table 'item': expected ")
    assert words in str(error.value)


@pytest.mark.parametrize("dim", [5, 16])
@pytest.mark.parametrize("trained", ["full", "hash", "qr", "mixed_dim", "tt"])
def test_tables_of_any_kind_are_packed(trained: KindName, dim: int) -> None:
    bare = [TableSpec("a", 70_000, dim), TableSpec("b", 30, dim)]
    module = Embeddings(settled(bare, EmbeddingsSection(kind=trained)))
    ids = torch.stack([torch.randint(rows, (50,)) for rows in (70_000, 30)], 1)
    ids[:3, 0] = torch.tensor([0, 65_536, 69_999])
    for kind, steps in (("int8", 255), ("int4", 15)):
        serving = packed_tables(module, kind)
        found, wanted = serving(ids), module(ids).detach()
        spread = wanted.amax(-1) - wanted.amin(-1)
        assert ((found - wanted).abs().amax(-1) <= 0.51 * spread / steps + 2e-5).all()
        assert (found != wanted).any()
        held = sum(rows.nbytes for rows in serving.buffers())
        assert held == sum(nbytes(msgspec.structs.replace(t, kind=kind)) for t in bare)
        assert held == 70_030 * packed_bytes(dim, kind)


@pytest.mark.parametrize("kind", PACKED)
def test_a_module_that_trains_has_no_rows_of_bytes(kind: KindName) -> None:
    with pytest.raises(UnsupportedError, match=f"got '{kind}'. examples/packing.py looks rows of"):
        Embeddings([TableSpec("a", 30, 8, kind=kind)])


@pytest.mark.parametrize("bad", [-1, 20, 2**62])
def test_an_id_that_is_no_row_is_refused(bad: int) -> None:
    serving = packed_tables(Embeddings([TableSpec("a", 300, 8), TableSpec("b", 20, 8)]), "int8")
    ids = torch.zeros(6, 2, dtype=torch.int64)
    ids[5, 1] = bad
    with pytest.raises(InputError, match=f"'b': expected ids from 0 to 19, got {bad}"):
        serving(ids)
    with pytest.raises(InputError, match=r"expected shape \[batch, 2\], got \[6, 1\]"):
        serving(ids[:, :1])


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
    served = packed_tables(found, "int8")(ids)
    assert ((served - wanted).abs().amax(-1) <= 0.51 * spread / 255 + 1e-6).all()


def test_a_checkpoint_of_another_model_is_refused_by_the_table(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path, DLRM(_job()), None, step=3)
    with pytest.raises(MismatchError, match=r"1 that the checkpoint lacks \(tables.c.weight\)"):
        saved_embeddings(tmp_path, [TableSpec("c", 300, 8)])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_packed_tables_are_read_as_they_were_written(kind: Any, tmp_path: Path) -> None:
    tables = [TableSpec("b", 300, 7), TableSpec("a", 20, 7)]
    made, path = packed_tables(Embeddings(tables, seed=3), kind), tmp_path / "new" / "tables"
    write_packed(made, path)
    ids = torch.stack([torch.arange(20) + 280, torch.arange(20)], 1)
    assert torch.equal(packed_embeddings(path)(ids), made(ids))


def test_a_run_is_packed_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = _job(cluster={"preset": "local", "world_size": 1}, embeddings={"kind": "qr"})
    write_plan(plan(job), tmp_path / "plan.json")
    command = [str(tmp_path), "--kind", "int4"]
    assert packing.main(command) == 2
    assert "expected the checkpoints of the run, got none" in capsys.readouterr().err
    model = DLRM(job)
    sw.save_checkpoint(tmp_path / "checkpoints", model, None, step=3)
    assert packing.main([*command, "--out", str(tmp_path / "plan.json")]) == 2
    assert "expected a new file or an earlier file of tables" in capsys.readouterr().err
    assert packing.main(command) == packing.main(command) == 0  # over the earlier one
    said = capsys.readouterr().out
    path = tmp_path / "tables.safetensors"
    assert f"{path}: 2 tables, 600 rows of int4" in said
    assert ", replacing the earlier one" in said
    ids = torch.randint(300, (20, 2))
    learned = saved_embeddings(tmp_path / "checkpoints", job.tables)
    assert torch.equal(packed_embeddings(path)(ids), packed_tables(learned, "int4")(ids))


def test_a_file_without_packed_tables_is_refused(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path, DLRM(_job()), None, step=3)
    (saved,) = tmp_path.rglob("rank-0.safetensors")
    with pytest.raises(InputError, match="expected packed tables, got a file without"):
        packed_embeddings(saved)
    text = tmp_path / "text"
    text.write_text("no tables")
    with pytest.raises(InputError, match="expected a safetensors file"):
        packed_embeddings(text)


def test_names_of_before_say_where_they_are(call: Any) -> None:
    call("pack", "runs/ads").refuses(2, "'pack': expected a command", "examples/packing.py RUN_DIR")
    with pytest.raises(UnsupportedError, match=r"It is in examples/packing\.py of"):
        from shardwright.train.serving import packed_embeddings  # noqa: F401
