"""What tests of the command line share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli.main import run

Asked = Callable[..., dict[str, Any]]


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Asked:
    """Runs a verb with --json and returns its document; checks the exit status and that nothing else is said."""

    def ask(*arguments: str | Path, status: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        seen = run([*map(str, arguments), "--json"])
        captured = capsys.readouterr()
        assert seen == status, captured.err
        assert captured.err == ""
        return json.loads(captured.out)

    return ask
