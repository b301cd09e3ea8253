"""The planner's counts of one rank of one run, all together."""

from trainwright.plan.exact.flops import flops
from trainwright.plan.exact.kept import kept
from trainwright.plan.exact.layers import add_layer_messages
from trainwright.plan.exact.messages import Messages
from trainwright.plan.exact.standing import Standing
from trainwright.plan.exact.states import add_state_messages, state_bytes
from trainwright.spec.counts import Counts
from trainwright.spec.run import Run


def predicted_counts(run: Run, rank: int) -> Counts:
    """What `rank` of a checked run computes, sends and holds in a step, in whole numbers.

    Bytes over time are `plan.memory_over_time`'s.
    """
    standing = Standing(run, rank)
    messages = Messages(standing)
    add_layer_messages(standing, messages)
    add_state_messages(standing, messages)
    return Counts(
        rank=rank,
        pp_rank=standing.at.pp,
        num_microbatches=run.num_microbatches,
        flops=flops(standing),
        collectives=messages.counts(),
        states=state_bytes(standing),
        saved=kept(standing),
    )
