"""The timeline adds up: each rank's events fill the step, and are by cause what is predicted; the trace is one
that a viewer can open."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.bare.plans import moe_model
from tests.bare.test_plan_predict import run
from tests.golden.cases import CASES as GOLDEN_CASES
from trainwright.cli.main import run as command
from trainwright.plan.predict import predict
from trainwright.plan.timeline import timeline
from trainwright.present.trace import trace_json
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.layout import Layout
from trainwright.spec.run import Run
from trainwright.spec.schedule import SCHEDULES
from trainwright.spec.timeline import ACTS, AFTER, BUBBLE, EXPOSED, SENDS, Event, Timeline

EXAMPLE = str(Path(__file__).parents[2] / "runs" / "example-16_a100x16.toml")
FILLING = (ACTS, BUBBLE, AFTER)
"""Tracks whose events account for a rank's step."""


def experts(layout: Layout, **recipe: object) -> Run:
    return run(layout, model=moe_model(num_layers=8, num_dense=3), **recipe)


CASES = {
    "one device": run(),
    "data parallel": run(Layout(dp=4), zero=1),
    "fsdp": run(Layout(dp=4, cp=2), zero=3, recompute="full"),
    "tensor parallel": run(Layout(tp=4, dp=2)),
    "pipeline": run(Layout(tp=2, pp=4, dp=2), zero=1),
    "all forwards first": run(Layout(pp=4), schedule="gpipe"),
    "blocking sends": run(Layout(pp=2, dp=2)).with_value("recipe.overlap.pp", False),
    "experts, interleaved": experts(Layout(pp=2, vpp=2, dp=4, ep=4), schedule="interleaved_1f1b"),
    "experts, zero bubble": experts(Layout(pp=2, vpp=2, dp=2, ep=2), schedule="zb_v"),
    "experts, both ways": experts(Layout(pp=4, vpp=2, dp=2, ep=2), schedule="dualpipe"),
    "every cause": run(Layout(pp=2, dp=8)).with_values(
        [
            ("cluster.rates.microbatch_overhead_s", 1e-4),
            ("cluster.rates.step_overhead_s", 1e-3),
            ("cluster.rates.straggling_per_doubling", 0.02),
            ("cluster.rates.time_factor", 1.1),
        ]
    ),
    "405B": GOLDEN_CASES["llama-3.1-405b 16384 h100"],
    "cores shared": run(Layout(pp=4, dp=2)).with_value("cluster.node.concurrent_devices", 2),
    "fast software": run(Layout(pp=2)).with_value("cluster.rates.time_factor", 0.8),
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Run:
    return request.param


def of(made: Timeline, rank: int, *tracks: str) -> list[Event]:
    return [event for event in made.events if event.rank == rank and event.track in tracks]


def busiest(made: Timeline) -> int:
    """The rank with most seconds of acts, whose causes a prediction shows."""
    return max(range(len(made.stages)), key=lambda rank: sum(each.duration_s for each in of(made, rank, ACTS)))


def test_events_of_every_rank_fill_the_step(case: Run) -> None:
    made, step_s = timeline(case), predict(case).step_s
    assert made.step_s == pytest.approx(step_s, rel=1e-12)
    assert made.num_microbatches == made.of_microbatches
    for rank in range(case.layout.pp):
        filling = sorted(of(made, rank, *FILLING), key=lambda event: (event.start_s, event.end_s))
        assert sum(event.duration_s for event in filling) == pytest.approx(step_s, rel=1e-9)
        assert sum(made.seconds(rank).values()) == pytest.approx(step_s, rel=1e-9)
        for event in filling:
            assert sum(event.seconds.values()) == pytest.approx(event.duration_s, rel=1e-9, abs=1e-9 * step_s)
        for before, after in pairwise(event for event in filling if event.duration_s > 0):
            assert after.start_s == pytest.approx(before.end_s, abs=1e-9 * step_s)


def test_the_busiest_ranks_causes_are_those_predicted(case: Run) -> None:
    made, predicted = timeline(case), predict(case).ledger.seconds
    seconds = made.seconds(busiest(made))
    assert set(seconds) <= set(predicted)
    for cause, value in predicted.items():
        assert seconds.get(cause, 0.0) == pytest.approx(value, abs=1e-9 * made.step_s), cause


def test_exposed_communication_is_drawn_as_long_as_predicted(case: Run) -> None:
    made, predicted = timeline(case), predict(case).ledger.seconds
    for cause in ("tp", "cp", "ep"):
        drawn = [each for each in of(made, busiest(made), EXPOSED) if each.name == cause]
        assert sum(each.duration_s for each in drawn) == pytest.approx(predicted.get(cause, 0.0), rel=1e-9)
        assert all(0 < each.args["share of the act"] < 1 for each in drawn)


def test_paired_acts_hide_what_they_hide() -> None:
    """Of ep and bubble only the sum is predicted alike: what pairs hide is a difference of two steps there."""
    base = experts(Layout(pp=4, vpp=2, dp=2, ep=2), schedule="dualpipe", global_batch=32)
    case = base.with_value("cluster.rates.overlap.ep", 0.9)
    made, predicted = timeline(case), predict(case).ledger.seconds
    pairs = [event for event in of(made, 0, ACTS) if event.name == "F+B"]
    assert pairs
    assert all(event.args["hidden ep (s)"] > 0 for event in pairs)
    seconds = made.seconds(busiest(made))
    assert seconds["ep"] + seconds["bubble"] == pytest.approx(predicted["ep"] + predicted["bubble"], rel=1e-9)


@pytest.mark.parametrize(("name", "layout"), [("1f1b", Layout(pp=4)), ("dualpipe", Layout(pp=4, vpp=2))])
def test_sends_go_where_the_microbatch_goes_on(name: str, layout: Layout) -> None:
    case = run(layout, schedule=name, model=moe_model(num_layers=8))
    made = timeline(case)
    stages = SCHEDULES[name].stages(layout.pp, layout.vpp)
    forwards = {
        (event.args[f"{which}microbatch"], event.args[f"{which}stage"]): event
        for event in made.events
        if event.track == ACTS
        for kind, which in zip(event.name.split("+"), ("", "second "), strict=False)
        if kind == "F"
    }
    sent = [event for event in made.events if event.track == SENDS and event.name == "activation"]
    assert len(sent) == (layout.pp - 1) * 16
    for event in sent:
        goes_on = forwards[event.args["microbatch"], event.args["from stage"] + 1]
        assert goes_on.rank == event.args["to rank"]
        assert event.args["from stage"] + 1 in stages[goes_on.rank]
        assert goes_on.start_s >= event.end_s - 1e-12


def test_many_microbatches_are_shown_as_fewer() -> None:
    long = run(Layout(pp=4), global_batch=200_000)
    made = timeline(long)
    assert made.is_shortened
    assert len(made.events) <= 200_000
    assert made.of_microbatches == 200_000
    same = long.with_value("recipe.global_batch", made.num_microbatches)
    assert made.step_s == pytest.approx(predict(same).step_s, rel=1e-12)
    assert timeline(long, 8).num_microbatches == 8
    for microbatches in (0, 200_001):
        with pytest.raises(InvalidSpec, match="--microbatches"):
            timeline(long, microbatches)
    with pytest.raises(InvalidSpec, match="at most"):
        timeline(run(Layout(pp=4), global_batch=10**9), 10**8)


def test_a_trace_has_no_overlap_within_a_thread(case: Run) -> None:
    made = timeline(case)
    document = json.loads(trace_json(made))
    shown = [event for event in document["traceEvents"] if event["ph"] == "X"]
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in shown:
        assert event["dur"] > 0
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        for before, after in pairwise(sorted(spans)):
            assert after[0] >= before[1] - 1e-4  # a tenth of a nanosecond
    assert len({thread for _, thread in threads}) == len(threads)
    named = {event["tid"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert named == {thread for _, thread in threads}
    assert len({event["pid"] for event in shown}) == case.layout.pp
    acts_s = sum(event["dur"] for event in shown if event["cat"] == ACTS) / 1e6
    assert acts_s == pytest.approx(sum(each.duration_s for each in made.events if each.track == ACTS), rel=1e-4)


def test_sends_that_are_longer_than_acts_go_over_several_threads() -> None:
    slow = run(Layout(pp=2)).with_value("cluster.rates.link_latency_s", 1e-2)
    names = [event["args"].get("name") for event in json.loads(trace_json(timeline(slow)))["traceEvents"]]
    assert "sends 2" in names


def test_the_verb_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    assert command(["timeline", EXAMPLE, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"wrote {out}: ")
    assert said.count("\n") == 1
    assert json.loads(out.read_text())["otherData"]["microbatches"] > 0
    assert command(["timeline", EXAMPLE, "--out", str(out), "--microbatches", "4"]) == 0
    assert "with 4 microbatch(es), shown instead of" in capsys.readouterr().out
    for wrong in (
        ["--microbatches", "0"],
        ["--out", str(tmp_path / "nowhere" / "t.json")],
        ["--microbatches", "x"],
    ):
        assert command(["timeline", EXAMPLE, "--out", str(out), *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert command(["timeline", EXAMPLE]) == 2
    assert "--out" in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["timeline", "--help"]) == 0
    assert "Example: trainwright timeline" in " ".join(capsys.readouterr().out.split())
