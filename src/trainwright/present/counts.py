"""A rank's counts for people: FLOPs, collectives, states, what is kept for backward, the peak, and whether the
planner's counts are the same."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType

from trainwright.present.parts import facts, headline, section, table
from trainwright.spec.counts import Counts, Inequality
from trainwright.spec.miniature import Change
from trainwright.spec.run import Run
from trainwright.spec.units import bytes_text

RULE = (
    "choices of experts are even: token t takes experts (t * top_k + c) mod X; other ranks send what this one does"
)

OF_A_CPU = (
    "kernels are a CPU's, which pads latent attention's values to the width of its keys and makes the loss wide: "
    "the most that is live is more than on the device that `memory` predicts"
)


def counts_view(
    run: Run,
    recorded: Mapping[int, Counts],
    found: Mapping[int, Sequence[Inequality]],
    stands_for: Mapping[int, int],
    changes: Sequence[Change],
    passes: int | None,
) -> RenderableType:
    """Every rank that was run."""
    title = f"{run.name} ({run.hash}): a step without numbers, {run.layout.world:,} ranks"
    rules = RULE if run.cluster.device.kind == "cpu" else f"{RULE}; {OF_A_CPU}"
    parts: list[RenderableType] = [headline(title, f"Rule: {rules}")]
    if changes:
        rows = [(field, f"{before} -> {after}") for field, before, after in changes]
        parts.append(section("Set aside, as the trainer doesn't do it", facts(rows)))
    for rank, counts in recorded.items():
        alike = [each for each, first in stands_for.items() if first == rank and each != rank]
        parts.append(_rank(counts, alike, passes))
        parts.append(_verdict(found[rank]))
    return Group(*parts)


def _rank(counts: Counts, alike: Sequence[int], passes: int | None) -> RenderableType:
    same = f"; ranks {', '.join(map(str, alike))} hold the same" if alike else ""
    how = "" if passes is None else f", extended from {passes} and {2 * passes} of each chunk"
    title = f"Rank {counts.rank} (pp {counts.pp_rank}), {counts.num_microbatches} microbatches{how}{same}"
    flops: Counter[tuple[str, str]] = Counter()
    for each in counts.flops:
        flops[each.part, each.phase] += each.flops
    phases = ("forward", "backward", "recompute", "update")
    flops_rows = [
        [part, *(f"{flops[part, phase]:,}" if flops[part, phase] else "-" for phase in phases)]
        for part in dict.fromkeys(part for part, _ in flops)
    ]
    message_rows = [
        [each.axis, each.operation, str(each.ranks), each.dtype, f"{each.bytes:,}", f"{each.count:,}"]
        for each in counts.collectives
    ]
    saved: Counter[str] = Counter()
    for each in counts.saved:
        saved[each.tensors] += each.bytes
    kept = [[tensors, f"{size:,}", bytes_text(size)] for tensors, size in saved.most_common()]
    states = [(name, f"{size:,} bytes ({bytes_text(size)})") for name, size in counts.states.items()]
    peak = "most live at a time" if passes is None else f"most live in {2 * passes} of each chunk"
    states.append((peak, f"{counts.peak_bytes:,} bytes ({bytes_text(counts.peak_bytes)})"))
    message_columns = [
        ("axis", "<"),
        ("operation", "<"),
        ("ranks", ">"),
        ("type", "<"),
        ("bytes", ">"),
        ("times", ">"),
    ]
    return Group(
        section(title, table([("FLOPs of", "<"), *((phase, ">") for phase in phases)], flops_rows)),
        section("Collectives and transfers", table(message_columns, message_rows)),
        section(
            "Kept from forward to backward, all microbatches",
            table([("tensors", "<"), ("bytes", ">"), ("", ">")], kept),
        ),
        section("States and peak", facts(states)),
    )


def _verdict(found: Sequence[Inequality]) -> RenderableType:
    if not found:
        return section("EQUAL to the planner's counts: FLOPs, collectives, states, kept bytes")
    rows = [[each.cause, f"{each.predicted:,}", f"{each.recorded:,}"] for each in found]
    columns = [("cause", "<"), ("planner", ">"), ("program", ">")]
    return section("NOT EQUAL to the planner's counts", table(columns, rows))
