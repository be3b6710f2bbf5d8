"""The demo's plan, of five sharding types and two bag lengths, trains as one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import resuming_tasks as tasks
from combinations import rare, slow
from pool import Pool

from shardwright.estimate.recordings import plan
from shardwright.job.job import read_job
from shardwright.job.plan import write_plan
from shardwright.train.session import collect
from shardwright.train.sources import source_of

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"


@pytest.mark.parametrize("zipf", [slow(1.2), rare(1.1)])
def test_the_demo_trains_as_one_process_with_bytes_and_peak_as_predicted(
    pool: Pool, tmp_path: Path, zipf: float
) -> None:
    means = []
    for ranks, batch, memory in ((2, 384, "38 MiB"), (1, 768, "1 GiB")):
        folder = tmp_path / f"{ranks}"
        folder.mkdir()
        settings = [f"data.zipf={zipf}", "data.rows=8000", "data.test_rows=1000", "train.steps=8"]
        settings += [f"cluster.world_size={ranks}", f"batch.size={batch}", f"train.out={folder}"]
        job = read_job(DEMO, [*settings, f"cluster.ddr_cap={memory}", "checkpoint.every=99 steps"])
        made = plan(job)
        source_of(job).prepare()
        write_plan(made, folder / "plan.json")
        options = {"plan": str(folder / "plan.json"), "folder": str(folder)}
        found = pool.run(ranks, tasks.train, **options)
        means.append([sum(step) / ranks for step in zip(*(run[0] for run in found), strict=True)])
        if ranks > 1:
            assert len({table.sharding_type for table in made.tables}) >= 5
            assert len({t.pooling_factors for t in job.tables}) == 2
            _, comparison = collect(made, folder, 0.01)
            assert not comparison.failures
    assert means[0] == pytest.approx(means[1], rel=2e-5)
