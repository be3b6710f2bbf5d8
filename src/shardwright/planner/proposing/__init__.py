"""TorchRec's way to search, kept to the last tie: proposers propose a candidate for each table, a
partitioner places them, the fastest placement stays."""
