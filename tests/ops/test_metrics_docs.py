"""Metrics, dashboards, alerts and their pages name what a publisher serves, and all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from eventpub.ops.metrics import exposition
from tests.ops.documents import document

DOCS = Path(__file__).parents[2] / "docs"
OPERATIONS = DOCS / "operations"
NAME = r"\beventpub_[a-z_]+\b"


def _served() -> dict[str, tuple[str, list[str]]]:
    """Of each metric, by the name that a scrape shows, its type and labels."""
    found = {}
    for family in text_string_to_metric_families(exposition(document).decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels}
        found[name] = family.type, sorted(labels - {"le"})
    return found


SERVED = _served()
SERIES = {
    name + ending
    for name, (kind, _) in SERVED.items()
    for ending in (("_bucket", "_count", "_sum") if kind == "histogram" else ("",))
}
PAGE = (DOCS / "metrics.md").read_text(encoding="utf-8")
GRAFANA: dict[str, Any] = json.loads((OPERATIONS / "grafana.json").read_text(encoding="utf-8"))
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((OPERATIONS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]


def test_the_page_has_each_metric_with_its_type_and_labels() -> None:
    rows = re.findall(rf"^\| `({NAME})` \| (\w+) \| (.*?) ?\| .+ \|$", PAGE, re.MULTILINE)
    listed = {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}
    assert listed.keys() == SERVED.keys()
    assert {n: (kind, sorted(labels)) for n, (kind, labels) in listed.items()} == SERVED
    assert len(rows) == len(listed)


def test_what_the_page_asks_is_served() -> None:
    for line in re.findall(r"^    .*", PAGE, re.MULTILINE):
        assert set(re.findall(NAME, line)) <= SERIES, line


def _expressions() -> list[str]:
    return [target["expr"] for panel in GRAFANA["panels"] for target in panel["targets"]]


def test_what_grafana_shows_is_served_and_all_of_it() -> None:
    asked = {name for text in _expressions() for name in re.findall(NAME, text)}
    assert asked <= SERIES
    shown = {re.sub("_(bucket|count|sum)$", "", name) for name in asked}
    assert shown == SERVED.keys()
    for text in _expressions():
        _check_labels(text, {"instance"})


def test_grafana_s_data_source_is_chosen_where_it_is_imported() -> None:
    sources = re.findall(r'"uid": "([^"]*)"', json.dumps(GRAFANA))
    assert set(sources) == {"${datasource}", GRAFANA["uid"]}
    variables = {variable["name"] for variable in GRAFANA["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(GRAFANA))) - {"__rate_interval", "__all"}
    assert used == variables


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_an_alert_asks_for_what_is_served_and_has_its_page(rule: dict[str, Any]) -> None:
    names = set(re.findall(NAME, rule["expr"]))
    assert names
    assert names <= SERIES
    _check_labels(rule["expr"], {"job"})
    notes = rule["annotations"]
    labels = {label for name in names for label in SERVED[name][1]} | {"instance"}
    assert set(re.findall(r"\$labels\.(\w+)", notes["summary"])) <= labels
    assert notes["runbook"] == f"operations/{rule['alert']}.md"
    page = (DOCS / notes["runbook"]).read_text(encoding="utf-8")
    assert page.startswith(f"# {rule['alert']}\n")
    for part in ("**Means:**", "**Look at**", "**Do"):
        assert part in page, part
    assert "\n|" not in page, "a table is wider than a phone"
    assert not re.search(r"^ {5,7}\S", page, re.MULTILINE), "in a list code is indented by eight"


def test_the_lag_s_critical_alert_is_the_warning_with_a_higher_limit() -> None:
    """By one name, so that Alertmanager can have the one inhibit the other."""
    rules = {r["labels"]["severity"]: r["expr"] for r in RULES if r["alert"] == "EventpubLag"}
    assert rules.keys() == {"warning", "critical"}
    assert rules["critical"] == rules["warning"].replace("> 60 ", "> 600 ")


def test_each_page_belongs_to_an_alert() -> None:
    pages = {page.stem for page in OPERATIONS.glob("Eventpub*.md")}
    assert pages == {rule["alert"] for rule in RULES}


def _check_labels(expression: str, of_prometheus: set[str]) -> None:
    """Labels between braces are those of the metric, or of Prometheus."""
    for name, braces in re.findall(r"(\w+)\{([^}]*)\}", expression):
        known = SERVED.get(re.sub("_(bucket|count|sum)$", "", name), ("", []))[1]
        assert set(re.findall(r"(\w+)=", braces)) <= {*known, *of_prometheus}, expression
