"""Bad input is answered in one line that names field, value and remedy, with exit status 2, and nothing is
written. A thousand mutated run files are each accepted or answered so."""

import copy
import errno
import json
import os
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from trainwright.cli import files
from trainwright.cli.main import run

RUN = """
name = "small"

[layout]
tp = 2
pp = 2
dp = 2

[recipe]
seq_len = 128
global_batch = 16
micro_batch = 2
precision = "bf16"
zero = 1

[data]
vocab_size = 512

[budget]
tokens = 1_000_000

[model]
name = "tiny"
d_model = 64
vocab_size = 512
max_positions = 1024

[[model.layer_groups]]
repeat = 4

[[model.layer_groups.pattern]]
attention = { kind = "gqa", num_heads = 4, num_kv_heads = 2, d_head = 16 }
mlp = { kind = "dense", d_ff = 192 }

[cluster]
name = "desk"

[cluster.device]
name = "core"
kind = "cpu"
peak_flops_per_s = { fp32 = 1e11, bf16 = 4e11 }
memory_bytes = 8_000_000_000
memory_bytes_per_s = 2e10
num_sms = 1

[cluster.node]
devices = 8
concurrent_devices = 2

[cluster.fabric]
link = "shared memory"
link_domain = 8
link_bytes_per_s = 2e9

[cluster.rates]
matmul = { bf16 = { size = [1e6, 1e9], fraction = [0.1, 0.9] }, fp32 = { size = [1e6], fraction = [0.9] } }
attention_forward = { fp32 = { size = [128.0, 1024.0], fraction = [0.2, 0.4] } }
attention_backward = { fp32 = { size = [128.0], fraction = [0.3] } }
memory = 0.7
launch_s = 2e-6
link = 0.8
link_latency_s = 1e-4
network = 1.0
network_latency_s = 0.0

[cluster.provenance]
device = { kind = "assumed", source = "for a test" }
node = { kind = "assumed", source = "for a test" }
fabric = { kind = "assumed", source = "for a test" }
rates = { kind = "assumed", source = "for a test" }
framework_bytes = { kind = "assumed", source = "for a test" }
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a refused command says."""
    capsys.readouterr()
    status = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert status == 2, captured
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("trainwright: ")
    return lines[0].removeprefix("trainwright: ")


def test_the_run_itself_is_good(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", str(run_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[layout]", "[layout", "not TOML: .*line 4"),
        ("tp = 2", "tp = 2\ntp = 2", "not TOML: .*overwrite a value"),
        ("tp = 2", "tq = 2", r"layout\.tq: unknown field; known are cp, .*, order, pp, stage_layers, tp, vpp"),
        ("micro_batch = 2", "microbatch = 2", r"recipe\.microbatch: unknown field; did you mean micro_batch"),
        ("d_ff = 192", "dff = 192", r"model\.layer_groups\.0\.pattern\.0\.mlp\.dff: unknown field; .*d_ff"),
        ("[budget]", "[bugdet]", r"bugdet: unknown field; did you mean budget"),
        ("tp = 2", 'tp = "2"', r"layout\.tp='2': .*valid integer"),
        ("tp = 2", "tp = 2.5", r"layout\.tp=2\.5: .*valid integer"),
        ("tp = 2", "tp = true", r"layout\.tp=True: .*valid integer"),
        ("tp = 2", "tp = 0", r"layout\.tp=0: .*greater than or equal to 1"),
        ("tp = 2", "tp = -2", r"layout\.tp=-2: .*greater than or equal to 1"),
        ("tp = 2", "tp = 3", r"layout\.tp=3: must divide the 4 attention heads"),
        ("pp = 2", "pp = 7", r"layout\.pp\*vpp=7: needs a layer for each stage but the first and .* has 4"),
        ("pp = 2", "pp = 2\nstage_layers = [4]", r"layout\.stage_layers=\[4\]: has 1 stages; the layout has 2"),
        ("pp = 2", "pp = 2\nstage_layers = [1, 4]", r"layout\.stage_layers=\[1, 4\]: sums to 5 layers; .* has 4"),
        ("pp = 2", "pp = 4\nstage_layers = [2, 0, 1, 1]", r"only the first and the last stage may be without"),
        ("tp = 2", 'tp = 2\norder = "tp-dp-pp"', r"layout\.order='tp-dp-pp': .*'tp-cp-pp-dp' or 'tp-cp-dp-pp'"),
        ("dp = 2", "dp = 3", r"recipe\.global_batch=16: must be a multiple of micro_batch\*dp=2\*3=6"),
        ("dp = 2", "dp = 2\nep = 3", r"layout\.ep=3: times etp=1 does not divide tp\*cp\*dp=4; ep may be 1, 2, 4"),
        ("dp = 2", "dp = 2\nep = 2", r"layout\.ep=2: tiny has no experts; set layout\.ep=1"),
        ("dp = 2", "dp = 4", r"layout='16 ranks': cluster desk has no network and holds 8 devices"),
        ("seq_len = 128", "seq_len = 2048", r"recipe\.seq_len=2048: is beyond model\.max_positions=1024"),
        ('precision = "bf16"', 'precision = "mxfp8"', r"recipe\.precision='mxfp8': .*it may be fp32, bf16"),
        ('precision = "bf16"', 'precision = "int4"', r"recipe\.precision='int4': .*'fp32'"),
        ('kind = "dense"', 'kind = "sparse"', r"mlp\.kind: .*sparse"),
        ("num_kv_heads = 2", "num_kv_heads = 3", r"attention\.num_kv_heads=3: must divide num_heads=4"),
        ("repeat = 4", "repeat = 0", r"model\.layer_groups\.0\.repeat=0: "),
        ("memory = 0.7", "memory = 1.7", r"cluster\.rates\.memory=1\.7: .*less than or equal to 1"),
        ("memory = 0.7", "memory = nan", r"cluster\.rates\.memory=nan: "),
        ("link_latency_s = 1e-4", "", r"cluster\.rates\.link_latency_s: missing"),
        ("tokens = 1_000_000", "tokens = 0", r"budget\.tokens=0: "),
        ("[layout]\ntp = 2\npp = 2\ndp = 2", "layout = 7", r"layout=7: must be a table"),
    ],
)
def test_a_wrong_run_file(
    old: str, new: str, said: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in RUN
    run_file.write_text(RUN.replace(old, new, 1))
    line = complaint(capsys, "predict", run_file)
    assert line.startswith(f"{run_file}: ")
    assert_matches(said, line)


def assert_matches(pattern: str, line: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(line)


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("layout.tp", "--set='layout.tp': must be field=value"),
        ("=4", "--set='=4': must be field=value"),
        ("layout.tq=4", "layout.tq: unknown field; known are cp, dp, ep, etp, order, pp, stage_layers, tp, vpp"),
        ("lay.tp=4", "lay.tp=4: there is no 'lay' on the way to it"),
        ("layout.tp.x=4", "layout.tp.x=4: "),
        ("model.layer_groups.0.repeat=4", "model.layer_groups.0.repeat=4: a list's items can't be set one by one"),
        ("layout.tp=many", "layout.tp='many': "),
    ],
)
def test_a_wrong_assignment(
    assignment: str, said: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in complaint(capsys, "predict", run_file, "--set", assignment)


@pytest.mark.parametrize(
    ("assignments", "said"),
    [
        (["recipe.zero=true"], "recipe.zero='true': input should be 0, 1, 2 or 3"),
        (["recipe.dropout=1"], "recipe.dropout=1: "),
        (["recipe.loss_chunks=1000000"], "recipe.loss_chunks=1000000: must be at most seq_len="),
        (["recipe.capacity_factor=1.5"], "recipe.capacity_factor=1.5: is of experts, and "),
        (["recipe.dispatch=hierarchical"], "recipe.dispatch='hierarchical': is of experts, and "),
        (["recipe.overlap.ep=true"], "recipe.overlap.ep=True: is of experts, and "),
        (["recipe.compile=yes"], "recipe.compile='yes': must be true or false"),
        (["recipe.recompute=full", "recipe.recompute_layers=99999"], "recipe.recompute_layers=99999: "),
        (["recipe.recompute=selective", 'recipe.recompute_ops=["moe"]'], "recipe.recompute_ops='moe': "),
        (
            ["recipe.recompute=selective", 'recipe.recompute_ops=["latent_up"]'],
            "recipe.recompute_ops='latent_up': ",
        ),
        (
            ["recipe.recompute=selective", "recipe.recompute_ops=norm,activation"],
            """recipe.recompute_ops='norm,activation': must be a list, such as ["norm", "activation"]""",
        ),
        (["layout.stage_layers=1,3"], "layout.stage_layers='1,3': must be a list, such as [1, 3]"),
        (["recipe.recompute_ops=[]"], "recipe.recompute_ops=[]: must have at least 1 item"),
        (["layout.stage_layers=2"], "layout.stage_layers=2: must be a list, such as [2]"),
    ],
)
def test_what_would_change_nothing_is_refused(
    assignments: list[str], said: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `predict`, and by `plan`, though it searches some of these."""
    options = [option for each in assignments for option in ("--set", each)]
    assert said in complaint(capsys, "predict", run_file, *options)
    assert said in complaint(capsys, *plan("llama-3.1-8b"), *options)


def test_operations_without_their_recompute_are_refused(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, "predict", run_file, "--set", 'recipe.recompute_ops=["norm"]')
    assert "recipe.recompute_ops=['norm']: needs recompute=selective, not none; set that too" in said


def test_files_that_are_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "predict", tmp_path / "none.toml").endswith("none.toml: no such file")
    assert "is a directory; name a file" in complaint(capsys, "predict", tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(bytes(range(256)) * 9)
    assert "not a text in UTF-8 (byte 128)" in complaint(capsys, "predict", binary)
    binary.write_bytes(b"name = 'a\x00b'")
    assert "not TOML" in complaint(capsys, "predict", binary)
    deep = tmp_path / "deep.toml"
    deep.write_text("x = " + "[" * 5000 + "]" * 5000)
    assert "not TOML: nested too deeply" in complaint(capsys, "predict", deep)
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    assert "missing; give it a value" in complaint(capsys, "predict", empty)


def test_a_file_without_end_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LARGEST_TEXT_BYTES", 1000)
    assert "/dev/zero: is larger than 1000 bytes" in complaint(capsys, "predict", "/dev/zero")


def test_an_unreadable_file(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(run_file))

    monkeypatch.setattr(Path, "open", refuse)
    assert complaint(capsys, "predict", run_file).startswith(
        f"{run_file}: permission denied; change its permissions"
    )


def plan(model: str | Path, *more: str | Path) -> list[str | Path]:
    options = ["--cluster", "h100-sxm", "--gpus", "8", "--seq-len", "512", "--global-batch", "8"]
    return ["plan", model, *options, *more]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON: .*line 1"),
        ("[1, 2]", "is one object"),
        ("{}", "config.json"),
        ('{"model_type": "mambaformer"}', "mambaformer"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "wide|missing"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_wrong_model_config(content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(content)
    line = complaint(capsys, *plan(config))
    assert str(config) in line
    assert_matches(said, line)


def test_unknown_names_get_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean llama-3.1-8b" in complaint(capsys, *plan("llama-3.1-9b"))
    line = complaint(capsys, "clusters", "show", "h100-sx")
    assert "cluster='h100-sx'" in line
    assert "did you mean h100-sxm" in line


def test_wrong_plan_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tokens='15 apples': must be" in complaint(capsys, *plan("llama-3.1-8b", "--tokens", "15 apples"))
    assert "recipe.precision='int4'" in complaint(capsys, *plan("llama-3.1-8b", "--precision", "int4"))
    assert "layout.tp=0: must be" in complaint(capsys, *plan("llama-3.1-8b", "--set", "layout.tp=0"))
    assert "did you mean tp" in complaint(capsys, *plan("llama-3.1-8b", "--set", "layout.tpp=2"))
    assert "did you mean recipe" in complaint(capsys, *plan("llama-3.1-8b", "--set", "recipes.zero=2"))
    too_long = complaint(capsys, *plan("llama-3.1-8b", "--set", "recipe.seq_len=9999999"))
    assert too_long.startswith("recipe.seq_len=9999999: is beyond model.max_positions=131072")
    assert "recipe.zero=7" in complaint(capsys, *plan("llama-3.1-8b", "--set", "recipe.zero=7"))


@pytest.mark.parametrize("option", ["--gpus", "--seq-len", "--global-batch", "--top"])
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_counts_below_one_are_usage_errors(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([str(each) for each in plan("llama-3.1-8b", option, value)]) == 2
    assert option in capsys.readouterr().err


def test_full_disk(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = complaint(capsys, *plan("llama-3.1-8b", "--out", "/dev/full"))
    assert line == "/dev/full: no space left on device; free some, or write elsewhere with --out"

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    out = tmp_path / "run.toml"
    out.write_text("what was there")
    assert f"{out}: no space left on device" in complaint(capsys, *plan("llama-3.1-8b", "--out", out))
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    assert out.read_text() == "what was there"


def test_out_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "is a directory; name a file" in complaint(capsys, *plan("llama-3.1-8b", "--out", tmp_path))
    missing = tmp_path / "no" / "run.toml"
    assert f"{missing}: no such file or directory" in complaint(capsys, *plan("llama-3.1-8b", "--out", missing))


def test_train_and_compare_at_the_door(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    out = tmp_path / "out"
    line = complaint(capsys, "train", run_file, "--out", out, "--set", "recipe.cuda_graphs=full")
    assert "recipe.cuda_graphs=" in line
    assert not out.exists()
    assert "a file is in the way" in complaint(capsys, "train", run_file, "--out", run_file)
    run_file.write_text(RUN.replace("[budget]\ntokens = 1_000_000", ""))
    assert "say how far with --steps" in complaint(capsys, "train", run_file, "--out", out)
    assert f"{out}: no such directory" in complaint(capsys, "compare", out)
    out.mkdir()
    assert "run.toml: no such file" in complaint(capsys, "compare", out)
    (out / "run.toml").write_text(RUN)
    assert "ledger.jsonl: no such file" in complaint(capsys, "compare", out)
    (out / "ledger.jsonl").write_text('{"run_hash": "abc", "ra')
    assert "ledger.jsonl, line 1: not JSON" in complaint(capsys, "compare", out)


# --- A thousand mutated run files ---------------------------------------------------------------------------

WEIRD: list[Any] = [0, -1, 1, 2, 3, 7, 10**6, 10**12, 2**63, 10**40, 0.0, -0.5, 1e308, 1e-308]
WEIRD += [float("inf"), float("nan"), True, "", "x", "fp64", "full", "gpipe", [], [1], {}, {"x": 1}]


def places(values: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value in nested tables and lists."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [place for key, value in items for place in [(*path, key), *places(value, (*path, key))]]


def mutate_values(draw: random.Random) -> str:
    """The run with one to three of its values changed, removed, renamed, doubled or put elsewhere."""
    values = copy.deepcopy(tomllib.loads(RUN))
    for _ in range(draw.randint(1, 3)):
        *parents, last = draw.choice(places(values))
        holder: Any = values
        for key in parents:
            holder = holder[key]
        kind = draw.choice(["weird", "scaled", "removed", "renamed", "moved"])
        value = holder[last]
        if kind == "weird":
            holder[last] = copy.deepcopy(draw.choice(WEIRD))
        elif kind == "scaled" and isinstance(value, (int, float)):
            holder[last] = value * draw.choice([-1, 0, 2, 3, 4, 8, 1000, 10**9])
        elif kind == "removed":
            del holder[last]
        elif kind == "renamed" and isinstance(holder, dict):
            holder[str(last) + draw.choice(["", "s", "_"])] = holder.pop(last)
        elif kind == "moved":
            values[draw.choice(["layout", "recipe", "extra"])] = copy.deepcopy(value)
        if not places(values):
            break
    return tomlkit.dumps(values)


def mutate_text(draw: random.Random) -> str:
    """The text of the run with one to four places cut, doubled or overwritten."""
    text = RUN
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(text) + 1)
        end = min(len(text), start + draw.choice([0, 1, 1, 2, 5, 40]))
        noise = "".join(
            draw.choice("=[]{}\"'#.,\n\t 0123456789eE-+_xtrue\x00é") for _ in range(draw.randint(0, 3))
        )
        text = text[:start] + draw.choice(["", noise, text[start:end] * 2]) + text[end:]
    return text


@seed(20240801)
@settings(
    max_examples=1000, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(draw=st.randoms(use_true_random=False), structural=st.booleans())
def test_mutated_runs_are_accepted_or_answered(
    draw: random.Random, structural: bool, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = mutate_values(draw) if structural else mutate_text(draw)
    run_file.write_text(text)
    capsys.readouterr()
    status = run(["predict", str(run_file), "--json"])
    captured = capsys.readouterr()
    if status == 2:
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert len(captured.err) < 500
    else:
        assert captured.err == ""
        assert json.loads(captured.out)["fits"] is (status == 0)


@pytest.mark.parametrize(
    "assignments",
    [
        ["cluster.rates.launch_s=1e300"],
        ["cluster.fabric.link_bytes_per_s=1e-290", "layout.tp=2"],
        ["layout.dp=9007199254740992", "layout.ep=3"],
        ["recipe.global_batch=9007199254740992", "recipe.micro_batch=1"],
    ],
)
def test_absurd_numbers_are_answered_soon_and_in_one_line(
    assignments: list[str], run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [word for each in assignments for word in ("--set", each)]
    status = run(["predict", str(run_file), *sets])
    error = capsys.readouterr().err
    assert status in (0, 1, 2)
    assert len(error.splitlines()) == (status == 2)


def test_a_whole_number_may_be_written_as_a_float(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", str(run_file), "--set", "cluster.device.memory_bytes=141e9", "--json"]) == 0
    assert '"capacity_bytes": 141000000000' in capsys.readouterr().out


def test_train_refuses_what_this_machine_cannot_hold(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr("trainwright.cli.train.ACCELERATORS", {"cuda": str(tmp_path / "nothing")})
    out = tmp_path / "out"

    def refused(*assignments: str) -> str:
        sets = [word for each in assignments for word in ("--set", each)]
        return complaint(capsys, "train", run_file, "--out", out, "--steps", "2", *sets)

    assert "cluster.device.kind='cuda': this machine has no such device" in refused("cluster.device.kind=cuda")
    assert "a node of" in refused("layout.dp=8", "recipe.global_batch=16", "cluster.fabric.link_domain=64")
    assert "short by" in refused("cluster.device.memory_bytes=1_000_000")
    assert "data.path='here': is for data.source=shards" in refused("data.path=here")
    assert not out.exists()


def test_train_does_not_write_over_another_run(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    out = tmp_path / "out"
    out.mkdir()
    other = RUN.replace("micro_batch = 2", "micro_batch = 1")
    (out / "run.toml").write_text(other)
    assert "holds another run" in complaint(capsys, "train", run_file, "--out", out, "--steps", "2")
    assert (out / "run.toml").read_text() == other


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "llama-3.1-8b", "--gpus", "8"], "Missing option '--cluster'; see trainwright plan --help"),
        (["plan", "x", "--gpus", "abc"], "--gpus='abc': "),
        (["bogus"], "No such command 'bogus'"),
        (["plan", "--clusterr", "x"], "--cluster"),
        (["compare", "out", "--tolerance", "abc"], "--tolerance='abc': "),
    ],
)
def test_wrong_options_are_answered_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in complaint(capsys, *arguments)
