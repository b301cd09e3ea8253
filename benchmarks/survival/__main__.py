"""The proof of what runs survive, part by part, and the table of marks that comes of it: benchmarks/
survival_<hardware>_<date>.md.

    python benchmarks/survival [--only kills,damage] [--share 0.1] [--seed 0] [--results DIR] [--report FILE.md]

Each part prints as it goes and leaves what it saw in DIR, a file of JSON lines for each seed; the report is made
of all files that are there, so that parts may be run one at a time and on other days. `--share` is how much of
each is done: 1 is what the marks ask for.
"""

import argparse
import importlib
import json
import sys
import time
import warnings
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests" / "cpu")]

import report  # noqa: E402


def results_of(directory: Path, part: str) -> list[dict]:
    """What all runs of a part saw."""
    files = sorted(directory.glob(f"{part}-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"of {','.join(report.PARTS)}; 'none' writes the report alone")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("out/survival"))
    parser.add_argument("--report", type=Path, default=report.default_path())
    parser.add_argument("--note", default="", help="a sentence for the report: what else the machine did, say")
    asked = parser.parse_args()
    chosen = [each for each in asked.only.split(",") if each and each != "none"]
    unknown = [each for each in chosen if each not in report.PARTS]
    if unknown or asked.share <= 0:
        parser.error(
            f"no such part: {', '.join(unknown)}" if unknown else f"--share={asked.share}: must be above 0"
        )
    warnings.simplefilter("ignore")
    asked.results.mkdir(parents=True, exist_ok=True)
    for part in chosen or ([] if asked.only else report.PARTS):
        begun_s = time.perf_counter()
        # What was seen before an interruption counts: each line is a trial that was finished.
        with (asked.results / f"{part}-{asked.seed}.jsonl").open("w") as file:
            for record in importlib.import_module(part).trials(asked.share, asked.seed):
                file.write(json.dumps(record) + "\n")
                file.flush()
                print(f"{part} {time.perf_counter() - begun_s:6.0f} s: {json.dumps(record)[:200]}", flush=True)
            file.write(json.dumps({"kind": "took", "seconds": time.perf_counter() - begun_s}) + "\n")
    text = report.text({part: results_of(asked.results, part) for part in report.PARTS}, asked.note)
    asked.report.write_text(text)
    print(text, f"\nwrote {asked.report}", sep="")


if __name__ == "__main__":
    main()
