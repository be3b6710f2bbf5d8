"""Ways to give the shards of a proposal to ranks."""
