from __future__ import annotations

import io
from typing import Any

import footprints
import msgspec
import pytest
from footprints import GIB, footprint
from rich.console import Console

from shardwright.core.footprint import Footprint, ModuleMemory
from shardwright.core.quantities import format_bytes
from shardwright.report.memory_report import memory_report
from shardwright.report.wording import range_text, verdict_sentence


def printed(made: Footprint, width: int = 120, **options: Any) -> str:
    out = io.StringIO()
    Console(width=width, no_color=True, file=out).print(memory_report(made, **options))
    return out.getvalue()


def flowed(made: Footprint, **options: Any) -> str:
    """The same on one line, however it was wrapped."""
    return " ".join(printed(made, **options).split())


def worst(**changes: Any) -> Footprint:
    """The footprint with another worst class."""
    first = msgspec.structs.replace(footprints.worst(), **changes)
    return footprint(ranks=(first, *footprint().ranks[1:]))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_report_fits_the_width_and_no_number_is_cut_short(width: int, full: bool) -> None:
    text = printed(footprint(), width, full=full)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert format_bytes(footprint().worst.peak_bytes) in text


def test_what_a_reader_looks_for_is_there() -> None:
    text = flowed(footprint(), full=True)
    for words in (
        "llama: 8.03 billion parameters on 8 ranks",
        "data shard 4, pipeline 2",
        "checkpointing none",
        "Identical ranks, 40.00 GiB each",
        "stage 0 4 22.98 GiB backward, layers.3 23.86 GiB",
        "stage 1 4 21.98 GiB",
        "By module",
        "Largest tensors at the peak",
        "needs of its device",
        "Assumptions - cluster.preset not given",
        "shardwright fit JOB.toml",
    ):
        assert words in text


def test_degrees_of_one_are_not_shown() -> None:
    assert "data replicate" not in flowed(footprint())


def test_categories_have_peoples_names_and_say_how_sure_they_are() -> None:
    text = flowed(footprint(), full=True)
    assert "weights 3.91 GiB 17.0 % exact" in text
    assert "gathered weights 1.40 GiB 6.1 % exact" in text
    assert "activations 7.47 GiB 32.5 % modelled" in text
    assert "all-gather buffers 436.00 MiB" in text
    assert "together 22.98 GiB" in text


def test_modules_stand_below_the_modules_that_hold_them() -> None:
    lines = printed(footprint(), full=True).splitlines()
    begins = [line[:16].rstrip() for line in lines if " MiB " in line or " GiB " in line]
    for indented in ("  layers.*", "    attention", "      wq", "  output"):
        assert indented in begins
    assert "  layers" not in begins  # the list itself says nothing more than its members


def test_alike_modules_are_counted_and_listed_together_and_each() -> None:
    assert "layers.* Block 4 436.00 MiB 5.51 GiB 1.38 GiB 20.00 GiB" in flowed(
        footprint(), full=True
    )


@pytest.mark.parametrize("width", [80, 120])
def test_the_first_screen_is_one_screen_with_the_verdict_first(width: int) -> None:
    first = footprint().ranks[0]
    many = tuple(
        msgspec.structs.replace(first, name=f"stage {k}", peak_bytes=first.peak_bytes - k)
        for k in range(40)
    )
    for made in (footprint(), footprint(ranks=many)):
        text = printed(made, width)
        assert len(text.splitlines()) <= 40
        assert text.index("Fits: 23.44 to 25.25 GiB of 40.00 GiB") < text.index("Identical ranks")


def test_modules_sources_and_every_tensor_are_in_the_full_report() -> None:
    text, full = flowed(footprint()), flowed(footprint(), full=True)
    for words in ("By module", "needs of its device what", "exact: arithmetic or a trace"):
        assert words not in text
        assert words in full
    modules = tuple(ModuleMemory(f"m{k}", "Linear", 1, 0, 0, 0) for k in range(100))
    assert "m99" in flowed(worst(modules=modules), full=True)


def test_the_first_screen_adds_up_to_the_peak() -> None:
    by_category = dict(footprint().worst.by_category) | {"input": 1024, "padding": 512}
    text = flowed(worst(by_category=by_category))
    smaller = sorted(size for size in by_category.values() if size)[:-4]
    assert f"{len(smaller)} smaller {format_bytes(sum(smaller))}" in text
    assert f"{format_bytes(footprint().worst.peak_bytes)} at the peak" in text


def test_one_sample_without_a_sequence_names_none() -> None:
    assert "sequence" not in flowed(footprint(settings={"sequence": "1", "batch": "384"}))
    assert "sequence 64" in flowed(footprint(settings={"sequence": "64"}))


def test_of_many_classes_the_fullest_are_shown() -> None:
    first = footprint().ranks[0]
    ranks = tuple(
        msgspec.structs.replace(first, name=f"stage {k}", peak_bytes=first.peak_bytes - k)
        for k in range(40)
    )
    text = flowed(footprint(ranks=ranks))
    assert "The other 37 groups have lower peaks: --full." in text
    assert "The other group has lower peaks: --full." in flowed(footprint(ranks=ranks[:4]))
    assert "stage 39" in flowed(footprint(ranks=ranks), full=True)


def test_another_class_can_be_shown_and_says_who_has_the_details() -> None:
    made = footprint()
    text = flowed(made, rank=made.ranks[1])
    assert "By category, stage 1 (4 identical ranks)" in text
    assert "Modules, tensors and the timeline are followed for 'stage 0' only." in text


def test_what_the_device_needs_is_a_range_from_live_bytes_up() -> None:
    text = flowed(footprint(), full=True)
    assert "rounding, gaps and what is kept 0 B to 900.00 MiB" in text
    assert "CUDA context 286.10 to 476.84 MiB assumed" in text
    assert "retries 3 modelled: cached memory given back, in two steps" in text
    assert "together 23.44 to 25.25 GiB" in text
    assert "left 14.75 to 16.56 GiB" in text


def test_a_job_that_fits_says_what_is_left() -> None:
    assert verdict_sentence(footprint()) == (
        "Fits: 23.44 to 25.25 GiB of 40.00 GiB (63.1 %) on stage 0 (4 identical ranks), most in "
        "backward, layers.3."
    )


def test_a_job_that_does_not_fit_names_the_class_the_shortfall_and_the_largest() -> None:
    assert verdict_sentence(footprint(capacity=20 * GIB)) == (
        "Does not fit: 23.44 GiB of 20.00 GiB (3.44 GiB too much) on stage 0 (4 identical "
        "ranks), most in backward, layers.3. The largest are optimizer states 7.81 GiB, "
        "activations 7.47 GiB, weights 3.91 GiB."
    )


def test_what_hangs_on_a_range_is_perhaps() -> None:
    text = verdict_sentence(footprint(capacity=24 * GIB))
    assert text.startswith("Perhaps fits: 23.44 to 25.25 GiB of 24.00 GiB (105.2 %) on stage 0")


def test_without_a_capacity_nothing_is_said_about_fitting() -> None:
    text = flowed(footprint(capacity=None))
    assert "No capacity is known" in text
    assert "unknown" in text
    assert "Identical ranks ranks" in text


def test_too_little_is_said_where_the_rest_is_negative() -> None:
    assert "(too little)" in flowed(footprint(capacity=20 * GIB), full=True)


def test_a_range_whose_ends_read_alike_is_one_figure() -> None:
    assert range_text(GIB, GIB + 1) == "1.00 GiB"
    assert range_text(0, GIB) == "0 B to 1.00 GiB"
    assert range_text(GIB, 2 * GIB) == "1.00 to 2.00 GiB"


def test_names_are_never_terminal_codes() -> None:
    hostile = "\x1b[31m\u202ename\n"
    made = footprint(model=hostile, assumptions=(hostile,), settings={hostile: hostile})
    text = printed(made)
    assert "\x1b" not in text
    assert "\u202e" not in text
