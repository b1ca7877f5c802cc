"""The ranks that share parameters, and the ranks that hold copies of a shard."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from composable.comm.hosts import expected_hosts, hosts_of, rows_of_hosts
from composable.comm.ranks import (
    Ranks,
    compare_in_each,
    default_group,
    device_for,
    kept_with,
    make_group,
    wait_like_the_world,
)
from composable.errors import ComposableError, ConfigError, UsageError, warn_once
from composable.ground.names import count_text, described
from composable.ground.torch_private import flattened_mesh, joined_meshes, modes_off, ranks_of_mesh, root_mesh

_BOTH = "both mesh and process_group are given", "pass one of them"
# The group of the ranks that share parameters; in a pair, the second group has the ranks with copies of this shard.
GroupOrPair: TypeAlias = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The mesh dims that ``fully_shard`` uses; it leaves all other dims alone, such as a dim of tensor parallelism.

    Gradients are averaged over all ranks along these dims, so a dim of context parallelism belongs to ``shard``: its
    ranks have other parts of the same sequences, and the mean over all parts is that of the whole batch.

    Attributes:
        shard: Name of the dim that parameters are sharded over; of several, in the order of the mesh, that count as
            one; ``None``: each rank along ``replicate`` holds all parameters.
        replicate: Name of the dim, or of several, whose ranks hold copies of a shard; ``None``: there are no copies.

    Raises:
        ConfigError: A name is no string, a dim is named twice, or none is.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        fix = "pass names of dims of the mesh, such as DataParallelMeshDims(shard='shard', replicate='replicate')"
        for name, value in (("shard", self.shard), ("replicate", self.replicate)):
            if (isinstance(value, tuple) and not value) or not all(isinstance(one, str) for one in _names_of(value)):
                raise ConfigError(f"{name} of the mesh dims is {described(value)}", fix=fix)
        names = [*_names_of(self.shard), *_names_of(self.replicate)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"mesh dim {twice[0]!r} is named twice for shard and replicate", fix=fix)
        if not names:
            raise ConfigError("no mesh dim is named for shard or for replicate", fix=fix)


def _names_of(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


@dataclass(frozen=True)
class Grid:
    """The ranks of one annotation."""

    shard: Ranks  # The ranks that share the parameters, each with one shard.
    replicas: Ranks | None  # The ranks that hold the same shard as this rank; ``None``: this rank alone.
    everyone: Ranks  # All ranks whose gradients are averaged.
    # For each of the replicas, the global ranks of its shard group; empty: there are no replicas.
    rows: tuple[tuple[int, ...], ...] = ()
    is_hybrid: bool = False  # The user asked for copies, though there may be only one.
    # What the plan says of dims of the user's mesh along which nothing is averaged; empty: there are none.
    left_out: str = field(default="", compare=False)

    @property
    def divisor(self) -> int:
        """The number by which the sum of all ranks' gradients is divided. Nothing else in the library decides it."""
        return self.everyone.size

    @staticmethod
    def of(shard: Ranks, copies: Ranks | None = None) -> "Grid":
        """Return the grid of all shard groups, and of ``copies`` of each shard if there are any; then collective.

        Groups that were made without a timeout get the timeout of the default process group. Raises ``ConfigError`` on
        every rank if the groups are no grid, with copies of a shard at one place in each.
        """
        wait_like_the_world([shard, *([copies] if copies else [])])
        if copies is None:
            return Grid(shard, None, shard)
        rows = tuple(copies.objects(shard.numbers))
        if copies.is_alone and shard.is_alone:
            # On the fake backend nobody else tells: the other rows lie like this one, as in a mesh.
            away = [number - copies.numbers[copies.rank] for number in copies.numbers]
            rows = tuple(tuple(number + one for number in shard.numbers) for one in away)
        pairs = zip(rows, copies.numbers, strict=True)
        fits = all(len(row) == shard.size and row[shard.rank] == number for row, number in pairs)
        told = shard.objects((copies.numbers, sorted(rows), fits))
        if not all(fits and others == sorted(rows) for _, others, fits in told):
            raise _refusal(
                f"shard groups {list(rows)} and copies on ranks {[numbers for numbers, *_ in told]} form no grid",
                "pass a mesh of two dims: init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))",
            )
        if copies.size == 1:
            return Grid(shard, None, shard, is_hybrid=True)
        return Grid(shard, copies, group_of_rows(rows, shard.device), rows, is_hybrid=True)

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """For each rank of the shard group, the global ranks that hold the same shard; empty: there are no replicas."""
        return tuple(zip(*self.rows))

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each rank, one copy of all shards after the other; empty: not known."""
        told = dict(zip(self.everyone.numbers, expected_hosts(self.everyone)))
        return tuple(told[number] for row in self.rows or (self.shard.numbers,) for number in row) if told else ()

    def replica_of(self, number: int) -> int:
        """Return the index in ``replicas`` of the copy of all shards that the global rank ``number`` is in."""
        return next((index for index, row in enumerate(self.rows) if number in row), 0)

    @staticmethod
    def whole(ranks: Ranks) -> "Grid":
        """Return the grid of ranks that each hold all parameters, as ``replicate`` needs it."""
        alone = Ranks(None, ranks.device, 0, 1, (ranks.numbers[ranks.rank],))
        return Grid(alone, ranks, ranks)


def check_inside(below: Grid, around: Grid, place: Callable[[], str]) -> None:
    """Raise ``ConfigError`` if the inner one of nested annotations has ranks that the outer one lacks.

    ``place`` returns the place of the inner annotation, and is called only for an error.
    """
    inner, outer = below.everyone.numbers, around.everyone.numbers
    # Of many modules below, most are on the same ranks, and a search for each rank would be quadratic.
    outside = sorted({*inner} - {*outer}) if inner != outer else []
    if outside:
        raise ConfigError(
            f"a module below is annotated on ranks {list(inner)}, and this one, around it, on {list(outer)} only: "
            f"rank {outside[0]} would wait for ranks that do not run it",
            at=place(),
            fix="annotate the inner module on some of the outer ranks, such as one dim of the outer module's mesh",
        )


def group_of_rows(rows: Iterable[Sequence[int]], device: torch.device) -> Ranks:
    """Return all ranks in ``rows``, ascending; each caller gets the same group. Collective over them at first use."""
    return Ranks.of(_group_of(sorted(number for row in rows for number in row)), device)


def _group_of(numbers: Sequence[int]) -> dist.ProcessGroup:
    """Return the group of ranks in this order; each caller gets the same group. Collective over them at first use."""
    world = default_group()
    if list(numbers) == dist.get_process_group_ranks(world):
        return world
    return kept_with(world, ("ranks", *numbers), lambda: make_group(numbers, world))


@dataclass(frozen=True)
class Asked:
    """Who takes part in an annotation, in whichever way the user has said it."""

    mesh: DeviceMesh  # Of the ranks that share parameters, in one dim.
    copies: Ranks | None  # Those that hold the same shard; ``None``: the user has asked for no copies.
    given: str  # What the user gave, for messages.


def resolve_grid(
    mesh: DeviceMesh | None,
    dims: DataParallelMeshDims | None,
    groups: GroupOrPair | None,
    params: Iterable[nn.Parameter],
    *,
    is_hybrid: bool | None,
    caller: str,
) -> tuple[DeviceMesh, Grid]:
    """Return the 1-D mesh of the ranks that share the parameters, and the grid of all ranks of an annotation.

    Collective where there may be replicas, over them and the shard group. Groups that were made without a timeout get
    the timeout of the default process group.

    Args:
        mesh: A mesh of one dim; of two dims, replicas first; of any dims if ``dims`` is given; ``None``: all ranks,
            with a replica on each host if ``is_hybrid``.
        dims: The dims of the mesh to use.
        groups: Process groups in place of a mesh.
        params: The parameters to shard; they decide the device type of the default mesh.
        is_hybrid: The strategy keeps copies of shards (or not); ``None``: it does if the mesh has a dim for copies.
        caller: The public function, for error messages.

    Raises:
        UsageError: No process group is initialised.
        ConfigError: The arguments do not fit together.
    """
    _check_world(caller)
    params = list(params)
    if groups is not None:
        if mesh is not None or dims is not None:
            raise _refusal(*_BOTH)
        asked = _of_groups(groups, params)
    elif mesh is None and dims is not None:
        raise _refusal("dp_mesh_dims is given without a mesh", "pass the mesh too")
    elif mesh is None and is_hybrid:
        asked = _of_dims(_mesh_of_hosts(params), None, params, caller)
    elif isinstance(mesh, DeviceMesh) and (dims is not None or mesh.ndim == 2):
        asked = _of_dims(mesh, dims, params, caller)
    else:
        asked = _of_one_dim(mesh, params, caller)
    fix = (
        "pass HYBRID_SHARD or HYBRID_SHARD_ZERO2 with a mesh of two dims, replicas first, or two process groups, or "
        "neither: one replica on each host; FULL_SHARD or SHARD_GRAD_OP with a mesh of one dim, or one group"
    )
    if is_hybrid is not None and is_hybrid is not (asked.copies is not None):
        raise _refusal(f"a {'hybrid ' * is_hybrid}strategy {asked.given}", fix)
    grid = Grid.of(Ranks.of_mesh(asked.mesh), asked.copies)
    left_out = _left_out(asked.mesh, grid.everyone, params, caller) if groups is None else ""
    return asked.mesh, replace(grid, left_out=left_out)


def _left_out(mesh: DeviceMesh, everyone: Ranks, params: Sequence[nn.Parameter], caller: str) -> str:
    """Tell which dims of the mesh that ``mesh`` is a part of hold copies that nothing averages, and log it once."""
    whole = root_mesh(mesh)
    split = {name for one in params if isinstance(one, DTensor) for name in one.device_mesh.mesh_dim_names or ()}
    # Along a dim that an annotation averages, this rank's neighbours are among its ranks.
    names = [
        name
        for name in whole.mesh_dim_names or ()
        if name not in split and not {*ranks_of_mesh(whole[name])} <= set(everyone.numbers)
    ]
    if not names:
        return ""
    text = (
        f"{everyone.size} of the {whole.size()} ranks of the mesh; no gradient is averaged along "
        f"{' and '.join(map(repr, names))}"
    )
    if everyone.rank == 0:
        takes = "dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...) with the whole mesh averages along both; "
        warn_once(
            f"{caller} on {text}\n  fix: {takes if caller == 'fully_shard' else ''}where another loop or "
            "set_all_reduce_hook averages there, or modules differ along it, nothing is to do"
        )
    return text


def _of_one_dim(mesh: DeviceMesh | None, params: Sequence[nn.Parameter], caller: str) -> Asked:
    found = _resolve_mesh(mesh, params, caller=caller)
    if mesh is not None:
        _check_order(found, 0)
    return Asked(found, None, f"on a mesh of one dim {tuple(found.shape)}")


def _of_dims(mesh: DeviceMesh, dims: object, params: Sequence[nn.Parameter], caller: str) -> Asked:
    _check_groups(mesh)
    chosen, names = _as_dims(mesh, dims), mesh.mesh_dim_names or ()
    shard, replicate = _names_of(chosen.shard), _names_of(chosen.replicate)
    for name in (*replicate, *shard):
        if name not in names:
            raise _refusal(f"the mesh has no dim {name!r}, but {names}", "name dims that the mesh has")
    for several in (shard, replicate):
        if [*several] != sorted(several, key=names.index):
            raise _refusal(f"mesh dims {several} are not in the order of the mesh, {names}", "name them in its order")
    if shard:
        _check_order(mesh, *map(names.index, shard))
        shard_mesh = _resolve_mesh(flattened_mesh(mesh, shard), params, caller=caller)
    else:
        _resolve_mesh(mesh[replicate[0]], params, caller=caller)
        shard_mesh = DeviceMesh.from_group(_group_of([dist.get_rank()]), mesh.device_type)
    copies = Ranks.of_mesh(flattened_mesh(mesh, replicate)) if replicate else None
    return Asked(shard_mesh, copies, f"on a mesh with{'' if replicate else 'out'} a dim for replicas")


def _check_order(mesh: DeviceMesh, *dims: int) -> None:
    """Refuse a mesh whose ranks along ``dims`` are not in ascending order, as they are in their process group."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for place, number in zip(itertools.product(*map(range, mesh.shape)), ranks_of_mesh(mesh), strict=True):
        rows.setdefault(tuple(index for dim, index in enumerate(place) if dim not in dims), []).append(number)
    mixed = [row for row in rows.values() if row != sorted(row)]
    if mixed:
        raise _refusal(
            f"the mesh has the ranks that share parameters in the order {mixed[0]}, process groups have them ascending",
            "list them in ascending order, as init_device_mesh does",
        )


def _as_dims(mesh: DeviceMesh, dims: Any) -> DataParallelMeshDims:
    """Return the dims of ``mesh`` to use; ``dims`` may be torch's own class."""
    if dims is None:
        if mesh.mesh_dim_names is None:
            raise _refusal(
                f"a mesh of 2 dims {tuple(mesh.shape)} without names",
                "name them: init_device_mesh(..., mesh_dim_names=('replicate', 'shard')); replicas come first",
            )
        return DataParallelMeshDims(shard=mesh.mesh_dim_names[1], replicate=mesh.mesh_dim_names[0])
    if type(dims).__name__ != DataParallelMeshDims.__name__:
        fix = "pass DataParallelMeshDims(shard='shard', replicate='replicate')"
        raise _refusal(f"dp_mesh_dims is {described(dims)}", fix)
    return DataParallelMeshDims(dims.shard, dims.replicate)


# Of each rank of this process, and each type of device.
_MESHES_OF_HOSTS: dict[tuple[int, str], tuple["weakref.ref[dist.ProcessGroup]", DeviceMesh]] = {}


def _mesh_of_hosts(params: Iterable[nn.Parameter]) -> DeviceMesh:
    """Return a mesh with a replica on each host, the same for all annotations. The first call is collective."""
    world, kind = default_group(), _default_type(params)
    # It may hold its group, and ranks make it together, so it does not end with its users: the next world's ends it.
    made_for, mesh = _MESHES_OF_HOSTS.get((world.rank(), kind), (None, None))
    if mesh is None or made_for is None or made_for() is not world:
        # By the hosts of ranks, not by their numbers: a launcher may count across hosts.
        rows = rows_of_hosts(hosts_of(Ranks.of(world, device_for(kind))))
        with modes_off():
            mesh = DeviceMesh(kind, torch.tensor(rows), mesh_dim_names=("replicate", "shard"))
        _MESHES_OF_HOSTS[world.rank(), kind] = weakref.ref(world), mesh
    return mesh


def _of_groups(groups: object, params: Iterable[nn.Parameter]) -> Asked:
    pair = _known(groups)
    mesh = DeviceMesh.from_group(pair[0], _default_type(params))
    copies = Ranks.of(pair[1], device_for(mesh.device_type)) if len(pair) == 2 else None
    return Asked(mesh, copies, f"with {len(pair)} process groups")


def _known(groups: object, most: int = 2) -> tuple[dist.ProcessGroup, ...]:
    """Return the process group, or the two, that a user gave.

    Raises ``ConfigError`` for other values, and groups that were destroyed or are another library's, whose classes may
    derive from torch's, which does not know them. No rank can be told, so this rank raises alone.
    """
    found: tuple[Any, ...] = groups if isinstance(groups, tuple) and len(groups) == most == 2 else (groups,)
    with suppress(KeyError):
        if all(isinstance(one, dist.ProcessGroup) and dist.get_process_group_ranks(one) for one in found):
            return found
    raise _refusal(
        f"process_group is {described(groups)}, not a ProcessGroup that this rank is in",
        "pass what torch.distributed.new_group() returned, only on the ranks of the group; fully_shard takes two: the "
        "ranks that share parameters, and those with copies; for a group of another library, as torchft's, average in "
        "a hook: register_comm_hook(model, group, hook)",
    )


def other_grid(
    mesh: DeviceMesh, grid: Grid, groups: GroupOrPair, text: str, failure: ComposableError | None
) -> tuple[DeviceMesh, Grid]:
    """Return the 1-D mesh and the grid of other process groups, in which this rank has the same shards as before.

    Collective over the groups: their ranks compare ``text``. A shard group that stays keeps its mesh. Groups that were
    made without a timeout get the timeout of the default process group.

    Args:
        mesh: The 1-D mesh of the shard group so far.
        grid: The grid so far.
        groups: The groups from now on, as ``fully_shard`` takes them.
        text: The annotations as text, equal on all ranks that may share them.
        failure: Why this rank cannot move, if it cannot.

    Raises:
        ConfigError: The groups do not fit this rank's shards; on every rank, unless the groups are none.
        ComposableError: ``failure``, or that of another rank.
        DesyncError: The texts differ.
    """
    ranks = [Ranks.of(group, grid.shard.device) for group in _known(groups)]
    new, old = ranks[0], grid.shard
    if failure is None and len(ranks) != 1 + grid.is_hybrid:
        failure = _refusal(
            f"{count_text(len(ranks), 'process group')} for shards with{'' if grid.is_hybrid else 'out'} copies",
            "pass two: the ranks that share parameters, and those with copies" if grid.is_hybrid else "pass one group",
        )
    elif failure is None and (new.size, new.rank) != (old.size, old.rank):
        failure = _refusal(
            f"this rank holds shard {old.rank} of {old.size}, and is rank {new.rank} of {new.size} in the group",
            f"pass a group of {old.size} ranks that hold the same shards in the same order; for other shards annotate "
            "a new model, and load a checkpoint",
        )
    compare_in_each(
        dict.fromkeys(ranks, (f"{len(ranks)} groups", text)),
        failure,
        what="the ranks of the new process group have different modules, options or communication hooks",
        fix="annotate the same model with the same arguments on every rank of the group, and register the same hook",
    )
    if new.group is not old.group:
        mesh = DeviceMesh.from_group(new.process_group, mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
        old = new
    return mesh, Grid.of(old, *ranks[1:])


def joined_mesh(mesh: DeviceMesh, other: DeviceMesh) -> tuple[DeviceMesh, int]:
    """Return a mesh with the dims of both meshes, which have one root, and the index of ``mesh``'s dim in it.

    ``mesh`` has one dim, to shard parameters over; tensor parallelism has split or replicated a parameter over
    ``other``. No communication. Raises ``ConfigError`` if both have ranks beside this one in common, or are no parts of
    one mesh with names.
    """
    shared = {*ranks_of_mesh(mesh)} & {*ranks_of_mesh(other)}
    if len(shared) > 1 or set(mesh.mesh_dim_names or ()) & set(other.mesh_dim_names or ()):
        raise ConfigError(
            f"the parameter is a DTensor over ranks {ranks_of_mesh(other)}, and fully_shard would split it again over "
            f"some of them ({ranks_of_mesh(mesh)})",
            fix="use two different dims of one mesh: init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))",
        )
    root, names = root_mesh(mesh), (*(mesh.mesh_dim_names or ()), *(other.mesh_dim_names or ()))
    # A mesh holds its groups: a mesh that is kept with its group, other than weakly, would keep both for ever.
    known: dict[Any, weakref.ref[DeviceMesh]] = kept_with(mesh.get_group(), "joined", dict)
    key = names, str(ranks_of_mesh(other))
    found = known[key]() if key in known else None
    if found is not None and root_mesh(found) is root:
        return found, (found.mesh_dim_names or ()).index(names[0])
    if len(names) != 1 + other.ndim or not _is_part(other, root):
        raise ConfigError(
            "the mesh of the parameter, a DTensor, and the mesh to shard it over are not dims of one mesh",
            fix="make one mesh, init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp')), and pass mesh['tp'] to "
            "parallelize_module and mesh['dp'] to fully_shard",
        )
    # A flattened dim, none of the root's own, comes first. The others keep their order, in which splits are nested.
    places = {name: place for place, name in enumerate(root.mesh_dim_names or ())}
    own, *others = names
    mesh_dim = sum(places.get(name, -1) < places.get(own, -1) for name in others)
    dims = (*others[:mesh_dim], own, *others[mesh_dim:])
    # torch cannot slice a flattened dim; if ``mesh`` has one, that is the first dim, so both meshes can be joined.
    made = root[dims] if own in places else joined_meshes([mesh, other])
    known[key] = weakref.ref(made)
    wait_like_the_world(Ranks.of_mesh(other, dim) for dim in range(other.ndim))
    return made, mesh_dim


def _is_part(mesh: DeviceMesh, root: DeviceMesh) -> bool:
    """Say whether ``root`` has the dims of ``mesh``, with the same names and ranks; the objects may differ."""
    names = mesh.mesh_dim_names or ()
    if root_mesh(mesh) is root:
        return True
    try:
        return mesh == (root[names[0]] if len(names) == 1 else root[names])
    except (KeyError, RuntimeError):
        return False


def _refusal(what: str, fix: str) -> ConfigError:
    return ConfigError(what, fix=fix)


def _check_world(caller: str) -> None:
    """Raise ``UsageError`` unless a process group is initialised."""
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            f"{caller} needs a process group, and none is initialised",
            fix="call torch.distributed.init_process_group() first, and start the script with torchrun; in a notebook: "
            "composable.testing.simulate(2, fn), or for this process alone "
            "torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)",
        )


def _check_groups(mesh: DeviceMesh) -> None:
    """Refuse a mesh of this rank without process groups."""
    if mesh.get_coordinate() is not None:  # Else torch knows no group of it, and another error says that.
        try:
            mesh.get_group(0)
        except (AttributeError, RuntimeError) as error:
            raise _refusal("the mesh has no process groups", "make it without _init_backend=False") from error


def _resolve_mesh(mesh: DeviceMesh | None, params: Sequence[nn.Parameter], *, caller: str) -> DeviceMesh:
    """Return the user's mesh of one dim, checked, or else a mesh over all ranks. Raises as ``resolve_grid``."""
    if mesh is None:
        world, kind = default_group(), _default_type(params)
        # One for all annotations: torch makes one in a time that grows with the ranks. It holds the group.
        meshes = kept_with(world, "meshes", WeakValueDictionary[str, DeviceMesh])
        found = meshes.get(kind)
        if found is None:
            with modes_off():
                found = meshes[kind] = init_device_mesh(kind, (world.size(),))
        return found
    if not isinstance(mesh, DeviceMesh):
        raise _refusal(f"mesh is a {type(mesh).__name__}, not a DeviceMesh", "pass init_device_mesh(...)")
    _check_groups(mesh)
    if mesh.ndim != 1:
        verb = "averages" if caller == "replicate" else "shards"
        name = (mesh.mesh_dim_names or ("name",))[0]
        named = "" if mesh.mesh_dim_names else "; name them first: init_device_mesh(..., mesh_dim_names=...)"
        what = f"mesh has {mesh.ndim} dims {tuple(mesh.shape)}; {caller} {verb} over exactly one"
        raise _refusal(what, f"pass one dim of it, such as mesh[{name!r}]{named}")
    if mesh.get_coordinate() is None:
        fix = f"call {caller} only on the ranks of the mesh {ranks_of_mesh(mesh)}"
        raise _refusal("this rank is not in the mesh", fix)
    if mesh.device_type == "cpu" and any(param.device.type == "cuda" for param in params):
        fix = "pass a mesh of device type 'cuda', or move the module to the CPU first"
        raise _refusal("the mesh is on cpu and a parameter on cuda", fix)
    return mesh


def resolve_ranks(
    mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None, params: Sequence[nn.Parameter]
) -> Ranks:
    """Return the ranks that ``replicate`` was given, or all ranks, with the device of the parameters (any shapes).

    Raises:
        UsageError: No process group is initialised.
        ConfigError: The arguments do not fit. Without a group no other rank can be told, so this rank raises alone.
    """
    _check_world("replicate")
    if mesh is not None:
        if process_group is not None:
            raise _refusal(*_BOTH)
        ranks = Ranks.of_mesh(_resolve_mesh(mesh, params, caller="replicate"))
        _left_out(mesh, ranks, params, "replicate")
    else:
        (group,) = _known(dist.group.WORLD if process_group is None else process_group, 1)
        is_nccl = dist.get_backend(group) == "nccl"
        # Without parameters the group says which device it is: what the module holds may be annotated by itself.
        device_type = next((param.device.type for param in params if not param.is_meta), "cuda" if is_nccl else "cpu")
        if device_type == "cpu" and is_nccl:
            what = "the module is on cpu and the process group on nccl, which moves CUDA tensors only"
            raise _refusal(what, "move the module to the GPU, or pass a process_group of backend 'gloo'")
        ranks = Ranks.of(group, device_for(device_type))
    wait_like_the_world([ranks])
    return ranks


def _default_type(params: Iterable[nn.Parameter]) -> str:
    has_nccl = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
    return "cuda" if has_nccl or any(param.device.type == "cuda" for param in params) else "cpu"
