"""The figures of a GPU: this library beside FSDP2, DDP and plain training, in one run at world size 1.

An engine is a way of training: ``plain``, ``ddp``, ``fsdp2`` (torch's ``fully_shard``), ``fully_shard`` and
``replicate`` (ours). Each row that ``figures`` reports is a flat dict; ``kind`` says what it is about:

* ``device``: the machine. ``matmul``: the rate of its bf16 matrix product, which MFU is a share of.
* ``llama``: a Llama of 1.1 billion parameters, computed in bf16 from parameters in fp32. ``plain`` and ``ddp`` run
  under autocast, the others under a policy of mixed precision. Each engine is built alone, and freed after it.
* ``small``: many small layers in fp32, where the host is the limit. All engines step in turn, in a rotating order.
* ``exposed``: what a profiler's trace of one step says about communication.
* ``skipped``, ``error``: what there was no time for, and what failed.

Of a step: ``step_ms`` is the device's time between the ends of two steps that follow each other without a pause.
``host_ms`` is the time until the last call of a step returns, and ``cpu_ms`` the CPU time of all threads until then,
both of a step that begins with an idle device. A driver's queue of kernels is finite: the host of a long step waits
for the device, so the host's own work is best seen in ``small``.

``mfu``: (6 N T + 6 L D S T) / (step time * matrix rate), with T tokens in a step, N parameters without the embedding
of the tokens, L blocks of width D, and S tokens in a sequence. The second term is causal attention: 2 S D operations
in the forward of each token and block, and twice that in backward. What checkpoints compute again does not count.
"""

import gc
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from composable import MixedPrecisionPolicy, fully_shard, replicate

Row: TypeAlias = dict[str, object]

BF16 = torch.bfloat16
ENGINES = ("fully_shard", "fsdp2", "plain", "ddp", "replicate")
MIB, GIB = 2**20, 2**30


class Variant(NamedTuple):
    """How the blocks of the Llama run, and how many seconds its first engine may take on a GPU."""

    name: str
    is_compiled: bool
    is_checkpointed: bool
    first_s: float


EAGER = Variant("eager", False, False, 6)
COMPILED = Variant("compiled", True, False, 25)
CHECKPOINTED = Variant("checkpointed", False, True, 6)
COMPILED_CHECKPOINTED = Variant("compiled, checkpointed", True, True, 25)


@dataclass(frozen=True)
class Sizes:
    """How large all of it is. The defaults are for a GPU of 80 GB."""

    width: int = 2048
    layers: int = 16
    heads: int = 16
    kv_heads: int = 8
    hidden: int = 8192
    vocab: int = 32000
    sequence: int = 2048
    batch: int = 4
    warmup: int = 3
    steps: int = 8
    host_steps: int = 3
    matrix: int = 8192
    small_layers: tuple[int, ...] = (16, 64, 256)
    small_width: int = 256
    small_batch: int = 16
    small_rounds: int = 20


TOY = Sizes(32, 2, 4, 2, 64, 64, 16, 2, 1, 2, 1, 64, (2, 3), 8, 4, 3)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Torch's fused kernel wants both in one dtype, and autocast leaves the weight in fp32.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-5).to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Module):
    def __init__(self, sizes: Sizes, *, is_checkpointed: bool) -> None:
        super().__init__()
        head_width = sizes.width // sizes.heads
        self.head_width, self.is_checkpointed = head_width, is_checkpointed
        self.attention_norm = RMSNorm(sizes.width)
        self.q = nn.Linear(sizes.width, sizes.heads * head_width, bias=False)
        self.k = nn.Linear(sizes.width, sizes.kv_heads * head_width, bias=False)
        self.v = nn.Linear(sizes.width, sizes.kv_heads * head_width, bias=False)
        self.out = nn.Linear(sizes.heads * head_width, sizes.width, bias=False)
        self.mlp_norm = RMSNorm(sizes.width)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # Inside of forward, so that it is the same for every engine: hooks of the block stay outside.
        if self.is_checkpointed:
            result: torch.Tensor = checkpoint(self._run, x, cos, sin, use_reentrant=False)
            return result
        return self._run(x, cos, sin)

    def _run(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        q, k, v = (
            part(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        down: torch.Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + down


class Llama(nn.Module):
    """A decoder with grouped attention, rotary positions and gated layers; activations between blocks are bf16."""

    def __init__(self, sizes: Sizes, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, is_checkpointed=is_checkpointed) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        half = sizes.width // sizes.heads // 2
        angles = torch.outer(torch.arange(sizes.sequence), 10000.0 ** (-torch.arange(half) / half))
        # No buffers: some engines broadcast those in every forward.
        self.cos, self.sin = angles.cos().to(BF16), angles.sin().to(BF16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens).to(BF16)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: torch.Tensor = self.head(self.norm(x)).float()
        return logits


def operations_of_step(sizes: Sizes, params: int) -> float:
    """Return the N and L terms of the formula above; ``params`` are those without the embedding."""
    tokens = sizes.batch * sizes.sequence
    return 6.0 * tokens * (params + sizes.layers * sizes.width * sizes.sequence)


def annotate(model: nn.Module, engine: str, unit: type[nn.Module], device: torch.device, *, is_bf16: bool) -> nn.Module:
    """Make ``model`` train by ``engine``, where each ``unit`` is a handle if parameters are sharded."""
    # Not the default: FSDP2 takes a GPU if there is one.
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if engine == "ddp":
        # As `replicate` does it: gradients are not held twice.
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if engine == "fsdp2":
        policy = TorchMixedPrecisionPolicy(param_dtype=BF16 if is_bf16 else None)
        for module in [module for module in model.modules() if isinstance(module, unit)]:
            torch_fully_shard(module, mesh=mesh, mp_policy=policy)
        torch_fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    own_policy = MixedPrecisionPolicy(param_dtype=BF16 if is_bf16 else None)
    if engine == "fully_shard":
        return fully_shard(model, policy={unit}, mesh=mesh, mp_policy=own_policy)
    if engine == "replicate":
        return replicate(model, mesh=mesh, mp_policy=own_policy if is_bf16 else None)
    assert engine == "plain", f"no engine {engine!r}"
    return model


class HostTime(NamedTuple):
    """Milliseconds of the host in a step: in each part of it, and of CPU in all threads."""

    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    cpu_ms: float


class Trained:
    """A model with its optimizer, and a loss that runs forward on a batch."""

    def __init__(self, model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor]) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self._loss_of = loss_of
        self.loss = torch.zeros(())

    def step(self) -> HostTime:
        cpu, start = time.process_time(), time.perf_counter()
        loss = self._loss_of(self.model)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        stop, cpu_stop = time.perf_counter(), time.process_time()
        self.loss = loss.detach()
        times = (forward - start, backward - forward, stop - backward, cpu_stop - cpu)
        return HostTime(*(1e3 * seconds for seconds in times))


def small_layers(sizes: Sizes, layers: int, engine: str, device: torch.device) -> Trained:
    """Return a model of many small layers, by an engine."""
    torch.manual_seed(0)
    x = torch.randn(sizes.small_batch, sizes.small_width, device=device)
    with device:
        parts = [(nn.Linear(sizes.small_width, sizes.small_width), nn.GELU()) for _ in range(layers)]
    plain = nn.Sequential(*(part for pair in parts for part in pair))
    return Trained(annotate(plain, engine, nn.Linear, device, is_bf16=False), lambda one: one(x).square().mean())


class Marks:
    """Points in the queue of the device, and the time between each two."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[Any] = []

    def add(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._events.append(time.perf_counter())

    def gaps_ms(self) -> list[float]:
        """Return the milliseconds from each mark to the next."""
        wait_for_device(self._device)
        pairs = zip(self._events, self._events[1:])
        if self._device.type == "cuda":
            return [first.elapsed_time(second) for first, second in pairs]
        return [1e3 * (second - first) for first, second in pairs]


def wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def free_memory(device: torch.device) -> None:
    """Give back what deleted models held; a compiler's caches hold some of it."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class Run:
    """One call of ``figures``.

    Attributes:
        matrix_rate: Operations in a second of the bf16 matrix product.
        last_s: Seconds that the last job of each name took; before the first one, how long it may take.
    """

    device: torch.device
    report: Callable[[Row], None]
    until: float
    sizes: Sizes
    is_toy: bool
    matrix_rate: float = 0.0
    last_s: dict[str, float] = field(default_factory=dict)

    def attempt(self, job: Callable[[], None], what: str, name: str, first_s: float) -> None:
        """Run ``job`` if there is time for it; a failure is a row and does not end the rest."""
        start = time.monotonic()
        if start + (0.0 if self.is_toy else self.last_s.get(name, first_s)) > self.until:
            self.report({"kind": "skipped", "what": what})
            return
        try:
            job()
        except Exception as error:
            self.report({"kind": "error", "what": what, "error": f"{type(error).__name__}: {error}"[:2000]})
        free_memory(self.device)
        self.last_s[name] = time.monotonic() - start

    def matmul(self) -> None:
        """Measure the rate that MFU is a share of."""
        n = self.sizes.matrix
        a, b = (torch.randn(n, n, device=self.device, dtype=BF16) for _ in range(2))
        for _ in range(5):
            a @ b
        marks = Marks(self.device)
        for _ in range(11):
            marks.add()
            a @ b
        ms = statistics.median(marks.gaps_ms())
        self.matrix_rate = 2 * n**3 / ms * 1e3
        self.report({"kind": "matmul", "n": n, "ms": ms, "tflops": self.matrix_rate / 1e12})

    def build_llama(self, engine: str, variant: Variant) -> Trained:
        torch.manual_seed(0)
        with self.device:
            model = Llama(self.sizes, is_checkpointed=variant.is_checkpointed)
            text = torch.randint(self.sizes.vocab, (self.sizes.batch, self.sizes.sequence + 1))
        if variant.is_compiled:
            for block in model.blocks:
                # The toy is about this file: kernels need a compiler of C++ and half a minute.
                block.compile(backend="aot_eager" if self.is_toy else "inductor")
        is_autocast = engine in ("plain", "ddp")

        def loss_of(trained: nn.Module) -> torch.Tensor:
            with torch.autocast(self.device.type, BF16) if is_autocast else nullcontext():
                return F.cross_entropy(trained(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

        return Trained(annotate(model, engine, Block, self.device, is_bf16=not is_autocast), loss_of)

    def llama(self, engine: str, variant: Variant, round_number: int) -> None:
        """Report the step of a Llama by one engine."""
        bytes_before = allocated_bytes(self.device)
        row = self._llama_row(engine, variant, bytes_before)
        free_memory(self.device)
        if self.device.type == "cuda":
            # What is still held with the model gone, workspaces of torch's matrix products among it.
            row["left_mib"] = (allocated_bytes(self.device) - bytes_before) / MIB
        self.report({"kind": "llama", "engine": engine, "variant": variant.name, "round": round_number, **row})

    def _llama_row(self, engine: str, variant: Variant, bytes_before: int) -> Row:
        start = time.perf_counter()
        trained = self.build_llama(engine, variant)
        model = trained.model
        embedded = sum(p.numel() for name, p in model.named_parameters() if name.endswith("tokens.weight"))
        params = sum(p.numel() for p in model.parameters())
        wait_for_device(self.device)
        build_s = time.perf_counter() - start
        for _ in range(self.sizes.warmup):
            trained.step()
        wait_for_device(self.device)
        first_steps_s = time.perf_counter() - start - build_s
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        marks = Marks(self.device)
        marks.add()
        for _ in range(self.sizes.steps):
            trained.step()
            marks.add()
        gaps_ms = marks.gaps_ms()
        host = []
        for _ in range(self.sizes.host_steps):
            wait_for_device(self.device)
            host.append(trained.step())
        wait_for_device(self.device)
        step_ms = statistics.median(gaps_ms)
        row: Row = {
            "params": params,
            "step_ms": step_ms,
            "step_ms_min": min(gaps_ms),
            "tokens_per_s": self.sizes.batch * self.sizes.sequence / step_ms * 1e3,
            **host_columns(host),
            "loss": trained.loss.item(),
            "build_s": build_s,
            "first_steps_s": first_steps_s,
        }
        if self.matrix_rate:
            row["mfu"] = operations_of_step(self.sizes, params - embedded) / (step_ms / 1e3) / self.matrix_rate
        if self.device.type == "cuda":
            row["peak_gib"] = (torch.cuda.max_memory_allocated() - bytes_before) / GIB
            row["rest_gib"] = (allocated_bytes(self.device) - bytes_before) / GIB
        return row

    def small(self, layers: int) -> None:
        """Report the step of many small layers by every engine, in turn."""
        sizes = self.sizes
        trained = {engine: small_layers(sizes, layers, engine, self.device) for engine in ENGINES}
        host: dict[str, list[HostTime]] = {engine: [] for engine in ENGINES}
        wall_ms: dict[str, list[float]] = {engine: [] for engine in ENGINES}
        for index in range(sizes.warmup + sizes.small_rounds):
            turn = index % len(ENGINES)
            for engine in ENGINES[turn:] + ENGINES[:turn]:
                wait_for_device(self.device)
                start = time.perf_counter()
                times = trained[engine].step()
                wait_for_device(self.device)
                if index >= sizes.warmup:
                    host[engine].append(times)
                    wall_ms[engine].append(1e3 * (time.perf_counter() - start))
        figures_of: dict[str, dict[str, float]] = {}
        for engine in ENGINES:
            wall = {"wall_ms": statistics.median(wall_ms[engine]), "wall_ms_min": min(wall_ms[engine])}
            figures_of[engine] = {**wall, **host_columns(host[engine]), "loss": trained[engine].loss.item()}
        for engine, own in figures_of.items():
            row: Row = {"kind": "small", "layers": layers, "engine": engine, **own}
            for other in ("fsdp2", "ddp"):
                for key in ("host_ms", "wall_ms"):
                    row[f"{key}_to_{other}"] = own[key] / figures_of[other][key]
            self.report(row)

    def exposed(self, engine: str) -> None:
        """Report how much of a step only communication runs in."""
        trained = self.build_llama(engine, EAGER)
        for _ in range(self.sizes.warmup):
            trained.step()
        wait_for_device(self.device)
        is_cuda = self.device.type == "cuda"
        activity = torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity]) as profile:
            trained.step()
            wait_for_device(self.device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        self.report({"kind": "exposed", "engine": engine, **exposed_columns(work_in(events, is_cuda=is_cuda))})

    def everything(self) -> None:
        """Run all jobs, the most valuable first."""
        self.attempt(self.matmul, "matmul", "matmul", 2)
        self.all_engines(EAGER, 1)
        for layers in self.sizes.small_layers:
            self.attempt(partial(self.small, layers), f"small {layers}", f"small {layers}", 8)
        self.all_engines(COMPILED, 1)
        self.all_engines(CHECKPOINTED, 1)
        self.all_engines(EAGER, 2)
        self.all_engines(COMPILED_CHECKPOINTED, 1)
        for engine in ("fully_shard", "fsdp2"):
            self.attempt(partial(self.exposed, engine), f"exposed {engine}", "exposed", 6)
        for variant in (COMPILED, CHECKPOINTED, COMPILED_CHECKPOINTED):
            self.all_engines(variant, 2)

    def all_engines(self, variant: Variant, round_number: int) -> None:
        """Run every engine in turn; the second round begins with the last."""
        if self.is_toy and round_number == 2:
            return
        engines: Sequence[str] = ENGINES if round_number == 1 else ENGINES[::-1]
        if self.is_toy and variant.is_compiled:
            engines = ENGINES[:1]  # the compiler takes a second or more for each
        for engine in engines:
            self.attempt(
                partial(self.llama, engine, variant, round_number),
                f"llama {variant.name} {engine}, round {round_number}",
                variant.name,
                variant.first_s,
            )


def host_columns(times: Sequence[HostTime]) -> dict[str, float]:
    """Return medians over steps."""
    columns = {"host_ms": statistics.median(sum(one[:3]) for one in times)}
    for name in HostTime._fields:
        key = name if name == "cpu_ms" else f"host_{name}"
        columns[key] = statistics.median(getattr(one, name) for one in times)
    return columns


class Work(NamedTuple):
    """What ran on one stream from ``start`` to ``stop``, in microseconds."""

    start: float
    stop: float
    stream: object
    name: str


def work_in(events: Sequence[dict[str, Any]], *, is_cuda: bool) -> list[Work]:
    """Return kernels and copies in a trace of the profiler; on the CPU, where threads stand for streams, operators."""
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"} if is_cuda else {"cpu_op"}
    return [
        Work(
            float(event["ts"]),
            float(event["ts"]) + float(event["dur"]),
            event["args"].get("stream") if is_cuda else event["tid"],
            event["name"],
        )
        for event in events
        if event.get("cat") in kinds and "dur" in event
    ]


def exposed_columns(work: Sequence[Work]) -> Row:
    """Return how much of a step only communication runs in, and in how much of it nothing runs.

    The compute stream is the one that works longest. Communication is what runs on other streams, copies
    into and out of the buffers of collectives with it, and every kernel of NCCL.
    """
    streams = {one.stream for one in work}
    compute_stream = max(streams, key=lambda stream: busy_us([one for one in work if one.stream == stream]))
    computes = [one for one in work if one.stream == compute_stream and "nccl" not in one.name.lower()]
    communicates = [one for one in work if one.stream != compute_stream or "nccl" in one.name.lower()]
    step_us = max(one.stop for one in work) - min(one.start for one in work)
    exposed_us = busy_us(work) - busy_us(computes)
    return {
        "step_ms": step_us / 1e3,
        "communication_ms": busy_us(communicates) / 1e3,
        "exposed_ms": exposed_us / 1e3,
        "exposed_share": exposed_us / step_us,
        "idle_share": 1 - busy_us(work) / step_us,
        "streams": len(streams),
    }


def busy_us(work: Sequence[Work]) -> float:
    """Return the time in which at least one of these runs."""
    total, until = 0.0, float("-inf")
    for start, stop, *_ in sorted(work, key=lambda one: one.start):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Make a process group of one rank, if there is none."""
    if dist.is_initialized():
        yield
        return
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device_id)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def few_warnings() -> Iterator[None]:
    """Leave out what the compiler says of its own doing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


@contextmanager
def few_objects() -> Iterator[None]:
    """Keep Python's collector, which runs between jobs, off everything that is there already: it takes long."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def device_row(device: torch.device) -> Row:
    """Return what a reader needs to judge the figures."""
    row: Row = {
        "kind": "device",
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        row["cuda"] = str(torch.version.cuda)
        row["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        row["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / GIB
    return row


def figures(device: torch.device, report: Callable[[Row], None], *, until: float, is_toy: bool) -> None:
    """Measure, and report each figure as soon as it is known.

    Args:
        device: A CUDA device, or the CPU.
        report: Called with each row.
        until: By ``time.monotonic()``: no job begins that may end later, as far as jobs before it can tell.
        is_toy: Small sizes, one round, and no kernels that are compiled: to test this file.
    """
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    # DDP's optimizer of graphs splits them where buckets end, and refuses checkpoints in them. A block is a small graph.
    with process_group(device), few_warnings(), few_objects(), torch._dynamo.config.patch(optimize_ddp=False):
        report(device_row(device))
        Run(device, report, until, TOY if is_toy else Sizes(), is_toy).everything()


# Headings of the columns of each kind.
COLUMNS = {
    "llama": {
        "variant": "Blocks",
        "engine": "Engine",
        "round": "Round",
        "tokens_per_s": "Tokens/s",
        "step_ms": "Step ms",
        "step_ms_min": "Least",
        "mfu": "MFU",
        "peak_gib": "Peak GiB",
        "rest_gib": "At rest GiB",
        "host_ms": "Host ms",
        "cpu_ms": "CPU ms",
        "loss": "Loss",
    },
    "small": {
        "layers": "Layers",
        "engine": "Engine",
        "host_ms": "Host ms",
        "host_forward_ms": "Forward",
        "host_backward_ms": "Backward",
        "host_optimizer_ms": "Optimizer",
        "wall_ms": "Wall ms",
        "host_ms_to_fsdp2": "Host to FSDP2",
        "wall_ms_to_fsdp2": "Wall to FSDP2",
        "host_ms_to_ddp": "Host to DDP",
        "wall_ms_to_ddp": "Wall to DDP",
    },
    "exposed": {
        "engine": "Engine",
        "step_ms": "Step ms",
        "communication_ms": "Communication ms",
        "exposed_ms": "Exposed ms",
        "exposed_share": "Exposed share",
        "idle_share": "Idle share",
    },
    "skipped": {"what": "No time for"},
    "error": {"what": "Failed", "error": "Error"},
}


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    device: Row = next((row for row in rows if row["kind"] == "device"), {})
    matmul: Row = next((row for row in rows if row["kind"] == "matmul"), {})
    shown = {"torch": "torch", "cuda": "CUDA", "nccl": "NCCL", "python": "Python"}
    facts = [str(device.get("card", "unknown device"))]
    facts += [f"{label} {device[key]}" for key, label in shown.items() if key in device]
    facts += [str(device[key]) for key in ("date",) if key in device]
    if matmul:
        facts.append(
            f"bf16 matrix product of {matmul['n']}: {_text(matmul['tflops'])} TFLOP/s, of which MFU is a share"
        )
    parts = [", ".join(facts) + ". World size 1."]
    for kind, headings in COLUMNS.items():
        chosen = [row for row in rows if row["kind"] == kind]
        keys = [key for key in headings if any(key in row for row in chosen)]
        if chosen:
            lines = ["| " + " | ".join(headings[key] for key in keys) + " |", "|---" * len(keys) + "|"]
            lines += ["| " + " | ".join(_text(row.get(key, "")) for key in keys) + " |" for row in chosen]
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _text(value: object) -> str:
    """Return three digits that matter; texts on one line."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")
    return " ".join(str(value).split()).replace("|", "\\|")
