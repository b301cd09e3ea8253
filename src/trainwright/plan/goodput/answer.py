"""A run with failures, judged: three ways to save side by side, in closed form and simulated, and curves."""

import math

import numpy as np

from trainwright.plan.goodput.closed_forms import (
    complete,
    failures_alone,
    first_order,
    first_order_holds,
    lost_s,
    mttf_s,
)
from trainwright.plan.goodput.intervals import best_s, best_steps, daly_s, exact_s, young_s
from trainwright.plan.goodput.savings import (
    failures_per_node_day,
    nodes_of,
    nodes_per_rack,
    recovery_of,
    saved_bytes,
    savings,
    spares,
)
from trainwright.plan.goodput.simulation import play
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.frequency import checkfreq_steps
from trainwright.spec.goodput import (
    Change,
    Curve,
    Goodput,
    GoodputQuestion,
    Judged,
    LostNodes,
    MttfRow,
    Placement,
    PublishedFailures,
    Simulated,
)
from trainwright.spec.replicas import (
    domains_of,
    group_sizes,
    is_spread,
    recovery_bound,
    recovery_probability,
    replica_groups,
)
from trainwright.spec.run import Run
from trainwright.spec.saving import Saving, SavingKind
from trainwright.spec.units import SECONDS_PER_DAY

MOST_TURNS = 200_000
"""Failures of a run that are simulated at most."""
LEAST_PLAYED = 0.01
"""Share of time below which nothing is simulated: the run gets nowhere."""
CHECKFREQ_BOUND = 0.035
"""CheckFreq's own (FAST 2021 s4.2)."""
LEMONS_OUT = math.log(1 - 0.04) / math.log(1 - 0.14)
"""Failures that are left without lemon nodes: of jobs of 512 GPUs and more, 14% failed before and 4% after
(arXiv:2410.21680); a job's chance to end well falls exponentially with the rate."""
INTERVAL_POINTS, INTERVAL_REACH = 61, 30.0
LARGEST_DEVICES = 131_072
MOST_LOST = 8


def goodput(run: Run, step_s: float, question: GoodputQuestion, published: PublishedFailures) -> Goodput:
    """What failures cost a run whose step takes `step_s`. Raises `InvalidSpec` where the cluster doesn't know its
    rate of failures."""
    cluster, devices = run.cluster, run.layout.world
    rate, nodes, num_bytes = (
        failures_per_node_day(cluster),
        nodes_of(cluster, devices),
        saved_bytes(run.model, run.recipe),
    )
    mean_s, recovery = mttf_s(rate, nodes), recovery_of(cluster)
    ways = savings(cluster, num_bytes, devices, question.replicas)
    in_repair = nodes * rate * recovery.repair_s / SECONDS_PER_DAY
    notes = []
    if in_repair > nodes:
        notes.append(
            f"{in_repair:,.0f} nodes would be in repair at a time, of {nodes:,}: such a run comes nowhere"
        )
    if len(ways) == 2:
        notes.append(f"no memory tier: {question.replicas} replicas need as many nodes and a network")
    return Goodput(
        run_name=run.name,
        device=cluster.device.name,
        devices=devices,
        nodes=nodes,
        failures_per_node_day=rate,
        failures_source=_source(cluster, "failures_per_device_day"),
        recovery=recovery,
        recovery_sources={name: _source(cluster, f"recovery.{name}") for name in type(recovery).model_fields},
        mttf_s=mean_s,
        step_s=step_s,
        useful_s=question.useful_s,
        saved_bytes=num_bytes,
        storage_bytes_per_s=nodes * recovery.storage_bytes_per_s,
        usd_per_device_hour=cluster.usd_per_device_hour,
        spares=spares(in_repair),
        nodes_in_repair=in_repair,
        judged=tuple(_judged(run, saving, mean_s, step_s, question) for saving in ways),
        placement=_placement(cluster, nodes, question.replicas) if len(ways) > 2 else None,
        mttf=_mttf(cluster, devices, published),
        mttf_source=published.source,
        changes=_changes(cluster, num_bytes, devices, question.replicas),
        over_interval=_over_interval(ways, mean_s),
        over_devices=_over_devices(cluster, num_bytes, devices, question.replicas),
        notes=tuple(notes),
    )


def _source(cluster: ClusterSpec, field: str) -> str:
    entry = cluster.provenance_of(field)
    return "" if entry is None else f"{entry.kind}: {entry.source}"


def _judged(run: Run, saving: Saving, mean_s: float, step_s: float, question: GoodputQuestion) -> Judged:
    steps, notes = _steps(run, saving, mean_s, step_s, question.interval_s)
    interval_s = steps * step_s
    ratio, near = complete(saving, mean_s, interval_s), first_order(saving, mean_s, interval_s)
    holds = first_order_holds(saving, mean_s, interval_s)
    if not holds:
        off = f", {near / ratio - 1:+.1%} off" if ratio > 0 else ""
        notes.append(f"the first order is out of its range{off}: failures and saves take too much of the time")
    simulated = None
    turns = question.useful_s / max(ratio, LEAST_PLAYED) / mean_s
    if ratio < LEAST_PLAYED:
        notes.append(f"not simulated: less than {LEAST_PLAYED:.0%} of the time counts, the run gets nowhere")
    elif turns > MOST_TURNS:
        notes.append(f"not simulated: {turns:,.0f} failures, more than {MOST_TURNS:,}; ask for fewer --days")
    else:
        simulated = _simulated(saving, mean_s, interval_s, question)
    return Judged(
        saving=saving,
        interval_s=interval_s,
        interval_steps=steps,
        storage_every=saving.storage_every(interval_s),
        checkfreq_steps=checkfreq_steps(
            saving.blocked_s + (saving.memory_durable_s if saving.kind == "memory" else saving.durable_s),
            saving.blocked_s,
            step_s,
            CHECKFREQ_BOUND,
        ),
        young_s=young_s(mean_s, saving.blocked_s),
        daly_s=daly_s(mean_s, saving.blocked_s),
        exact_s=exact_s(mean_s, saving.blocked_s),
        failures_alone=failures_alone(saving, mean_s, interval_s),
        first_order=near,
        first_order_holds=holds,
        complete=ratio,
        lost_s=lost_s(saving, mean_s, interval_s),
        simulated=simulated,
        notes=tuple(notes),
    )


def _steps(run: Run, saving: Saving, mean_s: float, step_s: float, asked_s: float | None) -> tuple[int, list[str]]:
    """Steps between two saves: as asked, as the run says of its own way to save, or the best."""
    said = run.checkpoint
    is_own = said is not None and said.asynchronous == (saving.kind != "synchronous") and saving.kind != "memory"
    if asked_s is not None:
        steps = max(1, round(asked_s / step_s))
    elif said is not None and is_own and said.every_steps is not None:
        steps = said.every_steps
    else:
        return best_steps(saving, mean_s, step_s), []
    least = math.ceil(saving.least_interval_s / step_s - 1e-9)
    if steps < least:
        return least, [f"a save takes longer than {steps:,} step(s): {least:,} taken"]
    return steps, []


def _simulated(saving: Saving, mean_s: float, interval_s: float, question: GoodputQuestion) -> Simulated:
    seen = play(saving, mean_s, interval_s, question.useful_s, runs=question.runs, seed=question.seed)
    wall_s = float(seen.wall_s.mean())
    spread = float(seen.wall_s.std(ddof=1)) / math.sqrt(question.runs)
    p10, p50, p90 = (float(each) for each in np.quantile(seen.wall_s, (0.1, 0.5, 0.9)))
    strikes = int(seen.strikes.sum())
    return Simulated(
        runs=question.runs,
        seed=question.seed,
        ettr=question.useful_s / wall_s,
        ettr_error=question.useful_s / wall_s**2 * spread,
        failures=float(seen.failures.mean()),
        lost_s=float(seen.lost_s.sum()) / strikes if strikes else 0.0,
        wall_s={"p10": p10, "p50": p50, "p90": p90},
    )


def _placement(cluster: ClusterSpec, nodes: int, replicas: int) -> Placement:
    rack = nodes_per_rack(cluster)
    domains = domains_of(nodes, rack)
    groups = replica_groups(domains, replicas)
    divides = nodes % replicas == 0
    return Placement(
        replicas=replicas,
        groups=group_sizes(nodes, replicas),
        nodes_per_rack=rack,
        is_spread=is_spread(groups, domains),
        lost=tuple(
            LostNodes(
                nodes=lost,
                recovered=float(recovery_probability(nodes, replicas, lost)),
                bound=float(recovery_bound(nodes, replicas, lost)) if divides else None,
            )
            for lost in range(1, min(MOST_LOST, nodes) + 1)
        ),
    )


def _mttf(cluster: ClusterSpec, devices: int, published: PublishedFailures) -> tuple[MttfRow, ...]:
    points = {each.devices: each for each in published.mttf}
    rate = failures_per_node_day(cluster) / cluster.node.devices
    line = published.failures_per_1000_node_days / 1000 / published.devices_per_node
    sizes = sorted({8 * 2**power for power in range(15)} | {devices, *points})
    return tuple(
        MttfRow(
            devices=size,
            mttf_s=mttf_s(rate, size),
            published_line_s=mttf_s(line, size),
            published=points.get(size),
        )
        for size in sizes
    )


def _changes(cluster: ClusterSpec, num_bytes: float, devices: int, replicas: int) -> tuple[Change, ...]:
    """The best way to save if one thing were otherwise, each at its own best interval."""
    recovery, rate = recovery_of(cluster), cluster.failures_per_device_day
    assert rate is not None
    others = [
        ("as it is", {}),
        (
            f"without lemon nodes, if they make as many failures as on RSC-1 ({LEMONS_OUT:.0%} stay)",
            {"failures_per_device_day": rate * LEMONS_OUT},
        ),
        ("half the failures", {"failures_per_device_day": rate / 2}),
        ("failures noticed in half the time", {"recovery": recovery.changed(detect_s=recovery.detect_s / 2)}),
        ("restarts in half the time", {"recovery": recovery.changed(restart_s=recovery.restart_s / 2)}),
        (
            "storage of twice the bandwidth",
            {"recovery": recovery.changed(storage_bytes_per_s=2 * recovery.storage_bytes_per_s)},
        ),
    ]
    return tuple(
        Change(text=text, ettr=max(_best(cluster.changed(**fields), num_bytes, devices, replicas).values()))
        for text, fields in others
    )


def _best(cluster: ClusterSpec, num_bytes: float, devices: int, replicas: int) -> dict[SavingKind, float]:
    """Of each way to save, at its best interval."""
    mean_s = mttf_s(failures_per_node_day(cluster), nodes_of(cluster, devices))
    ways = savings(cluster, num_bytes, devices, replicas)
    return {each.kind: complete(each, mean_s, best_s(each, mean_s)) for each in ways}


def _over_interval(ways: tuple[Saving, ...], mean_s: float) -> Curve:
    """About the best intervals, evenly by ratio; where a save has no time to end, nothing."""
    best = [best_s(saving, mean_s) for saving in ways]
    low, high = math.log(min(best) / INTERVAL_REACH), math.log(max(best) * INTERVAL_REACH)
    seconds = [math.exp(low + (high - low) * at / (INTERVAL_POINTS - 1)) for at in range(INTERVAL_POINTS)]
    return Curve(
        x=tuple(seconds),
        ettr={
            saving.kind: tuple(
                complete(saving, mean_s, each) if each >= saving.least_interval_s else 0.0 for each in seconds
            )
            for saving in ways
        },
    )


def _over_devices(cluster: ClusterSpec, num_bytes: float, devices: int, replicas: int) -> Curve:
    """From nodes enough for the replicas to the largest clusters, the same state at its best interval."""
    first = cluster.node.devices * replicas if cluster.fabric.nics_per_node else cluster.node.devices
    sizes = {first * 2**power for power in range(20) if first * 2**power <= LARGEST_DEVICES}
    sizes = {each for each in sizes | {devices} if each <= cluster.max_devices}
    found = {each: _best(cluster, num_bytes, each, replicas) for each in sorted(sizes)}
    kinds: tuple[SavingKind, ...] = ("synchronous", "asynchronous", "memory")
    ettr: dict[SavingKind, tuple[float, ...]] = {
        kind: tuple(each[kind] for each in found.values())
        for kind in kinds
        if all(kind in each for each in found.values())
    }
    return Curve(x=tuple(map(float, found)), ettr=ettr)
