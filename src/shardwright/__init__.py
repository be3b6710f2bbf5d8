"""Shardwright plans, explains and runs sharded PyTorch training."""

__version__ = "0.1.0"
