"""What ``run.sh`` measured, as tables: predicted beside measured.

python benchmarks/gpu/show.py gpu-figures            print them
python benchmarks/gpu/show.py gpu-figures --keep     and keep them: validation/<card>/gpu_*.json,
                                                     docs/gpu-<card>.md
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("memory", "seconds", "runtime", "embeddings", "ceilings", "tests")
GIB, MIB = 2**30, 2**20
PEAK_LIMITS = (1.0, 3.0)  # percent: the median and the worst that the live peak may be off
RESERVED_LIMIT = 5.0  # the median of what the allocator holds
STAND_IN = "stand-in"  # what standin.c calls its device
NO_GPU = """\
No GPU and no kernel ran: PyTorch's own code for CUDA did, on a stand-in for the driver and the
libraries (`benchmarks/gpu/standin`). It decides what operators allocate, and has the caching
allocator, so these bytes are those of a GPU where neither cuDNN nor cuBLAS asks for more. cuDNN is
left out: convolutions and recurrent layers (`resnet`, `vit`, `lstm`) run here as they would not on
a GPU. What lies outside of the allocator, and seconds, mean nothing here."""
Table = tuple[Sequence[str], list[Sequence[str]]]


def pages(documents: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Markdown of every stage that there is."""
    for stage in STAGES:
        if document := documents.get(stage):
            yield f"## {stage.capitalize()}\n"
            rows = [row for row in document.get("rows", ()) if not failed(row)]
            yield from PAGES.get(stage, other)(rows)
            yield from _left(document)


def memory(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Live bytes and what the allocator holds, predicted beside measured: tensors as they were
    asked for, which is what is predicted, and the blocks that they lie in."""
    given = {row["name"]: row for row in rows}
    shared = given.pop("workspaces", {}).get("bytes", 0)
    found, peaks, held = [], [], []
    for row in given.values():
        known, live = row["predicted"], row["allocated"] - shared
        peaks.append(_off(known["peak"], live))
        cells = [row["name"], _gib(known["peak"]), _gib(live), _percent(peaks[-1])]
        if reserved := row.get("reserved"):
            cells.insert(2, _percent(_off(known["peak"], row["requested"] - shared)))
            held.append(_off(known["reserved"] + shared, reserved))
            cells += [_gib(known["reserved"] + shared), _gib(reserved), _percent(held[-1])]
            cells += [str(row["retries"]), _outside(row)]
        found.append(cells)
    if not found:
        return
    heads = ["configuration", "live, predicted", "blocks", "off"]
    if held:
        heads.insert(2, "tensors off")
        heads += ["held, predicted", "measured", "off", "retries", "outside: measured"]
    yield _table((heads, found))
    if shared:
        yield (
            f"cuBLAS's workspaces, {shared / MIB:.1f} MiB, are taken off what is live and added to "
            "what is predicted to be held.\n"
        )
    yield _within("Live peak, blocks", peaks, *PEAK_LIMITS)
    if held:
        yield _within("Held", held, RESERVED_LIMIT, None)
    yield from _phases(list(given.values()), shared)


def _phases(rows: list[dict[str, Any]], shared: int) -> Iterator[str]:
    found = []
    for row in rows:
        known = row["predicted"]["phases"]
        both = [
            (known[p], each["allocated"] - shared)
            for p, each in row["phases"].items()
            if p in known
        ]
        offs = [_off(*each) for each in both]
        if any(abs(off) > PEAK_LIMITS[0] for off in offs):
            found.append([row["name"], *(f"{_gib(a)} : {_gib(b)}" for a, b in both)])
    if found:
        yield "Phases that are more than 1 % off, predicted : measured:\n"
        names = [name for name in rows[0]["phases"] if name in rows[0]["predicted"]["phases"]]
        yield _table((["configuration", *names], found))


def seconds(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A step and its parts."""
    heads = ["configuration", "step", "forward", "backward", "update", "host", "tokens/s"]
    names = heads[1:6]
    yield _table(
        (
            heads,
            [
                [
                    row["name"],
                    *(_time(row[name]) for name in names),
                    f"{row['tokens'] / row['step']:,.0f}",
                ]
                for row in rows
            ],
        )
    )


def ceilings(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The best rate of every operator; the file has every shape."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in _entries(rows):
        if "seconds" not in entry:
            continue
        key = tuple(str(entry.get(name, "")) for name in ("class", "op", "dtype"))
        work = entry.get("flops", 0) / 1e12 or entry.get("bytes", 0) / 1e9
        rate = work / entry["seconds"]
        if key not in found or rate > found[key]["rate"]:
            found[key] = {**entry, "rate": rate}
    cells = []
    for key, entry in found.items():
        unit = "TFLOP/s" if entry.get("flops") else "GB/s"
        rate = f"{entry['rate']:,.1f} {unit}" if entry["rate"] else ""
        cells.append([*key, str(entry.get("shape", "")), _time(entry["seconds"]), rate])
    yield _table((["class", "operator", "dtype", "shape of the best", "time", "rate"], cells))


def embeddings(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Times of kinds and floors by how ids are spread, then what else there is."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for entry in _entries(rows):
        if "seconds" in entry:
            names = ("class", "op", "dtype", "optimizer")
            key = tuple(str(entry.get(name, "")) for name in names)
            found.setdefault(key, {})[entry.get("ids", "")] = _time(entry["seconds"])
    cells = [
        [*key, *(times.get(law) or times.get("", "") for law in ("uniform", "zipf"))]
        for key, times in found.items()
    ]
    yield _table((["kind", "operator", "dtype", "optimizer", "uniform ids", "Zipf's"], cells))
    yield from other([row for row in rows if "entries" not in row])


def other(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Whatever figures a row has, in words of its own."""
    cells = []
    for row in rows:
        figures = [
            f"{name} {_value(name, v)}" for name, v in _flat(row) if name not in ("name", "took")
        ]
        cells.append([row["name"], "; ".join(figures)])
    yield _table((["row", "figures"], cells))


PAGES = {"memory": memory, "seconds": seconds, "ceilings": ceilings, "embeddings": embeddings}


def _entries(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows, and the measurements that they list."""
    for row in rows:
        listed = [each for value in row.values() if isinstance(value, list) for each in value]
        yield from (each for each in listed if isinstance(each, dict))
        if not listed:
            yield row


def _flat(value: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        if isinstance(each, dict):
            yield from _flat(each, f"{before}{name} ")
        elif isinstance(each, list):
            if each:
                yield f"{before}{name}", json.dumps(each)
        else:
            yield f"{before}{name}", each


def _left(document: dict[str, Any]) -> Iterator[str]:
    """What was not measured, and why."""
    lines = [
        f"- {row['name']}: {row.get('error') or row['skipped']}"
        for row in document.get("rows", ())
        if failed(row)
    ]
    for row in document.get("rows", ()):
        reasons = Counter(_reason(entry) for entry in row.get("entries", ()))
        lines += [f"- {row['name']}, {n} of it: {why}" for why, n in reasons.items() if why]
    if "skipped" in document:
        lines.append(f"- all of it: {document['skipped']}")
    if lines:
        yield "\n".join(["Not measured:", "", *(line.replace("\n", " ") for line in lines)]) + "\n"


def _reason(entry: dict[str, Any]) -> str:
    """Why one of a row's measurements is missing; a CPU is not asked for what it has not."""
    said = str(entry.get("error") or entry.get("skipped") or "")
    return "" if said == "only on CUDA" else said


def failed(row: dict[str, Any]) -> bool:
    """Whether it was not measured."""
    return "error" in row or isinstance(row.get("skipped"), str)  # tests count theirs


def _table(table: Table) -> str:
    heads, rows = table
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _within(what: str, offs: list[float], median: float, worst: float | None) -> str:
    found = statistics.median(map(abs, offs)), max(map(abs, offs))
    bound = f"{median:g} % asked" if worst is None else f"{median:g} and {worst:g} % asked"
    return (
        f"{what}: {found[0]:.2f} % off in the median of {len(offs)}, {found[1]:.2f} % at worst "
        f"({bound}).\n"
    )


def _outside(row: dict[str, Any]) -> str:
    low, high = row["predicted"]["outside"]
    return f"{low / MIB:,.0f} to {high / MIB:,.0f} MiB: {row['outside_measured'] / MIB:,.0f} MiB"


def _off(predicted: float, measured: float) -> float:
    return 100 * (predicted / measured - 1) if measured else 0.0


def _percent(value: float) -> str:
    return f"{value:+.2f} %"


def _gib(size: float) -> str:
    return f"{size / GIB:.3f} GiB" if size >= GIB / 8 else f"{size / MIB:.3f} MiB"


def _time(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def _value(name: str, value: Any) -> str:
    if isinstance(value, float):
        return _time(value) if "seconds" in name else f"{value:.4g}"
    return str(value)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of a run, by stage; of kept ones, too."""
    found = {}
    for stage in STAGES:
        for path in (folder / f"{stage}.json", folder / f"gpu_{stage}.json"):
            if path.exists():
                found[stage] = json.loads(path.read_text())
    return found


def page(documents: dict[str, dict[str, Any]]) -> str:
    """All of it, with the machine that it is of."""
    facts = next(iter(documents.values())).get("machine", {})
    card = facts.get("card", "a CPU")
    said = ", ".join(f"{key} {value}" for key, value in facts.items() if key != "card")
    head = f"# Measured on {card}\n\n{said}.\n"
    if card.startswith(STAND_IN):
        head = f"# Memory on a stand-in for a GPU\n\n{NO_GPU}\n\n{said}.\n"
    return "\n".join([head, *pages(documents)])


def slug(documents: dict[str, dict[str, Any]]) -> str:
    """The card's name as that of a folder."""
    card = next(iter(documents.values())).get("machine", {}).get("card", "cpu")
    name = STAND_IN if card.startswith(STAND_IN) else card
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    documents = read(options.folder)
    if not documents:
        print(f"{options.folder}: expected files of run.sh, got none", file=sys.stderr)
        return 2
    text = page(documents)
    print(text)
    if options.keep:
        name = slug(documents)
        kept = ROOT / "validation" / name
        kept.mkdir(parents=True, exist_ok=True)
        for stage, document in documents.items():
            (kept / f"gpu_{stage}.json").write_text(json.dumps(document, indent=1) + "\n")
        (ROOT / "docs" / f"gpu-{name}.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
