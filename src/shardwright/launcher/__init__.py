"""Starts torchrun for a run, watches every rank, ends what must end, and says how it ended.

What happens when a rank dies, in the order of the files: the rank shows a ``heartbeat`` and leaves
a last word (``worker``); the launcher looks at every rank (``watch``) and sees that the run cannot
go on (``launch``); it ends the run, decides which rank is to blame, and writes down what became of
each (``ending``).
"""
