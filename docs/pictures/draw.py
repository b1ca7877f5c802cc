"""Draws the pictures of the docs: ``python docs/pictures/draw.py`` writes them beside this file.

Numbers in them are those of the code: of plans, of layouts, and of the buckets of a model that is trained here.
"""

from itertools import pairwise
from pathlib import Path

import torch
from shapes import BLUE, FAINT, GREEN, GREY, ORANGE, PURPLE, RED, SKY, Picture
from torch import nn

from composable import plan, reduction_stats, replicate
from composable.ground.names import bytes_text
from composable.testing import simulate
from examples.gpt import GPT, Block, GPTSize

COLOURS = [BLUE, ORANGE, GREEN]


def draw_step() -> str:
    picture = Picture(
        "A training step of three handles, on one rank",
        "A handle is gathered just before its module runs, while the one before it computes. It is freed afterwards.",
        "In backward it is gathered again, and its gradients are reduced while the next module computes.",
    )
    unit, left, top = 62, 130, 150
    kinds = {"gather": SKY, "forward": BLUE, "backward": ORANGE, "reduce": PURPLE, "step": GREEN}
    boxes = [
        [("gather", 0, 1), ("forward", 1, 2), ("gather", 7, 8), ("backward", 9, 11), ("reduce", 11, 12)],
        [("gather", 1, 2), ("forward", 2, 3), ("gather", 5, 6), ("backward", 7, 9), ("reduce", 9, 10)],
        [("gather", 2, 3), ("forward", 3, 4), ("gather", 4, 5), ("backward", 5, 7), ("reduce", 7, 8)],
    ]
    for title, start, stop in (("forward", 0, 4), ("backward", 4, 12), ("optimizer", 12, 13.2)):
        picture.line(left + start * unit + 3, top - 22, left + stop * unit - 3, top - 22)
        picture.label(left + (start + stop) * unit / 2, top - 29, title, 13, weight="bold")
    for row, parts in enumerate(boxes):
        y = top + row * 56
        picture.text(24, y + 22, f"handle {row}", 13, weight="bold")
        picture.line(left, y + 17, left + 13.2 * unit, y + 17, "#d8dce1")
        for kind, start, stop in parts:
            picture.box(left + start * unit + 1, y, (stop - start) * unit - 2, 34, kinds[kind], kind)
            if kind in ("gather", "reduce"):
                picture.mark(left + start * unit + 8, y - 2, "1" if kind == "gather" else "2")
    picture.box(left + 12 * unit + 1, top, 1.2 * unit - 2, 146, kinds["step"], "step\non this\nrank's\nshards")
    axis = top + 176
    picture.arrow(left, axis, left + 13.2 * unit, axis)
    picture.text(24, axis + 4, "time", 13, FAINT)
    picture.line(left, top - 12, left, axis, FAINT, "3 3")
    picture.mark(left, axis, "4")
    for event in (1, 2, 4, 5, 7, 9, 11, 12):
        picture.mark(left + event * unit, axis, "3")
    points = [
        "Gather: how the shards of all ranks become the whole buffer. Around it: casts, copies from the host.",
        "GradientPath: how gradients become a shard of their mean. Around it: casts, hooks, a second mesh dim.",
        "StepListener: hears of each event of a step, such as FORWARD, GATHER, BACKWARD, REDUCE, ASSIGN.",
        "What goes together, such as a NestedReplica: said once, when a first forward shows which module is the root.",
    ]
    picture.text(24, axis + 44, "The four extension points of the engine, where features enter", 14, weight="bold")
    for number, text in enumerate(points, 1):
        picture.mark(33, axis + 44 + 25 * number, str(number))
        picture.text(52, axis + 48 + 25 * number, text, 13)
    return picture.document(axis + 168)


class Layer(nn.Module):
    """Three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.zeros(()))


def draw_handle() -> str:
    (handle,) = plan(Layer(), world_size=2).handles
    layout = handle.buffers[0].layout
    picture = Picture(
        "A handle: three parameters, one flat buffer, a shard on each of two ranks",
        f"{layout.numel} elements, of which {layout.padding_numel} is padding. Each rank keeps {layout.shard_numel}."
        " Here the cut falls between two rows of the weight.",
    )
    cell, left = 48, 112
    colours = {place: COLOURS[at] for at, span in enumerate(layout.spans) for place in range(span.start, span.stop)}
    x = left
    for at, span in enumerate(layout.spans):
        width = span.shape[1] if len(span.shape) == 2 else 1
        for place in range(span.numel):
            row, column = divmod(place, width)
            picture.box(x + column * cell, 112 + row * 26, cell, 26, COLOURS[at], str(span.start + place))
        picture.text(x, 102, f"{span.fqn} {list(span.shape)}", 13, weight="bold")
        elements = f"elements {span.start} to {span.stop - 1}" if span.numel > 1 else f"element {span.start}"
        picture.text(x, 240, elements, 12, FAINT)
        bounds = layout.bounds(span)
        picture.text(x, 257, f"rank 0 keeps {bounds[1]}, rank 1 {bounds[2] - bounds[1]}", 12, FAINT)
        x += width * cell + 130
    picture.text(x, 126, "The module sees these shapes", 13, FAINT)
    picture.text(x, 144, "while it is unsharded. They are", 13, FAINT)
    picture.text(x, 162, "views: nothing is copied.", 13, FAINT)
    cell = 48
    picture.text(24, 321, "buffer", 13, weight="bold")
    for place in range(layout.numel):
        text = str(place) if place in colours else "pad"
        picture.box(left + place * cell, 300, cell, 34, colours.get(place, GREY), text)
    for rank in range(2):
        part = layout.shard_of(rank)
        start, stop = left + part.start * cell + 10 * (2 * rank - 1), left + part.stop * cell + 10 * (2 * rank - 1)
        picture.arrow((start + stop) / 2 - 60, 400, (start + stop) / 2 - 60, 342, SKY)
        picture.text((start + stop) / 2 - 50, 376, "all-gather", 12)
        picture.arrow((start + stop) / 2 + 40, 342, (start + stop) / 2 + 40, 400, PURPLE)
        picture.text((start + stop) / 2 + 50, 376, "reduce-scatter", 12)
        for place in range(part.start, part.stop):
            text = str(place) if place in colours else "pad"
            picture.box(start + (place - part.start) * cell, 408, cell, 34, colours.get(place, GREY), text)
        picture.label((start + stop) / 2, 462, f"shard of rank {rank}: parameters, gradients, optimizer state", 13)
    return picture.document(486)


def draw_mesh() -> str:
    with torch.device("meta"):
        model = GPT(GPTSize(layers=24, width=2048, heads=16, context=1024))
    sizes = {"world_size": 4, "replicas": 2, "ranks_per_host": 4}
    made = plan(model, policy={Block}, strategy="HYBRID_SHARD", **sizes)
    traffic, flat = (
        made.expected_traffic(),
        plan(model, policy={Block}, world_size=8, ranks_per_host=4).expected_traffic(),
    )
    picture = Picture(
        "A mesh of two dims: shards in a host, copies across hosts",
        "Two hosts with four ranks each. Parameters are gathered in a host; only shards of gradients cross hosts.",
    )
    for copy in range(made.replicas):
        y = 122 + copy * 190
        picture.frame(110, y, 866, 96, f"host {copy}")
        for place in range(made.world_size):
            rank = copy * made.world_size + place
            picture.box(
                140 + place * 214, y + 20, 164, 56, [BLUE, ORANGE, GREEN, SKY][place], f"rank {rank}\nshard {place}", 14
            )
            if place:
                picture.arrow(140 + place * 214 - 46, y + 48, 140 + place * 214 - 4, y + 48, PURPLE, both=True)
    for place in range(made.world_size):
        picture.arrow(222 + place * 214, 202, 222 + place * 214, 328, RED, both=True)
    picture.text(24, 160, "mesh dim", 12, FAINT)
    picture.text(24, 178, '"replicate"', 13, weight="bold")
    picture.arrow(54, 190, 54, 380)
    picture.text(110, 436, "mesh dim", 12, FAINT)
    picture.text(166, 436, '"shard"', 13, weight="bold")
    picture.arrow(228, 432, 976, 432)
    share = bytes_text(traffic.inside_bytes), bytes_text(traffic.between_bytes), bytes_text(flat.between_bytes)
    for y, colour, text in (
        (466, PURPLE, f"all-gather and reduce-scatter, inside a host: a rank sends {share[0]} in a step"),
        (
            490,
            RED,
            f"all-reduce of gradient shards, between hosts: a rank sends {share[1]}; without copies {share[2]}",
        ),
    ):
        picture.arrow(110, y - 4, 150, y - 4, colour, both=True)
        picture.text(162, y, text, 13)
    picture.text(162, 513, f"Numbers of a GPT with {made.numel / 1e9:.1f} billion parameters in float32.", 12, FAINT)
    return picture.document(534)


def buckets_of_training(rank: int) -> list[tuple[tuple[str, ...], int]]:
    model = nn.Sequential(*(nn.Linear(384, 384) for _ in range(4)))
    replicate(model)
    for _ in range(2):  # The first backward shows in which order gradients arrive.
        model(torch.ones(1, 384)).sum().backward()
    stats = reduction_stats(model)
    return list(zip(stats.bucket_fqns, stats.bucket_bytes, strict=True))


def draw_bucket() -> str:
    buckets = simulate(2, buckets_of_training)[0]
    picture = Picture(
        "Buckets of replicate: gradients are averaged while backward still runs",
        "A gradient is copied into its bucket when it arrives. A full bucket is all-reduced while other layers run.",
        "Afterwards the gradient of each parameter, param.grad, is a view of its bucket.",
    )
    unit, left = 165, 150
    order = [fqn for fqns, _ in buckets for fqn in fqns]
    layers = list(dict.fromkeys(fqn.split(".")[0] for fqn in order))
    picture.text(24, 146, "backward", 13, weight="bold")
    for at, layer in enumerate(layers):
        picture.box(left + at * unit, 122, unit - 6, 40, ORANGE, f"layer {layer}", 13)
    width = (unit * len(layers) - 30) / len(order)
    x = left
    picture.text(24, 258, "buckets", 13, weight="bold")
    picture.text(24, 356, "all-reduce", 13, weight="bold")
    for number, (fqns, size) in enumerate(buckets):
        start = x
        for fqn in fqns:
            end = left + (layers.index(fqn.split(".")[0]) + 1) * unit - 10
            picture.arrow(end - (16 if fqn.endswith("bias") else 0), 164, x + width / 2, 230, FAINT)
            picture.box(x, 232, width, 44, COLOURS[2 * number], fqn, 13)
            x += width
        picture.label((start + x) / 2, 296, f"bucket {number}: {bytes_text(size)}", 13)
        full = left + (layers.index(fqns[-1].split(".")[0]) + 1) * unit
        picture.line(full, 118, full, 372, COLOURS[2 * number], "3 3")
        picture.box(full + 4, 332, min(unit * 1.2, 972 - full), 40, PURPLE, f"bucket {number}", 13)
        x += 30
    picture.arrow(left, 402, 976, 402)
    picture.text(24, 406, "time", 13, FAINT)
    picture.text(
        left,
        430,
        "A dashed line: the bucket is full on this rank. All ranks send buckets in the same order.",
        12,
        FAINT,
    )
    return picture.document(450)


def draw_checkpoint() -> str:
    layouts = [plan(nn.Linear(8, 12), world_size=ranks).handles[0].buffers[0].layout for ranks in (3, 2)]
    picture = Picture(
        "A checkpoint moves from 3 ranks to 2",
        "It holds each parameter under its plain name, in its full shape. A rank that loads reads the pieces it owns.",
    )
    left, scale, numel = 130, 7.8, layouts[0].spans[-1].stop
    rows = [(112, "saved by"), (300, "loaded by")]
    for layout, (y, title) in zip(layouts, rows, strict=True):
        picture.text(24, y + 18, title, 13, weight="bold")
        picture.text(24, y + 35, f"{layout.world_size} ranks", 13)
        for rank in range(layout.world_size):
            part = layout.shard_of(rank)
            stop = min(part.stop, numel)
            text = f"rank {rank}: elements {part.start} to {stop - 1}"
            picture.box(left + part.start * scale, y, (stop - part.start) * scale, 46, COLOURS[rank], text, 13)
    picture.text(24, 228, "checkpoint", 13, weight="bold")
    for span in layouts[0].spans:
        picture.box(left + span.start * scale, 206, span.numel * scale, 46, GREY, f"{span.fqn} {list(span.shape)}", 13)
    for layout, (start, stop) in zip(layouts, ((160, 204), (298, 254)), strict=True):
        cuts = sorted({0, numel, *(layout.shard_of(rank).start for rank in range(layout.world_size))})
        cuts = sorted({*cuts, *(span.start for span in layout.spans)})
        for one, other in pairwise(cuts):
            middle = left + (one + other) / 2 * scale
            picture.arrow(middle, start, middle, stop) if start < stop else picture.arrow(middle, stop, middle, start)
    for y, layout in ((384, layouts[0]), (404, layouts[1])):
        bounds = ", ".join(f"{span.fqn} {layout.bounds(span)}" for span in layout.spans)
        picture.text(left, y, f"bounds on {layout.world_size} ranks, in elements of each parameter: {bounds}", 13)
    return picture.document(428)


def draw_plan() -> str:
    with torch.device("meta"):
        model = GPT(GPTSize(layers=24, width=2048, heads=16, context=1024))
    return plan(model, policy={Block}, world_size=64, ranks_per_host=8).draw()


def pictures() -> dict[str, str]:
    """Return the text of each file, by its name."""
    made = (draw_step, draw_handle, draw_mesh, draw_bucket, draw_checkpoint, draw_plan)
    return {f"{draw.__name__.removeprefix('draw_')}.svg": draw() for draw in made}


if __name__ == "__main__":
    for name, text in pictures().items():
        Path(__file__).with_name(name).write_text(text, encoding="utf-8")
