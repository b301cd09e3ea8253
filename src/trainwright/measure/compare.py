"""Seen against predicted: the records of a finished run beside the prediction of the same run.

A run too short for an instrumented step has no seconds by cause; the rest is compared all the same.
Times are the mean over ranks: each rank's causes sum to its own step, and the ranks wait for one another at
the end of it. Bytes are of each rank, against the prediction for its pipeline stage; by cause, of the rank with
the largest peak. What a program can't tell apart is summed up on the predicted side (`ledger.SEEN_SECONDS`,
`SEEN_BYTES`); memory that holds no tensors (`framework`) is not seen and not compared.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from trainwright.measure.mfu import utilization
from trainwright.spec.answers import ComparedQuantity, Comparison, Prediction, RankBytes
from trainwright.spec.errors import reject
from trainwright.spec.ledger import SEEN_BYTES, SEEN_SECONDS, BytesCause
from trainwright.spec.record import RankRecord
from trainwright.spec.run import Run

C = TypeVar("C")

WORKING_SET = "working set"
STATES: dict[str, BytesCause] = {
    "parameter_bytes": "parameters",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
}


def compare(run: Run, prediction: Prediction, records: Sequence[RankRecord]) -> Comparison:
    """Hold `records` (one per rank) against `prediction`. `InvalidSpec` where they aren't of this run."""
    _check_belong(run, records)
    fullest = max(records, key=lambda record: record.peak_bytes)
    return Comparison(
        run_name=run.name,
        run_hash=run.hash,
        steps_timed=min(record.steps_timed for record in records),
        quantities=_speed(run, prediction, records),
        ranks=tuple(_memory(prediction, record) for record in sorted(records, key=lambda record: record.rank)),
        seconds=tuple(
            ComparedQuantity(
                name=cause,
                predicted=_sum(prediction.ledger.seconds, parts),
                seen=_mean([record.seconds.get(cause, 0.0) for record in records]),
            )
            for cause, parts in SEEN_SECONDS.items()
            if any(record.seconds for record in records)
        ),
        bytes=tuple(
            ComparedQuantity(
                name=cause,
                predicted=_sum(_stage_bytes(prediction, fullest), parts),
                seen=_seen(_at_peak(prediction, fullest), fullest.peak_bytes, cause),
            )
            for cause, parts in SEEN_BYTES.items()
        ),
    )


def within_tolerance(comparison: Comparison, tolerance: float) -> bool:
    """Whether the step took as long as predicted, give or take `tolerance` of the prediction."""
    step = next(each for each in comparison.quantities if each.name == "step_s")
    return abs(step.residual) <= tolerance * step.predicted


def _check_belong(run: Run, records: Sequence[RankRecord]) -> None:
    for record in records:
        if record.run_hash != run.hash:
            reject(
                "run_hash",
                record.run_hash,
                f"the ledger is of another run than run.toml ({run.hash}); train again",
            )
    if len(records) != run.layout.world:
        reject("ledger", f"{len(records)} ranks", f"the run has {run.layout.world}; train again to the end")


def _speed(run: Run, prediction: Prediction, records: Sequence[RankRecord]) -> tuple[ComparedQuantity, ...]:
    tokens_per_s = _mean([record.tokens_per_s for record in records])
    seen_mfu = utilization(
        run.model,
        seq_len=run.recipe.seq_len,
        tokens_per_s_per_device=tokens_per_s / run.layout.world,
        convention=prediction.convention,
        peak_format=prediction.peak_format,
        peak_flops_per_s=prediction.peak_flops_per_s,
    )
    return (
        ComparedQuantity(
            name="step_s", predicted=prediction.step_s, seen=_mean([record.step_s for record in records])
        ),
        ComparedQuantity(
            name="tokens_per_s",
            predicted=prediction.tokens_per_s_per_device * run.layout.world,
            seen=tokens_per_s,
        ),
        ComparedQuantity(name="mfu", predicted=prediction.mfu, seen=seen_mfu.fraction),
    )


def _memory(prediction: Prediction, record: RankRecord) -> RankBytes:
    predicted, seen = _stage_bytes(prediction, record), _at_peak(prediction, record)
    states = [
        ComparedQuantity(name=name, predicted=predicted.get(cause, 0.0), seen=seen.get(cause, 0.0))
        for name, cause in STATES.items()
    ]
    peak = sum(_sum(predicted, parts) for parts in SEEN_BYTES.values())
    return RankBytes(
        rank=record.rank,
        quantities=(*states, ComparedQuantity(name="peak_bytes", predicted=peak, seen=record.peak_bytes)),
    )


def _stage_bytes(prediction: Prediction, record: RankRecord) -> Mapping[BytesCause, float]:
    """Bytes by cause that were predicted for the rank's pipeline stage."""
    if record.pp_rank >= len(prediction.stages):
        reject("ledger.pp_rank", record.pp_rank, f"the run has {len(prediction.stages)} pipeline ranks")
    return prediction.stages[record.pp_rank].ledger.bytes


def _at_peak(prediction: Prediction, record: RankRecord) -> dict[str, float]:
    """The rank's states at the peak. Of gradients it tells what it holds after a backward; where the peak is
    predicted before the first, they aren't there."""
    seen = dict(record.bytes)
    if not _stage_bytes(prediction, record).get("gradients", 0.0):
        seen["gradients"] = 0.0
    return seen


def _seen(states: Mapping[str, float], peak_bytes: float, cause: str) -> float:
    return peak_bytes - sum(states.values()) if cause == WORKING_SET else states.get(cause, 0.0)


def _sum(values: Mapping[C, float], causes: Sequence[C]) -> float:
    return sum(values.get(cause, 0.0) for cause in causes)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
