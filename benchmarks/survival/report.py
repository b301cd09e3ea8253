"""The table of marks, from what the parts saw, and what stands behind some of its rows. A mark that was not run
says so; one that was not reached says NO with its figure. Notes say what a figure means where it is not plain.
"""

import os
import platform
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import goodput
from damage import HARMLESS, REJECTED, SILENT, UNNAMED
from forks import PHASES

PARTS = (
    "kills",
    "damage",
    "rival",
    "retention",
    "power",
    "storage",
    "memory",
    "hangs",
    "slow",
    "guards",
    "silent",
)
PARTS += ("reshard", "samples", "cheap", "goodput", "restarts", "chaos")
LEAST_KILLS = 50
"""In each phase."""

TOO_FEW = (statistics.StatisticsError, ValueError, IndexError, ZeroDivisionError)
"""What counting says where there is nothing to count."""

Records = list[dict[str, Any]]
Row = tuple[str, str, str, str, bool]
"""Guarantee, what was done, mark, figure, whether it is reached."""


def default_path() -> Path:
    return Path(__file__).parents[1] / f"survival_{hardware()}_{date.today()}.md"


def hardware() -> str:
    """`2-cores-amd-epyc-9b45`, say."""
    names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) or [platform.machine()]
    words = re.sub(r"\(.*?\)|processor|cpu|@.*", " ", names[0].lower())
    return f"{os.cpu_count()}-cores-{'-'.join(re.findall(r'[a-z0-9]+', words))}"


def of(records: Records, **wanted: Any) -> Records:
    return [each for each in records if all(each.get(key) == value for key, value in wanted.items())]


def total(records: Records, key: str) -> int:
    return sum(each[key] for each in records)


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _kills(seen: Records) -> Iterable[Row]:
    kills, runs = of(seen, kind="kill"), of(seen, kind="run")
    by_phase = Counter(each["phase"] for each in kills)
    least = min(by_phase[phase] for phase in PHASES)
    lost = sum(each["lost"] > 0 for each in kills)
    differ = sum(not (each["losses_equal"] and each["state_equal"]) for each in runs)
    done = f"{len(kills):,} kills of {len(runs)} runs at random instants, at least {least} in each phase"
    figure = f"{lost} lost a commit, {differ} runs differ in a bit"
    reached = len(kills) >= 1000 and least >= LEAST_KILLS and not lost and not differ
    yield (
        "nothing committed is lost; resume is invisible",
        done,
        "1,000 kills, 0 lost, 0 bits differ",
        figure,
        reached,
    )


def _damage(seen: Records) -> Iterable[Row]:
    ours = of(seen, whose="ours")
    numbers = Counter[str]()
    for each in ours:
        numbers[each["kind"]] += each["number"]
    silent = sum(each["number"] for each in ours if each["outcome"] == SILENT)
    unnamed = sum(each["number"] for each in ours if each["outcome"] == UNNAMED)
    done = ", ".join(f"{number:,} {kind}" for kind, number in numbers.items())
    figure = f"{silent} silent, {unnamed} without the file's name or the commit before"
    reached = (
        not silent and not unnamed and numbers["flip"] >= 10_000 and min(numbers["zero"], numbers["cut"]) >= 1000
    )
    yield "torn or corrupt is always noticed", done, "0 silent; the commit before is taken", figure, reached


def _retention(seen: Records) -> Iterable[Row]:
    acts = Counter[str]()
    for each in seen:
        acts.update(each.get("acts", {}))
    parts = [each for each in seen if "looks" in each]
    sequences, looks, unsafe = (total(parts, key) for key in ("sequences", "looks", "unsafe"))
    what = ", ".join(f"{number:,} {kind}" for kind, number in sorted(acts.items()))
    done = f"{sequences:,} sequences ({what}), {looks:,} looks"
    figure = f"{unsafe} moments without a whole commit"
    yield "always one good checkpoint", done, "10,000 sequences, >= 1", figure, sequences >= 10_000 and not unsafe


def _power(seen: Records) -> Iterable[Row]:
    saves, controls = of(seen, kind="save"), of(seen, kind="control")
    states, bad = total(saves, "states"), total(saves, "unsafe") + total(saves, "lost")
    caught = total(controls, "unsafe") + total(controls, "lost")
    done = f"{states:,} states of the disk between any two of {total(saves, 'calls')} calls of {len(saves)} saves"
    figure = f"{bad} without a commit (without fsync {caught:,} of {total(controls, 'states'):,})"
    yield "power loss", done, "every state loads a commit", figure, not bad and caught > 0


def _storage(seen: Records) -> Iterable[Row]:
    tried = [each for each in seen if "what" in each and "skipped" not in each]
    good = [
        each
        for each in tried
        if each["losses_equal"]
        and each["is_always_one"]
        and each["goes_on"]
        and each["told_after_saves"] == 1
        and each["is_rank_named"]
    ]
    done = ", ".join(dict.fromkeys(each["what"] for each in tried))
    waited = max(each["waited_s"] for each in tried)
    figure = f"{len(good)} of {len(tried)} so; a step waited {waited:.1f} s at the most"
    mark = "old commits intact, training goes on, told within one save"
    yield "full disk, EIO, hung storage", done, mark, figure, len(good) == len(tried) > 0


def _memory(seen: Records) -> Iterable[Row]:
    runs = [each for each in seen if "mib" in each]
    for ranks in sorted({each["ranks"] for each in runs}):
        own = of(runs, ranks=ranks)
        seconds = [value for each in own for value in each["seconds"]]
        lost = max(value for each in own for value in each["lost_steps"])
        reads = total(own, "from_storage")
        middle, high = quantile(seconds, 0.5), quantile(seconds, 0.95)
        back = statistics.median(value for each in own for value in each["back_s"])
        done = f"1 of {ranks} ranks killed {len(seconds) + reads} times, {own[0]['mib']:.0f} MiB a rank"
        figure = (
            f"p50 {middle:.2f} s, p95 {high:.2f} s, {reads} reads, {lost} lost; steps go on after {back:.1f} s"
        )
        mark = "p50 <= 0.5 s, p95 <= 1.0 s, 0 reads, <= 1 step"
        yield "recovery from memory", done, mark, figure, middle <= 0.5 and high <= 1.0 and not reads and lost <= 1


def _hangs(seen: Records) -> Iterable[Row]:
    healthy = [each for each in seen if "steps" in each]
    steps, kinds = total(healthy, "steps"), Counter(kind for each in healthy for kind, _ in each["told"])
    slow = kinds.pop("slow", 0)
    done = f"{steps:,} healthy steps of 2 ranks under the watchdog, with digests and saves"
    figure = f"{kinds.total()} told as hung, dead or corrupt, {slow} as slow"
    mark = "0 in 10,000 steps; <= 1 as slow"
    reached = steps >= 10_000 and not kinds.total() and slow <= steps / 10_000
    yield "no false alarm", done, mark, figure, reached


def _slow(seen: Records) -> Iterable[Row]:
    runs = [each for each in seen if "tried" in each]
    tried, found, wrong, false, counted = (
        total(runs, key) for key in ("tried", "found", "wrong", "alarms", "healthy_steps")
    )
    noise = f"the recorded noise of 4 ranks on this machine ({runs[0]['own_ms']:.0f} ms a step)"
    done = f"{tried:,} times one rank 1.5 times slow, on {noise}"
    figure = (
        f"{found / tried:.1%} within 20 steps, {wrong} wrong ranks, {false} alarms in {counted:,} healthy steps"
    )
    reached = found >= 0.99 * tried and false <= max(1, counted // 10_000)
    yield "slow rank named", done, "<= 20 steps, >= 99%; <= 1 in 10,000 steps", figure, reached


def _guards(seen: Records) -> Iterable[Row]:
    tried = [each for each in seen if "fault" in each]
    unmoved, repeated = total(tried, "is_unmoved"), total(tried, "is_repeated")
    deaths = total(tried, "has_died")
    done = (
        f"{len(tried)} at random rank and step, twice each, {deaths} with a death in between; skip and roll back"
    )
    figure = f"{unmoved} moved nothing, {repeated} twice the same"
    mark = "no update applied; same result twice"
    yield "NaN or spike", done, mark, figure, unmoved == repeated == len(tried) > 0


def _silent(seen: Records) -> Iterable[Row]:
    tried = of(seen, kind="replica")
    found = [each for each in tried if each["is_found"] and 0 <= each["after_steps"] <= 3]
    gone = total(tried, "is_gone")
    three = [each for each in found if each["replicas"] >= 3]
    named = total(three, "is_named")
    done = f"{len(tried)} flips in weights or moments of one of 2, 3 or 4 replicas, digests every 3 steps"
    left = len(tried) - len(found)
    figure = f"{len(found)} found in time, {named} of {len(three)} named"
    figure += f"; {gone} of {left} others rounded away by the next update, no bit differs" if left else ""
    mark = "within the interval; rank named of >= 3"
    yield (
        "silent corruption in a replica",
        done,
        mark,
        figure,
        len(found) + gone == len(tried) > 0 and named == len(three),
    )


def _reshard(seen: Records) -> Iterable[Row]:
    pairs = [each for each in seen if "saved_by" in each]
    worlds = sorted({each["saved_by"] for each in pairs})
    equal = sum(not each["differing"] and each["is_at_step"] for each in pairs)
    done = f"{len(pairs)} ordered pairs of {worlds} ranks, {pairs[0]['tensors']} tensors, uneven, tied, AdamW"
    yield "reshard", done, "bitwise equal", f"{equal} of {len(pairs)} equal", equal == len(pairs) >= 36


def _samples(seen: Records) -> Iterable[Row]:
    tried = [each for each in seen if "windows" in each]
    kills, windows, once, more = (total(tried, key) for key in ("kills", "windows", "once", "more"))
    done = f"{kills} kills, {total(tried, 'changes')} changes of world size, {windows:,} samples of an epoch"
    figure = f"{once:,} once, {more} more than once, {windows - once - more} never"
    yield "data exactly once", done, "each sample once", figure, once == windows and not more and kills >= 100


def _cheap(seen: Records) -> Iterable[Row]:
    turns, growths = of(seen, kind="turn"), of(seen, kind="growth")
    waits = [value for each in growths for value in each["blocked_s"]]
    middle = statistics.median(waits)
    theirs = statistics.median(each["dcp_s"] for each in turns)
    done = f"{len(waits)} copies of 192 MiB"
    figure = f"{1e3 * middle:.0f} ms (DCP async_save {1e3 * theirs:.0f} ms)"
    yield "cheap: a step's wait", done, "p50 <= 60 ms", figure, middle <= 0.06
    growth = max(each["growth"] for each in growths)
    saves = total(growths, "saves")
    yield "cheap: memory", f"{saves} saves", "growth < 1%", f"{growth:+.2%}", growth < 0.01 and saves >= 500
    share = statistics.median(each["digest_s"] / each["write_s"] for each in turns)
    yield "cheap: digest", f"{len(turns)} writes to disk", "<= 15% of the write", f"{share:.1%}", share <= 0.15


def _goodput(seen: Records) -> Iterable[Row]:
    found = goodput.held_against([each for each in seen if "deaths" in each])
    error = found["observed"] / found["predicted"] - 1
    done = f"{found['deaths']:.0f} Poisson kills in {found['seconds']:.0f} s of runs of 2 ranks"
    figure = f"observed {found['observed']:.3f}, predicted {found['predicted']:.3f}: {error:+.1%}"
    yield "planner right", done, "goodput within 3%", figure, abs(error) <= 0.03


def _restarts(seen: Records) -> Iterable[Row]:
    runs = [each for each in seen if "first_try" in each]
    wanted, first = total(runs, "wanted"), total(runs, "first_try")
    back = statistics.median(value for each in runs for value in each["back_s"])
    ends = all(each["status"] == 0 and not each["other"] for each in runs)
    done = f"{wanted} deaths, one in every step of {len(runs)} runs under supervision"
    figure = f"{first} at the first try; steps go on after {back:.1f} s"
    yield "restarts", done, "100 at the first try", figure, first == wanted >= 100 and ends


def _chaos(seen: Records) -> Iterable[Row]:
    runs = [each for each in seen if "blows" in each]
    blows = [blow for each in runs for blow in each["blows"]]
    right = sum(blow["is_right"] for blow in blows)
    hung = [blow for blow in blows if blow["kind"] in ("stop", "busy", "store")]
    worst = max((blow["found_after_s"] for blow in hung), default=0.0)
    done = f"{len(hung)} stopped, looping or waiting for a store, in {len(runs)} runs"
    named = sum(blow["is_right"] for blow in hung)
    figure = f"{named} of {len(hung)} at the right rank, {worst:.1f} s at the most"
    yield "hang named", done, "<= 3 s, right rank", figure, named == len(hung) > 0 and worst <= 3.0
    equal = sum(each["losses_equal"] and each["state_equal"] for each in runs)
    alarms = sum(len(each["false_alarms"]) for each in runs)
    done = f"{len(blows)} faults of all kinds in {len(runs)} runs of `trainwright chaos`"
    figure = f"{right} seen as what they are, {alarms} false alarms, {equal} of {len(runs)} runs equal to the bit"
    yield (
        "whole runs",
        done,
        "all seen, 0 bits differ",
        figure,
        right == len(blows) and equal == len(runs) and not alarms,
    )


ROWS: dict[str, Callable[[Records], Iterable[Row]]] = {
    "kills": _kills,
    "damage": _damage,
    "power": _power,
    "storage": _storage,
    "memory": _memory,
    "chaos": _chaos,
    "hangs": _hangs,
    "slow": _slow,
    "guards": _guards,
    "silent": _silent,
    "reshard": _reshard,
    "samples": _samples,
    "retention": _retention,
    "cheap": _cheap,
    "goodput": _goodput,
    "restarts": _restarts,
}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*head, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]


def _beside_dcp(seen: Records, rival: Records) -> list[str]:
    rows = []
    for whose in ("ours", "DCP"):
        for kind in ("flip", "zero", "cut"):
            numbers = Counter[str]()
            for each in of(seen, whose=whose, kind=kind):
                numbers[each["outcome"]] += each["number"]
            counted = [numbers[each] for each in (SILENT, REJECTED, HARMLESS)]
            rows.append((whose, {"flip": "one bit", "zero": "4 KiB zeroed", "cut": "cut short"}[kind], *counted))
    died = of(rival, has_died=True)
    if died:
        outcomes = Counter(each["outcome"] for each in died)
        rows.append(("DCP", "killed in a second save", *(outcomes[each] for each in (SILENT, REJECTED, HARMLESS))))
    text = [
        "## Beside plain DCP",
        "",
        "Of the same tensors, in the same run. Silent: it loads, and values are others, or rows of "
        "two saves. Rejected: an error. Harmless: it loads, and all values are right.",
        "",
    ]
    return text + table(("whose", "what", "silent", "rejected", "harmless"), rows)


def _by_phase(seen: Records) -> list[str]:
    kills = of(seen, kind="kill")
    layouts = list(dict.fromkeys(each["layout"] for each in kills))
    rows = []
    for phase in (*PHASES, "between"):
        own = of(kills, phase=phase)
        lost = sum(each["lost"] > 0 for each in own)
        rows.append((phase, *(len(of(own, layout=name)) for name in layouts), len(own), lost))
    text = ["## Kills by phase", "", "The phase in which the rank was when it died, of those that it was in.", ""]
    return text + table(("phase", *layouts, "all", "lost a commit"), rows)


def _by_kind(seen: Records) -> list[str]:
    runs = [each for each in seen if "blows" in each]
    rows: list[Sequence[object]] = []
    for name in dict.fromkeys(each["layout"] for each in runs):
        own = of(runs, layout=name)
        blows = [blow for each in own for blow in each["blows"]]
        out = sorted({each for run in own for each in run.get("left_out", {})})
        equal = [sum(each[key] for each in own) for key in ("losses_equal", "state_equal")]
        right = sum(blow["is_right"] for blow in blows)
        rows.append((name, len(blows), right, *(f"{each} of {len(own)}" for each in equal), ", ".join(out) or "-"))
    columns = ("layout", "faults", "seen as what they are", "losses equal", "state equal", "kinds left out")
    text = ["## Whole runs under chaos", "", *table(columns, rows)]
    why = {why for run in runs for why in run.get("left_out", {}).values()}
    text += [f"Left out: {each}." for each in sorted(why)] + ([""] if why else [])
    by_kind: dict[str, Records] = {}
    for blow in (blow for each in runs for blow in each["blows"]):
        by_kind.setdefault(blow["kind"], []).append(blow)
    rows = []
    for kind, blows in sorted(by_kind.items()):
        found, back = ([each[key] for each in blows] for key in ("found_after_s", "back_after_s"))
        rows.append(
            (
                kind,
                len(blows),
                f"{statistics.median(found):.1f}, {max(found):.1f} s",
                f"{statistics.median(back):.1f}, {max(back):.1f} s",
                max(each["done_again"] for each in blows),
            )
        )
    columns = (
        "fault",
        "times",
        "found in, median, most",
        "steps go on after, median, most",
        "steps done again, most",
    )
    return text + table(columns, rows)


def _in_shards(seen: Records) -> list[str]:
    flips = of(seen, kind="shard")
    found, gone = total(flips, "is_found"), total(flips, "is_gone")
    return [
        "## What nobody can see",
        "",
        f"{len(flips)} flips in shards of ZeRO 3, which no other rank holds: {found} found, {gone} rounded",
        f"away, {len(flips) - found - gone} in the state at the end. No check failed: it is the limit that",
        "the fault model names, as such a shard has no replica to be held against. `chaos` leaves flips out of",
        "such runs, and says so. Replicas (`recipe.dp_replicate`, ZeRO 0) make them visible.",
        "",
    ]


def _economics(seen: Records) -> list[str]:
    found = goodput.held_against([each for each in seen if "deaths" in each])
    return [
        "## Goodput",
        "",
        f"Steps between saves take {found['interval_s']:.3f} s, a save {1e3 * found['save_s']:.0f} ms, and",
        f"steps go on {found['back_s']:.2f} s after a death (of forked processes): means over the same runs.",
        f"At the planted rate, a death every {goodput.MTTF_S:g} s on average, the form says",
        f"{found['planted']:.3f}; at the rate seen {found['predicted']:.3f}.",
        "",
    ]


def _reached(part: str, seen: Records) -> list[Sequence[object]]:
    """Rows of a part; one that says so where it was not run, or stopped before anything could be counted."""
    if not seen:
        return [(part, "not run", "-", "-", "-")]
    try:
        return [(*row[:-1], "yes" if row[-1] else "**NO**") for row in ROWS[part](seen)]
    except TOO_FEW:
        return [(part, "not finished", "-", "-", "-")]


def text(results: dict[str, Records], note: str = "") -> str:
    """The whole file; `note` is on how it was made."""
    rows = [row for part in ROWS for row in _reached(part, results[part])]
    took_s = sum(each["seconds"] for seen in results.values() for each in seen if each.get("kind") == "took")
    lines = [
        f"# What runs survive: {hardware()}, {date.today()}",
        "",
        f"By `make chaos` (`benchmarks/survival`), in {took_s / 60:.0f} minutes. How each figure comes about is",
        "told in the first paragraph of the part's file there; what is survived and what is not, in",
        "[the fault model](../docs/fault-model.md).",
        *([note] if note else []),
        "",
        *table(("guarantee", "what was done", "mark", "figure", "reached"), rows),
    ]
    sections: tuple[tuple[str, Callable[[], list[str]]], ...] = (
        ("damage", lambda: _beside_dcp(results["damage"], results["rival"])),
        ("kills", lambda: _by_phase(results["kills"])),
        ("chaos", lambda: _by_kind(results["chaos"])),
        ("silent", lambda: _in_shards(results["silent"])),
        ("goodput", lambda: _economics(results["goodput"])),
    )
    for part, section in sections:
        if results[part]:
            with suppress(*TOO_FEW):
                lines += section()
    return "\n".join(lines).rstrip() + "\n"
