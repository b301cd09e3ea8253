"""Which nodes hold copies of one another's state, and how likely it is that no state is lost (GEMINI, Wang et al.,
SOSP 2023, s4): the memory tier of a checkpoint.

Nodes stand in groups of m, and each member of a group holds the state of all of its members in its memory, so that
a state is lost where a whole group is. If k of N nodes are lost at once, each set of k as likely as any other, the
sets that hold no whole group are counted, by inclusion and exclusion over the groups that they may hold:

    P = sum over j of (-1)^j C(N/m, j) C(N - jm, k - jm) / C(N, k)

The paper's corollary, max(0, 1 - (N/m) C(N-m, k-m) / C(N, k)), is the same below k = 2m, and less above. Where m
does not divide N, some groups are larger, and the sum goes over both sizes.

Nodes that share a rack, a power feed or a switch are lost together, so members of a group stand in different
ones: nodes are taken in the order of their domains and dealt out to the groups in turn. Two members of one group
are then as many nodes apart as there are groups, so that no domain has two of them unless it has more nodes than
there are groups; and then no grouping could do without.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import comb

from trainwright.spec.errors import reject


def replica_groups(domain_of_node: Sequence[int], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Groups of `replicas` nodes, or of more where that leaves nodes over; each node is in one of them.
    `domain_of_node` says by number what each node is lost together with."""
    _require_nodes(len(domain_of_node), replicas)
    ordered = sorted(range(len(domain_of_node)), key=lambda node: (domain_of_node[node], node))
    count = len(ordered) // replicas
    return tuple(tuple(sorted(ordered[first::count])) for first in range(count))


def domains_of(num_nodes: int, nodes_per_domain: int) -> tuple[int, ...]:
    """Domains of nodes that are numbered from one domain to the next."""
    return tuple(node // nodes_per_domain for node in range(num_nodes))


def is_spread(groups: Sequence[Sequence[int]], domain_of_node: Sequence[int]) -> bool:
    """Whether the loss of any one domain leaves each group a member."""
    return all(len({domain_of_node[node] for node in group}) > 1 for group in groups)


def survives(groups: Sequence[Sequence[int]], lost: frozenset[int] | set[int]) -> bool:
    """Whether every group keeps a member when the nodes of `lost` are gone."""
    return not any(lost.issuperset(group) for group in groups)


def group_sizes(num_nodes: int, replicas: int) -> dict[int, int]:
    """How many groups of each size `replica_groups` makes."""
    _require_nodes(num_nodes, replicas)
    count = num_nodes // replicas
    size, larger = divmod(num_nodes, count)
    return {size: count - larger, **({size + 1: larger} if larger else {})}


def recovery_probability(num_nodes: int, replicas: int, lost: int) -> Fraction:
    """That no state is lost with `lost` nodes, chosen at random: exact."""
    if not 0 <= lost <= num_nodes:
        reject("lost", lost, f"must be from 0 to the {num_nodes} nodes that there are")
    left = {0: 1}
    for size, count in group_sizes(num_nodes, replicas).items():
        # Sets that hold these groups whole, counted with their sign by the nodes that that takes.
        most = min(count, lost // size)
        held = {size * number: (-1) ** number * comb(count, number) for number in range(most + 1)}
        product: dict[int, int] = {}
        for one, ways in left.items():
            for other, more in held.items():
                product[one + other] = product.get(one + other, 0) + ways * more
        left = product
    sets = sum(ways * comb(num_nodes - nodes, lost - nodes) for nodes, ways in left.items() if nodes <= lost)
    return Fraction(sets, comb(num_nodes, lost))


def recovery_bound(num_nodes: int, replicas: int, lost: int) -> Fraction:
    """The paper's corollary, a lower bound, where `replicas` divides the nodes."""
    if num_nodes % replicas:
        reject("replicas", replicas, f"must divide the {num_nodes} nodes in the paper's corollary")
    if lost < replicas:
        return Fraction(1)
    missed = Fraction(comb(num_nodes - replicas, lost - replicas), comb(num_nodes, lost))
    return max(Fraction(0), 1 - num_nodes // replicas * missed)


def _require_nodes(num_nodes: int, replicas: int) -> None:
    if not 1 <= replicas <= num_nodes:
        reject("replicas", replicas, f"must be from 1 to the {num_nodes} nodes that there are")
