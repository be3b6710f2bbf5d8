"""Every live storage of this process's tensors, what it is for, and when most was alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.core import footprint
from shardwright.core.errors import InputError
from shardwright.core.timeline import Kind, Phase
from shardwright.tracker import private, storages
from shardwright.tracker.announce import is_listening, listening
from shardwright.tracker.owners import Owners
from shardwright.tracker.reading import Reading, as_text

_DEFAULT: dict[str, Kind] = {
    "exchange_ids": "communication",
    "lookup": "communication",
    "exchange_rows": "communication",
    "reduce": "communication",
    "forward": "activation",
    "load": "input",
}
TOP = 20  # how many of the largest tensors are listed

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class MemoryTracker(storages.Follower):
    """What is alive, and what for, while a model trains, on real tensors and on fake ones::

        with MemoryTracker(model, optimizer, inputs=(x, y)) as tracker:
            model(x).sum().backward()
            optimizer.step()
        print(tracker.report())

    With a ``model`` phases, modules and kinds are found by themselves, for plain modules, DDP,
    FSDP2 and units of ours; without an ``optimizer`` every one that steps is heard. Enter it
    between steps. Without a model it follows storages, and its user names phases (``during``) and
    kinds (``adopt``). Fake tensors count if the model's are fake, real ones if they are real.

    Bytes are those of storages; on CUDA each is rounded up to 512 as its allocator does it.
    ``granularity`` rounds all of them instead. Only storages on the model's kind of device count.

    Where most was alive is read off when it is asked for, so all that an operation costs is an
    entry in a log: some 15 microseconds and 100 bytes (torch 2.13, two shared cores).
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizers | None = None,
        inputs: Any = None,
        *,
        granularity: int | None = None,
    ) -> None:
        if granularity is not None and granularity < 1:
            raise InputError("granularity", "1 byte or more", str(granularity))
        super().__init__(granularity=granularity, mixed=model is None, device_type="")
        self.log = storages.Log()
        self.owners = None if model is None else Owners(self, model, optimizer, inputs)
        self._phases: list[Phase] = []
        self._regions: list[Kind] = []
        self._state = "new"
        self._around = ExitStack()
        self._read_device: Callable[[], footprint.AllocatorMemory] | None = None
        self._device: footprint.AllocatorMemory | None = None

    # ---- naming it -------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The phase that is on; ``setup`` also between phases that are named."""
        if self._phases:
            return self._phases[-1]
        if self.owners is None:
            return "setup"
        return "backward" if private.in_backward() else self.owners.phase

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """New storages and peaks belong to ``phase`` inside."""
        self.begin(phase)
        try:
            yield
        finally:
            self.end()

    def begin(self, phase: Phase) -> None:
        """``phase`` begins, inside the one that is on."""
        self._phases.append(phase)
        self.log.turn(phase)

    def end(self) -> None:
        """The phase that began last is over."""
        self._phases.pop()
        self.log.turn(self.phase)

    @contextmanager
    def region(self, kind: Kind) -> Iterator[None]:
        """What is made inside is of ``kind``, unless it turns out to be something else."""
        self._regions.append(kind)
        try:
            yield
        finally:
            self._regions.pop()

    @property
    def in_region(self) -> bool:
        """Whether what is made now has a kind already."""
        return bool(self._regions)

    def adopt(self, tensor: torch.Tensor, kind: Kind) -> None:
        """Count the storage of ``tensor`` as ``kind``, whatever it counted as before."""
        self.storages.assign(tensor, kind, storages.DECLARED)

    # ---- following storages ----------------------------------------------------------------------

    def heed(self, function: Any, arguments: Any, keywords: Any, result: Any) -> bool:
        """Count what the operation was given and nobody made. Whether it may return such a thing:
        what a backend copied for itself comes by when a collective ends; elsewhere everything
        given is known."""
        if self.owners is None:
            return False
        self.owners.heed(function, arguments)
        return (self.in_region or private.in_backward()) and not storages.is_constant(function)

    @property
    def module(self) -> str | None:
        """The path of the module at work, None outside of all."""
        return None if self.owners is None else self.owners.modules.at_work()

    def made_by(self, operation: object) -> storages.Holding:
        """A holding of what ``operation`` makes now, by where in the step that is."""
        if self._regions:
            return storages.Holding(self._regions[-1], storages.MOVED, operation, self.module)
        phase = self.phase
        kind = _DEFAULT.get(phase, "temporary")
        if phase == "backward" and private.in_backward() and torch.is_grad_enabled():
            kind = "activation"  # what a checkpoint computes again
        elif phase == "setup" and self.owners is not None:
            kind = "input"
        return storages.Holding(kind, storages.GUESSED, operation, self.module)

    def resize(self, held: storages.Holding, size: int) -> None:
        self.log.turn(self.phase)
        self.log.resize(held, size, self.module)

    def change(self, held: storages.Holding, new: storages.Holding, size: int) -> None:
        self.log.resize(held, 0, None)
        self.log.resize(new, size, None)

    def free(self, held: storages.Holding) -> None:
        self.log.go(held)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        take_up = self.owners is not None and not self._paused
        self.storages.resized(storage, take_up=take_up)

    # ---- its life --------------------------------------------------------------------------------

    def __enter__(self) -> MemoryTracker:
        if self._state != "new":
            raise InputError(
                "MemoryTracker", "a new one", "one that was entered before", "Make another."
            )
        if is_listening():
            remedy = "End the outer one first, or give it the whole model."
            raise InputError("MemoryTracker", "one at a time", "one inside another", remedy)
        with ExitStack() as around:
            self._begin(around)
            super().__enter__()
            around.callback(super().__exit__, None, None, None)
            self._around = around.pop_all()
        self._state = "on"
        return self

    def _begin(self, around: ExitStack) -> None:
        around.callback(self.close)
        around.enter_context(private.quiet_propagation(self._pause))
        around.enter_context(listening(self._hear))
        if self.owners is None:
            return
        # Fake or real, and on which device, is that of the model: others that are alive in the
        # process, such as those of a data loader or of a trace inside a step, are not what is asked
        # for.
        first = self.owners.first_tensor
        if first is not None:
            self.storages.mode = private.fake_mode_of(first)
            self.storages.device_type = next(
                map(storages.device_type_of, private.plain_parts(first))
            )
        else:
            self.storages.mode = private.present_fake_mode()
        self.log.turn(self.phase)
        around.enter_context(self.owners.heard())
        device = None if first is None else first.device
        self._read_device = meter_for(device, fake=self.is_fake)

    def _hear(self, tensor: torch.Tensor, kind: Kind) -> None:
        """A runtime says what its memory is for; without a model only its meter is believed."""
        if self.owners is not None:
            self.storages.assign(tensor, kind, storages.DECLARED)

    def __exit__(self, *exception: Any) -> None:
        if self._read_device is not None:
            self._device = self._read_device()
        self._around.close()

    def close(self) -> None:
        """Stop following storages; what was seen stays."""
        self._state = "over"
        self.storages.release()

    # ---- what it saw -----------------------------------------------------------------------------

    @property
    def live(self) -> Counter[Kind]:
        """Bytes alive by kind, now or when it ended."""
        return self.storages.live()

    @property
    def total(self) -> int:
        """Bytes alive, now or when it ended."""
        return self.storages.total()

    @property
    def is_fake(self) -> bool:
        """Whether fake tensors are followed, and no real ones."""
        return self.storages.mode is not None

    @property
    def peaks(self) -> dict[Phase, dict[Kind, int]]:
        """Live bytes by kind at the moment of each phase when their total was largest."""
        return {name: peak.by_category for name, peak in self._read().phases().items()}

    @property
    def peak(self) -> footprint.PhasePeak:
        """The moment when most was alive."""
        return self._read().peak()

    @property
    def snapshots(self) -> tuple[footprint.Snapshot, ...]:
        """Every state that a module reached: before and after what hooks do around its forward and
        its backward, and the peaks of both."""
        return self._read().snapshots()

    def by_module(self) -> tuple[footprint.ModuleMemory, ...]:
        """Every module of the model, whether it was used or not."""
        return self._read().by_module()

    def alive_at_peak(self, top: int = TOP) -> tuple[footprint.Alive, ...]:
        """The largest tensors that were alive at the peak, equal ones together."""
        return self._read().alive_at_peak(top)

    def timeline(self) -> tuple[tuple[Kind, ...], tuple[footprint.Sample, ...]]:
        """Kinds, and their live bytes after everything that happened."""
        return self._read().timeline()

    def result(self, top: int = TOP) -> footprint.Tracked:
        """All of it as one value."""
        reading = self._read()
        return footprint.Tracked(
            model=reading.root,
            fake=self.is_fake,
            peak=reading.peak(),
            phases=tuple(reading.phases().values()),
            iterations=reading.iterations(),
            modules=reading.by_module(),
            largest=reading.alive_at_peak(top),
            snapshots=reading.snapshots(),
            device=self._device,
        )

    def report(self) -> str:
        """All of it, but for the states of modules, as a text."""
        return as_text(self.result())

    def _read(self) -> Reading:
        return Reading(self.log, None if self.owners is None else self.owners.modules)


def device_meter(device: torch.device) -> Callable[[], footprint.AllocatorMemory]:
    """Reads peaks of ``torch.cuda`` from now on, which are reset."""

    def now() -> dict[str, Any]:
        torch.cuda.synchronize(device)
        return dict(torch.cuda.memory_stats(device))

    def read() -> footprint.AllocatorMemory:
        last = now()
        return footprint.AllocatorMemory(
            device=torch.cuda.get_device_name(device),
            before=first["active_bytes.all.current"],
            active_peak=last["active_bytes.all.peak"],
            allocated_peak=last["allocated_bytes.all.peak"],
            reserved_peak=last["reserved_bytes.all.peak"],
            retries=last["num_alloc_retries"] - first["num_alloc_retries"],
            out_of_memory=last["num_ooms"] - first["num_ooms"],
        )

    torch.cuda.reset_peak_memory_stats(device)
    first = now()
    return read


def meter_for(
    device: torch.device | None, *, fake: bool
) -> Callable[[], footprint.AllocatorMemory] | None:
    """A meter where real tensors live on a GPU."""
    if fake or device is None or device.type != "cuda" or not torch.cuda.is_available():
        return None
    return device_meter(device)
