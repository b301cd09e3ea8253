"""Calibration finds the rates that noisy samples were made from."""

from pathlib import Path

import numpy as np
import pytest

from trainwright.cli import calibrate as verb
from trainwright.cli.catalogue import load_model
from trainwright.cli.main import run
from trainwright.measure.calibrate import calibrate
from trainwright.measure.link_rates import hidden_fraction, norm
from trainwright.measure.noise import noise
from trainwright.measure.points import Point, fit_line
from trainwright.plan.predict import predict
from trainwright.spec import toml
from trainwright.spec.cluster import ClusterSpec, Format, Rates
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.record import Machine, Sample
from trainwright.spec.run import Run

RANKS, CORES = 4, 2
MACHINE = Machine(
    name="here", device="Testium 9", kind="cpu", devices=RANKS, concurrent_devices=CORES, memory_bytes=2 * 2**30
)
LAUNCH_S = 4e-6
PEAKS: dict[Format, float] = {"fp32": 100e9, "bf16": 400e9}
FRACTION_BY_FLOPS = {2e6: 0.3, 3e7: 0.7, 2e9: 1.0}
GROUPED = 0.6
ATTENTION_BY_LENGTH = {128: 0.2, 1024: 0.35}
MEMORY_BYTES_PER_S = 12e9
CONTENTION = {"launch": 1.0, "matmul": 1.2, "attention_forward": 1.1, "attention_backward": 1.3, "copy": 1.6}
CONTENTION |= {"elementwise": 1.5, "update": 1.4}
STEP_S, ACT_S = 3e-3, 4e-4
UPDATE_BYTES_PER_S = 9e9
HIDDEN_FRACTION = 0.25
ELEMENTWISE_BYTES_PER_S: dict[Format, float] = {"fp32": 8e9, "bf16": 2e9}
LATENCY_S = {"all_reduce": 4e-3, "all_gather": 2e-3, "reduce_scatter": 3e-3, "all_to_all": 1e-3, "send": 2e-4}
LINE_BYTES_PER_S = {
    "all_reduce": 0.7e9,
    "all_gather": 0.6e9,
    "reduce_scatter": 0.4e9,
    "all_to_all": 0.8e9,
    "send": 2e9,
}


def planted_samples(noise: float = 0.03, outliers: bool = True) -> list[Sample]:
    random = np.random.default_rng(1)

    def sample(
        op: str, precision: str, size: float, work: float, busy: int, seconds: float, group_size: int = 1
    ) -> Sample:
        repeated = seconds * (1 + noise * random.standard_normal(7))
        if outliers:
            repeated[random.integers(7)] *= 8  # the scheduler took the core away
        return Sample.parse(
            {
                "op": op,
                "precision": precision,
                "size": float(size),
                "work": float(work),
                "busy_ranks": busy,
                "group_size": group_size,
                "seconds": [float(each) for each in np.abs(repeated)],
            }
        )

    def compute(op: str, precision: str, size: float, work: float, alone_s: float) -> list[Sample]:
        shared_s = alone_s * CONTENTION[op] * RANKS / CORES
        return [sample(op, precision, size, work, 1, alone_s), sample(op, precision, size, work, RANKS, shared_s)]

    found = compute("launch", "fp32", 1, 50, 50 * LAUNCH_S)
    for precision, peak in PEAKS.items():
        for flops, fraction in FRACTION_BY_FLOPS.items():
            found += compute("matmul", precision, flops, flops, flops / (peak * fraction))
    for rows, flops in ((32, 6e6), (128, 9e7)):
        alone_s = flops / 3 / (PEAKS["fp32"] * FRACTION_BY_FLOPS[flops / 3] * GROUPED) * 3
        found.append(sample("grouped", "fp32", rows, flops, 1, alone_s))
    for op, work in (("attention_forward", 1e7), ("attention_backward", 2.5e7)):
        for length, fraction in ATTENTION_BY_LENGTH.items():
            found += compute(op, "fp32", length, work, work / (PEAKS["fp32"] * fraction))
    for precision, bytes_per_s in ELEMENTWISE_BYTES_PER_S.items():
        found += compute("elementwise", precision, 1e7, 1e7, 1e7 / bytes_per_s)
    found += compute("copy", "fp32", 64e6, 64e6, 64e6 / MEMORY_BYTES_PER_S)
    found += compute("update", "fp32", 1e8, 1e8, 1e8 / UPDATE_BYTES_PER_S)
    for count in (1, 4):
        seconds = STEP_S + 2 * count * ACT_S + 65 * count * LAUNCH_S
        found.append(sample("step", "fp32", count, 65 * count, 1, seconds))
    for number, seconds in enumerate((0.010, 0.008, 0.018 - 0.008 * HIDDEN_FRACTION), start=1):
        found.append(sample("overlap", "fp32", number, 1 << 22, RANKS, seconds, RANKS))
    for number, seconds in enumerate((0.003, 0.004, 0.005), start=1):
        found.append(sample("sharded", "fp32", number, 1 << 22, RANKS, seconds, RANKS))
    for op, latency_s in LATENCY_S.items():
        for size, busy in ((2, 2), (2, 4), (4, 4)):
            for message_bytes in (4096, 65536, 1 << 20, 1 << 23):
                seconds = latency_s * busy / size + message_bytes / LINE_BYTES_PER_S[op]
                found.append(sample(op, "fp32", message_bytes, message_bytes, busy, seconds, size))
    return found


@pytest.fixture(scope="module")
def cluster() -> ClusterSpec:
    return calibrate(planted_samples(), MACHINE).cluster


def test_peaks_are_those_of_one_busy_rank(cluster: ClusterSpec) -> None:
    assert cluster.peak("fp32") == pytest.approx(PEAKS["fp32"], rel=0.05)
    assert cluster.peak("bf16") == pytest.approx(PEAKS["bf16"], rel=0.05)
    assert cluster.peak("fp8") is None


def test_curves_are_those_of_one_busy_rank(cluster: ClusterSpec) -> None:
    for precision in PEAKS:
        curve = cluster.rates.matmul[precision]
        assert curve.size == tuple(FRACTION_BY_FLOPS)
        assert curve.fraction == pytest.approx(tuple(FRACTION_BY_FLOPS.values()), rel=0.08)
    for curves in (cluster.rates.attention_forward, cluster.rates.attention_backward):
        assert curves["fp32"].fraction == pytest.approx(tuple(ATTENTION_BY_LENGTH.values()), rel=0.08)


def test_what_ranks_cost_one_another_leaves_core_sharing_out(cluster: ClusterSpec) -> None:
    (at_work,) = cluster.rates.at_work
    assert at_work.ranks == RANKS
    assert at_work.matmul == pytest.approx(CONTENTION["matmul"], rel=0.05)
    assert CONTENTION["attention_forward"] < at_work.attention < CONTENTION["attention_backward"]
    assert at_work.memory == pytest.approx(CONTENTION["copy"], rel=0.05)
    assert at_work.elementwise == pytest.approx(CONTENTION["elementwise"], rel=0.05)
    assert at_work.update == pytest.approx(CONTENTION["update"], rel=0.05)
    assert at_work.launch == pytest.approx(1.0, abs=0.05)


def test_memory_launch_and_host(cluster: ClusterSpec) -> None:
    rates = cluster.rates
    assert cluster.device.memory_bytes_per_s == pytest.approx(MEMORY_BYTES_PER_S, rel=0.05)
    for precision, bytes_per_s in ELEMENTWISE_BYTES_PER_S.items():
        assert rates.elementwise[precision] == pytest.approx(bytes_per_s / MEMORY_BYTES_PER_S, rel=0.05)
    assert rates.update == pytest.approx(UPDATE_BYTES_PER_S / MEMORY_BYTES_PER_S, rel=0.05)
    assert rates.launch_s == pytest.approx(LAUNCH_S, rel=0.05)
    assert rates.grouped == pytest.approx(GROUPED, rel=0.06)
    assert rates.step_overhead_s == pytest.approx(STEP_S, rel=0.1)
    assert rates.microbatch_overhead_s == pytest.approx(ACT_S, rel=0.1)


def test_what_hides(cluster: ClusterSpec) -> None:
    assert cluster.rates.overlap.dp == pytest.approx(HIDDEN_FRACTION, abs=0.08)
    assert cluster.rates.overlap.fsdp_norm == pytest.approx(2.0, abs=0.3)


def test_what_a_rank_does_itself_is_what_a_step_takes_beyond_both() -> None:
    """15 ms of four ranks on two cores, of 1e6 bytes: 7.5 ns a byte of one rank that has a core."""
    samples = planted_samples(noise=0, outliers=False)
    steps = {"overlap": (0.100, 0.020, 0.135), "sharded": (0.100, 0.040, 0.170)}
    for op, seconds in steps.items():
        samples = [each for each in samples if each.op != op]
        for size, each in enumerate(seconds, start=1):
            values = {"op": op, "precision": "fp32", "size": float(size), "work": 1e6, "busy_ranks": RANKS}
            samples.append(Sample.parse({**values, "group_size": RANKS, "seconds": [each] * 3}))
    rates = calibrate(samples, MACHINE).cluster.rates
    assert (rates.overlap.dp, rates.overlap.fsdp_norm) == (0.0, 1.0)
    assert rates.replica_s_per_byte == pytest.approx(7.5e-9)
    assert rates.shard_s_per_byte == pytest.approx(15e-9)


def test_a_ranks_own_work_is_added_by_bytes_and_turns(cluster: ClusterSpec) -> None:
    """By hand: gradients once; with zero 3 each of two microbatches gathers twice and scatters once."""
    params = load_model("llama-local-6m").params
    free = cluster.changed(rates=cluster.rates.changed(replica_s_per_byte=0.0, shard_s_per_byte=0.0))
    dear = cluster.changed(rates=cluster.rates.changed(replica_s_per_byte=1e-8, shard_s_per_byte=1e-8))
    turns = RANKS / CORES
    for zero, gathered_and_scattered in ((0, 1), (1, 2), (2, 3), (3, 6)):
        added_s = predict(a_run(dear, zero=zero)).step_s - predict(a_run(free, zero=zero)).step_s
        assert added_s == pytest.approx(gathered_and_scattered * 4 * params * 1e-8 * turns), zero


@pytest.mark.parametrize(("both_s", "hidden"), [(0.018, 0.0), (0.014, 0.5), (0.010, 1.0), (0.020, 0.0)])
def test_hidden_fraction_is_of_the_shorter_one(both_s: float, hidden: float) -> None:
    points = [Point(size, 1, seconds, 7) for size, seconds in ((1, 0.010), (2, 0.008), (3, both_s))]
    assert hidden_fraction(points) == pytest.approx(hidden)


def test_norm_is_the_one_by_which_both_take_so_long() -> None:
    assert norm(0.003, 0.004, 0.005) == pytest.approx(2.0)
    assert norm(0.003, 0.004, 0.0071) == 1.0
    assert norm(0.003, 0.004, 0.004) == pytest.approx(10.0)


def test_collectives_are_lines_by_group_and_by_ranks_at_work(cluster: ClusterSpec) -> None:
    assert len(cluster.rates.collectives) == 15
    for rate in cluster.rates.collectives:
        assert rate.latency_s == pytest.approx(LATENCY_S[rate.op] * rate.at_work / rate.group_size, rel=0.1)
        assert rate.bytes_per_s == pytest.approx(LINE_BYTES_PER_S[rate.op], rel=0.15)
    assert cluster.fabric.link_bytes_per_s == pytest.approx(2e9, rel=0.1)


def test_node_and_provenance(cluster: ClusterSpec) -> None:
    assert (cluster.node.devices, cluster.node.concurrent_devices) == (RANKS, CORES)
    assert cluster.device.memory_bytes == 2 * 2**30
    origin = cluster.provenance_of("rates.matmul.bf16.fraction")
    assert origin is not None
    assert (origin.kind, origin.samples) == ("measured", 7 * 2 * len(FRACTION_BY_FLOPS))
    assert "at worst" in origin.source
    assert cluster.provenance_of("rates.update") != origin
    assert toml.read(toml.write(cluster), ClusterSpec, "cluster.toml") == cluster


def test_clean_samples_leave_no_error() -> None:
    fits = calibrate(planted_samples(noise=0, outliers=False), MACHINE).fits
    assert max(fit.worst_error for fit in fits) < 0.1  # one slowdown stands for forward and backward attention
    assert max(fit.worst_error for fit in fits if " of " in fit.name) < 1e-9
    assert all(len(fit.residuals) == len(fit.sizes) > 0 for fit in fits)
    assert {"matmul bf16", "attention_forward fp32", "elementwise fp32", "launch", "send of 2 ranks"} <= {
        f.name for f in fits
    }


def test_one_rank_needs_no_collectives() -> None:
    alone = [sample for sample in planted_samples() if sample.busy_ranks == 1]
    cluster = calibrate(alone, MACHINE.changed(devices=1, concurrent_devices=1)).cluster
    assert cluster.node.devices == 1
    assert (cluster.rates.collectives, cluster.rates.at_work) == ((), ())


def test_groups_that_span_nodes_give_the_network() -> None:
    machine = MACHINE.changed(kind="cuda", devices=2, concurrent_devices=2, nodes=2)
    cluster = calibrate(planted_samples(noise=0, outliers=False), machine).cluster
    assert (cluster.fabric.nics_per_node, cluster.fabric.nic_bytes_per_s) == (2, pytest.approx(2e9))
    assert {rate.group_size for rate in cluster.rates.collectives} == {2}
    assert {rate.at_work for rate in cluster.rates.collectives} == {2}
    # Of four ranks each link carries 2 * 3/4 of a message; two NICs a node carry a ring side by side.
    assert cluster.rates.network == pytest.approx(1.5 * 0.7e9 / (2 * 2e9))
    assert cluster.rates.network_latency_s == pytest.approx(LATENCY_S["send"])


def scattered_samples() -> list[Sample]:
    """Another program takes the core in half of the repetitions."""
    return [
        sample.changed(seconds=tuple(each * (1 + at % 2) for at, each in enumerate(sample.seconds)))
        for sample in planted_samples()
    ]


def test_noise_is_the_scatter_of_half_of_the_calls() -> None:
    assert noise(planted_samples(noise=0, outliers=False), CORES) == 0
    assert 0.02 < noise(planted_samples(), CORES) < 0.1  # quartiles of 3% normal noise are 4% apart
    assert noise(scattered_samples(), CORES) > 0.5


def test_a_program_that_holds_a_core_all_the_time_is_noise_too() -> None:
    """It scatters nothing; but two ranks on two cores have half of a core each, as four of them rightly have."""

    def samples(busy: int) -> list[Sample]:
        quiet = planted_samples(noise=0, outliers=False)
        return [each.changed(on_core=0.5) if each.busy_ranks == busy else each for each in quiet]

    assert noise(samples(RANKS), CORES) == 0
    assert noise(samples(1), CORES) == pytest.approx(0.5)
    with pytest.raises(InvalidSpec, match="too noisy"):
        calibrate(samples(1), MACHINE)


def test_a_noisy_machine_is_refused_in_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = scattered_samples()

    def measured(*arguments: object) -> tuple[str, Machine]:
        return "".join(f"{sample.model_dump_json()}\n" for sample in samples), MACHINE

    monkeypatch.setattr(verb, "measured", measured)
    out = tmp_path / "cluster.toml"
    assert run(["calibrate", "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert len(said.err.strip().splitlines()) == 1
    assert "too noisy to measure" in said.err
    assert "--max-noise" in said.err
    assert (said.out, list(tmp_path.iterdir())) == ("", [])
    # Quiet samples, or a person who accepts noise, get both files.
    assert run(["calibrate", "--out", str(out), "--max-noise", "9"]) == 0
    samples = planted_samples()
    assert run(["calibrate", "--out", str(tmp_path / "quiet.toml")]) == 0
    names = {"cluster.toml", "cluster.samples.jsonl", "quiet.toml", "quiet.samples.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_prediction_uses_what_was_measured(cluster: ClusterSpec) -> None:
    """Each measured constant moves the step of a run that has what it is of."""
    base = a_run(cluster)
    step_s = predict(base).step_s
    rates = cluster.rates
    (at_work,) = rates.at_work
    changes: dict[str, Rates] = {
        "update": rates.changed(update=(rates.update or 1.0) / 2),
        "step": rates.changed(step_overhead_s=2 * rates.step_overhead_s),
        "act": rates.changed(microbatch_overhead_s=2 * rates.microbatch_overhead_s),
        "overlap": rates.changed(overlap=rates.overlap.changed(dp=0.0)),
        **{
            kind: rates.changed(at_work=(at_work.changed(**{kind: 3.0}),))
            for kind in ("matmul", "attention", "elementwise", "update", "launch")
        },
    }
    for name, changed in changes.items():
        assert predict(a_run(cluster.changed(rates=changed))).step_s > step_s * 1.001, name
    # Two ranks of the four: the lines of two at work, and less of what ranks cost one another.
    of_two = predict(a_run(cluster, dp=2)).ledger.seconds["dp"]
    without = tuple(rate for rate in rates.collectives if rate.at_work != 2)
    wider = cluster.changed(rates=rates.changed(collectives=without))
    assert predict(a_run(wider, dp=2)).ledger.seconds["dp"] != pytest.approx(of_two)


def a_run(cluster: ClusterSpec, dp: int = 4, zero: int = 0) -> Run:
    recipe = {"seq_len": 256, "global_batch": 8, "precision": "fp32", "zero": zero}
    values = {"model": load_model("llama-local-6m"), "cluster": cluster, "layout": {"dp": dp}, "recipe": recipe}
    return Run.parse(values).check()


def test_a_missing_operation_is_named() -> None:
    without = [sample for sample in planted_samples() if sample.op != "copy"]
    with pytest.raises(InvalidSpec, match=r"no copy.*measure it"):
        calibrate(without, MACHINE)


def test_line_ignores_one_bad_point() -> None:
    points = [Point(size, size, 1e-3 + size / 1e9, 7) for size in (1e3, 1e5, 1e6, 1e7)]
    points.append(Point(3e6, 3e6, 1.0, 7))
    latency_s, seconds_per_byte = fit_line(points)
    assert latency_s == pytest.approx(1e-3, rel=0.02)
    assert seconds_per_byte == pytest.approx(1e-9, rel=0.2)  # one of five, 250 times too long


def test_a_line_takes_twice_and_half_for_equally_wrong() -> None:
    """Two points on a line through zero, one twice above it and one twice below: a fit of relative deviations
    would go by the low one alone."""
    seconds_by_size = {1e3: 2e-3, 1e4: 1e-2, 1e5: 1e-1, 1e6: 0.5}
    latency_s, seconds_per_byte = fit_line([Point(size, size, each, 7) for size, each in seconds_by_size.items()])
    errors = [np.log((latency_s + seconds_per_byte * size) / each) for size, each in seconds_by_size.items()]
    assert abs(sum(errors)) < 0.7
    assert max(map(abs, errors)) < 0.75


def test_line_never_has_negative_latency() -> None:
    points = [Point(size, size, (size / 1e6) ** 2, 7) for size in (1e6, 2e6, 4e6)]
    latency_s, seconds_per_byte = fit_line(points)
    assert latency_s == 0.0
    assert seconds_per_byte > 0
