import pickle

import pytest
import torch.distributed as dist

from composable import ComposableError, ConfigError, DesyncError, StateDictError, UsageError
from composable.errors import SignatureError, located, place_of_rank
from tests.world import on_ranks

KINDS = [
    (ConfigError, ValueError),
    (UsageError, RuntimeError),
    (DesyncError, RuntimeError),
    (StateDictError, ValueError),
    (StateDictError, RuntimeError),
    (SignatureError, ValueError),
    (SignatureError, TypeError),
]


def test_a_message_says_what_where_and_what_to_do_as_far_as_it_is_known() -> None:
    error = UsageError("parameter is on meta", at="rank 3, module 'layers.7'", fix="materialize the model")
    assert str(error) == ("parameter is on meta\n  at:  rank 3, module 'layers.7'\n  fix: materialize the model")
    assert str(ConfigError("world_size is 0")) == "world_size is 0"
    assert str(ConfigError("world_size is 0", fix="pass 1")) == "world_size is 0\n  fix: pass 1"


@pytest.mark.parametrize(("kind", "builtin"), KINDS)
def test_a_kind_can_be_caught_as_its_builtin_and_as_ours(kind: type[ComposableError], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)
    assert issubclass(kind, ComposableError)
    copy = pickle.loads(pickle.dumps(kind("what", at="where", fix="how")))  # between processes
    assert type(copy) is kind
    assert str(copy) == "what\n  at:  where\n  fix: how"


@on_ranks(2)
def test_an_error_names_the_rank_that_made_it_also_on_other_ranks() -> None:
    own, other = f"rank {dist.get_rank()}", f"rank {1 - dist.get_rank()}"
    assert str(UsageError("bad")) == f"bad\n  at:  {own}"
    assert UsageError("bad", at=f"{other}, module 'out'").at == f"{other}, module 'out'"
    with pytest.raises(UsageError) as caught, located("module 'out'"):
        raise UsageError("bad", at="parameter 'weight'")
    assert caught.value.at == f"{own}, module 'out', parameter 'weight'"
    error: ComposableError = pickle.loads(pickle.dumps(caught.value))
    error._rank = other
    assert pickle.loads(pickle.dumps(error)).at == f"{other}, module 'out', parameter 'weight'"


def test_located_adds_the_rank_where_none_is_named() -> None:
    for at, expected in (
        (None, "rank 1"),
        ("module 'out'", "rank 1, module 'out'"),
        ("rank 0, module 'out'", "rank 0, module 'out'"),
    ):
        with pytest.raises(ConfigError) as caught, located("rank 1"):
            raise ConfigError("bad", at=at, fix="good")
        assert (caught.value.at, caught.value.fix) == (expected, "good")
    with pytest.raises(KeyError), located("rank 1"):
        raise KeyError("x")


def test_a_process_outside_a_process_group_has_no_rank() -> None:
    assert place_of_rank() == "this process"
    with pytest.raises(ConfigError) as caught, located(place_of_rank()), located(place_of_rank()):
        raise ConfigError("bad", at="module 'out'")
    assert caught.value.at == "this process, module 'out'"
