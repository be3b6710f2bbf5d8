from __future__ import annotations

import io
import re
from typing import Any

import msgspec
import pytest
from footprints import GIB
from rich.console import Console

from shardwright.core.footprint import Estimate, Fit, Largest, PolicyFit, Remedy, Verdict
from shardwright.report.fit_report import fit_report


def estimate(gib: float, verdict: Verdict = "fits") -> Estimate:
    size = int(gib * GIB)
    kinds = {"activation": size // 2, "optimizer_state": size // 4}
    return Estimate(size, "backward", "all ranks", size, size + GIB, verdict, kinds)


def made(**changes: Any) -> Fit:
    fit = Fit(
        model="llama",
        capacity=80 * GIB,
        batch=2,
        sequence=8192,
        world_size=8,
        checkpointing="none",
        policies=(
            PolicyFit("none", estimate(70), Largest(2)),
            PolicyFit("full", estimate(30), Largest(7, next_perhaps=True)),
        ),
        longest_sequence=Largest(9088, 128),
        fewest_ranks=8,
        skipped=("magic: no such policy",),
        assumptions=("reserved memory is modelled",),
        estimates=12,
        seconds=4.2,
    )
    return msgspec.structs.replace(fit, **changes)


def flowed(fit: Fit, width: int = 120) -> str:
    out = io.StringIO()
    Console(width=width, no_color=True, file=out).print(fit_report(fit, full=True))
    return " ".join(out.getvalue().split())


NOTHING = made(
    policies=(PolicyFit("none", estimate(200, "does not fit"), Largest(0)),),
    longest_sequence=Largest(0, 128),
    fewest_ranks=0,
    remedies=(
        Remedy(("memory.checkpointing = full",), estimate(60), longer=0.2518),
        Remedy(("memory.offload = all",), estimate(190, "does not fit")),
    ),
)


def test_every_policy_has_its_largest_batch_and_tokens() -> None:
    text = flowed(made())
    assert "By checkpointing policy (this job's: none)" in text
    assert "none 70.00 GiB 70.00 to 71.00 GiB fits 2 16,384" in text
    assert "full 30.00 GiB 30.00 to 31.00 GiB fits 7, perhaps 8 57,344" in text


def test_what_a_policy_costs_in_time_stands_beside_what_it_needs() -> None:
    slow = msgspec.structs.replace(
        estimate(30), step_seconds=2.345, device_tokens_per_second=6987.0, mfu=0.36
    )
    policies = (PolicyFit("none", estimate(70), Largest(2)), PolicyFit("full", slow, Largest(7)))
    text = flowed(made(policies=policies))
    assert "full 30.00 GiB 30.00 to 31.00 GiB fits 2.3 s 7,000 36% 7 57,344" in text
    assert "none 70.00 GiB 70.00 to 71.00 GiB fits - - - 2 16,384" in text
    assert "tokens/s" not in flowed(made())


def test_the_answers_are_sentences() -> None:
    text = flowed(made())
    assert (
        "As it is (2 samples of 8,192 tokens, checkpointing none): fits: 70.00 to 71.00 GiB of "
        "80.00 GiB (88.8 %)"
    ) in text
    assert (
        "Longest sequence with batch 2, checkpointing none: 9,088 tokens (in steps of 128)." in text
    )
    assert "Fewest ranks for 2 samples of 8,192 tokens each, checkpointing none: 8 ranks." in text
    assert "12 estimates in 4.2 s" in text
    assert "magic: no such policy" in text


def test_a_limit_that_fits_is_no_answer() -> None:
    assert "4,096 or more" in flowed(
        made(policies=(PolicyFit("none", estimate(1), Largest(4096, or_more=True)),))
    )


def test_where_nothing_fits_the_largest_categories_and_ways_out_are_named() -> None:
    text = flowed(NOTHING)
    assert "Not even 1 sample per rank fits" in text
    assert "the largest are activations 100.00 GiB, optimizer states 50.00 GiB" in text
    assert "memory.checkpointing = full 60.00 GiB 60.00 to 61.00 GiB fits +25 %" in text
    assert "190.00 to 191.00 GiB does not fit - Each alone" in text
    assert "(time: a device's for as many tokens)" in text
    assert "Longest sequence with batch 2, checkpointing none: none fits." in text
    assert "no number is enough" in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_a_job_that_fits_names_no_way_out() -> None:
    assert "Not even" not in flowed(made())
    assert "What helps" not in flowed(made())


def test_a_job_without_tokens_speaks_of_none() -> None:
    text = flowed(made(sequence=1, longest_sequence=None))
    assert "token" not in text
    assert "As it is (2 samples, checkpointing none)" in text


def test_scanned_sizes_are_said() -> None:
    rows = (PolicyFit("none", estimate(70), Largest(2, even=False)),)
    assert "A larger batch was seen to need less" in flowed(made(policies=rows))
    assert "A larger batch" not in flowed(made())


@pytest.mark.parametrize("width", [80, 120])
def test_a_report_fits_the_width(width: int) -> None:
    out = io.StringIO()
    Console(width=width, no_color=True, file=out).print(fit_report(NOTHING))
    assert max(len(line) for line in out.getvalue().splitlines()) <= width


def test_where_nothing_fits_no_row_takes_two_lines() -> None:
    slow = msgspec.structs.replace(
        estimate(139, "does not fit"),
        step_seconds=2.345,
        device_tokens_per_second=1600.0,
        mfu=0.47,
    )
    rows = tuple(PolicyFit(policy, slow, Largest(0)) for policy in ("as planned", "core_attention"))
    out = io.StringIO()
    nothing = msgspec.structs.replace(NOTHING, checkpointing="as planned", policies=rows)
    Console(width=80, no_color=True, file=out).print(fit_report(nothing))
    for policy in ("chosen by the plan", "core_attention"):
        row = rf"^{policy} +139.00 to 140.00 GiB +does not fit +1,600 +47%$"
        assert re.search(row, out.getvalue(), re.M)


def test_the_first_screen_is_one_screen_whatever_was_tried() -> None:
    remedies = tuple(
        Remedy((f"memory.first = {k}", f"memory.second = {k}"), estimate(100 + k, "does not fit"))
        for k in range(20)
    )
    texts = tuple(f"what was assumed of part {k} takes a line of the terminal" for k in range(12))
    policies = tuple(
        PolicyFit(policy, estimate(200, "does not fit"), Largest(0))
        for policy in ("none", "selective", "full")
    )
    tried = msgspec.structs.replace(
        NOTHING, policies=policies, remedies=remedies, skipped=texts, assumptions=texts
    )
    out = io.StringIO()
    Console(width=80, no_color=True, file=out).print(fit_report(tried))
    lines = out.getvalue().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    first, every = " ".join(out.getvalue().split()), flowed(tried)
    assert "15 more: --full." in first
    assert first.count("10 more (--full)") == 2
    assert "memory.second = 19" in every
    assert every.count("of part 11") == 2
    assert "--full" not in every
