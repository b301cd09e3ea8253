"""Start one node's workers and wait for them. No PyTorch is imported here: the supervisor runs in a child process.

Output of the workers comes through line by line. Ctrl-C and SIGTERM are passed on to the supervisor, which ends
its workers; if it doesn't within `PATIENCE_S` seconds, it is killed with what it started.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from trainwright.spec.run import Run

PATIENCE_S = 15.0

# One thread per rank: ranks share the cores. The next three silence libraries that print on every
# start; the last is how many collectives PyTorch's flight recorder keeps, of which a hang is explained.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "99",
    "PYTHONWARNINGS": "ignore",
    "TORCH_FR_BUFFER_SIZE": "256",
}


def launch(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    on_line: Callable[[str], None] | None = None,
    supervised: Run | None = None,
    plants: Path | None = None,
) -> int:
    """Run `trainwright <arguments>` on `num_ranks` processes of this node; returns the workers' exit status.

    `on_line` gets each line of their output (stdout and stderr together); without it they write to ours.
    Ctrl-C gives 130, SIGTERM 143. `supervised`: the run, which has a table `supervision`, that they carry out;
    `plants`: faults to put into it.
    """
    if supervised is None:
        call = f"supervise({num_ranks}, {list(arguments)!r})"
    else:
        planted = None if plants is None else str(plants)
        call = f"supervise_run({json.dumps(supervised.plain())!r}, {list(arguments)!r}, {planted!r})"
    program = f"from trainwright.train.supervisor import supervise, supervise_run; raise SystemExit({call})"
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **WORKER_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=None if on_line is None else subprocess.PIPE,
        stderr=None if on_line is None else subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    received: list[int] = []
    try:
        with _forwarding(child, received):
            if on_line is not None:
                assert child.stdout is not None
                for line in child.stdout:
                    on_line(line.rstrip("\n"))
            status = child.wait()
    finally:
        _end(child)
    if received:
        return 128 + received[0]
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def _forwarding(child: subprocess.Popen[str], received: list[int]) -> Iterator[None]:
    """While it lasts, SIGINT and SIGTERM go to the child, noted in `received`; a child that ignores them is
    killed after `PATIENCE_S`. Only a main thread may do so; another one leaves signals alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watches: list[threading.Timer] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        watch = threading.Timer(PATIENCE_S, _kill_group, [child])
        watch.daemon = True
        watch.start()
        watches.append(watch)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for watch in watches:
            watch.cancel()


def _end(child: subprocess.Popen[str]) -> None:
    """Leave no process of the child's session behind."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE_S)
    _kill_group(child)
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def _kill_group(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
