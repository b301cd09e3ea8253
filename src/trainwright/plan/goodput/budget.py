"""What failures make of a prediction's GPU-hours, days and dollars: the mean, by the complete form.

Saves are written beside the steps, as the trainer does, and as often as is best, unless the run says otherwise.
"""

from trainwright.plan.goodput.closed_forms import complete, mttf_s
from trainwright.plan.goodput.intervals import best_steps
from trainwright.plan.goodput.savings import failures_per_node_day, nodes_of, saved_bytes, savings
from trainwright.spec.answers import Prediction
from trainwright.spec.checkpointing import Checkpointing
from trainwright.spec.cluster import ClusterSpec
from trainwright.spec.goodput import WithFailures
from trainwright.spec.model import ModelSpec

LEAST = 1e-3
"""Below it a run gets nowhere, and its hours say nothing."""


def with_failures(
    prediction: Prediction, model: ModelSpec, cluster: ClusterSpec, checkpoint: Checkpointing | None
) -> Prediction:
    """The prediction with its budget under failures; as it is where the cluster has no rate of them, or the run
    gets nowhere."""
    if cluster.failures_per_device_day is None or cluster.recovery is None:
        return prediction
    devices, step_s = prediction.layout.world, prediction.step_s
    mean_s = mttf_s(failures_per_node_day(cluster), nodes_of(cluster, devices))
    synchronous, asynchronous = savings(cluster, saved_bytes(model, prediction.recipe), devices, replicas=2)[:2]
    saving = synchronous if checkpoint is not None and not checkpoint.asynchronous else asynchronous
    steps = checkpoint.every_steps if checkpoint is not None else None
    interval_s = max(step_s * (steps or best_steps(saving, mean_s, step_s)), saving.least_interval_s)
    ettr = complete(saving, mean_s, interval_s)
    if ettr < LEAST:
        return prediction
    totals = {name: getattr(prediction, name) for name in ("gpu_hours", "days", "cost_usd")}
    return prediction.changed(
        with_failures=WithFailures(
            kind=saving.kind,
            ettr=ettr,
            mttf_s=mean_s,
            interval_s=interval_s,
            **{name: None if value is None else value / ettr for name, value in totals.items()},
        )
    )
