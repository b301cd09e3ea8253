"""Who this process is and whom it talks to: the only file that reads RANK, WORLD_SIZE and LOCAL_RANK.

`joined` turns a `Layout` into the groups of each axis (ranks ordered innermost to outermost tp, cp, pp, dp) and
a `DeviceMesh` over the same groups for PyTorch's tensor parallelism and sharding. gloo serves CPUs and NCCL
serves GPUs; `_device` alone decides, where nobody asks for the CPU. Every group has a timeout, so that a lost
peer is an error and not a hang.

A process group that is alive at interpreter exit may abort the process with a wrong status (PyTorch 2.13), so
`joined` always destroys what it made, and a worker ends through `leave`.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainwright.spec.errors import reject
from trainwright.spec.groups import Division, divisions, role
from trainwright.spec.layout import Coordinate, Layout

TIMEOUT_S = 300.0
"""For a rank to answer. Longer than any step or compilation, shorter than anyone's patience."""
BACKENDS = ("gloo", "NCCL", "Gloo", "TCPStore", "ProcessGroup")
"""One of which an error names that comes of a peer's end."""
FAIL_LATER_S = 5.0
"""Longer than a supervisor takes to see a worker gone, and than that worker takes to go."""


@dataclass(frozen=True)
class Worker:
    """This process among those that torchrun started; a process that it didn't start is alone."""

    rank: int
    local_rank: int
    world: int
    local_world: int = 1
    """Of the same node."""

    @staticmethod
    def from_environment() -> "Worker":
        values = os.environ
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        rank, local_rank, world, local_world = (int(values.get(name, name.endswith("SIZE"))) for name in names)
        return Worker(rank, local_rank, world, local_world)


@dataclass(frozen=True)
class Mesh:
    """This rank's place in a layout and its group on each axis; an axis of degree 1 has no group."""

    layout: Layout
    rank: int
    device: torch.device
    dp_replicate: int = 1
    """The plane dp x cp is read as dp_replicate x dp_shard where shards are replicated (HSDP)."""
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """By axis; also `dp_cp` of all ranks that share parameters, its parts `dp_replicate` and `dp_shard`,
    `first_last` between the ends of the pipeline, and `twins` between a rank of it and its mirror image, where pp
    is even; of experts `etp`, `ep`, and `edp` between replicas, with `edp_replicate` and `edp_shard`."""
    device_mesh: DeviceMesh | None = None
    """Axes dp_replicate, dp_shard (which has cp inside), pp, tp, outermost first; None for a process that is
    alone."""
    expert_mesh: DeviceMesh | None = None
    """The same ranks as experts are spread over them: edp_replicate, edp_shard, pp, ep, etp."""

    @property
    def coordinate(self) -> Coordinate:
        return self.layout.coordinate(self.rank)

    @property
    def dp_cp(self) -> int:
        """Ranks that share parameters: each has other samples or other positions of them."""
        return self.layout.dp * self.layout.cp

    @property
    def dp_shard(self) -> int:
        return self.dp_cp // self.dp_replicate

    def submesh(self, *axes: str) -> DeviceMesh:
        assert self.device_mesh is not None
        return self.device_mesh[axes[0]] if len(axes) == 1 else self.device_mesh[axes]

    def expert_submesh(self, *axes: str) -> DeviceMesh:
        assert self.expert_mesh is not None
        return self.expert_mesh[axes[0]] if len(axes) == 1 else self.expert_mesh[axes]

    def peer(self, pp_rank: int) -> int:
        """Global rank of the pipeline peer at `pp_rank`."""
        return self.layout.rank(self.coordinate._replace(pp=pp_rank))

    def sum_over_world(self, values: list[float]) -> list[float]:
        """Each of `values` summed over all ranks, in float64."""
        if self.layout.world == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def barrier(self) -> None:
        if self.layout.world > 1:
            dist.barrier()


@contextmanager
def joined(
    layout: Layout, dp_replicate: int = 1, timeout_s: float = TIMEOUT_S, *, on_cpu: bool = False
) -> Iterator[Mesh]:
    """The mesh of `layout`, with process groups that live as long as the context; `on_cpu` leaves devices alone.

    Raises `InvalidSpec` where the layout's ranks aren't the processes that were started.
    """
    worker = Worker.from_environment()
    if layout.world != worker.world:
        reject(
            "layout",
            f"{layout.world} ranks",
            f"but {worker.world} process(es) were started; start {layout.world} or change the degrees",
        )
    if worker.world > 1:
        torch.set_num_threads(1)
    device, backend = (torch.device("cpu"), "gloo") if on_cpu else _device(worker.local_rank)
    timeout = timedelta(seconds=timeout_s)
    if layout.world == 1:
        yield build_mesh(layout, 0, device, dp_replicate, timeout)
        return
    dist.init_process_group(backend, rank=worker.rank, world_size=worker.world, timeout=timeout)
    try:
        yield build_mesh(layout, worker.rank, device, dp_replicate, timeout)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def build_mesh(
    layout: Layout,
    rank: int,
    device: torch.device,
    dp_replicate: int,
    timeout: timedelta,
    made: dict[tuple[str, Division], dist.ProcessGroup] | None = None,
) -> Mesh:
    """Groups of every axis among initialized ranks; all of them call it. A rank that is alone has none.

    made: this rank's groups that exist already, by role and division, to which new ones are added; the same on all
    ranks but for the groups.
    """
    if layout.world == 1:
        return Mesh(layout, rank, device, dp_replicate)
    groups: dict[str, dist.ProcessGroup] = {}
    shard = layout.dp * layout.cp // dp_replicate
    made = {} if made is None else made
    for axis, all_ranks in divisions(layout, dp_replicate).items():
        key = role(axis, all_ranks)
        if key in made:
            groups[axis] = made[key]
            continue
        mine = next(ranks for ranks in all_ranks if rank in ranks)
        # With local synchronization a rank makes only its own groups, whose number doesn't grow with the world.
        # PyTorch names them by how many a rank has made, so every rank makes one on every axis.
        group = dist.new_group(list(mine), timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        groups[axis] = made[key] = group
    ranks = torch.arange(layout.world)
    if layout.order == "tp-cp-pp-dp":
        ranks = ranks.view(layout.dp, layout.pp, layout.cp, layout.tp).transpose(1, 2)
    else:
        ranks = ranks.view(layout.pp, layout.dp, layout.cp, layout.tp).permute(1, 2, 0, 3)
    ranks = ranks.reshape(dp_replicate, shard, layout.pp, layout.tp)
    names = ("dp_replicate", "dp_shard", "pp", "tp")
    device_mesh = DeviceMesh.from_group([groups[name] for name in names], device.type, ranks, mesh_dim_names=names)
    expert_names = ("edp_replicate", "edp_shard", "pp", "ep", "etp")
    grid = torch.tensor(layout.expert_grid()).view(layout.pp, dp_replicate, -1, layout.ep, layout.etp)
    expert_mesh = DeviceMesh.from_group(
        [groups[name] for name in expert_names],
        device.type,
        grid.permute(1, 2, 0, 3, 4),
        mesh_dim_names=expert_names,
    )
    live = {axis: group for axis, group in groups.items() if group.size() > 1}
    return Mesh(layout, rank, device, dp_replicate, live, device_mesh, expert_mesh)


@contextmanager
def failing_in_turn(mesh: Mesh) -> Iterator[None]:
    """A rank whose peers are gone waits a moment before it fails too: the supervisor ends it meanwhile, and
    what the user reads is what the first one said."""
    try:
        yield
    except RuntimeError as error:
        if mesh.layout.world > 1 and any(name in str(error) for name in BACKENDS):
            time.sleep(FAIL_LATER_S)
        raise


def leave(status: int) -> NoReturn:
    """End a worker at once with `status`, output flushed: threads of process groups can't change it any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _device(local_rank: int) -> tuple[torch.device, str]:
    """Where tensors live and which backend connects them."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank), "nccl"
    return torch.device("cpu"), "gloo"
