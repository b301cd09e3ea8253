"""Rules about failures that need no process: who hangs, who is slow, what a guard lets through, which places are
used, and a directory in memory that outlives its workers."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.bare.plans import cluster, dense_model
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.run import Run
from trainwright.spec.supervision import Guard, GuardState, Supervision
from trainwright.train.faults.beats import PID, STEP, beat_file, words_of
from trainwright.train.faults.guard import FIRST_LOSSES, Judge
from trainwright.train.faults.hangs import STOPPED_S, learned_s, named, stands_still, stopped
from trainwright.train.faults.places import Places, smaller, stages_of, visible_devices
from trainwright.train.faults.reasons import Diverged, RollBack
from trainwright.train.faults.shared import shared_directory
from trainwright.train.faults.sights import Answer, Collective, Sight
from trainwright.train.faults.slowness import WINDOW, Slowness
from trainwright.train.faults.watchdog import Watchdog


def sight(rank: int, **fields: object) -> Sight:
    values = {"pid": 100 + rank, "state": "R", "silent_s": 0.05, "still_s": 2.5, "longest_s": 0.1}
    return Sight(rank=rank, **{**values, "step": 7, "steps_done": 6, "phase": "compute", **fields})  # type: ignore[arg-type]


def waits(number: int, group: str = "a", axis: str = "dp") -> Answer:
    return Answer("", True, (Collective(group, axis, "all_reduce", number),))


def test_ranks_that_get_on_don_t_hang() -> None:
    assert not stands_still([sight(0), sight(1, still_s=0.3)], 2.0, 300.0)
    assert stands_still([sight(0), sight(1)], 2.0, 300.0)
    # A run whose acts take long is given longer; what is outside of steps, and the first steps, longer still.
    assert not stands_still([sight(0), sight(1, longest_s=1.0)], 2.0, 300.0)
    assert not stands_still([sight(0), sight(1, phase="saving")], 2.0, 300.0)
    assert not stands_still([sight(0), sight(1, steps_done=1)], 2.0, 300.0)
    # Unless an earlier start of the same processes got through its first steps.
    assert stands_still([sight(0), sight(1, steps_done=1)], 2.0, 300.0, known_s=0.5)
    assert not stands_still([sight(0), sight(1, steps_done=1)], 2.0, 300.0, known_s=1.0)
    assert not stands_still([sight(0), sight(1, phase="loading")], 2.0, 300.0, known_s=0.5)
    assert learned_s([sight(0, longest_s=0.4), sight(1, longest_s=0.7)]) == 0.7
    assert learned_s([sight(0, longest_s=0.4), sight(1, longest_s=0.7, steps_done=1)]) == 0.0
    assert stands_still([sight(rank, phase="loading", still_s=301.0) for rank in range(2)], 2.0, 300.0)


def test_a_stopped_process_is_named_after_a_moment() -> None:
    sights = [sight(0, phase="dp"), sight(1, state="T")]
    assert stopped(sights, {1: STOPPED_S / 2}) is None
    hang = stopped(sights, {1: STOPPED_S})
    assert hang is not None
    assert hang.ranks == (1,)
    assert hang.text == "rank 1 hangs in compute of step 7: its process is stopped"


def test_who_is_silent_hangs() -> None:
    hang = named([sight(0), sight(1, silent_s=2.4)], {0: waits(5)}, 0.5)
    assert hang.ranks == (1,)
    assert "no other thread of it gets to run; 0 wait in all_reduce number 5 over dp" in hang.text


def test_who_waits_for_nobody_hangs() -> None:
    answers = {0: waits(5), 1: Answer("loss.py:3 in forward", False), 2: waits(5)}
    hang = named([sight(rank) for rank in range(3)], answers, 0.5)
    assert hang.ranks == (1,)
    assert hang.text == (
        "rank 1 hangs in compute of step 7 (loss.py:3 in forward): 0, 2 wait in all_reduce number 5 over dp"
    )


def test_who_has_not_come_to_a_collective_hangs_where_all_wait() -> None:
    """Rank 3 waits in another group, which shows that the numbers of one group alone are compared."""
    answers = {0: waits(5), 1: waits(4), 2: waits(5), 3: waits(90, "b", "pp")}
    hang = named([sight(rank, phase="dp") for rank in range(4)], answers, 0.5)
    assert hang.ranks == (1,)
    assert "it has not come to all_reduce number 5 over dp, in which 0, 2, 3 wait" in hang.text
    nobody = named([sight(rank, phase="dp") for rank in range(2)], {0: waits(5), 1: waits(5)}, 0.5)
    assert nobody.ranks == ()
    assert nobody.text == "all ranks wait in dp of step 7"


def slow_steps(factor: float, steps: int, seed: int, slow_from: int) -> list[tuple[int, int]]:
    """Steps at which a rank of four is told, of noisy ones of 50 ms; rank 1 is slow from `slow_from` on. The noise
    is that of the seconds of four ranks on two cores: a sixth of a step, and three times as long in one of 20."""
    generator, rule, found = np.random.default_rng(seed), Slowness([[0, 1, 2, 3]], 1.33), []
    for step in range(steps):
        own_s = 0.05 * generator.lognormal(0.0, 0.15, 4) * np.where(generator.random(4) < 0.05, 3.0, 1.0)
        own_s[1] *= factor if step >= slow_from else 1.0
        found += [(step, rank) for rank in rule.step(dict(enumerate(own_s)))]
    return found


def test_a_slow_rank_is_named_within_20_steps_and_no_other() -> None:
    found = [slow_steps(1.5, 60, seed, slow_from=30) for seed in range(300)]
    in_time = sum(bool(each) and each[0][1] == 1 and 30 <= each[0][0] < 50 for each in found)
    assert in_time >= 0.99 * len(found)
    assert len(slow_steps(1.0, 10_000, 0, slow_from=0)) <= 1


def test_ranks_are_held_against_those_with_the_same_work() -> None:
    rule = Slowness([[0, 1], [2, 3]], 1.33)
    for _ in range(2 * WINDOW):
        assert not rule.step({0: 0.1, 1: 0.1, 2: 0.3, 3: 0.3})


def guarded(**fields: object) -> Judge:
    return Judge(Guard.parse(fields))


def test_a_guard_knows_numbers_from_what_is_none() -> None:
    judge = guarded()
    assert judge.complaint(math.nan, 1.0) == "loss nan"
    assert judge.complaint(1.0, math.inf) == "norm inf"
    assert judge.complaint(1e30, 1e30) == ""


def test_a_spike_is_far_above_what_was() -> None:
    judge = guarded(spike_deviations=7.0, window=16)
    generator = np.random.default_rng(0)
    values = 3.0 + 0.1 * generator.standard_normal(40)
    for number, loss in enumerate(values):
        # Before there are enough nothing is a spike, and a loss that falls never is.
        assert judge.complaint(100.0, 1.0) == "" or number >= FIRST_LOSSES
        assert judge.complaint(float(loss), 1.0) == ""
        judge.good(float(loss), 1.0)
    mean, deviation = np.mean(values[-16:]), np.std(values[-16:])
    assert judge.complaint(mean + 6.9 * deviation, 1.0) == ""
    assert judge.complaint(mean + 7.1 * deviation, 1.0).startswith("loss ")
    assert judge.complaint(1.0, 1.0) == ""
    assert judge.state.losses == tuple(map(float, values[-16:]))


def test_a_guard_gives_up() -> None:
    judge = guarded(patience=2)
    judge.bad(1, "loss nan")
    judge.bad(2, "loss nan")
    with pytest.raises(Diverged, match="step 3: loss nan, after 2 bad steps in a row"):
        judge.bad(3, "loss nan")
    judge = guarded(action="roll_back", patience=1)
    with pytest.raises(RollBack):
        judge.bad(1, "loss nan")
    with pytest.raises(Diverged, match="after 1 roll backs to the same commit"):
        judge.bad(1, "loss nan")


def test_what_a_guard_knows_goes_through_json() -> None:
    state = GuardState(losses=(0.1, 2 / 3), norms=(1e-300,), skipped=3, cooling=2, bad_in_a_row=1)
    assert GuardState.model_validate_json(state.model_dump_json()) == state


@pytest.fixture
def run() -> Run:
    recipe = {"seq_len": 16, "global_batch": 24, "micro_batch": 1}
    data = {"vocab_size": 512}
    return Run.parse(
        {"model": dense_model(), "cluster": cluster(), "layout": {}, "recipe": recipe, "data": data}
    ).check()


def test_a_run_goes_on_with_as_many_replicas_as_its_batch_allows(run: Run) -> None:
    eight = run.with_values([("layout.dp", 8), ("recipe.global_batch", 24), ("recipe.micro_batch", 1)])
    dps = {most: small.layout.dp if (small := smaller(eight, most)) else None for most in (8, 7, 5, 3, 1, 0)}
    assert dps == {8: 8, 7: 6, 5: 4, 3: 3, 1: 1, 0: None}
    assert smaller(eight, 7).recipe.global_batch == 24  # type: ignore[union-attr]


def test_a_lemon_is_left_out_and_given_one_more_chance(run: Run) -> None:
    four = run.with_values([("layout.dp", 4), ("recipe.global_batch", 8), ("recipe.micro_batch", 1)])
    places = Places(four, lemon_after=2)
    assert not places.failed(2)
    assert places.failed(2)
    fewer = places.without(2)
    assert fewer is not None
    assert fewer.layout.dp == 2  # 3 don't divide a batch of 8
    assert places.of(fewer) == [0, 1]
    assert places.free == [0, 1, 3]
    assert places.all_again() is four
    assert places.of(four) == [0, 1, 2, 3]
    assert places.failed(2)
    assert visible_devices(None, [0, 1, 3]) == "0,1,3"
    assert visible_devices("4,5,6,7", [0, 1, 3]) == "4,5,7"


def test_stages_are_the_ranks_of_a_place_in_the_pipeline(run: Run) -> None:
    values = [("layout.dp", 2), ("layout.pp", 2), ("recipe.global_batch", 8), ("recipe.micro_batch", 1)]
    assert stages_of(run.with_values(values)) == [[0, 2], [1, 3]]  # dp is the outermost axis


@pytest.mark.parametrize(
    ("noun", "fields", "complaint"),
    [
        (Supervision, {"hang_s": 0.5}, "hang_s"),
        (Supervision, {"slow_factor": 1.0}, "slow_factor"),
        (Guard, {"action": "pray"}, "action"),
        (Guard, {"cool_down_factor": 0.5}, "cool_down_factor=0.5: is the rate of cool_down_steps"),
        (Guard, {"action": "stop", "cool_down_steps": 3}, "cool_down_steps=3: follow a bad step"),
        (Guard, {"window": 64}, "window=64: is what spikes are judged by"),
        (Guard, {"spike_deviations": 0.0}, "spike_deviations"),
    ],
)
def test_nonsense_is_refused_by_field(noun: type, fields: dict, complaint: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        noun.parse(fields)
    assert complaint in str(caught.value)


def test_a_killed_supervisor_s_memory_is_given_back_by_the_next(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; "
        "from trainwright.train.faults.shared import shared_directory\n"
        "with shared_directory(Path(sys.argv[1])) as made:\n"
        "    (made / 'state').write_bytes(b'x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    assert (left / "state").exists()
    with shared_directory(tmp_path) as one:
        assert not left.exists()
        with shared_directory(tmp_path) as other:
            assert one.exists()
        assert not other.exists()
    assert list(tmp_path.iterdir()) == []


def test_what_a_rank_wrote_after_the_last_look_is_told(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, [[0]], 0, Supervision(), lambda record: None)
    words = words_of(beat_file(tmp_path, 0), create=True)
    words[PID], words[STEP] = os.getpid(), 4
    watchdog.start()
    while watchdog.reached < 4:
        time.sleep(0.01)
    words[STEP] = 5
    watchdog.stop()
    assert watchdog.reached == 5
