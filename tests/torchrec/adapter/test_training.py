"""TorchRec's DistributedModelParallel trains by our plan what it would train in one piece."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own modules
    pytest.importorskip("torchrec", reason="TorchRec is not installed")
    import torch
    import torchrec_worker as worker

WORKER = Path(worker.__file__)
SECONDS = 400  # for a run of two ranks, imports and all, on a busy machine


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks on gloo made of the worker's model, each in a process of its own."""
    folder = tmp_path_factory.mktemp("torchrec")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [(folder / f"log{rank}").open("w+") for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), str(rank), "2", str(folder)],
            env=environment,
            stdout=log,
            stderr=log,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=SECONDS) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait(timeout=10)
        for log in logs:
            log.close()
    told = "\n".join((folder / f"log{rank}").read_text()[-3000:] for rank in range(2))
    assert codes == [0, 0], told
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def unsharded(
    ranks: int, what: worker.Trained = worker.OWN
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses of every rank and step, and the weights at the end, of the same model in one piece."""
    model = what.model("cpu")
    worker.fill(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=worker.RATE)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(worker.STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            loss = model(*what.inputs(rank, step))
            (loss / ranks).backward()
            losses[rank].append(loss.item())
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.parametrize("scenario", ["forced", "narrow", "free"])
def test_trained_by_torchrec_a_plan_gives_the_unsharded_weights(
    trained: list[dict[str, Any]], scenario: str
) -> None:
    _check_theirs([found[scenario] for found in trained], worker.OWN)


def test_torchrec_s_collections_train_as_well_on_our_runtime(
    trained: list[dict[str, Any]],
) -> None:
    _check_ours([found["ours"] for found in trained], worker.OWN)


@pytest.mark.parametrize("name", list(worker.RECOMMENDERS))
def test_torchrec_s_recommenders_train_by_our_plan_on_its_runtime_and_on_ours(
    trained: list[dict[str, Any]], name: str
) -> None:
    what = worker.RECOMMENDERS[name]
    _check_theirs([found[name] for found in trained], what)
    _check_ours([found[f"{name} ours"] for found in trained], what)
    _check_ours([found[f"{name} applied"] for found in trained], what)
    types = trained[0][name]["types"]
    assert {kind for kind, _ in types.values()} == set(worker.TYPES.values())


def _check_theirs(trained: list[dict[str, Any]], what: worker.Trained) -> None:
    """Losses are those of one piece, and so are weights, which are parts that cover each."""
    losses, weights = unsharded(2, what)
    for rank, found in enumerate(trained):
        assert found["losses"] == pytest.approx(losses[rank], rel=1e-4)
    for name, whole in weights.items():
        covered = torch.zeros_like(whole, dtype=torch.bool)
        for found in trained:
            for offsets, part in found["state"][name]:
                spot = tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
                torch.testing.assert_close(part, whole[spot], rtol=1e-4, atol=1e-5)
                covered[spot] = True
        assert covered.all(), name


def _check_ours(trained: list[dict[str, Any]], what: worker.Trained) -> None:
    """Losses and whole weights are those of one piece."""
    losses, weights = unsharded(2, what)
    for rank, found in enumerate(trained):
        assert found["losses"] == pytest.approx(losses[rank], rel=1e-5)
        assert set(found["state"]) == set(weights)
        for name, whole in weights.items():
            torch.testing.assert_close(found["state"][name], whole, rtol=1e-5, atol=1e-6)


def test_what_was_trained_had_every_type_and_several_column_shards_on_a_rank(
    trained: list[dict[str, Any]],
) -> None:
    types = trained[0]["forced"]["types"]
    assert {kind for kind, _ in types.values()} == set(worker.TYPES.values())
    _, ranks = trained[0]["narrow"]["types"]["bag_cw"]
    assert len(ranks) == 4  # of 4 columns each, on two ranks
    assert trained[1]["forced"]["types"] == types  # every rank knows the plan


def test_every_rank_hears_that_nothing_fits(trained: list[dict[str, Any]]) -> None:
    assert trained[0]["refusal"].startswith("NoPlanError")
    assert trained[1]["refusal"].startswith("PeerError: model: expected a plan from rank 0")
