"""A backend for ``torch.compile`` that joins the all-reduces of replicated modules into buckets."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from composable.errors import ConfigError, place_of_rank
from composable.ground.names import check_number, described
from composable.ground.torch_private import find_backend
from composable.replication import FORMS, join_all_reduces

__all__ = ["bucketing_backend"]

_Backend = Callable[..., Any]


def bucketing_backend(
    backend: str | _Backend = "inductor", *, bucket_cap_mb: float = 25, form: str = "concatenated"
) -> _Backend:
    """Return a backend that averages gradients in buckets and leaves the rest to ``backend``.

    For compiled autograd, where ``replicate`` puts one all-reduce for each gradient into the graph of backward::

        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(step, backend=bucketing_backend())(batch)

    Gradients that follow each other travel together if they have their group, dtype and device in common. Other
    collectives in the graph stay as they are. Not collective; every rank passes the same.

    Args:
        backend: Of ``torch.compile``: its name, or a function of a graph and example inputs.
        bucket_cap_mb: Most MiB of gradients in a bucket that holds more than one.
        form: ``"concatenated"``: one tensor of all gradients, one scaling, one all-reduce. ``"coalesced"``: the
            gradients where they are, scaled in one call, in one collective.

    Raises:
        ConfigError: An argument is wrong.
    """
    if not isinstance(form, str) or form not in FORMS:
        raise ConfigError(f"form is {described(form)}", at=place_of_rank(), fix=f"pass {' or '.join(map(repr, FORMS))}")
    fix = "pass a number of MiB above zero"
    cap_bytes = int(min(check_number("bucket_cap_mb", bucket_cap_mb, above=0, fix=fix), 2**40) * 2**20)
    compile_rest = find_backend(backend) if isinstance(backend, str) else backend
    if not callable(compile_rest):
        raise ConfigError(
            f"backend is {described(backend)}",
            at=place_of_rank(),
            fix="pass a name of torch.compiler.list_backends(), or a function of a graph and example inputs",
        )

    def compile_joined(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if join_all_reduces(graph.graph, cap_bytes, form):
            graph.recompile()
        return compile_rest(graph, inputs)

    return compile_joined
