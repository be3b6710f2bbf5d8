"""The devices and the number of ranks that the name of a published test stands for."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

GIB = 2**30


class Device(NamedTuple):
    """A device: its name, its bytes, and its generation."""

    name: str
    capacity: int
    generation: Literal["ampere", "hopper", "blackwell"]

    @property
    def hopper(self) -> bool:
        """Whether it is Hopper or newer."""
        return self.generation != "ampere"

    @property
    def blackwell(self) -> bool:
        """Whether it is Blackwell."""
        return self.generation == "blackwell"


DEVICES = {
    "gb300": Device("GB300", 276 * GIB, "blackwell"),
    "gb200": Device("GB200", 184 * GIB, "blackwell"),
    "b200": Device("B200", 180 * GIB, "blackwell"),
    "h200": Device("H200", 141 * 10**9, "hopper"),
    "h100 96gb": Device("H100 96GB", 96 * GIB, "hopper"),
    "h100": Device("H100", 80 * GIB, "hopper"),
    "a100": Device("A100", 80 * GIB, "ampere"),
}
"""Memory as the makers give it: it bounds what can be allocated from above."""

RANKS = 8
RANKS_OF_GB_NODE = 4
RELEASE_RANKS = 64


def device_of(platform: str) -> tuple[Device, tuple[str, ...]]:
    """The device in a platform's name. Tests of an ``lts`` platform without one ran on A100, those
    of a ``dev`` platform on H100 (taken from the tests' recipes)."""
    name = platform.lower()
    for part, device in DEVICES.items():
        if part in name:
            return device, ()
    device = DEVICES["h100" if "dev" in name else "a100"]
    return device, (f"device {device.name}: the platform {platform!r} names none",)


def ranks_of(test: str, platform: str) -> tuple[int, str]:
    """Ranks of a test, and the assumption behind them: the arguments do not give their number.

    A name may hold nodes and GPUs (``1N8G``) or nodes alone (``1node``). Nodes of GB200 have 4
    GPUs, so that a larger number of GPUs is that of all nodes. Other tests ran on 8 ranks, release
    tests on more.
    """
    each = RANKS_OF_GB_NODE if "gb" in platform.lower() else RANKS
    both = re.search(r"(\d+)N(\d+)G(?![a-z])", test)
    nodes = re.search(r"_(\d+)node", test)
    if both:
        count, gpus = int(both[1]), int(both[2])
        ranks = gpus if gpus > each else count * gpus
    elif nodes:
        ranks = int(nodes[1]) * each
    elif "release" in test:
        ranks = RELEASE_RANKS
    else:
        ranks = RANKS
    return ranks, f"{ranks} ranks: read from the name of the test"
