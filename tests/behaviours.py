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
HYBRID = "test_hybrid.py"
TENSOR_PARALLEL = "test_tensor_parallel.py"
HOSTS = "collectives/test_hosts.py"
TIMEOUTS = "collectives/test_timeouts.py"
TWO_HOSTS = "test_two_hosts.py"
ALGORITHMS = "test_algorithms.py"
DDP_VIEW = "test_ddp_view.py"
GROUP_LIFE = "test_group_life.py"
GRAPHS = "test_replicate_graphs.py"
REPLICATE = "test_replicate.py"
LOW_COPIES = "test_replicate_precision.py"
STEPS = "test_backward_steps.py"
UNUSED = proved(
    REPLICATE,
    "test_parameters_unused_everywhere_are_named_on_every_rank_and_the_next_step_works",
    "test_parameters_unused_on_one_rank_are_an_error_on_every_rank_and_the_next_step_works",
)

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
            proved("test_migrating.py", "test_an_argument_of_torchs_wrapper_is_an_error_that_says_what_its_row_says"),
            gap="not here: neither `use_orig_params` nor `limit_all_gathers` is an option, so nothing can differ",
        ),
        Row(
            "Equal process groups of hybrid strategies",
            "Groups are compared among hybrid instances only; both hybrid strategies may be mixed.",
            proved(
                HYBRID,
                "test_meshes_that_pair_the_same_ranks_otherwise_are_refused",
                "test_random_annotations_train_like_one_process",
            ),
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
        Row(
            "`NO_SHARD`",
            "Every rank holds everything.",
            proved("test_migrating.py", "test_the_strategy_that_shards_nothing_is_an_error_that_names_replicate"),
            gap="not here: refused; it is what `replicate` does",
        ),
        Row(
            "`HYBRID_SHARD`",
            "ZeRO-3 inside a node, copies across.",
            (
                *proved(HYBRID, "test_training_is_that_of_one_process_on_the_global_batch"),
                *proved(HYBRID, "test_dims_are_chosen_by_name_or_by_host"),
                *proved(HOSTS, "test_ranks_that_a_launcher_counts_across_hosts_share_with_those_of_their_own"),
                *proved(TWO_HOSTS, "test_two_hosts_train_as_one_until_the_wire_is_cut_and_one_host_goes_on"),
            ),
        ),
        Row(
            "`HYBRID_SHARD_ZERO2`",
            "ZeRO-2 inside a node, copies across.",
            proved(HYBRID, "test_training_is_that_of_one_process_on_the_global_batch"),
        ),
        Row(
            "`fully_shard` with tensor parallelism",
            "Blocks of split parameters are sharded over the data ranks; users see wholes, cut over both dims.",
            proved(
                TENSOR_PARALLEL,
                "test_training_is_that_of_one_process_on_all_batches",
                "test_random_splits_train_like_one_process",
                "test_optimizers_step_as_in_one_process",
                "test_what_fits_no_mesh_is_refused_on_every_rank",
            ),
        ),
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
            "Buffers are told apart by module, not by name; checkpoints have them in their own dtype. What a forward writes "
            "is kept, however it writes: batch norms, observers, assignments, `.data`.",
            (
                *proved(
                    PRECISION,
                    "test_buffers_of_equal_names_have_the_dtype_of_their_own_module",
                    "test_buffers_are_cast_while_their_module_runs_and_keep_what_it_wrote",
                ),
                *proved(
                    "test_cast_buffers.py",
                    "test_these_are_all_classes_of_torch_with_buffers",
                    "test_what_a_forward_writes_is_kept_and_nothing_else_is_changed",
                    "test_random_steps_leave_the_buffers_of_one_process",
                ),
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
                *proved(ALGORITHMS, "test_an_optimizer_may_step_where_the_reduced_gradient_arrives"),
                *proved(
                    STEPS,
                    "test_parameters_are_those_of_an_optimizer_that_steps_after_backward",
                    "test_torchs_optimizer_in_backward_steps_on_averages",
                ),
                *proved(DDP_VIEW, "test_an_overlapped_optimizer_registers_with_a_view"),
            ),
            gap="not here: `register_fsdp` raises, as in torch; `step_in_backward` does it",
        ),
        Row(
            "`_quantization`",
            "`auto_quantize` in the groups of an annotation, on all-gather and all-to-all; a step's own gathers take "
            "`param_dtype`.",
            (
                *proved(ALGORITHMS, "test_shards_travel_as_16_bits_through_torchs_quantised_collectives"),
                *proved(PRECISION, "test_bytes_are_those_of_the_plan"),
            ),
        ),
        Row(
            "`ddp_comm_hooks`",
            "Default, wrapper, PowerSGD, noop, post-local SGD and quantised hooks give a replicated module what they give "
            "below `DistributedDataParallel`.",
            (
                *proved(ALGORITHMS, "test_hooks_of_torchs_wrapper_give_replicated_modules_the_same_gradients"),
                *proved(
                    DDP_VIEW,
                    "test_every_hook_of_torchs_list_does_what_it_does_below_the_wrapper",
                    "test_quantised_gradients_are_those_below_the_wrapper",
                    "test_overlap_with_a_sharded_optimizer_raises_on_gloo_as_below_the_wrapper",
                ),
                *proved(
                    REPLICATE,
                    "test_torchs_communication_hooks_run",
                    "test_compression_around_powersgd_gives_what_it_gives_below_torchs_wrapper",
                ),
            ),
            gap="on a device: not yet tested. The ZeRO step raises on gloo, and batched PowerSGD everywhere (torch hands its own "
            "`_orthogonalize` two dims of three), below the wrapper too; "
            "quantised hooks are tested with a gather in the form that they read. Mixed-precision and "
            "optimizer-overlap hooks (`_hook_then_optimizer`) are parts of the wrapper: `mp_policy` and `step_in_backward`",
        ),
        Row(
            "`model_averaging`",
            "Periodic and hierarchical averagers, warm-up and period, and `PostLocalSGDOptimizer` on replicated "
            "modules. A sharded model is one model: there is nothing to average.",
            proved(ALGORITHMS, "test_models_that_train_apart_are_averaged_as_copies_in_one_process"),
        ),
        Row(
            "`join`",
            "Ranks with uneven inputs: `Join([as_ddp(model), ...])`, with the wrapper's numbers; `joinable(model, step=...)` "
            "for both annotations, with the numbers of one process.",
            (
                *proved(
                    DDP_VIEW,
                    "test_ranks_with_uneven_inputs_train_as_below_the_wrapper",
                    "test_several_modules_and_a_sharded_optimizer_join",
                    "test_what_has_no_view_says_why",
                ),
                *proved(
                    "test_uneven_inputs.py",
                    "test_all_ranks_throw_where_one_has_no_inputs_left",
                    "test_parameters_are_those_of_one_process_on_the_inputs_there_are",
                    "test_random_runs_are_those_of_one_process_on_the_inputs_there_are",
                    "test_what_is_set_holds_for_ranks_without_inputs",
                    "test_all_ranks_run_the_same_collectives_in_the_same_order",
                    "test_processes_with_uneven_inputs_train_like_one",
                ),
            ),
        ),
    ),
    "`replicate` in the place of `DistributedDataParallel`": (
        Row(
            "Compiled backwards",
            "Under compiled autograd one all-reduce for each gradient, in the graph. What a graph cannot do is an error, and "
            "the next step is right; where that is mixed precision, the error names `mp_policy`.",
            proved(
                "test_compiled_autograd.py",
                "test_a_graph_of_backward_holds_an_all_reduce_for_each_gradient",
                "test_what_a_graph_cannot_do_is_refused_on_every_rank_and_the_next_step_is_right",
            ),
        ),
        Row(
            "Fusion of all-reduces",
            "`bucketing_backend` joins them by size, group and dtype: concatenated with one scaling, or coalesced.",
            proved(
                "test_compiled_autograd.py",
                "test_all_reduces_are_joined_by_dtype",
                "test_all_reduces_are_joined_up_to_the_size_of_a_bucket_also_across_nested_annotations",
                "test_inductor_compiles_joined_all_reduces",
                "test_joining_changes_no_value_of_random_graphs",
            ),
            gap="not yet without being asked for: it is a backend, `bucketing_backend()`, with a `bucket_cap_mb` of its own",
        ),
        Row(
            "With tensor parallelism",
            "Split parameters are averaged over the other mesh dim. Fusion takes averages of gradients alone; other "
            "collectives stay.",
            (
                *proved(
                    "test_replicate_tensor_parallel.py",
                    "test_gradients_of_split_parameters_are_averaged_over_the_other_mesh_dim",
                    "test_a_parameter_split_over_the_ranks_that_average_is_refused",
                    "test_parts_of_one_model_average_over_groups_of_their_own",
                ),
                *proved("test_compiled_autograd.py", "test_joining_changes_no_value_of_random_graphs"),
            ),
        ),
        Row(
            "`_update_process_group`",
            "`update_process_group`: other ranks, with nothing built or compiled anew, also after an error in backward.",
            proved(
                GROUP_LIFE,
                "test_the_ranks_that_are_left_go_on_in_another_group",
                "test_a_rank_that_comes_back_takes_part_again",
                "test_real_processes_change_their_group_too",
                "test_a_compiled_model_is_not_compiled_again_for_another_group",
            ),
        ),
        Row(
            "`_check_reducer_finalized`",
            "Every backward checks at its end: what is missing is an error there, on every rank, by name. Each of them "
            "names, of every rank, the last module to get a gradient, also where an exception stopped a backward.",
            (
                *UNUSED,
                *proved(
                    REPLICATE,
                    "test_the_error_names_the_module_that_each_rank_saw_last",
                    "test_an_exception_in_the_backward_of_one_rank_keeps_nobody_waiting",
                ),
            ),
        ),
        Row(
            "`static_graph`",
            "Several forwards before one backward are a step, counted by backwards that average; logged at the annotation.",
            proved(
                GRAPHS,
                "test_several_forwards_before_one_backward_are_one_step_of_a_static_graph",
                "test_a_static_graph_may_give_a_parameter_several_gradients_in_one_backward",
                "test_a_static_graph_accumulates_without_synchronisation",
                "test_a_static_graph_gives_the_gradients_of_torchs_wrapper",
                "test_another_graph_than_the_first_is_an_error_on_every_rank",
                "test_a_static_graph_is_logged",
            ),
        ),
        Row(
            "`delay_all_reduce_named_params`, `param_to_hook_all_reduce`",
            "Gradients of the named parameters are sent when that of the chosen one is there.",
            proved(
                GRAPHS,
                "test_delayed_gradients_are_sent_when_that_of_the_chosen_parameter_is_there",
                "test_gradients_with_a_delayed_all_reduce_equal_those_of_one_process",
                "test_a_delay_that_cannot_be_is_an_error_on_every_rank",
            ),
        ),
        Row(
            "Buckets of the first iteration",
            "One for each dtype and device, then in the order of arrival, agreed over ranks: modules that only some ranks "
            "run do not hang beside an all-to-all.",
            (
                *proved(
                    "replication/test_bucket.py",
                    "test_the_first_round_has_one_bucket_and_the_next_ones_follow_the_order_of_arrival",
                ),
                *proved(GROUP_LIFE, "test_modules_of_some_ranks_beside_an_all_to_all_do_not_hang"),
            ),
        ),
        Row(
            "Native mixed precision",
            "`mp_policy`: parameters stay, modules compute with copies, frozen ones too, ignored ones not. Copies are "
            "made in one pass before anything runs, for which no host waits; gradients travel in `reduce_dtype`, as they come, and rest in the parameter's dtype.",
            (
                *proved(
                    LOW_COPIES,
                    "test_training_is_that_of_one_process_with_the_same_casts",
                    "test_random_trees_train_as_one_process_with_the_same_casts",
                    "test_modules_hold_copies_while_they_run_and_their_own_before_and_after",
                    "test_ctrl_c_anywhere_in_a_step_leaves_modules_with_their_own",
                    "test_gradients_travel_in_the_dtype_of_the_reduction",
                    "test_gradients_arrive_while_backward_goes_on",
                    "test_ignored_modules_are_left_in_their_dtype",
                    "test_between_steps_there_is_nothing_but_parameters_and_buckets",
                ),
                *proved("test_cuda_replicate.py", "test_weights_are_those_of_ddps_own_mixed_precision"),
            ),
        ),
        Row(
            "Mixed precision with the rest",
            "Communication hooks get buckets in low precision; an optimizer may step inside backward; gradients may stay in "
            "low precision; norms may be left out; inputs are cast.",
            (
                *proved(
                    LOW_COPIES,
                    "test_communication_hooks_get_the_bucket_in_low_precision",
                    "test_an_optimizer_in_backward_steps_the_parameters_on_their_averages",
                    "test_gradients_may_stay_in_low_precision",
                    "test_skipped_classes_compute_in_their_own_dtype_and_give_back_what_they_got",
                    "test_each_annotation_casts_its_inputs_and_parameters",
                ),
                *proved(
                    STEPS,
                    "test_random_models_optimizers_policies_and_accumulation_step_as_after_backward",
                    "test_torchs_optimizer_in_backward_steps_on_what_was_averaged_in_low_precision",
                ),
            ),
        ),
        Row(
            "`_apply_optimizer_in_backward`",
            "Before or after the annotation: its hooks are taken over; gradients are `None` after backward unless the "
            "environment says otherwise; refused beside a communication hook.",
            proved(
                STEPS,
                "test_torchs_optimizer_in_backward_steps_on_averages",
                "test_torchs_switch_keeps_the_gradients",
                "test_torchs_optimizer_in_backward_is_refused_beside_a_hook",
            ),
        ),
        Row(
            "`_remove_autograd_hooks`",
            "`unannotate` takes every hook away; the model may be annotated anew.",
            proved(
                "test_unannotate.py",
                "test_parameters_gradients_and_everything_else_are_as_in_one_process",
                "test_a_model_is_annotated_anew_with_another_policy_or_api",
                "test_buckets_are_freed_and_the_process_group_is_used_again",
            ),
        ),
        Row(
            "`broadcast_buffers=False`",
            "Buffers are left alone at the start too, as below torch's wrapper.",
            proved("test_replicate_options.py", "test_values_are_broadcast_when_torchs_wrapper_does"),
        ),
        Row(
            "Buffer communication hook",
            "A function in the place of the broadcast of buffers.",
            gap="not here: private in torch, used by nothing there, to be dropped",
        ),
        Row(
            "`_ddp_replicated_tensor`",
            "A context that makes copies of a module.",
            gap="not here: torch itself no longer has it",
        ),
        Row(
            "Hooks of users",
            "Forward and backward hooks, hooks on gradients: the same calls in the same order as on the plain module.",
            proved(REPLICATE, "test_hooks_of_users_run_as_on_the_plain_module"),
        ),
        Row(
            "Debug level",
            "That of `get_debug_level` at the annotation: OFF says nothing, INFO the buckets, DETAIL what is sent.",
            proved(GROUP_LIFE, "test_debug_levels_tell_of_buckets_and_of_what_is_sent"),
        ),
        Row(
            "`Work.result()`",
            "Never asked: what a collective gives is in the tensors that it got.",
            proved("test_architecture.py", "test_no_file_asks_a_collective_for_its_result"),
        ),
        Row(
            "`TORCH_NCCL_*`",
            "Names of torch's own environment variables.",
            gap="not here: the library reads none of them, by the new names or the old",
        ),
        Row(
            "Per-sample gradients",
            "`call_for_per_sample_grads` works inside `no_sync(model)` of a replicated module, and inside "
            "`unshard_params(model)` of a sharded one.",
            proved("test_per_sample.py", "test_each_sample_has_the_gradient_of_one_process"),
            gap="not here: elsewhere it raises, in torch's own words for a sharded module",
        ),
        Row(
            "`NamedMemberAccessor`, `skip_init`, memory formats",
            "Docstrings of torch.",
            gap="not here: work on torch's own documents",
        ),
        Row(
            "Random trees",
            "Plain, replicated, sharded, frozen, tied, unused, shared, checkpointed and compiled modules, nested at random "
            "and with any options: equal to one process, or refused on every rank.",
            proved(
                "fuzz/test_random_trees.py",
                "test_with_any_options_of_replicate_they_do_or_are_refused_on_every_rank",
                "test_so_few_seeds_meet_every_kind",
            ),
        ),
        Row(
            "Memory over many steps",
            "Tensors, bytes, objects, threads and files are level, whatever the options; so is resident memory over "
            "hundreds of steps (`python -m tests.fuzz.soak`).",
            (*proved("fuzz/test_soak.py", "test_nothing_grows"),),
        ),
        Row(
            "Scripts written for the wrapper",
            "[Over twenty](ddp_scripts.md), from torch's documents and as trainers do it: equal to the bit, with one to "
            "five lines changed.",
            proved("test_ddp_scripts.py", "test_a_script_of_the_wrapper_trains_alike_with_replicate"),
        ),
    ),
    "Further": (
        Row(
            "A host that is lost",
            "A rank that waits for it raises a `DesyncError` that names whom it waits for: at once where connections close, "
            "else after the timeout of `init_process_group`, which groups of a mesh get too.",
            (
                *proved(TWO_HOSTS, "test_two_hosts_train_as_one_until_the_wire_is_cut_and_one_host_goes_on"),
                *proved(TWO_HOSTS, "test_when_a_host_is_killed_every_rank_of_the_other_says_so"),
                *proved(TIMEOUTS, "test_all_groups_of_an_annotation_wait_as_long_as_the_world"),
            ),
        ),
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
            proved(ALGORITHMS, "test_an_optimizer_with_sharded_state_steps_replicated_modules"),
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
                REPLICATE,
                "test_parameters_unused_on_some_ranks_count_as_zero_if_allowed",
                "test_parameters_unused_everywhere_keep_their_gradient_if_allowed",
                "test_parameters_unused_everywhere_are_named_on_every_rank_and_the_next_step_works",
            ),
        ),
        Row(
            "Logging data",
            "Bucket sizes, rebuilt order, static graph, times and their sample rate, at any time as a plain object: "
            "`reduction_stats`. Before the first backward the sizes are those of the buckets that it will have.",
            proved(
                GROUP_LIFE,
                "test_stats_tell_buckets_order_and_times",
                "test_buckets_are_known_before_the_first_backward",
                "test_one_backward_in_so_many_is_measured_after_the_first_ten",
            ),
        ),
        Row(
            "Ignored parameters and buffers",
            "By parameter or module with `fully_shard`; with `replicate` by module, by parameter, by name, or with torch's "
            "mark, `_set_params_and_buffers_to_ignore_for_model`.",
            (
                *proved("test_fully_shard.py", "test_ignored_parameters_and_modules_stay_as_they_are"),
                *proved(REPLICATE, "test_an_ignored_module_keeps_its_own_parameters_and_gradients"),
                *proved(
                    REPLICATE,
                    "test_what_torch_was_told_to_ignore_stays_as_it_is",
                    "test_what_torch_was_told_to_ignore_is_what_its_wrapper_ignores",
                ),
                *proved("test_replicate_options.py", "test_ignored_parameters_and_buffers_stay_this_ranks_own"),
            ),
        ),
        Row(
            "`register_comm_hook`, built-in hooks, fused optimizers",
            "On an annotated module, or a part of one. For `_register_fused_optim` there is `step_in_backward`.",
            (
                *proved("test_comm_hooks.py", "test_a_hook_takes_the_place_of_every_reduce_scatter"),
                *proved(
                    "test_comm_hooks.py", "test_a_replicated_module_calls_a_hook_for_each_bucket_without_an_output"
                ),
                *proved(ALGORITHMS, "test_hooks_of_torchs_wrapper_give_replicated_modules_the_same_gradients"),
                *proved(ALGORITHMS, "test_an_optimizer_may_step_where_the_reduced_gradient_arrives"),
                *proved(STEPS, "test_parameters_are_those_of_an_optimizer_that_steps_after_backward"),
            ),
        ),
        Row(
            "Pickling",
            "A module that is annotated refuses with a message that says what to save instead.",
            (
                *proved("test_fully_shard.py", "test_pickling_a_sharded_module_is_a_clear_error"),
                *proved(REPLICATE, "test_bad_input_is_refused"),
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
                *proved(REPLICATE, "test_training_equals_one_process"),
            ),
        ),
        Row(
            "State dicts of `replicate` with tensor parallelism",
            "Split parameters stay DTensors of their own mesh dim in `state_dict()`; whole ones come from torch's "
            "`get_model_state_dict`.",
            proved(
                "test_replicate_tensor_parallel.py",
                "test_gradients_of_split_parameters_are_averaged_over_the_other_mesh_dim",
            ),
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
