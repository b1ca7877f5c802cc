"""Which of a model's entries a call is about: its option ``names``."""

from collections.abc import Callable, Collection

from torch import nn

from composable.arguments import described
from composable.errors import ConfigError, place_of_rank
from composable.wording import list_text

__all__ = ["Names", "pick"]

# FQNs, or a function that says of an FQN whether it is wanted.
Names = Callable[[str], object] | Collection[str]


def pick(names: Names | None, known: Collection[str]) -> set[str]:
    """Return those of ``known`` that ``names`` wants; all where that is ``None``. Not collective.

    Raises:
        ConfigError: ``names`` is neither a function nor FQNs, has one that is not known, or wants none.
    """
    if names is None:
        return set(known)
    if callable(names) and not isinstance(names, type | nn.Module):
        picked = {fqn for fqn in known if names(fqn)}
    elif isinstance(names, Collection) and not isinstance(names, str | bytes):
        for name in names:
            if not isinstance(name, str):
                raise _not_names(name)
        picked = set(names)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(
                f"names has what the model does not have: {list_text(unknown)}",
                at=place_of_rank(),
                fix="pass FQNs as the model's state_dict() has them",
            )
    else:
        raise _not_names(names)
    if not picked:
        raise ConfigError(
            "names picks nothing of the model",
            at=place_of_rank(),
            fix=f"pick some of its entries: {list_text(known)}" if known else "leave names out: it has no entries",
        )
    return picked


def _not_names(value: object) -> ConfigError:
    return ConfigError(
        f"names is or holds {described(value)}",
        at=place_of_rank(),
        fix="pass a function of an FQN, such as lambda fqn: 'lora_' in fqn, or a list or set of FQNs",
    )
