"""What composes with what: every pair of the trainer's features is in a parity case, or is refused with a reason.

`docs/composition.md` is written from the tables of cases by `python tests/cpu/composition.py`; a test holds the
file to them, and fails for a pair that is in no case and that the door lets through.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from example import example_run
from parity_cases import CASES
from parity_pairs import Clash, fields_of

from trainwright.spec.errors import InvalidSpec
from trainwright.spec.model import LatentAttention
from trainwright.spec.run import Run
from trainwright.train.door import require_trainable

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"

FEATURES: dict[str, Callable[[Run], bool]] = {
    "tp": lambda run: run.layout.tp > 1,
    "tp without sequence parallelism": lambda run: run.layout.tp > 1 and not run.recipe.sequence_parallel,
    "tp beside matmuls": lambda run: run.layout.tp > 1 and run.recipe.overlap.tp,
    "cp all_gather": lambda run: run.layout.cp > 1 and run.recipe.cp_method == "all_gather",
    "cp ring": lambda run: run.layout.cp > 1 and run.recipe.cp_method == "ring",
    "cp all_to_all": lambda run: run.layout.cp > 1 and run.recipe.cp_method == "all_to_all",
    **{
        f"pp {name}": lambda run, name=name: run.layout.pp > 1 and run.recipe.schedule == name
        for name in (
            "1f1b",
            "gpipe",
            "interleaved_1f1b",
            "breadth_first",
            "zb_h1",
            "zb_v",
            "dualpipe",
            "dualpipe_v",
        )
    },
    **{
        f"dp zero {zero}": lambda run, zero=zero: run.layout.dp > 1 and run.recipe.zero == zero
        for zero in range(4)
    },
    "HSDP": lambda run: run.recipe.dp_replicate > 1,
    "ep": lambda run: run.layout.ep > 1,
    "etp": lambda run: run.layout.etp > 1,
    "experts": lambda run: run.model.is_moe,
    "ep beside shared experts": lambda run: run.layout.ep > 1 and run.recipe.overlap.ep,
    "capacity of experts": lambda run: run.recipe.capacity_factor is not None,
    "loss for balance": lambda run: run.recipe.balance_loss > 0,
    "latent attention": lambda run: any(
        isinstance(layer.attention, LatentAttention) for layer in run.model.layer_counts()
    ),
    "multi-token prediction": lambda run: run.model.mtp_depth > 0,
    "tied embeddings": lambda run: run.model.tied_embeddings,
    "sliding window": lambda run: any(layer.attention.sliding_window for layer in run.model.layer_counts()),
    "document mask": lambda run: run.data.document_mask,
    "selective recompute": lambda run: run.recipe.recompute == "selective",
    "full recompute": lambda run: run.recipe.recompute == "full",
    "loss in chunks": lambda run: run.recipe.loss_chunks > 1,
    "fused loss": lambda run: run.recipe.loss_kernel == "fused",
    "dropout": lambda run: run.recipe.dropout > 0,
    "compiled layers": lambda run: run.recipe.compile,
    "low precision": lambda run: run.recipe.is_low_precision,
    "weights gathered in fp8": lambda run: run.recipe.gather_fp8,
    "Muon": lambda run: run.recipe.optimizer.name == "muon",
}
"""Whether a run has each of them."""


def runs() -> Iterator[Run]:
    """Those of all parity cases."""
    for cases in CASES.values():
        for fields in cases.values():
            yield example_run(**{name: value for name, value in fields.items() if name != "ignored"})


def counts() -> tuple[Counter[str], Counter[frozenset[str]]]:
    """Cases that have each feature, and each pair."""
    single: Counter[str] = Counter()
    pairs: Counter[frozenset[str]] = Counter()
    for run in runs():
        has = [name for name, is_there in FEATURES.items() if is_there(run)]
        single.update(has)
        pairs.update(map(frozenset, itertools.combinations(has, 2)))
    return single, pairs


def verdicts() -> dict[frozenset[str], str]:
    """Of every pair in how many cases it is, or why it can't be; empty where it is neither."""
    _, pairs = counts()
    found = {}
    for pair in map(frozenset, itertools.combinations(FEATURES, 2)):
        found[pair] = f"{pairs[pair]} cases" if pairs[pair] else _why_not(pair)
    return found


def _why_not(pair: frozenset[str]) -> str:
    try:
        run = example_run(**fields_of(pair))
        require_trainable(run.check())
    except Clash:
        return "one or the other"
    except InvalidSpec as refusal:
        return str(refusal)
    has = {name for name, is_there in FEATURES.items() if is_there(run)}
    return "" if pair <= has else "one or the other"


def page() -> str:
    """The text of `docs/composition.md`."""
    single, _ = counts()
    found = verdicts()
    number = sum(map(len, CASES.values()))
    worlds = ", ".join(f"{len(cases)} on {world}" for world, cases in CASES.items())
    tested = sum(verdict.endswith(" cases") for verdict in found.values())
    alternatives = sum(verdict == "one or the other" for verdict in found.values())
    refused = {pair: verdict for pair, verdict in found.items() if ": " in verdict}
    lines = [
        "# What composes with what",
        "",
        "Written by `python tests/cpu/composition.py` from the tables of parity cases (`tests/cpu/parity_*.py`).",
        "Each of them steps a parallel run beside the plain model in float64: loss, every gradient, the clipping",
        "norm and all weights after the step agree to 1e-10; 1e-12 is seen. `make parity` runs all of them,",
        "`make test` an eighth and those that were made for pairs.",
        "",
        f"{number} cases by number of ranks: {worlds}. Of {len(found)} pairs of the features below {tested} are",
        f"in one case or more, {alternatives} are alternatives of one another, and {len(refused)} are refused",
        "with the reason.",
        "",
        "| feature | cases | met by | refused with |",
        "|---|---|---|---|",
    ]
    for name in FEATURES:
        others = {next(iter(pair - {name})): verdict for pair, verdict in found.items() if name in pair}
        met = sum(verdict.endswith(" cases") for verdict in others.values())
        against = [other for other, verdict in others.items() if ": " in verdict]
        lines.append(f"| {name} | {single[name]} | {met} features | {', '.join(against)} |")
    lines += ["", "## Refusals", "", "| together | the door says |", "|---|---|"]
    for pair, verdict in refused.items():
        lines.append(f"| {' and '.join(sorted(pair, key=list(FEATURES).index))} | `{verdict}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
