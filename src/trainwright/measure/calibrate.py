"""Samples into a cluster: the rates of this machine, fitted so that outliers don't move them.

Each measured size is represented by the median of its repetitions (`points`); what ranks cost one another and what
they say to one another have files of their own (`compute_rates`, `link_rates`). Samples that scatter too much make
no cluster (`noise`). Each number's provenance says how many measurements it is of, and how well it says them.
"""

from collections.abc import Sequence

from trainwright.measure.compute_rates import ComputeRates
from trainwright.measure.link_rates import LinkRates
from trainwright.measure.noise import MOST_NOISE, require_quiet
from trainwright.spec.cluster import ClusterSpec, Device, Fabric, Node, PeakFlops, Provenance, Rates
from trainwright.spec.record import Calibration, Fit, Machine, Sample

WORKER_BYTES = 300_000_000
"""Resident memory of a worker that has imported PyTorch and joined a process group: 222 to 299 MB seen with
torch 2.13 on CPU."""
CONTEXT_BYTES = 1_500_000_000
"""Of a GPU, what the context, the libraries and communicators keep."""


def calibrate(samples: Sequence[Sample], machine: Machine, most_noise: float = MOST_NOISE) -> Calibration:
    """The cluster that the samples describe.

    `InvalidSpec` where a needed operation was not measured, and where samples scatter by more than `most_noise`.
    """
    require_quiet(samples, machine.concurrent_devices, most_noise)
    compute = ComputeRates(samples, machine.concurrent_devices)
    links = LinkRates(samples, machine)
    on_cpu, networked = machine.kind == "cpu", bool(links.between)
    fits = (*compute.fits, *links.fits)
    cluster = ClusterSpec(
        name=machine.name,
        device=Device(
            name=machine.device,
            kind=machine.kind,
            peak_flops_per_s=PeakFlops.parse(compute.peaks),
            memory_bytes=machine.memory_bytes,
            memory_bytes_per_s=compute.memory_bytes_per_s,
            num_sms=machine.num_sms,
        ),
        node=Node(devices=machine.devices, concurrent_devices=machine.concurrent_devices),
        fabric=Fabric(
            link="shared memory" if on_cpu else "links of one node, as measured",
            link_domain=machine.devices,
            link_bytes_per_s=links.bytes_per_s,
            network="between nodes, as measured" if networked else "none",
            nics_per_node=machine.devices if networked else 0,
            nic_bytes_per_s=links.network_bytes_per_s if networked else 0.0,
        ),
        rates=Rates(
            matmul=compute.matmul,
            grouped=compute.grouped,
            attention_forward=compute.attention["attention_forward"],
            attention_backward=compute.attention["attention_backward"],
            memory=1.0,
            elementwise=compute.elementwise,
            update=compute.update,
            at_work=compute.at_work,
            launch_s=compute.launch_s,
            step_overhead_s=compute.step_overhead_s,
            microbatch_overhead_s=compute.microbatch_overhead_s,
            link=links.fraction,
            link_latency_s=links.latency_s,
            network=links.network_fraction,
            network_latency_s=links.network_latency_s,
            collectives=links.rates,
            overlap=links.overlap,
            replica_s_per_byte=links.replica_s_per_byte,
            shard_s_per_byte=links.shard_s_per_byte,
        ),
        framework_bytes=WORKER_BYTES if on_cpu else CONTEXT_BYTES,
        provenance=_provenance(machine, samples, fits, is_networked=networked),
    )
    return Calibration(cluster=cluster, fits=fits)


def _provenance(
    machine: Machine, samples: Sequence[Sample], fits: Sequence[Fit], *, is_networked: bool
) -> dict[str, Provenance]:
    where = f"trainwright calibrate on {machine.device}, {machine.devices} ranks"
    where += f" on {machine.concurrent_devices} cores" if machine.kind == "cpu" else f", {machine.nodes} node(s)"

    def measured(*names: str) -> Provenance:
        """Of the fits whose names begin so; of all samples where none is named."""
        said = [fit for fit in fits if fit.name.startswith(names)] if names else []
        errors = [abs(each) for fit in said for each in fit.residuals]
        quality = (
            f"; it says medians to {sorted(errors)[len(errors) // 2]:.1%}, {max(errors):.1%} at worst"
            if errors
            else ""
        )
        counted = sum(fit.samples for fit in said) if said else sum(len(sample.seconds) for sample in samples)
        return Provenance(kind="measured", source=where + quality, samples=counted)

    system = Provenance(kind="measured", source="what the system reports, a CPU node's shared out over its ranks")
    no_network = Provenance(kind="assumed", source="one node: there is no network, and it is never used")
    network = measured("all_reduce", "send") if is_networked else no_network
    matmuls = {
        f"rates.matmul.{fit.name.split()[1]}": measured(fit.name) for fit in fits if fit.name.startswith("matmul ")
    }
    return {
        "device": measured("matmul", "memory"),
        "device.memory_bytes": system,
        "device.num_sms": system,
        "node": system,
        "fabric": measured("send"),
        "fabric.nics_per_node": Provenance(kind="assumed", source="one for each device")
        if is_networked
        else no_network,
        "fabric.nic_bytes_per_s": network,
        "rates": measured(),
        **matmuls,
        "rates.grouped": measured("grouped"),
        "rates.attention_forward": measured("attention_forward"),
        "rates.attention_backward": measured("attention_backward"),
        "rates.memory": Provenance(
            kind="assumed", source="device.memory_bytes_per_s is what a long stream was seen to reach"
        ),
        "rates.elementwise": measured("elementwise"),
        "rates.update": measured("update"),
        "rates.launch_s": measured("launch"),
        "rates.step_overhead_s": measured("step"),
        "rates.microbatch_overhead_s": measured("step"),
        "rates.collectives": measured("all_", "reduce_", "send"),
        "rates.network": network,
        "rates.network_latency_s": network,
        "framework_bytes": Provenance(
            kind="assumed",
            source="222 to 299 MB resident in a worker of torch 2.13 before it trains, rounded up"
            if machine.kind == "cpu"
            else "context, libraries and communicators of a device, before it trains",
        ),
    }
