"""What a machine without a network may lack, as wheels in ``kit``, and how it gets it there.

    python -m gpu.kit FOLDER

unpacks into FOLDER those wheels of ``kit`` whose packages cannot be imported. It needs the standard
library alone, not even pip; torch is never among them.
"""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path

KIT = Path(__file__).with_name("kit")


def packages(wheel: Path) -> set[str]:
    """What can be imported of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    names = (top.removesuffix(".py") for top in tops if not top.endswith((".dist-info", ".data")))
    return {name for name in names if name.isidentifier()}


def unpack(kit: Path, folder: Path) -> list[str]:
    """Unpack what is missing; the names of those wheels."""
    found = []
    for wheel in sorted(kit.glob("*.whl")):
        if all(importlib.util.find_spec(name) for name in packages(wheel)):
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        found.append(wheel.name)
    return found


if __name__ == "__main__":
    for added in unpack(KIT, Path(sys.argv[1])):
        print(f"not on this machine, taken along: {added}", file=sys.stderr)
