"""The command line: one verb per file, and one place that turns bad input into one line and exit status 2.

Exit status is 0 where the verb did what it was asked, 1 where the answer is no (nothing feasible, a comparison
out of tolerance), 2 for bad input. Verbs import numpy, pydantic and rich inside their functions, so that
`trainwright --help` answers at once.
"""

import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer

from trainwright import __version__
from trainwright.cli import (
    calibrate,
    chaos,
    checkpoint,
    clusters,
    compare,
    demo,
    diff,
    dryrun,
    explain,
    fp8,
    goodput,
    layout,
    memory,
    models,
    plan,
    predict,
    sweep,
    timeline,
    trace,
    train,
    validate,
    verify,
)
from trainwright.cli.worker import BAD_INPUT, started_by_torchrun

VERBS = (
    *(
        "plan",
        "predict",
        "layout",
        "timeline",
        "memory",
        "diff",
        "sweep",
        "train",
        "compare",
        "explain",
        "calibrate",
    ),
    *("goodput", "checkpoint", "chaos", "verify", "trace", "dryrun", "validate"),
    *("fp8", "models", "clusters", "demo"),
)
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Of the click that typer carries: every complaint about options and verbs."""
INTERRUPTED = 130
"""The shell's status of a program that Ctrl-C ended."""

app = typer.Typer(
    name="trainwright",
    help="Plan, run and check large-scale LLM training, with one run file through all three.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `trainwright demo`, or `trainwright plan --help` for an example.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trainwright {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("plan", epilog=plan.EXAMPLE)(plan.plan)
app.command("predict", epilog=predict.EXAMPLE)(predict.predict)
app.command("layout", epilog=layout.EXAMPLE)(layout.layout)
app.command("timeline", epilog=timeline.EXAMPLE)(timeline.timeline)
app.command("memory", epilog=memory.EXAMPLE)(memory.memory)
app.command("diff", epilog=diff.EXAMPLE)(diff.diff)
app.command("sweep", epilog=sweep.EXAMPLE)(sweep.sweep)
app.command("goodput", epilog=goodput.EXAMPLE)(goodput.goodput)
app.add_typer(checkpoint.app, name="checkpoint")
app.command("chaos", epilog=chaos.EXAMPLE)(chaos.chaos)
app.command("train", epilog=train.EXAMPLE)(train.train)
app.command("compare", epilog=compare.EXAMPLE)(compare.compare)
app.command("explain", epilog=explain.EXAMPLE)(explain.explain)
app.command("calibrate", epilog=calibrate.EXAMPLE)(calibrate.calibrate)
app.command("verify", epilog=verify.EXAMPLE)(verify.verify)
app.command("trace", epilog=trace.EXAMPLE)(trace.trace)
app.command("dryrun", epilog=dryrun.EXAMPLE)(dryrun.dryrun)
app.command("validate", epilog=validate.EXAMPLE)(validate.validate)
app.add_typer(fp8.app, name="fp8")
app.add_typer(models.app, name="models")
app.add_typer(clusters.app, name="clusters")
app.command("demo", epilog=demo.EXAMPLE)(demo.demo)


def main() -> NoReturn:
    """The program: run on `sys.argv`, exit with the status."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" for a bar, and no traceback
    # A worker ends at once: it may be inside a collective, where Python answers no signal.
    if not started_by_torchrun():
        signal.signal(signal.SIGTERM, _end)
    sys.exit(run(sys.argv[1:]))


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """As an exception, so that what is half made is removed on the way out."""
    sys.exit(128 + number)


def run(arguments: list[str]) -> int:
    """Run a verb; the exit status. What is wrong with the input is said in one line on standard error."""
    try:
        status = _status_of(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        return _refuse(file_complaint(error))
    except ValueError as error:
        from trainwright.spec.errors import InvalidSpec, LacksHardware

        if not isinstance(error, InvalidSpec):
            raise
        if isinstance(error, LacksHardware):
            from trainwright.cli.catalogue import devices_with

            return _refuse(f"{error}; devices that have it: {', '.join(devices_with(error.precision))}")
        return _refuse(str(error))


def _status_of(arguments: list[str]) -> int:
    try:
        # Without a verb, help: `trainwright` and `trainwright models` show what there is.
        alone = ([], ["models"], ["clusters"], ["checkpoint"], ["fp8"])
        wanted = [*arguments, "--help"] if arguments in alone else arguments
        status = app(wanted, prog_name="trainwright", standalone_mode=False)
    except SystemExit as exited:
        return exited.code if isinstance(exited.code, int) else int(exited.code is not None)
    except UsageError as error:
        return _refuse(_usage_complaint(error, arguments))
    except typer.Abort:
        status = INTERRUPTED
    if status == INTERRUPTED:
        typer.echo("trainwright: interrupted; what was written so far is kept", err=True)
    return status if isinstance(status, int) else 0


def _usage_complaint(error: Exception, arguments: list[str]) -> str:
    """A wrong option or verb in one line, with the value that it was given and where to look."""
    from trainwright.spec.errors import nearest, shown

    message = str(error.format_message()).rstrip(".")  # pyright: ignore[reportAttributeAccessIssue]
    option = next((each for each in arguments if f"'{each}'" in message), None)
    if isinstance(error, typer.BadParameter) and option in arguments[:-1]:
        message = f"{option}={shown(arguments[arguments.index(option) + 1])}: {message}"
    elif arguments and arguments[0] not in VERBS and not arguments[0].startswith("-"):
        message = f"{message}; {nearest(arguments[0], VERBS)}"
    verb = f"{arguments[0]} " if arguments and arguments[0] in VERBS else ""
    return f"{message}; see trainwright {verb}--help"


def file_complaint(error: OSError) -> str:
    """What went wrong with a file, in one line with the remedy where there is one."""
    import errno

    name = error.filename or "standard output"
    reason = (error.strerror or str(error)).lower()
    remedies = {
        errno.ENOSPC: "free some, or write elsewhere with --out",
        errno.EACCES: "change its permissions, or write elsewhere with --out",
        errno.EROFS: "write elsewhere with --out",
        errno.ENOENT: "check the path; directories above a file are not made",
    }
    remedy = remedies.get(error.errno or 0)
    return f"{name}: {reason}" + (f"; {remedy}" if remedy else "")


def _refuse(complaint: str) -> int:
    """Say the complaint on one line; the status of bad input."""
    typer.echo(f"trainwright: {' '.join(complaint.split())}", err=True)
    _drop_output()
    return BAD_INPUT


def _drop_output() -> None:
    """Let what standard output still holds go nowhere, so that closing it can't fail once more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
