"""What the library promises, row by row, and the tests that prove each: the data of docs/behaviours.md.

python -m tests.behaviours      # writes the page
"""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "behaviours.md"


@dataclass(frozen=True)
class Row:
    """One behaviour.

    Attributes:
        name: What it is called, in torch's words where it has any.
        rule: What holds.
        tests: Names of test functions after the path below ``tests/``, which prove it.
        gap: What is missing, and why: it begins with "not yet" or "not here:". Empty where nothing is.
    """

    name: str
    rule: str
    tests: tuple[str, ...] = ()
    gap: str = ""


def proved(path: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{path}::{name}" for name in names)


# Tests of the areas that many rows lean on.
ORDER = proved("test_fully_shard.py", "test_unshard_reshard_order")
POLICY = proved("test_fully_shard.py", "test_policy")
CACHES = proved("test_fully_shard.py", "test_the_root_caches_all_states_and_handles")
ROOTS = proved("test_fully_shard.py", "test_asking_for_the_roots_decides_them_first")
STREAMS = proved("runtime/test_streams.py", "test_everything_is_ordered", "test_a_broken_rule_is_found")
UNSHARDING = "saving/test_unsharding.py"
PRECISION = "test_mixed_precision.py"
TRAVERSAL = "test_traversal.py"
MANY_DIMS = "with many mesh dims: not yet"
WITH_REPLICATE = "with `replicate`: not yet"

GROUPS: dict[str, tuple[Row, ...]] = {
    "Annotation, traversal, state": (
        Row(
            "`fully_shard(module, policy=...)`",
            "Each module that the policy picks gets one handle, if parameters are left to it; users keep the "
            "original parameters, always.",
            (
                *POLICY,
                *proved("planning/test_plan.py", "test_a_pick_whose_parameters_all_have_deeper_handles_gets_none"),
                *proved("test_fully_shard.py", "test_parameters_keep_names_shapes_and_identity"),
            ),
        ),
        Row(
            "`fully_shard` by hand",
            "Calls on parts and then on the whole share one root, one scheduler, one order.",
            (*CACHES, *ORDER, *proved("test_fully_shard_parity.py", "test_training_by_hand_equals_one_process")),
        ),
        Row(
            "By hand and by policy in one model",
            "Supported: what was annotated by hand stays, the policy picks around it.",
            (*POLICY, *ORDER, *proved(TRAVERSAL, "test_handles_come_left_to_right_over_all_states")),
        ),
        Row(
            "Fully sharded module",
            "The one module that unshards and reshards a handle. By hand, by policy and under torch's wrapper the "
            "same modules are.",
            (
                *proved(
                    "test_fully_shard.py",
                    "test_by_hand_by_policy_and_by_torchs_wrapper_the_same_modules_are_fully_sharded",
                ),
                *proved(TRAVERSAL, "test_get_fully_sharded_module_to_states"),
            ),
        ),
        Row(
            "Names of a handle",
            "Parameters, ties included, are named from the fully sharded module; `fqn` is the one word for it.",
            (
                *POLICY,
                *proved("test_fully_shard.py", "test_names_of_a_list_are_prefixed_by_position_and_known_from_the_root"),
                *proved(
                    "planning/test_plan.py", "test_a_parameter_tied_within_a_handle_is_listed_once_with_its_other_names"
                ),
            ),
        ),
        Row(
            "`replicate` inside `fully_shard`",
            "Ignored with all below it; what is sharded below is a root of its own.",
            (
                *proved(
                    "planning/test_plan.py", "test_a_replicated_module_is_left_with_the_fully_sharded_modules_in_it"
                ),
                *proved("test_nested.py", "test_nested_annotations_equal_one_process"),
            ),
        ),
        Row(
            "Registry (`_get_registry`)",
            "Each annotation notes itself on its module; walks stop where an API is incompatible.",
            (
                *proved("test_contract.py", "test_several_apis_are_kept_in_the_order_they_were_applied"),
                *proved("test_contract.py", "test_an_incompatible_pair_raises_in_both_orders"),
                *proved(TRAVERSAL, "test_no_walk_enters_an_incompatible_subtree"),
            ),
        ),
        Row(
            "`_get_fsdp_states`, `_get_fsdp_handles`",
            "Depth first, left to right, in the order of `modules()`; each once; a stack and no recursion.",
            proved(
                TRAVERSAL,
                "test_the_walk_follows_the_order_of_modules",
                "test_states_come_depth_first_and_not_breadth_first",
                "test_a_state_shared_by_a_list_of_modules_comes_once",
                "test_handles_come_left_to_right_over_all_states",
                "test_five_thousand_levels_are_walked",
            ),
        ),
        Row(
            "`_get_fully_sharded_module_to_states`",
            "The same walk: modules that are annotated or picked, and the state of each.",
            proved(TRAVERSAL, "test_get_fully_sharded_module_to_states"),
        ),
        Row(
            "`_init_param_handles_from_module`",
            "By hand and by policy a state's handles are depth first, left to right. They are planned in that order: "
            "nothing is built in reverse.",
            (
                *POLICY,
                *proved("planning/test_plan.py", "test_a_policy_gives_handles_left_to_right_and_the_rest_to_the_root"),
            ),
        ),
        Row(
            "`_get_fsdp_states_with_modules`, `_get_root_fsdp_states_with_modules`",
            "The same walks, with the modules.",
            (*proved(TRAVERSAL, "test_states_come_depth_first_and_not_breadth_first"), *ROOTS),
        ),
        Row(
            "`_get_fsdp_root_states`",
            "All roots of a tree. Lazy init runs first, from the outermost state, since only then roots are known.",
            (*proved(TRAVERSAL, "test_roots_are_known_after_lazy_init_from_the_outermost_state"), *ROOTS),
        ),
        Row(
            "`_traversal_utils`",
            "A file of its own, imported as a module; either import order works.",
            proved(TRAVERSAL, "test_either_module_may_be_imported_first"),
        ),
        Row(
            "Caches of the root",
            "The root knows all states and handles; no later step walks the tree.",
            (*CACHES, *proved("test_fully_shard.py", "test_no_step_but_the_first_walks_the_tree")),
        ),
        Row(
            "`_RootFSDPState`",
            "What only a root has is typed as such: a class `Root` has it, and other states raise.",
            CACHES,
        ),
        Row(
            "Equal options in a tree",
            "Those that torch compares do not exist: original parameters are always kept, and gathers need no limit.",
            gap="not here: neither `use_orig_params` nor `limit_all_gathers` is an option, so nothing can differ",
        ),
        Row(
            "Equal process groups of hybrid strategies",
            "Groups are compared among hybrid instances only; both hybrid strategies may be mixed.",
            gap=MANY_DIMS,
        ),
        Row(
            "`_stream_to_name`",
            "Each stream has a name: `default`, `unshard`, `reduce`.",
            proved("runtime/test_streams.py", "test_streams_are_named_for_debugging"),
        ),
        Row(
            "`HandleConfig`",
            "Gone: settings lie on the handle, and its dtypes are never `None`.",
            proved(PRECISION, "test_a_handle_knows_every_dtype_whatever_the_policy_leaves_out"),
        ),
    ),
    "Runtime: hooks, unshard, memory": (
        Row(
            "Hook before the root's forward",
            "Takes keywords too; the root alone moves inputs to the device.",
            proved(
                "test_cuda.py",
                "test_a_module_on_the_cpu_is_sharded_onto_the_gpu",
                "test_only_the_root_moves_its_inputs",
            ),
        ),
        Row(
            "Hooks before other forwards",
            "Run before those of users; activation checkpointing runs inside of them.",
            (
                *proved("test_fully_shard.py", "test_user_hooks_run_and_see_unsharded_parameters"),
                *proved("test_activation_checkpoint.py", "test_a_checkpoint_costs_no_collective"),
            ),
        ),
        Row(
            "Where hooks are",
            "On fully sharded modules and annotated ones; on none that lies inside of one and uses its handle.",
            (
                *proved("test_fully_shard.py", "test_only_fully_sharded_modules_have_hooks"),
                *proved("planning/test_plan.py", "test_a_module_of_a_list_inside_another_is_refused"),
            ),
        ),
        Row("Order of unshard and reshard", "The same for every way of annotating.", ORDER),
        Row(
            "`limit_all_gathers`",
            "No host waits: a freed buffer is given to the next gather in the order of streams, which "
            "[the notes](notes/streams.md) prove, and at most the running handle and the next are unsharded.",
            (
                *STREAMS,
                *proved("test_cuda.py", "test_at_most_three_handles_and_two_gradient_buffers_are_alive"),
                *proved("planning/test_memory.py", "test_a_step_takes_what_the_plan_says"),
            ),
        ),
        Row(
            "`FULL_SHARD`, `SHARD_GRAD_OP`",
            "Presets of `reshard_after_forward`.",
            (
                *proved("planning/test_plan.py", "test_a_strategy_is_a_preset_of_reshard_after_forward"),
                *proved("test_fully_shard.py", "test_collectives_and_bytes_of_a_step_equal_theory"),
            ),
        ),
        Row("`NO_SHARD`", "Every rank holds everything.", gap="not here: refused; it is what `replicate` does"),
        Row("`HYBRID_SHARD`", "ZeRO-3 inside a node, copies across.", gap=MANY_DIMS),
        Row("`HYBRID_SHARD_ZERO2`", "ZeRO-2 inside a node, copies across.", gap=MANY_DIMS),
        Row(
            "`_unshard_params`, `_unshard_params_recurse`, `_unshard_fsdp_state_params`",
            "`unshard_params(module, recurse=...)`: full parameters of a tree or of one module's handle.",
            proved(
                UNSHARDING,
                "test_full_values_are_shown_and_changes_are_kept",
                "test_recursion_nesting_and_modules_without_handles",
            ),
        ),
        Row(
            "`writeback=True` with `rank0_only=True`",
            "Works: changes of the first rank are sent handle by handle, and other ranks allocate nothing large.",
            proved(
                UNSHARDING,
                "test_full_values_are_shown_and_changes_are_kept",
                "test_ranks_that_show_nothing_allocate_nothing_large",
            ),
        ),
        Row(
            "`no_sync()`",
            "Gradients wait unsharded, on parameters that keep names and identity.",
            (
                *proved("test_gradient_sync.py", "test_kept_gradients_are_those_of_one_process_once_reduced"),
                *proved("test_fully_shard_parity.py", "test_accumulated_gradients_equal_one_process"),
            ),
        ),
        Row(
            "Reentrant checkpointing",
            "Works, inside of fully sharded modules and around them.",
            (
                *proved("test_fully_shard_parity.py", "test_checkpoint_fsdp_submodules_use_reentrant"),
                *proved("test_activation_checkpoint.py", "test_every_kind_at_every_place_trains_as_one_process"),
            ),
        ),
        Row(
            "Padding",
            "Nothing is padded by a call; only padding is set to zero, and what a reduce-scatter fills is not.",
            proved("test_fully_shard.py", "test_nothing_is_set_to_zero_in_a_step_but_padding"),
        ),
        Row(
            "`_cast_buffers`",
            "Buffers are told apart by module, not by name; checkpoints have them in their own dtype.",
            proved(
                PRECISION,
                "test_buffers_of_equal_names_have_the_dtype_of_their_own_module",
                "test_buffers_are_cast_while_their_module_runs_and_keep_what_it_wrote",
            ),
        ),
        Row(
            "State-dict hooks",
            "`state_dict` and `load_state_dict` are torch's; all is in hooks, whichever module is asked first.",
            proved("test_fully_shard.py", "test_state_dicts_are_torchs_own_with_hooks_around"),
        ),
        Row(
            "`autograd.graph.Node`",
            "The base of autograd's nodes, visible from Python.",
            gap="not here: torch has it since 2.1",
        ),
        Row(
            "Tests by name",
            "Those that upstream has for these rules exist here under the same names.",
            (
                *proved(TRAVERSAL, "test_get_fully_sharded_module_to_states"),
                *POLICY,
                *ORDER,
                *proved(PRECISION, "test_mixed_precision_e2e_full_shard", "test_meta_device_with_mixed_precision"),
                *proved("test_fully_shard_parity.py", "test_checkpoint_fsdp_submodules_use_reentrant"),
            ),
        ),
    ),
    "Mixed precision": (
        Row(
            "Which dtype",
            "A `reduce_dtype` that is not given is `param_dtype`; the plan prints both.",
            (
                *proved(PRECISION, "test_the_plan_tells_the_dtypes"),
                *proved(PRECISION, "test_a_handle_knows_every_dtype_whatever_the_policy_leaves_out"),
                *proved(PRECISION, "test_training_is_that_of_one_process_with_the_same_casts"),
            ),
        ),
        Row(
            "When it is on",
            "Where a dtype differs from the parameter's: `param_dtype=float32` on a `float32` model does nothing.",
            proved(PRECISION, "test_a_policy_of_the_dtypes_that_are_there_does_nothing"),
        ),
        Row(
            "Meta init, nested, `param_dtype=float32`, `apply()`",
            "Works.",
            proved(PRECISION, "test_meta_device_with_mixed_precision"),
        ),
        Row(
            "`keep_low_precision_grads`",
            "Gradients stay in the dtype of the reduction.",
            proved(PRECISION, "test_gradients_may_stay_in_low_precision"),
        ),
        Row(
            "Cast of inputs",
            "Autograd knows it: an input's gradient comes back in its own dtype.",
            proved(PRECISION, "test_inputs_and_outputs_are_cast_wherever_they_are_and_autograd_knows"),
        ),
        Row(
            "No cast where there is nothing to cast",
            "What has the dtype stays the same object; the handle knows the dtype of its reduction.",
            proved(
                PRECISION,
                "test_a_policy_of_the_dtypes_that_are_there_does_nothing",
                "test_no_pass_over_parameters_or_whole_gradients_is_added",
            ),
        ),
    ),
    "Sharded communication hooks": (
        Row(
            "`DefaultState(process_group)`",
            "Without a group it raises a `ValueError`; it has group, world size and both factors.",
            proved("test_comm_hooks.py", "test_a_state_without_a_group_is_a_value_error"),
        ),
        Row(
            "Factors",
            "The first doubles from 1 while it divides the world size and the rest is larger; the second is the rest.",
            proved("test_comm_hooks.py", "test_the_two_factors_multiply_to_the_number_of_ranks"),
        ),
        Row(
            "`LowPrecisionState`",
            "Has the dtype to restore, too.",
            proved("test_comm_hooks.py", "test_compressed_gradients_are_those_that_one_process_emulates"),
        ),
        Row(
            "`_decompress`",
            "Casts back, and marks memory as in use by the stream that casts.",
            proved(
                "test_comm_hooks.py",
                "test_compressed_gradients_are_those_that_one_process_emulates",
                "test_complex_gradients_are_compressed_in_both_parts",
            ),
            gap="that mark, on a device: not yet tested",
        ),
        Row(
            "`allreduce_hook`",
            "Divides, adds up, divides, in place.",
            proved("test_comm_hooks.py", "test_the_hooks_without_casts_change_no_number"),
        ),
        Row(
            "`reduce_scatter_hook`",
            "Divides the input, adds up into the output, divides that.",
            proved("test_comm_hooks.py", "test_the_hooks_without_casts_change_no_number"),
        ),
        Row(
            "`fp16_compress_hook`, `bf16_compress_hook`",
            "Cast, reduce with or without an output, cast back.",
            proved("test_comm_hooks.py", "test_compressed_gradients_are_those_that_one_process_emulates"),
        ),
    ),
    "torch's algorithms": (
        Row(
            "`_checkpoint`",
            "`checkpoint_wrapper`, `offload_wrapper` and `apply_activation_checkpointing` under, over and between both "
            "annotations, reentrant and not; names stay clean.",
            (
                *proved("test_activation_checkpoint.py", "test_every_kind_at_every_place_trains_as_one_process"),
                *proved("test_wrapper_names.py", "test_wrappers_of_torch_add_nothing_to_names"),
            ),
        ),
        Row(
            "`_comm_hooks`",
            "The sharded hooks on a handle, a subtree or the root.",
            proved(
                "test_comm_hooks.py",
                "test_the_hooks_without_casts_change_no_number",
                "test_the_nearest_registration_holds_whatever_the_order",
            ),
        ),
        Row(
            "`_optimizer_overlap`",
            "An optimizer steps inside backward: by `step_in_backward`, `_apply_optimizer_in_backward`, hooks of sharded "
            "parameters, or `register_ddp` on what `as_ddp` gives of a replicated module.",
            (
                *proved("test_algorithms.py", "test_an_optimizer_may_step_where_the_reduced_gradient_arrives"),
                *proved(
                    "test_backward_steps.py",
                    "test_parameters_are_those_of_an_optimizer_that_steps_after_backward",
                    "test_torchs_optimizer_in_backward_steps_on_averages",
                ),
            ),
            gap="not here: `register_fsdp` raises, as in torch; `step_in_backward` does it",
        ),
        Row(
            "`_quantization`",
            "`auto_quantize` in the groups of an annotation, on all-gather and all-to-all; a step's own gathers take "
            "`param_dtype`.",
            (
                *proved("test_algorithms.py", "test_shards_travel_as_16_bits_through_torchs_quantised_collectives"),
                *proved(PRECISION, "test_bytes_are_those_of_the_plan"),
            ),
        ),
        Row(
            "`ddp_comm_hooks`",
            "Default, wrapper, PowerSGD, noop and post-local SGD hooks give a replicated module what they give below "
            "`DistributedDataParallel`.",
            (
                *proved(
                    "test_algorithms.py", "test_hooks_of_torchs_wrapper_give_replicated_modules_the_same_gradients"
                ),
                *proved("test_replicate.py", "test_torchs_communication_hooks_run"),
                *proved(
                    "test_replicate.py", "test_compression_around_powersgd_gives_what_it_gives_below_torchs_wrapper"
                ),
            ),
            gap="batched PowerSGD, bfloat16 and quantised hooks, which raise on gloo below torch's wrapper too, "
            f"on a device: not yet; those that read `DistributedDataParallel` itself (ZeRO step) {WITH_REPLICATE}",
        ),
        Row(
            "`model_averaging`",
            "Periodic and hierarchical averagers, warm-up and period, and `PostLocalSGDOptimizer` on replicated "
            "modules. A sharded model is one model: there is nothing to average.",
            proved("test_algorithms.py", "test_models_that_train_apart_are_averaged_as_copies_in_one_process"),
        ),
        Row(
            "`join`",
            "Ranks with uneven inputs: `Join([as_ddp(model), ...])`, with the wrapper's numbers.",
            proved(
                "test_ddp_view.py",
                "test_ranks_with_uneven_inputs_train_as_below_the_wrapper",
                "test_several_modules_and_a_sharded_optimizer_join",
                "test_ranks_throw_where_one_has_no_inputs_left",
            ),
            gap="not here: `fully_shard`, whose parameters every rank gathers; give every rank as many steps",
        ),
    ),
    "Further": (
        Row(
            "`CPUOffload(offload_params=True)`",
            "Parameters, gradients and optimizer state rest on the host; the copy to the device is the one that brings "
            "a shard into its gather.",
            (
                *proved("test_offload.py", "test_policies_of_torch_are_taken"),
                *proved("test_offload.py", "test_copied_shards_train_like_one_process"),
                *proved("test_cuda_offload.py", "test_offloaded_training_equals_training_on_the_device"),
                *STREAMS,
            ),
        ),
        Row(
            "Options of mixed precision",
            "All of torch's, in its own policies too; buffers are cast by module.",
            (
                *proved(PRECISION, "test_policies_of_torch_are_taken"),
                *proved(PRECISION, "test_the_root_may_leave_its_inputs_and_so_may_all_others"),
                *proved(PRECISION, "test_buffers_are_cast_while_their_module_runs_and_keep_what_it_wrote"),
            ),
        ),
        Row(
            "ZeRO-1",
            "`ZeroRedundancyOptimizer` steps replicated modules.",
            proved("test_algorithms.py", "test_an_optimizer_with_sharded_state_steps_replicated_modules"),
        ),
        Row(
            "Names",
            "[A table](design.md#names-that-differ-from-upstream) from theirs to ours.",
            proved("test_migrating.py", "test_the_design_says_where_upstreams_internals_went"),
        ),
        Row(
            "`find_unused_parameters`",
            "Unused parameters count as ready; the error without it names them.",
            proved(
                "test_replicate.py",
                "test_parameters_unused_on_some_ranks_count_as_zero_if_allowed",
                "test_parameters_unused_everywhere_keep_their_gradient_if_allowed",
                "test_parameters_unused_everywhere_are_named_on_every_rank_and_the_next_step_works",
            ),
        ),
        Row("Logging data", "Bucket sizes, rebuilt order and more, as a plain object.", gap=WITH_REPLICATE),
        Row(
            "Ignored parameters and buffers",
            "By parameter or module with `fully_shard`; with `replicate` by module, or by name with torch's mark, "
            "`_set_params_and_buffers_to_ignore_for_model`.",
            (
                *proved("test_fully_shard.py", "test_ignored_parameters_and_modules_stay_as_they_are"),
                *proved("test_replicate.py", "test_an_ignored_module_keeps_its_own_parameters_and_gradients"),
                *proved(
                    "test_replicate.py",
                    "test_what_torch_was_told_to_ignore_stays_as_it_is",
                    "test_what_torch_was_told_to_ignore_is_what_its_wrapper_ignores",
                ),
            ),
        ),
        Row(
            "`register_comm_hook`, built-in hooks",
            "On an annotated module, or a part of one.",
            (
                *proved("test_comm_hooks.py", "test_a_hook_takes_the_place_of_every_reduce_scatter"),
                *proved(
                    "test_comm_hooks.py", "test_a_replicated_module_calls_a_hook_for_each_bucket_without_an_output"
                ),
                *proved(
                    "test_algorithms.py", "test_hooks_of_torchs_wrapper_give_replicated_modules_the_same_gradients"
                ),
                *proved("test_algorithms.py", "test_an_optimizer_may_step_where_the_reduced_gradient_arrives"),
            ),
        ),
        Row(
            "Pickling",
            "A module that is annotated refuses with a message that says what to save instead.",
            (
                *proved("test_fully_shard.py", "test_pickling_a_sharded_module_is_a_clear_error"),
                *proved("test_replicate.py", "test_bad_input_is_refused"),
            ),
        ),
        Row(
            "Prefix of checkpoint wrappers",
            "Stripped wherever names are shown or saved.",
            proved("test_wrapper_names.py", "test_wrappers_of_torch_add_nothing_to_names"),
        ),
        Row(
            "Forwards with added inputs",
            "Nested modules with keywords and further inputs work under both annotations.",
            (
                *proved("test_fully_shard_parity.py", "test_training_by_policy_equals_one_process"),
                *proved("test_replicate.py", "test_training_equals_one_process"),
            ),
        ),
        Row(
            "State dicts of `replicate` with tensor parallelism",
            "In both forms.",
            gap=MANY_DIMS,
        ),
    ),
}

HEAD = """\
# Behaviours

What the library promises, row by row, and the tests that prove it. `python -m tests.behaviours` writes this page, and a test
fails where a row names a test that is not there.

Each row says what it is called in torch, and the rule here. Where something is missing, the row says what: *not yet*, or *not here* and why.
"""


@functools.cache
def tests_of(path: Path) -> frozenset[str]:
    """Return the names of the test functions of a file, without importing it; none if there is no file."""
    if not path.exists():
        return frozenset()
    body = ast.parse(path.read_text()).body
    return frozenset(one.name for one in body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"))


def is_there(test: str) -> bool:
    """Say whether a test function exists."""
    path, _, name = test.partition("::")
    return name in tests_of(ROOT / "tests" / path)


def line_of(row: Row) -> str:
    links = [f"[`{test.partition('::')[2]}`](../tests/{test.partition('::')[0]})" for test in dict.fromkeys(row.tests)]
    proof = "; ".join([*([row.gap] if row.gap else []), *links])
    return f"| {row.name} | {row.rule} | {proof} |"


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for group, rows in GROUPS.items():
        parts.append(f"## {group}\n")
        parts.append(
            "\n".join(["| What | Rule | Proof, or what is missing |", "|---|---|---|", *map(line_of, rows)]) + "\n"
        )
    return "\n".join(parts)


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
