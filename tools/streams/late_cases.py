"""Programs of two ranks on the device that executes late, with the real streams or broken ones.

The ranks are threads that share the device. Collectives run on a stream of their group, as late as the order allows.
"""

import ast
import inspect
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from composable import HandleOptions, fully_shard
from composable.annotation.root import Root
from composable.engine import unsharded
from composable.ground.torch_hooks import at_end_of_backward
from composable.testing.device_streams import SimulatedDevice
from composable.testing.simulation import simulate
from tests.models import BLOCK_CLASSES, loss_of
from tests.parity import LR, Run, full_params, inputs_of, mean_over_ranks
from tools.mutations import mutations_of
from tools.streams.bench import Bench, Case
from tools.streams.branches import Branches
from tools.streams.late import LateDevice
from tools.streams.recorded import REAL, Runtime, step_on
from tools.streams.recording import Recorder
from tools.streams.stream_cases import ON_BLOCKS, PINNED

BY_GROUP = HandleOptions(transport="process_group")

Params = dict[str, torch.Tensor]
T = TypeVar("T")


class LateBench(Bench):
    """A model with its optimizer on one rank: on the late device, or on the CPU to compare with."""

    def __init__(self, case: Case, device: LateDevice | None, runtime: Runtime) -> None:
        self.device = device
        self.seen: list[torch.Tensor] = []
        # Without a device, streams are bookkeeping.
        super().__init__(case.model, cast("Any", device or Recorder()), runtime, options=BY_GROUP, **case.options)

    def adopt(self, module: nn.Module) -> Root:
        state, device = fully_shard.state(module), self.device
        assert state is not None
        if device is None:
            return state.lazy_init()
        if self.home is not None:
            for flat in [flat for handle in state._handles for flat in handle.buffers]:
                flat.home = flat.routes.home = self.home
                device.put_on_host(flat.shard)
        root = state.lazy_init()
        streams = self.runtime.streams(device)
        root.scheduler = self.runtime.scheduler(step_on(root, streams), at_end_of_backward)
        device.take_names(streams.names)
        return root

    def forward(self, seed: int = 0) -> torch.Tensor:
        loss = super().forward(seed)
        self.see(loss)
        return loss

    def see(self, tensor: torch.Tensor) -> None:
        """Keep a copy of ``tensor``, to be compared."""
        self.seen.append(tensor.detach().clone())


def run_rank(rank: int, case: Case, device: LateDevice | None, runtime: Runtime) -> Params:
    bench = LateBench(case, device, runtime)
    case.run(bench)
    params = full_params(bench.model) | {f"seen {index}": one for index, one in enumerate(bench.seen)}
    return {fqn: param if device is None else device.values_of(param) for fqn, param in params.items()}


def world_size_of(case: Case) -> int:
    """Return how many ranks run a program: for secondary shards of two ranks there are two more."""
    reshard = case.options.get("reshard_after_forward")
    return 4 if type(reshard) is int else 2


def run_on_cpu(case: Case) -> list[Params]:
    """Run a program on ranks without a device."""
    return simulate(world_size_of(case), run_rank, case, None, REAL)


def run_late(case: Case, device: LateDevice, runtime: Runtime = REAL) -> list[Params]:
    """Run a program on ranks that share ``device``."""
    return _run_on(device, run_rank, case, runtime)


def train_late(case: Case, device: LateDevice) -> list[Run]:
    """Train the model of a program on ranks that share ``device``; no rank waits for a loss before the end."""
    return _run_on(device, _train_rank, case, REAL)


def _train_rank(rank: int, case: Case, device: LateDevice, runtime: Runtime) -> Run:
    bench = LateBench(case, device, runtime)
    bench.optimizer = torch.optim.SGD([p for p in bench.model.parameters() if p.requires_grad], lr=LR)
    bench.train(3)
    losses = list(map(mean_over_ranks, bench.seen))
    return Run(losses, {fqn: device.values_of(param) for fqn, param in full_params(bench.model).items()})


def _run_on(device: LateDevice, run: Callable[..., T], case: Case, runtime: Runtime) -> list[T]:
    with device:
        shared = SimulatedDevice(torch.device("cpu"), module=device, owns=lambda one: not device.is_on_host(one))
        return simulate(world_size_of(case), run, case, device, runtime, device=shared, adverse=True)


def step_on_a_stream_of_its_own(bench: Bench) -> None:
    """The next gathers wait for the event after the optimizer, and the current stream only before its gradients go."""
    device: Any = bench.recorder
    side = device.Stream(name="optimizer")
    for seed in range(3):
        bench.forward(seed).backward()
        side.wait_stream(device.current_stream())
        with device.stream(side):
            bench.optimizer.step()
        step = bench.root.scheduler.step
        if step.streams.queues:
            step.settings.post_optim_event = side.record_event()
        with torch.no_grad():
            bench.forward(seed)
        device.current_stream().wait_stream(side)
        bench.optimizer.zero_grad()


def read_frozen(bench: Bench) -> None:
    """The last gather is of frozen shards, which the user writes then: it counts for the gradient of the input alone."""
    assert isinstance(bench, LateBench)
    last = list(bench.blocks[-1].parameters())
    for param in bench.model.parameters():
        param.requires_grad_(any(param is one for one in last))
    for seed in range(2):
        args, kwargs = inputs_of(bench.model, seed, 0)
        own = args[0].requires_grad_(True)
        loss_of(bench.model(own, *args[1:], **kwargs)).backward()
        with torch.no_grad():
            for param in bench.model.parameters():
                param.mul_(0.5)
        assert own.grad is not None
        bench.see(own.grad)
        bench.update()


def two_branches(bench: Bench, steps: int = 1) -> None:
    model = Branches(bench.recorder)
    fully_shard(model, policy=BLOCK_CLASSES, options=BY_GROUP)
    bench.model = model
    bench.adopt(model)
    bench.optimizer = bench.new_optimizer()
    # Its buffer comes from a prefetch on the other stream, and is freed before the next gather starts.
    cast("Any", model.beside).blocks[0].set_modules_to_forward_prefetch([])
    bench.train(steps)


def train(bench: Bench) -> None:
    bench.train(2)


OFFLOADED: dict[str, Any] = {"home": PINNED}
# A model of few handles, since many programs run.
SMALL = "tied_within"
PROGRAMS = {
    case.name: case
    for case in [
        Case("train", SMALL, train),
        Case("train, offloaded", SMALL, train, OFFLOADED),
        Case("train with secondary shards", SMALL, train, {"reshard_after_forward": 2}),
        Case("step on a stream", SMALL, step_on_a_stream_of_its_own),
        Case("read frozen, offloaded", "mlp", read_frozen, OFFLOADED),
        Case("two branches", SMALL, two_branches),
        Case("two branches, two steps", SMALL, partial(two_branches, steps=2)),
        *(
            Case(name, SMALL, ON_BLOCKS[name], options)
            for name, options in {
                "step in backward": {},
                "accumulate under no_sync": OFFLOADED,
                "several forwards before a backward": {"reshard_after_forward": False},
                "gradient penalty": {},
                "evaluate": OFFLOADED,
                "exception in backward": {},
                "full state dicts": {},
            }.items()
        ),
    ]
}


# Broken streams

_METHODS_OF = "DeviceStreams"
# Changes that no single expression makes: what stands in the file, and what takes its place.
BY_HAND = {
    "shards_written notes nothing": (
        """        current = self._device.current_stream()
        self._before_unshard[current.stream_id] = current.record_event()

    def shards_written_at""",
        """        return

    def shards_written_at""",
    ),
    "shards_written_at notes nothing": ("self._before_unshard[-1] = event", "pass"),
    "shards_written_at replaces the events of streams": (
        "self._before_unshard[-1] = event",
        "self._before_unshard = {-1: event}",
    ),
    "resharded notes nothing": (
        """        current = self._device.current_stream()
        self._before_unshard[current.stream_id] = current.record_event()

    def meet""",
        """        return

    def meet""",
    ),
    "shards_written forgets other streams": (
        """        self._before_unshard[current.stream_id] = current.record_event()

    def shards_written_at""",
        """        self._before_unshard = {0: current.record_event()}

    def shards_written_at""",
    ),
    "resharded forgets other streams": (
        """        self._before_unshard[current.stream_id] = current.record_event()

    def meet""",
        """        self._before_unshard = {0: current.record_event()}

    def meet""",
    ),
    "a gather waits for one event only": (
        """                self.unshard.wait_event(event)
            self""",
        """                self.unshard.wait_event(event)
                break
            self""",
    ),
    "a gather waits after it has started": (
        """        self._begin_on_unshard()
        try:
            with self._device.stream(self.unshard):
                handle.begin_unshard()
                handle.finish_gathers()
""",
        """        try:
            with self._device.stream(self.unshard):
                handle.begin_unshard()
                handle.finish_gathers()
                self._begin_on_unshard()
""",
    ),
    "the event of a gather is recorded before the gather": (
        """                handle.begin_unshard()
                handle.finish_gathers()
                self._full[handle] = self.unshard.record_event()
""",
        """                self._full[handle] = self.unshard.record_event()
                handle.begin_unshard()
                handle.finish_gathers()
""",
    ),
    "the event of a gather is of the current stream": (
        """                self._full[handle] = self.unshard.record_event()
            if handle.rests_elsewhere:
                self._copied = self._full[handle]
""",
        """            self._full[handle] = self._device.current_stream().record_event()
            if handle.rests_elsewhere:
                self._copied = self._full[handle]
""",
    ),
    "the event of a gather is found by every handle": ("self._full.pop(handle, None)", "self._full.popitem()[1]"),
    "the event of a gather is kept for the next one": (
        "full = self._full.pop(handle, None)",
        "full = self._full.setdefault(0, self._full.pop(handle, None))",
    ),
    "a gather is waited for by its own stream": ("current.wait_event(full)", "self.unshard.wait_event(full)"),
    "gathers run on the current stream": (
        """            with self._device.stream(self.unshard):
                handle.begin_unshard()""",
        """            with self._device.stream(self._device.current_stream()):
                handle.begin_unshard()""",
    ),
    "gathers of the host's shards are not noted": (
        """            if handle.rests_elsewhere:
                self._copied = self._full[handle]
        except""",
        """        except""",
    ),
    "the first gather from the host stands for all": (
        "self._copied = self._full[handle]",
        "self._copied = self._copied or self._full[handle]",
    ),
    "a user of parameters is not noted": ("self._users[current.stream_id] = current", "pass"),
    "only the last user of parameters is noted": (
        "self._users[current.stream_id] = current",
        "self._users = {current.stream_id: current}",
    ),
    "streams meet without an event": ("user.wait_event(event)", "current.wait_event(event)"),
    "streams meet at an event before the others": (
        """            current = self._come_after_users()
            event = current.record_event()
""",
        """            event = self._device.current_stream().record_event()
            current = self._come_after_users()
""",
    ),
    "the other streams wait for the current one": ("current.wait_stream(user)", "user.wait_stream(current)"),
    "a reduction is waited for by the current stream, instead of the reverse": (
        "self.reduce.wait_stream(self._device.current_stream())",
        "self._device.current_stream().wait_stream(self.reduce)",
    ),
    "a reduction waits for the gathers only": (
        "self.reduce.wait_stream(self._device.current_stream())",
        "self.reduce.wait_stream(self.unshard)",
    ),
    "the event of a reduction is recorded before it": (
        """                shard = (path.resume() if gradient is None else path.begin(gradient.source))()
                reduced = self.reduce.record_event()
""",
        """                reduced = self.reduce.record_event()
                shard = (path.resume() if gradient is None else path.begin(gradient.source))()
""",
    ),
    "the event of a reduction is of the current stream": (
        """                reduced = self.reduce.record_event()
        except""",
        """            reduced = self._device.current_stream().record_event()
        except""",
    ),
    "a reduction ends on the current stream": (
        """                shard = (path.resume() if gradient is None else path.begin(gradient.source))()
                reduced""",
        """                end = path.resume() if gradient is None else path.begin(gradient.source)
            shard = end()
            with self._device.stream(self.reduce):
                reduced""",
    ),
    "reductions run on the current stream": (
        "with self._device.stream(self.reduce):",
        "with self._device.stream(self._device.current_stream()):",
    ),
    "reductions run on the unshard stream": (
        "self.reduce = device.Stream(priority=-1)",
        "self.reduce = self.unshard",
    ),
    "gathers run on the reduce stream that waits for nothing": (
        "with self._device.stream(self.unshard):\n                handle.begin_unshard()",
        "with self._device.stream(self.reduce):\n                handle.begin_unshard()",
    ),
    "the host waits for the current stream, not the reduction": ("reduced.synchronize()", "self.unshard.synchronize()"),
    "the host never waits for a reduction": ("if to_host:", "if False:"),
    "a user's event is not waited for": ("self._before_unshard.values()", "list(self._before_unshard.values())[1:]"),
    "secondary shards are copied on the current stream": (
        """        with self._device.stream(self.unshard):
            secondary.keep(version, forward_id)""",
        """        if True:
            secondary.keep(version, forward_id)""",
    ),
    "secondary shards wait the other way": (
        "self.unshard.wait_stream(self._device.current_stream())",
        "self._device.current_stream().wait_stream(self.unshard)",
    ),
}


@cache
def broken_sources() -> dict[str, str]:
    """Return the source of every broken version of the file, by what is broken in the class."""
    source = Path(inspect.getfile(unsharded)).read_text()
    lines = source.splitlines()
    (streams,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == _METHODS_OF
    )
    sources = {}
    for mutation in mutations_of("unsharded.py", source):
        for method in streams.body:
            if isinstance(method, ast.FunctionDef) and method.lineno <= mutation.line <= (method.end_lineno or 0):
                name = f"{method.name}: {lines[mutation.line - 1].strip()} -> {mutation.new}"
                assert name not in sources, name
                sources[name] = mutation.applied(source)
    for name, (old, new) in BY_HAND.items():
        assert source.count(old) == 1, name
        sources[name] = source.replace(old, new)
    return sources


def broken(name: str) -> Runtime:
    """Return the streams with what ``name`` says broken."""
    module = ModuleType("composable.engine.unsharded_broken")
    exec(compile(broken_sources()[name], name, "exec"), vars(module))  # the library's own source
    return REAL._replace(streams=vars(module)[_METHODS_OF])


# By program, and by the name of the stream that comes last: what makes its numbers wrong.
FOUND = {
    ("train", "unshard"): [
        "begin_unshard: handle.finish_gathers() -> pass",
        "wait_for_unshard: current.wait_event(full) -> pass",
        "begin_reduction: self.reduce.wait_stream(self._device.current_stream()) -> pass",
        "begin_reduction: self._device.current_stream().wait_event(reduced) -> pass",
        "the event of a gather is recorded before the gather",
        "the event of a gather is of the current stream",
        "the event of a gather is kept for the next one",
        "a gather is waited for by its own stream",
        "a reduction is waited for by the current stream, instead of the reverse",
        "the event of a reduction is recorded before it",
        "the event of a reduction is of the current stream",
        "gathers run on the reduce stream that waits for nothing",
    ],
    ("train", "default"): [
        "begin_unshard: self._begin_on_unshard() -> pass",
        "_begin_on_unshard: self.unshard.wait_event(event) -> pass",
        "resharded notes nothing",
        "a reduction waits for the gathers only",
        "shards_written notes nothing",
    ],
    ("step on a stream", "default"): ["a user's event is not waited for"],
    ("train, offloaded", "unshard"): [
        "begin_reduction: reduced.synchronize() -> pass",
        "a reduction ends on the current stream",
        "reductions run on the current stream",
        "the host never waits for a reduction",
        "the host waits for the current stream, not the reduction",
    ],
    ("step on a stream", "unshard"): ["gathers run on the current stream"],
    ("step on a stream", "reduce"): [
        "shards_written_at notes nothing",
        "a gather waits after it has started",
        "a gather waits for one event only",
    ],
    ("read frozen, offloaded", "unshard"): [
        "begin_unshard: self._copied = self._full[handle] -> pass",
        "end_backward: self.wait_for_copies() -> pass",
        "wait_for_copies: self._copied.synchronize() -> pass",
        "gathers of the host's shards are not noted",
        "the first gather from the host stands for all",
    ],
    ("two branches", "reduce"): [
        "meet: if user != current: -> (user == current)",
        "meet: user.wait_event(event) -> pass",
        "streams meet without an event",
    ],
    ("two branches, two steps", "side"): ["resharded forgets other streams"],
    ("two branches", "side"): [
        "meet: if len(self._users) > 1: -> (2)",
        "_come_after_users: if user != current: -> (user == current)",
        "_come_after_users: current.wait_stream(user) -> pass",
        "a user of parameters is not noted",
        "only the last user of parameters is noted",
        "the other streams wait for the current one",
    ],
}
