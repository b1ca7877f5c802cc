"""Small models for tests, one difficulty each, with weights that depend on the seed alone.

Every factory takes ``seed`` and leaves the global random state as it found it. A model's
``example_inputs(seed)`` gives positional and keyword arguments for one forward; ``loss_of``
turns any output of these models into one scalar.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from tests.place import placed

ModelT = TypeVar("ModelT", bound=nn.Module)

BATCH = 4
DIM = 8


def seeded(build: Callable[[], ModelT], seed: int) -> ModelT:
    """Call ``build`` with the random state of ``seed``, and move what it returns to the device of the test."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return placed(build())


def random_input(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers that depend on ``seed`` and ``shape`` alone."""
    return placed(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def random_tokens(seed: int, *shape: int, vocab: int = 32) -> torch.Tensor:
    """Return token ids that depend on ``seed`` and ``shape`` alone."""
    return placed(torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed)))


def loss_of(output: Any) -> torch.Tensor:
    """Return the mean square of every tensor in ``output``, added up; averages over the batch."""
    if isinstance(output, torch.Tensor):
        return output.float().square().mean()
    if isinstance(output, Mapping):
        output = list(output.values())
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    if isinstance(output, (list, tuple)):
        losses = [loss_of(item) for item in output if item is not None]
        return torch.stack(losses).sum()
    raise TypeError(f"no loss of {type(output).__name__}")


class FloatInput(nn.Module):
    """Base of the models that take one [BATCH, DIM] float tensor."""

    def example_inputs(self, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random_input(seed, BATCH, DIM),), {}


class MLPBlock(nn.Module):
    """Two linear layers with a residual."""

    def __init__(self, dim: int = DIM, hidden: int = 2 * DIM) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class MLP(FloatInput):
    """Blocks between an input and an output layer; it may leave out one."""

    def __init__(self, dim: int = DIM, hidden: int = 2 * DIM, layers: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(MLPBlock(dim, hidden) for _ in range(layers))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, skipped: int = -1) -> torch.Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = block(x)
        return self.out(x)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, time, dim))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """A GPT; ``tied`` shares the token embedding with the output layer. Has a buffer that is not saved."""

    def __init__(
        self, vocab: int = 32, dim: int = 16, layers: int = 2, heads: int = 2, context: int = 8, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.vocab = vocab
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(context, dim)
        self.register_buffer("position_ids", torch.arange(context), persistent=False)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(self.position_ids[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def example_inputs(self, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random_tokens(seed, BATCH, len(self.position_ids), vocab=self.vocab),), {}


class TiedWithin(FloatInput):
    """One weight twice inside each block."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(DIM, DIM)
            self.second = nn.Linear(DIM, DIM)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.second(torch.tanh(self.first(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(self.Pair(), self.Pair())
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(x))


class TiedAcross(FloatInput):
    """One weight in the first and the last block: their lowest common ancestor is ``pair``, not the root."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(MLPBlock() for _ in range(3))
            self.blocks[2].up.weight = self.blocks[0].up.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.pair = self.Pair()
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.pair(self.inp(x)))


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable low-rank addition."""

    def __init__(self, dim: int = DIM, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, dim) / dim)
        self.b = nn.Parameter(torch.randn(dim, rank) / rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class FrozenMixed(FloatInput):
    """Frozen and trainable parameters in one block, a block all frozen and a block all trainable."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = MLPBlock().requires_grad_(requires_grad=False)
        self.lora = nn.ModuleList(LoRALinear() for _ in range(2))
        self.trainable = MLPBlock()
        self.frozen_tail = MLPBlock().requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x)
        for layer in self.lora:
            x = layer(x)
        return self.frozen_tail(self.trainable(x))


class MixedDtypes(FloatInput):
    """float32, bfloat16 and float64 parameters in one block."""

    class MixedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(DIM, DIM, dtype=torch.bfloat16)
            self.norm = nn.LayerNorm(DIM)
            self.high = nn.Linear(DIM, DIM, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.low(self.norm(x).bfloat16()).float()
            return x + self.high(x.double()).float()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(self.MixedBlock(), self.MixedBlock())
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(x))


class Scalars(FloatInput):
    """0-dim and one-element parameters beside ordinary ones, and a module that holds nothing else."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor([0.25]))
        self.scale = self.Scale()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.scale(x)) * self.temperature + self.shift


class EmptyParams(FloatInput):
    """Parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.empty = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = F.linear(x, self.no_rows)
        return self.linear(x) + rows.sum(dim=1, keepdim=True) + self.empty.sum()


class Uneven(FloatInput):
    """Row counts and element counts that 2, 3 and 4 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 5)
        self.second = nn.Linear(5, 7, bias=False)
        self.third = nn.Linear(7, 1)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(self.norm(self.first(x)))))


class Unused(FloatInput):
    """A block that no forward runs, and a parameter of a running block that no forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.block = MLPBlock()
        self.block.unused = nn.Parameter(torch.randn(3, DIM))
        self.never = MLPBlock()
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.block(x))


class Conditional(FloatInput):
    """A block that runs on every rank, but uses the parameters that ``branch`` asks for."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(DIM, DIM)
            self.right = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
            if branch == "none":
                return x
            return x + (self.left if branch == "left" else self.right)(x)

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.branches = self.Branches()
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, branch: str = "left") -> torch.Tensor:
        return self.out(self.branches(self.inp(x), branch))


class CalledTwice(FloatInput):
    """One block called twice in a forward, and once more under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.block = MLPBlock()
        self.alias = self.block
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.alias(self.block(self.block(self.inp(x)))))


@dataclasses.dataclass
class DataclassOutput:
    hidden: torch.Tensor
    extra: dict[str, Any]


class NestedOutputs(FloatInput):
    """Blocks that return a tuple and a dataclass."""

    class TupleBlock(MLPBlock):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None, tuple[torch.Tensor, str]]:  # type: ignore[override]
            y = super().forward(x)
            return y, None, (y * 2, "text")

    class DataclassBlock(MLPBlock):
        def forward(self, x: torch.Tensor) -> DataclassOutput:  # type: ignore[override]
            y = super().forward(x)
            return DataclassOutput(y, {"third": y / 3})

    def __init__(self) -> None:
        super().__init__()
        self.tuple_block = self.TupleBlock()
        self.dataclass_block = self.DataclassBlock()

    def forward(self, x: torch.Tensor) -> DataclassOutput:
        # Only the nested tensor goes on, so that gradients reach a block through it alone.
        _, _, (x, _) = self.tuple_block(x)
        return self.dataclass_block(x)


class WithBuffers(FloatInput):
    """Persistent and other buffers, an integer one too; ``running`` changes in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("running", torch.zeros(DIM))
        self.register_buffer("offset", torch.full((DIM,), 0.5), persistent=False)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x + self.offset)
        if self.training:
            with torch.no_grad():
                self.running.add_(y.mean(dim=0))
                self.steps.add_(1)
        return y


# Every model that single-process training can follow rank for rank, by name.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": MLP,
    "gpt": TinyGPT,
    "gpt_tied": lambda: TinyGPT(tied=True),
    "tied_within": TiedWithin,
    "tied_across": TiedAcross,
    "frozen_mixed": FrozenMixed,
    "mixed_dtypes": MixedDtypes,
    "scalars": Scalars,
    "empty_params": EmptyParams,
    "uneven": Uneven,
    "unused": Unused,
    "conditional": Conditional,
    "called_twice": CalledTwice,
    "nested_outputs": NestedOutputs,
    "with_buffers": WithBuffers,
}

# What a policy picks in those that have blocks.
BLOCK_CLASSES: frozenset[type[nn.Module]] = frozenset(
    {
        Block,
        MLPBlock,
        TiedWithin.Pair,
        TiedAcross.Pair,
        LoRALinear,
        MixedDtypes.MixedBlock,
        Scalars.Scale,
        Conditional.Branches,
    }
)


def make_model(name: str, seed: int = 0) -> nn.Module:
    """Build a model of ``MODELS`` with the weights of ``seed``."""
    return seeded(MODELS[name], seed)
