"""Starts torchrun, watches every rank, ends what must end, and restores exit codes."""
