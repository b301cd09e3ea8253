"""Failures, beside what was published: writes `benchmarks/goodput.md`, or prints its key figures with --json.

Llama 3's 54 days, mean times to failure of 8 to 131,072 GPUs, the simulation against the closed forms over those
sizes, GEMINI's placement counted set by set, and CheckFreq's rule. No figure is measured on a machine here.
"""

import argparse
import json
import math
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from trainwright.cli import catalogue, files
from trainwright.plan.goodput.answer import goodput
from trainwright.plan.goodput.closed_forms import complete, first_order, first_order_holds, mttf_s
from trainwright.plan.goodput.intervals import best_s
from trainwright.plan.goodput.simulation import play
from trainwright.plan.predict import predict
from trainwright.spec.frequency import checkfreq_steps
from trainwright.spec.goodput import Goodput, GoodputQuestion
from trainwright.spec.replicas import (
    domains_of,
    recovery_bound,
    recovery_probability,
    replica_groups,
    survives,
)
from trainwright.spec.saving import SAVING_TEXT, Saving
from trainwright.spec.units import SECONDS_PER_DAY, SECONDS_PER_HOUR

ROOT = Path(__file__).resolve().parents[1]
LLAMA = ROOT / "runs" / "llama-3.1-405b_h100x16384_8k.toml"
PUBLISHED_DAYS, PUBLISHED_FAILURES, PUBLISHED_ETTR = 54, 419, 0.90
RSC_1 = 6.50e-3
WAYS = (
    Saving(kind="synchronous", blocked_s=10.0, recover_s=300.0),
    Saving(kind="asynchronous", blocked_s=0.5, durable_s=20.0, recover_s=300.0),
    Saving(
        kind="memory",
        blocked_s=0.5,
        durable_s=300.0,
        recover_s=400.0,
        memory_share=0.95,
        memory_durable_s=2.0,
        memory_recover_s=60.0,
    ),
)


def llama() -> Goodput:
    """The whole budget of 15.6 T tokens."""
    said = files.read_run(LLAMA)
    run = said.changed(cluster=catalogue.with_recovery(said.cluster))
    predicted = predict(run)
    assert predicted.days is not None
    question = GoodputQuestion(useful_s=predicted.days * SECONDS_PER_DAY)
    return goodput(run, predicted.step_s, question, catalogue.published_failures())


def llama_lines(found: Goodput) -> list[str]:
    lines = [
        "## Llama 3: 54 days on 16,384 H100",
        "",
        f"Published (arXiv:2407.21783 s3.3.4): {PUBLISHED_FAILURES} unexpected interruptions in {PUBLISHED_DAYS} "
        f"days, more than {PUBLISHED_ETTR:.0%} of the time effective; 30.84 M GPU-hours for the whole training.",
        "",
        "The rate of failures is the paper's own; restarts and storage are assumptions of `data/recovery.toml`, "
        "and the step is the predicted one. What the published share says of them: failures may cost "
        f"{(1 - PUBLISHED_ETTR) * found.mttf_s / 60:.1f} minutes each.",
        "",
        "| saves | interval, s | ETTR, first order | complete | simulated | failures in 54 days | days, P10 "
        "| P50 | P90 | GPU-hours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found.judged:
        seen = each.simulated
        assert seen is not None
        days = [seen.wall_s[name] / SECONDS_PER_DAY for name in ("p10", "p50", "p90")]
        mean_days = found.useful_s / seen.ettr / SECONDS_PER_DAY
        cells = [
            SAVING_TEXT[each.saving.kind],
            f"{each.interval_s:.1f}",
            f"{each.first_order:.2%}",
            f"{each.complete:.2%}",
            f"{seen.ettr:.2%} ± {seen.ettr_error:.2%}",
            f"{seen.failures / mean_days * PUBLISHED_DAYS:.1f}",
            *(f"{day:.1f}" for day in days),
            f"{mean_days * 24 * found.devices / 1e6:.2f} M",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    days = found.useful_s / SECONDS_PER_DAY
    lines += [
        "",
        f"Without failures: {days:.1f} days, {days * 24 * found.devices / 1e6:.2f} M GPU-hours. Spares: "
        f"{found.spares} nodes. State: {found.saved_bytes / 1e12:.2f} TB, "
        f"{found.saved_bytes / found.devices / 1e6:.0f} MB a GPU.",
    ]
    return lines


def mttf_lines(found: Goodput) -> list[str]:
    lines = [
        "## Mean time to failure",
        "",
        f"{found.mttf_source}.",
        "",
        "| GPUs | at Llama 3's rate, h | at RSC-1's rate, h | published, h | published over the line |",
        "|---|---|---|---|---|",
    ]
    for row in found.mttf:
        point = row.published
        ratio = "" if point is None else f"{point.mttf_s / row.published_line_s:.2f} ({point.kind})"
        hours = "" if point is None else f"{point.mttf_s / SECONDS_PER_HOUR:,.2f}"
        lines.append(
            f"| {row.devices:,} | {row.mttf_s / SECONDS_PER_HOUR:,.2f} | "
            f"{row.published_line_s / SECONDS_PER_HOUR:,.2f} | {hours} | {ratio} |"
        )
    return lines


class Form(NamedTuple):
    """One way to save at one size, at its best interval."""

    devices: int
    saving: Saving
    interval_s: float
    first_order: float
    holds: bool
    complete: float
    simulated: float


def forms() -> list[Form]:
    found = []
    for devices in (8, 1024, 16384, 131_072):
        mean_s = mttf_s(RSC_1, devices / 8)
        for saving in WAYS:
            interval_s, work_s = best_s(saving, mean_s), 200 * mean_s
            seen = play(saving, mean_s, interval_s, work_s, runs=2000, seed=0)
            found.append(
                Form(
                    devices,
                    saving,
                    interval_s,
                    first_order(saving, mean_s, interval_s),
                    first_order_holds(saving, mean_s, interval_s),
                    complete(saving, mean_s, interval_s),
                    work_s / float(seen.wall_s.mean()),
                )
            )
    return found


def forms_lines() -> list[str]:
    lines = [
        "## Closed forms against the simulation",
        "",
        "RSC-1's rate, 200 mean times to failure of work, 2,000 runs, seed 0. Synchronous: writes of 10 s, "
        "restarts of 300 s. Asynchronous: copies of 0.5 s that storage has 20 s later. Memory: 95% of failures "
        "served from memory in 60 s, storage has a save 300 s later. Each at its best interval.",
        "",
        "| GPUs | saves | interval, s | first order | in its range | complete | simulated | first order off | "
        "complete off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in forms():
        lines.append(
            f"| {each.devices:,} | {each.saving.kind} | {each.interval_s:.1f} | {each.first_order:.4f} | "
            f"{'yes' if each.holds else 'no'} | {each.complete:.4f} | {each.simulated:.4f} | "
            f"{each.first_order / each.simulated - 1:+.2%} | {each.complete / each.simulated - 1:+.3%} |"
        )
    return lines


def sets_counted() -> int:
    """Sets of lost nodes of up to 16, for 2 to 4 replicas, each looked at; their counts equal the exact sum."""
    seen = 0
    for nodes in range(2, 17):
        for replicas in range(2, min(nodes, 4) + 1):
            masks = [sum(1 << node for node in group) for group in replica_groups(domains_of(nodes, 1), replicas)]
            kept = [0] * (nodes + 1)
            for lost in range(1 << nodes):
                kept[lost.bit_count()] += all(lost & mask != mask for mask in masks)
            for lost, ways in enumerate(kept):
                assert recovery_probability(nodes, replicas, lost) * math.comb(nodes, lost) == ways
            seen += 1 << nodes
    return seen


def placement_lines() -> list[str]:
    lines = [
        "## GEMINI's placement",
        "",
        "16 nodes, all sets of lost ones counted, members of a group in different racks of two.",
        "",
        "| replicas | nodes lost | sets | recovered | exact sum | the paper's bound |",
        "|---|---|---|---|---|---|",
    ]
    nodes = 16
    for replicas in (2, 4):
        groups = replica_groups(domains_of(nodes, 2), replicas)
        for lost in range(1, 9):
            sets = math.comb(nodes, lost)
            kept = sum(survives(groups, frozenset(each)) for each in combinations(range(nodes), lost))
            exact = recovery_probability(nodes, replicas, lost)
            assert exact * sets == kept
            lines.append(
                f"| {replicas} | {lost} | {sets:,} | {kept:,} | {float(exact):.4f} | "
                f"{float(recovery_bound(nodes, replicas, lost)):.4f} |"
            )
    return lines


def frequency_lines() -> list[str]:
    lines = [
        "## CheckFreq's rule",
        "",
        "Steps of 1 s between saves, by the seconds of a whole save and of its blocking part; bound 3.5%.",
        "",
        "| whole save, s | blocks 0.05 s | 0.2 s | 1 s |",
        "|---|---|---|---|",
    ]
    for whole_s in (1.0, 5.0, 20.0, 60.0):
        steps = [checkfreq_steps(whole_s, blocked_s, 1.0, 0.035) for blocked_s in (0.05, 0.2, 1.0)]
        lines.append(f"| {whole_s:g} | {' | '.join(map(str, steps))} |")
    return lines


def figures() -> dict[str, float]:
    """What the marks are about."""
    waits = llama().judged[0].simulated
    assert waits is not None
    days = llama().useful_s / waits.ettr / SECONDS_PER_DAY
    return {
        "complete_off": max(abs(each.complete / each.simulated - 1) for each in forms()),
        "first_order_off_in_range": max(
            abs(each.first_order / each.simulated - 1) for each in forms() if each.holds
        ),
        "sets_counted": sets_counted(),
        "llama_failures_in_54_days": waits.failures / days * PUBLISHED_DAYS,
        "llama_ettr": waits.ettr,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document, write nothing")
    if parser.parse_args().json:
        print(json.dumps(figures()))
        return
    found = llama()
    parts = [llama_lines(found), mttf_lines(found), forms_lines(), placement_lines(), frequency_lines()]
    head = ["# Failures: predicted beside published", "", "Written by `python benchmarks/goodput.py`."]
    text = "\n".join(line for part in [head, *parts] for line in (*part, "")).rstrip("\n") + "\n"
    (ROOT / "benchmarks" / "goodput.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
