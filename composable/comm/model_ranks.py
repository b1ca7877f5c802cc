"""The ranks that hold parts or copies of one model: those that average gradients, and those of tensor parallelism."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from composable.comm.mesh import group_of_rows
from composable.comm.ranks import Ranks
from composable.errors import ConfigError


@dataclass(frozen=True)
class ModelRanks:
    """All ranks that hold parts or copies of one model, each named by its place in ``everyone``.

    The *data place* of a rank is its place among the ranks with which it averages gradients. Tensor parallelism gives a
    rank peers with the same data place and other blocks: its *team*. Ranks that share the same blocks are a *column*,
    in which every team has one member.
    """

    everyone: Ranks  # All these ranks.
    others: tuple[Ranks, ...]  # The ranks along each mesh dim of tensor parallelism; mostly none.
    # For each rank of ``everyone``, its data place, and its places along ``others``.
    places: tuple[tuple[int, ...], ...] = field(repr=False)

    @staticmethod
    def of(data: Ranks, others: Sequence[Ranks]) -> "ModelRanks":
        """Return the ranks of ``data`` and ``others``. Collective over all of them, unless ``others`` adds none.

        Raises ``ConfigError`` on every rank if they are no grid of columns with the same number of ranks.
        """
        inside = set(data.numbers)
        others = [ranks for ranks in others if not inside.issuperset(ranks.numbers)]
        if not others:
            return ModelRanks(data, (), tuple((rank,) for rank in range(data.size)))
        rows = [data.numbers]
        for ranks in others:
            rows = sorted({row for told in ranks.objects(rows) for row in told})
        everyone = group_of_rows(rows, data.device)
        places = tuple(everyone.objects((data.rank, *(ranks.rank for ranks in others))))
        teams = [place[0] for place in places]
        if len(set(places)) < len(places) or {teams.count(team) for team in set(teams)} != {len(rows)}:
            raise ConfigError(
                f"the ranks that average gradients, {', '.join(str(list(row)) for row in rows)}, and those of tensor "
                "parallelism form no grid",
                fix="make one mesh of both: init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))",
            )
        return ModelRanks(everyone, tuple(others), places)

    @property
    def rank(self) -> int:
        """This rank's place in ``everyone``."""
        return self.everyone.rank

    @property
    def column(self) -> list[int]:
        """The ranks that share the same blocks as this rank, which is one of them."""
        return [index for index, place in enumerate(self.places) if place[1:] == self.places[self.rank][1:]]

    def team_of(self, rank: int) -> list[int]:
        """Return the ranks with the data place of ``rank``; it is one of them."""
        return [index for index, place in enumerate(self.places) if place[0] == self.places[rank][0]]

    def in_column(self, rank: int) -> int:
        """Return the member of the team of ``rank`` that is in this rank's column."""
        return self.places.index((self.places[rank][0], *self.places[self.rank][1:]))

    def places_along(self, splits: Sequence[Ranks], rank: int) -> tuple[int, ...]:
        """Return the places of ``rank`` along ``splits``, groups of this rank; ``rank`` may be in parallel groups."""
        known = {ranks.numbers: index for index, ranks in enumerate(self.others, 1)}
        return tuple(self.places[rank][known[ranks.numbers]] if ranks.numbers in known else 0 for ranks in splits)

    def givers(self, splits: Sequence[Ranks], rank: int) -> dict[tuple[int, ...], int]:
        """Return the member of the team of ``rank`` that gives it each block of a tensor, by places along ``splits``.

        That is ``rank`` itself where it has the block, else a near member.
        """

        def distance(other: int) -> tuple[int, int]:
            return sum(a != b for a, b in zip(self.places[rank], self.places[other])), other

        found: dict[tuple[int, ...], int] = {}
        for other in sorted(self.team_of(rank), key=distance):
            found.setdefault(self.places_along(splits, other), other)
        return found
