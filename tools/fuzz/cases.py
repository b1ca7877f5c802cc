"""A seed, and all that follows from it: tree, annotation, programs, optimizer, what happens between steps."""

import dataclasses
import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.place import placed
from tools.fuzz.annotations import (
    CHANGING,
    COPY_MODES,
    MODES,
    Annotation,
    Copies,
    direct_parts,
    draw_annotation,
    draw_copies,
)
from tools.fuzz.between import ACTIONS
from tools.fuzz.nodes import KINDS, Model, Spec, grow, kinds_in, tags_in
from tools.fuzz.programs import PROGRAMS

__all__ = ["HOOKS", "Case", "draw", "draw_hybrid", "draw_replicated", "kinds_of", "make_model", "smaller"]

OPTIMIZERS = "SGD momentum AdamW AdamW-foreach AdamW-fused RMSprop".split()
SPEEDS = "plain accelerated".split()
CLIPS = "none none own torch".split()
ZEROS = ["to None", "to None", "to zeros", "every other step"]
HOOKS = ["step in backward", "tensor hook before", "tensor hook after"]


@dataclass(frozen=True)
class Case:
    """One tree and what is done with it."""

    seed: int  # whence it comes
    world_size: int  # how many ranks
    tree: Spec  # the trunk
    annotation: Annotation  # how it is annotated
    other: Annotation  # how it is annotated the next time, if it is
    optimizer: str  # one of ``OPTIMIZERS``
    speed: str  # one of ``SPEEDS``
    clip: str  # whose clipping
    zero: str  # what becomes of gradients after a step
    hooks: str = ""  # hooks on parameters, if any: one of ``HOOKS``
    programs: tuple[str, ...] = ()  # of each step
    actions: tuple[tuple[str, ...], ...] = ()  # after each step

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}, world size {self.world_size}",
            f"tree       {self.tree}",
            f"annotation {self.annotation}",
            *(f"step {number}     {name}" + "".join(f"; then {action}" for action in actions)
              for number, (name, actions) in enumerate(zip(self.programs, self.actions, strict=True))),
            f"optimizer  {self.optimizer}, {self.speed}, clip {self.clip}, gradients {self.zero}, "
            f"hooks {self.hooks or 'none'}",
        ]  # fmt: skip
        if self.is_annotated_anew:
            lines.insert(3, f"then       {self.other}")
        return "\n".join(lines)

    @property
    def is_annotated_anew(self) -> bool:
        return any(not ACTIONS[name].keeps_annotation for actions in self.actions for name in actions)

    @property
    def copies(self) -> Copies:
        """What is asked of ``replicate``, at first."""
        return self.annotation.copies or Copies()

    @property
    def steps_inside(self) -> bool:
        """An optimizer steps inside backward."""
        return self.hooks == "step in backward" or bool(self.copies.steps)

    @property
    def is_like_the_first(self) -> bool:
        """Every backward of a rank has the same graph."""
        kinds = set(kinds_in(self.tree))
        if kinds & CHANGING or (self.annotation.mode != "replicate" and kinds & {"reentrant at times"}):
            return False
        if self.annotation.mode == "together" and "reentrant" in self.tags:
            return False  # What a reentrant checkpoint runs again is a backward of its own.
        return len(set(self.programs)) == 1 and set(self.programs) <= ALIKE

    @property
    def tags(self) -> frozenset[str]:
        return tags_in(self.tree)


# Programs of which every backward that averages is like the first one.
ALIKE = {
    "plain",
    "input with gradient",
    "several forwards, one backward",
    "micro batches, each synchronised",
    "zero_grad in the middle",
    "all in a thread",
    "backward in a thread",
    "saved tensors go away",
    "copies: set_requires_gradient_sync",
    "copies: set_is_last_backward",
    "copies: require_backward_grad_sync",
}

# Documented limits, in docs/inside/notes.md: backward gets to parameters before it gets to an output of their module.
BEYOND = [("cut off", "side"), ("cut off", "hidden")]


def make_model(case: Case) -> Model:
    model = Model(case.tree)
    if not case.copies.finds_unused:
        model.heads[1].requires_grad_(requires_grad=False)  # which few programs run
    return placed(model)


def draw(
    seed: int, world_size: int, without: frozenset[str] = frozenset(), steps: int = 3, *, is_hybrid: bool = False
) -> Case:
    """Return the case of a seed.

    Args:
        seed: Of every choice.
        world_size: How many ranks.
        without: Kinds of nodes, annotations, programs, actions and hooks that are not drawn.
        steps: How many.
        is_hybrid: Shards have copies, on a mesh of two dims.
    """
    rng = random.Random(f"{seed}/copies of shards" if is_hybrid else seed)
    tree = _tree(rng, without | {"sparse rows", "compiled", "tied across"})
    modes = [mode for mode in MODES if mode not in without]
    annotation, other = (draw_annotation(rng, tags_in(tree), modes) for _ in range(2))
    other = dataclasses.replace(other, start="values")
    if is_hybrid:
        counts = [count for count in range(1, world_size + 1) if world_size % count == 0]
        annotation = dataclasses.replace(annotation, replicas=rng.choice(counts))
        other = dataclasses.replace(other, replicas=rng.choice([0, *counts]))
    hooks = [name for name in HOOKS if name not in without and _is_all_sharded(annotation)]
    case = Case(
        *(seed, world_size, tree, annotation, other),
        optimizer=rng.choice(OPTIMIZERS),
        speed="plain" if annotation.mode == "replicate" else rng.choice(SPEEDS),
        clip=rng.choice(CLIPS),
        zero=rng.choice(ZEROS),
        hooks=rng.choice(hooks) if rng.random() < 0.15 and hooks else "",
    )
    case = _fitting(_with_actions(case, rng, without, steps))
    fits = [name for name in _programs_for(case) if name not in without]
    return dataclasses.replace(case, programs=tuple(rng.choice(fits) for _ in range(steps)))


def draw_hybrid(seed: int, world_size: int, without: frozenset[str] = frozenset(), steps: int = 3) -> Case:
    """Return a case in which shards have copies; once the model is annotated anew, maybe as many others."""
    return draw(seed, world_size, without | {"replicate"}, steps, is_hybrid=True)


def draw_replicated(seed: int, world_size: int, without: frozenset[str] = frozenset(), steps: int = 3) -> Case:
    """Return a case in which all or part of the tree is replicated, with any options."""
    rng = random.Random(f"{seed}/copies")
    copies = draw_copies(rng)
    mode = rng.choice([mode for mode in ("replicate", *COPY_MODES) if mode not in without])
    if mode == "mixed":
        copies = dataclasses.replace(copies, is_static=False, syncs=False)
        # fully_shard does not take the first, nor what another module's forward uses.
        without |= {"sparse rows", "tied across"}
    if mode != "replicate":
        copies = dataclasses.replace(copies, finds_unused=True, steps=copies.steps and "ours")
    if copies.steps:
        copies = dataclasses.replace(copies, finds_unused=True)
        without |= {"force"}  # A graph of backward, which is refused.
    is_alike = (copies.is_static or not copies.finds_unused) and rng.random() < 0.9
    if is_alike:
        without |= CHANGING if mode == "replicate" else CHANGING | {"reentrant at times"}
    if copies.hook and mode != "replicate":
        without |= {"some ranks", "pass through", "drop on some ranks"}  # It waits inside backward.
    if not copies.is_static:
        without |= {"reentrant", "reentrant at times"}
    tree = _tree(rng, without)
    annotation = dataclasses.replace(draw_annotation(rng, tags_in(tree), ["hand"]), mode=mode, copies=copies)
    again = dataclasses.replace(draw_copies(rng), finds_unused=True, is_static=copies.is_static, steps="", syncs=False)
    if mode != "replicate" and not copies.hook:  # Else the tree may be one in which hooks of several modules wait.
        again = dataclasses.replace(again, hook="")
    other = dataclasses.replace(annotation, seed=rng.getrandbits(32), copies=again)
    is_sparse = "sparse" in tags_in(tree)
    case = Case(
        *(seed, world_size, tree, annotation, other),
        optimizer="SGD without decay" if is_sparse else rng.choice(OPTIMIZERS),
        speed=rng.choice(SPEEDS) if mode == "mixed" and not copies.steps else "plain",
        clip="none" if copies.steps or is_sparse else rng.choice(["none", "none", "own"]),  # sparse ones have no norm
        zero="to None" if copies.steps else rng.choice(ZEROS),
    )
    case = _with_actions(case, rng, without, steps)
    fits = [name for name in _programs_for(case) if name not in without]
    mine = [name for name in fits if name.startswith("copies")]
    programs = [rng.choice(mine if mine and rng.random() < 0.3 else fits) for _ in range(steps)]
    if is_alike:
        programs = [rng.choice([name for name in fits if name in ALIKE] or fits)] * steps
    return dataclasses.replace(case, programs=tuple(programs))


def _with_actions(case: Case, rng: random.Random, without: frozenset[str], steps: int) -> Case:
    offered = [name for name in _actions_for(case) if name not in without]
    mine = [name for name in offered if ACTIONS[name].needs_copies] or offered
    counts = [rng.choice([0, 0, 1, 2]) for _ in range(steps - 1)] + [0]
    actions = tuple(tuple(rng.choice(rng.choice([offered, mine])) for _ in range(count)) for count in counts)
    return dataclasses.replace(case, actions=actions)


def _tree(rng: random.Random, without: frozenset[str]) -> Spec:
    tree = grow(rng, frozenset(KINDS) - without)
    while any(_has(tree, outer, inner) for outer, inner in BEYOND):
        tree = grow(rng, frozenset(KINDS) - without)
    return tree


def _has(spec: Spec, *kinds: str) -> bool:
    """Say whether there are nodes whose kinds begin with ``kinds``, each inside the one before."""
    rest = kinds[1:] if spec.kind.startswith(kinds[0]) else kinds
    return not rest or any(_has(kid, *rest) for kid in spec.kids)


def _fitting(case: Case) -> Case:
    """Leave out what would not be compared in a meaningful way."""
    annotations = [case.annotation] + [case.other] * case.is_annotated_anew
    changes: dict[str, str] = {}
    is_on_two_meshes = any(one.replicas for one in annotations)
    if case.clip == "torch" and (not all(map(_is_all_sharded, annotations)) or is_on_two_meshes):
        changes["clip"] = "own"  # torch's takes one kind of tensor on one mesh
    if any(one.mode == "replicate" for one in annotations):
        changes["speed"] = "plain"
    if case.hooks:
        changes["zero"] = "to None"
    if case.hooks == "step in backward":
        changes |= {"clip": "none", "speed": "plain"}
    if case.hooks.endswith("before") and case.annotation.start != "values":
        changes["hooks"] = case.hooks.replace("before", "after")
    return dataclasses.replace(case, **changes)  # type: ignore[arg-type]


def _is_all_sharded(annotation: Annotation) -> bool:
    return annotation.mode not in COPY_MODES


def _actions_for(case: Case) -> list[str]:
    is_sharded = _is_all_sharded(case.annotation) and _is_all_sharded(case.other)
    fits = []
    for name, action in ACTIONS.items():
        if action.needs_sharded and (not is_sharded or case.hooks):
            continue
        if action.needs_copies and case.annotation.copies is None:
            continue
        if name == "annotate a copy" and case.copies.is_static:  # Its backward has another graph.
            continue
        if (case.hooks or case.steps_inside) and not action.keeps_model:
            continue
        if case.steps_inside and ("optimizer" in name or "checkpoint" in name):
            continue
        fits.append(name)
    return fits


def _programs_for(case: Case) -> list[str]:
    annotations = [case.annotation] + [case.other] * case.is_annotated_anew
    model = make_model(case)
    direct = frozenset.intersection(*(direct_parts(model, one) for one in annotations))
    is_sharded = all(map(_is_all_sharded, annotations))
    has_parts = any(one.mode in ("roots", "mixed", "nested", "together") for one in annotations)
    # Parts that do not run in every forward hear of no other's backward, which is to average what they keep.
    some = ("chosen", "heads", "drop") if case.annotation.copies is not None else ("chosen",)
    is_partial = any(_has(case.tree, kind) for kind in some)

    def keeps(name: str) -> bool:
        return "_sync" in name or name == "copies: set_is_last_backward"

    return [
        name
        for name, program in PROGRAMS.items()
        if not program.excludes & case.tags
        and program.needs <= direct
        and (not (case.hooks or case.steps_inside) or program.is_single)
        and (not program.copies or (case.annotation.copies is not None and _are_copies(case, program.copies)))
        # What the recompute of one backward leaves there belongs to a graph of which the memory ends with it.
        and not (program.shares_features and any(_has(case.tree, one, "side") for one in ("checkpoint", "reentrant")))
        and (not program.is_reentrant or is_sharded)
        and (not (program.is_of_one_root or (keeps(name) and is_partial)) or not has_parts)
    ]


def _are_copies(case: Case, which: str) -> bool:
    return case.annotation.mode == "replicate" or (case.annotation.mode in ("nested", "together") and which == "all")


def kinds_of(case: Case) -> Iterator[str]:
    """Yield all that the case is made of, as the table has it."""
    yield from (f"node: {name}" for name in set(kinds_in(case.tree)))
    for annotation in (case.annotation, case.other)[: 1 + case.is_annotated_anew]:
        yield f"annotation: {annotation.mode}"
        yield f"transport: {annotation.transport}"
        if annotation.copies is not None:
            fields = dataclasses.fields(annotation.copies)
            yield from (f"copies: {one.name}={getattr(annotation.copies, one.name)}" for one in fields)
    yield f"start: {case.annotation.start}"
    yield from (f"step: {name}" for name in set(case.programs))
    yield from {f"between: {name}" for actions in case.actions for name in actions}
    yield f"optimizer: {case.optimizer}, {case.speed}"
    yield f"clip: {case.clip}"
    yield f"gradients: {case.zero}"
    yield f"hooks: {case.hooks or 'none'}"
    yield f"world size: {case.world_size}"


def smaller(case: Case) -> Iterator[Case]:
    """Yield simpler cases, the simplest first."""
    but = functools.partial(dataclasses.replace, case)
    if len(case.programs) > 1:
        yield but(programs=case.programs[:1], actions=((),))
        yield but(programs=case.programs[1:], actions=case.actions[1:])
        yield but(programs=case.programs[:-1], actions=(*case.actions[:-2], ()))
    plainest = {"hooks": "", "clip": "none", "speed": "plain", "optimizer": "SGD", "zero": "to None"}
    plainest["actions"] = ((),) * len(case.programs)
    plainest["programs"] = ("plain",) * len(case.programs)
    yield from (but(**{name: value}) for name, value in plainest.items() if getattr(case, name) != value)
    annotation = {"start": "values", "share": 0.1, "transport": "process_group"}
    annotation |= {"mode": "root", "copies": None} if case.annotation.copies is None else {"copies": Copies()}
    for name, value in annotation.items():
        if getattr(case.annotation, name) != value:
            yield but(annotation=dataclasses.replace(case.annotation, **{name: value}))
    yield from (but(tree=tree) for tree in _smaller_trees(case.tree))


def _smaller_trees(tree: Spec) -> Iterator[Spec]:
    yield from tree.kids
    if tree.kind != "linear":
        yield Spec("linear", tree.uid)
    least = KINDS[tree.kind].least_kids
    for index, kid in enumerate(tree.kids):
        before, after = tree.kids[:index], tree.kids[index + 1 :]
        if len(tree.kids) > least:
            yield dataclasses.replace(tree, kids=before + after)
        for other in _smaller_trees(kid):
            yield dataclasses.replace(tree, kids=(*before, other, *after))
