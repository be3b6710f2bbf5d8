"""Every snippet of docs/from-fsdp2.md and behind its rows leaves what FSDP2 or DDP would leave."""

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
    page = tasks.PAGE.read_text()
    titles = {f.title for f in FENCES if f.file == tasks.SNIPPETS}
    links = re.findall(r"from-fsdp2-code\.md#([\w-]+)", page)
    assert len(titles) == len(set(links))  # that they lead somewhere test_documentation.py asks
    files = (tasks.PAGE, tasks.SNIPPETS)
    assert len(FENCES) == sum(file.read_text().count("```python") for file in files)
    assert all(tasks.reference_of(fence) for fence in RUN if fence.who == "here")


def _strategies(fence: tasks.Fence) -> tuple[str, ...]:
    """The ways of cutting that a fence runs with."""
    return tuple(tasks.STRATEGIES[:2] if fence.who == tasks.BOTH[1] else tasks.STRATEGIES)


def _one_of_them(fence: tasks.Fence) -> tuple[str, ...]:
    """Neighbours on the page take turns."""
    every = _strategies(fence)
    return (every[FENCES.index(fence) % len(every)],)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("fence", RUN, ids=_name)
def test_snippets_leave_what_their_reference_leaves(pool: Pool, fence: tasks.Fence) -> None:
    _hold(pool, fence, _one_of_them(fence))


@pytest.mark.product
@pytest.mark.parametrize("fence", RUN, ids=_name)
def test_so_they_do_under_every_strategy(pool: Pool, fence: tasks.Fence) -> None:
    _hold(pool, fence, _strategies(fence))


def _hold(pool: Pool, fence: tasks.Fence, strategies: tuple[str, ...]) -> None:
    reference = tasks.reference_of(fence)
    code = "" if reference is None else reference.code
    changes = re.search(r"\.backward\(\)|train\(|seed=3", code)
    everyone = re.search("init_device_mesh|broadcast_from_rank0", code + fence.code)
    given = {"at": FENCES.index(fence), "strategies": strategies}
    for found in pool.run(4 if everyone else 2, tasks.compare, **given):
        assert tuple(found) == strategies
        for differences in found.values():
            moved = differences.pop("moved", 0.0)
            assert max(differences.values(), default=0.0) < TOLERANCE
            assert moved > MOVED or not changes


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("fence", REFUSED, ids=_name)
def test_refusals_say_what_is_written_under_them(pool: Pool, fence: tasks.Fence) -> None:
    _hold_refusal(pool, fence, _one_of_them(fence))


@pytest.mark.product
@pytest.mark.parametrize("fence", REFUSED, ids=_name)
def test_so_they_say_under_every_strategy(pool: Pool, fence: tasks.Fence) -> None:
    _hold_refusal(pool, fence, tuple(tasks.STRATEGIES))


def _hold_refusal(pool: Pool, fence: tasks.Fence, strategies: tuple[str, ...]) -> None:
    (text,) = re.findall(r"^# (\w+Error: .*)$", fence.code, re.MULTILINE)
    for found in pool.run(2, tasks.refuse, at=FENCES.index(fence), strategies=strategies):
        assert len(found) == len(strategies)
        assert [said for said in found.values() if not said.startswith(text)] == []


def test_the_snippets_of_the_guide_run(pool: Pool) -> None:
    for count, off, decays, (head, others) in pool.run(4, tasks.guide):
        assert count == 10
        assert off < TOLERANCE
        assert sorted(decays) == [0.0, 0.1]
        assert 66 <= head < 66 + 4 * 32  # with padding
        assert others > 500


@pytest.mark.parametrize("strategy", tasks.STRATEGIES)
def test_an_optimizer_made_between_forward_and_backward_is_refused(
    pool: Pool, strategy: str
) -> None:
    for said, off in pool.run(2, tasks.taken_while_whole, strategy=strategy):
        assert "of unit 'Model': expected the sharded parameter, got the gathered one" in said
        assert off == 0.0
