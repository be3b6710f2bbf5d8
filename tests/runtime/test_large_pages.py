from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from shardwright.runtime.embeddings.store import use_large_pages

MAPS = Path("/proc/self/smaps")
SIZE = 2**23


def _flags(address: int) -> list[str]:
    """What the system was told of the memory at an address."""
    inside = False
    for line in MAPS.read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(),
    reason="the system has no large pages",
)
def test_a_table_asks_for_large_pages() -> None:
    tensor = torch.empty(SIZE, dtype=torch.uint8)
    use_large_pages(tensor)
    assert "hg" in _flags(tensor.data_ptr() + SIZE // 2)
    assert tensor.fill_(3).sum() == 3 * SIZE


@pytest.mark.parametrize(
    "tensor", [torch.empty(3), torch.empty(0), torch.empty(SIZE, device="meta")]
)
def test_what_has_no_large_page_stays_as_it_is(tensor: torch.Tensor) -> None:
    use_large_pages(tensor)
