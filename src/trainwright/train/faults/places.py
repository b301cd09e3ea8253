"""Which places of a node a run's ranks have after failures, and with how many dp replicas it goes on.

A place is a device of the node, or a share of its cores. One that has failed in `lemon_after` attempts is a
lemon: it wears out a run while others are well (Kokolis et al., arXiv:2410.21680 s4). It is left out at the next
start where the run's batch can be shared out over fewer replicas; the position in the data is a sample's number,
so that every sample is still taken once.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trainwright.spec.errors import InvalidSpec
from trainwright.spec.run import Run


def smaller(run: Run, most_ranks: int) -> Run | None:
    """The run with the most dp replicas that `most_ranks` can hold, the same global batch and all else; None where
    there is no such run."""
    per_replica = run.layout.world // run.layout.dp
    for dp in range(min(run.layout.dp, most_ranks // per_replica), 0, -1):
        try:
            return run.with_value("layout.dp", dp).check()
        except InvalidSpec:
            continue
    return None


@dataclass
class Places:
    """Of a node with a place for each rank of the run."""

    run: Run
    lemon_after: int
    excluded: set[int] = field(default_factory=set)
    failures: Counter[int] = field(default_factory=Counter)

    @property
    def free(self) -> list[int]:
        return [place for place in range(self.run.layout.world) if place not in self.excluded]

    def of(self, run: Run) -> list[int]:
        """The places of the ranks of the run, or of a smaller one, in their order."""
        return self.free[: run.layout.world]

    def failed(self, place: int) -> bool:
        """Count a failure; whether the place is a lemon by it."""
        self.failures[place] += 1
        return self.failures[place] >= self.lemon_after and place not in self.excluded

    def without(self, place: int) -> Run | None:
        """Leave a place out; the run that goes on, or None, and nothing is left out, where it can't do with fewer
        replicas."""
        run = smaller(self.run, len(self.free) - 1)
        if run is not None:
            self.excluded.add(place)
        return run

    def all_again(self) -> Run:
        """Give places that were left out another chance; one more failure of theirs takes it away."""
        for place in self.excluded:
            self.failures[place] = self.lemon_after - 1
        self.excluded.clear()
        return self.run


def visible_devices(named: str | None, places: list[int]) -> str:
    """What CUDA_VISIBLE_DEVICES is for these places of the devices that it names already."""
    devices = named.split(",") if named else None
    return ",".join(str(place) if devices is None else devices[place] for place in places)


def stages_of(run: Run) -> list[list[int]]:
    """Ranks that do the same work: those of a place in the pipeline."""
    return list(_by_stage(run).values())


def _by_stage(run: Run) -> Mapping[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rank, pp in _pp_of(run):
        found.setdefault(pp, []).append(rank)
    return found


def _pp_of(run: Run) -> Iterator[tuple[int, int]]:
    for rank in range(run.layout.world):
        yield rank, run.layout.coordinate(rank).pp
