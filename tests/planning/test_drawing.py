"""Plans as pictures: well-formed, of a limited size, with the numbers of the plan."""

from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from composable import ConfigError, CPUOffloadPolicy, MixedPrecisionPolicy, ShardPlan, plan
from composable.extras.drawing import Canvas, shortened
from composable.ground.names import bytes_text
from tests.models import Block, TinyGPT

SVG = "{http://www.w3.org/2000/svg}"


class Deep(nn.Module):
    """Linear layers of given widths, below a long name."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.a_name_that_is_far_longer_than_the_column_for_names = nn.Sequential(
            *(nn.Linear(one, one) for one in widths)
        )


def planned(*widths: int, **options: Any) -> ShardPlan:
    with torch.device("meta"):
        return plan(Deep(*widths), policy={nn.Linear}, **options)


def lines_of(picture: str) -> list[str]:
    """Return the lines of text of a picture, in order, and check that they are inside of it and not too small."""
    root = ElementTree.fromstring(picture)
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    assert root.attrib["viewBox"] == f"0 0 {width} {height}" and root.attrib["role"] == "img"
    assert [one.tag for one in root][:3] == [SVG + "title", SVG + "desc", SVG + "rect"]
    assert width == 1000 and height < 1700
    for one in root.iter(SVG + "rect"):
        assert float(one.attrib.get("x", 0)) + float(one.attrib["width"]) <= width + 0.01
    for one in root.iter(SVG + "text"):
        size = float(one.attrib["font-size"])
        assert size >= 11 and float(one.attrib["y"]) < height
        assert float(one.attrib["x"]) + 0.6 * size * len(one.text or "") <= width
    return [one.text or "" for one in root.iter(SVG + "text")]


@pytest.mark.parametrize(
    ("made", "handles"),
    [
        (planned(10, 11, 12, world_size=4), 3),
        (planned(*[64] * 100, world_size=1000, ranks_per_host=8), 1),
        (planned(*range(640, 740), world_size=1000, ranks_per_host=8), 24),
        (planned(*[64] * 4, world_size=4, replicas=2, ranks_per_host=4, strategy="HYBRID_SHARD"), 1),
        (planned(8, 16, world_size=2, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), 2),
        (planned(8, 16, world_size=2, offload_policy=CPUOffloadPolicy()), 2),
        (planned(8, world_size=1), 1),
        (plan(nn.ReLU(), world_size=2), 0),
    ],
)
def test_a_picture_has_the_numbers_of_the_plan_and_a_limited_size(made: ShardPlan, handles: int) -> None:
    picture = made.draw()
    lines = lines_of(picture)
    assert lines[:2] == [line.strip() for line in str(made).splitlines()[:2]]
    at_rest = made.bytes_per_rank_at_rest() + made.host_bytes_per_rank_at_rest()
    assert any(line.startswith(f"{bytes_text(at_rest)}: {bytes_text(made.shard_bytes)} parameters") for line in lines)
    assert any(line.startswith(f"{bytes_text(made.peak_bytes_per_rank())}: ") for line in lines)
    if made.hosts or made.world_size == 1:
        sent = made.expected_traffic()
        text = f"{bytes_text(sent.inside_bytes)} inside its host, {bytes_text(sent.between_bytes)} to other hosts; "
        assert any(line.startswith(text) for line in lines)
    names = lines[lines.index("Handles") : lines.index("Ranks")]
    assert len([line for line in names if line.startswith("Linear")]) == handles
    assert picture == made.draw()


def test_equal_handles_and_ranks_share_a_row_and_the_last_rank_has_its_own() -> None:
    made = planned(*[9] * 7, 12, world_size=4)
    lines = lines_of(made.draw())
    assert "Linear x 7, each" in lines and "Linear" in lines
    # 7 shards of 23 of 90 elements, of which two are padding, and one of 39 of 156.
    names = ["ranks 0-2", "3 ranks", "rank 3", "1 rank"]
    texts = ["800 B of parameters, 0 B of padding", "744 B of parameters, 56 B of padding"]
    assert set(lines[lines.index("Ranks") + 1 :]) >= {*names, *texts}


def test_padding_of_all_ranks_is_that_of_the_layout() -> None:
    for world_size in (1, 2, 3, 7, 64):
        layout = planned(12, world_size=world_size).handles[0].buffers[0].layout
        owned = [
            sum(b - a for a, b in (layout.local_range(span, rank) for span in layout.spans))
            for rank in range(world_size)
        ]
        assert layout.padding_by_rank() == [layout.shard_numel - numel for numel in owned]
        assert sum(layout.padding_by_rank()) == layout.padding_numel


def test_long_names_are_cut_in_the_middle() -> None:
    assert shortened("abcdefghij", 6 * 7.2) == "abc…ij"
    assert shortened("abcdefghij", 10 * 7.2) == "abcdefghij"
    (name,) = (line for line in lines_of(planned(8, world_size=2).draw()) if line.startswith("a_name"))
    assert "…" in name and name.endswith(".0")


def test_names_are_escaped() -> None:
    canvas = Canvas("a < b", 'a "quoted" & b')
    canvas.text(0, 20, "<&>", fill='"red"')
    root = ElementTree.fromstring(canvas.document(40))
    assert [one.text for one in root if one.text] == ["a < b", 'a "quoted" & b', "<&>"]
    assert root[-1].attrib["fill"] == '"red"'


def test_bytes_sent_are_left_out_where_hosts_are_not_known_and_states_are_those_asked_for() -> None:
    made = planned(8, 8, world_size=4)
    assert "not known: draw(ranks_per_host=8) says which ranks share a host" in lines_of(made.draw())
    assert [line for line in lines_of(made.draw(2)) if line.startswith("Sent")][-1] == "Sent in a step"
    assert made.draw(2) == made.on_hosts(2).draw() != made.draw(4)
    one = made.bytes_per_rank_at_rest(1, torch.bfloat16)
    assert f"{bytes_text(one)}: " in made.draw(optimizer_states=1, state_dtype=torch.bfloat16)


@pytest.mark.parametrize("options", [{"ranks_per_host": 3}, {"ranks_per_host": "2"}, {"optimizer_states": -1}])
def test_wrong_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is "):
        planned(8, world_size=4).draw(**options)


def test_blocks_of_a_model_are_named_by_their_range() -> None:
    lines = lines_of(plan(TinyGPT(layers=4), policy={Block}, world_size=2).draw())
    assert "blocks.[0-3]" in lines and "Block x 4, each" in lines and "(root)" in lines
