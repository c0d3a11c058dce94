"""What a publisher says within 10 s of each kind of breakage is true, and its remedy works.

By status, log, metrics and dashboard. One set of servers; each breakage has a table, a topic and a
publisher of its own, whose dashboard is open all the time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.ops.browser import Dashboard, chromium
from tests.publisher.breakages import BREAKAGES, Breakage, Case, Servers, installed, servers
from tests.publisher.harness import compare, eventually

WITHIN = 30.0
"""Seconds in which a breakage is reported; some 10, where nothing else runs."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("servers")) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser | None]:
    """None: this machine has none, and dashboards are not looked at."""
    with chromium() as found:
        yield found


@pytest.fixture
def dashboard(browser: Browser | None, request: pytest.FixtureRequest) -> Iterator[Dashboard]:
    """Opened by `broken`."""
    page = None if browser is None else browser.new_page(locale="en-GB")
    yield Dashboard(page, request.node.callspec.params["broken"])
    if page is not None:
        page.close()


@pytest.fixture
def broken(
    running: Servers,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
    dashboard: Dashboard,
) -> Iterator[Breakage]:
    """The breakage that the test's parameter names, of a publisher that works."""
    kind = BREAKAGES[request.param]
    folder = tmp_path_factory.mktemp(kind.__name__)
    with installed(running, folder / "publisher", on_small_disk=kind.on_small_disk) as case:
        for section, keys in kind.settings.items():
            case.publisher.settings[section].update(keys)
        case.start()
        dashboard.open(case.address)
        with kind(case) as breakage:
            yield breakage


def breaks(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("broken", [name], indirect=True)


def page_until(case: Case, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """`/status`, once it says so, within the time for it."""
    last: dict[str, Any] = {}

    def found() -> bool:
        nonlocal last
        last = case.page()
        return bool(last) and is_so(last)

    try:
        eventually(found, WITHIN)
    except AssertionError as error:
        raise AssertionError(f"{error}: {json.dumps(last)[:3000]}") from error
    return last


def wrong(document: dict[str, Any]) -> dict[str, str]:
    """The messages of the checks that are wrong."""
    return {c["name"]: c["message"] for c in document["checks"] if c["state"] == "error"}


def errors(case: Case) -> str:
    """The errors that the log names, with their remedies."""
    return "\n".join(line["error"] for line in case.log() if "error" in line)


def said(case: Case, what: str) -> dict[str, Any]:
    """The line of the log whose event has this in it."""
    return eventually(lambda: next((x for x in case.log() if what in x["event"]), {}), WITHIN)


def is_asserted_by_command(case: Case, name: str) -> dict[str, Any]:
    """`eventpub status --json` and the metrics call the same check wrong."""
    answer = case.status()
    assert not answer["ok"]
    document: dict[str, Any] = answer["result"]["status"]
    assert name in wrong(document)
    assert name in answer["summary"]
    assert case.metrics()[f"eventpub_health{{check={name}}}"] == 0
    assert case.get("/readyz")[0] == 503
    return document


def works_again(case: Case) -> None:
    """All checks are ok, and all that is committed is published, once."""
    case.write("after", 1)
    case.publisher.until_published("after", [1])
    eventually(lambda: case.get("/readyz")[0] == 200)
    eventually(lambda: case.page()["lag"]["events"] == 0)
    found = compare(case.database, case.publisher.topic)
    assert not found, found
    answer = case.status()
    assert answer["ok"], answer


@contextmanager
def stays_alive(case: Case) -> Iterator[None]:
    """The process of the publisher is the same before and after."""
    process = case.publisher.process
    assert process is not None
    yield
    assert process.poll() is None, case.publisher.words()


@breaks("database")
def test_the_database_is_away(broken: Breakage, dashboard: Dashboard) -> None:
    case = broken.case
    with stays_alive(case):
        found = page_until(case, lambda d: "database" in wrong(d) and d["lag"]["events"] is None)
        assert "store." in wrong(found)["database"]
        assert found["lag"]["seconds"] > 0
        metrics = case.metrics()
        assert "eventpub_lag_events" not in metrics  # unknown is not 0
        assert metrics["eventpub_lag_seconds"] > 0
        away = r"^database: store\.\w+: .*\(so also boundary[^:]*$"
        dashboard.says("not ready", "error", away, lag_events="not known", lag=r"^[1-9]")
        document = is_asserted_by_command(case, "database")
        assert document["lag"]["seconds"] >= found["lag"]["seconds"]
        page_until(case, lambda d: d["lag"]["seconds"] > found["lag"]["seconds"])
        assert "that the server runs" in errors(case)
        broken.heal()
        works_again(case)
        dashboard.says("running", "ok", lag_events="^0 events")
    assert "s" in said(case, "database: ok again after")["event"]


@breaks("broker")
def test_the_only_broker_is_away(broken: Breakage, dashboard: Dashboard) -> None:
    case = broken.case
    with stays_alive(case):
        case.write("meanwhile", 1)
        found = page_until(case, lambda d: bool({"broker", "shard 0", "shard 1"} & {*wrong(d)}))
        assert any("sink." in message for message in wrong(found).values())
        page_until(case, lambda d: "broker" in wrong(d))
        is_asserted_by_command(case, "broker")
        away = r"^broker: sink\.\w+: (?!.*(shard \d+|publishing): )"  # once
        dashboard.says("not ready", "error", away, recorded_note="Not known: sink|The newest|None")
        assert "check that the brokers run" in errors(case)
        broken.heal()
        works_again(case)
        dashboard.says("running", "ok")
    assert said(case, "broker: ok again after")
    assert "another publisher has taken over" not in case.publisher.log.read_text()


@breaks("hang")
def test_a19_a_broker_that_hangs_is_no_other_publisher(
    broken: Breakage, dashboard: Dashboard
) -> None:
    """What was asked of it meanwhile it does later, and so fences producers that are newer."""
    case = broken.case
    with stays_alive(case):
        for number in range(20):
            case.write(f"meanwhile-{number}", 1)
        page_until(case, lambda d: "broker" in wrong(d))
        dashboard.says("not ready", "error", r"^broker: sink\.")

        def are_taken_over_in_vain() -> bool:
            found = [shard["last_error"] for shard in case.page()["shards"]]
            return all(error and "taking over the shard" in error["message"] for error in found)

        eventually(are_taken_over_in_vain)
        broken.heal()
        works_again(case)
    assert "another publisher has taken over" not in case.publisher.log.read_text()


@breaks("disk")
def test_the_disk_is_full(broken: Breakage, dashboard: Dashboard) -> None:
    case = broken.case
    with stays_alive(case):
        case.write("meanwhile", 1)
        found = page_until(case, lambda d: "index" in wrong(d))
        assert str(case.publisher.state) in wrong(found)["index"]
        is_asserted_by_command(case, "index")
        dashboard.says("not ready", "error", rf"^index: .*{case.publisher.state}")
        assert "free space on the disk of app.state_dir" in errors(case)
        broken.heal()
        works_again(case)
    assert said(case, "index: ok again after")


@breaks("topic")
def test_the_topic_is_deleted(broken: Breakage, dashboard: Dashboard) -> None:
    """Nothing is published to another topic unasked: it ends, and says what to do."""
    case = broken.case
    case.write("meanwhile", 1)
    found = page_until(case, lambda d: any("sink.topic" in text for text in wrong(d).values()))
    assert not found["is_ready"]
    assert case.publisher.finish(120) == 3
    gone = r"it has ended.*eventpub status.*Last known: broker: sink\.topic_\w+: "
    dashboard.says("no answer", "error", gone, ready=r"since \d\d:\d\d:\d\d", lag="–")
    ended = case.log()[-1]
    assert ended["code"] in {"sink.topic_missing", "sink.topic_recreated"}
    assert ended["level"] == "error"
    answer = case.status()
    assert ended["code"] in answer["summary"]
    assert "remove app.state_dir and start again" in ended["error"]
    shutil.rmtree(case.publisher.state)
    case.publisher.start()
    works_again(case)


@breaks("freeze")
def test_the_process_is_frozen(broken: Breakage, dashboard: Dashboard) -> None:
    case = broken.case
    broken.heal()
    kept = case.publisher.state / "status.json"
    eventually(lambda: not wrong(json.loads(kept.read_text())), 30)
    broken.__enter__()
    with stays_alive(case):
        answer = case.status()
        assert not answer["ok"]
        assert answer["result"]["kind"] == "silent"
        assert "does not answer" in answer["summary"]
        document = answer["result"]["status"]
        assert document["state"] == "not answering"
        assert wrong(document).keys() == {"process"}
        assert all(c["state"] == "unknown" for c in document["checks"] if c["name"] != "process")
        assert document["lag"]["events"] is None
        assert document["lag"]["seconds"] > 3
        assert case.get("/readyz", timeout=3.0)[0] == 0
        dashboard.says("no answer", "error", "it is frozen", ready=r"since \d\d:\d\d:\d\d", lag="–")
        broken.heal()
        works_again(case)


@breaks("clock")
def test_the_databases_clock_goes_back(broken: Breakage, dashboard: Dashboard) -> None:
    """What is created now lies in the past, where the recount finds it."""
    case = broken.case
    with stays_alive(case):
        case.write("in the past", 1)
        line = said(case, "clock went back")
        assert line["level"] == "warning"
        assert 25 < line["seconds"] < 35
        dashboard.says("running", "ok")
        case.publisher.until_published("in the past", [1])
        broken.heal()
        works_again(case)


@breaks("password")
def test_the_password_is_rotated(broken: Breakage, dashboard: Dashboard) -> None:
    """The file follows the database after a while, as with a mounted secret."""
    case = broken.case
    with stays_alive(case):
        case.write("meanwhile", 1)
        found = page_until(case, lambda d: "store.auth_failed" in wrong(d).get("database", ""))
        assert "Access denied" in wrong(found)["database"]
        is_asserted_by_command(case, "database")
        dashboard.says("not ready", "error", r"^database: store\.auth_failed: .*Access denied")
        assert "write a new one into the file of store.password_file" in errors(case)
        broken.heal()
        works_again(case)
    assert said(case, "database: ok again after")
    text = case.publisher.log.read_text() + json.dumps(case.page())
    assert "secret-of-this-account" not in text


@breaks("gap")
def test_a_version_is_missing(broken: Breakage, dashboard: Dashboard) -> None:
    case = broken.case
    found = page_until(case, lambda d: d["holds_open"] == 1 and d["lag"]["events"] == 1)
    assert found["is_ready"]  # an event that waits is no fault of the publisher's
    assert said(case, "eventpub gaps list")["opened"] == 1
    page_until(case, lambda d: d["lag"]["seconds"] > 0)
    assert case.metrics()["eventpub_holds_open"] == 1
    dashboard.says("running", "ok", holds="^1$", lag="^[1-9]", lag_events="^1 event", gaps="gap-1")
    listed = case.publisher.answer(1, "gaps", "list")
    assert listed["open"][0]["aggregate_id"] == "gap-1"
    assert listed["open"][0]["first_missing"] == 2
    case.publisher.answer(0, "gaps", "skip", "gap-1", "--yes")
    case.publisher.until_published("gap-1", [1, 3])
    line = said(case, "gap skipped")
    assert (line["from_version"], line["to_version"]) == (2, 2)
    assert str(line["first_seen"]).endswith("Z")
    page_until(case, lambda d: d["holds_open"] == 0 and d["counters"]["gaps_skipped"] == 1)
    dashboard.says("running", "ok", holds="^0$", skipped="^1$", skips="gap-1.*2.*still missing")


@breaks("large row")
def test_a_row_is_too_large_for_the_topic(broken: Breakage, dashboard: Dashboard) -> None:
    case = broken.case
    with stays_alive(case):
        found = page_until(case, lambda d: d["counters"]["dead"] == 1)
        assert not wrong(found)
        assert case.metrics()["eventpub_events_dead_total"] == 1
        line = said(case, "dead-letter topic")
        assert line["level"] == "warning"
        line = said(case, "refused")
        assert (line["aggregate_id"], line["version"]) == ("large-1", 1)
        assert "max.message.bytes" in line["reason"]
        refused = "large-1.*max.message.bytes.*not published"
        dashboard.says("running", "ok", dead="^1$", dead_also="^1 not published", letters=refused)
        assert not any(record.key == "large-1" for record in case.publisher.topic.read())
        broken.heal()  # raises max.message.bytes
        case.publisher.answer(0, "dead", "retry", "large-1", "1")
        case.publisher.until_published("large-1", [1])
        dashboard.says("running", "ok", dead_also="^0 not published", letters="published since")
