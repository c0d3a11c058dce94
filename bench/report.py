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
body { font: 16px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 62rem;
  padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.3rem; margin-top: 3rem; border-top: 1px solid #ddd;
  padding-top: 1.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .8rem 0 .4rem; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 500; color: #555; vertical-align: bottom; }
p.note, p.stated { color: #555; font-size: .86rem; margin: .35rem 0; }
svg { max-width: 100%; height: auto; margin-top: 1rem; display: block; }
code { background: #f4f4f4; padding: .1rem .3rem; }
"""


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
    page.write_text(_page(sections), encoding="utf-8")
    return [*written, page]


def _page(sections: list[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>eventpub: measured</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        "<h1>eventpub: measured</h1>\n"
        "<p>All of this by <code>eventpub bench</code>, on servers of its own: a MySQL, a Kafka "
        "broker, the writers, the publisher and whoever judges it share one machine.</p>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def _section(result: Result, figures: dict[str, Figure]) -> str:
    parts = [f"<h2>{html.escape(result['case'])}</h2>"]
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
    parts += [_svg(name, figure) for name, figure in figures.items()]
    parts.append(f'<p class="stated">{html.escape(tables.stated(result))}</p>')
    return "\n".join(parts)


def _svg(name: str, figure: Figure) -> str:
    """The figure to stand in a page: without prologue, its ids its own."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL).strip()
