"""The tables of docs/measured.md and docs/sizing.md are those of the kept results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench import documents, report
from bench.tables import CASES
from bench.words import ABOUT

KEPT = Path(__file__).parent / "results"


def by_case(folder: Path) -> dict[str, dict[str, Any]]:
    return {result["case"]: result for result in report.load(folder)}


@pytest.mark.parametrize("name", documents.PAGES)
def test_the_tables_of_the_pages_are_those_of_the_results(name: str) -> None:
    page = (documents.DOCS / name).read_text(encoding="utf-8")
    made = documents.written(page, by_case(documents.DOCS / "bench"))
    assert page == made, "run python -m bench.documents --write"


def test_each_case_of_the_page_stands_under_its_heading() -> None:
    """The others are in docs/bench/index.html alone."""
    measured = (documents.DOCS / "measured.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"<!-- bench: (\S+) -->", measured))
    assert {"article", "drain", "growth", "idle", "latency", "restart"} == shown <= {*CASES}
    for case in (*shown, "sizing"):
        assert f"\n## {ABOUT[case].heading}\n" in measured
        section = measured.partition(f"\n## {ABOUT[case].heading}\n")[2].partition("\n## ")[0]
        assert case == "sizing" or f"<!-- bench: {case} -->" in section


def test_each_mark_is_known_and_closed() -> None:
    for name in documents.PAGES:
        page = (documents.DOCS / name).read_text(encoding="utf-8")
        names = re.findall(r"<!-- bench: (\S+) -->", page)
        assert set(names) <= {*CASES, *documents.PARTS}
        assert len(names) == page.count("<!-- /bench -->") > 0


def test_what_is_not_measured_says_how() -> None:
    page = "a\n<!-- bench: idle -->\nold\n<!-- /bench -->\nb\n"
    assert documents.written(page, {}) == (
        "a\n<!-- bench: idle -->\n\nNot measured yet: `eventpub bench idle`.\n\n"
        "<!-- /bench -->\nb\n"
    )


def test_the_decision_is_twice_what_was_measured_and_has_memory_for_a_backlog() -> None:
    result = by_case(KEPT)["sizing"]
    one = result["publishers"][documents.RECOMMENDED]
    one["backlog"]["peak_rss_mb"] = {"driver": 450}
    run = one["rates"]["500"]
    run["peak_rss_mb"] = {"driver": 200}
    run["steady"] = {"events": 5_000, "seconds": 10.0, "cpu_seconds": {"driver": 6.0}}
    run["disk"]["topic_bytes"] = 250 * run["verdict"]["stored"]
    table = documents.decision(result)
    row = next(row for row in table.rows if row[0] == "500")
    assert row[1:6] == ["2", "1,024 MB", "0.60", "200 MB", "11 GB"]
