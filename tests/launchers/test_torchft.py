"""Replica groups under torchft: one is killed and comes back. ``tools/torchft_kills.py`` does this for minutes."""

import importlib.util

import pytest

needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None,
    reason="torchft is not installed: pip install torchft==0.2.0 opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
)


@needs_torchft
@pytest.mark.parametrize(
    ("annotation", "transport"),
    [("fully_shard", "http"), ("fully_shard", "data"), ("fully_shard", "pg"), ("replicate", "http")],
)
def test_a_group_that_is_killed_comes_back_and_the_numbers_are_those_of_one_process(
    annotation: str, transport: str
) -> None:
    from tools.torchft_kills import drive

    seen = drive(annotation, 2 if transport == "pg" else 1, 10.0, 8.0, transport)
    assert seen["kills"] >= 1 and seen["steps"] > 100 and not any(seen["codes"]), seen
    assert seen["difference"] < 1e-6, seen
