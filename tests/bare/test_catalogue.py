"""The catalogue: every file loads, every number has a source and a plausible size, the README says what the data
say, and names, paths and broken files are answered in one clear line."""

import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli import catalogue
from trainwright.spec import toml
from trainwright.spec.cluster import ClusterSpec, numeric_fields
from trainwright.spec.errors import InvalidSpec
from trainwright.spec.model import ModelSpec
from trainwright.spec.units import GIB, GIGA, TERA

DATA = Path(str(resources.files("trainwright"))) / "data"
CLUSTERS = catalogue.cluster_names()
WANTED_CLUSTERS = {
    *("a100-40gb-sxm", "a100-80gb-sxm", "h100-sxm", "h100-pcie", "h200", "h800", "b200", "b300"),
    *("gb200-nvl72", "gb300-nvl72", "mi300x", "mi325x", "mi355x", "local-cpu"),
    *("a100-80gb-pcie", "a800", "h20", "h100-96gb-hbm2e", "v100-32gb-sxm"),
}


@pytest.fixture(params=CLUSTERS)
def cluster(request: pytest.FixtureRequest) -> ClusterSpec:
    return catalogue.load_cluster(request.param)


def test_the_clusters_that_people_ask_for_are_there() -> None:
    assert set(CLUSTERS) >= WANTED_CLUSTERS


def test_a_file_is_called_by_the_name_that_it_gives() -> None:
    assert [catalogue.load_cluster(name).name for name in CLUSTERS] == CLUSTERS
    models = catalogue.model_names()
    assert [catalogue.load_model(name).name for name in models] == models


def test_every_number_has_a_source_that_says_something(cluster: ClusterSpec) -> None:
    # A field at its default is neutral: no effect that a source would have to vouch for.
    for field in numeric_fields(cluster.model_dump(exclude={"provenance"}, exclude_defaults=True)):
        entry = cluster.provenance_of(field)
        assert entry is not None, field
        assert len(entry.source) >= len("one core"), field
    for model in map(catalogue.load_model, catalogue.model_names()):
        assert model.source, model.name


def test_every_provenance_entry_covers_a_number(cluster: ClusterSpec) -> None:
    fields = set(numeric_fields(cluster.model_dump(exclude={"provenance"}, exclude_none=True)))
    for entry in cluster.provenance:
        assert any(field == entry or field.startswith(f"{entry}.") for field in fields), entry


def test_what_a_part_says_it_sources_itself() -> None:
    """A device that is `like` another one doesn't borrow the other's source for its own number."""
    parts: dict[str, dict[str, Any]] = {
        path.stem: tomllib.loads(path.read_text()) for path in (DATA / "devices").glob("*.toml")
    }
    for kind, entries in tomllib.loads((DATA / "fabrics.toml").read_text()).items():
        parts |= {f"{kind}.{name}": part for name, part in entries.items()}
    parts |= tomllib.loads((DATA / "software.toml").read_text())
    for name, part in parts.items():
        numbers = {key: value for key, value in part.items() if key not in ("provenance", "like")}
        for field in numeric_fields(numbers):
            pieces = field.split(".")
            above = {".".join(pieces[:length]) for length in range(1, len(pieces) + 1)}
            assert above & set(part["provenance"]), f"{name}: {field}"


def test_all_parts_are_used_or_offered() -> None:
    used = {tomllib.loads(path.read_text())["parts"]["device"] for path in (DATA / "clusters").glob("*.toml")}
    assert used == {path.stem for path in (DATA / "devices").glob("*.toml")}


def test_sizes_are_plausible(cluster: ClusterSpec) -> None:
    device, fabric, rates = cluster.device, cluster.fabric, cluster.rates
    gpu = device.kind != "cpu"
    peaks = device.peak_flops_per_s
    half = peaks.bf16 or peaks.fp16  # V100 has no bf16
    assert half is not None
    assert 1e10 < half < 1e17
    assert peaks.fp32 < half
    for faster, slower in (("fp4", "fp8"), ("fp8", "bf16"), ("bf16", "tf32")):
        fast, slow = getattr(peaks, faster), getattr(peaks, slower)
        if fast and slow:
            assert 1.5 < fast / slow < 4, (faster, slower)
    assert 1 * GIB <= device.memory_bytes <= 512 * GIB
    assert 1e10 < device.memory_bytes_per_s < 2e13
    assert cluster.framework_bytes < device.memory_bytes / 4
    assert fabric.link_domain >= cluster.node.devices
    if gpu:
        assert 30e9 <= fabric.link_bytes_per_s <= 2e12
        assert 10e9 <= fabric.nic_bytes_per_s <= 200e9
        assert fabric.link_bytes_per_s > cluster.network_bytes_per_s
        assert rates.link_latency_s < rates.network_latency_s < 1e-4
        assert 1e-6 <= rates.launch_s <= 2e-5
        assert 0.5 <= (cluster.usd_per_device_hour or 1) <= 20
        assert 50 <= (device.tdp_w or 100) <= 2000
        assert 1e-5 <= (cluster.failures_per_device_day or 1e-4) <= 1e-2


def test_fabrics_are_plausible() -> None:
    fabrics = tomllib.loads((DATA / "fabrics.toml").read_text())
    for name, part in fabrics["link"].items():
        low = 1e9 if name == "shared-memory" else 30e9
        assert low <= part["fabric"]["link_bytes_per_s"] <= 2e12, name
    for name, part in fabrics["network"].items():
        if name != "none":
            assert 12.5e9 <= part["fabric"]["nic_bytes_per_s"] <= 200e9, name


def test_memory_is_what_can_be_allocated_and_no_mix_of_gb_and_gib(cluster: ClusterSpec) -> None:
    """The name has the nominal GB. Allocatable memory is between that in GB, less what ECC and the driver
    keep, and the same number of GiB."""
    nominal = cluster.device.name.rsplit(" ", 1)[-1]
    if nominal.endswith("GB"):
        number = int(nominal.removesuffix("GB"))
        assert 0.95 * number * GIGA <= cluster.device.memory_bytes <= number * GIB


def test_rates_are_there_for_each_format_and_plausible(cluster: ClusterSpec) -> None:
    rates = cluster.rates
    for fmt, peak in cluster.device.peak_flops_per_s.model_dump(exclude_none=True).items():
        assert peak > 0
        if fmt == "fp16" and "fp16" not in rates.matmul:
            continue  # it has the rates of bf16
        curve = rates.matmul[fmt]
        assert list(curve.fraction) == sorted(curve.fraction) or cluster.device.kind == "cpu"
        assert 0.3 < max(curve.fraction) <= 1.0
    for attention in (*rates.attention_forward.values(), *rates.attention_backward.values()):
        half = rates.matmul.get("bf16") or rates.matmul["fp16"]
        assert max(attention.fraction) * rates.attention_sustained < max(half.fraction) * 1.1
        assert min(attention.size) >= 64
        assert max(attention.size) <= 2**20
    assert 0.3 < rates.memory <= 1
    assert 0.5 <= rates.link <= 1
    assert 0.5 <= rates.network <= 1


def test_a_cluster_survives_its_file(cluster: ClusterSpec, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(toml.write(cluster))
    assert catalogue.load_cluster(str(path)) == cluster


@pytest.mark.parametrize("name", catalogue.model_names())
def test_a_model_survives_its_file(name: str, tmp_path: Path) -> None:
    model = catalogue.load_model(name)
    path = tmp_path / "model.toml"
    path.write_text(toml.write(model))
    assert catalogue.load_model(str(path)) == model


def number_text(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def table_row(cluster: ClusterSpec) -> str:
    device, fabric, node = cluster.device, cluster.fabric, cluster.node
    peaks = device.peak_flops_per_s
    nics = fabric.nics_per_node
    cells = [
        f"`{cluster.name}`",
        device.name,
        number_text(device.memory_bytes / GIB),
        number_text(device.memory_bytes_per_s / GIGA),
        number_text(peaks.bf16 / TERA) if peaks.bf16 else "",
        number_text(peaks.fp8 / TERA) if peaks.fp8 else "",
        str(node.devices),
        str(fabric.link_domain),
        f"{number_text(fabric.link_bytes_per_s / GIGA)} ({fabric.link})",
        fabric.network if nics else "",
        str(nics) if nics else "",
        number_text(fabric.nic_bytes_per_s / GIGA) if nics else "",
        f"{cluster.usd_per_device_hour:.2f}" if cluster.usd_per_device_hour else "",
    ]
    return f"| {' | '.join(cells)} |"


def test_the_readme_shows_the_data() -> None:
    text = (DATA / "README.md").read_text()
    shown = text.split("|---|---|---|---|---|---|---|---|---|---|---|---|---|\n")[1].split("<!-- end -->")[0]
    rows = "".join(f"{table_row(catalogue.load_cluster(name))}\n" for name in CLUSTERS)
    assert shown == rows, f"data/README.md should have these rows:\n{rows}"


# Names, paths, broken files


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(InvalidSpec) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_unknown_names_are_answered_with_near_ones() -> None:
    message = refusal(catalogue.load_model, "llama-3.1-8")
    assert message.startswith(
        "model='llama-3.1-8': neither in the catalogue nor the path of a config.json; did you"
    )
    assert "llama-3.1-8b" in message
    message = refusal(catalogue.load_cluster, "h100")
    assert message.startswith(
        "cluster='h100': neither in the catalogue nor the path of a cluster.toml; did you mean"
    )
    assert "h100-sxm" in message


@pytest.mark.parametrize("load", [catalogue.load_model, catalogue.load_cluster])
def test_files_that_cannot_be_read(load: Any, tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    assert refusal(load, str(missing)) == f"{missing}: no such file"
    assert refusal(load, str(tmp_path)) == f"{tmp_path}: is a directory; name a file"
    below = tmp_path / "file"
    below.write_text("x = 1")
    assert refusal(load, str(below / "config.json")) == f"{below / 'config.json'}: can't be read: Not a directory"
    broken = tmp_path / "broken.json"
    broken.write_bytes(b'{"a": "\xff"}')
    assert refusal(load, str(broken)).startswith(f"{broken}: not a text in UTF-8 (byte 7)")


def test_broken_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, complaint in (
        ('{"a": 1,', "not JSON: Expecting property name enclosed in double quotes (at line 1, column 9)"),
        ("", "not JSON: Expecting value (at line 1, column 1)"),
        ("[1, 2]", "holds [1, 2]; a config.json is one object {...}"),
        ("null", "holds None; a config.json is one object {...}"),
        ("[" * 100_000, "not JSON that can be read: nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON that can be read: Exceeds the limit"),
        ("{}", "model_type: missing; is it a model's config.json?"),
    ):
        path.write_text(text)
        assert refusal(catalogue.load_model, str(path)).startswith(f"{path}: {complaint}"), text[:40]


def test_broken_toml(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("name = ")
    assert refusal(catalogue.load_cluster, str(path)).startswith(f"{path}: not TOML: ")
    path.write_text('name = "x"\nflabric = 3')
    message = refusal(catalogue.load_cluster, str(path))
    assert message == f"{path}: flabric: unknown field; did you mean fabric?"
    path.write_text('name = "x"\nd_modle = 3')
    assert "d_modle: unknown field; did you mean d_model" in refusal(catalogue.load_model, str(path))


def test_a_config_json_gives_a_model_called_by_its_folder(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
    }
    folder = tmp_path / "my-llama"
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    model = catalogue.load_model(str(path))
    assert model == ModelSpec.from_hf(config, "my-llama")
    path.write_text(json.dumps({**config, "hidden_size": "64"}))
    message = refusal(catalogue.load_model, str(path))
    assert message == f"{path}: hidden_size='64': must be a whole number of at least 1"


# One's own clusters


def test_new_cluster_marks_what_the_user_set_and_nothing_else() -> None:
    base = catalogue.load_cluster("h100-sxm")
    cluster = catalogue.new_cluster(
        base, "mine", ["fabric.nic_bytes_per_s=25e9", "fabric.nics_per_node=8", "fabric.network=Ethernet"]
    )
    assert cluster.name == "mine"
    assert cluster.fabric.nic_bytes_per_s == 25e9
    own = {field for field, entry in cluster.provenance.items() if entry.source == "set by the user"}
    assert own == {"fabric.nic_bytes_per_s"}  # 8 NICs were there before
    assert cluster.provenance["fabric.nic_bytes_per_s"].kind == "assumed"


def test_new_cluster_may_give_a_number_that_the_base_lacks() -> None:
    base = catalogue.load_cluster("b300")
    assert base.usd_per_device_hour is None
    cluster = catalogue.new_cluster(base, "mine", ["usd_per_device_hour=7"])
    assert cluster.usd_per_device_hour == 7
    assert cluster.provenance["usd_per_device_hour"].source == "set by the user"


def test_new_cluster_names_the_wrong_field() -> None:
    base = catalogue.load_cluster("h100-sxm")
    assert refusal(catalogue.new_cluster, base, "mine", ["fabric.nic=3"]).startswith("fabric.nic: unknown field; ")
    assert refusal(catalogue.new_cluster, base, "mine", ["fabric.nics_per_node=-1"]).startswith(
        "fabric.nics_per_node=-1"
    )
    assert (
        refusal(catalogue.new_cluster, base, "a/b", [])
        == "name='a/b': must be a plain name, not the path of a file"
    )
    assert refusal(catalogue.new_cluster, base, "mine", ["fabric"]).startswith(
        "--set='fabric': must be field=value"
    )


def test_a_cluster_of_the_user_is_known_by_its_name(tmp_path: Path) -> None:
    cluster = catalogue.new_cluster(catalogue.load_cluster("h200"), "mine", ["usd_per_device_hour=1.5"])
    (tmp_path / "mine.toml").write_text(toml.write(cluster))
    assert "mine" in catalogue.cluster_names(tmp_path)
    assert catalogue.load_cluster("mine", tmp_path) == cluster
    assert catalogue.cluster_names(tmp_path / "not-there") == CLUSTERS
