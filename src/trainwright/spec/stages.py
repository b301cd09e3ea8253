"""Which layers stand on which pipeline stage; planner and trainer both read it here.

Where the layers divide evenly they are cut evenly. Where they don't, embedding and loss count as a slot each,
as Llama 3 did it (arXiv:2407.21783 s3.3.2): 126 layers on 16 stages are 128 slots of 8, so that the first and
the last stage hold 7 layers, and on 128 stages the first has the embedding and the last the loss alone. Where
slots are equal, the stages in the middle come first.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from trainwright.spec.errors import reject


def layers_of_stages(num_layers: int, num_stages: int, chosen: Sequence[int] = ()) -> tuple[range, ...]:
    """The layers of each stage, in order; `chosen` says how many each holds, where the layout chooses itself.

    Raises `InvalidSpec` where there are fewer layers than stages, or the chosen ones aren't all layers.
    """
    return _cut(num_layers, num_stages, tuple(chosen))


@lru_cache(maxsize=4096)
def _cut(num_layers: int, num_stages: int, chosen: tuple[int, ...]) -> tuple[range, ...]:
    if chosen:
        return _chosen(num_layers, num_stages, chosen)
    if num_layers < min_layers(num_stages):
        reject(
            "layout.pp*vpp",
            num_stages,
            f"needs a layer for each stage but the first and the last; the model has {num_layers}",
        )
    sizes = _sizes(num_layers, num_stages)
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def min_layers(num_stages: int) -> int:
    """The fewest layers that so many stages can be made of."""
    return max(num_stages - 2, 1) if num_stages > 2 else num_stages


def sizes_text(sizes: Sequence[int]) -> str:
    """Layers of stages in words, equal neighbours together: `7, 8 x 14, 7`."""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    return ", ".join(f"{size} x {count}" if count > 1 else str(size) for size, count in runs)


def _chosen(num_layers: int, num_stages: int, sizes: Sequence[int]) -> tuple[range, ...]:
    if len(sizes) != num_stages:
        reject("layout.stage_layers", list(sizes), f"has {len(sizes)} stages; the layout has {num_stages}")
    if min(sizes[1:-1], default=1) < 1:
        reject("layout.stage_layers", list(sizes), "only the first and the last stage may be without layers")
    if sum(sizes) != num_layers:
        reject("layout.stage_layers", list(sizes), f"sums to {sum(sizes)} layers; the model has {num_layers}")
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _sizes(num_layers: int, num_stages: int) -> list[int]:
    even, rest = divmod(num_layers, num_stages)
    if not rest:
        return [even] * num_stages
    slots, rest = divmod(num_layers + 2, num_stages)
    middle_first = sorted(range(num_stages), key=lambda at: abs(2 * at - (num_stages - 1)))
    sizes = [slots] * num_stages
    for stage in middle_first[:rest]:
        sizes[stage] += 1
    sizes[0] -= 1
    sizes[-1] -= 1
    return sizes
