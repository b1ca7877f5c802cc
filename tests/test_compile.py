"""torch.compile of blocks and whole models, before and after the annotation: the numbers of one process.

The compiler keeps its graphs, its counters and what it knows of each frame for the process: the ranks are processes.
"""

import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable import fully_shard, no_sync, replicate
from tests.models import DIM, MLPBlock, random_input, seeded
from tests.pairwise import pairs_of
from tests.world import on_ranks, run_ranks

REPO = Path(__file__).resolve().parent.parent
STEPS = 3


class Checkpointed(MLPBlock):
    """Runs again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class Recursive(MLPBlock):
    """Calls itself."""

    def forward(self, x: torch.Tensor, again: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return self(x, again - 1) if again else x


class Net(nn.Module):
    def __init__(self, block: type[nn.Module], *, loops: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.out = nn.Linear(DIM, DIM)
        self.loops = loops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        if self.loops:
            for block in self.blocks:
                x = block(x)
        else:
            x = self.blocks[1](self.blocks[0](x))
        result: torch.Tensor = self.out(x)
        return result


class Compiled(NamedTuple):
    """What the compiler made of a training: graphs, graph breaks, frames of ours that it looked at."""

    graphs: int
    breaks: int
    own_frames: list[str]


def annotate(model: nn.Module, how: str) -> None:
    blocks = model.get_submodule("blocks" if not hasattr(model, "_orig_mod") else "_orig_mod.blocks")
    if how == "policy":
        fully_shard(model, policy={MLPBlock, Checkpointed, Recursive})
        return
    api = fully_shard if how == "fully_shard" else replicate
    for block in blocks.children() if how != "replicate" else ():
        api(block)
    api(model)


def compile_it(model: Net, how: str, backend: Any) -> nn.Module:
    if how == "block.compile":
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    elif how == "torch.compile(block)":
        for index, block in enumerate(model.blocks):
            compiled: Any = torch.compile(block, backend=backend, fullgraph=True)
            model.blocks[index] = compiled
    elif how == "model.compile":
        model.compile(backend=backend)
    else:
        assert how == "torch.compile(model)"
        whole: Any = torch.compile(model, backend=backend)
        return whole  # type: ignore[no-any-return]
    return model


class Watch:
    """A backend that counts what it is given."""

    def __init__(self, name: str) -> None:
        from torch._dynamo.backends.registry import lookup_backend
        from torch._dynamo.utils import clear_compilation_metrics, counters

        # The compiler asks every tensor for its gradient, and calls what torch has deprecated.
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        counters.clear()
        clear_compilation_metrics()
        self._backend = lookup_backend(name)
        self._graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self._graphs += 1
        return self._backend(graph, inputs)

    def compiled(self) -> Compiled:
        from torch._dynamo.utils import counters, get_compilation_metrics

        frames = [(metrics.co_filename or "", metrics.co_name) for metrics in get_compilation_metrics()]
        own = [name or "" for file, name in frames if file.startswith(str(REPO / "composable"))]
        return Compiled(self._graphs, sum(counters["graph_break"].values()), own)


def whole(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return each parameter's value and gradient in full."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, param in model.named_parameters():
        pair: list[Any] = [param.detach(), param.grad]
        full = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in pair]
        found[name.replace("_orig_mod.", "")] = (full[0], full[1])
    return found


def compiled_as_one_process(
    annotation: str,
    how: str,
    when: str = "after",
    backend: str = "aot_eager",
    block: type[nn.Module] = MLPBlock,
    *,
    keeps: bool = False,
    loops: bool = False,
) -> Compiled:
    """Train a compiled model; every gradient and weight must be those of one process on the samples of all ranks.

    Args:
        annotation: See ``annotate``.
        how: See ``compile_it``; ``step`` compiles the whole training step.
        when: Whether the model is compiled before or after it is annotated.
        backend: Of the compiler.
        block: Of which the model is made.
        keeps: A first micro batch runs in ``no_sync``.
        loops: The model loops over its blocks.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    watch = Watch(backend)
    model, plain = (seeded(lambda: Net(block, loops=loops), 0) for _ in range(2))
    run: nn.Module = model
    if when == "before":
        run = compile_it(model, how, watch)
        annotate(run, annotation)
    else:
        annotate(model, annotation)
        run = compile_it(model, how, watch) if how != "step" else model
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1, momentum=0.9)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        run(x).square().mean().backward()
        optimizer.step()

    if how == "step":
        step = torch.compile(step, backend=watch)
    for number in range(STEPS):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        for one in range(world_size):
            for part in range(2 if keeps else 1):
                loss = plain(random_input(100 * number + 10 * part + one, 4, DIM)).square().mean()
                (loss / world_size).backward()
        plain_optimizer.step()
        if keeps:
            with no_sync(run):
                run(random_input(100 * number + rank, 4, DIM)).square().mean().backward()
        step(random_input(100 * number + 10 * keeps + rank, 4, DIM))
        torch.testing.assert_close(whole(run), whole(plain))
    return watch.compiled()


ANNOTATIONS = ["fully_shard", "policy", "replicate", "replicate blocks"]


def cases(*hows: str) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Return cases in which any two of annotation, way, order and backend meet."""
    return pairs_of(annotation=ANNOTATIONS, how=hows, when=["before", "after"], backend=["eager", "aot_eager"])


@pytest.mark.parametrize(*cases("block.compile", "torch.compile(block)"))
def test_a_compiled_block_is_one_clean_graph_with_the_numbers_of_one_process(
    annotation: str, how: str, when: str, backend: str
) -> None:
    # Both blocks run the same code: one graph serves them.
    assert run_ranks(compiled_as_one_process, 2, annotation, how, when, backend) == [Compiled(1, 0, [])] * 2


@pytest.mark.parametrize(*cases("model.compile", "torch.compile(model)"))
def test_a_compiled_model_breaks_at_annotated_blocks_only_and_has_the_numbers_of_one_process(
    annotation: str, how: str, when: str, backend: str
) -> None:
    # Replicated as a whole the model has no hook inside. Else: before, in the blocks' one graph, and after.
    expected = Compiled(1, 0, []) if annotation == "replicate" else Compiled(3, 2, [])
    assert run_ranks(compiled_as_one_process, 2, annotation, how, when, backend) == [expected] * 2


@pytest.mark.parametrize("annotation", ["policy", "replicate blocks"])
def test_a_compiled_training_step_looks_into_none_of_our_code(annotation: str) -> None:
    for compiled in run_ranks(compiled_as_one_process, 2, annotation, "step"):
        assert compiled.graphs > 0
        assert compiled.own_frames == []


@pytest.mark.parametrize(
    ("annotation", "block", "how"),
    [
        ("replicate blocks", Checkpointed, "torch.compile(model)"),
        ("replicate blocks", Recursive, "model.compile"),  # Its blocks meet their own hooks: no clean graph.
        ("policy", Recursive, "torch.compile(model)"),
    ],
)
def test_compiled_modules_may_run_again_and_keep_gradients(annotation: str, block: type[nn.Module], how: str) -> None:
    for compiled in run_ranks(compiled_as_one_process, 2, annotation, how, block=block, keeps=True):
        assert compiled.own_frames == []


def test_a_model_that_loops_over_annotated_blocks_compiles_the_blocks() -> None:
    # The compiler leaves a frame alone where a graph would end inside a loop.
    for compiled in run_ranks(compiled_as_one_process, 2, "policy", "torch.compile(model)", loops=True):
        assert compiled.graphs == 1


@on_ranks(2, run=run_ranks)
def test_a_compiled_root_that_calls_itself_is_told_from_one_that_was_cut_short() -> None:
    """Return how a root that calls itself was compiled where its outputs or gradients are wrong."""
    wrong: list[str] = []
    x = random_input(torch.distributed.get_rank(), 4, DIM)
    for how in ("eager", "module.compile", "torch.compile", "inside"):
        watch = Watch("eager")
        model, plain = (seeded(Recursive, 0) for _ in range(2))
        fully_shard(model.up)
        fully_shard(model)
        run: Any = model
        if how == "module.compile":
            model.compile(backend=watch)
        elif how != "eager":
            run = torch.compile(model if how == "torch.compile" else nn.Sequential(model), backend=watch)
        for _ in range(2):
            model.zero_grad()
            run(x).square().mean().backward()
        total = sum(plain(random_input(one, 4, DIM)).square().mean() / 2 for one in range(2))
        assert isinstance(total, torch.Tensor)
        total.backward()
        ours, theirs = whole(model), whole(plain)
        if any(not torch.allclose(ours[name][1], theirs[name][1]) for name in theirs):
            wrong.append(how)
    assert wrong == []


# Hooks


def hooks_of(module: nn.Module) -> list[Any]:
    # What a partial calls is a function of its own for the compiler.
    found = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [getattr(hook, "func", hook) for hook in found]


@on_ranks(1)
def test_every_hook_of_an_annotation_is_opaque() -> None:
    found: list[str] = []
    for annotate_one in (fully_shard, replicate):
        model = nn.Sequential(nn.Linear(DIM, DIM))
        output = annotate_one(model)(random_input(0, 4, DIM))
        hooks = hooks_of(model)
        assert len(hooks) == 2
        hooks += [
            type(hook).__call__ if not inspect.isroutine(hook) else hook for hook in output._backward_hooks.values()
        ]
        for param in model.parameters():
            hooks += (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
        found += [hook.__qualname__ for hook in hooks if not getattr(hook, "_torchdynamo_disable", False)]
        output.sum().backward()
    assert found == []


def test_importing_and_annotating_do_not_import_the_compiler() -> None:
    script = (
        "import sys, torch, composable; from torch import nn; import torch.distributed as dist;"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1);"
        "composable.fully_shard(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward();"
        "composable.replicate(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward();"
        "assert 'torch._dynamo' not in sys.modules; dist.destroy_process_group()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPO)
