"""What README.md and docs/ promise has a test that .ci/run runs; this is the list.

A test that is renamed, or moved to what no daily run has, is missed here; so is a command of README
or docs/commands.md that stands in no row. ``.ci/run`` itself is the test of what make and pip do.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [README, *(page.read_text() for page in (ROOT / "docs").glob("*.md"))]
SAID = " ".join(" ".join(PAGES).split())
MOST_WORDS = 900  # of README, beside its pictures, commands and what they print
CI = (ROOT / ".ci" / "run").read_text()

# What is said, in its words, and who holds it.
CLAIMS = {
    "Memory was predicted to the byte": (
        "distributed/test_demo.py::"
        "test_the_demo_trains_as_one_process_with_bytes_and_peak_as_predicted"
    ),
    "and the peak within 0.01 %": (
        "distributed/test_measured_as_predicted.py::test_peaks_are_within_three_percent"
    ),
    "is one file that needs no network": (
        "cli/test_run_folders.py::test_a_report_on_a_plan_is_one_page_without_a_network"
    ),
    "the best possible AUC and log loss are known": (
        "data/test_quality.py::test_no_score_beats_the_true_probability"
    ),
    "Any `nn.Module`": "distributed/test_own_models.py::test_trains_as_on_one_process",
    "embeddings in a module of your own are found": (
        "distributed/test_recommenders.py::"
        "test_sgd_trains_as_on_one_process_and_takes_bytes_as_planned"
    ),
    "around a loop of your own, measured and compared with its plan": (
        "distributed/test_own_loop.py::test_a_loop_of_one_s_own_learns_and_takes_what_was_predicted"
    ),
    "on two hosts of eight GPUs, without PyTorch": (
        "cli/test_streams.py::test_planning_explaining_and_reporting_import_no_torch"
    ),
    "seven sharding types, every compute kernel": (
        "planner/test_explain.py::test_why_not_has_a_reason_for_every_type_and_kernel"
    ),
    "a proven bound": "planner/test_every_plan.py::test_no_plan_at_all_is_faster_than_the_bound",
    "Its own numbers can be reproduced too": (
        "conformance/test_torchrec_oracle.py::test_plans_are_those_of_torchrec"
    ),
    "is a drop-in planner for its `DistributedModelParallel`": (
        "torchrec/adapter/test_training.py::"
        "test_trained_by_torchrec_a_plan_gives_the_unsharded_weights"
    ),
    "measure this machine, or for one job": (
        "cli/test_calibrate.py::test_a_machine_is_measured_and_planned_with"
    ),
    "where FSDP2's `fully_shard` stands": (
        "distributed/test_modes.py::test_every_row_trains_as_one_process"
    ),
    "Parameters cut by rows, whole on one rank, in blocks": (
        "distributed/test_units.py::test_modules_of_all_kinds_have_the_gradients_of_unsharded_ones"
    ),
    "beside tensor parallelism as `parallelize_module` makes it": (
        "distributed/test_tensor_parallel.py::"
        "test_a_llama_on_two_shards_by_two_tensor_parallel_ranks"
    ),
    "which has every matrix whole on one rank only": (
        "distributed/test_optimizers.py::test_muon_has_every_matrix_whole_on_one_rank"
    ),
    "whose states take a quarter, bit for bit those of one process": (
        "distributed/test_eight_bit.py::test_every_sharding_is_one_process_bit_for_bit"
    ),
    "every snippet there is tested beside theirs": (
        "distributed/test_from_fsdp2.py::test_snippets_leave_what_their_reference_leaves"
    ),
    "checkpoints it goes on from, bit for bit on as many ranks": (
        "distributed/test_language_model.py::test_an_interrupted_run_goes_on_bit_for_bit"
    ),
    "what the caching allocator holds": (
        "cli/test_memory.py::test_the_report_names_classes_categories_modules_and_the_verdict"
    ),
    "the largest batch and sequence that fit under each checkpointing policy": (
        "estimate/fit/test_search.py::test_every_policy_has_its_own_largest_batch"
    ),
    "`FSDPMemTracker` on 120 random configurations": (
        "estimate/test_estimate.py::test_fsdp2_takes_what_was_estimated_as_torchs_tracker_sees_it"
    ),
    "memory that others measured on GPUs": (
        "published/test_rows.py::test_no_family_is_further_off_than_is_said"
    ),
    "is measured in the same categories": (
        "tracker/test_kinds.py::test_everything_has_its_kind_after_forward_backward_and_step"
    ),
    "as the original TSV or as CSV with a header": (
        "data/test_criteo.py::test_the_comma_form_with_its_header_reads_as_the_tab_form_does"
    ),
    "[days of logs]": (
        "data/test_days.py::test_of_seven_days_of_a_file_the_last_is_held_out_in_halves"
    ),
    "[rows in binary]": "data/test_cache.py::test_a_rank_reads_the_batches_that_the_text_has",
    "with all seven sharding types in one plan": (
        "distributed/test_tables.py::test_every_sharding_type_trains_as_whole_tables"
    ),
    'with `kind = "columns"`': (
        "data/test_columns.py::test_columns_are_found_by_name_and_bags_have_any_length"
    ),
    "packed into bytes for inference": "models/test_packing.py::test_a_run_is_packed_by_a_command",
    "every step from rows and dim to bytes and seconds per rank": (
        "planner/test_explain.py::test_every_step_of_every_explanation_evaluates_to_its_value"
    ),
    "exit 4 outside tolerance": "cli/test_run_folders.py::test_other_exact_bytes_are_4",
    "few flat tensors instead of hundreds": (
        "distributed/test_optimizers.py::"
        "test_optimizers_over_few_flat_tensors_with_and_without_groups"
    ),
    "writes a verified checkpoint on all ranks or none": (
        "distributed/test_checkpoint.py::test_a_save_that_fails_on_one_rank_is_saved_on_none"
    ),
    "goes on from it on any number of ranks, under any plan": (
        "distributed/test_checkpoint.py::test_what_four_ranks_saved_is_read_by_fewer_in_other_cuts"
    ),
    "75 stopped by a signal": (
        "faults/test_launcher_faults.py::test_a_signal_ends_everything_in_order"
    ),
    "Each is refused by name, not ignored.": (
        "train/test_every_key.py::test_a_key_that_no_run_of_the_kind_reads_is_refused_by_name"
    ),
}

# What a reader may type, and who does; make's targets are .ci/run's.
COMMANDS = {
    "shardwright init dlrm --data": ("cli/test_init.py::test_a_log_becomes_a_job_that_reads_it"),
    "shardwright init python": "cli/test_init.py::test_a_job_is_written_and_can_be_read",
    "shardwright init --from": "cli/test_init.py::test_a_configuration_of_torchtitan_becomes_a_job",
    "shardwright plan examples/dlrm_v2.toml": (
        "cli/test_examples.py::test_a_first_screen_has_forty_lines_of_eighty_columns"
    ),
    "shardwright plan": "cli/test_plan.py::test_the_table_names_every_table_rank_and_assumption",
    "shardwright train examples/transformer.toml": (
        "cli/test_examples.py::test_an_example_is_trained_with_the_memory_of_its_plan"
    ),
    "shardwright train examples/criteo_csv.toml": (
        "faults/test_training_faults.py::"
        "test_bad_rows_are_counted_and_the_plan_is_trained_again_and_stays_as_it_is"
    ),
    "shardwright train": "faults/test_own_torchrun.py::"
    "test_a_plan_is_trained_into_another_folder_and_says_what_on",
    "shardwright calibrate": "cli/test_calibrate.py::test_a_machine_is_measured_and_planned_with",
    "torchrun --nproc-per-node 2 examples/language_model.py": (
        "distributed/test_language_model.py::test_it_learns_under_torchrun"
    ),
    "shardwright memory": "test_tour.py::test_the_first_page_shows_what_commands_print",
    "shardwright advise": "cli/test_advise.py::test_the_answer_is_one_screen_with_a_picture",
    "shardwright fit": "cli/test_fit.py::test_the_report_answers_in_sentences",
    "shardwright demo": "test_tour.py::test_the_first_page_shows_what_commands_print",
    "shardwright explain": "cli/test_explain.py::test_a_table_is_derived_from_its_rows",
    "shardwright compare": "cli/test_run_folders.py::test_a_run_as_predicted_compares_with_0",
    "shardwright report": "cli/test_run_folders.py::test_a_report_on_a_run_shows_what_was_measured",
    "shardwright diff": "cli/test_run_folders.py::test_equal_plans_do_not_differ",
    "shardwright inspect": "cli/test_inspect.py::"
    "test_the_exponent_of_made_up_ids_is_found_and_can_be_put_into_the_job",
    "shardwright reshard": "distributed/test_resharding.py::"
    "test_a_checkpoint_of_two_ranks_is_that_of_three_under_other_types",
    "shardwright doctor": (
        "cli/test_doctor.py::test_doctor_shows_versions_and_whether_training_works"
    ),
    "shardwright export": "cli/test_export.py::test_a_layout_is_printed",
    "shardwright completion": "cli/test_usage.py::test_completion_knows_every_option",
    "shardwright schema": "job/test_schema.py::test_the_command_prints_it",
    "shardwright run": (
        "faults/test_own_torchrun.py::test_what_it_leaves_can_be_compared_and_reported"
    ),
}
TYPED = re.compile(r"(?m)^    ((?:shardwright|torchrun|make|pip) .*)$|`(shardwright [^`]+)`")


@pytest.mark.parametrize("words", CLAIMS)
def test_what_is_listed_as_a_claim_is_said(words: str) -> None:
    assert words in SAID


def test_the_first_page_is_short() -> None:
    lines = re.sub(r"(?s)<!--.*?-->", "", README).splitlines()
    prose = [line for line in lines if not line.startswith(("    ", "!["))]
    assert len(" ".join(prose).split()) <= MOST_WORDS


@pytest.mark.parametrize("test", sorted({*CLAIMS.values(), *COMMANDS.values()}))
def test_a_claim_of_readme_has_a_test_that_runs_daily(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    (found,) = (f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == name)
    marks = [ast.unparse(mark) for mark in found.decorator_list]
    assert not any("product" in mark or "skip" in mark for mark in marks if "(" not in mark)
    assert "adapter" not in path or "make test-torchrec" in CI


def test_every_command_of_the_first_pages_has_its_test() -> None:
    text = README + (ROOT / "docs" / "commands.md").read_text()
    typed = [a or b for a, b in TYPED.findall(text)]
    assert len(typed) > 20
    for line in typed:
        if line.startswith("pip "):  # of a wheel there, which a folder is made into first
            assert "-m pip wheel" in CI
        elif line.startswith("make "):
            assert line.split(" #")[0].split(" PYTHON_ENV")[0].strip() in CI, line
        else:
            assert any(line.startswith(command) for command in COMMANDS), line
