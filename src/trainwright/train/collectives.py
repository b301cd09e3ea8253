"""Two collectives by one name: PyTorch 2.13 renamed them, and deprecated the names that older releases have."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""all_gather(output, input, group=...): every rank's input, end to end along dim 0."""

reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""reduce_scatter(output, input, group=...): this rank's part, along dim 0, of the sum of the inputs."""
