"""`chaos`: which faults are put into a run, drawn from a seed, and what they cost, read from what two runs left.

Faults come one after the other, a save or more apart, so that each is met by a run that is whole.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from trainwright.spec.chaos import Blow, Planted, Toll
from trainwright.spec.errors import nearest, reject
from trainwright.spec.run import Run
from trainwright.train.checkpoint.directory import saves_in
from trainwright.train.checkpoint.files import digest_of

SEEN_AS: dict[str, tuple[str, ...]] = {
    "kill": ("died",),
    "later": ("died",),
    "crash": ("died",),
    "stop": ("hung",),
    "busy": ("hung",),
    "store": ("hung",),
    "rot": ("died",),
    "full": (),
    "flip": ("corrupt",),
    "lose": ("died",),
}
"""Kinds that are drawn, and what each is told as; a full disk is a note of the save, and no fault of a process."""
PLACES = 1000
"""Of what is drawn beside rank and step: which bit, or which thousandth of two steps and the save between."""
LEAST_APART = 3
"""Steps: a fault, the rest of its step, and one that is well."""


def kinds_of(run: Run, chosen: Sequence[str]) -> list[str]:
    """Those of `chosen`, or all, that the run can have; refuses what it can't, where it was asked for."""
    left_out = left_out_of(run)
    for kind in chosen:
        if kind not in SEEN_AS:
            reject("--kinds", kind, f"is no fault; {nearest(kind, SEEN_AS)}")
        if kind in left_out:
            reject("--kinds", kind, f"{left_out[kind]}; add it with --set, or leave the kind out")
    return [kind for kind in chosen or SEEN_AS if kind not in left_out]


def left_out_of(run: Run) -> dict[str, str]:
    """Kinds that a run can't have, and why."""
    assert run.supervision is not None
    assert run.checkpoint is not None
    found: dict[str, str] = {}
    if not has_replicas(run):
        found["flip"] = (
            "needs state that each has a replica, as recipe.zero=0 with dp: a bit that flips in memory in a shard "
            "that no other rank holds is unseen by nature"
        )
    elif not run.supervision.digest_every_steps:
        found["flip"] = "needs supervision.digest_every_steps above 0"
    if not run.checkpoint.memory_every_steps:
        found["lose"] = "needs checkpoint.memory_every_steps above 0"
    return found


def has_replicas(run: Run) -> bool:
    """Whether every tensor of the state is held by two ranks or more, so that a flipped bit can be found."""
    layout, recipe = run.layout, run.recipe
    if recipe.dp_replicate > 1:
        return True
    unsharded = not recipe.zero or layout.dp * layout.cp == 1
    return unsharded and layout.dp * layout.cp > 1 and (not run.model.is_moe or layout.expert_dp > 1)


def drawn(run: Run, steps: int, faults: int, kinds: Sequence[str], seed: int) -> list[Planted]:
    """A plan: kinds in turn, in a drawn order, at drawn ranks, evenly over the steps."""
    assert run.checkpoint is not None
    apart = max(LEAST_APART, run.checkpoint.every_steps or 0)
    first = 1 + apart
    most = max(0, (steps - first) // apart)
    if faults > most:
        reject("--faults", faults, f"is more than {most}, one every {apart} of {steps} steps; give more --steps")
    generator, plan = random.Random(seed), []
    order: list[str] = []
    for number in range(faults):
        if not order:
            order = generator.sample(list(kinds), len(kinds))
        kind, room = order.pop(), (steps - first) // faults
        step = first + number * room + generator.randrange(max(1, room - apart + 1))
        place = generator.randrange(1 if kind == "full" else PLACES)
        rank = generator.randrange(run.layout.world)
        plan.append(Planted.parse({"kind": kind, "rank": rank, "step": step, "place": place}))
    return plan


def toll(
    run: Run, seed: int, plan: Sequence[Planted], plain: Path, hurt: Path, seconds: tuple[float, float]
) -> Toll:
    """What a plan cost: `plain` and `hurt` are the outputs of the two runs, which took `seconds`."""
    told = _lines(hurt / "faults.jsonl")
    left = [each for each in told if each["kind"] in ("died", "hung", "corrupt", "slow", "diverged")]
    resumed = {each["attempt"]: each for each in told if each["kind"] == "resumed"}
    blows = []
    for each in plan:
        wanted = SEEN_AS[each.kind]
        if not wanted:
            blows.append(Blow(kind=each.kind, rank=each.rank, step=each.step, seen_as="", is_right=True))
            continue
        found = next((fault for fault in left if fault["step"] >= each.step), None)
        if found is None:
            blows.append(Blow(kind=each.kind, rank=each.rank, step=each.step, seen_as="", is_right=False))
            continue
        left.remove(found)
        back = resumed.get(found["attempt"] + 1, {})
        # Of two replicas it can't be told which has the flipped bit.
        is_right = found["kind"] in wanted and found.get("rank") in (
            each.rank,
            None if each.kind == "flip" else each.rank,
        )
        blows.append(
            Blow(
                kind=each.kind,
                rank=each.rank,
                step=each.step,
                seen_as=found["text"],
                is_right=is_right,
                found_after_s=found["found_after_s"],
                back_after_s=back.get("found_after_s", 0.0),
                done_again=back.get("done_again", 0),
            )
        )
    losses = [[(line["step"], line["loss"]) for line in _lines(out / "metrics.jsonl")] for out in (plain, hurt)]
    differing = (step for (step, one), (_, other) in zip(*losses, strict=False) if one != other)
    return Toll(
        run_name=run.name,
        seed=seed,
        ranks=run.layout.world,
        steps=len(losses[0]),
        blows=tuple(blows),
        left_out=left_out_of(run),
        false_alarms=tuple(each["text"] for each in left),
        losses_equal=losses[0] == losses[1],
        first_difference=next(differing, 0),
        state_equal=state_digest(plain) == state_digest(hurt),
        plain_s=seconds[0],
        hurt_s=seconds[1],
    )


def state_digest(out: Path) -> str:
    """Of weights and moments of a run's newest commit, whichever ranks wrote them."""
    newest = next(save for save in saves_in(out / "checkpoints") if save.is_committed)
    pieces = sorted(
        (piece.tensor, piece.start, piece.shape, piece.digests)
        for part in newest.manifest().parts
        for piece in part.pieces
    )
    return digest_of(json.dumps([newest.step, pieces]).encode())


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
