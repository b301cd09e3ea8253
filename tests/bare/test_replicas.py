"""Placement of replicas and the exact probability of recovery, against all sets of lost nodes, one by one."""

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest

from trainwright.spec.errors import InvalidSpec
from trainwright.spec.frequency import checkfreq_steps, steps_to_write
from trainwright.spec.replicas import (
    domains_of,
    group_sizes,
    is_spread,
    recovery_bound,
    recovery_probability,
    replica_groups,
    survives,
)

SIZES = [(nodes, replicas) for nodes in range(1, 17) for replicas in range(1, min(nodes, 5) + 1)]


def masks_of(groups: tuple[tuple[int, ...], ...]) -> list[int]:
    return [sum(1 << node for node in group) for group in groups]


@pytest.mark.parametrize(("nodes", "replicas"), SIZES)
def test_the_sum_is_what_counting_all_sets_gives(nodes: int, replicas: int) -> None:
    masks = masks_of(replica_groups(domains_of(nodes, 1), replicas))
    kept = [0] * (nodes + 1)
    for lost in range(1 << nodes):
        kept[lost.bit_count()] += all(lost & mask != mask for mask in masks)
    for count, ways in enumerate(kept):
        assert recovery_probability(nodes, replicas, count) == Fraction(ways, comb(nodes, count))


@pytest.mark.parametrize(
    ("lost", "exact", "bound"), [(2, 0.9333, 0.9333), (4, 0.6154, 0.6), (6, 0.2238, 0.0), (1, 1, 1)]
)
def test_published_figures_of_16_nodes(lost: int, exact: float, bound: float) -> None:
    assert float(recovery_probability(16, 2, lost)) == pytest.approx(exact, abs=5e-5)
    assert float(recovery_bound(16, 2, lost)) == pytest.approx(bound, abs=5e-5)


@pytest.mark.parametrize(("nodes", "replicas"), [(16, 2), (16, 4), (12, 3), (2048, 2)])
def test_the_papers_corollary_is_exact_for_few_lost_and_a_bound_for_more(nodes: int, replicas: int) -> None:
    for lost in range(min(nodes, 12) + 1):
        exact, bound = recovery_probability(nodes, replicas, lost), recovery_bound(nodes, replicas, lost)
        assert exact == bound if lost < 2 * replicas else exact > bound or exact == bound == 0


@pytest.mark.parametrize(("nodes", "replicas"), SIZES)
def test_groups_hold_each_node_once(nodes: int, replicas: int) -> None:
    groups = replica_groups(domains_of(nodes, 3), replicas)
    assert sorted(node for group in groups for node in group) == list(range(nodes))
    sizes = [len(group) for group in groups]
    assert min(sizes) >= replicas
    assert {size: sizes.count(size) for size in set(sizes)} == group_sizes(nodes, replicas)


def test_members_of_a_group_stand_in_different_domains_wherever_that_can_be() -> None:
    """Every way to spread 4 to 12 nodes over racks of one size, and uneven racks."""
    cases = [list(domains_of(nodes, rack)) for nodes in range(4, 13) for rack in range(1, nodes + 1)]
    cases += [[0, 0, 0, 1, 2, 3], [0, 1, 1, 1, 1, 2, 3, 4], [2, 0, 1, 0, 1, 2, 2], [5, 5, 9, 9]]
    seen = set()
    for domains in cases:
        for replicas in (2, 3):
            groups = replica_groups(domains, replicas)
            largest = max(domains.count(each) for each in domains)
            alone = all(len({domains[node] for node in group}) == len(group) for group in groups)
            # With more nodes in one domain than groups, two of them must meet in a group.
            assert alone == (largest <= len(groups))
            seen.add(alone)
            if alone:
                assert is_spread(groups, domains)
            for domain in set(domains):
                lost = {node for node, each in enumerate(domains) if each == domain}
                assert survives(groups, lost) or not is_spread(groups, domains)
    assert seen == {True, False}


def test_neighbours_in_a_rack_would_lose_their_state_together() -> None:
    domains = domains_of(16, 2)
    side_by_side = tuple(zip(range(0, 16, 2), range(1, 16, 2), strict=True))
    assert not is_spread(side_by_side, domains)
    assert not survives(side_by_side, {4, 5})
    assert all(survives(replica_groups(domains, 2), set(pair)) for pair in side_by_side)


def test_survival_counted_over_sets_equals_the_sum() -> None:
    groups = replica_groups(domains_of(10, 2), 3)
    kept = sum(survives(groups, frozenset(lost)) for lost in combinations(range(10), 5))
    assert recovery_probability(10, 3, 5) == Fraction(kept, comb(10, 5))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="replicas=3: must be from 1 to the 2 nodes"):
        recovery_probability(2, 3, 1)
    with pytest.raises(InvalidSpec, match="lost=17"):
        recovery_probability(16, 2, 17)
    with pytest.raises(InvalidSpec, match="must divide the 5 nodes"):
        recovery_bound(5, 2, 1)


def test_checkfreqs_rule_step_by_step() -> None:
    """Against the rule as the paper runs it: k from the profile, then 2 more while the overhead is above."""
    for whole_s in (0.5, 3.0, 30.0, 31.0):
        for blocked_s in (0.0, 0.0625, 0.25, 0.5):
            for step_s in (0.25, 1.0, 7.0):
                for bound in (0.01, 0.035, 0.2):
                    interval = 1
                    while interval * step_s < whole_s - blocked_s - 1e-12:
                        interval += 1
                    assert steps_to_write(whole_s, blocked_s, step_s) == interval
                    while blocked_s / (interval * step_s) > bound * (1 + 1e-12):
                        interval += 2
                    assert checkfreq_steps(whole_s, blocked_s, step_s, bound) == interval
