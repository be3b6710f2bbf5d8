"""What docs/from-fsdp2.md says is so: its snippets run, and leave what FSDP2, DDP or one process do."""

from __future__ import annotations

import re

import page_tasks as tasks
import pytest
from pool import Pool

FENCES = tasks.fences()
RUN = [fence for fence in FENCES if fence.who in (*tasks.BOTH, *tasks.OURS)]
REFUSED = [fence for fence in FENCES if fence.who == tasks.REFUSED]
TOLERANCE = 1e-12
MOVED = 1e-4


def _name(fence: tasks.Fence) -> str:
    return f"{fence.title} ({fence.line})"


def test_every_snippet_says_whose_it_is() -> None:
    kinds = {*tasks.BOTH, *tasks.OURS, *tasks.THEIRS, tasks.REFUSED}
    assert {fence.who for fence in FENCES} == kinds
    assert len(FENCES) == tasks.PAGE.read_text().count("```python")
    assert all(tasks.reference_of(fence) for fence in RUN if fence.who == "here")


@pytest.mark.parametrize("fence", RUN, ids=_name)
def test_snippets_leave_what_their_reference_leaves(pool: Pool, fence: tasks.Fence) -> None:
    reference = tasks.reference_of(fence)
    code = "" if reference is None else reference.code
    changes = re.search(r"\.backward\(\)|seed=3", code)
    everyone = re.search("init_device_mesh|broadcast_from_rank0", code + fence.code)
    for found in pool.run(4 if everyone else 2, tasks.compare, line=fence.line):
        assert set(found) == set(tasks.STRATEGIES[: 1 if fence.who == tasks.BOTH[1] else 3])
        for differences in found.values():
            moved = differences.pop("moved", 0.0)
            assert max(differences.values(), default=0.0) < TOLERANCE
            assert moved > MOVED or not changes


@pytest.mark.parametrize("fence", REFUSED, ids=_name)
def test_refusals_say_what_is_written_under_them(pool: Pool, fence: tasks.Fence) -> None:
    (text,) = re.findall(r"^# (\w+Error: .*)$", fence.code, re.MULTILINE)
    for found in pool.run(2, tasks.refuse, line=fence.line):
        assert len(found) == len(tasks.STRATEGIES)
        assert [said for said in found.values() if not said.startswith(text)] == []
