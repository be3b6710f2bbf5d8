"""Names that torch does not promise are where ``torch_names.json`` says, for every supported torch,
so that one which another version lacks is found with the version that is installed."""

from __future__ import annotations

import json
import re
from functools import cache

import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
from torch_names import LIST, SOURCES, names_used, present, torch_version

KEPT = json.loads(LIST.read_text())
SUPPORTED = ["2.11.0", "2.13.0"]
AGAIN = "Write the list again: see torch_names.py."


@cache
def used() -> frozenset[str]:
    return frozenset(names_used())


def test_every_private_name_of_the_sources_is_in_the_list_and_no_other() -> None:
    assert KEPT["torch"] == SUPPORTED, AGAIN
    listed = {*KEPT["in all"], *KEPT["in some"]}
    assert len(used()) > 300
    assert not (new := used() - listed), f"{sorted(new)} in no list. {AGAIN}"
    assert not (gone := listed - used()), f"{sorted(gone)} are used no more. {AGAIN}"


def test_the_installed_torch_has_every_name_that_the_list_says() -> None:
    said = {name for name, known in KEPT["in some"].items() if torch_version() in known["in"]}
    wrong = {name for name in (*KEPT["in all"], *said) if not present(name)}
    if torch_version() in KEPT["torch"]:
        wrong |= {name for name in KEPT["in some"].keys() - said if present(name)}
    assert not wrong, f"{sorted(wrong)} with torch {torch_version()}. {AGAIN}"


def test_a_name_that_some_versions_lack_names_the_place_that_does_without() -> None:
    for name, known in KEPT["in some"].items():
        file, _, place = known["without it"].partition(": ")
        text = (SOURCES / file).read_text()
        found = re.search(rf"^( *)(?:def|class) {place}\b.*\n(?:\1 .*\n|\n)*", text, re.M)
        assert found, f"{name}: {known['without it']}"
        attribute = re.split("[.:]", name)[-1]
        guard = rf'(?:get|has)attr\([\w., ]*"{attribute}"'
        assert re.search(guard, found.group()), f"{name}: {known['without it']}"


def test_a_name_that_no_torch_has_is_seen() -> None:
    for name in ("torch._C._none", "torch.ops.aten._none", "torch.nn.Module:_none", "torch._no.x"):
        assert not present(name)
    assert present("torch._inductor.decomposition.select_decomp_table")
