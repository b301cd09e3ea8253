"""Which layers stand on which pipeline stage; planner and trainer both read it here.

Where the layers divide evenly they are cut evenly. Where they don't, embedding and loss count as a slot each,
as Llama 3 did it (arXiv:2407.21783 s3.3.2): 126 layers on 16 stages are 128 slots of 8, so that the first and
the last stage hold 7 layers. Where slots are equal, the stages in the middle come first.
"""

from trainwright.spec.errors import reject


def layers_of_stages(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage, in order: stage i of chunk c on rank r is number c * pp + r.

    Raises `InvalidSpec` where there are fewer layers than stages.
    """
    if num_layers < num_stages:
        reject("layout.pp*vpp", num_stages, f"needs a layer for each stage; the model has {num_layers}")
    sizes = _sizes(num_layers, num_stages)
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _sizes(num_layers: int, num_stages: int) -> list[int]:
    even, rest = divmod(num_layers, num_stages)
    if not rest:
        return [even] * num_stages
    # Every stage gets a layer, then each further one goes to the stage with the fewest slots taken.
    sizes = [1] * num_stages
    slots = [1 + (stage in (0, num_stages - 1)) for stage in range(num_stages)]
    for _ in range(num_layers - num_stages):
        stage = min(range(num_stages), key=lambda at: (slots[at], abs(2 * at - (num_stages - 1))))
        sizes[stage] += 1
        slots[stage] += 1
    return sizes
