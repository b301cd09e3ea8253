"""Calibration finds the rates that noisy samples were made from."""

import numpy as np
import pytest

from trainwright.measure.calibrate import Machine, Point, calibrate, fit_line
from trainwright.spec import toml
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.record import Sample

MACHINE = Machine(name="here", processor="Testium 9", cores=2, memory_bytes=8 * 2**30)
RANKS, CORES = 4, 2
LAUNCH_S = 4e-6
PEAKS = {"fp32": 100e9, "bf16": 400e9}
FRACTION_BY_FLOPS = {1e6: 0.3, 3e7: 0.7, 2e9: 1.0}
ATTENTION_BY_LENGTH = {128: 0.2, 1024: 0.35}
MEMORY_BYTES_PER_S = 12e9
CONTENTION = {"launch": 1.0, "matmul": 1.2, "attention_forward": 1.1, "attention_backward": 1.3, "copy": 1.6}
CONTENTION["elementwise"] = 1.5
ELEMENTWISE_BYTES_PER_S = {"fp32": 8e9, "bf16": 2e9}
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

    def sample(op: str, precision: str, size: float, work: float, busy: int, seconds: float) -> Sample:
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
    for op, work in (("attention_forward", 1e7), ("attention_backward", 2.5e7)):
        for length, fraction in ATTENTION_BY_LENGTH.items():
            found += compute(op, "fp32", length, work, work / (PEAKS["fp32"] * fraction))
    for precision, bytes_per_s in ELEMENTWISE_BYTES_PER_S.items():
        found += compute("elementwise", precision, 1e7, 1e7, 1e7 / bytes_per_s)
    found += compute("copy", "fp32", 64e6, 64e6, 64e6 / MEMORY_BYTES_PER_S)
    for op, latency_s in LATENCY_S.items():
        for size in (2, 4):
            for message_bytes in (4096, 65536, 1 << 20, 1 << 23):
                seconds = latency_s + message_bytes / LINE_BYTES_PER_S[op]
                found.append(sample(op, "fp32", message_bytes, message_bytes, size, seconds))
    return found


@pytest.fixture(scope="module")
def cluster() -> ClusterSpec:
    return calibrate(planted_samples(), MACHINE).cluster


def test_peaks_are_those_of_one_busy_rank(cluster: ClusterSpec) -> None:
    assert cluster.peak("fp32") == pytest.approx(PEAKS["fp32"], rel=0.05)
    assert cluster.peak("bf16") == pytest.approx(PEAKS["bf16"], rel=0.05)
    assert cluster.peak("fp8") is None


def lowered(fractions: dict, op: str) -> tuple[float, ...]:
    return tuple(fraction / CONTENTION[op] for fraction in fractions.values())


def test_curves_take_launch_and_core_sharing_out(cluster: ClusterSpec) -> None:
    for precision in PEAKS:
        curve = cluster.rates.matmul[precision]
        assert curve.size == tuple(FRACTION_BY_FLOPS)
        assert curve.fraction == pytest.approx(lowered(FRACTION_BY_FLOPS, "matmul"), rel=0.12)
    forward, backward = cluster.rates.attention_forward["fp32"], cluster.rates.attention_backward["fp32"]
    assert forward.fraction == pytest.approx(lowered(ATTENTION_BY_LENGTH, "attention_forward"), rel=0.1)
    assert backward.fraction == pytest.approx(lowered(ATTENTION_BY_LENGTH, "attention_backward"), rel=0.1)


def test_memory_and_launch(cluster: ClusterSpec) -> None:
    assert cluster.device.memory_bytes_per_s == pytest.approx(MEMORY_BYTES_PER_S, rel=0.05)
    assert cluster.rates.memory == pytest.approx(1 / CONTENTION["copy"], rel=0.1)
    for precision, bytes_per_s in ELEMENTWISE_BYTES_PER_S.items():
        reached = bytes_per_s / CONTENTION["elementwise"] / MEMORY_BYTES_PER_S
        assert cluster.rates.elementwise[precision] == pytest.approx(reached, rel=0.1)
    assert cluster.rates.launch_s == pytest.approx(LAUNCH_S, rel=0.05)


def test_a_copy_stands_for_elementwise_kernels_that_were_not_measured() -> None:
    samples = [sample for sample in planted_samples() if sample.op != "elementwise"]
    assert calibrate(samples, MACHINE).cluster.rates.memory == pytest.approx(1 / CONTENTION["copy"], rel=0.1)


def test_collectives_are_lines(cluster: ClusterSpec) -> None:
    assert len(cluster.rates.collectives) == 10
    for rate in cluster.rates.collectives:
        assert rate.latency_s == pytest.approx(LATENCY_S[rate.op], rel=0.1)
        assert rate.bytes_per_s == pytest.approx(LINE_BYTES_PER_S[rate.op], rel=0.15)
    assert cluster.fabric.link_bytes_per_s == pytest.approx(2e9, rel=0.1)


def test_node_and_provenance(cluster: ClusterSpec) -> None:
    assert (cluster.node.devices, cluster.node.concurrent_devices) == (RANKS, CORES)
    assert cluster.device.memory_bytes == 2 * 2**30
    origin = cluster.provenance_of("rates.matmul.bf16.fraction")
    assert origin is not None
    assert (origin.kind, origin.samples) == ("measured", 7 * len(planted_samples()))
    assert toml.read(toml.write(cluster), ClusterSpec, "cluster.toml") == cluster


def test_clean_samples_leave_no_error() -> None:
    fits = calibrate(planted_samples(noise=0, outliers=False), MACHINE).fits
    exact = [fit for fit in fits if not fit.name.startswith("elementwise")]  # one rate stands for two there
    assert max(fit.worst_error for fit in exact) < 0.1
    assert max(fit.worst_error for fit in fits if " of " in fit.name) < 1e-9
    assert {"matmul bf16", "attention_forward fp32", "elementwise fp32", "launch", "send of 2 ranks"} <= {
        f.name for f in fits
    }


def test_one_rank_needs_no_collectives() -> None:
    alone = [sample for sample in planted_samples() if sample.op not in LATENCY_S and sample.busy_ranks == 1]
    cluster = calibrate(alone, MACHINE).cluster
    assert cluster.node.devices == 1
    assert cluster.rates.collectives == ()


def test_a_missing_operation_is_named() -> None:
    without = [sample for sample in planted_samples() if sample.op != "copy"]
    with pytest.raises(InvalidSpec, match=r"no copy.*measure it"):
        calibrate(without, MACHINE)


def test_line_ignores_one_bad_point() -> None:
    points = [Point(size, size, 1e-3 + size / 1e9, 7) for size in (1e3, 1e5, 1e6, 1e7)]
    points.append(Point(3e6, 3e6, 1.0, 7))
    latency_s, seconds_per_byte = fit_line(points)
    assert latency_s == pytest.approx(1e-3)
    assert seconds_per_byte == pytest.approx(1e-9)


def test_line_never_has_negative_latency() -> None:
    points = [Point(size, size, (size / 1e6) ** 2, 7) for size in (1e6, 2e6, 4e6)]
    latency_s, seconds_per_byte = fit_line(points)
    assert latency_s == 0.0
    assert seconds_per_byte > 0
