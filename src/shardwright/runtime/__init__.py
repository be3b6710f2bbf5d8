"""Runs exactly the plan: flat-buffer sharded units, routed tables, one place for collectives."""
