"""Which public names the reference shows, by task, and the text of its pages.

A name has a line in the table of its group and a page made of its signature, its docstring and an example. One example
in ``docs/examples`` serves all names of a topic; ``tests/test_reference.py`` runs it.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

__all__ = ["GROUPS", "PARTS", "Group", "Topic", "pages"]

# Which pages of docs/ stand in which part of the site, in the order of the navigation.
PARTS: dict[str, tuple[str, ...]] = {
    "Train": (
        *(
            "choose",
            "train",
            "resume",
            "cluster",
            "watch",
            "replicate",
            "checkpoints",
            "storage",
            "memory",
            "mixed_precision",
        ),
        *("optimizers", "meshes", "experts", "uneven_inputs", "comm_hooks", "recipes", "works_with", "troubleshooting"),
        *("rehearse", "testing"),
    ),
    "Migrate": ("from_ddp", "from_fsdp1", "from_fsdp2", "torch", "stability", "scope"),
    "Inside": ("ragged", "security"),
}


class Topic(NamedTuple):
    """Names that one example shows: a file of ``docs/examples``, and what each name is, in one line."""

    example: str
    names: dict[str, str]


class Group(NamedTuple):
    """Names for one task, on one page of the reference. ``module`` is where they are imported from."""

    page: str
    title: str
    topics: tuple[Topic, ...]
    module: str = "composable"

    @property
    def names(self) -> dict[str, str]:
        """Each name with its line."""
        return {name: line for topic in self.topics for name, line in topic.names.items()}


GROUPS: tuple[Group, ...] = (
    Group(
        "annotate",
        "Annotate a model",
        (
            Topic(
                "annotate",
                {
                    "fully_shard": "Shards a module, or a list of modules that share one handle. "
                    "`fully_shard.state(module)` has the plan.",
                    "replicate": "Keeps a whole copy of a module on every rank and averages its gradients: "
                    "see [its page](../docs/replicate.md).",
                    "unannotate": "Makes an annotated module an ordinary one again, with whole parameters on every "
                    "rank: see [copies](../docs/recipes.md).",
                },
            ),
            Topic(
                "options",
                {
                    "HandleOptions": "How handles cut, gather and reduce their parameters, where the defaults do not "
                    "suit: see [where parameters are cut](../docs/ragged.md#where-parameters-are-cut).",
                    "ReplicateOptions": "What few replicated models need: values that are equal already, buffers sent "
                    "once, gradients that wait. See [arguments](../docs/site/replicate_arguments.md).",
                    "ShardingStrategy": "What is sharded over each mesh dim, as data. `FULL_SHARD` frees parameters "
                    "between forward and backward, `SHARD_GRAD_OP` keeps them; `HYBRID_SHARD` and "
                    "`HYBRID_SHARD_ZERO2` are the same with copies; `NO_SHARD` is what `replicate` does.",
                },
            ),
            Topic("mesh_dims", {"DataParallelMeshDims": "Which dims of a mesh are for shards and for copies."}),
            Topic(
                "contract",
                {
                    "contract": "Makes a function of a module an annotation of your own.",
                    "get_registry": "The annotations of one module, by name.",
                },
            ),
        ),
    ),
    Group(
        "plan",
        "Plan, and choose the handles",
        (
            Topic(
                "plan",
                {
                    "plan": "What `fully_shard` with the same arguments would do; printing it shows the handles.",
                    "ShardPlan": "The result of `plan`: handles, bytes on each rank, and traffic.",
                },
            ),
            Topic(
                "policies",
                {
                    "ModuleWrapPolicy": "Gives a handle to every submodule of some classes. A set of classes does too.",
                    "CustomPolicy": "Gives a handle to every submodule that a function picks. The function does too.",
                    "SizePolicy": "Gives handles to submodules of at least so many elements.",
                },
            ),
        ),
    ),
    Group(
        "step",
        "Train a step",
        (
            Topic(
                "accumulate",
                {
                    "no_sync": "A context in which backward leaves gradients on their rank (gradient accumulation).",
                    "reduce_gradients": "Synchronises accumulated gradients without another backward.",
                    "token_mean": "Makes gradients those of the mean over the tokens of all ranks and micro-batches.",
                    "TokenMean": "The result of `token_mean`.",
                },
            ),
            Topic(
                "timeline",
                {
                    "timeline": "A context that records when each handle gathers, waits, computes and reduces.",
                    "Timeline": "What it recorded: a picture, a trace for Perfetto, a line of text, and the share of "
                    "exposed communication.",
                    "TimelineEvent": "One bar of it.",
                },
            ),
            Topic(
                "watch",
                {
                    "watch": "A context that tells the figures of a run while it trains: see "
                    "[watch a run](../docs/watch.md).",
                    "Watch": "The result of `watch`, to be told the end of each step.",
                },
            ),
            Topic(
                "clip",
                {
                    "clip_grad_norm_": "As in torch, for any mix of sharded, plain and stock DTensor parameters on any "
                    "meshes, or for those of an optimizer.",
                    "get_total_norm": "The norm of such tensors, as a plain number.",
                    "has_finite_gradients": "Whether all gradients are finite, the same on every rank: leave out the "
                    "step, or get an error with gradients, losses and ranks.",
                },
            ),
            Topic(
                "methods",
                {
                    "FSDPModule": "The methods that a fully sharded module gains, named as in torch: "
                    "see [methods](../docs/from_fsdp2.md).",
                    "UnshardHandle": "What `FSDPModule.unshard(async_op=True)` returns, to wait for.",
                    "GradientReductionHandle": "What `FSDPModule.finalize_backward(async_op=True)` returns, "
                    "to wait for.",
                    "register_fsdp_forward_method": "Lets another method of a fully sharded module, say `encode`, find "
                    "its parameters whole as forward does.",
                    "share_comm_ctx": "Lets several roots, such as the stages of a pipeline, use the same streams.",
                },
            ),
            Topic(
                "uneven_inputs",
                {
                    "joinable": "What torch's `Join` takes for annotated models, so that ranks that run out of inputs "
                    "follow the others: see [uneven inputs](../docs/uneven_inputs.md).",
                    "UnevenInputs": "The result of `joinable`.",
                },
            ),
        ),
    ),
    Group(
        "optimizers",
        "Optimizers",
        (
            Topic(
                "accelerate",
                {
                    "accelerate_optimizer": "Runs the step of a torch optimizer on few plain local tensors: same bits, "
                    "less time. See [optimizers](../docs/optimizers.md)."
                },
            ),
            Topic(
                "matrices",
                {
                    "MatrixOptimizer": "Base of optimizers that need whole matrices, which one rank each updates. See "
                    "[whole matrices](../docs/optimizers.md#whole-matrices)."
                },
            ),
            Topic(
                "step_in_backward",
                {
                    "step_in_backward": "Lets an optimizer step inside backward, so that few gradients are alive at a "
                    "time.",
                    "BackwardSteps": "The result of `step_in_backward`.",
                },
            ),
            Topic(
                "rebind",
                {
                    "rebind_optimizer": "Makes an optimizer that was built before an annotation hold the parameters "
                    "the model has now, with its state."
                },
            ),
        ),
    ),
    Group(
        "memory",
        "Memory and precision",
        (
            Topic(
                "precision",
                {
                    "MixedPrecisionPolicy": "Dtypes of computation and reduction: "
                    "see [mixed precision](../docs/mixed_precision.md)."
                },
            ),
            Topic(
                "checkpoint",
                {
                    "checkpoint": "Computes the activations of a module again in backward instead of keeping them "
                    "(activation checkpointing): see [memory](../docs/memory.md)."
                },
            ),
            Topic(
                "offload",
                {
                    "CPUOffloadPolicy": "Shards, gradients and optimizer state rest in host memory: "
                    "see [memory](../docs/memory.md).",
                    "OffloadPolicy": "Nothing is offloaded; the default.",
                },
            ),
        ),
    ),
    Group(
        "communication",
        "Communication",
        (
            Topic(
                "hooks",
                {
                    "register_comm_hook": "Lets a function reduce gradients: "
                    "see [communication hooks](../docs/comm_hooks.md).",
                    "CommHookHandle": "The result of `register_comm_hook`, which takes the function off again.",
                    "DefaultState": "The ranks and factors that such functions need.",
                    "allreduce_hook": "Averages gradients on ranks that all keep the whole.",
                    "reduce_scatter_hook": "Averages gradients and gives each rank its slice.",
                },
            ),
            Topic(
                "compress",
                {
                    "LowPrecisionState": "The state of the hooks that send gradients in few bits.",
                    "fp16_compress_hook": "Sends gradients as float16.",
                    "bf16_compress_hook": "Sends gradients as bfloat16.",
                    "fp16_compress_wrapper": "Lets another hook reduce gradients as float16.",
                    "bf16_compress_wrapper": "Lets another hook reduce gradients as bfloat16.",
                },
            ),
            Topic(
                "waits",
                {
                    "explain_waits": "A context for collectives of your own: if the ranks they wait for are gone, the "
                    "error says who was waited for. See [clusters](../docs/cluster.md).",
                    "set_divergence_timeout": "How long a rank waits for others before all are asked where they are: "
                    "see [it hangs](../docs/troubleshooting.md).",
                },
            ),
        ),
    ),
    Group(
        "replicated",
        "Replicated modules",
        (
            Topic(
                "replicated",
                {
                    "ReplicateModule": "The methods that a replicated module gains, as `FSDPModule` has those of a "
                    "sharded one.",
                    "reduction_stats": "The buckets of a replicated module, their order, and times.",
                    "ReductionStats": "The result of `reduction_stats`.",
                    "update_process_group": "Gives an annotated module another process group, when ranks have gone "
                    "or come back.",
                },
            ),
            Topic(
                "ddp_view",
                {
                    "as_ddp": "A replicated module as the algorithms of torch want its wrapper: `Join`, hooks, "
                    "overlapped optimizers. See [replicate](../docs/replicate.md).",
                    "DDPView": "The result of `as_ddp`.",
                },
            ),
        ),
    ),
    Group(
        "state",
        "Full weights and state dicts",
        (
            Topic(
                "state_dicts",
                {
                    "full_state_dict": "The state dict of the plain model on one rank, out of the shards handle by "
                    "handle.",
                    "load_full_state_dict": "Loads such a state dict, which one rank has, into the shards.",
                },
            ),
            Topic(
                "full_params",
                {
                    "iter_full_params": "Full parameters one after the other, in bounded memory, for export.",
                    "load_full_params": "Loads such parameters, one after the other.",
                },
            ),
            Topic(
                "changed_params",
                {
                    "changed_params": "A function that gives on one rank what has changed since its last call.",
                    "ChangedParams": "That function.",
                    "apply_changes": "Writes such changes into a plain state dict.",
                },
            ),
            Topic(
                "unshard_params",
                {
                    "unshard_params": "A context in which modules hold full, plain parameters: to read, to change, to "
                    "run without communication; on all ranks or one, on device or host."
                },
            ),
        ),
    ),
    Group(
        "checkpoints",
        "Checkpoints",
        (
            Topic(
                "checkpoints",
                {
                    "save_checkpoint": "Saves the model, the optimizer and the rest of a run; whole after a kill at "
                    "any moment, checked to the byte. See [checkpoints](../docs/checkpoints.md).",
                    "load_checkpoint": "Loads such a checkpoint at any number of ranks.",
                    "find_checkpoint": "The latest checkpoint in the folder of a run.",
                    "SaveHandle": "The result of `save_checkpoint`, to wait for.",
                    "SavedCheckpoint": "A checkpoint on disk or in a storage: path, step and `extra`.",
                },
            ),
            Topic(
                "storage",
                {
                    "Storage": "The methods of a place that saves and loads take instead of a path or URL. See [in a "
                    "bucket](../docs/storage.md#in-a-bucket)."
                },
            ),
            Topic(
                "signals",
                {
                    "save_on_signal": "Saves at a signal to any rank, on all ranks after the same step, and ends them: "
                    "see [clusters](../docs/cluster.md).",
                    "SaveNotice": "The result of `save_on_signal`, to tell the end of each step.",
                },
            ),
            Topic(
                "safetensors",
                {
                    "save_safetensors": "Writes weights as safetensors files, in the layout of model hubs.",
                    "load_safetensors": "Loads weights from such files.",
                },
            ),
        ),
    ),
    Group(
        "tensors",
        "Inside: sharded tensors",
        (
            Topic(
                "ragged",
                {
                    "RaggedDTensor": "A DTensor cut wherever the flat buffer is cut: the class of sharded parameters.",
                    "RaggedShard": "The placement that says where it is cut.",
                },
            ),
            Topic(
                "strict_mode",
                {
                    "strict_mode": "Forbids operations on such tensors that gather them behind the scenes: "
                    "see [which do](../docs/ragged.md).",
                    "fallback_counts": "Counts those operations.",
                },
            ),
        ),
    ),
    Group(
        "errors",
        "Errors",
        (
            Topic(
                "errors",
                {
                    "ComposableError": "Any error of this library.",
                    "ConfigError": "An argument is wrong. Also a `ValueError`.",
                    "UsageError": "The call is right, but not now. Also a `RuntimeError`.",
                    "DesyncError": "The ranks disagree. Also a `RuntimeError`.",
                    "StateDictError": "A state dict does not fit the model. Also a `ValueError` and a `RuntimeError`.",
                },
            ),
        ),
    ),
    Group(
        "testing",
        "Testing",
        (
            Topic("simulate", {"simulate": "Runs a function on many ranks in one process, each a thread."}),
            Topic(
                "faults",
                {
                    "Fault": "Something that goes wrong in one call of one rank.",
                    "Delay": "The message of the call leaves late.",
                    "Drop": "The message of the call is lost.",
                    "Raise": "The call raises an error.",
                },
            ),
            Topic(
                "parity",
                {
                    "check_parity": "Compares training on ranks with training in one process.",
                    "Difference": "The largest difference of one kind that `check_parity` found.",
                },
            ),
        ),
        module="composable.testing",
    ),
    Group(
        "rehearsal",
        "Rehearsals",
        (
            Topic(
                "rehearse",
                {
                    "rehearse": "Runs a function as one rank of many, on fake tensors, and counts its memory.",
                    "Rehearsal": "The peak of that memory: what it is made of, and where.",
                },
            ),
        ),
        module="composable.rehearsal",
    ),
)

_INDEX = """\
# Reference

All names that you may import, by task. Each has a page with its arguments, its errors, an example and its source.

{groups}

Also: what [operations of torch](../docs/site/operations.md) do on sharded parameters, what
[methods of `FSDPModule`](../docs/site/fsdp_methods.md) do,
the [arguments of `replicate`](../docs/site/replicate_arguments.md) in one table, and what
[importing changes in torch](../docs/site/torch_changes.md).

```{{toctree}}
:hidden:

{entries}
/docs/site/operations
/docs/site/fsdp_methods
/docs/site/replicate_arguments
/docs/site/torch_changes
```
"""
_GROUP = """\
# {title}

Import these names from `{module}`.

{table}

```{{toctree}}
:hidden:

{entries}
```
"""
_PAGE = """\
# {name}

```{{eval-rst}}
.. {directive}:: {module}.{name}{options}
```

## Example

```{{literalinclude}} /{example}
:language: python
```

A test runs this example on two ranks.
"""


def pages() -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the path of each page of the reference, below the root of the site, and its text."""
    folder = PurePosixPath("reference")
    shown = [f"## {group.title}\n\n{_table(group, '')}" for group in GROUPS]
    entries = "\n".join(f"groups/{group.page}" for group in GROUPS)
    yield folder / "index.md", _INDEX.format(groups="\n\n".join(shown), entries=entries)
    for group in GROUPS:
        entries = "\n".join(f"/reference/{name}" for name in group.names)
        table = _table(group, "../")
        text = _GROUP.format(title=group.title, module=group.module, table=table, entries=entries)
        yield folder / "groups" / f"{group.page}.md", text
        for topic in group.topics:
            for name in topic.names:
                directive = "autoclass" if name[0].isupper() else "autofunction"
                example = f"docs/examples/{topic.example}.py"
                values = {"name": name, "directive": directive, "module": group.module, "example": example}
                options = "\n   :show-inheritance:" if group.page == "errors" else ""
                yield folder / f"{name}.md", _PAGE.format(**values, options=options)


def _table(group: Group, up: str) -> str:
    rows = [
        f"| [`{name}`]({up}{name}.md) | {line.replace('](../', f'](../{up}')} |" for name, line in group.names.items()
    ]
    return "\n".join(["| Name | What it is |", "|---|---|", *rows])
