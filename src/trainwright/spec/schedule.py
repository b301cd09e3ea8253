"""Pipeline schedules as data: for each rank a row of acts, in the order in which the rank does them.

The planner gives acts durations and plays the rows; the trainer gives them functions and runs the rows; so they
can't disagree about the order. A schedule is three functions of (pp, vpp, num_microbatches): its rows, which
stages the chunks of a rank are, and what it can't do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from trainwright.spec.errors import reject
from trainwright.spec.schedules.acts import Act, Placement, Row, Rows, folded, looped, mirrored, round_ends
from trainwright.spec.schedules.dualpipe import dualpipe, dualpipe_v
from trainwright.spec.schedules.forward_first import breadth_first
from trainwright.spec.schedules.one_forward_one_backward import interleaved_1f1b, one_f_one_b
from trainwright.spec.schedules.zero_bubble import zb_h1, zb_v

__all__ = ["SCHEDULES", "Act", "Placement", "Row", "Rows", "Schedule", "round_ends"]


@dataclass(frozen=True)
class Schedule:
    """The order of a step's acts on every rank of a pipeline."""

    rows: Callable[[int, int, int], Rows]
    """(pp, vpp, num_microbatches), which `check` lets through."""
    stages: Callable[[int, int], Placement]
    """(pp, vpp) to the stage that each chunk of each rank is, `[rank][chunk]`."""
    check: Callable[[int, int, int], None]
    """(pp, vpp, num_microbatches); raises `InvalidSpec` where the schedule can't run them."""
    forwards_first: bool = False
    """Whether all forwards come before the first backward."""
    splits_backward: bool = False
    """Whether some weight gradients are acts of their own."""

    def num_stages(self, pp: int, vpp: int) -> int:
        """Stages that the model is cut into; fewer than chunks where stages are held twice."""
        return max(map(max, self.stages(pp, vpp))) + 1


Check = Callable[[int, int, int], None]


def _one_chunk(name: str) -> Check:
    def check(pp: int, vpp: int, num_microbatches: int) -> None:
        if vpp != 1:
            remedy = f"runs one chunk per rank; layout.vpp={vpp} needs interleaved_1f1b"
            reject("recipe.schedule", name, remedy)

    return check


def _many_chunks(name: str, plain: str, *, rounds: bool) -> Check:
    def check(pp: int, vpp: int, num_microbatches: int) -> None:
        if vpp == 1:
            reject("recipe.schedule", name, f"needs layout.vpp above 1; use {plain}")
        if rounds and num_microbatches % pp:
            _reject_number(num_microbatches, f"{name} needs a multiple of pp={pp}")

    return check


def _two_chunks(name: str, *, both_ways: bool = False, even: bool = False) -> Check:
    def check(pp: int, vpp: int, num_microbatches: int) -> None:
        if vpp != 2:
            reject("layout.vpp", vpp, f"{name} has two chunks per rank; set layout.vpp=2")
        if even and pp % 2:
            reject("layout.pp", pp, f"must be even: {name} goes through the pipe from both ends")
        if even and num_microbatches % 2:
            _reject_number(num_microbatches, f"{name} needs an even number, half of them for each way")
        if both_ways and num_microbatches < 2 * pp:
            _reject_number(num_microbatches, f"{name} needs 2*pp={2 * pp} or more")

    return check


def _reject_number(num_microbatches: int, needs: str) -> NoReturn:
    remedy = f"{needs}; change recipe.global_batch, recipe.micro_batch, layout.dp or the schedule"
    reject("num_microbatches", num_microbatches, remedy)


SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": Schedule(one_f_one_b, looped, _one_chunk("1f1b")),
    "interleaved_1f1b": Schedule(interleaved_1f1b, looped, _many_chunks("interleaved_1f1b", "1f1b", rounds=True)),
    "gpipe": Schedule(breadth_first, looped, _one_chunk("gpipe"), forwards_first=True),
    "breadth_first": Schedule(
        breadth_first, looped, _many_chunks("breadth_first", "gpipe", rounds=False), forwards_first=True
    ),
    "zb_h1": Schedule(zb_h1, looped, _one_chunk("zb_h1"), splits_backward=True),
    "zb_v": Schedule(zb_v, folded, _two_chunks("zb_v"), splits_backward=True),
    "dualpipe": Schedule(
        dualpipe, mirrored, _two_chunks("dualpipe", both_ways=True, even=True), splits_backward=True
    ),
    "dualpipe_v": Schedule(dualpipe_v, folded, _two_chunks("dualpipe_v", both_ways=True), splits_backward=True),
}
"""By the name that `Recipe.schedule` has."""
