"""Which tests are in the first tier, ``make test``: some of each promise and each behaviour, in minutes.

``--tier first`` runs it, ``--tier rest`` all others, so that both are all tests (``make test-all``), whatever is added.
The first tier has the tests that the rows of ``docs/behaviours.md`` and ``PROMISES`` name, and the files of ``FILES``;
of a test with many cases some, from the first to the last. Where a command line names files or words, those run.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.behaviours import ROWS, proved

__all__ = ["CASES", "FILES", "PROMISES", "SLOW", "first_tier"]

FIRST, REST = "first", "rest"
HEADER = """\
make test: some tests of each promise and each behaviour; 2 minutes on two cores, longer on busy ones
           all tests, 11 minutes: make test-all; more random models: python -m tests.fuzz.run --seeds 0-1000"""

# How many cases of one test.
CASES = 5
# What all of its cases hold: pages, the house, and the tiers themselves.
FILES = (
    *("test_architecture.py", "test_behaviours.py", "test_docs.py", "test_docs_testing.py", "test_readme.py"),
    *("test_makefile.py", "test_tiers.py"),
)
# So do the cases of these tests, each of other options.
PAIRS = proved(
    "test_option_pairs.py",
    "test_fully_shard_trains_with_options_together_as_one_process",
    "test_replicate_trains_with_options_together_as_one_process",
)
# Left to the others though a row names it: what compiles for a minute, or waits that long. The rows name others too.
SLOW = frozenset(
    (
        *proved(
            "test_compiled_autograd.py",
            "test_inductor_compiles_joined_all_reduces",
            "test_joining_changes_no_value_of_random_graphs",
            "test_all_reduces_are_joined_up_to_the_size_of_a_bucket_also_across_nested_annotations",
        ),
        *proved(
            "test_two_hosts.py",
            "test_two_hosts_train_as_one_until_the_wire_is_cut_and_one_host_goes_on",
            "test_when_a_host_is_killed_every_rank_of_the_other_says_so",
        ),
    )
)
# What the README says, by the words that a point or a row of the table of names begins with.
PROMISES: Mapping[str, tuple[str, ...]] = {
    "`fully_shard` splits": PAIRS[:1],
    "`replicate` keeps": PAIRS[1:],
    "Before anything happens": proved("planning/test_memory.py", "test_a_step_takes_what_the_plan_says"),
    "The numbers are those": proved("fuzz/test_random_trees.py", "test_random_trees_train_as_one_process_does"),
    "`model.parameters()` are": (
        *PAIRS[:1],
        *proved("test_fully_shard_training.py", "test_a_checkpoint_loads_at_another_world_size_bit_for_bit"),
    ),
    "Clusters have": (
        *PAIRS[:1],
        *proved("test_experts.py", "test_the_norm_is_that_of_all_experts_of_all_ranks"),
    ),
    "Errors say": proved("test_divergence.py", "test_ranks_of_a_sharded_module_that_diverge_are_all_told"),
    "`fully_shard`": proved("test_fully_shard.py", "test_parameters_keep_names_shapes_and_identity"),
    "`replicate`": PAIRS[1:],
    "`plan`": proved("planning/test_plan.py", "test_a_policy_gives_handles_left_to_right_and_the_rest_to_the_root"),
    "`ModuleWrapPolicy`": proved("test_policies.py", "test_every_kind_of_policy_picks_the_blocks"),
    "`ShardingStrategy`": proved("planning/test_plan.py", "test_a_strategy_is_a_preset_of_reshard_after_forward"),
    "`DataParallelMeshDims`": proved("test_hybrid.py", "test_dims_are_chosen_by_name_or_by_host"),
    "`checkpoint`": proved(
        "test_activation_checkpoint.py", "test_forward_runs_again_in_backward_and_gives_the_same_gradients"
    ),
    "`MixedPrecisionPolicy`": proved(
        "test_mixed_precision.py", "test_a_model_in_low_precision_is_computed_and_reduced_in_full"
    ),
    "`CPUOffloadPolicy`": PAIRS[:1],
    "`unannotate`": proved("test_unannotate.py", "test_parameters_gradients_and_everything_else_are_as_in_one_process"),
    "`no_sync`": PAIRS,
    "`full_state_dict`": proved(
        "saving/test_full_state.py", "test_what_is_sharded_below_a_replica_is_saved_and_loaded"
    ),
    "`iter_full_params`": (
        *proved("saving/test_full_params.py", "test_every_parameter_comes_in_full_under_its_name"),
        *proved("saving/test_full_params.py", "test_pairs_go_back_in_any_order"),
    ),
    "`ParamBucket`": proved("saving/test_param_bucket.py", "test_a_generator_that_trains_nothing_follows_by_buckets"),
    "`save_safetensors`": proved(
        "saving/test_safetensors.py", "test_the_library_reads_what_is_written_and_every_world_size_loads_it"
    ),
    "`unshard_params`": proved("saving/test_unsharding.py", "test_full_values_are_shown_and_changes_are_kept"),
    "`register_comm_hook`": (
        *proved("test_comm_hooks.py", "test_a_hook_takes_the_place_of_every_reduce_scatter"),
        *proved("test_comm_hooks.py", "test_what_is_removed_leaves_the_librarys_own_reduction"),
    ),
    "`DefaultState`": proved("test_comm_hooks.py", "test_the_hooks_without_casts_change_no_number"),
    "`bucketing_backend`": proved("test_compiled_autograd.py", "test_all_reduces_are_joined_by_dtype"),
    "`allreduce_hook`": proved("test_comm_hooks.py", "test_compressed_gradients_are_those_that_one_process_emulates"),
    "`register_fsdp_forward_method`": proved(
        "runtime/test_forward_methods.py", "test_registered_methods_train_as_forward_does"
    ),
    "`FSDPModule`": proved("test_fsdp_settings.py", "test_gradients_are_those_of_one_process_after_finalize_backward"),
    "`HandleOptions`": proved("test_comm_hooks.py", "test_a_hook_takes_the_place_of_every_reduce_scatter"),
    "`share_comm_ctx`": proved("test_fsdp_settings.py", "test_on_the_cpu_sharing_streams_changes_nothing"),
    "`accelerate_optimizer`": proved("optim/test_flat_step.py", "test_element_wise_optimizers_to_the_bit"),
    "`ReplicateModule`": proved("test_replicate_module.py", "test_the_class_is_swapped_and_comes_back"),
    "`update_process_group`": proved(
        "test_group_life.py",
        "test_the_ranks_that_are_left_go_on_in_another_group",
        "test_stats_tell_buckets_order_and_times",
    ),
    "`as_ddp`": proved("test_ddp_view.py", "test_every_hook_of_torchs_list_does_what_it_does_below_the_wrapper"),
    "`joinable`": proved("test_uneven_inputs.py", "test_processes_with_uneven_inputs_train_like_one"),
    "`step_in_backward`": proved(
        "test_backward_steps.py", "test_parameters_are_those_of_an_optimizer_that_steps_after_backward"
    ),
    "`rebind_optimizer`": proved("optim/test_rebind.py", "test_no_bit_of_the_state_changes"),
    "`RaggedDTensor`": (
        *proved("ragged/test_tensor.py", "test_ragged_replicated_and_sharded_tensors_meet"),
        *proved("ragged/test_tensor.py", "test_a_placement_is_its_bounds"),
    ),
    "`strict_mode`": proved("ragged/test_tensor.py", "test_strict_mode_ends_with_its_block"),
    "`explain_waits`": proved(
        "collectives/test_hang_watchdog.py", "test_a_wait_that_the_group_ends_says_who_was_waited_for"
    ),
    "`set_divergence_timeout`": proved(
        "test_divergence.py", "test_a_rank_that_is_merely_slow_is_no_error_and_is_logged"
    ),
    "`clip_grad_norm_`": proved("optim/test_clip.py", "test_each_element_counts_once_whatever_holds_it"),
    "`save_checkpoint`": (
        *proved("saving/test_checkpoint.py", "test_training_goes_on_to_the_bit"),
        *proved("saving/test_checkpoint.py", "test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint"),
    ),
    "`SaveHandle`": proved("saving/test_checkpoint.py", "test_training_goes_on_while_a_checkpoint_is_written"),
    "`contract`": proved("test_contract.py", "test_several_apis_are_kept_in_the_order_they_were_applied"),
    "`ConfigError`": proved("test_errors.py", "test_a_kind_can_be_caught_as_its_builtin_and_as_ours"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=(FIRST, REST), help="run this part of the tests, if no others are named")


def pytest_report_header(config: pytest.Config) -> str | None:
    return HEADER if _tier_of(config) == FIRST else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that have no test in the first tier: importing all takes as long as many tests."""
    if _tier_of(config) != FIRST or not collection_path.match("test_*.py"):
        return None
    return _below_tests(collection_path, config) not in _files() or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = _tier_of(config)
    if tier is None:
        return
    names = [f"{_below_tests(item.path, config)}::{item.nodeid.partition('::')[2]}" for item in items]
    first = first_tier(names)
    is_left = [(name in first) == (tier == FIRST) for name in names]
    config.hook.pytest_deselected(items=[item for item, kept in zip(items, is_left, strict=True) if not kept])
    items[:] = [item for item, kept in zip(items, is_left, strict=True) if kept]


def first_tier(names: Iterable[str]) -> frozenset[str]:
    """Return those of all tests that are in the first tier.

    Args:
        names: The path below ``tests/``, ``::``, the name of the test function, and which case it is in brackets.
    """
    cases: dict[str, list[str]] = {}
    for name in names:
        cases.setdefault(name.partition("[")[0], []).append(name)
    chosen: set[str] = set()
    for function, those in cases.items():
        if function.partition("::")[0] in FILES or function in PAIRS:
            chosen.update(those)
        elif function in _functions():
            chosen.update(those[number * len(those) // CASES] for number in range(CASES))
    return frozenset(chosen)


@functools.cache
def _functions() -> frozenset[str]:
    rows = (test for row in ROWS for test in row.tests)
    return frozenset([*rows, *(test for tests in PROMISES.values() for test in tests)]) - SLOW


@functools.cache
def _files() -> frozenset[str]:
    return frozenset([*FILES, *(function.partition("::")[0] for function in _functions())])


def _below_tests(path: Path, config: pytest.Config) -> str:
    folder = config.rootpath / "tests"
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _tier_of(config: pytest.Config) -> str | None:
    """Return the tier to run; ``None`` where the command line says which tests by name."""
    is_named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    options = config.option
    return None if is_named or options.keyword or options.markexpr or config.getoption("lf", False) else options.tier
