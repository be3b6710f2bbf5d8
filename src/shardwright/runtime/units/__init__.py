"""Sharded units: the parameters of one or several modules in one buffer."""
