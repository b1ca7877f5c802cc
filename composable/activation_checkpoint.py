"""Activation checkpointing as an annotation.

The instance gets a ``forward`` of its own, which runs the original one under torch's checkpointing.
``module(...)`` calls it between the module's hooks, so a module that is also sharded unshards before both
runs, and hooks of users run once. No state of a step is kept: threads, repeated calls and errors need no care.

Source: sublinear memory cost, arXiv 1604.06174; non-reentrant checkpointing, torch.utils.checkpoint.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as run_with_checkpoint

from composable.annotation import call_as_forward
from composable.errors import ConfigError, UsageError
from composable.ground.contract import contract
from composable.ground.frames import is_functional_call
from composable.ground.names import check_bool, describe_module, described
from composable.policies import has_forward

ModuleT = TypeVar("ModuleT", nn.Module, Sequence[nn.Module])
ContextFn: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

_DETERMINISM_CHECKS = ("default", "none")


@dataclass
class CheckpointState:
    """The options of one ``checkpoint`` call."""

    # Keyword arguments of torch's function; ``context_fn`` only if given: the compiler refuses its default.
    options: dict[str, Any] = field(default_factory=dict)


@contract(CheckpointState)
def checkpoint(
    module: ModuleT,
    *,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    context_fn: ContextFn | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
) -> ModuleT:
    """Free the activations of ``module`` after forward; backward runs its forward again to compute them.

    Class, parameters and names stay as they are. ``fully_shard`` and ``replicate`` may be called before or after it, on
    the same module, one inside it or one around it. Not collective. Without gradients nothing runs again. Forward must
    compute the same in both runs. Its side effects, such as updates of a batch norm's running means, happen twice.
    Forward hooks of ``module`` itself run once.

    Args:
        module: The module to annotate, or several modules of which none is inside another.
        use_reentrant: Only ``False``: hooks that wait for gradients do not see a reentrant backward.
        preserve_rng_state: Draw the same random numbers in both runs.
        context_fn: Returns two contexts, for the first run and for the second, and is called once here; the function
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` makes contexts that keep chosen results.
        determinism_check: ``"default"`` compares shapes, dtypes and devices of both runs; ``"none"`` does not.
        debug: If the runs differ, list the operations of both in the error; not together with ``context_fn``.
        early_stop: End the second run as soon as everything that backward needs is there.

    Returns:
        ``module``, the same object.

    Raises:
        ConfigError: An argument is wrong, or the module has no forward to run, or carries ``checkpoint`` already.

    Its forward raises ``UsageError`` inside ``torch.func.functional_call`` where gradients are recorded: the second run
    would read other parameters than the first.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    switches = {
        "use_reentrant": use_reentrant,
        "preserve_rng_state": preserve_rng_state,
        "debug": debug,
        "early_stop": early_stop,
    }
    for name, value in switches.items():
        check_bool(name, value)
    if use_reentrant:
        raise ConfigError(
            "use_reentrant is True",
            fix="leave it out; or call torch.utils.checkpoint.checkpoint in the model's own forward",
        )
    if context_fn is not None:
        try:
            _, _ = context_fn()
        except (TypeError, ValueError) as error:
            what = f"context_fn is {described(context_fn)}, and {error}"
            raise ConfigError(what, fix="pass a function that returns two contexts") from error
    if not isinstance(determinism_check, str) or determinism_check not in _DETERMINISM_CHECKS:
        raise ConfigError(
            f"determinism_check is {described(determinism_check)}",
            fix=f"pass one of {', '.join(map(repr, _DETERMINISM_CHECKS))}",
        )
    if debug and context_fn is not None:
        raise ConfigError("debug is True beside a context_fn", fix="pass one of them: debug brings contexts of its own")
    for one in modules:
        _check_module(one)
    state = next(found for one in modules if (found := checkpoint.state(one)) is not None)
    state.options = {**switches, "determinism_check": determinism_check}
    if context_fn is not None:
        state.options["context_fn"] = context_fn
    for one in modules:
        # Not with setattr: some classes forward it to another module.
        one.__dict__["forward"] = CheckpointedForward(one, state)
    return module


def forward_in_place(module: nn.Module) -> "CheckpointedForward":
    """Return the ``forward`` that ``checkpoint`` gave to ``module``; ``UsageError`` if it has got another one since."""
    found = module.__dict__.get("forward")
    if not isinstance(found, CheckpointedForward):
        raise UsageError(
            "checkpoint cannot be undone: this module's forward was replaced since",
            at=describe_module(module),
            fix="put the forward back that the module had after checkpoint",
        )
    return found


class CheckpointedForward:
    """The ``forward`` of one annotated instance.

    An object, not a function: a deep or pickled copy of the module gets its own, which runs the copy.

    Attributes:
        module: The instance.
        own: The ``forward`` that the instance itself had before, beside that of its class; ``None``: it had none.
    """

    def __init__(self, module: nn.Module, state: CheckpointState) -> None:
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")
        self.module = module
        self._state = state

    def remove(self) -> None:
        """Let the module keep its activations again; the registry is not touched."""
        del self.module.__dict__["forward"]
        if self.own is not None:
            self.module.__dict__["forward"] = self.own

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original ``forward``; trainers read its arguments with ``inspect.signature``."""
        # Looked up at each call: other annotations swap the class.
        return self.own if self.own is not None else partial(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.__wrapped__
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not torch.compiler.is_compiling() and is_functional_call():
            raise UsageError(
                "functional_call runs a checkpointed module: in backward it would run again with other parameters",
                at=describe_module(self.module),
                fix="unannotate it, or call it under torch.no_grad()",
            )
        count, names = len(args), tuple(kwargs)

        def run(*inputs: Any) -> Any:
            return forward(*inputs[:count], **dict(zip(names, inputs[count:], strict=True)))

        has_run = False

        def run_or_run_again(*inputs: Any) -> Any:
            nonlocal has_run
            if has_run:
                # Backward may come here from a tensor that left the module in another way than as its output.
                return call_as_forward(self.module, run, inputs, {})
            has_run = True
            return run(*inputs)

        # Keyword inputs go by position: torch takes none for an option of its own, and an outer checkpoint frees them.
        return run_with_checkpoint(
            run if torch.compiler.is_compiling() else run_or_run_again, *args, *kwargs.values(), **self._state.options
        )


def _check_module(module: nn.Module) -> None:
    what = ""
    if checkpoint.state(module) is None:
        what = "checkpoint got a module and one inside it in one sequence"
        fix = "call it on the inner one first, in a call of its own"
    elif isinstance(module, torch.jit.ScriptModule):
        what, fix = "a ScriptModule cannot be checkpointed", "annotate the module around it"
    elif not has_forward(module):
        what, fix = "checkpoint got a module without a forward", "call it on what runs inside"
    if what:
        raise ConfigError(what, at=describe_module(module), fix=fix)
