import pickle

import pytest

from composable import ComposableError, ConfigError, DesyncError, StateDictError, UsageError
from composable.errors import SignatureError, located, place_of_rank

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
