"""FLOPs that a step really computes, beside those that MFU counts; what recompute does again is left out.

They differ: a causal mask leaves half of the keys that the convention counts, flash attention's backward makes
its scores again, routers, multi-token prediction, copies on several tensor-parallel ranks and the padding of
experts are computed and not counted. `spec/waterfall.py` shows the difference.
"""

import numpy as np

from trainwright.plan.assembly import assembly
from trainwright.plan.causes import at, halves
from trainwright.plan.evaluation import Evaluation
from trainwright.plan.figures import kinds_of
from trainwright.plan.operations import AttentionCore, Matmul, Operation, Piece
from trainwright.plan.table import Floats, Table
from trainwright.spec.answers import ComputedFlops, WorkKind
from trainwright.spec.cluster import Format
from trainwright.spec.model import FlopConvention


def computed_flops(evaluation: Evaluation, row: int, convention: FlopConvention) -> dict[WorkKind, ComputedFlops]:
    """Of a device in the row's step, by kind."""
    most, mean = busiest(evaluation, row), _mean(evaluation, row)
    found: dict[WorkKind, ComputedFlops] = {}
    for kind, counted in _counted(evaluation.table, row, convention).items():
        flops, at_peak_s = _of_pieces(evaluation, row, kind)
        found[kind] = ComputedFlops(
            busiest_flops=float(most @ flops),
            mean_flops=float(mean @ flops),
            at_peak_s=float(most @ at_peak_s),
            counted_flops=counted,
        )
    return found


def _counted(table: Table, row: int, convention: FlopConvention) -> dict[WorkKind, float]:
    model, recipe = table.model, table.recipe
    per_device = recipe.tokens_per_step / float(table.world[row])
    whole = model.flops_per_token(recipe.seq_len, convention)
    matmul = whole if convention == "6n" else 6.0 * model.active_matmul_params
    return {"matmul": matmul * per_device, "attention": (whole - matmul) * per_device}


def busiest(evaluation: Evaluation, row: int) -> Floats:
    """Pieces that the rank with most seconds of acts computes in a step (`causes.busiest_seconds`)."""
    made, inside = assembly(evaluation.shape(row)), evaluation.inside_of(row)
    acts = evaluation.parts.acts[evaluation.table.columns.policy[row]]
    work_s = [sum(at(value, inside) for half in halves(each) for value in half.values()) for each in acts]
    # Where stages are held twice, each of the two computes half of the microbatches.
    times = made.stages.sum() / made.ranks.sum()
    return made.ranks[int((made.ranks @ work_s).argmax())] * times * float(evaluation.table.num_microbatches[row])


def _mean(evaluation: Evaluation, row: int) -> Floats:
    shape = evaluation.shape(row)
    return assembly(shape).stages.sum(axis=0) * float(evaluation.table.num_microbatches[row]) / shape.pp


def _of_pieces(evaluation: Evaluation, row: int, kind: WorkKind) -> tuple[Floats, Floats]:
    """FLOPs of each piece's forward and backward in one microbatch, and their seconds at peak, layers twice as
    `Figures` has them."""
    table, pieces = evaluation.table, evaluation.parts.pieces
    values = [_of_piece(table, piece, kind, evaluation.inside_of(row)) for piece in pieces]
    flops, at_peak_s = np.array([*values[: len(kinds_of(table))], *values]).T.copy()
    return flops, at_peak_s


def _of_piece(table: Table, piece: Piece, kind: WorkKind, inside: int) -> tuple[float, float]:
    total = at_peak_s = 0.0
    for each in piece.operations:
        if _kind(each) == kind:
            flops = at(_of_operation(each), inside)
            total, at_peak_s = total + flops, at_peak_s + flops / _peak(table, each)
    return total, at_peak_s


def _kind(each: Operation) -> WorkKind | None:
    if isinstance(each, Matmul):
        return "matmul"
    return "attention" if isinstance(each, AttentionCore) else None


def _of_operation(each: Operation) -> Floats | float:
    match each:
        case Matmul():
            return 3.0 * each.forward_flops
        case AttentionCore():
            return each.forward_flops + each.backward_flops
        case _:
            return 0.0


def _peak(table: Table, each: Operation) -> float:
    """Dense peak of the number format that an operation computes in."""
    low = isinstance(each, Matmul) and each.in_low_precision
    fmt: Format = table.recipe.product_format(table.cluster) if low else table.recipe.activation_format
    return table.cluster.peak(fmt) or table.cluster.device.peak_flops_per_s.fp32
