"""What saves and restarts of a run take, by the bytes of its state and the bandwidths of its cluster.

State is what training can't go on without: masters and moments, 12 bytes a parameter with AdamW in mixed
precision. Each is saved once, evenly over all devices; replicas of it are not. Loading reads as many bytes over as
many nodes.
"""

import math

from trainwright.plan.goodput.closed_forms import mttf_s
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.errors import reject
from trainwright.spec.model import ModelSpec
from trainwright.spec.recipe import Recipe
from trainwright.spec.recovery import Recovery
from trainwright.spec.replicas import recovery_probability
from trainwright.spec.saving import Saving

MOST_MORE = 12
"""Further nodes lost while a recovery runs; of more the state counts as lost."""

LONGEST_SAVE_S = 1e12
"""Beyond it a bandwidth is a slip of the pen."""


def saved_bytes(model: ModelSpec, recipe: Recipe) -> float:
    """Masters and moments of all parameters; Muon has one moment of what is in layers."""
    params = model.params + model.mtp_params
    around = model.embedding_params + model.head_params
    moments = 2 * params
    if recipe.optimizer.name == "muon":
        moments = params + around
    return params * recipe.master_bytes + moments * recipe.moment_bytes


def nodes_of(cluster: ClusterSpec, devices: int) -> int:
    """Nodes that so many devices take, the last one perhaps in part."""
    return -(-devices // cluster.node.devices)


def failures_per_node_day(cluster: ClusterSpec) -> float:
    """Of one node; refused where the cluster doesn't know."""
    if cluster.failures_per_device_day is None:
        why = f"is not known of {cluster.name}; give --failure-rate, or set it"
        reject("cluster.failures_per_device_day", "none", why)
    return cluster.failures_per_device_day * cluster.node.devices


def recovery_of(cluster: ClusterSpec) -> Recovery:
    """What the cluster says of recovery; refused where it says nothing."""
    if cluster.recovery is None:
        reject("cluster.recovery", "none", f"is not known of {cluster.name}; give the cluster a table recovery")
    return cluster.recovery


def nodes_per_rack(cluster: ClusterSpec) -> int:
    """Nodes that may be lost together: of a rack, or of a link domain that is one."""
    return max(recovery_of(cluster).nodes_per_rack, -(-cluster.fabric.link_domain // cluster.node.devices))


def savings(cluster: ClusterSpec, num_bytes: float, devices: int, replicas: int) -> tuple[Saving, ...]:
    """The ways to save `num_bytes` from so many devices; the memory tier where there are nodes for it."""
    recovery, nodes = recovery_of(cluster), nodes_of(cluster, devices)
    share = num_bytes / devices
    host = cluster.node.host_bytes_per_s or math.inf
    snapshot_s = share / min(recovery.snapshot_bytes_per_s, host)
    write_s = num_bytes / (nodes * recovery.storage_bytes_per_s)
    if write_s > LONGEST_SAVE_S:
        why = f"a save would take {write_s:.3g} s; raise it"
        reject("cluster.recovery.storage_bytes_per_s", recovery.storage_bytes_per_s, why)
    away_s = recovery.detect_s + recovery.restart_s
    from_storage_s = away_s + write_s
    found = [
        Saving(kind="synchronous", blocked_s=snapshot_s + write_s, recover_s=from_storage_s),
        Saving(kind="asynchronous", blocked_s=snapshot_s, durable_s=write_s, recover_s=from_storage_s),
    ]
    network = cluster.network_bytes_per_s * cluster.rates.network
    if nodes >= replicas and network > 0:
        from_memory_s = away_s + share / network
        mean_s = mttf_s(failures_per_node_day(cluster), nodes)
        found.append(
            Saving(
                kind="memory",
                blocked_s=snapshot_s,
                durable_s=write_s,
                recover_s=from_storage_s,
                memory_share=memory_share(nodes, replicas, from_memory_s / mean_s),
                memory_durable_s=(replicas - 1) * share / network,
                memory_recover_s=from_memory_s,
            )
        )
    return tuple(found)


def memory_share(nodes: int, replicas: int, more: float) -> float:
    """Failures that leave every state in some memory: one node is lost, and by Poisson's law `more` others in the
    mean before its state is held twice again."""
    share, weight = 0.0, math.exp(-more)
    for others in range(min(MOST_MORE, nodes - 1) + 1):
        share += weight * float(recovery_probability(nodes, replicas, 1 + others))
        weight *= more / (others + 1)
    return min(share, 1.0)


def spares(nodes_in_repair: float, certainty: float = 0.99) -> int:
    """Spare nodes that are enough at `certainty` of moments: nodes in repair are Poisson's, however long each
    repair takes (Palm's theorem)."""
    if nodes_in_repair > 700:
        # Beyond the range of exp: the normal limit, with its quantile at 99%.
        return math.ceil(nodes_in_repair + 2.3263 * math.sqrt(nodes_in_repair))
    count, weight = 0, math.exp(-nodes_in_repair)
    reached = weight
    while reached < certainty:
        count += 1
        weight *= nodes_in_repair / count
        reached += weight
    return count
