"""Sharded checkpoints: verified when read, committed by one rename, cut anew for any world size."""

from shardwright.runtime.checkpoint.read import read_checkpoint, read_full
from shardwright.runtime.checkpoint.region import TensorPart
from shardwright.runtime.checkpoint.write import run_through, save_in_parts

__all__ = ["TensorPart", "read_checkpoint", "read_full", "run_through", "save_in_parts"]
