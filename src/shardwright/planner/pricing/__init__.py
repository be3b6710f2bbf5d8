"""What an option costs, by the profile that a job names: one file per profile, two functions each.

``price`` evaluates a cost model over arrays of shards for the search; ``derive`` evaluates the same
formulas on Amounts for one shard that is to be explained.
"""
