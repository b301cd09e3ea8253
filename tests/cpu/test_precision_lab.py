"""The lab of low precision: what it trains, what it plants, and the proof asked of it: losses in fp8-block
beside those of bf16 on real text, 300 steps of them with `--all-cases`."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.cli.catalogue import load_cluster
from trainwright.spec.precision import LOW_PRECISION
from trainwright.spec.precision_lab import FACTORS, LOSS_BOUND, MODELS, PLAIN, VISIBLE, ModelKind, distance, worse
from trainwright.train.corpus import build_corpus
from trainwright.train.precision.lab import (
    BEGINNING,
    BEGUN,
    GOING_ON,
    SAMPLED_LAYER,
    VOCAB,
    Job,
    Samples,
    Trained,
    begin,
    lab_run,
    training,
)
from trainwright.train.precision.largest import ROLES
from trainwright.train.precision.planted import CHANNELS, scale_of
from trainwright.train.precision.sums import errors_of_sums

SHORT, LONG = 40, 300
SLOWLY = {"lr": 4e-4, "warmup_steps": 10, "schedule": "cosine"}
"""What 300 steps from the seed's weights take: at 1e-3 trainings that differ by a rounding part (docs/log.md)."""
CLUSTER = load_cluster("local-cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_corpus(tmp_path_factory.mktemp("corpus"), VOCAB)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> dict[ModelKind, Path]:
    """Weights that were trained in bf16."""
    folder = tmp_path_factory.mktemp("begun")
    found: dict[ModelKind, Path] = {model: folder / f"{model}.pt" for model in MODELS}
    for model, path in found.items():
        losses = begin(lab_run(model, PLAIN, CLUSTER, BEGINNING), shards, BEGUN * SHORT, path)
        assert sum(losses[-10:]) < sum(losses[:10]) - 8
    return found


def trained(
    shards: Path,
    weights: Path | None,
    model: ModelKind,
    precision: str,
    steps: int,
    factor: float = 1.0,
    optimizer: dict[str, Any] = GOING_ON,
) -> Trained:
    run = lab_run(model, precision, CLUSTER, optimizer)
    return training(run, Job(model, precision, factor), shards, steps, weights)


@pytest.mark.parametrize("model", MODELS)
def test_losses_in_blocks_are_those_of_bf16(shards: Path, begun: dict[ModelKind, Path], model: ModelKind) -> None:
    plain, low = (trained(shards, begun[model], model, each, SHORT).curve.losses for each in (PLAIN, "fp8-block"))
    assert low != plain
    assert distance(low, plain) < LOSS_BOUND


@pytest.mark.parametrize("model", MODELS)
def test_three_hundred_steps(shards: Path, model: ModelKind, request: pytest.FixtureRequest) -> None:
    """From the seed's weights."""
    if not request.config.getoption("--all-cases"):
        pytest.skip("two minutes: with --all-cases")
    plain, low = (
        trained(shards, None, model, each, LONG, optimizer=SLOWLY).curve.losses for each in (PLAIN, "fp8-block")
    )
    assert plain[-1] < plain[0] - 1
    print(f"{model}: {distance(low, plain):.3%}, signed {worse(low, plain):+.3%}, loss {plain[-1]:.3f}")
    assert distance(low, plain) < LOSS_BOUND


@pytest.mark.parametrize("model", MODELS)
def test_planted_outliers_are_nothing_to_bf16(shards: Path, model: ModelKind) -> None:
    plain, planted = (trained(shards, None, model, PLAIN, 3, factor).curve.losses for factor in (1.0, FACTORS[-1]))
    assert plain == planted


def test_scales_of_whole_tensors_are_worse_with_outliers(shards: Path, begun: dict[ModelKind, Path]) -> None:
    """All other values are flushed with one scale a tensor, those of one tile with tiles: half of 256 channels."""
    most = FACTORS[-1]
    plain, naive, blocks, mx = (
        trained(shards, begun["dense"], "dense", precision, SHORT, most)
        for precision in (PLAIN, "fp8-current", "fp8-block", "mxfp8")
    )
    above = [worse(each.curve.losses, plain.curve.losses) for each in (naive, blocks)]
    assert above[0] > VISIBLE
    assert above[0] > 2 * above[1]
    flushed = [
        next(each.flushed for each in found.roundings if (each.layer, each.role) == (SAMPLED_LAYER, "input"))
        for found in (naive, blocks, mx)
    ]
    assert flushed[0] > 0.6
    assert 0.2 < flushed[1] < 0.5
    assert 0.05 < flushed[2] < 0.13
    assert scale_of(4, 8.0, torch.zeros(1)).tolist() == [8.0 if at in CHANNELS else 1.0 for at in range(4)]


def test_sums_of_few_bits(shards: Path) -> None:
    """Of normal numbers summed over 4096: DeepSeek-V3's "nearly 2%" without promotion; fp32 is exact beside it."""
    generator = torch.Generator().manual_seed(0)
    samples: Samples = {role: torch.randn(2**14, generator=generator).numpy() for role in ROLES}
    (found,) = ({each.kept: each for each in errors_of_sums("Fprop", samples, (4096,))},)
    assert 0.005 < found["never"].worst < 0.03
    assert found["fp32"].worst < 1e-5 < found["128"].worst < 2e-3
    assert found["32"].worst < found["128"].worst < found["512"].worst < found["never"].worst
    assert found["operands"].typical > 10 * found["128"].typical


def test_the_command(tmp_path: Path) -> None:
    """Two steps of everything, in two processes: every file, and a verdict of the figures that it writes."""
    command = [sys.executable, "-m", "trainwright", "fp8", "lab", "--steps", "2", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said["curves"]) == len(MODELS) * (1 + len(LOW_PRECISION)) * len(FACTORS)
    assert {len(each["losses"]) for each in said["curves"]} == {2}
    firsts = {each["losses"][0] for each in said["curves"] if (each["model"], each["precision"]) == ("moe", PLAIN)}
    assert len(firsts) == 1
    assert math.isfinite(sum(each["worst"] for each in said["sums"]))
    written = {path.name for path in tmp_path.iterdir()}
    pictures = {"losses.svg", "outliers.svg", "rounding_dense.svg", "rounding_moe.svg", "sums.svg"}
    assert written == {"lab.json", "lab.html", *pictures}
    page = (tmp_path / "lab.html").read_text()
    assert page.count("<svg") == len(pictures)
    assert "src=" not in page
    assert said["verdict"][0].startswith("Without planted outliers fp8-block's loss is")
    kept = json.loads((tmp_path / "lab.json").read_text())
    assert kept["curves"] == said["curves"]
