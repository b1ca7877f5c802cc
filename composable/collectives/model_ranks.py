"""All ranks that hold parts or copies of one model: those of its annotations, with those of tensor parallelism beside.

Ranks that average gradients know each other by their *data place*. Tensor parallelism gives each of them peers with
the same data place and other blocks: a *team*. Seen from any rank, a team has one member in each *column*, the ranks
that have the same blocks between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from composable.collectives.mesh import group_of_rows
from composable.collectives.ranks import Ranks
from composable.errors import ConfigError, place_of_rank

__all__ = ["ModelRanks"]


@dataclass(frozen=True)
class ModelRanks:
    """All ranks of a model, and where each is among them. Ranks are named by their place in ``everyone``.

    Attributes:
        everyone: All of them.
        data: Those of the annotations, in this rank's column.
        others: Those along each mesh dim of tensor parallelism; mostly none.
        places: Of each of ``everyone`` the place in ``data``, and the places along ``others``.
    """

    everyone: Ranks
    data: Ranks
    others: tuple[Ranks, ...] = ()
    places: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @staticmethod
    def of(data: Ranks, others: Sequence[Ranks]) -> "ModelRanks":
        """Return the ranks of both. Collective over all of them, unless ``others`` adds none.

        Raises:
            ConfigError: On every rank: they are no grid, of columns with the same number of ranks.
        """
        inside = set(data.numbers)
        others = [ranks for ranks in others if not inside.issuperset(ranks.numbers)]
        if not others:
            return ModelRanks(data, data)
        rows = [data.numbers]
        for ranks in others:
            rows = sorted({row for told in ranks.objects(rows) for row in told})
        everyone = group_of_rows(rows, data.device)
        places = tuple(everyone.objects((data.rank, *(ranks.rank for ranks in others))))
        teams = [place[0] for place in places]
        if len(set(places)) < len(places) or {teams.count(team) for team in set(teams)} != {len(rows)}:
            raise ConfigError(
                f"the ranks that average gradients, {', '.join(str(list(row)) for row in rows)}, and those of tensor "
                "parallelism are no grid",
                at=place_of_rank(),
                fix="make one mesh of both: init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))",
            )
        return ModelRanks(everyone, data, tuple(others), places)

    @property
    def rank(self) -> int:
        """This rank's place in ``everyone``."""
        return self.everyone.rank

    @property
    def column(self) -> list[int]:
        """The ranks that have the same blocks as this one between them."""
        if not self.others:
            return list(range(self.everyone.size))
        return [index for index, place in enumerate(self.places) if place[1:] == self.places[self.rank][1:]]

    def team_of(self, rank: int) -> list[int]:
        """Return the ranks with the data place of ``rank``; it is one of them."""
        if not self.others:
            return [rank]
        return [index for index, place in enumerate(self.places) if place[0] == self.places[rank][0]]

    def in_column(self, rank: int) -> int:
        """Return which of the team of ``rank`` is in this rank's column."""
        if not self.others:
            return rank
        return next(one for one in self.team_of(rank) if self.places[one][1:] == self.places[self.rank][1:])

    def places_along(self, splits: Sequence[Ranks], rank: int) -> tuple[int, ...]:
        """Return where a rank is along groups that this rank is in; the rank itself may be in others along the same."""
        known = {ranks.numbers: index for index, ranks in enumerate(self.others, 1)}
        return tuple(self.places[rank][known[ranks.numbers]] if ranks.numbers in known else 0 for ranks in splits)

    def givers(self, splits: Sequence[Ranks], rank: int) -> dict[tuple[int, ...], int]:
        """Return who in the team of ``rank`` gives it each block of a tensor, by its places along ``splits``.

        Itself where it has the block, else one that is near.
        """
        own = self.places[rank] if self.others else ()

        def distance(other: int) -> tuple[int, int]:
            return sum(a != b for a, b in zip(own, self.places[other] if self.others else ())), other

        found: dict[tuple[int, ...], int] = {}
        for other in sorted(self.team_of(rank), key=distance):
            found.setdefault(self.places_along(splits, other), other)
        return found
