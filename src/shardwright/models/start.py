"""What the built-in models share: every parameter starts alike whatever part of it a rank makes."""

# A rank makes only what it keeps, so what a parameter starts with may depend on its name and the
# seed and on nothing else: not on the plan, the number of ranks, or what was drawn before. That is
# what makes losses of one job equal under every plan, and `apply` able to fill a shard without the
# whole.

from __future__ import annotations

import hashlib
from abc import abstractmethod

import torch
from torch import Tensor, nn


class Started(nn.Module):
    """A model that can make any rectangle of any parameter's starting values."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give every parameter its starting values."""
        for name, parameter in self.named_parameters():
            shape = tuple(parameter.shape)
            parameter.copy_(self.initial_block(name, (0,) * len(shape), shape))

    def initial_block(self, fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Starting values of the rectangle ``sizes`` at ``offsets`` of parameter ``fqn``."""
        with torch.device("cpu"):  # where generators draw alike, whatever device is the default
            values = self._start(fqn)
        return values[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    @abstractmethod
    def _start(self, fqn: str) -> Tensor:
        """All starting values of parameter ``fqn``."""


def generator_of(*names: object) -> torch.Generator:
    """A generator of its own for whatever the names say."""
    # Not hash(): Python's differs from process to process, and so from rank to rank.
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    # Seven bytes: manual_seed takes what fits into a signed 64-bit number.
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
