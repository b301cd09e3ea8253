"""The worker of `test_bench.py`: all measurements, few sizes, short repetitions; the first rank writes samples."""

import sys
from pathlib import Path

from trainwright.spec.layout import Layout
from trainwright.train.bench import Bench, kernels, links, stopwatch
from trainwright.train.mesh import Worker, joined, leave

if __name__ == "__main__":
    kernels.MATMULS = kernels.SHARED_MATMULS = ((32, 32, 32), (64, 64, 64))
    kernels.GROUPED_ROWS = (8,)
    kernels.ATTENTION_LENGTHS = (64, 128)
    kernels.UPDATED_PARAMS = 1 << 18
    links.MESSAGE_BYTES = (1 << 12, 1 << 16)
    links.STATE_BYTES = (1 << 18,)
    stopwatch.REPETITION_S = 1e-4
    worker = Worker.from_environment()
    with joined(Layout(dp=worker.world)) as mesh:
        found = Bench(worker, mesh.device, budget_s=0.1).samples()
    if worker.rank == 0:
        Path(sys.argv[1]).write_text("".join(f"{sample.model_dump_json()}\n" for sample in found))
    leave(0)
