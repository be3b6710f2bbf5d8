"""A click log made up from a known law, so that the best reachable score is known too.

The rows have the shape of Criteo's and nothing of its content. The probability p of a click is an
exact function of the fields that are written, and every random number is a hash of (seed, stream,
row), so that any range of rows can be made alone and no teacher's table is stored.

    logit p = base + dense_scale / sqrt(13) * sum_j w_j z_j
                   + bias_scale * sum_f g_f b_f(id_f)
                   + interaction_scale / sqrt(P) * sum_(f,g) <u_f(id_f), u_g(id_g)> / sqrt(4)

with w standard normal; b and u standard normal over ids and then brought to mean 0 and deviation 1
over rows, so that the click rate and the Bayes AUC depend little on the seed; z_j the reader's
log(x + 1) on a fixed scale; g_f the share of a feature, of unit length over the features and in
proportion to 1 / ln(1 + cardinality), because a bias of few ids can be learned from few rows.
Of a bag of n ids b and u are the sum over its ids, over sqrt(n).
"""

# Every number is a hash of (seed, stream, row): any rank makes any rows without the ones before,
# and the law behind them is known, so that the best reachable score is a fact and not a guess. A
# change of any constant below changes the rows of every seed, and with them recorded validation
# figures.

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.core.batch import MADE_UP_ZIPF
from shardwright.core.errors import InputError, expected
from shardwright.data.logs import CATEGORY_NAMES, INTEGER_NAMES
from shardwright.data.quality import bayes_accuracy, bayes_auc, bayes_log_loss
from shardwright.data.reading import Bags, ClickBatch

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# The columns of Criteo Kaggle: the five that hold 98 % of its rows scaled down to tens of
# thousands, the rest cut at 4,000.
CARDINALITIES = (
    *(1460, 583, 100_000, 30_000, 305, 24, 4000, 633, 3, 4000, 4000, 80_000, 3194),
    *(27, 4000, 60_000, 10, 4000, 2173, 4, 70_000, 18, 15, 4000, 105, 4000),
)
# About as often empty as the columns of real logs: I1 and I10 nearly half, I12 mostly.
MISSING_INTEGERS = (0.45, 0.0, 0.2, 0.2, 0.03, 0.2, 0.04, 0.0, 0.04, 0.45, 0.04, 0.79, 0.2)
MISSING_CATEGORIES = (
    *(0.0, 0.0, 0.03, 0.03, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.03, 0.0),
    *(0.0, 0.0, 0.03, 0.0, 0.0, 0.4, 0.4, 0.03, 0.75, 0.0, 0.03, 0.4, 0.4),
)
# Pairs of columns of a few dozen ids: their products can be learned from some 100,000 rows.
PAIRS = ((5, 13), (8, 16), (16, 22), (13, 22))

_LATENT = 4  # length of a latent vector u
_HEAD = 1000  # most frequent ids whose numbers count in the mean and the deviation of a column
_CHUNK = 8192  # rows made at a time: keeps the temporaries of a chunk in the processor's cache
_MAX_CARDINALITY = 1 << 31  # rank * multiplier must fit in int64
_WORD = (1 << 64) - 1
# A count is exp(mean + spread * normal) rounded down, in one mean and spread per column.
_LOG_MEAN = (1.0, 1.5, 2.5, 1.7, 7.5, 4.0, 1.8, 2.2, 4.0, 0.5, 1.0, 0.5, 1.7)
_LOG_SPREAD = (1.0, 1.8, 1.2, 0.9, 1.5, 1.5, 1.2, 1.0, 1.3, 0.5, 0.9, 0.6, 1.0)

# Streams: what a random number is for. A column's number is added to its stream.
_COUNTS, _ANGLES, _RANKS, _LABELS, _WEIGHTS, _BIASES, _LATENTS, _WRITTEN, _LENGTHS = range(
    0, 9000, 1000
)
_OTHER = 4000  # from the streams of biases and latent vectors to those that they drift to
_MANY, _FURTHER = 100, 100_000  # columns whose streams lie together, and how far the next ones are
LABEL, _DIGITS = "label", 4  # of named columns: the label, and decimals of dense numbers
_FEW = 64  # ids of a column whose products with another can be learned

Column = tuple[Ints, Ints | None]  # ids [N], offsets [B + 1]; None: one id in each row


@dataclass(frozen=True, slots=True)
class ClickRows:
    """Consecutive rows, as a reader yields them and as they are written.

    ``batch`` what a reader makes of the rows when its tables have the model's cardinalities.
    ``integers`` int64 [n, 13] and ``hashes`` int64 [n, 26] are the fields written, -1 for an empty
    one; of named columns the ids are written, and ``hashes`` is [n, 0].
    ``probabilities`` float64 [n] the chance of a click that the labels were drawn with.
    """

    batch: ClickBatch
    integers: Ints
    hashes: Ints
    probabilities: Floats


@dataclass(frozen=True, slots=True)
class ClickFacts:
    """What the best predictor reaches on the rows of one file, in expectation over its labels.

    ``click_rate`` is the mean probability; log loss is in nats.
    """

    rows: int
    bayes_auc: float
    bayes_log_loss: float
    bayes_accuracy: float
    click_rate: float


@dataclass(frozen=True, slots=True)
class ClickModel:
    """The law that rows are drawn from. Raises InputError on a field that cannot be used.

    ``zipf`` is the exponent of the popularity of ids: rank r, from 1, has probability in proportion
    to the integral of x^-zipf over [r, r+1), which needs no table however many ids there are. The
    scales are standard deviations of the three parts of the logit over rows, the dense one roughly.
    ``pairs`` are columns (from 0) that interact. ``missing_integers`` [13] and
    ``missing_categories`` [26] are chances of an empty field. Columns that have ``names`` are as
    many as there are and hold bags of on average ``lengths`` ids, by one more or less: ``named``
    makes such a model. With a ``drift`` what ids are worth changes from day to day, of which the
    first ``total`` rows are so many: by 1 from one day to the next into something else altogether.
    """

    cardinalities: tuple[int, ...] = CARDINALITIES
    seed: int = 0
    zipf: float = MADE_UP_ZIPF
    bias_scale: float = 1.6
    interaction_scale: float = 0.5
    dense_scale: float = 0.8
    base: float = -1.65
    pairs: tuple[tuple[int, int], ...] = PAIRS
    missing_integers: tuple[float, ...] = MISSING_INTEGERS
    missing_categories: tuple[float, ...] = MISSING_CATEGORIES
    names: tuple[str, ...] = ()
    lengths: tuple[float, ...] = ()
    days: int = 1
    drift: float = 0.0
    total: int = 0

    def named(
        self,
        names: Sequence[str],
        cardinalities: Sequence[int],
        lengths: Sequence[float],
        dense: int,
    ) -> ClickModel:
        """The same law for rows of ``dense`` numbers and these columns, none of which is ever empty
        but by its length. Columns of few ids interact, two by two."""
        small = [f for f, size in enumerate(cardinalities) if 1 < size <= _FEW]
        return replace(
            self,
            cardinalities=tuple(cardinalities),
            pairs=tuple(zip(small[0:8:2], small[1:8:2], strict=False)),
            missing_integers=(0.0,) * dense,
            missing_categories=(0.0,) * len(names),
            names=tuple(names),
            lengths=tuple(lengths),
        )

    def __post_init__(self) -> None:
        columns = len(self.names) or len(CATEGORY_NAMES)
        dense = len(self.missing_integers) if self.names else len(INTEGER_NAMES)
        _check("cardinalities", self.cardinalities, columns, 1, _MAX_CARDINALITY)
        _check("missing_integers", self.missing_integers, dense, 0.0, 1.0)
        _check("missing_categories", self.missing_categories, columns, 0.0, 1.0)
        _check("lengths", self.lengths, len(self.names), 0.0, 1e6)
        scales = (self.zipf, self.bias_scale, self.interaction_scale, self.dense_scale)
        names = ("zipf", "bias_scale", "interaction_scale", "dense_scale")
        for name, value in zip(names, scales, strict=True):
            _check(name, (value,), 1, 0.0, 1e3)
        _check("base", (self.base,), 1, -1e3, 1e3)
        _check("drift", (self.drift,), 1, 0.0, 1.0)
        _check("total", (self.total,), 1, 1.0 if self.drift else 0.0, 2.0**62)
        for pair in self.pairs:
            if len(pair) != 2 or pair[0] == pair[1]:
                raise InputError(expected("pairs", "two different columns", repr(pair)))
            _check("pairs", pair, 2, 0, columns - 1)

    def rows(self, start: int, stop: int) -> ClickRows:
        """Rows [start, stop), the same whatever range they are part of."""
        if not 0 <= start <= stop:
            raise InputError(expected("rows", "0 <= start <= stop", f"{start} and {stop}"))
        row = np.arange(start, stop, dtype=np.uint64)
        counts = [self._counts(j, row) for j in range(len(self.missing_integers))]
        integers = np.stack(counts, axis=1)
        if self.names:
            return self._named_rows(row, integers)
        hashes = np.stack([self._written(f, row) for f in range(len(CATEGORY_NAMES))], axis=1)
        dense = np.log1p(np.maximum(integers, 0)).astype(np.float32)
        sizes = np.array(self.cardinalities, dtype=np.int64)
        ids = np.where(hashes < 0, 0, hashes % sizes)
        p = self._chance(dense.astype(np.float64), [(column, None) for column in ids.T], row)
        return ClickRows(ClickBatch(dense, ids, self._labels(row, p)), integers, hashes, p)

    def _named_rows(self, row: NDArray[np.uint64], integers: Ints) -> ClickRows:
        dense = np.round(np.log1p(integers), _DIGITS).astype(np.float32)
        columns = [self._bags(f, row) for f in range(len(self.names))]
        p = self._chance(dense.astype(np.float64), columns, row)
        bags: dict[str, Bags] = dict(zip(self.names, columns, strict=True))
        batch = ClickBatch(dense, bags, self._labels(row, p))
        return ClickRows(batch, integers, np.empty((len(row), 0), dtype=np.int64), p)

    def _labels(self, row: NDArray[np.uint64], p: Floats) -> NDArray[np.float32]:
        return (_uniform(self.seed, _LABELS, row) < p).astype(np.float32)

    def probability(self, dense: ArrayLike, ids: ArrayLike) -> Floats:
        """The chance of a click, float64 [B], of rows of the first day as read: ``dense`` [B, 13],
        ``ids`` [B, 26].

        The ids must have been reduced to this model's cardinalities. Raises InputError on a shape
        or an id that no reader with those tables yields.
        """
        logs, index = np.asarray(dense, dtype=np.float64), np.asarray(ids, dtype=np.int64)
        _check_columns("dense", logs, len(INTEGER_NAMES))
        _check_columns("ids", index, len(CATEGORY_NAMES))
        if len(logs) != len(index):
            raise InputError(expected("ids", f"{len(logs)} rows, as dense has", f"{len(index)}"))
        for name, column, size in zip(CATEGORY_NAMES, index.T, self.cardinalities, strict=True):
            if column.size and not 0 <= column.min() <= column.max() < size:
                found = f"{column.min()} to {column.max()}"
                remedy = "Read with the model's cardinalities as table_rows."
                raise InputError(expected(f"ids, {name}", f"0 to {size - 1}", found, remedy))
        return self._chance(logs, [(column, None) for column in index.T])

    def _chance(
        self, logs: Floats, columns: Sequence[Column], row: NDArray[np.uint64] | None = None
    ) -> Floats:
        turn = None if row is None or not self.drift else self._turn(row)
        logit = self.base + self._dense_logit(logs) + self._bias_logit(columns, turn)
        return 1.0 / (1.0 + np.exp(-(logit + self._pair_logit(columns, turn))))

    def _turn(self, row: NDArray[np.uint64]) -> Floats:
        """By how much what ids are worth has turned at each row, as an angle."""
        days = ((row.astype(np.float64) + 1.0) * self.days - 1.0) // self.total
        return 0.5 * math.pi * self.drift * np.minimum(days, self.days - 1.0)

    def write(self, path: str | Path, rows: int, start: int = 0) -> ClickFacts:
        """Writes rows [start, start + rows) as tab-separated text, and says what is in. Only named
        columns have a header.

        The file appears whole or not at all. Eight bytes a row are held in memory meanwhile.
        """
        if rows < 2:
            raise InputError(expected("rows", "at least 2", f"{rows}"))
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        probabilities = []
        try:
            with part.open("wb") as file:
                if self.names:
                    file.write("\t".join(self.header).encode() + b"\n")
                for first in range(start, start + rows, _CHUNK):
                    made = self.rows(first, min(first + _CHUNK, start + rows))
                    probabilities.append(made.probabilities)
                    file.write(_named_text(made) if self.names else _text(made))
            os.replace(part, path)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise InputError(
                expected(str(path), "a file that can be written", reason, "Choose another path.")
            ) from error
        finally:
            part.unlink(missing_ok=True)
        return facts(np.concatenate(probabilities))

    def facts(self, start: int, stop: int) -> ClickFacts:
        """What the best predictor reaches on rows [start, stop), without writing them."""
        parts = (
            self.rows(first, min(first + _CHUNK, stop)).probabilities
            for first in range(start, stop, _CHUNK)
        )
        return facts(np.concatenate(list(parts)))

    @property
    def header(self) -> tuple[str, ...]:
        """The columns that are written, if they are named."""
        return (LABEL, *dense_names(len(self.missing_integers)), *self.names)

    def _counts(self, j: int, row: NDArray[np.uint64]) -> Ints:
        draw = _uniform(self.seed, _stream(_COUNTS, j), row)
        missing = self.missing_integers[j]
        present = np.where(draw < missing, 0.5, (draw - missing) / max(1.0 - missing, 1e-300))
        angle = _uniform(self.seed, _stream(_ANGLES, j), row)
        like = j % len(_LOG_MEAN)
        logs = _LOG_MEAN[like] + _LOG_SPREAD[like] * _normal(present, angle)
        return np.where(draw < missing, -1, np.exp(logs).astype(np.int64))

    def _written(self, f: int, row: NDArray[np.uint64]) -> Ints:
        """32-bit values whose remainder is the id, the same for the same id: hashes to the eye."""
        draw, missing = _uniform(self.seed, _RANKS + f, row), self.missing_categories[f]
        present = np.where(draw < missing, 0.5, (draw - missing) / max(1.0 - missing, 1e-300))
        size = self.cardinalities[f]
        ids = self._popular(f, present)
        multiples = ((1 << 32) - 1 - ids) // size + 1
        shift = _uniform(self.seed, _WRITTEN + f, ids.astype(np.uint64)) * multiples
        return np.where(draw < missing, -1, ids + size * shift.astype(np.int64))

    def _popular(self, f: int, draw: Floats) -> Ints:
        """Ids of column f, by the law of their popularity."""
        size = self.cardinalities[f]
        multiplier, offset = _permutation(size)
        return (multiplier * _rank(draw, size, self.zipf) + offset) % size

    def _bags(self, f: int, row: NDArray[np.uint64]) -> tuple[Ints, Ints]:
        """Ids of column f with the offsets of their bags."""
        length = self.lengths[f]
        whole, most = math.floor(length), max(1, math.ceil(length))
        more = _uniform(self.seed, _stream(_LENGTHS, f), row) < length - whole
        offsets = np.zeros(len(row) + 1, dtype=np.int64)
        np.cumsum(whole + more, out=offsets[1:])
        counts = np.diff(offsets)
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        number = np.repeat(row, counts) * np.uint64(most) + place.astype(np.uint64)
        return self._popular(f, _uniform(self.seed, _stream(_RANKS, f), number)), offsets

    def _dense_logit(self, logs: Floats) -> Floats:
        columns = logs.shape[1]
        weights = _normals(self.seed, _WEIGHTS, np.arange(columns, dtype=np.uint64))
        z = (logs - np.resize(_LOG_MEAN, columns)) / np.resize(_LOG_SPREAD, columns)
        # Summed column by column, so that a row's value does not depend on the rows next to it.
        parts: Floats = sum((w * z[:, j] for j, w in enumerate(weights)), np.zeros(len(logs)))
        return self.dense_scale / math.sqrt(columns) * parts

    def _bias_logit(self, columns: Sequence[Column], turn: Floats | None) -> Floats:
        shares = [1.0 / math.log(1.0 + size) for size in self.cardinalities]
        total = np.zeros(_rows_of(columns[0]))
        for f, share in enumerate(shares):
            total += share * self._worth(_stream(_BIASES, f), f, columns[f], turn)
        return self.bias_scale / math.hypot(*shares) * total

    def _pair_logit(self, columns: Sequence[Column], turn: Floats | None) -> Floats:
        total = np.zeros(_rows_of(columns[0]))
        u = {
            f: [
                self._worth(_stream(_LATENTS, f, _LATENT) + k, f, columns[f], turn)
                for k in range(_LATENT)
            ]
            for f in {f for pair in self.pairs for f in pair}
        }
        for f, g in self.pairs:
            for k in range(_LATENT):
                total += u[f][k] * u[g][k]
        return self.interaction_scale / math.sqrt(_LATENT * max(len(self.pairs), 1)) * total

    def _worth(self, stream: int, f: int, column: Column, turn: Floats | None) -> Floats:
        """A number per row: what its ids are worth on its day."""
        first = self._pooled(stream, f, column)
        if turn is None:
            return first
        return np.cos(turn) * first + np.sin(turn) * self._pooled(stream + _OTHER, f, column)

    def _pooled(self, stream: int, f: int, column: Column) -> Floats:
        """A number per row: that of its id, or of a bag's n ids the sum over sqrt(n)."""
        ids, offsets = column
        traits = self._trait(stream, f, ids)
        if offsets is None:
            return traits
        counts = np.diff(offsets)
        bag = np.repeat(np.arange(len(counts)), counts)
        sums = np.bincount(bag, weights=traits, minlength=len(counts))
        return sums / np.sqrt(np.maximum(counts, 1))

    def _trait(self, stream: int, f: int, ids: Ints) -> Floats:
        """A number per id of column f, of mean 0 and deviation 1 over the rows of the log."""
        size, missing = self.cardinalities[f], self.missing_categories[f]
        ranks = np.arange(min(size, _HEAD))
        multiplier, offset = _permutation(size)
        edges = _share_below(np.arange(len(ranks) + 1), size, self.zipf)
        chance = np.append((1.0 - missing) * np.diff(edges), missing)  # an empty field is id 0
        head = np.append((multiplier * ranks + offset) % size, 0).astype(np.uint64)
        traits = _normals(self.seed, stream, head)
        mean = float((chance * traits).sum())
        # Past the head no id is frequent, and the law of large numbers gives mean 0, deviation 1.
        tail = (1.0 - missing) * (1.0 - float(edges[-1]))
        variance = float((chance * traits**2).sum()) + tail - mean**2
        if variance < 1e-12:  # a column with one value says nothing
            return np.zeros(len(ids))
        return (_normals(self.seed, stream, ids.astype(np.uint64)) - mean) / math.sqrt(variance)


def facts(probabilities: ArrayLike) -> ClickFacts:
    """The Bayes values of rows that are clicked with these ``probabilities`` [n], n >= 2."""
    p = np.asarray(probabilities, dtype=np.float64)
    return ClickFacts(
        rows=p.size,
        bayes_auc=bayes_auc(p),
        bayes_log_loss=bayes_log_loss(p),
        bayes_accuracy=bayes_accuracy(p),
        click_rate=float(p.mean()),
    )


def _text(made: ClickRows) -> bytes:
    columns: list[list[str]] = [["1" if y else "0" for y in made.batch.labels.tolist()]]
    for counts in made.integers.T:
        columns.append(["" if x < 0 else str(x) for x in counts.tolist()])
    for hashes in made.hashes.T:
        columns.append(["" if x < 0 else f"{x:08x}" for x in hashes.tolist()])
    return "".join(f"{line}\n" for line in map("\t".join, zip(*columns, strict=True))).encode()


def _named_text(made: ClickRows) -> bytes:
    batch = made.batch
    assert isinstance(batch.ids, dict)
    columns: list[list[str]] = [["1" if y else "0" for y in batch.labels.tolist()]]
    columns.extend([f"{x:.{_DIGITS}f}" for x in numbers.tolist()] for numbers in batch.dense.T)
    for ids, offsets, *_ in batch.ids.values():
        words = list(map(str, ids.tolist()))
        ends = offsets.tolist()
        columns.append([" ".join(words[a:b]) for a, b in itertools.pairwise(ends)])
    return "".join(f"{line}\n" for line in map("\t".join, zip(*columns, strict=True))).encode()


def dense_names(count: int) -> tuple[str, ...]:
    """Names of the dense columns of rows that are made up."""
    return tuple(f"I{i}" for i in range(1, count + 1))


def _rows_of(column: Column) -> int:
    ids, offsets = column
    return len(ids) if offsets is None else len(offsets) - 1


def _stream(purpose: int, column: int, width: int = 1) -> int:
    """The first of ``width`` streams of random numbers of a column: no two have the same."""
    return purpose + column % _MANY * width + column // _MANY * _FURTHER


def _rank(draw: Floats, size: int, exponent: float) -> Ints:
    """Popularity ranks from 0, by inverting the law's distribution function in closed form."""
    if math.isclose(exponent, 1.0, abs_tol=1e-9):
        x = (size + 1.0) ** draw
    else:
        power = 1.0 - exponent
        x = (1.0 + draw * ((size + 1.0) ** power - 1.0)) ** (1.0 / power)
    return np.clip(x.astype(np.int64) - 1, 0, size - 1)


def _share_below(rank: Ints, size: int, exponent: float) -> Floats:
    """The chance of a rank below each ``rank``: the distribution function ``_rank`` inverts."""
    if math.isclose(exponent, 1.0, abs_tol=1e-9):
        return np.log1p(rank) / math.log1p(size)
    power = 1.0 - exponent
    return ((rank + 1.0) ** power - 1.0) / ((size + 1.0) ** power - 1.0)


def _permutation(size: int) -> tuple[int, int]:
    """Multiplier and offset of a one-to-one map of range(size), so that ids carry no order."""
    multiplier = 2654435761 % size | 1
    while math.gcd(multiplier, size) != 1:
        multiplier += 2
    return multiplier, 12345


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _uniform(seed: int, stream: int, index: NDArray[np.uint64]) -> Floats:
    """Numbers in (0, 1) that depend on nothing but (seed, stream, index)."""
    origin = np.array([seed & _WORD, stream], dtype=np.uint64) + np.uint64(0x632BE59BD9B4E019)
    key = _mixed(_mixed(origin[:1]) + origin[1:])
    words = _mixed(key + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _normal(radius: Floats, angle: Floats) -> Floats:
    """Standard normal numbers from two uniform ones each (Box and Muller)."""
    return np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)


def _normals(seed: int, stream: int, index: NDArray[np.uint64]) -> Floats:
    return _normal(_uniform(seed, stream, index), _uniform(seed, stream + 500, index))


def _check(name: str, values: Sequence[float], count: int, low: float, high: float) -> None:
    if len(values) != count:
        raise InputError(expected(name, f"{count} values", f"{len(values)}"))
    for position, value in enumerate(values):
        if not low <= value <= high:
            where = name if count == 1 else f"{name}[{position}]"
            raise InputError(expected(where, f"{low:g} to {high:g}", f"{value:g}"))


def _check_columns(name: str, values: NDArray[np.generic], columns: int) -> None:
    if values.ndim != 2 or values.shape[1] != columns:
        raise InputError(expected(name, f"shape [rows, {columns}]", f"{list(values.shape)}"))
