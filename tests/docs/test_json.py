"""docs/json.md names the fields that answers have: no other, and all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eventpub.admission.model import Hold, SkippedGap
from eventpub.channel import Request
from eventpub.cli import main
from eventpub.index import Pending
from eventpub.ops.dead import Letter, Letters
from eventpub.ops.lookup import Found
from eventpub.ops.trace import Trace, Traced
from eventpub.sources.base import RowSeen
from tests.docs.pages import ROOT
from tests.in_process import commands_run_in
from tests.ops.documents import document

HOLD = Hold("a", 2, 3, first_seen=1, attempts=1, next_attempt=2, since=1)
SKIP = SkippedGap("a", 1, 1, first_seen=1, skipped_at=2, attempts=1, reason="max_backoff")
HEADERS = {"ce_id": "a/1", "eventpub_reason": "sink.record_refused: …"}
LETTER = Letter("a", 1, "orders.events.dead", 0, 7, 1, HEADERS, 2, b"{}")
RECORD = Found("a", 1, "orders.events", 0, 7, 1, {"ce_id": "a/1"}, 2, b"{}")


def documented() -> dict[str, set[str]]:
    """By heading, the names that the items of its list begin with."""
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    sections = re.split(r"^#+ (.*)$", page, flags=re.MULTILINE)[1:]
    lists = zip(sections[::2], sections[1::2], strict=True)
    return {name: set(_first_words(text)) for name, text in lists}


def _first_words(text: str) -> Iterator[str]:
    for names in re.findall(r"^- (`\w+`(?:, `\w+`)*): ", text, re.MULTILINE):
        yield from re.findall(r"\w+", names)


@pytest.fixture(autouse=True)
def _answers(tmp_path: Path) -> Iterator[None]:
    """What the commands find, and where they run."""
    given = {
        "APP__ID": "orders",
        "STORE__URL": "mysql+pymysql://reader@127.0.0.1:1/shop",
        "SINK__TOPIC": "orders.events",
    }
    request = Request("1", "skip", "a", 1, 1)
    traced = Traced(1, "published", "", [RowSeen(1, 1, "Placed", 2)], (RECORD,), HOLD, SKIP)
    found: dict[str, Any] = {
        "status.ask_running": document(),
        "gaps._recorded": ([SKIP], 1),
        "gaps.pending": (Pending([HOLD], 1, {}), True),
        "gaps.StateDir.kept": [request],
        "dead.find": Letters(1, 1, [LETTER], is_whole=True),
        "trace.trace": Trace("a", [traced], True, None),
    }
    with commands_run_in(tmp_path) as patch:
        for name, value in given.items():
            patch.setenv(f"EVENTPUB_{name}", value)
        for function, answer in found.items():
            patch.setattr(f"eventpub.ops.{function}", lambda *_, _as=answer, **__: _as)
        yield


def result(capfd: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    main([*command, "--json"])
    answer: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert answer["result"] is not None, answer
    found: dict[str, Any] = answer["result"]
    return found


def test_each_field_of_an_answer_is_documented(capfd: pytest.CaptureFixture[str]) -> None:
    status = result(capfd, "status")
    gaps = result(capfd, "gaps", "list")
    letters = result(capfd, "dead", "list")
    letter = result(capfd, "dead", "show", "a", "1")
    trace = result(capfd, "trace", "a")
    [version] = trace["versions"]
    assert version["hold"].keys() == gaps["open"][0].keys()
    assert version["skip"].keys() | {"still_missing"} == gaps["skipped"][0].keys()
    real = {
        "eventpub status": status,
        "In `status`, and at `/status`": status["status"],
        "An entry of `checks`": status["status"]["checks"][0],
        "An entry of `shards`": status["status"]["shards"][0],
        "eventpub gaps list": gaps,
        "An entry of `open`": gaps["open"][0],
        "An entry of `skipped`": gaps["skipped"][0],
        "An entry of `requests`": gaps["requests"][0],
        "eventpub dead list": letters,
        "An entry of `letters`": letters["letters"][0],
        "eventpub dead show": letter.keys() - letters["letters"][0].keys(),
        "eventpub trace": trace,
        "An entry of `versions`": version,
        "An entry of `records`": version["records"][0],
    }
    written = {heading: names for heading, names in documented().items() if names}
    assert written == {heading: set(fields) for heading, fields in real.items()}
