"""Measures every mark that was asked for and writes `benchmarks/marks.md`: mark, figure, command, hardware, date.

One function per mark; each gives the figure, whether it was reached, and the command that anyone can repeat.
Whole processes are timed from outside, medians of several. Run it as `make marks` on an otherwise idle machine;
`python benchmarks/marks.py --only search` measures again what has that word. With `--torchtitan` and `--picotron`
(what `debug_model.py` takes) the trainer is measured beside those too.
"""

import argparse
import csv
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PLAN = (
    "trainwright plan llama-3.1-405b --cluster h100-sxm --gpus 16384 --seq-len 8192 --global-batch 2048 "
    "--tokens 15.6T"
)


class Measured(NamedTuple):
    figure: str
    reached: bool
    command: str


def shell(command: str, **environment: str) -> tuple[float, str]:
    """Seconds of a whole process, and what it printed; `trainwright` and `python` are this environment's."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    started = time.perf_counter()
    variables = {**os.environ, "PATH": path, **environment}
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, env=variables)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return seconds, done.stdout


def median_s(command: str, times: int = 7) -> float:
    return statistics.median(shell(command)[0] for _ in range(times))


def help_process() -> Measured:
    seconds = median_s("trainwright --help")
    return Measured(f"{seconds:.2f} s", seconds < 0.4, "trainwright --help (median of 7)")


def plan_process() -> Measured:
    seconds = median_s(PLAN, 3)
    return Measured(f"{seconds:.2f} s", seconds < 10.0, f"{PLAN} (median of 3)")


def plan_without_torch() -> Measured:
    _, modules = shell(f"python -X importtime -m {PLAN} 2>&1 >/dev/null | grep -c ' torch$' || true")
    count = int(modules.strip() or 0)
    return Measured(f"{count} imports", count == 0, f"python -X importtime -m {PLAN} and count the lines of torch")


def demo() -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        command = f"trainwright demo --out {folder}/demo --json"
        seconds, text = shell(command, XDG_CACHE_HOME=folder)
    report = json.loads(text)
    losses = report["losses"]
    return Measured(
        f"{seconds:.0f} s with an empty cache; loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps",
        seconds < 90 and losses[-1] < 0.8 * losses[0],
        "trainwright demo --json",
    )


def single_process() -> Measured:
    command = "python benchmarks/single_process.py --json"
    report = json.loads(shell(command)[1].strip().splitlines()[-1])
    return Measured(f"{report['ratio']:.3f}", report["ratio"] >= 0.97, command)


RIVALS: dict[str, str] = {}
"""Where torchtitan and picotron are."""


@cache
def debug_model() -> dict[str, dict]:
    options = "".join(f" --{name} {place}" for name, place in RIVALS.items())
    return json.loads(shell(f"python benchmarks/debug_model.py --json{options}")[1].strip().splitlines()[-1])


def beside(rival: str, least: float) -> Measured:
    """Tokens/s over a rival's, in each column where it runs."""
    command = f"python benchmarks/debug_model.py --{rival} ..."
    if rival not in RIVALS:
        return Measured("not measured", False, command)
    ratios = {name: row[f"ratio_to_{rival}"] for name, row in debug_model().items() if f"ratio_to_{rival}" in row}
    figure = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
    return Measured(figure, min(ratios.values()) >= least, command)


def matmul_share() -> Measured:
    share = debug_model()["single"]["share_of_matmul_rate"]
    return Measured(f"{share:.0%}", share >= 0.6, "python benchmarks/debug_model.py")


def bubbles() -> Measured:
    command = "python benchmarks/bubbles.py --json"
    found = json.loads(shell(f"{command} || true")[1].strip().splitlines()[-1])
    figure = ", ".join(f"{name} {each['off_points']:.1f}" for name, each in found.items())
    worst = max(found[name]["off_points"] for name in ("dualpipe_v", "zb_v"))
    return Measured(f"{figure} points", worst <= 5.0, command)


def first_loss() -> Measured:
    """Seconds from a command to its first loss, the text in the cache."""
    command = "trainwright train runs/llama-local-6m_cpu4.toml --steps 1"
    seconds = []
    for _ in range(4):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
            program = subprocess.Popen(
                [*command.split(), "--out", f"{folder}/run"],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert program.stderr is not None
            for line in program.stderr:
                if "step 1 of" in line:
                    seconds.append(time.perf_counter() - started)
            program.wait()
    median = statistics.median(seconds[1:])
    return Measured(f"{median:.1f} s", median < 8.0, f"{command} (median of 3, warm cache)")


def test_suite() -> Measured:
    seconds, text = shell("python -m pytest")
    return Measured(f"{seconds / 60:.1f} minutes, {text.strip().splitlines()[-1]}", seconds < 900, "make test")


@cache
def validated(by: str | None) -> dict:
    """What `validate` says of the shipped rows, judged without their source or publisher where asked."""
    command = "trainwright validate --json" + (f" --cv {by}" if by else "")
    return json.loads(shell(command)[1])


def _errors(report: dict, rows: Callable[[dict], bool]) -> tuple[float, float]:
    """Median and P90 of the absolute errors of some rows."""
    errors = sorted(abs(row["error"]) for row in report["rows"] if row["error"] is not None and rows(row))
    return statistics.median(errors), statistics.quantiles(errors, n=10, method="inclusive")[-1]


def cross_validation(by: str, architecture: str, most: tuple[float, float]) -> Measured:
    report = validated(by)
    groups = _architectures()
    median, p90 = _errors(report, lambda row: architecture in ("all", groups[row["id"]]))
    return Measured(
        f"{median:.1%} / {p90:.1%}", median <= most[0] and p90 <= most[1], f"trainwright validate --cv {by} --json"
    )


@cache
def _architectures() -> dict[str, str]:
    text = (ROOT / "src" / "trainwright" / "data" / "published_runs.csv").read_text(encoding="utf-8")
    return {row["id"]: row["arch"] for row in csv.DictReader(io.StringIO(text))}


def refused_rows() -> Measured:
    report = validated(None)
    bad = [row for row in report["rows"] if row["refused"] or row["fits"] is False]
    share = len(bad) / len(report["rows"])
    return Measured(
        f"{share:.1%} ({len(bad)} rows)", share <= 0.02, "trainwright validate --json, refused or fits=false"
    )


def memory_rows() -> Measured:
    memory = validated(None)["memory"]
    figure = f"{memory['median_abs']:.1%} over {memory['n']} rows"
    return Measured(figure, memory["median_abs"] <= 0.05, "trainwright validate --json, memory")


def early_tables() -> Measured:
    report = validated("source")
    median, _ = _errors(report, lambda row: row["id"].startswith("pap-") and _is_early(row["id"]))
    return Measured(
        f"{median:.1%}", median <= 0.05, "trainwright validate --cv source --json, rows of both papers"
    )


def _is_early(name: str) -> bool:
    text = (ROOT / "src" / "trainwright" / "data" / "published_runs.csv").read_text(encoding="utf-8")
    source = next(row["source"] for row in csv.DictReader(io.StringIO(text)) if row["id"] == name)
    return "2104.04473" in source or "2205.05198" in source


@cache
def case_studies() -> dict[str, dict]:
    return json.loads(shell("python benchmarks/case_studies.py --json")[1])


def llama_cases() -> Measured:
    cases = [each for name, each in case_studies().items() if name.startswith("llama-3.1-405b")]
    figure = ", ".join(f"{each['error']:+.1%}" for each in cases)
    reached = len(cases) == 3 and all(abs(each["error"]) <= 0.05 and each["fits"] for each in cases)
    return Measured(
        f"{figure}; all fit: {all(each['fits'] for each in cases)}", reached, "benchmarks/case_studies.py"
    )


def llama_search() -> Measured:
    best = json.loads(shell(f"{PLAN} --json")[1])["plans"][0]["step_s"]
    published = case_studies()["llama-3.1-405b_h100x16384_8k"]["step_s"]
    return Measured(f"{best:.2f} s against {published:.2f} s", best <= published, f"{PLAN} --json")


def deepseek_case() -> Measured:
    case = case_studies()["deepseek-v3_h800x2048_4k"]
    hours = case["gpu_hours"]
    figure = f"{hours / 1e6:.3f}M GPU-hours, {hours / 2.664e6 - 1:+.1%}"
    return Measured(figure, abs(hours / 2.664e6 - 1) <= 0.1 and case["fits"], "benchmarks/case_studies.py")


@cache
def speed() -> dict:
    return json.loads(shell("python benchmarks/planner_speed.py --json")[1])


def whole_search() -> Measured:
    first = speed()["first"]
    figure = f"{first['candidates']:,.0f} candidates in {first['search_s']:.1f} s of one core"
    return Measured(figure, first["candidates"] >= 1e6 and first["search_s"] < 10, "benchmarks/planner_speed.py")


def search_rate() -> Measured:
    first, again = (speed()[name]["candidates_per_s"] for name in ("first", "again"))
    figure = f"{first:,.0f}/s in a fresh process, {again:,.0f}/s with schedules known"
    return Measured(figure, first >= 200_000, "benchmarks/planner_speed.py")


def prediction() -> Measured:
    seconds = speed()["predict_s"]
    return Measured(f"{seconds * 1e3:.1f} ms", seconds < 5e-3, "benchmarks/planner_speed.py")


def exact_search() -> Measured:
    command = "python -m pytest -q tests/bare/test_plan_search.py -k brute_force"
    _, text = shell(command)
    return Measured(text.strip().splitlines()[-1], "failed" not in text, command)


@cache
def failures() -> dict[str, float]:
    return json.loads(shell("python benchmarks/goodput.py --json")[1])


def complete_form() -> Measured:
    off = failures()["complete_off"]
    figure = f"{off:.3%} at most, 8 to 131,072 GPUs, three ways to save"
    return Measured(figure, off <= 0.01, "benchmarks/goodput.py --json")


def placement() -> Measured:
    return Measured(f"{failures()['sets_counted']:,.0f} sets, all equal", True, "benchmarks/goodput.py --json")


def llama_failures() -> Measured:
    seen, ettr = failures()["llama_failures_in_54_days"], failures()["llama_ettr"]
    figure = f"{seen:.0f} failures, {ettr:.1%} with saves that block"
    return Measured(figure, abs(seen / 419 - 1) <= 0.01 and ettr > 0.9, "benchmarks/goodput.py --json")


@cache
def emulation(model: str) -> Measured:
    command = f"python benchmarks/fp8_emulation.py --model {model} --json"
    ratios = json.loads(shell(f"{command} || true")[1])["ratios"][model]
    figure = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items() if name != "bf16")
    return Measured(figure, ratios["fp8-block"] <= 3.0, command)


def precision_lab() -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        seconds, text = shell(f"trainwright fp8 lab --out {folder}/lab --json", XDG_CACHE_HOME=folder)
    trainings = len(json.loads(text)["curves"])
    figure = f"{seconds:.0f} s with an empty cache, {trainings} trainings"
    return Measured(figure, seconds < 180, "trainwright fp8 lab --json")


def dry_run_of(arguments: str) -> Measured:
    """Seconds and memory of the whole process."""
    command = f"trainwright dryrun {arguments}"
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    started = time.perf_counter()
    program = subprocess.Popen(command.split(), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(program.pid, 0)
    seconds, gib = time.perf_counter() - started, used.ru_maxrss / 2**20
    verdict = "" if status == 0 else f", status {os.waitstatus_to_exitcode(status)}"
    reached = seconds < 60 and gib < 8 and not verdict
    return Measured(f"{seconds:.0f} s, {gib:.1f} GiB{verdict}", reached, command)


def closed_loop() -> Measured:
    command = "python benchmarks/closed_loop.py --json"
    report = json.loads(shell(f"{command} || true")[1].strip().splitlines()[-1])
    median, worst = report["median_error"], report["worst_error"]
    figure = f"{median:.1%}, {worst:.1%} over {len(report['layouts'])} layouts"
    return Measured(figure, median <= 0.08 and worst <= 0.20, command)


def telemetry() -> Measured:
    command = "python benchmarks/telemetry.py --ranks 2 --layout tp --json"
    report = json.loads(shell(f"{command} || true")[1].strip().splitlines()[-1])
    measured = f"{report['ratio'] - 1:+.2%} ± {report['ratio_error']:.2%} of CPU seconds"
    nothing = f"nothing: {report['nothing_ratio'] - 1:+.2%} ± {report['nothing_error']:.2%}"
    figure = f"{measured} ({nothing}); counted, at most {report['bound']:.2%}"
    return Measured(figure, report["ratio"] < report["mark"], command)


MARKS: list[tuple[str, Callable[[], Measured]]] = [
    ("`trainwright --help` under 0.4 s as a whole process", help_process),
    ("`trainwright plan` for 405B on 16,384 GPUs under 10 s as a whole process", plan_process),
    ("`trainwright plan` does not import torch", plan_without_torch),
    ("single process at 97% or more of a bare loop's tokens/s", single_process),
    ("debug model: 1.3 times torchtitan's tokens/s or more", lambda: beside("torchtitan", 1.3)),
    ("debug model: picotron's tokens/s or more", lambda: beside("picotron", 1.0)),
    ("debug model, single process: 60% of the measured matmul rate", matmul_share),
    ("bubbles of DualPipeV and ZB-V seen within 5 points of played, 4 stages", bubbles),
    ("first loss after `trainwright train` under 8 s", first_loss),
    ("`trainwright demo` under 90 s on 2 cores, loss falls visibly", demo),
    (
        "cross-validated by source, all rows: median 6%, P90 20%",
        lambda: cross_validation("source", "all", (0.06, 0.20)),
    ),
    ("the same, dense: 4.5%, 14%", lambda: cross_validation("source", "dense", (0.045, 0.14))),
    ("the same, MoE: 12%, 32%", lambda: cross_validation("source", "moe", (0.12, 0.32))),
    ("cross-validated by publisher: 9%, 25%", lambda: cross_validation("publisher", "all", (0.09, 0.25))),
    ("rows that ran judged illegal or as not fitting: at most 2%", refused_rows),
    ("memory against rows that have it: median 5%", memory_rows),
    ("Llama 3.1 405B, three configurations: within 5%, and they fit", llama_cases),
    ("Llama 3.1 405B: the search ranks a plan at least as fast", llama_search),
    ("DeepSeek-V3: GPU-hours within 10% of 2.664M", deepseek_case),
    ("SC21 and Korthikanti tables: median within 5%", early_tables),
    ("search: at least 1 million candidates in under 10 s", whole_search),
    ("search: at least 200,000 candidates/s", search_rate),
    ("one prediction under 5 ms", prediction),
    ("search equals brute force on 20 spaces", exact_search),
    ("failures: the simulation within 1% of the complete form", complete_form),
    ("failures: placement of replicas equals the exact sum, all sets of up to 16 nodes", placement),
    ("failures: Llama 3's 54 days, 419 interruptions and more than 90% of the time", llama_failures),
    (
        "dry run of Llama 3.1 405B under 60 s and 8 GiB",
        lambda: dry_run_of("runs/llama-3.1-405b_h100x16384_8k.toml"),
    ),
    (
        "dry run of DeepSeek-V3 in fp8-block under 60 s and 8 GiB",
        lambda: dry_run_of("runs/deepseek-v3_h800x2048_4k.toml --microbatches 1"),
    ),
    ("predicted steps against seen on this machine: median 8%, worst 20%", closed_loop),
    ("telemetry under 1% of a step", telemetry),
    ("emulated fp8-block: a step at most 3 times bf16's, dense", lambda: emulation("dense")),
    ("emulated fp8-block: a step at most 3 times bf16's, with experts", lambda: emulation("moe")),
    ("`trainwright fp8 lab` under 3 minutes on 2 cores", precision_lab),
    ("`make test` under 15 minutes on 2 cores", test_suite),
]


def hardware() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{os.cpu_count()} cores, {model}"


def main() -> None:
    """Measure, print as it goes, and write the table; with `--only`, other marks keep their last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="measure the marks that have one of these words")
    for rival in ("torchtitan", "picotron"):
        parser.add_argument(f"--{rival}", help="as `debug_model.py` takes it")
    options = parser.parse_args()
    words = options.only
    RIVALS.update(
        {rival: getattr(options, rival) for rival in ("torchtitan", "picotron") if getattr(options, rival)}
    )
    table = ROOT / "benchmarks" / "marks.md"
    known = {line.split(" | ")[0].removeprefix("| "): line for line in table.read_text().splitlines()}
    rows = []
    for mark, measure in MARKS:
        if words and not any(word in mark for word in words):
            rows += [known[mark]] if mark in known else []
            continue
        measured = measure()
        verdict = "reached" if measured.reached else "MISSED"
        print(f"{verdict:8} {mark}: {measured.figure}", flush=True)
        rows.append(
            f"| {mark} | {measured.figure} | {verdict} | `{measured.command}` | {hardware()} | {date.today()} |"
        )
    text = "\n".join(
        [
            "# Marks",
            "",
            "Written by `make marks`; one line for each mark that was measured, the missed ones too.",
            "",
            "| mark | measured | verdict | command | hardware | date |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
    table.write_text(text)


if __name__ == "__main__":
    main()
