"""Four ranks on gloo measure all that a cluster is made of, and what they measured makes one that predicts."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest
from example import example_run
from launching import run_ranks

from trainwright.measure.calibrate import calibrate
from trainwright.measure.records import parse_samples
from trainwright.plan.predict import predict
from trainwright.spec.cluster import CollectiveOp
from trainwright.spec.record import Machine, Sample

WORLD, CORES = 4, 2
COLLECTIVES = get_args(CollectiveOp)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Sample]:
    kept = tmp_path_factory.mktemp("bench") / "samples.jsonl"
    run_ranks("bench_cases.py", WORLD, str(kept))
    return parse_samples(Path(kept).read_text(), "samples.jsonl")


def test_kernels_and_the_host_are_measured_at_each_number_of_busy_ranks(samples: Sequence[Sample]) -> None:
    found = {(each.op, each.busy_ranks) for each in samples}
    everywhere = ("matmul", "attention_forward", "attention_backward", "elementwise", "copy", "update", "launch")
    assert {(op, busy) for op in everywhere for busy in (1, 2, 4)} <= found
    assert {each.size for each in samples if each.op == "step"} == {1, 4}
    assert {each.precision for each in samples if each.op == "matmul"} == {"fp64", "fp32", "bf16"}
    # Twice, before and after the collectives.
    launches = [place for place, each in enumerate(samples) if each.op == "launch" and each.busy_ranks == 1]
    first, last = (
        next(place for place in order if samples[place].op in COLLECTIVES) for order in _both_ways(samples)
    )
    assert launches[0] < first <= last < launches[-1]


def _both_ways(samples: Sequence[Sample]) -> tuple[range, range]:
    return range(len(samples)), range(len(samples) - 1, -1, -1)


def test_collectives_are_measured_over_groups_beside_others(samples: Sequence[Sample]) -> None:
    found = {(each.op, each.group_size, each.busy_ranks) for each in samples if each.op in COLLECTIVES}
    assert found == {(op, *groups) for op in COLLECTIVES for groups in ((2, 2), (2, 4), (4, 4))}
    for op in ("overlap", "sharded"):
        assert [(each.size, each.busy_ranks) for each in samples if each.op == op] == [
            (size, 4) for size in (1, 2, 3)
        ]


def test_they_make_a_cluster_that_predicts(samples: Sequence[Sample]) -> None:
    machine = Machine(
        device="here", kind="cpu", devices=WORLD, concurrent_devices=CORES, memory_bytes=1_000_000_000
    )
    cluster = calibrate(samples, machine, most_noise=100.0).cluster
    assert [each.ranks for each in cluster.rates.at_work] == [2, 4]
    run = example_run(dp=2, tp=2, recipe={"precision": "fp32"})
    prediction = predict(run.changed(cluster=cluster))
    assert prediction.step_s > cluster.rates.step_overhead_s
    assert prediction.ledger.seconds["dp"] > 0 or cluster.rates.overlap.dp == 1
    assert prediction.ledger.seconds["core_sharing"] > 0
