"""The supervisor of one node's workers: what `torchrun` does, with the workers' exit status kept.

The `torchrun` command turns every failure into status 1 and a banner. A run that was refused for bad input must
end with 2 and its one line, so the elastic launcher under it is called through its public interface.
`launch.py` starts this in a process of its own.
"""

import logging
import os
import sys
import uuid

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

BAD_INPUT = 2


def supervise(num_ranks: int, arguments: list[str]) -> int:
    """Run `python -m trainwright <arguments>` on `num_ranks` workers of this node; the exit status to pass on.

    If one fails, the others are ended. The status is 2 if any worker refused its input, else the first failure's.
    """
    logging.disable(logging.CRITICAL)  # This process has nothing to say that the workers haven't said.
    # The launcher's own store serves the workers' rendezvous; PyTorch 2.13 hands restarted gloo workers stale
    # addresses from it unless each attempt makes its own store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "trainwright", *arguments)
    except ChildFailedError as error:
        statuses = [failure.exitcode for failure in error.failures.values()]
        first = error.get_first_failure()[1].exitcode
        return BAD_INPUT if BAD_INPUT in statuses else first if first > 0 else 128 - first
    except SignalException as signalled:
        return 128 + signalled.sigval
    return 0
