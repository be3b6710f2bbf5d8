"""What the runtime reports to whoever is watching: phases, what memory is for, and what it did.

The runtime calls a :class:`Probe` at fixed places. The base class ignores everything but what
memory is for; the meter measures; a heartbeat reports to the launcher. So the runtime never knows
who is listening.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

from shardwright.core.measurement import Meeting
from shardwright.core.schedule import Action
from shardwright.core.timeline import Phase
from shardwright.tracker.announce import announce

_NOTHING: AbstractContextManager[None] = nullcontext()


class Probe:
    """Listens to nothing; subclass and override what is of interest.

    ``listens`` tells the runtime whether anybody does: what it would only make to report, several
    objects for every unit of every step, it does not make for nobody.
    """

    listens: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.listens = True

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Everything inside belongs to ``phase``; phases nest, the inner one counts."""
        return _NOTHING

    def collective(self, label: str, nbytes: int) -> None:
        """A collective of ``nbytes`` per rank is about to begin."""

    def met(self, meeting: Meeting) -> None:
        """A collective is done, and this rank was held by it and by those who were late."""

    # The storage of a tensor is of a kind from now on; a memory tracker hears it, too. Said several
    # times for every unit and step, so it is the tracker's own function.
    holds = staticmethod(announce)

    def did(self, action: Action) -> None:
        """The runtime carried out an action of the schedule."""
