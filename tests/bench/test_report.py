"""Results become tables, plots and a page; what is missing is said before anything is measured."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner
from playwright.sync_api import sync_playwright

from bench import machine, main, report, tables
from bench.topic import Growth
from bench.usage import Usage
from bench.words import ABOUT
from eventpub.cli import eventpub
from eventpub.errors import ConfigError

KEPT = Path(__file__).parent / "results"
"""Of `eventpub bench --quick`, one file a case."""


def results() -> list[dict[str, Any]]:
    return report.load(KEPT)


def test_there_is_a_result_of_each_case() -> None:
    assert [result["case"] for result in results()] == list(tables.CASES)


@pytest.mark.parametrize("case", tables.CASES)
def test_each_row_has_a_cell_for_each_column(case: str) -> None:
    (result,) = (r for r in results() if r["case"] == case)
    for table in tables.tables(result):
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows), table.title


def test_the_page_has_each_table_and_plot_and_needs_nothing_else(tmp_path: Path) -> None:
    written = report.draw(results(), tmp_path)
    page = (tmp_path / "index.html").read_text()
    plots = [path for path in written if path.suffix == ".png"]
    assert {path.name for path in plots} >= {"article-lag.png", "drain-rates.png", "restart.png"}
    assert all(path.stat().st_size > 5_000 for path in plots)
    assert page.count("<svg") == len(plots)
    for result in results():
        for table in tables.tables(result):
            assert f"<caption>{html.escape(table.title)}" in page
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    aims = {a or b for a, b in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page)}
    assert aims <= set(ids)


def test_the_page_begins_with_a_summary_of_each_case(tmp_path: Path) -> None:
    report.draw(results(), tmp_path)
    page = (tmp_path / "index.html").read_text()
    summary = page[page.index("<table") : page.index("</table>")]
    assert re.findall(r'href="#(\w+)"', summary) == list(tables.CASES)
    (drain,) = (r for r in results() if r["case"] == "drain")
    assert f"{drain['medians']['eventpub']['rate']:,} events/s<span>" in summary


def test_each_section_defines_its_words_and_shows_its_settings_as_toml(tmp_path: Path) -> None:
    report.draw(results(), tmp_path)
    page = (tmp_path / "index.html").read_text()
    for case in tables.CASES:
        assert f'<h2 id="{case}">{html.escape(ABOUT[case].heading)}</h2>' in page
        for term in ABOUT[case].terms:
            assert f"<dt>{html.escape(term)}</dt>" in page
    assert "<pre>[read]\ndelay = &quot;1s&quot;\nwatermark = &quot;off&quot;" in page
    assert "{&#x27;" not in page
    assert "--innodb-buffer-pool-size=512M" in page


def test_one_version_is_said_once_and_several_are_said_plainly(tmp_path: Path) -> None:
    same = results()
    for result in same:
        result["environment"]["git"] = "0123456789ab"
    report.draw(same, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "All cases: eventpub 0123456.</p>" in page
    assert "not all of the same version" not in page
    same[0]["environment"]["git"] = "ba9876543210"
    report.draw(same, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "<strong>The cases are not all of the same version</strong>" in page
    assert f"<li>ba98765: {ABOUT[same[0]['case']].heading}</li>" in page


def test_a_page_of_the_documentation_leads_back_to_it(tmp_path: Path) -> None:
    report.draw(results()[:1], tmp_path / "bench")
    assert "← Documentation" not in (tmp_path / "bench" / "index.html").read_text()
    (tmp_path / "measured.md").touch()
    report.draw(results()[:1], tmp_path / "bench")
    assert (
        '<a href="../measured.html">← Documentation</a>'
        in (tmp_path / "bench" / "index.html").read_text()
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_asks_for_nothing_else(
    scheme: Literal["light", "dark"],
) -> None:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if found is None:
        pytest.skip("no Chromium on the PATH: apt-get install chromium")
    page_file = Path(__file__).parents[2] / "docs" / "bench" / "index.html"
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments)
        page = browser.new_page(viewport={"width": 375, "height": 800}, color_scheme=scheme)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        assert page.evaluate("document.querySelector('table.summary').offsetWidth") <= 343
        browser.close()
    assert asked == [page_file.as_uri()]


def test_words_in_plots_are_text_and_colours_follow_the_page() -> None:
    """Of the page that the documentation has; it is also small."""
    file = Path(__file__).parents[2] / "docs" / "bench" / "index.html"
    page = file.read_text(encoding="utf-8")
    assert file.stat().st_size < 300_000
    assert re.search("<text[^>]*>p99 of the events created in a second, s</text>", page)
    assert "prefers-color-scheme: dark" in page
    assert not re.findall(r"fill: #(?:ffffff|000000)|stroke: #000000", page)


def test_every_result_says_where_and_with_what_it_was_measured() -> None:
    for result in results():
        said = "\n".join(tables.stated(result))
        assert "None" not in said, said
        assert all(word in said for word in ("cores", "MySQL", "Kafka", "280 bytes")), said


def test_a_result_that_was_saved_is_loaded_again(tmp_path: Path) -> None:
    for result in results():
        report.save(result, tmp_path)
    assert report.load(tmp_path) == results()


def test_report_draws_again_what_a_folder_has(tmp_path: Path) -> None:
    report.save(results()[0], tmp_path)
    answer = CliRunner().invoke(
        eventpub, ["bench", "report", "--out", str(tmp_path)], standalone_mode=False
    )
    assert answer.exception is None
    assert answer.return_value.ok
    assert (tmp_path / "index.html").exists()


def test_what_is_written_is_said_and_results_of_another_commit_are_named(tmp_path: Path) -> None:
    for result in results()[:2]:
        report.save(result, tmp_path)
    first, second = results()[:2]
    said: list[str] = []
    main.announce([second["case"], "idle"], tmp_path, said.append)
    assert said[0].startswith(f"writes {second['case']}.json, idle.json, plots and index.html to ")
    assert said[0].endswith("older ones are overwritten")
    assert f"{first['case']} ({first['environment']['git'][:7]})" in said[1]
    assert f"{second['case']} (" not in said[1]


def test_a_result_says_the_command_that_measures_it_again() -> None:
    assert main.Plan().command("idle") == "eventpub bench idle"
    plan = main.Plan(scale=0.6, rates=(100, 16_000_000), debezium=False)
    assert plan.command("drain") == (
        "eventpub bench drain --scale 0.6 --rates 100,16000000 --no-debezium"
    )


def test_the_machine_has_a_minute_to_become_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([3.0, 2.0, 0.9])
    waits: list[float] = []
    monkeypatch.setattr("os.getloadavg", lambda: (next(loads), 9.0, 9.0))
    monkeypatch.setattr("time.sleep", waits.append)
    machine.become_quiet()
    assert waits == [1.0, 1.0]
    monkeypatch.setattr("os.getloadavg", lambda: (3.0, 9.0, 9.0))
    machine.become_quiet(most=0.0)
    assert len(waits) == 2


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bench\.no_results") as caught:
        main.draw(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_extra_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "connectorx" else find(name, *rest),
    )
    with pytest.raises(ConfigError, match=r"bench\.extra_missing.*connectorx") as caught:
        main.run(["idle"], main.Plan(), tmp_path)
    assert "pip install -e '.[bench]'" in str(caught.value)


def test_what_eventpub_loses_with_its_defaults_is_a_fault_and_what_others_lose_is_not() -> None:
    (article,) = (r for r in results() if r["case"] == "article")
    assert article["columns"]["window only"]["verdict"]["lost"] > 0
    assert tables.faults(article) == []
    broken = json.loads(json.dumps(article))
    broken["columns"]["with recount and watermark"]["verdict"]["lost"] = 1
    (fault,) = tables.faults(broken)
    assert "lost 1" in fault


def test_a_flag_before_the_case_is_refused_and_not_forgotten() -> None:
    answer = CliRunner().invoke(eventpub, ["bench", "--quick", "idle"])
    assert answer.exit_code == 2
    assert "--quick belongs behind idle" in answer.output


def test_the_rate_begins_with_the_second_transaction() -> None:
    growth = Growth([0.0, 5.0, 5.1, 7.0, 9.0], [10, 60, 110, 160, 210])
    assert (growth.first, growth.last) == (5.0, 9.0)
    assert growth.since == 5.1
    assert growth.share == 0.5
    assert growth.rate(200) == pytest.approx(100 / 3.9)
    assert growth.rates(200, 2) == pytest.approx([50 / 1.9, 50 / 2.0])


def test_the_rate_of_what_came_at_once_is_from_the_beginning() -> None:
    growth = Growth([0.0, 5.0, 5.1], [10, 60, 210])
    assert (growth.since, growth.share) == (0.0, 1.0)
    assert growth.rate(200) == pytest.approx(200 / 5.1)
    assert sum(200 / 4 / rate for rate in growth.rates(200, 4)) == pytest.approx(5.1)


def test_cpu_time_of_a_part_is_interpolated() -> None:
    usage = Usage()
    usage._total = {"jvm": 8.0}
    usage._series = [(0.0, {}), (10.0, {"jvm": 4.0}), (20.0, {"jvm": 8.0})]
    assert usage.cpu == {"jvm": 8.0}
    assert usage.cpu_between(5.0, 15.0) == {"jvm": 4.0}
