"""A table of published, measured runs (CSV) as nouns: each row a `PublishedRun`, or a `RefusedRow` and why.

`data/README.md` says what the columns mean; absent columns are empty ones. Every default that stands for an empty
cell is noted in `assumed`. The target is the step time that the source prints, else the one that follows from its
tokens/s, else from its TFLOP/s by the convention that it counts them with.
"""

import csv
import io
import re

from pydantic import ValidationError

from trainwright.measure.published_machine import machine_of, software_of
from trainwright.measure.published_model import model_of
from trainwright.measure.published_recipe import is_routing_natural, layout_of, recipe_of
from trainwright.measure.published_row import Row, UnreadableRow
from trainwright.spec.errors import InvalidSpec, from_validation
from trainwright.spec.layout import Layout
from trainwright.spec.model import FlopConvention, ModelSpec
from trainwright.spec.published import MemoryKind, PrecisionClass, PublishedRun, RefusedRow, Trust
from trainwright.spec.recipe import Precision, Recipe
from trainwright.spec.units import GIB

REQUIRED = ("id", "gpu", "n_gpus", "n_layers", "hidden", "n_heads", "vocab", "seq_len")
"""Columns without which a table is no table of runs."""

FLUSHED = re.compile(r"flushed after every .*?=([1-9]\d*) microbatches")
"""As AutoModel's rows note it."""

UNTUNED = re.compile(r"untuned|not tuned|early [\w-]+ port|hobby|support run")

SIBLINGS = (
    (re.compile(r"dgxc-benchmarking nemo_megatron/README_175b\.md"), "dgxc-benchmarking GPT-3 175B"),
    (re.compile(r"InternEvo doc/en/train_performance\.md"), "InternEvo train_performance.md"),
    (re.compile(r"atorch/examples/llama2/README\.md"), "ATorch llama2"),
)
"""Sources that print one measurement twice: dgxc's GPT-3 tables have equal step times under two vpp, InternEvo's
rows recur in its other table, ATorch's tables are one page."""


def read_table(text: str, name: str) -> tuple[list[PublishedRun], list[RefusedRow]]:
    """The runs of a CSV text, and the rows that are none. `name` is the file's, for `InvalidSpec`."""
    runs: list[PublishedRun] = []
    refused: list[RefusedRow] = []
    for line, cells in _rows(text, name):
        row = Row(cells)
        try:
            runs.append(run_of(row, line))
        except (UnreadableRow, InvalidSpec, ValidationError) as error:
            reason = from_validation(error, PublishedRun) if isinstance(error, ValidationError) else error
            refused.append(RefusedRow(id=row.text("id") or f"line {line}", line=line, reason=str(reason)))
    if not runs and not refused:
        raise InvalidSpec(f"{name}: has no rows below its header")
    return runs, refused


def _rows(text: str, name: str) -> list[tuple[int, dict[str, str]]]:
    """Line number and cells by column."""
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        header = [each.strip() for each in next(reader, [])]
        missing = [each for each in REQUIRED if each not in header]
        if missing:
            raise InvalidSpec(f"{name}: is no table of published runs: its header lacks {', '.join(missing)}")
        rows = []
        for cells in reader:
            if not any(cells):
                continue
            if len(cells) > len(header):
                raise InvalidSpec(
                    f"{name}: line {reader.line_num} has {len(cells)} cells for {len(header)} columns"
                )
            rows.append((reader.line_num, dict(zip(header, cells, strict=False))))
    except csv.Error as error:
        raise InvalidSpec(f"{name}: not CSV: {error} (at line {reader.line_num})") from None
    return rows


def run_of(row: Row, line: int) -> PublishedRun:
    """The run of one row. Raises `UnreadableRow` or `InvalidSpec` with the reason where it says none."""
    machine, software = machine_of(row), software_of(row)
    model = model_of(row)
    layout = layout_of(row, model.num_layers)
    recipe = recipe_of(row, software, layout, model.num_layers)
    layout, recipe = _playable(row, layout, recipe)
    step_s = _step_s(row, model, recipe.global_batch)
    repeats = _repeats(row, recipe.global_batch, recipe.micro_batch * layout.dp)
    memory_gib = row.number("mem_gib_per_gpu")
    source = row.text("source")
    return PublishedRun(
        id=row.text("id") or f"line {line}",
        line=line,
        source=source,
        publisher=publisher_of(source),
        siblings=next((name for pattern, name in SIBLINGS if pattern.search(source)), source),
        year=row.count("year", 2024),
        gpu=row.text("gpu"),
        cluster=machine.cluster,
        overrides=machine.overrides,
        software=software,
        model=model,
        layout=layout,
        recipe=recipe.changed(global_batch=recipe.global_batch // repeats),
        repeats=repeats,
        step_s=step_s,
        memory_bytes=round(memory_gib * GIB) if memory_gib else None,
        memory_kind=_memory_kind(row),
        precision_class=_precision_class(recipe.precision),
        trust=_trust(row),
        tuned=UNTUNED.search(row.lower("notes")) is None,
        natural_routing=is_routing_natural(row),
        recompute_known=row.lower("recompute") not in ("", "unknown"),
        assumed=tuple(row.assumed),
    )


def _playable(row: Row, layout: Layout, recipe: Recipe) -> tuple[Layout, Recipe]:
    """The same, without chunks where the microbatches don't come in rounds of pp, which interleaving needs."""
    microbatches = recipe.global_batch // (recipe.micro_batch * layout.dp)
    if recipe.schedule != "interleaved_1f1b" or microbatches % layout.pp == 0:
        return layout, recipe
    row.assume(
        f"vpp={layout.vpp} is taken as 1, as {microbatches} microbatches are no whole rounds of pp={layout.pp}"
    )
    return layout.changed(vpp=1, stage_layers=()), recipe.changed(schedule="1f1b")


def publisher_of(source: str) -> str:
    """`owner/repository` of a source on GitHub, the arXiv number of a paper, else the source's first words."""
    repository = re.match(r"[\w.-]+/[\w.-]+", source)
    if repository:
        # NeMo's launcher printed the tables that NeMo's own documentation goes on with.
        return "NVIDIA/NeMo" if repository[0] == "NVIDIA/NeMo-Framework-Launcher" else repository[0]
    paper = re.search(r"arXiv:\d{4}\.\d{4,5}", source)
    return paper[0] if paper else " ".join(source.split()[:3])


def _repeats(row: Row, global_batch: int, per_pass: int) -> int:
    """How often a step flushes the pipeline."""
    found = FLUSHED.search(row.lower("notes"))
    microbatches = global_batch // per_pass
    if not found or row.count("pp") == 1 or microbatches % int(found[1]):
        return 1
    return microbatches // int(found[1])


def _step_s(row: Row, model: ModelSpec, global_batch: int) -> float:
    for column in ("step_time_any_s", "step_time_s"):
        value = row.number(column)
        if value:
            return value
    tokens, devices = global_batch * row.required("seq_len"), row.required("n_gpus")
    rate = row.number("tokens_per_s_per_gpu")
    if rate:
        row.assume("the step time follows from the tokens/s")
        return tokens / (rate * devices)
    tflops = row.number("tflops_per_gpu")
    if not tflops:
        row.refuse("has no step time, tokens/s or TFLOP/s; give step_time_s")
    convention, factor, words = _counting(row)
    row.assume(f"the step time follows from the TFLOP/s, taken as {words}")
    flops = model.flops_per_token(row.required("seq_len"), convention) * factor * tokens
    return flops / devices / (tflops * 1e12)


def _counting(row: Row) -> tuple[FlopConvention, float, str]:
    """What a source's TFLOP/s count: the convention, and 4/3 where a recomputed forward pass is counted too."""
    text = row.lower("flops_convention")
    with_recompute = re.search(r"\b4x|hardware|hfu-type", text) is not None and "hfu adds" not in text
    factor = 4 / 3 if with_recompute and row.says("recompute", "full") else 1.0
    if "causal" in text and "non-causal" not in text:
        convention: FlopConvention = "causal"
    elif "6n" in text and "12" not in text:
        convention = "6n"
    else:
        convention = "full"
    extra = ", and the forward pass again" if factor > 1 else ""
    return convention, factor, f"model FLOPs with {convention} counting{extra}"


def _precision_class(precision: Precision) -> PrecisionClass:
    if precision == "nvfp4":
        return "FP4"
    if precision.startswith(("fp8", "mx")):
        return "FP8"
    return {"bf16": "BF16", "fp16": "FP16"}.get(precision, "FP32")  # pyright: ignore[reportReturnType]


def _trust(row: Row) -> Trust:
    text = row.text("trust").upper()
    return text if text in ("A", "B", "C") else "B"  # pyright: ignore[reportReturnType]


def _memory_kind(row: Row) -> MemoryKind:
    """By what the notes call it: PyTorch's max_memory_allocated, its max_memory_reserved, or nvidia-smi's
    figure."""
    notes = row.lower("notes")
    if "nvidia-smi" in notes or "smi snapshot" in notes:
        return "device"
    return "allocated" if "allocated" in notes or row.says("source", "simumax") else "reserved"
