"""Stages of a GPU's measurements whose rows are operators: all can be asked for without one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from gpu import ceilings, entries, show, traffic
from gpu.entries import Case, Draw, measured
from gpu.rows import Row, Setting, rows_of
from stage_checks import ONLY_CUDA, check_entries
from torch._subclasses.fake_tensor import FakeTensorMode

SMALL, ON_CUDA = Setting("cpu", small=True), Setting("cuda")
QUICK = ("launches", "products tf32", "row updates", *ONLY_CUDA)


def _rows(stage: str, setting: Setting = SMALL) -> dict[str, Row]:
    return {row.name: row for row in rows_of(stage, setting)}


@pytest.mark.parametrize("name", QUICK)  # all of them, and of embeddings: test_gpu_run.py
def test_every_class_of_operators_has_figures_where_it_runs(name: str) -> None:
    check_entries(name, _rows("ceilings")[name].run())


@pytest.fixture(scope="module")
def full_size() -> dict[str, list[Case]]:
    """What a GPU is asked for, made and run on tensors without memory that say they are a GPU's: of
    what needs neither gradients nor copies, which the CPU's build of torch refuses them."""
    found: dict[str, list[Case]] = {}

    def run(setting: Setting, kind: str, cases: Iterable[Case], seconds: float) -> dict[str, Any]:
        found[row.name] = []
        for case in cases:
            case.run(*case.make())
            found[row.name].append(case)
        return {}

    with FakeTensorMode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "measured", run)
        for row in rows_of("ceilings", ON_CUDA):
            if row.name.startswith("products") or row.name == "lookups":
                row.run()
    return found


def test_operators_of_a_gpu_can_be_asked_for_at_full_size(full_size: dict[str, list[Case]]) -> None:
    """Shapes, dtypes and devices fit; operands leave the caches, and fit into the smallest card."""
    assert len(full_size) == 10
    for case in (*chain(*full_size.values()), *traffic.copies(Draw(ON_CUDA))):
        said = case.said(ON_CUDA)
        together = said["bytes"] * said["turns"]
        assert together < 16 * 2**30
        is_lookup = case in full_size["lookups"]  # ids are others in each turn, the table is one
        assert is_lookup or said["turns"] == entries.TURNS or together >= entries.CACHED


def test_what_is_multiplied_and_moved_is_counted(full_size: dict[str, list[Case]]) -> None:
    cases = (*chain(*full_size.values()), *traffic.copies(Draw(ON_CUDA)))
    by_shape = {(case.op, case.dtype, case.shape): case for case in cases}
    product = by_shape["linear", "bfloat16", (8192, 14336, 4096)]
    assert product.flops == 2 * 8192 * 14336 * 4096
    assert product.nbytes == 2 * (8192 * 4096 + 14336 * 4096 + 8192 * 14336)
    float8 = by_shape["linear", "float8_e4m3fn", (4096, 14336, 4096)]
    assert float8.nbytes == 4096 * 4096 + 14336 * 4096 + 2 * 4096 * 14336  # its results are bf16
    assert by_shape["copy", "uint8", (2**28,)].nbytes == 2**29


def test_what_fails_is_an_entry_and_the_next_goes_on() -> None:
    def cases() -> Iterator[Case]:
        one = torch.ones(())
        yield Case("refused", "float32", (1,), lambda: (one,), lambda x: x.view(7))
        yield Case("add", "float32", (1,), lambda: (one,), lambda x: x + x)
        raise ValueError("no more of them")

    found = measured(SMALL, "both", cases(), 1.0)
    refused, added = found["entries"]
    assert refused["error"].startswith("RuntimeError: shape '[7]' is invalid")
    assert "seconds" not in refused
    assert added["seconds"] > 0
    assert found["error"] == "ValueError: no more of them"


def test_what_no_time_is_left_for_says_so() -> None:
    case = Case("add", "float32", (1,), lambda: (torch.ones(()),), lambda x: x + x)
    first, second = measured(Setting("cpu"), "one", [case, case], -1.0)["entries"]
    assert first["seconds"] > 0
    assert second["skipped"] == "no time was left"


def test_precision_of_products_is_what_it_was_afterwards() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    with ceilings.precision("tf32"):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before
    assert not torch.backends.cuda.matmul.allow_tf32


def test_the_best_of_every_operator_is_shown_and_what_failed_is_named() -> None:
    def entry(n: int, **more: Any) -> dict[str, Any]:
        of = {"class": "products", "op": "linear", "dtype": "bfloat16", "shape": [n, n, n]}
        return of | {"flops": 2 * n**3, "bytes": 6 * n**2} | more

    fast, slow = entry(4096, seconds=2e-4), entry(64, seconds=1e-5)
    failed = entry(8, error="RuntimeError: no such kernel"), entry(8, skipped="no time was left")
    rows = [{"name": "products", "entries": [slow, fast, *failed]}]
    shown = show.page({"ceilings": {"rows": rows}})
    line = "| products | linear | bfloat16 | [4096, 4096, 4096] | 200 us | 687.2 TFLOP/s |"
    assert line in shown
    assert shown.count("| products |") == 1
    assert "- products, 1 of it: RuntimeError: no such kernel" in shown
    assert "- products, 1 of it: no time was left" in shown
