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
caption { text-align: left; font-weight: 600; padding: .8rem 0 .4rem; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 500; color: var(--dim); vertical-align: bottom; }
th:first-child, td:first-child, table.summary :is(th, td) { text-align: left; vertical-align: top; }
table.summary td:nth-child(3) { min-width: 14rem; }
p.note, p.stated { color: var(--dim); font-size: .86rem; margin: .35rem 0; }
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
    page.write_text(_page(_summary(results), sections), encoding="utf-8")
    return [*written, page]


def _summary(results: Sequence[Result]) -> str:
    """The first table: a few lines of each case, which lead to its section."""
    rows = []
    for result in results:
        case, commit = result["case"], str(result.get("environment", {}).get("git"))[:7]
        for number, (of_what, figure) in enumerate(tables.summary(result)):
            link = f'<a href="#{case}">{html.escape(case)}</a>' if number == 0 else ""
            version = html.escape(commit) if number == 0 else ""
            cells = [link, html.escape(of_what), html.escape(figure), version]
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n")
    heads = "".join(f"<th>{head}</th>" for head in ("case", "", "measured", "version"))
    return (
        f'<div class="wide"><table class="summary"><caption>Summary</caption>\n<tr>{heads}</tr>\n'
        f"{''.join(rows)}</table></div>\n"
        '<p class="note">In brackets, and by "to": the lowest and the highest of several runs. '
        "Cases of different versions were measured on different days. Each section says its "
        "conditions.</p>"
    )


def _page(summary: str, sections: list[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>eventpub: measured</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        "<h1>eventpub: measured</h1>\n"
        "<p>All of this by <code>eventpub bench</code>, on servers of its own: a MySQL, a Kafka "
        "broker, the writers, the publisher and whoever compares share one machine.</p>\n"
        + "\n".join([summary, *sections])
        + "\n</body>\n</html>\n"
    )


def _section(result: Result, figures: dict[str, Figure]) -> str:
    case = html.escape(result["case"])
    parts = [f'<h2 id="{case}">{case}</h2>']
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
    parts.append(f'<p class="stated">{html.escape(tables.stated(result))}</p>')
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
