"""Writes results down: JSON, PNG, and one HTML page that needs nothing else."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import tables
from .tables import CASES, Result
from .words import ABOUT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #222; --dim: #555; --line: #ddd;
  --code: #f4f4f4; --blue: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --text: #e4e6e8; --dim: #a4abb2; --line: #3a4046; --code: #22272c;
    --blue: #4ba3dc; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.3rem; margin-top: 3rem;
  border-top: 1px solid var(--line); padding-top: 1.5rem; }
a { color: var(--blue); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .8rem 0 .4rem;
  max-width: calc(100vw - 2rem); }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 500; color: var(--dim); vertical-align: bottom; }
th:first-child, td:first-child, table.summary :is(th, td) { text-align: left; vertical-align: top; }
td { vertical-align: top; } td:not(:first-child) { white-space: nowrap; }
table.summary td:not(:first-child) { white-space: normal; }
table.summary { width: 100%; } table.summary th { padding-top: .9rem; color: var(--text); }
table.summary td:first-child { width: 55%; }
table.summary span { display: block; color: var(--dim); font-size: .86rem; }
p.note, ul.stated { color: var(--dim); font-size: .86rem; margin: .35rem 0; }
ul.stated { list-style: none; padding: 0; margin-top: 1rem; overflow-wrap: anywhere; }
dl { font-size: .92rem; margin: .5rem 0; } dt { font-weight: 600; } dd { margin: 0 0 .4rem 1rem; }
summary { cursor: pointer; font-size: .92rem; }
pre { background: var(--code); padding: .5rem .7rem; overflow-x: auto; font-size: .86rem; }
svg { width: 100%; min-width: 36rem; height: auto; margin-top: 1rem; display: block; }
svg text { font-family: system-ui, sans-serif; fill: var(--text); }
code { background: var(--code); padding: .1rem .3rem; overflow-wrap: anywhere; }
"""

_COLOURS = {
    "#000000": "var(--text)",
    "#666666": "var(--dim)",
    "#bbbbbb": "var(--line)",
    "#dddddd": "var(--line)",
    "#0072b2": "var(--blue)",
}
"""Of the plots: those that would not be seen on a dark page."""


def save(result: Result, folder: Path) -> Path:
    """Writes one case's result as ``CASE.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['case']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def load(folder: Path) -> list[dict[str, Any]]:
    """The results that a folder has, in the order of the cases."""
    paths = [folder / f"{case}.json" for case in CASES]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes the plots as PNG and all of it as ``index.html``; returns what was written."""
    from .plots import plots

    folder.mkdir(parents=True, exist_ok=True)
    written, sections = [], []
    for result in results:
        figures = plots(result)
        for name, figure in figures.items():
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=130)
            written.append(path)
        sections.append(_section(result, figures))
    page = folder / "index.html"
    page.write_text(_page(results, sections, _back(folder)), encoding="utf-8")
    return [*written, page]


def _summary(results: Sequence[Result]) -> str:
    """The first table: a few lines of each case, under a link to its section."""
    mixed = len({_commit(result) for result in results}) > 1
    rows = []
    for result in results:
        case = result["case"]
        version = f" <span>eventpub {html.escape(_commit(result))}</span>" if mixed else ""
        link = f'<a href="#{case}">{html.escape(ABOUT[case].heading)}</a>'
        rows.append(f'<tr><th colspan="2">{link}{version}</th></tr>\n')
        for of_what, figure, more in tables.summary(result):
            below = f"<span>{html.escape(more)}</span>" if more else ""
            cells = (html.escape(of_what), html.escape(figure) + below)
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n")
    return (
        f'<div class="wide"><table class="summary"><caption>Summary</caption>\n'
        f"{''.join(rows)}</table></div>\n"
        '<p class="note">"a to b": the lowest and the highest of several runs. Each section says '
        "what was done and under which conditions.</p>"
    )


def _commit(result: Result) -> str:
    return str(result.get("environment", {}).get("git"))[:7]


def _versions(results: Sequence[Result]) -> str:
    """Which version was measured, and plainly where it is not one."""
    by_commit: dict[str, list[str]] = {}
    for result in results:
        by_commit.setdefault(_commit(result), []).append(ABOUT[result["case"]].heading)
    if len(by_commit) == 1:
        return f"<p>All cases: eventpub {html.escape(next(iter(by_commit)))}.</p>\n"
    items = "".join(
        f"<li>{html.escape(commit)}: {html.escape('; '.join(cases))}</li>\n"
        for commit, cases in by_commit.items()
    )
    return (
        "<p><strong>The cases are not all of the same version</strong>, so do not compare one case "
        f"with another. Versions of eventpub:</p>\n<ul>\n{items}</ul>\n"
    )


def _page(results: Sequence[Result], sections: list[str], back: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>eventpub: measured</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{back}<h1>eventpub: measured</h1>\n"
        "<p>eventpub publishes the rows of an event table in MySQL to a Kafka topic. All of this "
        "is measured by <code>eventpub bench</code> on servers of its own: MySQL, a Kafka "
        "broker, the writers, the publisher and the consumer share one machine. The consumer "
        "compares topic and table with code that shares nothing with the publisher.</p>\n"
        + "\n".join([_versions(results) + _summary(results), *sections])
        + "\n</body>\n</html>\n"
    )


def is_of_documentation(folder: Path) -> bool:
    """Whether it is the folder whose results the documentation shows."""
    return (folder.absolute().parent / "measured.md").exists()


def _back(folder: Path) -> str:
    """A link to the documentation, where the page is a part of it."""
    if not is_of_documentation(folder):
        return ""
    return '<p><a href="../measured.html">← Documentation</a></p>\n'


def _prose(text: str) -> str:
    """Text whose words in backquotes are code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _section(result: Result, figures: dict[str, Figure]) -> str:
    case = html.escape(result["case"])
    about = ABOUT[result["case"]]
    terms = "".join(
        f"<dt>{html.escape(term)}</dt><dd>{_prose(text)}.</dd>\n"
        for term, text in about.terms.items()
    )
    parts = [
        f'<h2 id="{case}">{html.escape(about.heading)}</h2>',
        f"<p>{_prose(about.text)}</p>",
        f"<dl>\n{terms}</dl>" if terms else "",
    ]
    for table in tables.tables(result):
        head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n"
            for row in table.rows
        )
        parts.append(
            f'<div class="wide"><table><caption>{html.escape(table.title)}</caption>\n'
            f"<tr>{head}</tr>\n{rows}</table></div>"
        )
        parts += [f'<p class="note">{html.escape(note)}</p>' for note in table.notes]
    parts += [f'<div class="wide">{_svg(name, figure)}</div>' for name, figure in figures.items()]
    stated = "".join(f"<li>{html.escape(line)}</li>\n" for line in tables.stated(result))
    parts.append(
        f'<ul class="stated">\n<li>Again: <code>{html.escape(tables.command(result))}</code></li>\n'
        f"{stated}</ul>"
    )
    configured = "".join(
        f"<p>{html.escape(name)}</p>\n<pre>{html.escape(toml)}</pre>\n"
        for name, toml in tables.configurations(result).items()
    )
    parts.append(f"<details><summary>Settings of each</summary>\n{configured}</details>")
    return "\n".join(parts)


def _svg(name: str, figure: Figure) -> str:
    """The figure to stand in a page: its words are text, its colours the page's, its ids its own.

    Coordinates have a tenth of a point; ids that nothing refers to are left out.
    """
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(
            text, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.1f}", svg)
    svg = re.sub(r" font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda found: _COLOURS.get(found[0], found[0]), svg)
    svg = re.sub(r' transform="rotate\(-?0(?:\.0)? [^)]*\)"', "", svg)
    used = {*re.findall(r'href="#([^"]+)"', svg), *re.findall(r"url\(#([^)]+)\)", svg)}
    svg = re.sub(
        r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", svg
    )
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    return re.sub(r"> <", "><", svg).strip()
