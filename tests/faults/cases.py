"""Every fault that a run is promised to survive or to end well with, as one table.

A case with a ``fault`` is a run of two ranks in which rank 1 does that from step 3 on; others name
the test that has them. ``python tests/faults/cases.py`` writes the table of docs/reliability.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- cases: tests/faults/cases.py -->\n", "<!-- end of cases -->\n"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


class Case(NamedTuple):
    """``says`` is a pattern of what is printed, or what holds; ``code`` is the run's exit code."""

    what: str
    says: str
    code: int | None = None
    test: str = "tests/faults/test_cases.py::test_a_run_in_which_rank_1_goes_wrong"
    where: str = ""
    fault: str = ""


_READ = "tests/runtime/checkpoint/test_refusals.py::"
_RESUMED = "tests/faults/test_resumed_runs.py::"
_SAVES = "tests/runtime/test_saves.py::"
_SAVING = "tests/distributed/test_saving.py::"
_APPLY = "tests/distributed/test_apply.py::"
_RESUMING = "tests/distributed/test_resuming.py::"

CASES = {
    "1": Case(
        "a rank is killed in its forward",
        "rank 1 died without a word at step 3 in forward",
        5,
        where="forward",
        fault=KILL,
    ),
    "2": Case(
        "a rank is killed in its backward",
        "rank 1 died without a word at step 3 in (backward|reduce)",
        5,
        where="backward",
        fault=KILL,
    ),
    "3": Case(
        "a rank is killed between two lines of a save",
        "the newest complete checkpoint is bit by bit what was saved",
        test="tests/runtime/checkpoint/test_write.py::"
        "test_a_kill_at_any_point_leaves_a_checkpoint_whole",
    ),
    "4": Case(
        "a rank hangs",
        r"rank 1 made no progress for \d+ s \(the process is stopped\); step 3, forward",
        5,
        where="forward",
        fault="os.kill(os.getpid(), signal.SIGSTOP)",
    ),
    "5": Case(
        "a rank is slow for half of the timeout",
        "rank 1 is a straggler: .* of work in a step, the others",
        0,
        where="forward",
        fault="time.sleep(TIMEOUT / 2)",
    ),
    "6": Case(
        "ranks have different plans",
        "the plan's fingerprint is named on every rank before anything moves",
        4,
        _APPLY + "test_a_disagreement_is_named_on_every_rank",
    ),
    "7": Case(
        "the model of one rank is another",
        "the model is named on every rank before anything moves",
        4,
        _APPLY + "test_a_disagreement_is_named_on_every_rank",
    ),
    "8": Case(
        "units are in another order on one rank",
        "the units are named, before or in the first step",
        4,
        "tests/distributed/test_astray.py::test_ranks_that_run_other_units_are_noticed",
    ),
    "9": Case(
        "one bit of a checkpoint is flipped",
        "the file is named, and nothing is filled",
        4,
        _READ + "test_a_flipped_bit_is_refused_wherever_it_is",
    ),
    "10": Case(
        "a file of a checkpoint is cut, missing, empty or one too many",
        "the file is named, and nothing is filled",
        4,
        _READ + "test_a_file_of_another_length_is_refused",
    ),
    "11": Case(
        "a hostile pickle lies in a checkpoint",
        "it is refused and not run",
        2,
        _READ + "test_a_pickle_named_as_one_of_the_files_is_refused_and_not_run",
    ),
    "12": Case(
        "the disk is full on one rank",
        "nothing was saved on any rank, earlier checkpoints are whole, training goes on",
        test=_SAVING + "test_training_goes_on_after_a_save_that_one_rank_could_not_write",
    ),
    "13": Case(
        "the folder of checkpoints cannot be written",
        "the save that failed is said, and the run goes on",
        0,
        _RESUMED + "test_a_killed_rank_is_started_again_after_a_disk_was_full_for_a_while",
    ),
    "14": Case(
        "a checkpoint of 4 ranks is read by 1, 2, 3",
        "bit by bit equal; a smaller dtype only where it is asked for",
        test="tests/distributed/test_checkpoint.py::"
        "test_what_four_ranks_saved_is_read_by_fewer_in_other_cuts",
    ),
    "15": Case(
        "SIGTERM or Ctrl-C in a step",
        "stopped by SIGTERM after step N, saved in FOLDER; resumed, the curve is bit by bit equal",
        75,
        _RESUMED
        + "test_a_signal_ends_a_run_saved_and_resume_gives_the_curve_of_one_that_never_ended",
    ),
    "16": Case(
        "a signal while files are written, and a second one",
        "both saves end; at once, and the last checkpoint is whole",
        75,
        _SAVES + "test_a_signal_while_files_are_written_lets_both_saves_end",
    ),
    "17": Case(
        "a rank is killed under torchrun --max-restarts, or `restarts`",
        "the run goes on from the newest checkpoint, and its measurement counts how often",
        0,
        _RESUMED + "test_a_killed_rank_is_started_again_after_a_disk_was_full_for_a_while",
    ),
    "18": Case(
        "a loss or gradient is not finite on one rank",
        "loss on rank 1 in step 3: expected finite numbers",
        5,
        where="forward",
        fault="x = x * float('nan')",
    ),
    "19": Case(
        "memory runs out",
        "out of memory in step 3, forward, on rank 1: the plan predicts a peak of .* the largest",
        5,
        where="forward",
        fault="torch.empty(2**50, dtype=torch.uint8)",
    ),
    "19, before": Case(
        "less memory is free than the plan takes",
        "free memory on rank 0: expected NUMBER, got NUMBER, before anything moves",
        3,
        _RESUMING
        + "test_a_plan_that_does_not_fit_what_is_free_now_is_refused_before_anything_moves",
    ),
    "20": Case(
        "an id is out of range; a plan or a job is hostile",
        "table and value, or file and key, are named in one line",
        2,
        _APPLY + "test_an_id_out_of_range_names_table_and_value",
    ),
    "+1": Case(
        "the port is taken",
        r"MASTER_PORT=\d+: expected a port that is free, got one in use",
        2,
        "tests/faults/test_cases.py::test_a_port_that_is_taken_is_named",
    ),
    "+2": Case(
        "a rank does not come",
        r"lost its peers at setup.*1/2 clients joined",
        5,
        "tests/faults/test_cases.py::test_a_rank_that_never_comes_is_waited_for_so_long",
    ),
    "+3": Case(
        "torchrun starts another number of ranks",
        "expected a plan for 3 ranks, as torchrun started, got one for 2",
        4,
        "tests/faults/test_own_torchrun.py::"
        "test_a_wrong_number_of_ranks_is_one_line_and_what_torchrun_shows_last",
    ),
    "+4": Case(
        "the clock goes back",
        "checkpoints are made as often as before",
        test=_SAVES + "test_every_so_many_seconds_even_if_the_clock_goes_back",
    ),
    "+5": Case(
        "ranks have different versions of torch",
        "torch is named on every rank before anything moves",
        4,
        _APPLY + "test_a_disagreement_is_named_on_every_rank",
    ),
    "+6": Case(
        "a batch is empty",
        "the step works",
        test=_APPLY + "test_an_empty_batch_on_every_rank_works",
    ),
    "+7": Case(
        "a rank owns nothing",
        "it saves and is read",
        test="tests/runtime/checkpoint/test_read.py::test_ranks_that_hold_nothing_save_and_are_read",
    ),
    "+8": Case(
        "a host is lost",
        "the ranks of the others end within the timeout, each host with one line",
        5,
        "tests/faults/test_two_hosts.py::test_a_host_that_is_lost_ends_the_other_with_one_line",
    ),
    "+9": Case(
        "hosts have different plans, versions or data",
        "fact, host and ranks are named on every host before anything moves",
        4,
        "tests/faults/test_two_hosts.py::test_another_plan_on_one_host_is_one_line_on_each",
    ),
}


def table() -> str:
    """The cases as a table of Markdown."""
    lines = ["| | what happens | what is said, or holds | exit code |", "|---|---|---|---|"]
    for number, case in CASES.items():
        says = case.says.replace("\\", "").replace("d+ s", "N s").replace("=d+", "=N")
        says = (
            says.replace(".*", "...")
            .replace("|", " or ")
            .replace("(backward or reduce)", "backward")
        )
        lines.append(
            f"| {number} | {case.what} | {says} | {'' if case.code is None else case.code} |"
        )
    return "\n".join(lines) + "\n"


def page_with_table(text: str) -> str:
    """The page with the table as it is now."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
