"""Models and clusters by name or by path: the catalogue that comes with the program, and the user's own files.

A model of the catalogue is one TOML file. A cluster is put together from parts, so that each fact is written
once: device (`data/devices`), link and network (`data/fabrics.toml`), software (`data/software.toml`), and what
only the cluster knows. Each part is a piece of a ClusterSpec with the sources of its numbers, a later part goes
before an earlier one, and a device or software may say `like` which other one it differs from. Free constants
(`data/constants.toml`) stand in their parts as if written there. A cluster that a user made or measured is one
whole ClusterSpec in one file.
"""

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

from trainwright.cli import files
from trainwright.spec import toml
from trainwright.spec.cluster import ClusterSpec, Provenance, numeric_fields
from trainwright.spec.constants import Constant, Constants
from trainwright.spec.errors import InvalidSpec, nearest, reject, shown
from trainwright.spec.goodput import PublishedFailures
from trainwright.spec.hf import model_from_hf
from trainwright.spec.kernels import KernelTable
from trainwright.spec.model import ModelSpec
from trainwright.spec.published import Bands
from trainwright.spec.recipe import Precision, has_hardware
from trainwright.spec.recovery import Recovery

DATA = resources.files("trainwright") / "data"


def model_names() -> list[str]:
    """Names of the catalogue's models."""
    return list(_names("models"))


def cluster_names(user_dir: Path | None = None) -> list[str]:
    """Names of the catalogue's clusters, and of those that the user keeps in `user_dir`."""
    own = [path.stem for path in user_dir.glob("*.toml")] if user_dir is not None and user_dir.is_dir() else []
    return sorted({*_names("clusters"), *own})


def load_model(name_or_path: str) -> ModelSpec:
    """The model of that name in the catalogue, or the one that a file says: a Hugging Face config.json, or a
    TOML file with the fields of ModelSpec. Raises InvalidSpec."""
    if name_or_path in model_names():
        return toml.read((DATA / "models" / f"{name_or_path}.toml").read_text("utf-8"), ModelSpec, name_or_path)
    if not _is_path(name_or_path):
        known = nearest(name_or_path, model_names())
        reject("model", name_or_path, f"neither in the catalogue nor the path of a config.json; {known}")
    path = Path(name_or_path)
    text = _read(path)
    if path.suffix == ".toml":
        return toml.read(text, ModelSpec, name_or_path)
    config = _parse_json_object(text, path)
    name = path.parent.name if path.name == "config.json" else path.stem
    try:
        return model_from_hf(config, name or "model")
    except InvalidSpec as error:
        raise InvalidSpec(f"{name_or_path}: {error}") from None


def load_cluster(name_or_path: str, user_dir: Path | None = None, software: str | None = None) -> ClusterSpec:
    """The cluster of that name, the user's own before the catalogue's, or the one that a TOML file says.
    `software` puts one of the catalogue's together with another kind of software. Raises InvalidSpec."""
    names = cluster_names(user_dir)
    own = user_dir / f"{name_or_path}.toml" if user_dir is not None else None
    is_own = own is not None and own.is_file()
    if name_or_path in _names("clusters") and not is_own:
        return compose_cluster(name_or_path, software)
    if software is not None:
        reject("software", software, "is for a cluster of the catalogue; one's own holds its software's rates")
    if name_or_path in names and own is not None:
        return _read_cluster_file(own)
    if not _is_path(name_or_path):
        remedy = f"neither in the catalogue nor the path of a cluster.toml; {nearest(name_or_path, names)}"
        reject("cluster", name_or_path, remedy)
    return _read_cluster_file(Path(name_or_path))


@cache
def constants() -> tuple[Constant, ...]:
    """The free constants, with the values that the catalogue uses."""
    return Constants.parse(_read_data("constants.toml")).constant


def with_recovery(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with what the catalogue assumes of recovery, where it says nothing of it itself."""
    if cluster.recovery is not None:
        return cluster
    assumed = _read_data("recovery.toml")
    sources = {field: Provenance.parse(entry) for field, entry in assumed["provenance"].items()}
    return cluster.changed(
        recovery=Recovery.parse(assumed["recovery"]), provenance={**cluster.provenance, **sources}
    )


@cache
def published_failures() -> PublishedFailures:
    """Mean times to failure as they were published."""
    return PublishedFailures.parse(_read_data("failures.toml"))


@cache
def bands() -> Bands:
    """How measured step times lie about the planner's predictions."""
    return Bands.parse(_read_data("bands.toml"))


@cache
def kernels() -> KernelTable:
    """What the names in a trace mean."""
    return KernelTable.parse(_read_data("kernels.toml"))


def devices_with(precision: str) -> list[str]:
    """Those of the catalogue that have hardware for a precision, by their names in `data/devices`."""
    wanted = cast(Precision, precision)
    clusters = [name for name in _names("clusters") if has_hardware(wanted, compose_cluster(name).device)]
    devices = ([part for part in parts_of(name) if part.startswith("device:")] for name in clusters)
    return sorted({chain[-1].removeprefix("device:") for chain in devices})


def software_names() -> list[str]:
    """Kinds of software that a cluster may be put together with."""
    return sorted(_read_data("software.toml"))


def compose_cluster(
    name: str,
    software: str | None = None,
    values: Mapping[str, float] | None = None,
    overrides: Mapping[str, int | float] | None = None,
) -> ClusterSpec:
    """A cluster of the catalogue, put together from its parts: with another kind of software, with other values of
    free constants (by their names), and with fields that a published run states otherwise."""
    own = dict(_read_data(f"clusters/{name}.toml"))
    chosen, parts = values or {}, own.pop("parts")
    whole: dict[str, Any] = _merged({"software": software or parts["software"]}, _read_data("recovery.toml"))
    for key in _parts(parts, software):
        whole = _merged(whole, _with_constants(key, _read_part(key), chosen))
    whole = _merged(whole, own)
    for field, value in (overrides or {}).items():
        _put(whole, field, value, Provenance(kind="assumed", source="stated by the published run"))
    return ClusterSpec.parse(whole)


def parts_of(name: str, software: str | None = None) -> list[str]:
    """`kind:name` of the parts of a catalogue cluster, and of what they are like: whose constants it has."""
    return _parts(_read_data(f"clusters/{name}.toml")["parts"], software)


def new_cluster(base: ClusterSpec, name: str, assignments: list[str]) -> ClusterSpec:
    """A copy of `base` with another name and `field=value` texts applied, such as
    `fabric.nic_bytes_per_s=25e9`. Each number that changed is marked as set by the user."""
    if not name or _is_path(name):
        reject("name", name, "must be a plain name, not the path of a file")
    mark = Provenance(kind="assumed", source="set by the user")
    said = [path for path, _ in map(toml.parse_assignment, assignments)]
    # A number needs its source as soon as it is there, such as a price where the base has none.
    sourced = base.changed(name=name, provenance={**base.provenance, **dict.fromkeys(said, mark)})
    cluster = toml.with_assignments(sourced, assignments)
    before, after = _numbers(base), _numbers(cluster)
    marks = {field: mark for field, value in after.items() if before.get(field) != value}
    return cluster.changed(provenance={**base.provenance, **marks})


def _read(path: Path) -> str:
    try:
        return files.read_text(path)
    except OSError as error:
        raise InvalidSpec(f"{path}: can't be read: {error.strerror or error}") from None


def _is_path(text: str) -> bool:
    """Whether a text means a file and not a name, by its form or as there is such a file."""
    by_form = "/" in text or "\\" in text or text.endswith((".toml", ".json")) or text in (".", "..")
    return by_form or Path(text).is_file()


@cache
def _names(folder: str) -> tuple[str, ...]:
    names = (entry.name for entry in (DATA / folder).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def _read_cluster_file(path: Path) -> ClusterSpec:
    return toml.read(_read(path), ClusterSpec, str(path))


def _parse_json_object(text: str, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidSpec(
            f"{path}: not JSON: {error.msg} (at line {error.lineno}, column {error.colno})"
        ) from None
    except RecursionError:
        raise InvalidSpec(f"{path}: not JSON that can be read: nested too deeply") from None
    except ValueError as error:  # an integer of more digits than Python converts
        raise InvalidSpec(f"{path}: not JSON that can be read: {error}") from None
    if not isinstance(values, dict):
        raise InvalidSpec(f"{path}: holds {shown(values)}; a config.json is one object {{...}}")
    return values


def has_part(key: str) -> bool:
    """Whether there is a part of this `kind:name`."""
    try:
        _read_part(key)
    except (KeyError, FileNotFoundError):
        return False
    return True


def _parts(named: Mapping[str, str], software: str | None) -> list[str]:
    """The parts, each after those that it is like."""
    known = _read_data("software.toml")
    if software is not None and software not in known:
        reject("software", software, f"is no part of data/software.toml; {nearest(software, known)}")
    named = {**named, "software": software or named["software"]}
    parts: list[str] = []
    for kind in ("device", "link", "network", "software"):
        chain: list[str] = []
        name: str | None = named[kind]
        while name is not None:
            chain.insert(0, f"{kind}:{name}")
            name = _read_part(chain[0]).get("like")
        parts += chain
    return parts


def _read_part(key: str) -> dict[str, Any]:
    kind, _, name = key.partition(":")
    if kind == "device":
        return _read_data(f"devices/{name}.toml")
    return _read_data("software.toml")[name] if kind == "software" else _read_data("fabrics.toml")[kind][name]


def _with_constants(key: str, part: dict[str, Any], values: Mapping[str, float]) -> dict[str, Any]:
    """A part's own values, with those of the constants that belong to it."""
    merged = _merged({}, {field: value for field, value in part.items() if field != "like"})
    for constant in constants():
        if key in constant.parts:
            value = values.get(constant.name, constant.value)
            for field in constant.fields:
                _put(merged, field, value, _source(constant, value))
    return merged


def _source(constant: Constant, value: float) -> Provenance:
    if value == constant.prior:
        return Provenance(kind="assumed", source=constant.why)
    return Provenance(
        kind="measured", source=f"fitted to published runs by benchmarks/fit_published.py; before: {constant.why}"
    )


def _put(values: dict[str, Any], field: str, value: float, source: Provenance) -> None:
    """Set a dotted field of a piece of a cluster, and its source."""
    *tables, last = field.split(".")
    at = values
    for table in tables:
        at = at.setdefault(table, {})
    at[last] = value
    values.setdefault("provenance", {})[field] = source.plain()


@cache
def _read_data(relative: str) -> dict[str, Any]:
    """A file of the catalogue, parsed; nobody changes what is returned."""
    at = DATA
    for part in relative.split("/"):
        at = at / part
    return tomllib.loads(at.read_text("utf-8"))


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, table by table, in tables of its own."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict):
            under = merged.get(key)
            merged[key] = _merged(under if isinstance(under, dict) else {}, value)
        else:
            merged[key] = value
    return merged


def _numbers(cluster: ClusterSpec) -> dict[str, Any]:
    """Every number of the cluster by its dotted field."""
    values = cluster.model_dump(exclude={"provenance"}, exclude_none=True)
    return {field: _at(values, field) for field in numeric_fields(values)}


def _at(values: dict[str, Any], path: str) -> Any:
    at: Any = values
    for part in path.split("."):
        at = at[part]
    return at
