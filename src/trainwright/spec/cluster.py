"""What it runs on: device, node, fabric, measured rates, price; and where each number comes from.

A cluster is data (`data/clusters/*.toml`, or a file that `calibrate` wrote). Bandwidths are per direction.
`link` is the scale-up fabric (NVLink, xGMI, or shared memory between the processes of one CPU node), `network`
the scale-out one. Nominal figures come from datasheets; `rates` says what fraction of them real kernels and
collectives reach. `provenance` covers every number: a datasheet, a measurement, or an assumption.
"""

import bisect
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainwright.spec.base import Count, Fraction, Natural, NonNegative, Noun, Positive, Probability, Sequence
from trainwright.spec.errors import reject
from trainwright.spec.recovery import Recovery

Format = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]
"""Number formats that a device may have a matmul rate for."""

BlockScales = Literal["mx", "nvfp4"]
"""Scales of blocks that a device's matmuls apply themselves: a power of two per 32 values (OCP Microscaling
Formats 1.0), an fp8 number per 16 (NVFP4)."""

Slowdown = Annotated[float, Field(ge=1, le=100)]

AttentionKernel = Literal["flash", "flash_2", "flash_1", "unfused"]

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class Provenance(Noun):
    """Where a number comes from."""

    kind: Literal["datasheet", "measured", "assumed"]
    source: str
    """Document with its date, the command that measured, or the reason for the assumption."""
    samples: Natural = 0
    """Measurements behind it, where it was measured here."""


class Curve(Noun):
    """A fraction of a peak as a function of size: between the given points the time, size / fraction, is linear in
    the size, so that a larger operation takes no less; outside them the fraction is constant. One point is a
    constant."""

    size: Annotated[Sequence[Positive], Field(min_length=1)]
    fraction: Annotated[Sequence[Annotated[float, Field(gt=0, le=1.5)]], Field(min_length=1)]
    """Above 1 only where boost clocks beat the nominal peak."""

    @model_validator(mode="after")
    def _check(self) -> "Curve":
        if len(self.size) != len(self.fraction):
            reject("fraction", len(self.fraction), f"needs as many points as size has: {len(self.size)}")
        if any(later <= earlier for earlier, later in zip(self.size, self.size[1:], strict=False)):
            reject("size", list(self.size), "must rise from point to point")
        return self

    def at(self, size: float) -> float:
        """The fraction at one size. `plan` evaluates whole arrays of them with the same rule."""
        if size <= self.size[0]:
            return self.fraction[0]
        if size >= self.size[-1]:
            return self.fraction[-1]
        right = bisect.bisect_right(self.size, size)
        low, high = self.size[right - 1], self.size[right]
        weight = (size - low) / (high - low)
        time = low / self.fraction[right - 1] * (1 - weight) + high / self.fraction[right] * weight
        return size / time


class PeakFlops(Noun):
    """Dense matmul peak by number format, FLOP/s; None where the device has no such format."""

    fp64: Positive | None = None
    fp32: Positive
    tf32: Positive | None = None
    bf16: Positive | None = None
    fp16: Positive | None = None
    fp8: Positive | None = None
    fp4: Positive | None = None


class Device(Noun):
    """One accelerator; on a CPU node, one process with one thread."""

    name: str
    kind: Literal["cuda", "rocm", "cpu"]
    peak_flops_per_s: PeakFlops
    memory_bytes: Count
    """Memory that a program can allocate: HBM of a GPU, a process's share of a CPU node's memory."""
    memory_bytes_per_s: Positive
    num_sms: Count
    """Streaming multiprocessors, compute units, or cores."""
    tdp_w: Positive | None = None
    block_scales: Sequence[BlockScales] = ()
    """That its matmuls apply themselves."""


class Node(Noun):
    """Devices that share a host."""

    devices: Count
    concurrent_devices: Count
    """How many of them can compute at the same time: all on a GPU node, the cores of a CPU node."""
    host_bytes_per_s: Positive | None = None
    """Host link of one device, per direction."""

    @model_validator(mode="after")
    def _check(self) -> "Node":
        if self.concurrent_devices > self.devices:
            reject("concurrent_devices", self.concurrent_devices, f"must be at most devices={self.devices}")
        return self


class Fabric(Noun):
    """Links between devices. Bandwidths are nominal, per direction."""

    link: str
    """The scale-up fabric by name, such as "NVLink 4 + NVSwitch"."""
    link_domain: Count
    """Devices that reach one another over the scale-up fabric: 8 in an HGX node, 72 in an NVL72 rack."""
    link_bytes_per_s: Positive
    """Per device."""
    network: str = "none"
    """The scale-out fabric by name, such as "InfiniBand NDR"."""
    nics_per_node: Natural = 0
    """0: there is one node only."""
    nic_bytes_per_s: NonNegative = 0.0
    """Per NIC."""
    link_mesh: bool = False
    """Every pair of devices has a link of its own instead of a switch between all: n devices that talk to one
    another have n - 1 of the link_domain - 1 links of each."""
    link_sharp: bool = False
    """The scale-up switches add up all_reduce (NVLS)."""
    network_sharp: bool = False
    """The network's switches do (SHARP)."""

    @model_validator(mode="after")
    def _check(self) -> "Fabric":
        if self.link_mesh and self.link_sharp:
            reject("link_sharp", self.link_sharp, "needs switches, and link_mesh=true has none; set one to false")
        if self.nics_per_node and not self.nic_bytes_per_s:
            reject("nic_bytes_per_s", self.nic_bytes_per_s, "must be above zero where nics_per_node is")
        return self


class CollectiveRate(Noun):
    """A collective as it was measured: seconds = latency_s + message bytes / bytes_per_s.

    The message is the whole tensor: what all_reduce sums, all_gather ends with, reduce_scatter begins with.
    """

    op: CollectiveOp
    group_size: Count
    at_work: Natural = 0
    """Ranks of the node that did the same at the same time, in groups of that size; 0: nobody looked. Of several
    rates, that of the most ranks that are no more than the run has there is taken."""
    latency_s: NonNegative
    bytes_per_s: Positive


class AtWork(Noun):
    """How many times longer a call takes while so many ranks of a node are at work than on one alone, beyond their
    turns on the cores (`Node.concurrent_devices`): what they cost one another in memory bandwidth, caches and
    clock. Between two such counts factors are linear in the count."""

    ranks: Count
    matmul: Slowdown = 1.0
    attention: Slowdown = 1.0
    memory: Slowdown = 1.0
    """Of long streams."""
    elementwise: Slowdown = 1.0
    update: Slowdown = 1.0
    """Of clipping and the optimizer."""
    launch: Slowdown = 1.0


class OverlapRates(Noun):
    """How much of its communication a program hides behind compute, where the recipe's switch is on."""

    dp: Probability = 0.0
    """Largest fraction of the reductions and gathers of zero 0 to 2 that hides, where there is compute enough."""
    fsdp_norm: Annotated[float, Field(ge=1, le=10)] = 1.0
    """p in (compute^p + communication^p)^(1/p), what a step with zero 3 takes: 1 adds up, infinity hides all."""
    tp: Probability = 0.0
    """Of collectives of tp, with recipe.overlap.tp."""
    cp: Probability = 0.0
    """Of a ring's passes, cp_method=ring."""
    ep: Probability = 0.0
    """Of expert dispatch, with recipe.overlap.ep."""
    ep_unasked: Probability = 0.0
    """The same without it: behind shared experts and permutations."""
    communication_sms: Natural = 0
    """Streaming multiprocessors that kernels of hidden dispatch take from compute (DeepSeek-V3: 20)."""


class Rates(Noun):
    """What real programs reach of the nominal figures."""

    matmul: dict[Format, Curve]
    """Fraction of the peak by number format, against the FLOPs of one square matmul."""
    matmul_half_dim: NonNegative = 0.0
    """h in the penalty for short dimensions, (1 + h/m)(1 + h/k)(1 + h/n) over that of the square matmul with the
    same FLOPs, which the curve describes."""
    grouped: Annotated[float, Field(gt=0, le=1.2)] = 1.0
    """Rate of grouped matmuls (experts) over that of one plain matmul of the same FLOPs, where experts are
    large."""
    grouped_half_rows: NonNegative = 0.0
    """h in m / (m + h): how few tokens of an expert, m, slow grouped matmuls down."""
    grouped_half_width: NonNegative = 0.0
    """g in d / (d + g): the same for the narrower side of an expert's matrix, d."""
    grouped_biased: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Rate of grouped matmuls of experts with biases, which miss the fused kernels, over that of those without."""
    sustained: dict[Format, Annotated[float, Field(gt=0, le=1.2)]] = {}  # noqa: RUF012
    """What matmuls keep of those rates through a whole training step, whose power limit and memory traffic short
    measurements don't meet; absent ones keep all."""
    attention_forward: dict[Format, Curve]
    """Fraction of the format's matmul peak, causal FLOPs, against the sequence length. A format that is absent
    has the fraction of bf16, or of fp32 where there is no bf16."""
    attention_backward: dict[Format, Curve]
    """The same for backward, whose FLOPs count as 2.5 times forward's."""
    attention_sustained: Annotated[float, Field(gt=0, le=1.2)] = 1.0
    """What attention keeps of its curves through a whole training step."""
    attention_kernels: dict[AttentionKernel, Annotated[float, Field(gt=0, le=1)]] = {}  # noqa: RUF012
    """Rate of older generations over that of the curves, which are the newest's; absent ones are as fast.
    unfused: fraction of the matmul peak that the two batched matmuls of scores and values reach; half where
    absent."""
    attention_half_head: NonNegative = 0.0
    """h in d / (d + h) over 128 / (128 + h): how attention slows down for heads narrower than 128."""
    memory: Annotated[float, Field(gt=0, le=1)]
    """Fraction of the memory bandwidth that long streams reach: optimizer, gradient accumulation."""
    elementwise: dict[Format, Fraction] = {}  # noqa: RUF012  (pydantic copies defaults)
    """The same of a layer's elementwise operators, by number format of the activations; absent ones stream."""
    update: Annotated[float, Field(gt=0, le=10)] | None = None
    """The same of clipping and the optimizer's update; None: that of `memory`. Above 1 where caches hold what is
    read more than once."""
    at_work: Sequence[AtWork] = ()
    """What ranks of a node cost one another; empty: nothing. The other rates are then those of one rank alone."""
    launch_s: NonNegative
    """Fixed cost of one kernel or operator, on the device."""
    host_launch_s: NonNegative = 0.0
    """Host time to launch one: where it exceeds the device's time, the device waits."""
    host_sync_s: NonNegative = 0.0
    """What an MoE layer waits, forward and again backward, where the host must learn the tokens of each expert."""
    graphs_remove: Probability = 0.6
    """Fraction of host launches that partial CUDA graphs remove; full ones remove all."""
    link: Fraction
    """Fraction of the link bandwidth that large collectives reach (bus bandwidth over nominal)."""
    link_latency_s: NonNegative
    """Of one hop of a ring inside the scale-up domain."""
    network: Fraction
    network_latency_s: NonNegative
    """Of one hop of a ring between nodes."""
    collectives: Sequence[CollectiveRate] = ()
    """Measured ones; they go before the formula from link and network."""
    link_sharp_gain: Annotated[float, Field(ge=1, le=2)] = 1.0
    """Bus bandwidth of all_reduce over a whole node over that of a ring, where the scale-up switch adds
    (fabric.link_sharp)."""
    network_sharp_gain: Annotated[float, Field(ge=1, le=2)] = 1.0
    """The same between nodes (fabric.network_sharp)."""
    serial_gather_s: NonNegative = 0.0
    """With zero 1, what each shard costs where its owner broadcasts it and the owners take turns."""
    all_to_all: Fraction = 1.0
    """What all_to_all reaches of the bandwidth that rings do."""
    time_factor: Annotated[float, Field(ge=0.5, le=2)] = 1.0
    """Whole step of this software over what the model of its operations says: what no cause explains."""
    overlap: OverlapRates = OverlapRates()
    replica_s_per_byte: NonNegative = 0.0
    """What a rank's own work on replicated gradients takes beside their all_reduce, for each byte of them: copies
    into buckets and out of them, hooks. Nothing hides it."""
    shard_s_per_byte: NonNegative = 0.0
    """The same with zero 1 to 3, for each byte that is gathered or scattered: copies out of what was gathered and
    into what is scattered, hooks."""
    straggling_per_doubling: NonNegative = 0.0
    """Fraction of a step that each doubling of the devices beyond one node adds by waiting for the slowest."""
    step_overhead_s: NonNegative = 0.0
    """Host work of a step that no operation accounts for (data, Python, logging)."""
    microbatch_overhead_s: NonNegative = 0.0
    """Host work of one pipeline act that no operation accounts for."""

    @model_validator(mode="after")
    def _check(self) -> "Rates":
        counts = [each.ranks for each in self.at_work]
        if counts != sorted(set(counts)):
            reject("at_work", counts, "must rise from entry to entry in ranks")
        for name in ("attention_forward", "attention_backward"):
            known = getattr(self, name)
            if "bf16" not in known and "fp32" not in known:
                reject(name, sorted(known), "needs a curve for bf16 or fp32")
        return self


class ClusterSpec(Noun):
    """Device, node, fabric and rates, with the source of each number."""

    name: str
    device: Device
    node: Node
    fabric: Fabric
    rates: Rates
    software: str = ""
    """Kind of training software that the rates are of, by its name in the catalogue; empty: none of them."""
    framework_bytes: Natural = 0
    """Memory of a device that the program can't use for tensors: context, communicator buffers, fragments."""
    buffer_bytes: Natural = 0
    """Of buffers that the software keeps for collectives whatever the layout, as DeepSpeed's buckets."""
    allocator_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What the allocator reserves beyond the tensors of the peak, as fragments and cached blocks, over their
    bytes."""
    usd_per_device_hour: Positive | None = None
    failures_per_device_day: Positive | None = None
    recovery: Recovery | None = None
    """None: as the catalogue assumes of every cluster (`data/recovery.toml`)."""
    provenance: dict[str, Provenance]
    """By dotted field; an entry covers all that lies below it."""

    @model_validator(mode="after")
    def _check(self) -> "ClusterSpec":
        # What has its default is neutral: no effect that a source would have to vouch for.
        for field in numeric_fields(self.model_dump(exclude={"provenance"}, exclude_defaults=True)):
            if not self.provenance_of(field):
                reject("provenance", field, "has no source; add an entry for it or for the table it stands in")
        return self

    def provenance_of(self, field: str) -> Provenance | None:
        """The entry for `field`, or for the nearest table that holds it."""
        parts = field.split(".")
        for length in range(len(parts), 0, -1):
            entry = self.provenance.get(".".join(parts[:length]))
            if entry:
                return entry
        return None

    @property
    def network_bytes_per_s(self) -> float:
        """Of one device, per direction, when all devices of its node use the NICs."""
        return self.fabric.nics_per_node * self.fabric.nic_bytes_per_s / self.node.devices

    @property
    def max_devices(self) -> float:
        """How many devices a layout may use: one node's without a network."""
        return math.inf if self.fabric.nics_per_node else max(self.node.devices, self.fabric.link_domain)

    def peak(self, fmt: Format) -> float | None:
        """Dense peak of a device for a number format, FLOP/s; None if it has none."""
        return getattr(self.device.peak_flops_per_s, fmt)


def numeric_fields(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of the numbers in nested tables; flags aren't numbers."""
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from numeric_fields(value, f"{path}.")
        elif isinstance(value, (list, tuple)):
            if value:
                yield path
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield path
