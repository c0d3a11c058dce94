"""The dashboard in a real browser: before a publisher that a test plays, and before a real one."""

from __future__ import annotations

import json
import math
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from eventpub.channel import Request
from eventpub.config import Config
from eventpub.errors import SinkError
from eventpub.ops import pages
from eventpub.ops.http import Listener
from eventpub.ops.pages import sample
from eventpub.state import StateDir
from tests.conftest import FreshDatabase
from tests.coordinator.life import config
from tests.ops.browser import chromium
from tests.ops.documents import document, hold
from tests.publisher import conftest as publishers
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import create_table, eventually, insert, transaction
from tests.publisher.test_crashes import commit_some
from tests.publisher.test_operations import Pages

new_publisher = publishers.new_publisher

TOKEN = "a token of the dashboard"
HOSTILE = "<img src=x onerror=\"window.harmed='yes'\">&amp;<script>window.harmed='yes'</script>"
FILES = ("", "dashboard.css", "dashboard.js", "d3.min.js", "icon.svg")


class Played:
    """A publisher whose answers a test gives.

    Attributes:
        document: what `/status` shows.
        holds: what `/gaps` shows.
        last_missing: of every gap; None: all below what was seen is missing.
        is_gone: no gap is there any more, whatever the page still shows.
        outcome: the answer to a retry or a skip; None: no shard answers.
        done: what was asked.
        recorded: what `/recorded` shows.
        trace: the answer to a trace.
    """

    def __init__(self, configuration: Config) -> None:
        self.document = document()
        self.holds: list[Any] = []
        self.last_missing: int | None = None
        self.is_gone = False
        self.outcome: str | None = "found"
        self.done: list[Any] = []
        self.recorded: dict[str, Any] = {"skipped": [], "skipped_count": 0}
        self.recorded |= {"dead": [], "dead_rows": 0}
        self.trace: dict[str, Any] = {
            "summary": "nothing is known of it",
            "versions": [],
            "notes": [],
        }
        self._pages = pages.Pages(configuration, self, StateDir(configuration.app.state_dir))
        self.history = self._pages.history
        self._listener: Listener | None = None
        self._port = 0

    def status(self) -> dict[str, Any]:
        held = {"holds_open": len(self.holds)}
        return {**deepcopy(self.document), **held, "at": round(time.time(), 3)}

    def pause(self, is_paused: bool, by: str) -> None:
        self.done.append("pause" if is_paused else "resume")
        self.document |= {"is_paused": is_paused, "state": "paused" if is_paused else "running"}

    def ask(self, request: Request, timeout: float) -> dict[str, Any]:
        if request.action == "list":
            answer = json.dumps({"holds": self.holds, "count": len(self.holds)})
            return {"answers": {"0": answer}, "error": None}
        named = (request.version, request.to_version) if request.action == "skip" else ()
        self.done.append((request.action, request.aggregate_id, *named))
        if self.outcome is None:
            return {"answers": None, "error": None}
        return {"answers": {"0": self.outcome}, "error": None}

    def given_up(self, _: Config, aggregate_id: str) -> tuple[int, int] | None:
        found = [h for h in self.holds if h["aggregate_id"] == aggregate_id and not self.is_gone]
        gaps = [(h["first_missing"], self.last_missing or h["seen"] - 1) for h in found]
        return gaps[0] if gaps else None

    def withdraw(self, id: str) -> None:
        """Nothing waits."""

    def lived(self, seconds: int = 900, *, rate: float = 900.0) -> None:
        """Let the last minutes have been lively."""
        counters, latency = self.document["counters"], self.document["latency"]["counts"]
        steps = self.document["steps"].values()
        end = time.time()
        for second in range(seconds):
            wave = 1 + 0.35 * math.sin(second / 70) + 0.08 * math.sin(second * 1.7)
            events = int(rate * wave)
            counters["published"] += events
            latency[4] += events * 50 // 100
            latency[5] += events * 48 // 100
            latency[6 + second % 2] += events * 2 // 100
            for number, step in enumerate(steps):
                step["sum"] += (0.004 + 0.009 * number) * wave
                step["counts"][5] += 2
            lag = 0.0 if second % 40 else 0.4 * wave
            found = sample({**deepcopy(self.document), "at": round(end - seconds + second, 3)})
            self.history.append({**found, "lag_seconds": lag})

    # -- the server -------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def begin(self) -> None:
        """Serve, at the same address as before."""
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self._port))
        self._port = listening.getsockname()[1]
        listening.listen()
        self._listener = Listener(listening, self._pages.answer)

    def end(self) -> None:
        """Be gone."""
        assert self._listener is not None
        self._listener.end()


@pytest.fixture
def played(request: pytest.FixtureRequest) -> Iterator[Played]:
    """With a token, unless the test's parameter is None."""
    token = getattr(request, "param", TOKEN)
    made = Played(config(ops={} if token is None else {"token": token}))

    def traced(_: Config, aggregate_id: str, version: int | None) -> dict[str, Any]:
        made.done.append(("trace", aggregate_id, version))
        return made.trace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "recorded", lambda _: made.recorded)
        patch.setattr(pages, "traced", traced)
        patch.setattr(pages, "given_up", made.given_up)
        made.begin()
        yield made
        made.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; a machine without it skips what needs one."""
    with chromium() as launched:
        if launched is None:
            pytest.skip("no Chromium on the PATH: apt-get install chromium")
        expect.set_options(timeout=15_000)
        yield launched


class Seen:
    """What a browser has met: complaints of its console, and addresses that were asked."""

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        self.asked: set[str] = set()
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.add(request.url))

    def _said(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    made = browser.new_page(viewport={"width": 1200, "height": 900}, locale="en-GB")
    made.set_default_timeout(20_000)
    yield made
    made.close()


def opened(page: Page, played: Played) -> Seen:
    """The page, when it has shown a status and the gaps."""
    seen = Seen(page)
    page.goto(played.address)
    expect(page.locator("#shards tbody tr")).to_have_count(2)
    expect(page.locator("#gaps-note")).not_to_have_text("Loading.")
    return seen


def give_token(page: Page, token: str = TOKEN) -> None:
    page.locator("#token").fill(token)
    page.keyboard.press("Enter")


def test_its_files_are_served_and_ask_for_nothing_elsewhere(played: Played) -> None:
    for name in FILES:
        with urllib.request.urlopen(played.address + name) as answer:
            policy = answer.headers["Content-Security-Policy"]
            text = answer.read().decode()
        assert "default-src 'self'" in policy
        if name not in {"d3.min.js", "icon.svg"}:
            assert "//" not in re.sub(r"^ *//.*| // .*", "", text, flags=re.MULTILINE), name
            assert not re.search(r"\sstyle=|\son\w+=|innerHTML|insertAdjacentHTML", text), name


class TestWhatItShows:
    def test_of_a_publisher_that_works(self, page: Page, played: Played) -> None:
        played.lived()
        seen = opened(page, played)
        expect(page.locator("#app")).to_have_text("orders")
        expect(page.locator(".who")).to_contain_text("events → orders.events")
        expect(page.locator("#state")).to_have_text("running")
        expect(page.locator("#ready")).to_have_text("ready")
        expect(page.locator("#wrong")).to_have_text("")
        assert "orders: running" in page.title()
        total = f"{played.document['counters']['published']:,} since the start"
        expect(page.locator("#published")).to_have_text(total)
        expect(page.locator("#gaps-note")).to_contain_text("None")
        names = page.locator("#checks tbody tr td:first-child").all_text_contents()
        assert names == [check["name"] for check in played.document["checks"]]
        expect(page.locator("#shards tbody tr").nth(1)).to_contain_text("4 MiB")
        expect(page.locator("#config")).to_contain_text("sink.topic")
        assert TOKEN not in page.content()
        assert seen.complaints == []
        assert {url.startswith(played.address) for url in seen.asked} == {True}

    def test_the_last_15_minutes_are_drawn(self, page: Page, played: Played) -> None:
        played.lived()
        opened(page, played)
        # the history comes by an answer of its own, after the status
        drawn = re.compile(r"^(?:[^L]*L){151}")
        for line in page.locator("#charts .line").all():
            expect(line).to_have_attribute("d", drawn)
        areas = page.locator("#charts .area").all()
        assert len([a for a in areas if (a.get_attribute("d") or "").count("L") > 150]) == 6
        chart = page.locator("#charts svg").first
        expect(chart).to_have_attribute("aria-label", re.compile(r"Rate.* now events [\d,]+/s"))
        # it stands in the middle of the last minutes, where some 900 were published a second
        box = chart.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
        words = page.locator("#charts figcaption").first.text_content() or ""
        found = re.search(r"events ([\d,]+)/s", words)
        assert found is not None, words
        assert 500 < int(found[1].replace(",", "")) < 1_300
        latency = page.locator("#charts figcaption").nth(2)
        expect(latency).to_contain_text(re.compile(r"p50 \d+ ms"))
        expect(latency).to_contain_text(re.compile(r"p99 1\.\d s"))

    def test_the_numbers_follow(self, page: Page, played: Played) -> None:
        opened(page, played)
        end = time.monotonic() + 9
        while time.monotonic() < end:
            played.document["counters"]["published"] += 500
            page.wait_for_timeout(500)
        rate = (page.locator("#rate").text_content() or "").removesuffix("/s").replace(",", "")
        assert 700 < float(rate) < 1_300
        played.document["lag"] |= {"seconds": 81.3, "events": 12_345}
        expect(page.locator("#lag")).to_have_text("81.3 s")
        expect(page.locator("#lag-events")).to_have_text("12,345 events")
        played.document["counters"]["late"] = 3
        expect(page.locator("#late")).to_have_text("3")
        expect(page.locator("#late")).to_have_class("bad")

    def test_what_is_wrong_since_when(self, page: Page, played: Played) -> None:
        check = next(c for c in played.document["checks"] if c["name"] == "database")
        check |= {"state": "error", "message": "store.unreachable: it refuses"}
        check |= {"since": time.time() - 600, "last_ok": time.time() - 601}
        error = {"code": "store.unreachable", "message": "no route", "where": "machine 1"}
        played.document["shards"][1]["last_error"] = error | {"at": time.time() - 300}
        opened(page, played)
        expect(page.locator("#wrong")).to_have_text("database: store.unreachable: it refuses")
        expect(page.locator("#state")).to_have_text("not ready")
        expect(page.locator("#state")).to_have_class("mark error")
        expect(page.locator("#ready")).to_have_text("running")
        row = page.locator("#checks tbody tr", has_text="database")
        expect(row).to_contain_text(re.compile("error10 min10 min agostore.unreachable"))
        shard = page.locator("#shards tbody tr").nth(1)
        expect(shard).to_contain_text("5 min ago, store.unreachable: no route")
        assert "not ready" in page.title()

    def test_a_dead_broker_once_with_the_cause_first(self, page: Page, played: Played) -> None:
        """It was named by each shard and by the check of what is published, and last by its own."""
        away = "sink.unreachable: no broker answers [kafka-1:9092]"
        for check in played.document["checks"]:
            if check["name"] in {"publishing", "shard 0", "shard 1", "broker"}:
                check |= {"state": "error", "message": away}
        next(c for c in played.document["checks"] if c["name"] == "recount").update(
            state="warn", message=f"1 bucket could not be counted, trying fewer; {away}"
        )
        next(c for c in played.document["checks"] if c["name"] == "times").update(
            state="warn", message="3 rows are of the future"
        )
        opened(page, played)
        expect(page.locator("#wrong")).to_have_text(
            re.compile(
                rf"^broker: {re.escape(away)} \(so also publishing, recount, shard 0, shard 1\)"
                r"\s+times: 3 rows are of the future$"
            )
        )
        checks = page.locator("#checks tbody tr")
        expect(checks.filter(has_text="no broker answers")).to_have_count(1)
        expect(checks.filter(has_text="follows from broker")).to_have_count(4)

    @pytest.mark.parametrize(
        ("changes", "checks", "words", "colour"),
        [
            ({"state": "starting"}, ("error", "not seen to work yet"), "starting", "warn"),
            ({"state": "starting"}, ("error", "store.x: no"), "not ready starting", "error"),
            ({}, ("warn", "slow"), "warning running", "warn"),
            ({}, ("error", "store.unreachable: no"), "not ready running", "error"),
            (
                {"state": "paused", "is_paused": True, "paused_by": "ann@db-1 at noon"},
                ("ok", ""), "paused by ann@db-1 at noon", "warn",
            ),
            ({"state": "stopping"}, ("ok", ""), "stopping", "warn"),
            ({"state": "not answering"}, ("unknown", ""), "not answering", "error"),
            ({"is_alive": False}, ("ok", ""), "not working its loop does not turn", "error"),
        ],
    )  # fmt: skip
    def test_a_word_in_the_colour_of_what_it_says(
        self,
        page: Page,
        played: Played,
        changes: dict[str, Any],
        checks: tuple[str, str],
        words: str,
        colour: str,
    ) -> None:
        """Of a publisher that was not ready it said "running", in red."""
        played.document |= changes
        for check in played.document["checks"]:
            check |= {"state": checks[0], "message": checks[1]}
        opened(page, played)
        expect(page.locator(".state [role=status]")).to_have_text(words)
        expect(page.locator("#state")).to_have_class(f"mark {colour}")

    def test_that_what_is_not_known_is_not_0(self, page: Page, played: Played) -> None:
        played.document["lag"] |= {"seconds": 81.3, "events": None}
        played.document["rates"]["published"] = None
        opened(page, played)
        expect(page.locator("#lag-events")).to_have_text("events: not known")
        expect(page.locator("#rate")).to_have_text("–")

    def test_rows_that_are_held_or_passed_over(self, page: Page, played: Played) -> None:
        opened(page, played)
        expect(page.locator("#odd-rows")).to_be_hidden()
        played.document["lag"] |= {"ahead_rows": 10_000, "ahead_seconds": 3_600.0}
        played.document["counters"] |= {"rows_in_past": 2, "without_identity": 7}
        expect(page.locator("#odd-rows")).to_have_text(
            re.compile("10,000 or more rows lie in the future.* 60 min ahead.*2 rows.*7 rows", re.S)
        )

    def test_skips_and_dead_letters_that_stand_though_the_process_is_new(
        self, page: Page, played: Played
    ) -> None:
        """It showed what had been counted since the start of the process: 0."""
        skip = {"aggregate_id": "one", "from_version": 2, "to_version": 4, "attempts": 9}
        skip |= {"skipped_at": "2026-01-31T09:30:00.000000Z", "reason": "attempts"}
        letter = {"aggregate_id": HOSTILE, "version": 7, "reason": "sink.record_refused: too large"}
        letter |= {"created": "2026-01-31T09:30:00.000000Z", "is_searched": True, "offset": 1}
        played.recorded = {
            "skipped": [skip | {"still_missing": True},
                        skip | {"still_missing": False, "from_version": 1}],
            "skipped_count": 9,
            "dead": [letter | {"published": None, "partition": 0},
                     letter | {"published": {}, "partition": 1}],
            "dead_rows": 2,
        }  # fmt: skip
        opened(page, played)
        expect(page.locator("#skipped")).to_have_text("9")
        expect(page.locator("#skipped-also")).to_have_text(
            "1 of the newest 2 still missing; 0 since the start"
        )
        expect(page.locator("#dead")).to_have_text("2")
        expect(page.locator("#dead")).to_have_class("bad")
        expect(page.locator("#dead-also")).to_have_text("1 not published; 0 since the start")
        expect(page.locator("#skips tbody tr")).to_have_count(2)
        row = page.locator("#letters tbody tr").first
        expect(row).to_contain_text("sink.record_refused: too largenot published")
        row.get_by_role("button").click()
        give_token(page)
        expect(page.locator("#trace-note")).to_have_text("nothing is known of it")
        assert played.done == [("trace", HOSTILE, 7)]

    def test_that_skips_cannot_be_read(
        self, page: Page, played: Played, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(_: Config) -> dict[str, Any]:
            raise SinkError("sink.unreachable", "no broker answers")

        monkeypatch.setattr(pages, "recorded", fails)
        opened(page, played)
        expect(page.locator("#recorded-note")).to_have_text(
            "Not known: sink.unreachable: no broker answers"
        )
        expect(page.locator("#dead")).to_have_text("–")

    def test_a_wide_bucket_by_its_bounds(self, page: Page, played: Played) -> None:
        """A p99 between 60 and 300 s was called 5 min."""
        counts = played.document["latency"]["counts"]
        for second in range(60):
            counts[14] += 10
            found = sample({**deepcopy(played.document), "at": time.time() - 60 + second})
            played.history.append(found)
        opened(page, played)
        expect(page.locator("#charts figcaption").nth(2)).to_contain_text("p99 60 s to 5 min")

    def test_an_axis_in_one_unit(self, page: Page, played: Played) -> None:
        """Ticks were rounded to whole minutes: 3 min, 5 min, 7 min, or twice the same."""
        for second in range(60):
            found = sample({**deepcopy(played.document), "at": time.time() - 60 + second})
            played.history.append({**found, "lag_seconds": 4.2 * second})
        opened(page, played)
        lag = page.locator("#charts svg").nth(1)
        expect(lag).to_contain_text(" min")
        ticks = lag.locator("text").all_text_contents()
        assert [tick for tick in ticks if ":" not in tick] == [
            "0 min", "1 min", "2 min", "3 min", "4 min", "5 min"
        ] or len({tick for tick in ticks if " min" in tick}) >= 4, ticks  # fmt: skip
        assert not [tick for tick in ticks if tick.endswith(" s")]

    def test_a_trace(self, page: Page, played: Played) -> None:
        opened(page, played)
        stored = {"create_time": "2026-01-31T09:30:00.000000Z", "event_type": "Created"}
        record = {"topic": "orders.events", "partition": 3, "offset": 12}
        version = {"verdict": "published", "stored": stored | {"payload_bytes": 2}, "note": ""}
        page.locator("#trace-id").fill("order/1/7")
        page.locator("#trace-id").press("Enter")
        give_token(page)
        expect(page.locator("#trace-note")).to_have_text("nothing is known of it")
        assert played.done == [("trace", "order/1/7", None), ("trace", "order/1", 7)]
        played.trace = {
            "summary": "order-1: 1 published, 1 missing",
            "versions": [
                version | {"version": 1, "records": [record]},
                {"version": 2, "verdict": "missing", "stored": None, "records": [], "note": "why"},
            ],
            "notes": ["no publisher answers"],
        }
        page.locator("#trace-go").click()
        expect(page.locator("#trace-note")).to_contain_text("1 published, 1 missing")
        expect(page.locator("#trace-note")).to_contain_text("no publisher answers")
        rows = page.locator("#traced tbody tr")
        expect(rows.first).to_contain_text("orders.events[3] offset 12")
        expect(rows.nth(1)).to_contain_text(re.compile("missing.*not in the table.*why"))

    def test_gaps_with_age_and_next_try(self, page: Page, played: Played) -> None:
        now = played.document["database_time"]
        played.holds = [hold(f"order-{n}", 3, 5, now=now) for n in range(203)]
        opened(page, played)
        expect(page.locator("#gaps-note")).to_have_text("The oldest 200 of 203.")
        row = page.locator("#gaps tbody tr").first
        expect(row).to_contain_text(re.compile(r"order-0359\d s5in \d+ s"))
        # the database has not answered since, and time goes on
        played.document["poll_age_seconds"] = 600.0
        expect(row).to_contain_text(re.compile(r"order-03512 min5now"))

    def test_that_nobody_answers_and_that_somebody_does_again(
        self, page: Page, played: Played
    ) -> None:
        opened(page, played)
        played.end()
        expect(page.locator("#state")).to_have_text("no answer")
        expect(page.locator("#ready")).to_have_text(re.compile(r"since \d\d:\d\d:\d\d"))
        expect(page.locator("#wrong")).to_contain_text("does not answer")
        expect(page.locator("#pause")).to_be_disabled()
        expect(page.locator("#published")).to_have_text("2,000 since the start")
        expect(page.locator("#lag")).to_have_text("–")
        played.document["counters"]["published"] = 7
        played.begin()
        expect(page.locator("#state")).to_have_text("running")
        expect(page.locator("#published")).to_have_text("7 since the start")
        expect(page.locator("body")).not_to_have_class("silent")

    def test_tables_without_the_chart_library(self, page: Page, played: Played) -> None:
        page.route("**/d3.min.js", lambda route: route.fulfill(status=404))
        opened(page, played)
        expect(page.locator("#no-charts")).to_be_visible()
        expect(page.locator("#charts")).to_be_hidden()
        expect(page.locator("#lag")).to_have_text("0 s")


class TestTextOfOthers:
    def test_is_text(self, page: Page, played: Played) -> None:
        now = played.document["database_time"]
        played.holds = [hold(HOSTILE, 1, 3, now=now)]
        played.document |= {"app": HOSTILE, "last_error": HOSTILE, "table": HOSTILE}
        played.document["checks"][0] |= {"state": "error", "message": HOSTILE}
        error = {"code": HOSTILE, "message": HOSTILE, "where": HOSTILE, "at": time.time()}
        played.document["shards"][0] |= {"where": HOSTILE, "last_error": error}
        played.outcome = HOSTILE
        opened(page, played)
        expect(page.locator("#gaps tbody td").first).to_have_text(HOSTILE)
        page.get_by_role("button", name="Skip").click()
        give_token(page)
        expect(page.locator("#skip-what")).to_contain_text(HOSTILE)
        page.locator("#ask-skip button[value=ok]").click()
        expect(page.locator("#outcome")).to_contain_text(f": {HOSTILE}")
        assert played.done == [("skip", HOSTILE, 1, 2)]
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 2
        assert page.evaluate("window.harmed") is None

    def test_that_cannot_be_seen_is_written_out(self, page: Page, played: Played) -> None:
        now = played.document["database_time"]
        name = "a\u202egnp\u200b\u0000\n"
        played.holds = [hold(name, 1, 2, now=now)]
        opened(page, played)
        shown = "a\\u202egnp\\u200b\\u0000\\u000a"
        expect(page.locator("#gaps tbody td").first).to_have_text(shown)
        page.get_by_role("button", name="Retry").click()
        give_token(page)
        expect(page.locator("#outcome")).to_contain_text("found")
        assert played.done == [("retry", name)]


class TestActions:
    def test_ask_for_the_token_once(self, page: Page, played: Played) -> None:
        opened(page, played)
        page.get_by_role("button", name="Pause").click()
        give_token(page)
        expect(page.locator("#state")).to_have_text("paused")
        expect(page.locator("#outcome")).to_have_text("Pause: done")
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("#state")).to_have_text("running")
        assert played.done == ["pause", "resume"]
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie])"
        assert TOKEN not in page.evaluate(kept)
        assert TOKEN not in page.url

    def test_ask_again_where_it_is_wrong(self, page: Page, played: Played) -> None:
        opened(page, played)
        page.get_by_role("button", name="Pause").click()
        give_token(page, "another")
        expect(page.locator("#token-why")).to_have_text("That was not the value of ops.token.")
        expect(page.locator("#outcome")).to_have_text("Pause: the token is not ops.token")
        assert played.done == []
        give_token(page)
        expect(page.locator("#state")).to_have_text("paused")

    def test_a_token_that_no_header_holds_is_refused(self, page: Page, played: Played) -> None:
        opened(page, played)
        page.get_by_role("button", name="Pause").click()
        give_token(page, "ключ")
        expect(page.locator("#outcome")).to_have_class("notice error")
        page.get_by_role("button", name="Pause").click()
        give_token(page)
        expect(page.locator("#state")).to_have_text("paused")

    def test_a_skip_names_its_versions_and_can_be_left(self, page: Page, played: Played) -> None:
        now = played.document["database_time"]
        played.holds = [hold("one", 4, 5, now=now), hold("more", 7, 12, now=now)]
        opened(page, played)
        page.get_by_role("button", name="Skip one").click()
        page.get_by_role("button", name="Cancel").click()  # of the token
        page.wait_for_timeout(300)
        page.get_by_role("button", name="Skip one").click()
        give_token(page)
        expect(page.locator("#skip-what")).to_contain_text("one: version 4 will not be waited for")
        page.keyboard.press("Enter")  # the focus is on Cancel
        expect(page.locator("#ask-skip")).to_be_hidden()
        page.get_by_role("button", name="Skip more").click()
        expect(page.locator("#skip-what")).to_contain_text("more: versions 7 to 11 (5) will not")
        page.keyboard.press("Escape")
        assert played.done == []
        played.outcome, played.last_missing = "skipped", 9
        page.get_by_role("button", name="Skip more").click()
        expect(page.locator("#skip-what")).to_contain_text("more: versions 7 to 9 (3) will not")
        page.locator("#ask-skip button[value=ok]").click()
        expect(page.locator("#outcome")).to_contain_text("versions 7 to 9 (3): skipped")
        assert played.done == [("skip", "more", 7, 9)]

    def test_a_skip_of_a_gap_that_has_changed_or_gone_gives_nothing_up(
        self, page: Page, played: Played
    ) -> None:
        now = played.document["database_time"]
        played.holds = [hold("one", 4, 5, now=now)]
        played.outcome = "changed"
        opened(page, played)
        page.get_by_role("button", name="Skip one").click()
        give_token(page)
        page.locator("#ask-skip button[value=ok]").click()
        expect(page.locator("#outcome")).to_contain_text("version 4: not done: more is missing")
        expect(page.locator("#outcome")).to_have_class("notice error")
        played.is_gone = True
        page.get_by_role("button", name="Skip one").click()
        expect(page.locator("#outcome")).to_contain_text("one: nothing is missing any more")
        expect(page.locator("#ask-skip")).to_be_hidden()
        assert played.done == [("skip", "one", 4, 4)]

    def test_nothing_can_be_given_up_where_nothing_is_missing(
        self, page: Page, played: Played
    ) -> None:
        now = played.document["database_time"]
        played.holds = [
            hold("one", 4, 9_000, now=now, catching_up=True),
            hold("two", 1, 2, now=now),
        ]
        opened(page, played)
        expect(page.locator("#gaps tbody tr").first).to_contain_text("none: many events wait")
        expect(page.get_by_role("button", name="Skip two")).to_be_visible()
        expect(page.get_by_role("button", name="Skip one")).to_be_hidden()

    def test_an_error_is_shown(self, page: Page, played: Played) -> None:
        now = played.document["database_time"]
        played.holds = [hold("one", 4, 5, now=now)]
        played.outcome = None
        opened(page, played)
        page.get_by_role("button", name="Retry one").click()
        give_token(page)
        expect(page.locator("#outcome")).to_have_text(
            "Retry of one: the shard has not answered in time"
        )
        expect(page.locator("#outcome")).to_have_class("notice error")

    @pytest.mark.parametrize("played", [None], indirect=True)
    def test_are_off_without_a_token(self, page: Page, played: Played) -> None:
        now = played.document["database_time"]
        played.holds = [hold("one", 4, 5, now=now)]
        opened(page, played)
        expect(page.locator("#off")).to_be_visible()
        expect(page.get_by_role("button", name="Pause")).to_be_hidden()
        expect(page.get_by_role("button", name="Skip one")).to_be_disabled()


class TestForEverybody:
    @pytest.mark.parametrize("width", [320, 375, 768])
    def test_nothing_is_wider_than_the_screen(self, page: Page, played: Played, width: int) -> None:
        now = played.document["database_time"]
        played.lived()
        played.holds = [hold("w" * 255, 4, 5, now=now), hold(HOSTILE, 7, 12, now=now)]
        played.document |= {"app": "a" * 100, "topic": "t" * 249}
        played.document["checks"][0] |= {"state": "error", "message": "m" * 300}
        page.set_viewport_size({"width": width, "height": 700})
        opened(page, played)
        page.locator("summary").last.click()
        page.get_by_role("button", name="Skip " + "w" * 255).click()
        assert page.evaluate("document.documentElement.scrollWidth") == width

    def test_light_and_dark(self, page: Page, played: Played) -> None:
        opened(page, played)
        grounds = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            grounds.append(sum(map(int, re.findall(r"\d+", ground))))
        assert grounds[0] > 600
        assert grounds[1] < 150

    def test_by_keyboard(self, page: Page, played: Played) -> None:
        now = played.document["database_time"]
        played.holds = [hold("one", 4, 5, now=now)]
        opened(page, played)
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Pause")).to_be_focused()
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) == "solid"
        page.keyboard.press("Tab")
        retry = page.get_by_role("button", name="Retry one")
        expect(retry).to_be_focused()
        played.holds.insert(0, hold("another", 1, 2, now=now, first_seen=1))
        expect(page.locator("#gaps tbody tr")).to_have_count(2)
        expect(retry).to_be_focused()
        page.keyboard.press("Enter")
        give_token(page)
        expect(page.locator("#outcome")).to_have_text("Retry of one: found")
        expect(retry).to_be_focused()

    def test_tables_and_states_have_names(self, page: Page, played: Played) -> None:
        opened(page, played)
        for table in page.locator("table").all():
            assert table.locator("caption").text_content()
        assert page.locator("[aria-live=polite]").count() == 2
        for button in page.locator("button").all():
            assert button.text_content() or button.get_attribute("aria-label")


def test_before_a_real_publisher(
    page: Page, new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    create_table(database)
    publisher = new_publisher(
        database,
        ops={"http": "127.0.0.1:0", "token": TOKEN, "log": "json"},
        gaps={"backoff_base": "30s"},
    )
    commit_some(database, range(1, 4))
    with transaction(database) as cursor:
        insert(cursor, HOSTILE, 3)
        cursor.connection.commit()
    publisher.start()
    address = eventually(lambda: Pages(publisher).address)
    publisher.until_published("a-3", [1, 2, 3])
    seen = Seen(page)
    page.goto(address)
    expect(page.locator("#state")).to_have_text("running")
    expect(page.locator("#ready")).to_have_text("ready", timeout=60_000)
    expect(page.locator("#gaps tbody td").first).to_have_text(HOSTILE)
    expect(page.locator("#holds")).to_have_text("1")
    page.get_by_role("button", name="Skip").click()
    give_token(page)
    expect(page.locator("#skip-what")).to_contain_text("versions 1 to 2")
    page.locator("#ask-skip button[value=ok]").click()
    expect(page.locator("#outcome")).to_contain_text("versions 1 to 2 (2): skipped")
    publisher.until_published(HOSTILE, [3])
    expect(page.locator("#gaps-note")).to_contain_text("None")
    expect(page.locator("#skipped")).to_have_text("1")
    expect(page.locator("#lag")).to_have_text("0 s")
    line = page.locator("#charts .line").first
    expect(line).to_have_attribute("d", re.compile("^M.+"), timeout=30_000)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#state")).to_have_text("paused")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#state")).to_have_text("running")
    assert seen.complaints == []
    assert publisher.stop() == 143
    expect(page.locator("#state")).to_have_text("no answer")
    publisher.start()
    page.goto(eventually(lambda: {Pages(publisher).address} - {address}).pop())
    expect(page.locator("#skipped-also")).to_have_text("1 still missing; 0 since the start")
    expect(page.locator("#skips tbody tr")).to_contain_text("1 to 2")
    page.get_by_role("button", name=f"Trace {HOSTILE}").click()
    give_token(page)
    expect(page.locator("#trace-note")).to_contain_text("1 published", timeout=40_000)
    expect(page.locator("#traced tbody tr").last).to_contain_text("published")
