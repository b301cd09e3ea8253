"""What faults cost a run, for people: a row each, and the run beside one left in peace."""

from rich.console import Group, RenderableType

from trainwright.present.parts import headline, section, table
from trainwright.spec.chaos import Toll
from trainwright.spec.units import seconds_text


def toll_view(toll: Toll) -> RenderableType:
    """The answer first, then fault by fault."""
    answer = "survived" if toll.is_survived else "NOT survived"
    what = f"{len(toll.blows)} faults in {toll.steps} steps of {toll.ranks} ranks, seed {toll.seed}"
    columns = [("step", ">"), ("fault", "<"), ("rank", ">"), ("seen", "<"), ("found in", ">"), ("back in", ">")]
    columns += [("again", ">"), ("as", "<")]
    rows = [
        [
            f"{each.step}",
            each.kind,
            f"{each.rank}",
            "yes" if each.is_right else "NO",
            seconds_text(each.found_after_s) if each.found_after_s else "-",
            seconds_text(each.back_after_s) if each.back_after_s else "-",
            f"{each.done_again}",
            each.seen_as or "a note of the save",
        ]
        for each in toll.blows
    ]
    losses = "equal to the bit" if toll.losses_equal else f"differ from step {toll.first_difference} on"
    ends = [
        ["logged losses", losses],
        ["weights and moments at the end", "equal to the bit" if toll.state_equal else "differ"],
        ["in peace", seconds_text(toll.plain_s)],
        ["under faults", seconds_text(toll.hurt_s)],
    ]
    parts = [headline(f"{toll.run_name}: {answer}", what), "", table(columns, rows)]
    parts.append(section("Beside the run left in peace", table([("", "<"), ("", "<")], ends)))
    if toll.left_out:
        parts.append(
            section("Left out", table([("", "<"), ("", "<")], [[*each] for each in toll.left_out.items()]))
        )
    if toll.false_alarms:
        parts.append(section("False alarms", table([("", "<")], [[text] for text in toll.false_alarms])))
    return Group(*parts)
