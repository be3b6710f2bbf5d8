"""Sharded tensors that were pickled, in a process without ranks."""

from __future__ import annotations

import pytest

from shardwright.core.errors import InputError
from shardwright.runtime.units.cut import restored_cut


def test_a_process_without_ranks_is_told_what_loads_anywhere() -> None:
    regions = (((0, 0), (2, 2)),)
    with pytest.raises(InputError) as caught:
        restored_cut("head.weight", (2, 2), 0, regions, (), None)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "a saved part of head.weight: expected the ranks it was saved on, got a process without "
        "ranks. Save sw.full_state_dict(model), which loads anywhere."
    )
