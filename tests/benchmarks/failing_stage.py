"""A stage of which hardly a row works."""

from __future__ import annotations

import os
import time
from typing import Any

from gpu.rows import Row, Setting


def rows(setting: Setting) -> list[Row]:
    def raising() -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    def poisoned() -> dict[str, Any]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    return [
        Row("process", lambda: {"id": os.getpid()}),
        Row("raises", raising),
        Row("same process", lambda: {"id": os.getpid()}),
        Row("poisoned", poisoned),
        Row("another process", lambda: {"id": os.getpid()}),
        Row("dies", lambda: os._exit(9)),
        Row("hangs", lambda: time.sleep(600) or {}, seconds=0.1, patience=0.5),
        Row("told", lambda: {"said": os.environ["SAID"]}, environment={"SAID": "so"}),
    ]
