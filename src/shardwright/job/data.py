"""What a run reads: the ``[data]`` section of a job."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shardwright.core.model import Zipf

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Days = Annotated[int, msgspec.Meta(ge=2, le=1000)]
Dropped = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Drift = Annotated[float, msgspec.Meta(ge=0, le=1)]


class DataSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Click logs: a Criteo file, one of named ``columns``, whose ids are rows or taken modulo their
    number, or synthetic rows, for which no path is named. Or text: any file,
    whose bytes are the tokens; a made-up one where none is named. What is made up goes into the run
    folder. Or ``python``: a function that gives batches; without one those of the model's own
    function.

    Of ``days`` of a log, or of a folder of days, the last one is held out. Of rows without a click
    the share ``drop_negatives`` is left out. ``cache`` is a folder for rows in binary.
    ``zipf`` is the exponent of the popularity of ids. A rank gets ``test_batch`` held-out rows at a
    time.
    """

    kind: Literal["criteo", "columns", "synthetic", "text", "python"] = "criteo"
    python: str | UnsetType = UNSET
    label: str | UnsetType = UNSET
    dense: tuple[str, ...] | UnsetType = UNSET
    ids: Literal["exact", "modulo"] | UnsetType = UNSET
    path: str = ""
    test_path: str = ""
    skip_bad_rows: bool = False
    rows: Count = 100_000
    test_rows: Whole = 20_000
    seed: Whole = 0
    days: Days | UnsetType = UNSET
    drop_negatives: Dropped | UnsetType = UNSET
    cache: Annotated[str, msgspec.Meta(min_length=1)] | UnsetType = UNSET
    zipf: Zipf | UnsetType = UNSET
    drift: Drift | UnsetType = UNSET
    test_batch: Count | UnsetType = UNSET
