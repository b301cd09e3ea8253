"""What scripts on several ranks begin and end with: gloo's group, and the first rank's results in a file."""

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainwright.train.mesh import leave

TIMEOUT = timedelta(seconds=60)


def begun() -> int:
    """Join the group of all ranks, one thread each; this rank. Without torchrun it is the only one."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank()


def ended(output: Path, results: object) -> None:
    """Write what the first rank found, and leave once all are done."""
    if dist.get_rank() == 0:
        output.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)
