"""Random trees of modules: the kinds that they are grown from, and the model that holds one.

Every node maps ``[batch, WIDTH]`` to ``[batch, WIDTH]``. What it does in a call depends on its own number and on the
``Call`` that is handed down, never on anything around it: a forward that runs again in backward does the same again.
"""

import collections
import dataclasses
import functools
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = [
    "KINDS",
    "WIDTH",
    "Boom",
    "Call",
    "Model",
    "Node",
    "RaisesInBackward",
    "Spec",
    "build",
    "candidates",
    "grow",
    "kinds_in",
    "tags_in",
]

WIDTH = int(os.environ.get("FUZZ_WIDTH", "4"))  # More where the bytes of small messages must not count.


@dataclasses.dataclass
class Call:
    """Which forward this is, handed to every node."""

    rank: int  # whose samples these are
    step: int  # optimizer steps done
    micro: int = 0  # number of the forward within the step
    fails: str = ""  # raise in the forward, or in the backward, of the model
    inside: list[torch.Tensor] = dataclasses.field(default_factory=list)  # tensors for the model to add to its output
    outside: list[torch.Tensor] = dataclasses.field(default_factory=list)  # tensors for the program to add to its loss


@dataclasses.dataclass(frozen=True)
class Spec:
    """A node to be built: its kind, the number that everything random about it follows from, and what is below."""

    kind: str
    uid: int
    kids: tuple["Spec", ...] = ()

    def __str__(self) -> str:
        inside = f"({', '.join(map(str, self.kids))})" if self.kids else ""
        return f"{self.kind}{inside}"


class Node(nn.Module):
    """Base of all kinds.

    Attributes:
        kind: Its name.
        most_kids: How many nodes there may be below.
        least_kids: How many there have to be.
        tags: What programs and annotations have to know of it.
        bans: Tags of nodes that cannot be below.
        parts: Names of modules of torch inside that run in every call as one unit, so that they may be annotated.
    """

    kind = ""
    most_kids = 0
    least_kids = 0
    tags: frozenset[str] = frozenset()
    bans: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()

    def __init__(self, uid: int, kids: Sequence["Node"]) -> None:
        super().__init__()
        self.uid = uid
        self.kids = nn.ModuleList(kids)

    def setup(self) -> None:
        """Make parameters; the random generator is seeded."""

    def choose(self, *options: Any) -> Any:
        """Return one of ``options``, always the same for this node."""
        return random.Random(self.uid).choice(options)

    def flip(self, call: Call, *, by_rank: bool) -> bool:
        """Return yes or no, for one step or also for one rank."""
        rank = call.rank if by_rank else "all"
        return random.Random(f"{self.uid}/{rank}/{call.step}/{call.micro}").random() < 0.5

    def through(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        """Run what is below, one after the other."""
        for kid in self.kids:
            x = kid(x, call)
        return x


KINDS: dict[str, type[Node]] = {}


def kind(
    name: str, *, kids: tuple[int, int] = (0, 0), tags: str = "", bans: str = "", parts: str = "", **makes: Any
) -> Callable[[Any], Any]:
    """Register a class of nodes, or make one out of a forward and what makes the attributes that it uses, in order."""

    def setup(self: Node) -> None:
        for attribute, make in makes.items():
            setattr(self, attribute, make())

    def register(what: Any) -> Any:
        cls = what if isinstance(what, type) else type(what.__name__, (Node,), {"forward": what, "setup": setup})
        cls.kind = name
        cls.least_kids, cls.most_kids = kids
        cls.tags, cls.bans, cls.parts = frozenset(tags.split()), frozenset(bans.split()), tuple(parts.split())
        KINDS[name] = cls
        return what

    return register


def build(spec: Spec) -> Node:
    """Return the module; its values depend on ``spec`` alone."""
    kids = [build(kid) for kid in spec.kids]
    node = KINDS[spec.kind](spec.uid, kids)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.uid)  # torch's other function is slow
        node.setup()
    return node


def kinds_in(spec: Spec) -> Iterator[str]:
    yield spec.kind
    for kid in spec.kids:
        yield from kinds_in(kid)


def tags_in(spec: Spec) -> frozenset[str]:
    return frozenset(tag for name in kinds_in(spec) for tag in KINDS[name].tags)


def parts_of(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a stable name and the module for everything below ``root`` that may be annotated, deepest first."""
    for child in root.children():
        yield from parts_of(child)
    if isinstance(root, Node):
        for name in root.parts:
            yield f"{root.uid}.{name}", root.get_submodule(name)
        yield str(root.uid), root


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 2)


square = functools.partial(nn.Linear, WIDTH, WIDTH)
vector, matrix = functools.partial(param, WIDTH), functools.partial(param, WIDTH, WIDTH)


def frozen() -> nn.Module:
    return square().requires_grad_(requires_grad=False)


# Without anything below


@kind("linear", parts="lin", lin=square)
def linear(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return torch.tanh(self.lin(x))


@kind("mlp", parts="up down", up=lambda: nn.Linear(WIDTH, 2 * WIDTH), down=lambda: nn.Linear(2 * WIDTH, WIDTH))
def mlp(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return x + self.down(F.gelu(self.up(x)))


@kind("sparse rows", tags="sparse", parts="rows", rows=lambda: nn.Embedding(WIDTH + 1, WIDTH, sparse=True))
@kind("embedding", parts="rows", rows=lambda: nn.Embedding(WIDTH + 1, WIDTH))
def embedding(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return x + self.rows((x.detach() > 0).sum(-1))


@kind("attention", tags="first_order", attention=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True))
def attention(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    y = x.unsqueeze(0)
    return x + self.attention(y, y, y, need_weights=False)[0].squeeze(0)


@kind("tied", tags="tied")
class Tied(Node):
    def setup(self) -> None:
        self.first, self.second = square(), square()
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


@kind("lora", parts="base", base=frozen, down=lambda: param(1, WIDTH), up=lambda: param(WIDTH, 1))
def lora(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return self.base(x) + F.linear(F.linear(x, self.down), self.up)


@kind("unused", parts="lin", lin=square, spare=lambda: nn.Linear(WIDTH, 3), extra=lambda: param(3))
def unused(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Have a parameter that no forward reads, and a module that none runs."""
    return x + self.lin(x)


@kind("buffers", parts="lin")
class Buffers(Node):
    def setup(self) -> None:
        self.lin = square()
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.register_buffer("shift", torch.rand(WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return self.lin(x * self.scale + self.shift)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@kind("compiled", tags="first_order compiled", parts="block.up block.down block")
class Compiled(Node):
    """A block that torch.compile has compiled, in place or with a wrapper."""

    def setup(self) -> None:
        block, backend = _Block(), self.choose("eager", "aot_eager")
        if self.uid % 2:
            block.compile(backend=backend)
            self.block: nn.Module = block
        else:
            self.block = torch.compile(block, backend=backend)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        with warnings.catch_warnings():
            # The compiler looks at attributes of tensors that warn.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            return self.block(x)


@kind("twice", parts="lin", lin=square)
def twice(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return self.lin(torch.tanh(self.lin(x)))


@kind("some ranks", left=matrix, right=matrix, rare=vector)
def some_ranks(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Use parameters that depend on the rank."""
    y = x @ (self.left if self.flip(call, by_rank=True) else self.right)
    # No rank but the first ever uses this one, and that one not always.
    return y + self.rare if call.rank == 0 and self.flip(call, by_rank=False) else y


@kind("heads", parts="heads.0 heads.1", heads=lambda: nn.ModuleList(square() for _ in range(2)))
def heads(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Run one of two modules, which depends on the step."""
    return x + self.heads[self.flip(call, by_rank=False)](x)


# Around others


@kind("seq", kids=(1, 3))
def seq(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return self.through(x, call)


@kind("parallel", kids=(2, 3))
def parallel(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return torch.stack([kid(x, call) for kid in self.kids]).sum(0)


@kind("tied across", kids=(1, 2), tags="tied")
class TiedAcross(Node):
    """Has a parameter of what is below, too."""

    def setup(self) -> None:
        below = [one for one in self.kids.parameters() if one.numel()]
        self.shared = below[self.uid % len(below)] if below else param(WIDTH)

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return self.through(x, call) + 0.1 * x * self.shared.mean()


@kind("alias", kids=(1, 2))
class Alias(Node):
    """What is below runs twice."""

    def setup(self) -> None:
        self.again = self.kids[0]

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        y = self.through(x, call)
        return y + self.again(torch.tanh(y), call)


@kind("chosen", kids=(2, 3))
def chosen(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Run one of several, the same on all ranks."""
    return self.kids[self.flip(call, by_rank=False)](x, call)


@kind("loop", kids=(1, 1))
def loop(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Run what is below as often as the step wants."""
    for _ in range(1 + 2 * self.flip(call, by_rank=False)):
        x = torch.tanh(self.through(x, call))
    return x


@kind("pass through", kids=(1, 1), tags="by_rank", w=vector, w2=matrix)
def pass_through(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Return what is below unchanged, on some ranks."""
    y = self.through(x, call)
    return (y + self.w) @ self.w2 if self.flip(call, by_rank=True) else y


@kind("drop", kids=(1, 1), w=vector)
def drop(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Return the input, in some steps."""
    return x if self.flip(call, by_rank=False) else self.through(x * self.w, call)


class _MaybeDropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = param(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, is_dropped: bool) -> torch.Tensor:
        return x if is_dropped else torch.tanh(x @ self.w)


@kind("drop on some ranks", parts="dropped", w=vector, dropped=_MaybeDropped)
def drop_on_some_ranks(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Return the input, on some ranks."""
    # A tensor that no other module gave out: else the order in backward would depend on the rank.
    return self.dropped(x * self.w, self.flip(call, by_rank=True))


@kind("checkpoint", kids=(1, 2), bans="force", w=vector)
def checkpointed(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return x * self.w + checkpoint(self.through, x, call, use_reentrant=False)


@kind("reentrant", kids=(1, 2), tags="reentrant first_order", bans="force", w=vector)
def reentrant(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    # Without gradients it warns.
    run = checkpoint if x.requires_grad else _plainly
    return x * self.w + run(self.through, x, call, use_reentrant=True)


@kind("reentrant at times", kids=(1, 1), tags="reentrant first_order", bans="force", lin=square)
def reentrant_at_times(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Run once under reentrant checkpointing and once without, in either order."""
    run = checkpoint if x.requires_grad else _plainly
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: run(self.through, x, call, use_reentrant=True),
        lambda: self.through(2 * x, call),
    ]
    if self.flip(call, by_rank=False):
        calls.reverse()
    return self.lin(calls[0]() + calls[1]())


def _plainly(fn: Callable[..., torch.Tensor], *args: Any, use_reentrant: bool) -> torch.Tensor:
    return fn(*args)


@kind("side", kids=(0, 1), tags="side", parts="lin")
class Side(Node):
    """A loss that was made before the output, or after it, leaves by another way."""

    def setup(self) -> None:
        self.lin, self.w = nn.Linear(WIDTH, WIDTH), param(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        y = torch.tanh(self.lin(x))
        is_before = self.uid % 2
        out = y if is_before else self.through(y, call)
        self.choose(call.inside, call.outside).append((out @ self.w @ self.w).pow(2).mean())
        return self.through(out * 2, call) + out if is_before else out


class _KeepsAttribute(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.w = param(WIDTH, WIDTH)
        self.loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        y = self.inside(x, call)
        self.loss = (y @ self.w).pow(2).mean()
        return y


@kind("side attribute", kids=(1, 1), tags="side", parts="keeper")
class SideAttribute(Node):
    """The module above reads a loss from the one below."""

    def setup(self) -> None:
        self.keeper = _KeepsAttribute(self.kids[0])

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        y = self.keeper(x, call)
        # Taken away: a deep copy would refuse it.
        loss, self.keeper.loss = self.keeper.loss, None
        return y if loss is None else y + loss


class _Slots:
    __slots__ = ("y",)

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


@dataclasses.dataclass
class _Data:
    y: torch.Tensor
    more: dict[str, Any]


class _Named(NamedTuple):
    y: torch.Tensor
    more: list[Any]


_BOXES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda y: (None, (y, "text")), lambda box: box[1][0]),
    "dict": (lambda y: {"a": {"y": [y * 2, y], "n": 3}}, lambda box: box["a"]["y"][1]),
    "dataclass": (lambda y: _Data(y / 2, {"y": y}), lambda box: box.more["y"]),
    "named tuple": (lambda y: _Named(y / 2, [y]), lambda box: box.more[0]),
    "user dict": (lambda y: collections.UserDict(y=y), lambda box: box["y"]),
}
_HIDDEN_BOXES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "slots": (_Slots, lambda box: box.y),
    "closure": (lambda y: lambda: y, lambda box: box()),
    "generator": (lambda y: iter([y]), lambda box: next(box)),
}


class _Boxing(nn.Module):
    def __init__(self, inside: nn.Module, put: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inside, self.put = inside, put
        self.w = param(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, call: Call) -> Any:
        return self.put(self.inside(x, call) @ self.w)


@kind("boxed", kids=(1, 1), parts="box")
class Boxed(Node):
    """The output lies in a container."""

    boxes = _BOXES

    def setup(self) -> None:
        put, self.take = self.choose(*self.boxes.values())
        self.box = _Boxing(self.kids[0], put)

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return torch.tanh(self.take(self.box(x, call)))


@kind("hidden box", kids=(1, 1), parts="box")
class HiddenBox(Boxed):
    """The output lies in slots, a closure or an iterator."""

    boxes = _HIDDEN_BOXES


@kind("views", kids=(1, 1), w=vector)
def views(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Return a view of what is below, or change it in place."""
    y = self.through(x * self.w, call)
    how = self.choose("view", "slice", "in place")
    if how == "view":
        return y.view(-1, WIDTH)
    # Not of a tensor that is needed for the backward of what made it.
    return y[:, :] if how == "slice" else (y * 1.5).mul_(2)


@kind("teacher", kids=(2, 2))
def teacher(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Run one part without gradients."""
    with torch.no_grad():
        target = self.kids[0](x, call)
    return self.kids[1](x, call) - target


@kind("cut off", kids=(1, 1), w=vector)
def cut_off(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Run what is below with gradients that go nowhere."""
    return x * self.w + self.through(x, call).detach()


@kind("hooks", kids=(1, 1))
class Hooks(Node):
    """What is below has hooks of the user's."""

    def setup(self) -> None:
        self.w = param(WIDTH)
        self.kids[0].register_forward_hook(_double_output)
        self.kids[0].register_forward_pre_hook(_halve_input)
        self.register_full_backward_hook(_halve_grad)

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return torch.tanh(self.through(x * self.w, call))


def _double_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _halve_input(module: nn.Module, args: Any) -> Any:
    return (args[0] / 2, *args[1:])


def _halve_grad(module: nn.Module, grads: Any, _: Any) -> Any:
    return tuple(None if grad is None else grad / 2 for grad in grads)


class _Keywords(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.w = param(WIDTH)

    def forward(self, *, x: torch.Tensor, call: Call, more: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.inside(x * self.w, call)
        return y * self.w + more["shift"], y, x


@kind("keywords", kids=(1, 1), parts="named")
class Keywords(Node):
    """Inputs by keyword; several outputs, of which one is that of the module below and one an input."""

    def setup(self) -> None:
        self.named = _Keywords(self.kids[0])

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        a, b, c = self.named(call=call, more={"shift": x / 2}, x=x)
        return a + torch.tanh(b) * c


@kind("force", kids=(1, 1), tags="force", bans="reentrant first_order side force", w=vector)
def force(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Return a derivative: a backward within the forward, and double backward later."""
    if not torch.is_grad_enabled():
        return x * self.w
    at = x * self.w
    energy = self.through(at, call).pow(2).sum()
    (slope,) = torch.autograd.grad(energy, at, create_graph=True)
    return x + torch.tanh(slope)


# The model that holds a tree

MOST_DEPTH = 3
MOST_NODES = 9


def grow(rng: random.Random, kinds: frozenset[str]) -> Spec:
    """Return a random tree of ``kinds``."""
    budget = [MOST_NODES]

    def node(depth: int, banned: frozenset[str]) -> Spec:
        budget[0] -= 1
        fits = [
            name
            for name, cls in KINDS.items()
            if name in kinds
            and not cls.tags & banned
            and (cls.least_kids == 0 or (depth > 0 and budget[0] >= cls.least_kids))
        ]
        # The first ones are rather around others, or most trees would be one leaf.
        inner = [name for name in fits if KINDS[name].most_kids]
        name = rng.choice(inner if inner and (depth == MOST_DEPTH or rng.random() < 0.3) else fits)
        cls = KINDS[name]
        uid = rng.getrandbits(32)
        count = rng.randint(cls.least_kids, cls.most_kids) if depth > 0 else 0
        return Spec(name, uid, tuple(node(depth - 1, banned | cls.bans) for _ in range(count)))

    return node(MOST_DEPTH, frozenset())


class Boom(Exception):  # noqa: N818  # not one of ours
    """Raised on purpose."""


class RaisesInBackward(torch.autograd.Function):
    """Passes a tensor on; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Boom


class Model(nn.Module):
    """A tree between an input layer and two heads. Parts may be called alone, through it."""

    def __init__(self, tree: Spec) -> None:
        super().__init__()
        self.trunk = build(tree)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(tree.uid + 1)
            self.inp = nn.Linear(WIDTH, WIDTH)
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, call: Call, part: str = "all", head: int = 0) -> torch.Tensor:
        """Run all with one head, the ``trunk``, or one ``head``."""
        if part != "head":
            x = self.trunk(self.inp(x), call)
            while call.inside:
                x = x + torch.tanh(call.inside.pop())
        if call.fails == "forward":
            raise Boom
        if call.fails == "backward":
            x = RaisesInBackward.apply(x)
        return x if part == "trunk" else self.heads[head](x)


def candidates(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Yield a stable name and the module for all below ``model`` that may be annotated, deepest first."""
    seen: set[nn.Module] = set()
    for name, module in parts_of(model):
        if module not in seen:
            seen.add(module)
            yield name, module
    yield "inp", model.inp
    for index, head in enumerate(model.heads):
        yield f"head {index}", head
