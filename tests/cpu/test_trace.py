"""A traced step has the collectives that one counts by hand, with their groups and bytes; what the verb writes.

`trace_cases.py` records all steps of one world size in one launch. The model: 4 layers of width 32 with 4 heads
and 2 key heads of 8, MLP 48, vocabulary 259, in float64; sequences of 16, 4 of them a step, one a microbatch.
"""

import functools
import json
import tempfile
from pathlib import Path

import pytest
from example import example_run
from launching import run_ranks

from trainwright.cli.main import run as command
from trainwright.spec import toml
from trainwright.spec.traffic import Collective, Traffic

LAYERS, WIDTH, VOCABULARY, SIZE = 4, 32, 259, 8
MICROBATCHES = 4
MATRICES = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
NORMS = 2 * 32
LAYER = MATRICES + NORMS
ACTIVATION_BYTES = 16 * WIDTH * SIZE


@functools.cache
def results(world: int) -> dict[str, Traffic]:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "results.json"
        run_ranks("trace_cases.py", world, str(world), str(output))
        return {name: Traffic.parse(each) for name, each in json.loads(output.read_text()).items()}


def counts(collectives: list[Collective]) -> dict[tuple[str, str, str], int]:
    """By phase, axis and operation."""
    found: dict[tuple[str, str, str], int] = {}
    for each in collectives:
        key = (each.phase, each.axis, each.operation)
        found[key] = found.get(key, 0) + 1
    return found


LAST = {("after backward", "world", "all_reduce"): 1}
"""Loss and squared norm, summed over all ranks."""


def test_tensor_and_sequence_parallelism() -> None:
    """Forward: the embedding scatters its sum; each of a layer's two blocks gathers its input and scatters its
    sum; the head gathers, and the loss exchanges two numbers a token. Backward mirrors all but the loss, and
    gathers the input of each block once more for its weights' gradients."""
    traffic = results(2)["tp"]
    for rank in (0, 1):
        mine = traffic.of(rank)
        assert counts(mine) == {
            ("forward", "tp", "all_gather"): MICROBATCHES * (2 * LAYERS + 1 + 1),
            ("forward", "tp", "reduce_scatter"): MICROBATCHES * (1 + 2 * LAYERS),
            ("backward", "tp", "all_gather"): MICROBATCHES * (2 * LAYERS + 1 + 2 * LAYERS + 1),
            ("backward", "tp", "reduce_scatter"): MICROBATCHES * (2 * LAYERS + 1),
            ("after backward", "tp", "all_reduce"): 1,
            **LAST,
        }
        assert all(each.ranks == (0, 1) for each in mine)
        sizes = {each.bytes for each in mine if each.axis == "tp" and each.phase != "after backward"}
        assert sizes == {ACTIVATION_BYTES, 2 * 2 * 16 * SIZE}
        (norms,) = (each for each in mine if each.axis == "tp" and each.phase == "after backward")
        assert norms.bytes == (LAYERS * NORMS + WIDTH) * SIZE
    first = [(each.where, each.operation) for each in traffic.of(0)][:5]
    assert first == [
        ("embedding", "reduce_scatter"),
        ("layers.0.attention", "all_gather"),
        ("layers.0.attention.out", "reduce_scatter"),
        ("layers.0.mlp", "all_gather"),
        ("layers.0.mlp.down", "reduce_scatter"),
    ]
    of_layer_2 = {each.where for each in traffic.of(0) if each.phase == "backward" and "layers.2" in each.where}
    assert {"layers.2.attention", "layers.2.attention.out", "layers.2.mlp", "layers.2.mlp.down"} <= of_layer_2
    assert [each.where for each in traffic.of(0) if each.bytes == 2 * 2 * 16 * SIZE] == ["loss"] * MICROBATCHES


def test_recompute_does_the_forwards_again() -> None:
    """But the last sum of a layer, which nobody wants again; blocks then need not gather once more."""
    assert counts(results(2)["tp recomputed"].of(0)) == {
        ("forward", "tp", "all_gather"): MICROBATCHES * (2 * LAYERS + 1 + 1),
        ("forward", "tp", "reduce_scatter"): MICROBATCHES * (1 + 2 * LAYERS),
        ("recompute", "tp", "all_gather"): MICROBATCHES * 2 * LAYERS,
        ("recompute", "tp", "reduce_scatter"): MICROBATCHES * LAYERS,
        ("backward", "tp", "all_gather"): MICROBATCHES * (2 * LAYERS + 1 + 1),
        ("backward", "tp", "reduce_scatter"): MICROBATCHES * (2 * LAYERS + 1),
        ("after backward", "tp", "all_reduce"): 1,
        **LAST,
    }


def test_without_sequence_parallelism_sums_are_whole() -> None:
    assert counts(results(2)["tp without sequence parallelism"].of(0)) == {
        ("forward", "tp", "all_reduce"): MICROBATCHES * (1 + 2 * LAYERS),
        ("forward", "tp", "all_gather"): MICROBATCHES,
        ("backward", "tp", "all_reduce"): MICROBATCHES * (2 * LAYERS + 1),
        **LAST,
    }


@pytest.mark.parametrize(
    ("case", "phase", "dtype", "size"),
    [
        ("dp", "backward", "float64", 8),
        ("dp bf16", "backward", "float32", 4),
        ("dp without overlap", "after backward", "float64", 8),
    ],
)
def test_a_bucket_holds_all_gradients(case: str, phase: str, dtype: str, size: int) -> None:
    mine = results(2)[case].of(1)
    assert counts(mine) == {(phase, "dp", "all_reduce"): 1, **LAST}
    assert mine[0].bytes == (2 * VOCABULARY * WIDTH + LAYERS * LAYER + WIDTH) * size
    assert mine[0].dtype == dtype
    assert mine[0].act == ("B1" if phase == "backward" else "")


ENDS = 2 * (VOCABULARY + 1) * WIDTH + WIDTH
"""Embedding, head and last norm; rows are padded to two ranks."""


def test_zero_1_gathers_and_scatters_once() -> None:
    mine = results(2)["zero 1"].of(0)
    assert counts(mine) == {
        ("forward", "dp", "all_gather"): LAYERS + 1,
        ("backward", "dp", "reduce_scatter"): LAYERS + 1,
        **LAST,
    }
    sizes = {each.where: each.bytes for each in mine if each.axis == "dp"}
    assert sizes == {**{f"layers.{at}": LAYER * SIZE for at in range(LAYERS)}, "ends": ENDS * SIZE}


def test_zero_3_gathers_each_layer_for_every_pass() -> None:
    mine = results(2)["zero 3"].of(0)
    half = MICROBATCHES // 2  # of each of two ranks
    assert counts(mine) == {
        ("forward", "dp", "all_gather"): half * (LAYERS + 1),
        ("backward", "dp", "all_gather"): half * (LAYERS + 1),
        ("backward", "dp", "reduce_scatter"): half * (LAYERS + 1),
        **LAST,
    }
    gathered = [each for each in mine if each.where == "layers.3"]
    assert [(each.act, each.operation) for each in gathered] == [
        *(("F0", "all_gather"), ("B0", "all_gather"), ("B0", "reduce_scatter")),
        *(("F1", "all_gather"), ("B1", "all_gather"), ("B1", "reduce_scatter")),
    ]


def test_tensor_parallelism_goes_round_beside_matmuls() -> None:
    """In the place of a gather or a scatter of two ranks each sends half to the other, beside the half that it
    has. What is no matmul's stays as it is: the embedding's scatter and the loss's numbers."""
    for rank in (0, 1):
        mine = [each for each in results(2)["tp beside matmuls"].of(rank) if each.phase != "after backward"]
        forward, backward = MICROBATCHES * (4 * LAYERS + 1), MICROBATCHES * (6 * LAYERS + 2)
        assert counts(mine) == {
            **{("forward", "tp", way): forward for way in ("send", "receive")},
            **{("backward", "tp", way): backward for way in ("send", "receive")},
            ("forward", "tp", "reduce_scatter"): MICROBATCHES,
            ("forward", "tp", "all_gather"): MICROBATCHES,
            ("backward", "tp", "all_gather"): MICROBATCHES,
        }
        round_ = [each for each in mine if each.operation in ("send", "receive")]
        assert {each.bytes for each in round_} == {ACTIVATION_BYTES // 2}
        assert all(each.beside for each in round_)
        assert round_[0].where == "layers.0.attention.query"
        assert round_[0].beside == ("forward of layers.0.attention.query",)


def test_a_pipeline_sends_each_microbatch_over_each_edge() -> None:
    traffic = results(2)["pp tied"]
    for rank, pairs in ((0, {(0, 1), (1, 0)}), (1, {(0, 1), (1, 0)})):
        mine = traffic.of(rank)
        forth, back = ("send", "receive") if rank == 0 else ("receive", "send")
        assert counts(mine) == {
            ("forward", "pp", forth): MICROBATCHES,
            ("backward", "pp", back): MICROBATCHES,
            ("after backward", "ends", "all_reduce"): 1,
            **LAST,
        }
        sent = [each for each in mine if each.axis == "pp"]
        assert {each.ranks for each in sent} == pairs
        assert {each.bytes for each in sent} == {ACTIVATION_BYTES}
        (tied,) = (each for each in mine if each.axis == "ends")
        assert tied.bytes == VOCABULARY * WIDTH * SIZE
    acts = [each.name for each in traffic.acts if each.rank == 0]
    assert acts == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3", "after backward", "update"]
    assert [each.act for each in traffic.of(0) if each.operation == "send"] == ["F0", "F1", "F2", "F3"]


def test_a_send_goes_beside_the_next_act() -> None:
    sends = [each for each in results(2)["pp tied"].of(0) if each.operation == "send"]
    assert "forward of layers.0.mlp.up" in sends[0].beside
    assert all(each.start_s <= each.end_s - each.waited_s for each in sends)
    # A collective that is waited for at once has nothing beside it.
    assert not any(each.beside for each in results(2)["tp"].collectives)


def ways(case: str) -> list[Collective]:
    """All-to-alls of rows of a first microbatch on rank 0, in the middle layer; not those of whole numbers."""
    return [
        each
        for each in results(2)[case].of(0)
        if each.operation == "all_to_all" and each.dtype == "float64" and each.where == "layers.2.mlp"
        if each.act in ("F0", "B0")
    ]


@pytest.mark.parametrize("case", ["ep beside shared experts", "ep of tp beside shared experts"])
def test_dispatch_goes_beside_shared_experts(case: str) -> None:
    """Rows and weights go out beside the ways up, what was made of them comes back beside the way down. Their
    gradients come the other way, beside the gradients of the same."""
    ways_up = {f"layers.2.mlp.shared.{matrix}" for matrix in ("gate", "up")}
    way_down = {"layers.2.mlp.shared.down"}

    def of(phase: str, modules: set[str]) -> set[str]:
        return {f"{phase} of {module}" for module in modules}

    rows, weights, made, d_made, d_weights, d_rows = ways(case)
    assert [set(each.beside) for each in (rows, weights)] == [of("forward", ways_up)] * 2
    assert set(made.beside) == of("forward", way_down)
    assert set(d_made.beside) >= of("backward", way_down)
    for each in (d_weights, d_rows):
        assert set(each.beside) >= of("backward", ways_up)
        assert not set(each.beside) & of("backward", way_down)
    assert rows.bytes == d_made.bytes > weights.bytes
    assert all(each.start_s <= each.end_s - each.waited_s for each in ways(case))


def test_dispatch_that_is_not_to_overlap_goes_beside_nothing() -> None:
    assert len(ways("ep")) == 6
    assert not any(each.beside for each in ways("ep"))


def test_chunks_multiply_the_edges() -> None:
    """Four stages on two ranks: three edges, each crossed forth and back by every microbatch."""
    traffic = results(2)["pp interleaved"]
    sends = [each for each in traffic.collectives if each.operation == "send"]
    assert len(sends) == 2 * 3 * MICROBATCHES
    assert "F0 chunk 1" in {each.act for each in sends}


def test_axes_keep_apart() -> None:
    mine = results(4)["tp x zero 3"].of(3)
    by_axis = {axis: {each.ranks for each in mine if each.axis == axis} for axis in ("tp", "dp", "world")}
    assert by_axis == {"tp": {(2, 3)}, "dp": {(1, 3)}, "world": {(0, 1, 2, 3)}}
    gathers = [each for each in mine if each.axis == "dp" and each.where == "layers.1"]
    assert {each.bytes for each in gathers} == {(MATRICES // 2 + NORMS) * SIZE}
    sends = [each for each in results(4)["tp x pp"].of(0) if each.axis == "pp"]
    assert {each.bytes for each in sends} == {ACTIVATION_BYTES // 2}


def test_replicas_add_up_their_shards() -> None:
    mine = results(4)["hsdp"].of(0)
    assert counts(mine) == {
        ("forward", "dp_shard", "all_gather"): LAYERS + 1,
        ("backward", "dp_shard", "reduce_scatter"): LAYERS + 1,
        ("backward", "dp_replicate", "all_reduce"): LAYERS + 1,
        **LAST,
    }
    assert {each.ranks for each in mine if each.axis == "dp_shard"} == {(0, 1)}
    summed = {each.where: each.bytes for each in mine if each.axis == "dp_replicate"}
    assert summed["layers.2"] == LAYER * SIZE // 2


def test_the_verb_shows_and_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_file, out = tmp_path / "run.toml", tmp_path / "trace.json"
    run_file.write_text(toml.write(example_run(pp=2, recipe={"precision": "bf16"}).check()))
    status = command(["trace", str(run_file), "--rank", "1", "--out", str(out)])
    said = capfd.readouterr()
    assert status == 0, said.err
    assert "recipe.precision" in said.out
    assert "What rank 1 sends, in order" in said.out
    assert "0>1" in said.out
    document = json.loads(out.read_text())
    names = {each["args"]["name"] for each in document["traceEvents"] if each["name"] == "process_name"}
    assert names == {"rank 0, pp 0", "rank 1, pp 1"}
    tracks = {each["cat"] for each in document["traceEvents"] if each["ph"] == "X"}
    assert tracks == {"compute", "communication", "waiting"}
    sends = [each for each in document["traceEvents"] if each["name"] == "pp send"]
    assert sends
    assert all(each["args"]["bytes"] > 0 and each["args"]["act"] for each in sends)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rank", "2"], "--rank=2: must be below the 2 ranks that are run"),
        (["--out", "nowhere/trace.json"], "there is no directory nowhere"),
        (["--set", "recipe.cuda_graphs=full"], "recipe.cuda_graphs='full': is planned but not trained"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(toml.write(example_run(pp=2).check()))
    assert command(["trace", str(run_file), *arguments]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1
