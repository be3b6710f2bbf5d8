"""Text as tokens: the bytes of any file, read in windows; and a text made up from a known law.

A file is cut into windows of T tokens that do not overlap. Inputs are a window, targets the same
window one byte later. The last tenth of the windows is held out, at most some million tokens.

The made-up text is words of a made-up language, drawn one by one: the word of rank r has a chance
in proportion to 1/r. Nothing else can be known about the next byte than what the word so far says,
so the best loss that a model can reach is that of the words, spread over their letters and blanks.
"""

# Windows do not overlap and the held-out tenth lies at the end, so nothing that is scored was ever
# trained on. Only `random.random` is drawn from for the made-up text: the one generator whose
# numbers no version of Python changes, and the best possible loss is computed from that very text.

from __future__ import annotations

import math
import random
import stat
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwright.core.document import write_atomically
from shardwright.core.errors import InputError, expected
from shardwright.data.reading import DealtRows, numbered_batches

VOCAB = 256  # a byte is a token
HELD_OUT_SHARE = 10  # one window in so many
HELD_OUT_TOKENS = 2**20  # and no more than this
MADE_UP_BYTES = 300_000

_WORDS = 200
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """``inputs`` and ``targets`` int64 [B, T]; a target is the token after its input."""

    inputs: Tokens
    targets: Tokens


@dataclass(frozen=True, slots=True)
class TextFacts:
    """The expected loss of the law itself on a made-up text, in nats per token."""

    tokens: int
    bayes_log_loss: float


class Text:
    """The windows of a file; raises InputError if it is none or has less than two."""

    def __init__(self, path: str | Path, sequence: int) -> None:
        size = _size(Path(path))
        self.sequence = sequence
        windows = (size - 1) // sequence
        if windows < 2:
            raise InputError(
                expected(
                    str(path),
                    f"at least {2 * sequence + 1} bytes, for two windows of {sequence} tokens",
                    str(size),
                    "Take a longer text or a smaller batch.sequence.",
                )
            )
        most = max(1, HELD_OUT_TOKENS // sequence)
        self.held_out = min(max(1, windows // HELD_OUT_SHARE), most)
        self.training = windows - self.held_out
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")

    def batch(self, windows: NDArray[np.int64]) -> TokenBatch:
        """These windows, counted from the file's start."""
        places = windows[:, None] * self.sequence + np.arange(self.sequence + 1)
        found = self._bytes[places].astype(np.int64)
        return TokenBatch(found[:, :-1].copy(), found[:, 1:].copy())


def training_batches(
    text: Text,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    dealt: Sequence[DealtRows] = (),
) -> Iterator[TokenBatch]:
    """One rank's batches without end, ``batch_size`` windows each.

    Every pass takes the training windows in a new order that follows from ``seed``, and the next
    begins where it ends. Global batch k is the windows [k*W*B, (k+1)*W*B) of that endless order,
    rank r owns B of them from r*B on, so the global batch is the same whatever W while W*B is.
    After ``dealt`` come the windows that are left.
    """

    @lru_cache(maxsize=2)  # a batch may reach into the next pass
    def order(number: int) -> NDArray[np.int64]:
        # From seed and number of the pass alone: every rank and every resumed run has the same
        # order.
        return np.random.Generator(np.random.PCG64([seed, number])).permutation(text.training)

    def read(places: NDArray[np.int64]) -> TokenBatch:
        rounds, inside = np.divmod(places, text.training)
        windows = np.empty_like(places)
        for number in np.unique(rounds).tolist():
            windows[rounds == number] = order(number)[inside[rounds == number]]
        return text.batch(windows)

    return numbered_batches(read, batch_size, rank, world_size, dealt)


def held_out_batches(
    text: Text, batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[TokenBatch, NDArray[np.int64]]]:
    """One rank's batches of a pass over the held-out windows, each with its windows' numbers.

    Numbers count held-out windows from 0. Every rank yields as many batches, so that collectives
    stay in step, and every batch is full: places past the end repeat the last window, under -1.
    """
    for start in range(0, text.held_out, batch_size * world_size):
        first = start + rank * batch_size
        numbers = np.arange(first, first + batch_size)
        inside = np.minimum(numbers, text.held_out - 1)
        batch = text.batch(text.training + inside)
        yield batch, np.where(numbers < text.held_out, numbers, -1)


def write_text(path: str | Path, size: int = MADE_UP_BYTES, seed: int = 0) -> TextFacts:
    """Write ``size`` bytes of the made-up text, whole or not at all."""
    draw = random.Random(seed).random  # the one method whose numbers no version of Python changes
    words = _words(draw)
    weights = [1.0 / rank for rank in range(1, _WORDS + 1)]
    chances = [weight / math.fsum(weights) for weight in weights]
    edges = list(accumulate(chances))
    made = bytearray()
    while len(made) < size:
        made += words[min(bisect(edges, draw()), _WORDS - 1)]
    write_atomically(path, bytes(made[:size]))
    nats = -math.fsum(p * math.log(p) for p in chances)
    length = math.fsum(p * len(word) for p, word in zip(chances, words, strict=True))
    return TextFacts(size, nats / length)


def _words(draw: Callable[[], float]) -> list[bytes]:
    """Different words of two or three syllables, each with the blank that ends it."""
    found: dict[bytes, None] = {}
    while len(found) < _WORDS:
        syllables = 2 + int(2 * draw())
        letters = [kind[int(draw() * len(kind))] for kind in (_CONSONANTS, _VOWELS) * syllables]
        found["".join((*letters, " ")).encode()] = None
    return list(found)


def _size(path: Path) -> int:
    """Bytes of a regular file that can be read."""
    remedy = "Name a text in data.path, or none for a made-up one."
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode):
            with path.open("rb"):
                return found.st_size
    except FileNotFoundError:
        raise InputError(expected(str(path), "a text file", "no such file", remedy)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        wanted = "a readable text file"
        raise InputError(expected(str(path), wanted, f"'{reason}'", remedy)) from None
    kind = "a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
    raise InputError(expected(str(path), "a text file", kind, remedy))
