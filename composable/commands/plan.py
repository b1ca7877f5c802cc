"""``plan``: what ``fully_shard`` would do with a model that a function of the user's makes."""

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from composable.commands.output import show
from composable.errors import ConfigError
from composable.ground.names import described
from composable.planning import ShardPlan, is_hybrid, plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the function, the ranks, and what decides the handles."""
    parser.add_argument("factory", metavar="MODULE:FUNCTION", help="makes the model; it is called on the meta device")
    parser.add_argument("--ranks", type=int, required=True, help="how many ranks train")
    parser.add_argument("--per-host", type=int, help="how many ranks share a host")
    of_class = "modules of this class get handles of their own; may be repeated"
    parser.add_argument("--policy-class", action="append", default=[], metavar="NAME", help=of_class)
    names = "FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or HYBRID_SHARD_ZERO2; the last two shard inside a host"
    parser.add_argument("--strategy", help=names)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    model, ranks = _model_of(args.factory), args.ranks
    known = {type(one).__name__: type(one) for one in model.modules()}
    if absent := [name for name in args.policy_class if name not in known]:
        raise ConfigError(f"the model has no {absent[0]}", fix=f"pass one of {', '.join(sorted(known))}")
    sharing = ranks
    if is_hybrid(args.strategy):
        if not args.per_host or ranks % args.per_host:
            raise ConfigError(f"{args.strategy} shards inside a host", fix="pass --per-host N, which divides --ranks")
        sharing = args.per_host
    made = plan(
        model,
        world_size=sharing,
        replicas=ranks // sharing if sharing else 1,
        ranks_per_host=args.per_host,
        policy={known[name] for name in args.policy_class} or None,
        strategy=args.strategy,
    )
    sent = made.expected_traffic() if args.per_host else None
    unknown = {} if args.json else "not known without --per-host"
    if not args.json:
        print(made, "Of a rank, with two states of an optimizer and without activations:", sep="\n")
    found = {
        "elements": made.numel,
        "bytes at rest": made.bytes_per_rank_at_rest(),
        "bytes at peak": made.peak_bytes_per_rank(),
        "bytes sent": {"inside the host": sent.inside_bytes, "to other hosts": sent.between_bytes} if sent else unknown,
    }
    show(found | ({"handles": [*_handles(made)]} if args.json else {}), as_json=args.json)
    return 0


def _model_of(text: str) -> nn.Module:
    """Return the model that the function ``text``, as ``package.module:function``, makes on the meta device."""
    file, _, path = text.partition(":")
    name = file.removesuffix(".py")
    make: Any = None
    try:
        make = importlib.import_module(name)
        for part in path.split("."):
            make = getattr(make, part)
    except Exception as error:
        fix = "pass MODULE:FUNCTION, such as train:make_model for train.py in this folder"
        if make is None and name and getattr(error, "name", None) not in (name, name.partition(".")[0]):
            fix = f'an import runs {name}: put what trains below `if __name__ == "__main__":`, or the model elsewhere'
        raise ConfigError(f"{text} cannot be imported: {type(error).__name__}: {error}", fix=fix) from error
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{text} returned {described(model)}", fix="name a function that returns the model")
    return model


def _handles(made: ShardPlan) -> Iterator[dict[str, Any]]:
    for one in made.handles:
        sizes = {"bytes at rest": one.shard_bytes, "bytes unsharded": one.buffer_bytes}
        yield {"modules": list(one.module_fqns), "classes": list(one.class_names), "elements": one.numel, **sizes}
