"""A verdict for people: the small run that was carried out, the errors step by step, and where the first one
lies."""

from rich.console import Group, RenderableType

from trainwright.present.parts import facts, headline, section, table
from trainwright.spec.miniature import RULE, Miniature
from trainwright.spec.run import Run
from trainwright.spec.verdict import BOUND, QUANTITIES, Verification

TITLES = {"loss": "loss", "gradients": "gradients", "norm": "gradient norm", "weights": "weights after"}
MOST_RANKS = 8


def miniature_view(run: Run, small: Miniature) -> RenderableType:
    """What is carried out in place of the run."""
    rows = [(field, f"{before} -> {after}") for field, before, after in small.changes]
    return Group(
        headline(f"{run.name} ({run.hash}) at small width: {degrees_text(small.run)}", f"Rule: {RULE}"),
        section("Scaled", facts(rows)) if rows else section("Nothing had to be scaled"),
    )


def degrees_text(run: Run) -> str:
    """`tp 2 x pp 2, 4 ranks`."""
    layout = run.layout
    axes = [f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "pp", "dp") if getattr(layout, axis) > 1]
    extra = [f"{axis} {getattr(layout, axis)}" for axis in ("vpp", "ep", "etp") if getattr(layout, axis) > 1]
    ranks = f"{layout.world} rank{'s' if layout.world > 1 else ''}"
    return ", ".join(filter(None, [" x ".join(axes), *extra, ranks]))


def verdict_view(small: Run, found: Verification) -> RenderableType:
    """Errors of each step, and in one sentence what they come to."""
    columns = [("step", ">"), *((TITLES[each], ">") for each in QUANTITIES)]
    rows = [[str(each.step), *(f"{each.errors[name]:.1e}" for name in QUANTITIES)] for each in found.verdict.steps]
    planted = f", with {found.fault} planted" if found.fault else ""
    parts = [section(f"Largest relative error of any tensor on any rank{planted}", table(columns, rows))]
    first = found.verdict.first
    if first is None:
        steps = f"{len(found.verdict.steps)} step{'s' if len(found.verdict.steps) > 1 else ''}"
        worst = f"worst relative error {found.verdict.worst:.1e} in {steps}, bound {BOUND:.0e}"
        return Group(*parts, section(f"EQUAL to the plain model: {worst}"))
    what = [
        ("first", f"step {first.step}: {', '.join(TITLES[each] for each in first.quantities)}"),
        (
            "parameter",
            f"{first.parameter}, off by {first.error:.1e}, and {first.num_parameters - 1} of the other "
            f"{first.of_parameters - 1}"
            if first.parameter
            else "none: no tensor differs",
        ),
        ("ranks", _ranks_text(first.ranks, small.layout.world)),
        ("axis", _axis_text(found)),
    ]
    return Group(*parts, section(f"NOT EQUAL to the plain model, bound {BOUND:.0e}", facts(what)))


def _ranks_text(ranks: tuple[int, ...], world: int) -> str:
    if len(ranks) == world:
        return f"all {world}"
    return ", ".join(map(str, ranks[:MOST_RANKS])) + (" ..." if len(ranks) > MOST_RANKS else "")


def _axis_text(found: Verification) -> str:
    """Named by what goes away with it."""
    if not found.without:
        return "none: one rank alone differs"
    gone = [axis for axis, finding in found.without.items() if finding == "equal"]
    absent = [axis for axis, finding in found.without.items() if finding == "not there"]
    stays = [axis for axis, finding in found.without.items() if finding == "unequal"]
    said = [f"{', '.join(found.axes)}:" if found.axes else "not of one axis:"]
    if gone:
        said.append(f"the difference is gone with {' or '.join(f'{axis}=1' for axis in gone)};")
    if absent:
        said.append(f"the fault needs {' and '.join(absent)};")
    if stays:
        said.append(f"it is there with {' and with '.join(f'{axis}=1' for axis in stays)} too;")
    return " ".join(said).rstrip(";")
