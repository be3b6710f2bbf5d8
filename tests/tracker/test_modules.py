"""Where in the model memory is taken: states and peaks of every module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from tracker_nets import FLOAT, LENGTH, ROWS, WIDTH, Net, adam, bytes_of, train, words

from shardwright.core.footprint import STATES
from shardwright.tracker.memory import MemoryTracker

EIGHT = [state for state in STATES if "peak" not in state and "recompute" not in state]


def states_of(tracker: MemoryTracker, module: str, iteration: int = 1) -> list[str]:
    found = tracker.snapshots
    return [s.state for s in found if s.module == module and s.iteration == iteration]


def test_every_module_is_listed_whether_it_is_sharded_used_or_neither() -> None:
    model = Net()
    rows = {row.name: row for row in train().by_module()}
    assert list(rows) == ["Net", *(name for name, _ in model.named_modules() if name)]
    assert rows["blocks.1"].parameters == bytes_of(model.blocks[1].parameters())
    assert rows["blocks.1.up"].kind == "Linear"
    assert rows["idle"].forward_peak == rows["idle"].backward_peak == rows["idle"].saved == 0
    assert all(r.backward_peak for name, r in rows.items() if name != "idle")


@pytest.mark.parametrize("module", ["Net", "embedding", "blocks", "blocks.0", "blocks.1.down"])
def test_a_module_goes_through_eight_states_in_order_and_two_peaks(module: str) -> None:
    tracker = train(steps=2)
    for iteration in (1, 2):
        assert states_of(tracker, module, iteration) == [*EIGHT, "peak forward", "peak backward"]


def test_a_snapshot_shows_what_was_alive_then() -> None:
    model, batch = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4)), torch.ones(3, 2)
    weights = bytes_of(model.parameters())
    with MemoryTracker(model, inputs=batch) as tracker:
        model(batch)
    found = {(s.module, s.state): s for s in tracker.snapshots}
    before, after = found["1", "before pre-forward"], found["1", "after post-forward"]
    assert before.by_category == {"weight": weights, "input": 24, "activation": 3 * 8 * FLOAT}
    assert after.bytes - before.bytes == 3 * 4 * FLOAT
    assert after.bytes == sum(after.by_category.values())


def test_the_peak_of_a_module_is_that_of_what_runs_in_it() -> None:
    tracker = train(warm=True)
    rows = {row.name: row for row in tracker.by_module()}
    assert rows["Net"].backward_peak == sum(tracker.peaks["backward"].values())
    assert rows["blocks"].backward_peak == max(rows[f"blocks.{i}"].backward_peak for i in range(2))
    assert rows["blocks.0"].forward_peak < rows["blocks.1"].forward_peak
    assert rows["blocks.0"].backward_peak < rows["blocks.1"].backward_peak


@pytest.mark.parametrize("rows", [(9, 3), (3, 9)])
def test_the_peak_of_a_module_is_that_of_its_highest_iteration(rows: tuple[int, int]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with MemoryTracker(model, optimizer) as tracker:
        for count in rows:
            model(torch.ones(count, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (first, second) = (row for row in tracker.by_module() if row.name in ("0", "1"))
    least = bytes_of(model.parameters()) + max(rows) * 8 * FLOAT
    assert first.forward_peak >= least
    assert second.forward_peak >= least + max(rows) * 8 * FLOAT


def test_what_a_forward_leaves_is_saved() -> None:
    hidden = ROWS * LENGTH * FLOAT
    rows = {row.name: row for row in train().by_module()}
    assert rows["embedding"].saved == WIDTH * hidden
    assert rows["blocks.0"].saved == (4 * WIDTH + WIDTH) * hidden  # the wide one and its output


def test_forwards_of_one_iteration_are_counted() -> None:
    tracker = train(microbatches=3, steps=2)
    calls = [s.call for s in tracker.snapshots if (s.module, s.state) == ("head", EIGHT[0])]
    assert calls == [1, 2, 3, 1, 2, 3]
    ends = [s.call for s in tracker.snapshots if (s.module, s.state) == ("head", EIGHT[-1])]
    assert ends == [1, 2, 3, 1, 2, 3]


def test_a_module_that_runs_twice_in_a_forward_is_two_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    model, batch = Twice(), torch.ones(2, 4)
    with MemoryTracker(model, inputs=batch) as tracker:
        model(batch).sum().backward()
    backwards = [
        s.call for s in tracker.snapshots if (s.module, s.state) == ("layer", "before pre-backward")
    ]
    assert backwards == [2, 1]


def test_iterations_end_with_a_step() -> None:
    peaks = train(steps=3, microbatches=2).result().iterations
    assert [peak.phase for peak in peaks] == ["iteration 1", "iteration 2", "iteration 3"]
    assert peaks[1].bytes == peaks[2].bytes


def test_optimizers_are_heard_without_being_named() -> None:
    model, batch = Net(), words()
    optimizer = adam(model)
    with MemoryTracker(model) as tracker:
        for _ in range(2):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert set(tracker.peaks) == {"setup", "forward", "backward", "step"}
    assert len(tracker.result().iterations) == 2
    assert tracker.peaks["forward"]["optimizer_state"] > 0


def test_parts_of_a_model_that_are_called_on_their_own_are_forwards() -> None:
    model, batch = Net(), words()
    with MemoryTracker(model, inputs=batch) as tracker:
        hidden = model.embedding(batch)
        loss = model.head(hidden).sum()
        assert tracker.live["activation"] == WIDTH * ROWS * LENGTH * FLOAT + FLOAT
        del hidden
        loss.backward()
    assert set(tracker.peaks) == {"setup", "forward", "backward"}


def test_a_closure_of_an_optimizer_has_a_forward_and_a_backward_of_its_own() -> None:
    model, batch = nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        return loss

    with MemoryTracker(model, optimizer, inputs=batch) as tracker:
        for _ in range(2):
            optimizer.step(closure)
        assert tracker.live["optimizer_state"] > 0
    assert {"forward", "backward", "step"} <= set(tracker.peaks)
    assert len(tracker.result().iterations) == 2


def test_a_step_that_raises_is_over_with_the_next_forward() -> None:
    class Refusing(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            raise ValueError("on purpose")

    model, batch = nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = Refusing(model.parameters())
    with MemoryTracker(model, optimizer, inputs=batch) as tracker:
        with pytest.raises(ValueError, match="on purpose"):
            optimizer.step()
        out = model(batch)
        assert tracker.phase == "forward"
        assert tracker.live["output"] == 8 * FLOAT
        del out


class Failing(nn.Module):
    """Raises if it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.fails = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.fails:
            raise ValueError("on purpose")
        return self.second(x)


def test_a_forward_that_raises_leaves_no_trace_in_the_next_one() -> None:
    model, batch = nn.Sequential(Failing()), torch.ones(2, 4)
    with MemoryTracker(model, inputs=batch) as tracker:
        with pytest.raises(ValueError, match="on purpose"):
            model(batch)
        assert tracker.live["activation"] == 0
        model[0].fails = False
        model(batch).sum().backward()
    assert states_of(tracker, "0.second") == [*EIGHT, "peak forward", "peak backward"]
    raised = [s.state for s in tracker.snapshots if s.module == "0" and s.call == 1]
    assert raised == ["before pre-forward", "after pre-forward"]


def test_memory_made_in_a_backward_belongs_to_the_module_of_its_node() -> None:
    tracker = train(warm=True)
    places = {held.module for held, change, _ in tracker.log.entries if change > 0}
    assert {"blocks.0.down", "blocks.1.up", "embedding", "head"} <= places
    relu = [
        held.module
        for held, change, _ in tracker.log.entries
        if change > 0 and held.label == "aten.threshold_backward"
    ]
    assert relu == ["blocks.1", "blocks.0"]


def test_the_model_is_as_it_was_afterwards() -> None:
    model, batch = Net(), words()
    optimizer = adam(model)

    def hooks() -> list[int]:
        tables = [
            table
            for module in model.modules()
            for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        ]
        parameters = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
        steps = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
        everywhere = [
            torch.nn.modules.module._global_forward_hooks,
            torch.nn.modules.module._global_forward_pre_hooks,
        ]
        return [len(table) for table in (*tables, *parameters, *steps, *everywhere)]

    before, resize = hooks(), torch.UntypedStorage.resize_
    with MemoryTracker(model, optimizer):
        model(batch).sum().backward()
        optimizer.step()
        assert hooks() != before
    assert hooks() == before
    assert torch.UntypedStorage.resize_ is resize


def test_hooks_go_also_where_something_is_raised() -> None:
    model = Failing()
    with pytest.raises(ValueError, match="on purpose"), MemoryTracker(model):
        model(torch.ones(2, 4))
    assert not model._forward_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def test_tracking_changes_no_result() -> None:
    def losses(tracked: bool) -> list[float]:
        torch.manual_seed(0)
        model, batch = Net(False), words()
        optimizer = adam(model)
        found = []
        for _ in range(3):
            if tracked:
                with MemoryTracker(model, optimizer, inputs=batch):
                    loss = model(batch).square().sum()
                    loss.backward()
                    optimizer.step()
            else:
                loss = model(batch).square().sum()
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(tracked=True) == losses(tracked=False)


class _Given(nn.Module):
    """A layer that is given what all layers share, whose gradient is complete at the end alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(50, 50, bias=False)

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + shared


class _Sharing(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(50, 50, bias=False)
        self.layers = nn.ModuleList(_Given() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = shared = self.first(x)
        for layer in self.layers:
            x = layer(x, shared)
        return x.sum()


def test_following_modules_keeps_no_gradient_alive() -> None:
    def held(depth: int) -> int:
        model, x = _Sharing(depth), torch.zeros(40, 50)
        with MemoryTracker(model, inputs=x) as tracker:
            model(x).backward()
        return tracker.peaks["backward"].get("temporary", 0)

    assert held(9) == held(3)
