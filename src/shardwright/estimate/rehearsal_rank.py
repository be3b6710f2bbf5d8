"""``torchrun ... -m shardwright.estimate.rehearsal_rank DIR``: one rank of ``memory --real N``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch.distributed.device_mesh import init_device_mesh

from shardwright.core.document import decode_json, write_document
from shardwright.estimate.rehearsal import JOB, TIMEOUT, followed, tracked_file
from shardwright.job.job import Job, parallel_of
from shardwright.launcher.folder import store_file
from shardwright.launcher.heartbeat import Heartbeat
from shardwright.launcher.worker import run_worker
from shardwright.runtime import comm


def main() -> int:
    """Follow two steps as torchrun's environment says; the status file says how it ended."""
    folder = Path(sys.argv[1])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def body(heartbeat: Heartbeat) -> None:
        job = decode_json((folder / JOB).read_bytes(), Job)
        store = comm.meet(TIMEOUT, rank, world_size, store_file(folder))
        comm.start("gloo", TIMEOUT, rank, world_size, store)
        try:
            replicas = parallel_of(job).data_replicate
            several = replicas > 1
            sizes = (replicas, world_size // replicas) if several else (world_size,)
            names = ("replicate", "shard") if several else ("shard",)
            found = followed(job, init_device_mesh("cpu", sizes, mesh_dim_names=names))
            write_document(found, tracked_file(folder, rank))
            heartbeat.mark("done")
        finally:
            comm.stop()

    return run_worker(folder, rank, body)


if __name__ == "__main__":
    sys.exit(main())
