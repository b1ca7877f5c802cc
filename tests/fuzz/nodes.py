"""Kinds of modules that a random tree is grown from.

Every node maps ``[batch, WIDTH]`` to ``[batch, WIDTH]``. What it does in a call depends on its own number and on the
``Call`` that is handed down, never on anything around it: a forward that runs again in backward does the same again.
"""

import collections
import dataclasses
import functools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

__all__ = ["KINDS", "WIDTH", "Call", "Node", "Spec", "build", "kinds_in", "parts_of", "tags_in"]

WIDTH = 4


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
    """Register a class of nodes, or make one out of a forward.

    Args:
        name: Of the kind.
        kids: Least and most of them.
        tags: Of ``Node``.
        bans: Of ``Node``.
        parts: Of ``Node``.
        **makes: Make the attributes that the forward uses, in this order.
    """

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


@kind("norm", parts="norm", norm=lambda: nn.LayerNorm(WIDTH))
def norm(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return self.norm(x)


@kind("mlp", parts="up down", up=lambda: nn.Linear(WIDTH, 2 * WIDTH), down=lambda: nn.Linear(2 * WIDTH, WIDTH))
def mlp(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return x + self.down(F.gelu(self.up(x)))


@kind("scalars", scale=lambda: nn.Parameter(torch.tensor(0.75)), shift=lambda: nn.Parameter(torch.tensor([0.25])))
def scalars(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return x * self.scale + self.shift


@kind(
    "empty", parts="lin", lin=square,
    nothing=lambda: nn.Parameter(torch.empty(0)), no_rows=lambda: nn.Parameter(torch.empty(0, WIDTH)),
)  # fmt: skip
def empty(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return self.lin(x) + F.linear(x, self.no_rows).sum(dim=1, keepdim=True) + self.nothing.sum()


@kind(
    "uneven", parts="first last",
    first=lambda: nn.Linear(WIDTH, 5), last=lambda: nn.Linear(7, WIDTH), middle=lambda: param(7, 5),
)  # fmt: skip
def uneven(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return self.last(torch.tanh(F.linear(self.first(x), self.middle)))


@kind("conv", parts="conv", conv=lambda: nn.Conv1d(1, 3, 3, padding=1))
def conv(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return x + torch.tanh(self.conv(x.unsqueeze(1)).mean(1))


@kind("embedding", parts="rows", rows=lambda: nn.Embedding(WIDTH + 1, WIDTH))
def embedding(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return x + self.rows((x.detach() > 0).sum(-1))


@kind("attention", tags="fragile first_order", attention=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True))
def attention(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    y = x.unsqueeze(0)
    return x + self.attention(y, y, y, need_weights=False)[0].squeeze(0)


@kind(
    "encoder", tags="fragile first_order",
    layer=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True),
)  # fmt: skip
def encoder(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return self.layer(x.unsqueeze(0)).squeeze(0)


@kind("gru", tags="fragile first_order", parts="gru", gru=lambda: nn.GRU(WIDTH, WIDTH))
def gru(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return self.gru(x)[0]


@kind("tied", tags="tied")
class Tied(Node):
    def setup(self) -> None:
        self.first, self.second = square(), square()
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


@kind("frozen", parts="lin", lin=frozen)
def frozen_layer(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return x + self.lin(x)


@kind("lora", parts="base", base=frozen, down=lambda: param(1, WIDTH), up=lambda: param(WIDTH, 1))
def lora(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return self.base(x) + F.linear(F.linear(x, self.down), self.up)


@kind("unused", parts="lin", lin=square, spare=lambda: nn.Linear(WIDTH, 3), extra=lambda: param(3))
def unused(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Have a parameter that no forward reads, and a module that none runs."""
    return x + self.lin(x)


@kind("float32", tags="float32", parts="low", low=lambda: square(dtype=torch.float32))
def float32(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Have another dtype than the rest."""
    return x + self.low(x.float()).double()


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


@kind("parametrized", tags="fragile", lin=lambda: weight_norm(square()))
def parametrized(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return x + self.lin(x)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@kind("compiled", tags="first_order compiled", parts="block.up block.down block")
class Compiled(Node):
    """A block that torch.compile has compiled, in place or with a wrapper.

    Not in threads of a forward: where ranks are threads of one process, the compiler takes one's for another's.
    """

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


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


@kind("function", w=vector)
def function(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Have a backward of its own."""
    return x + _Scale.apply(x, self.w)


@kind(
    "param list", rows=lambda: nn.ParameterList([vector(), matrix()]), named=lambda: nn.ParameterDict({"w": vector()})
)
def param_list(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return torch.tanh(x * self.rows[0] @ self.rows[1]) + self.named["w"]


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


@kind("residual", kids=(1, 2), w=vector)
def residual(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return x * self.w + self.through(x, call)


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


@kind("wrapper", kids=(1, 1), w=vector)
def wrapper(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Return what is below unchanged, always."""
    return self.through(x * self.w, call)


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


@kind("checkpoint", kids=(1, 2), bans="thread force", w=vector)
def checkpointed(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    return x * self.w + checkpoint(self.through, x, call, use_reentrant=False)


@kind("reentrant", kids=(1, 2), tags="reentrant first_order", bans="thread force", w=vector)
def reentrant(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    # Without gradients it warns.
    run = checkpoint if x.requires_grad else _plainly
    return x * self.w + run(self.through, x, call, use_reentrant=True)


@kind("reentrant at times", kids=(1, 1), tags="reentrant first_order", bans="thread force", lin=square)
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


@kind("thread", kids=(1, 1), tags="thread", bans="compiled", w=vector)
def in_thread(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Run part of the forward in another thread."""
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run() -> torch.Tensor:
        with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
            return self.through(x, call)

    with ThreadPoolExecutor(1) as threads:
        return x * self.w + threads.submit(run).result()


class _Side(Node):
    """A tensor leaves by another way than the output."""

    def setup(self) -> None:
        self.lin, self.w = nn.Linear(WIDTH, WIDTH), param(WIDTH, WIDTH)

    def put(self, aux: torch.Tensor, call: Call) -> None:
        self.choose(call.inside, call.outside).append(aux)

    def aux(self, y: torch.Tensor) -> torch.Tensor:
        return (y @ self.w @ self.w).pow(2).mean()


@kind("side before", kids=(0, 1), tags="side", parts="lin")
class SideBefore(_Side):
    """A loss that was made before the output."""

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        y = torch.tanh(self.lin(x))
        self.put(self.aux(y), call)
        return self.through(y * 2, call) + y


@kind("side after", kids=(0, 1), tags="side", parts="lin")
class SideAfter(_Side):
    """A loss that was made after the output."""

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        y = self.through(torch.tanh(self.lin(x)), call)
        self.put(self.aux(y), call)
        return y


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


class _Attribute:
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
    "list": (lambda y: [y * 2, [y]], lambda box: box[1][0]),
    "dict": (lambda y: {"a": {"y": y, "n": 3}}, lambda box: box["a"]["y"]),
    "ordered dict": (lambda y: collections.OrderedDict(y=y), lambda box: box["y"]),
    "dataclass": (lambda y: _Data(y / 2, {"y": y}), lambda box: box.more["y"]),
    "named tuple": (lambda y: _Named(y / 2, [y]), lambda box: box.more[0]),
    "user dict": (lambda y: collections.UserDict(y=y), lambda box: box["y"]),
}
_HIDDEN_BOXES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "slots": (_Slots, lambda box: box.y),
    "attribute": (_Attribute, lambda box: box.y),
    "deque": (lambda y: collections.deque([y]), lambda box: box[0]),
    "closure": (lambda y: lambda: y, lambda box: box()),
    "generator": (lambda y: iter([y]), lambda box: next(box)),
}


class _Box(Node):
    boxes = _BOXES

    def setup(self) -> None:
        self.how = self.choose(*self.boxes)
        self.box = _Boxing(self.kids[0], self.boxes, self.how)

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return torch.tanh(self.boxes[self.how][1](self.box(x, call)))


class _Boxing(nn.Module):
    def __init__(self, inside: nn.Module, boxes: Any, how: str) -> None:
        super().__init__()
        self.inside, self.how, self.is_hidden = inside, how, boxes is _HIDDEN_BOXES
        self.w = param(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, call: Call) -> Any:
        boxes = _HIDDEN_BOXES if self.is_hidden else _BOXES
        return boxes[self.how][0](self.inside(x, call) @ self.w)


@kind("boxed", kids=(1, 1), parts="box")
class Boxed(_Box):
    """The output lies in a container."""


@kind("hidden box", kids=(1, 1), parts="box")
class HiddenBox(_Box):
    """The output lies in slots, an attribute, a deque, a closure or an iterator."""

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


def _double_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _halve_input(module: nn.Module, args: Any) -> Any:
    return (args[0] / 2, *args[1:])


def _halve_grad(module: nn.Module, grads: Any, _: Any) -> Any:
    return tuple(None if grad is None else grad / 2 for grad in grads)


@kind("hooks", kids=(1, 1))
class Hooks(Node):
    """What is below has hooks of the user's."""

    def setup(self) -> None:
        self.w = param(WIDTH)
        how = self.choose("forward", "pre", "backward", "all")
        if how in ("forward", "all"):
            self.kids[0].register_forward_hook(_double_output)
        if how in ("pre", "all"):
            self.kids[0].register_forward_pre_hook(_halve_input)
        if how in ("backward", "all"):
            self.register_full_backward_hook(_halve_grad)

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return torch.tanh(self.through(x * self.w, call))


class _Keywords(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.w = param(WIDTH)

    def forward(self, *, x: torch.Tensor, call: Call, more: Any = None) -> torch.Tensor:
        return self.inside(x * self.w, call) + more["shift"]


@kind("keywords", kids=(1, 1), parts="named")
class Keywords(Node):
    def setup(self) -> None:
        self.named = _Keywords(self.kids[0])

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return self.named(call=call, more={"shift": x / 2}, x=x)


class _Several(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.w = param(WIDTH)

    def forward(self, x: torch.Tensor, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.inside(x, call)
        return y * self.w, y, x


@kind("several outputs", kids=(1, 1), parts="several")
class SeveralOutputs(Node):
    """Outputs of which one is that of the module below, and one the input."""

    def setup(self) -> None:
        self.several = _Several(self.kids[0])

    def forward(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        a, b, c = self.several(x, call)
        return a + torch.tanh(b) * c


@kind("force", kids=(1, 1), tags="force", bans="reentrant first_order side thread force", w=vector)
def force(self: Any, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Return a derivative: a backward within the forward, and double backward later."""
    if not torch.is_grad_enabled():
        return x * self.w
    at = x * self.w
    energy = self.through(at, call).pow(2).sum()
    (slope,) = torch.autograd.grad(energy, at, create_graph=True)
    return x + torch.tanh(slope)
