"""Clusters for people: a table of those that are known, one with the source of each number, and a calibration."""

from collections.abc import Mapping
from typing import get_args

from rich.console import Group, RenderableType

from trainwright.present.parts import facts, headline, section, table
from trainwright.spec.cluster import ClusterSpec, Format, Provenance, numeric_fields
from trainwright.spec.record import Calibration
from trainwright.spec.units import bytes_text, scaled, seconds_text

FORMATS: tuple[Format, ...] = get_args(Format)


def clusters_view(clusters: Mapping[str, ClusterSpec]) -> RenderableType:
    """One line per cluster."""
    columns = [("cluster", "<"), ("device", "<"), ("node", ">"), ("memory", ">"), ("bf16", ">")]
    columns += [("link", ">"), ("network", ">"), ("USD/h", ">")]
    rows = []
    for name, cluster in clusters.items():
        bf16, price = cluster.peak("bf16"), cluster.usd_per_device_hour
        rows.append(
            [
                name,
                cluster.device.name,
                f"{cluster.node.devices} x",
                bytes_text(cluster.device.memory_bytes),
                scaled(bf16, "FLOP/s") if bf16 else "-",
                scaled(cluster.fabric.link_bytes_per_s, "B/s"),
                scaled(cluster.network_bytes_per_s, "B/s") if cluster.fabric.nics_per_node else "-",
                f"{price:.2f}" if price else "-",
            ]
        )
    return Group(
        table(columns, rows),
        "Per device: memory, dense bf16 peak, link and network (nominal, per direction), price.",
    )


def cluster_view(cluster: ClusterSpec) -> RenderableType:
    """One cluster: every number with where it comes from."""
    fabric = cluster.fabric
    shape = [
        ("device", f"{cluster.device.name} ({cluster.device.kind})"),
        ("node", f"{cluster.node.devices} devices, {cluster.node.concurrent_devices} compute at the same time"),
        ("link", f"{fabric.link}, {fabric.link_domain} devices reach one another"),
        ("network", f"{fabric.network}, {fabric.nics_per_node} NICs per node" if fabric.nics_per_node else "none"),
    ]
    return Group(headline(cluster.name), section("Shape", facts(shape)), *_numbers(cluster))


def calibration_view(calibration: Calibration) -> RenderableType:
    """What was measured, and how well the fitted rates say it."""
    return Group(cluster_view(calibration.cluster), fits_view(calibration))


def measured_view(cluster: ClusterSpec) -> RenderableType:
    """The few numbers of a measured machine that matter most."""
    device, node, rates = cluster.device, cluster.node, cluster.rates
    crowded = max((each.memory for each in rates.at_work), default=1.0)
    rows = [
        (
            "machine",
            f"{device.name}: {node.devices} processes, {node.concurrent_devices} compute at the same time",
        ),
        *(
            (f"{fmt} matmul", f"{scaled(cluster.peak(fmt) or 0.0, 'FLOP/s')} at best, by one process")
            for fmt in FORMATS
            if cluster.peak(fmt)
        ),
        (
            "memory",
            f"{scaled(device.memory_bytes_per_s, 'B/s')} of one process, {1 / crowded:.0%} of it beside others",
        ),
    ]
    rows += [
        (f"{rate.op}", f"of {rate.group_size}: {seconds_text(rate.latency_s)} + {scaled(rate.bytes_per_s, 'B/s')}")
        for rate in rates.collectives
        if rate.at_work in (0, node.devices)
    ]
    return facts(rows)


def fits_view(calibration: Calibration) -> RenderableType:
    """How well the fitted rates say what was measured."""
    columns = [("fit", "<"), ("samples", ">"), ("typical error", ">"), ("worst", ">")]
    rows = [
        [fit.name, f"{fit.samples}", f"{fit.median_error:.1%}", f"{fit.worst_error:.1%}"]
        for fit in calibration.fits
    ]
    return section("Fits: how far the medians of samples are from what the rates say", table(columns, rows))


def _numbers(cluster: ClusterSpec) -> tuple[RenderableType, RenderableType]:
    """Every number with the number of its source, and the sources."""
    # What has its default is neutral and has no source.
    values = cluster.model_dump(mode="json", exclude={"provenance"}, exclude_defaults=True)
    origins: dict[Provenance, str] = {}
    rows = []
    for field in numeric_fields(values):
        value: object = values
        for part in field.split("."):
            assert isinstance(value, dict)
            value = value[part]
        origin = cluster.provenance_of(field)
        assert origin is not None  # the noun checked it
        mark = origins.setdefault(origin, f"[{len(origins) + 1}]")
        rows.append([field, _value_text(field, value), origin.kind, mark])
    sources = [
        (mark, f"{origin.source}{f'; {origin.samples:,} samples' if origin.samples else ''}")
        for origin, mark in origins.items()
    ]
    columns = [("field", "<"), ("value", ">"), ("", "<"), ("source", ">")]
    return section("Numbers", table(columns, rows)), section("Sources", facts(sources))


def _value_text(field: str, value: object) -> str:
    """A number in the unit that its field's name ends in."""
    if isinstance(value, list):
        if value and isinstance(value[0], dict):
            return f"{len(value)} rates"
        if value and isinstance(value[0], str):
            return ", ".join(value)
        low, high = min(value), max(value)
        return f"{low:.3g} to {high:.3g}" if low != high else f"{low:.3g}"
    assert isinstance(value, (int, float))
    if field.endswith("bytes_per_s"):
        return scaled(value, "B/s")
    if "flops_per_s" in field:
        return scaled(value, "FLOP/s")
    if field.endswith("_bytes"):
        return bytes_text(value)
    if field.endswith("_s"):
        return seconds_text(value)
    return f"{value:,}"
