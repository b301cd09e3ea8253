"""Start a script of this folder on several ranks and read what it wrote."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_ranks(script: str, world: int, *arguments: str, timeout_s: float = 240.0) -> str:
    """Run a script on `world` processes, one thread each; what it said. Fails, with that, where it does."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each rank starts a pool of processes
    }
    command = [sys.executable, str(HERE / script), *arguments]
    if world > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{script} on {world} ranks ended with {done.returncode}:\n{output[-8000:]}"
    return output
