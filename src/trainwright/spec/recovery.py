"""How long a failure stops a run, and how fast its state is written and read: what a cluster knows of that.

The rate of failures stands beside it, `failures_per_device_day`. Values with their sources are in
`data/recovery.toml`, for every cluster that doesn't say otherwise.
"""

from trainwright.spec.base import Count, NonNegative, Noun, Positive


class Recovery(Noun):
    """From a failure to the next step, and the ways of the state."""

    detect_s: NonNegative
    """From the failure until it is noticed and its node known."""
    restart_s: NonNegative
    """From then until processes on whole nodes are ready to load: replacement, start, communicators."""
    repair_s: NonNegative
    """Until a node that failed is whole again and a spare: spares bridge it."""
    storage_bytes_per_s: Positive
    """What one node writes to and reads from storage while all nodes do."""
    snapshot_bytes_per_s: Positive
    """What one device copies into its host's memory while all of its node do."""
    nodes_per_rack: Count
    """Nodes that may be lost together: replicas are kept in other racks."""
