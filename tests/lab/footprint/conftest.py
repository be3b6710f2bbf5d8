"""The benchmarks' way of running torch's own FSDP2 is the tests' too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
