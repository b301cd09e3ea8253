"""Speed of the planner on one core: candidates judged per second, and one prediction; prints ratios of one run.

Judged means memory and time: bytes of every rank at its peak, and a bound of the step below the played one;
schedules are played where the bound leaves a candidate in the race, until the fastest plans are certain. Where
Calculon or llm-analysis is installed, their evaluations of a 175B model are timed in the same run.
"""

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from trainwright.cli import catalogue
from trainwright.plan.candidates import candidates
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.predict import predict
from trainwright.plan.race import Race
from trainwright.spec.layout import Layout
from trainwright.spec.question import Question
from trainwright.spec.recipe import Recipe
from trainwright.spec.run import Run

REPETITIONS = 3


def question() -> Question:
    """All of Llama 3.1 405B on 16,384 H100."""
    return Question(
        model=catalogue.load_model("llama-3.1-405b"),
        cluster=catalogue.load_cluster("h100-sxm"),
        devices=16_384,
        recipe=Recipe(seq_len=8192, global_batch=2048),
        top=5,
    )


def searched() -> dict[str, float]:
    """One whole search, from question to the five fastest plans, in processor seconds."""
    asked = question()
    started = time.process_time()
    table = candidates(asked)
    listed = time.process_time()
    evaluation = Evaluation(table)
    judged = time.process_time()
    Race(evaluation).fastest(evaluation.fits, asked.top)
    ended = time.process_time()
    count = len(table.columns)
    return {
        "candidates": count,
        "listing_s": listed - started,
        "judging_s": judged - listed,
        "playing_s": ended - judged,
        "search_s": ended - started,
        "candidates_per_s": count / (ended - started),
    }


def prediction_s() -> float:
    """Median processor seconds of one prediction, the schedule's order known."""
    asked = question()
    run = Run(
        layout=Layout(tp=8, pp=16, dp=128, vpp=8),
        recipe=Recipe(seq_len=8192, global_batch=2048, zero=2, schedule="interleaved_1f1b"),
        model=asked.model,
        cluster=asked.cluster,
    )
    return _median_s(lambda: predict(run), 31)


def _median_s(call: Callable[[], object], times: int) -> float:
    call()
    seconds = []
    for _ in range(times):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def rivals() -> dict[str, float]:
    """Seconds of one evaluation by other planners that are installed."""
    found: dict[str, float] = {}
    if importlib.util.find_spec("llm_analysis"):
        from llm_analysis.analysis import LLMAnalysis  # pyright: ignore[reportMissingImports]
        from llm_analysis.config import (  # pyright: ignore[reportMissingImports]
            ParallelismConfig,
            get_dtype_config_by_name,
            get_gpu_config_by_name,
            get_model_config_by_name,
        )

        def analysis() -> object:
            return LLMAnalysis(
                get_model_config_by_name("decapoda-research_llama-65b-hf"),
                get_gpu_config_by_name("a100-sxm-80gb"),
                get_dtype_config_by_name("w16a16e16"),
                ParallelismConfig(tp_size=8, pp_size=8, dp_size=8),
                achieved_tflops=200,
            ).training(batch_size_per_gpu=1, seq_len=2048, total_num_tokens=10**9)

        found["llm-analysis"] = _median_s(analysis, 5)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    first = searched()
    again = min((searched() for _ in range(REPETITIONS)), key=lambda each: each["search_s"])
    report = {"first": first, "again": again, "predict_s": prediction_s(), "rivals_s": rivals()}
    if as_json:
        print(json.dumps(report))
        return
    for name, each in (("first search of a process", first), ("again", again)):
        parts = ", ".join(f"{part} in {each[f'{part}_s']:.2f} s" for part in ("listing", "judging", "playing"))
        print(
            f"{name}: {each['candidates']:,.0f} candidates in {each['search_s']:.2f} s of one core, "
            f"{each['candidates_per_s']:,.0f}/s ({parts})"
        )
    print(f"one prediction: {report['predict_s'] * 1e3:.1f} ms")
    for name, seconds in report["rivals_s"].items():
        ours = seconds * again["candidates_per_s"]
        print(f"{name}: {seconds * 1e3:.1f} ms an evaluation, {ours:,.0f} of ours meanwhile")


if __name__ == "__main__":
    main()
