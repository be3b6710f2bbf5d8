"""The ways to shard a table that a search may choose from."""
