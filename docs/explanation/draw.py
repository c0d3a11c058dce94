"""Draws the pictures of this folder: plain SVG, text as text, for light and dark pages.

python docs/explanation/draw.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).parent

_STYLE = """
text { font-family: "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px; fill: #1f2328 }
.page { fill: #ffffff } .box { fill: #f6f8fa; stroke: #57606a }
.strong { fill: #ddf4ff; stroke: #0969da } .warm { fill: #fff1e5; stroke: #bc4c00 }
.frame { fill: none; stroke: #8c959f; stroke-dasharray: 5 4 }
.line { stroke: #57606a; fill: none; stroke-width: 1.4 } .tip { fill: #57606a }
.dashed { stroke-dasharray: 5 4 } .small { font-size: 11.5px } .dim { fill: #57606a }
.name { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .page { fill: #0d1117 } .box { fill: #161b22; stroke: #8b949e }
  .strong { fill: #0c2d4d; stroke: #58a6ff } .warm { fill: #3d2410; stroke: #f0883e }
  .frame { stroke: #6e7681 } .line { stroke: #9198a1 } .tip { fill: #9198a1 }
  .dim { fill: #9198a1 }
}
"""


class Picture:
    """Collects elements; coordinates are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = width, height
        self._title = title
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "middle") -> None:
        """Words whose base line is at `y`."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{style}">'
            f"{escape(words, quote=False)}</text>"
        )

    def box(  # noqa: PLR0913 (what a box is drawn with)
        self, x: float, y: float, w: float, h: float, *lines: str, kind: str = "box", dim: int = 1
    ) -> None:
        """A box with lines in its middle: the first `dim` are its name, the rest are small."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6" class="{kind}"/>'
        )
        top = y + h / 2 - (len(lines) - 1) * 8.5 + 4.5
        for number, line in enumerate(lines):
            style = "name" if number < dim else "small dim"
            self.text(x + w / 2, top + 17 * number, line, style)

    def frame(self, x: float, y: float, w: float, h: float, label: str) -> None:
        """A dashed frame around what belongs together."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="8" class="frame"/>'
        )
        self.text(x + 12, y + 18, label, "small dim", "start")

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through points, with a tip at its end."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        style = "line dashed" if dashed else "line"
        self._parts.append(f'<path d="{path}" class="{style}"/>')
        (x0, y0), (x, y) = points[-2], points[-1]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        dx, dy = (x - x0) / length * 8, (y - y0) / length * 8
        wings = f"{x - dx - dy / 2:g},{y - dy + dx / 2:g} {x - dx + dy / 2:g},{y - dy - dx / 2:g}"
        self._parts.append(f'<polygon points="{x:g},{y:g} {wings}" class="tip"/>')

    def svg(self) -> str:
        """The whole file."""
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img">'
        )
        page = f'<rect width="{width}" height="{height}" class="page"/>'
        parts = [head, f"<title>{escape(self._title)}</title>", f"<style>{_STYLE}</style>", page]
        return "\n".join([*parts, *self._parts, "</svg>", ""])


def event() -> str:
    """The path of a row from the event table to the topic."""
    p = Picture(960, 340, "The path of a row from the event table to the topic")
    p.box(20, 70, 120, 74, "MySQL", "event table")
    p.box(220, 70, 140, 74, "source", "window: rows by", "create_time", kind="strong")
    p.box(440, 70, 150, 74, "admission", "next version?", kind="strong")
    p.box(670, 70, 130, 74, "sink", "one transaction", kind="strong")
    p.box(860, 70, 80, 74, "Kafka", "topic")
    for x0, x1, label in ((140, 220, "rows"), (360, 440, "chunk"), (590, 670, "admitted")):
        p.arrow((x0, 107), (x1, 107))
        p.text((x0 + x1) / 2, 98, label, "small dim")
    p.arrow((800, 107), (860, 107))
    p.arrow((480, 70), (480, 34), (290, 34), (290, 70), dashed=True)
    p.text(385, 26, "backtrack: missing versions, by key", "small dim")
    p.box(440, 218, 150, 68, "index", "last version of each", "aggregate, holds", kind="strong")
    p.arrow((490, 218), (490, 144))
    p.text(482, 185, "last versions", "small dim", "end")
    p.arrow((735, 144), (735, 238), (590, 238))
    p.text(728, 185, "record, after", "small dim", "end")
    p.text(728, 201, "the commit", "small dim", "end")
    p.arrow((900, 144), (900, 268), (590, 268), dashed=True)
    p.text(706, 284, "fold: read back what the index lacks", "small dim")
    p.frame(200, 46, 622, 276, "")
    p.text(216, 312, "shard step: the same code with both engines, for one part of the aggregates",
           "small dim", "start")  # fmt: skip
    return p.svg()


def batch() -> str:
    """A micro-batch of Spark: plan, decision, journal, index, transaction."""
    p = Picture(960, 430, "A micro-batch of Spark and its journal")
    p.frame(20, 16, 640, 112, "Spark's driver")
    p.box(
        40,
        44,
        240,
        66,
        "1. plan: latestOffset",
        "polls the boundary, chooses",
        "window and recount",
    )
    p.box(
        400, 44, 240, 66, "Spark's offset log", "the plan is the offset, so", "it can be repeated"
    )
    p.arrow((280, 77), (400, 77))
    p.frame(20, 166, 640, 140, "a task: one shard")
    p.box(
        40,
        200,
        180,
        80,
        "2. decide",
        "read, admit, backtrack,",
        "hold; index in memory",
        kind="strong",
    )
    p.box(
        250,
        200,
        180,
        80,
        "3. journal",
        "keys in order, changes",
        "of the index, report",
        kind="strong",
    )
    p.box(460, 200, 180, 80, "4. index", "RocksDB on this machine", kind="strong")
    p.arrow((520, 110), (520, 147), (130, 147), (130, 200))
    p.arrow((220, 240), (250, 240))
    p.arrow((430, 240), (460, 240))
    p.box(250, 344, 180, 66, "state location", "journals and snapshots,", "shared by all executors")
    p.arrow((360, 280), (360, 344))
    p.text(368, 330, "created only if absent", "small dim", "start")
    p.arrow((250, 377), (130, 377), (130, 280), dashed=True)
    p.text(138, 330, "repeated batch:", "small dim", "start")
    p.text(138, 346, "read its keys again", "small dim", "start")
    p.arrow((430, 377), (600, 377), (600, 280), dashed=True)
    p.text(440, 394, "an executor without the index", "small dim", "start")
    p.frame(700, 166, 240, 140, "a task of the sink")
    said = "rows and a marker naming", "the batch, in one transaction"
    p.box(720, 200, 200, 80, "5. publish", *said, kind="strong")
    p.arrow((660, 240), (720, 240))
    p.text(680, 230, "rows", "small dim")
    p.box(720, 344, 200, 66, "Kafka", "topic, <topic>.batches")
    p.arrow((820, 280), (820, 344))
    return p.svg()


def gap() -> str:
    """What happens to an aggregate whose version 3 is missing."""
    p = Picture(960, 420, "A gap: backtrack, hold, skip")
    p.text(20, 30, "A window shows versions 1, 2 and 4 of an aggregate. Version 3 is missing.",
           "name", "start")  # fmt: skip
    p.box(20, 52, 200, 74, "1. admit", "1 and 2 go out, as do the", "events of other aggregates")
    p.box(
        270,
        52,
        200,
        74,
        "2. backtrack",
        "look for 3 by its key,",
        "whatever its create_time",
        kind="strong",
    )
    p.arrow((220, 89), (270, 89))
    p.box(560, 52, 200, 74, "publish 3, 4", "in order", kind="box")
    p.arrow((470, 89), (560, 89))
    p.text(515, 80, "found", "small dim")
    p.arrow((370, 126), (370, 170))
    p.text(380, 153, "not there yet", "small dim", "start")
    p.box(
        270,
        170,
        200,
        92,
        "3. hold the aggregate",
        "others continue; look again",
        "after 0.25, 0.5, 1, 2, 4, 8,",
        "16, 32 s",
        kind="warm",
    )
    p.arrow((470, 200), (660, 200), (660, 126))
    p.text(565, 192, "its transaction has committed", "small dim")
    p.arrow((370, 262), (370, 306))
    p.text(380, 280, "8 failed attempts, and no transaction is", "small dim", "start")
    p.text(380, 296, "open that began before the gap was seen", "small dim", "start")
    p.box(
        270,
        306,
        200,
        74,
        "4. skip 3",
        "recorded on <topic>.gaps in the",
        "transaction that publishes 4",
        kind="warm",
    )
    p.box(
        700,
        306,
        220,
        74,
        "5. 3 turns up after all",
        "published with eventpub_late,",
        "diverted, or dropped (gaps.late)",
    )
    p.arrow((470, 343), (700, 343))
    p.text(585, 334, "the recount, or a window", "small dim")
    p.text(20, 410, "Held events are not stored: they are read again, by key, when the gap closes.",
           "small dim", "start")  # fmt: skip
    return p.svg()


def fold() -> str:
    """How a new owner brings its index up to date with the topic."""
    p = Picture(960, 380, "Recovery: the topic is read back into the index")
    p.text(
        20, 30, "The previous owner committed, and died before it wrote its index.", "name", "start"
    )
    p.text(20, 74, "partition", "small dim", "start")
    x = 110
    cells = [*((f"{n}", "box") for n in range(4, 9)), ("9", "strong"), ("10", "strong"),
             ("marker", "strong"), ("12", "warm"), ("13", "warm")]  # fmt: skip
    for label, kind in cells:
        width = 76 if label == "marker" else 58
        p.box(x, 50, width, 40, label, kind=kind)
        x += width
    p.text(255, 112, "the index knows these", "small dim")
    p.text(496, 112, "committed, not in the index", "small dim")
    p.text(654, 112, "open, never committed", "small dim")
    p.arrow((400, 150), (400, 92), dashed=True)
    p.text(400, 166, "offset in the index: 9", "small dim")
    steps = [
        (
            "1. take the shard",
            "init_transactions fences",
            "the previous producer and",
            "aborts what it left open",
        ),
        (
            "2. check the owner",
            "threads: the coordinator;",
            "Spark: the last marker",
            "in <topic>.batches",
        ),
        ("3. read", "committed records from 9", "to the partition's end:", "versions and offsets"),
        (
            "4. write the index",
            "versions up to offset 14,",
            "the abort marker; next",
            "offset: 15",
        ),
    ]
    for number, (title, *lines) in enumerate(steps):
        left = 20 + 235 * number
        p.box(left, 200, 205, 96, title, *lines, kind="strong" if number == 2 else "box")
        if number < 3:
            p.arrow((left + 205, 248), (left + 235, 248))
    for line, words in enumerate((
        "Then the shard reads the table from the index's position. Duplicates are dropped;",
        "what was in 12 and 13 is published. A lost or outdated index takes the same four steps.",
    )):  # fmt: skip
        p.text(20, 328 + 18 * line, words, "small dim", "start")
    return p.svg()


def late() -> str:
    """Why polling by timestamp loses an event."""
    p = Picture(960, 330, "Why polling by timestamp loses events")
    at = {"12:00:00": 150, "12:00:01": 370, "12:00:02": 590, "12:00:03": 810}
    for label, x in at.items():
        p.text(x, 30, label, "small dim")
        p.arrow((x, 38), (x, 46))
    p.text(20, 86, "transaction A", "name", "start")
    p.box(196, 62, 416, 40, "open: its row is invisible", kind="warm", dim=0)
    p.text(196, 122, "INSERT: create_time = 12:00:00.2", "small dim", "start")
    p.text(612, 122, "COMMIT at 12:00:02.1", "small dim", "end")
    p.text(20, 166, "transaction B", "name", "start")
    p.box(282, 142, 40, 40)
    p.text(332, 166, "create_time = 12:00:00.6, committed at once", "small dim", "start")
    p.text(20, 226, "polling by time", "name", "start")
    p.box(300, 204, 140, 44, "poll at 12:00:01", "sees B; last = 00.6", dim=1)
    p.box(740, 204, 200, 44, "poll at 12:00:03", "create_time > 00.6: not A", kind="warm")
    p.arrow((440, 226), (740, 226))
    p.text(530, 218, "A is never read", "small dim")
    p.text(20, 288, "eventpub", "name", "start")
    p.box(300, 266, 140, 44, "publishes B", "of another aggregate", kind="strong")
    p.box(
        630,
        266,
        310,
        44,
        "publishes A",
        "as a missing version, or by the recount",
        kind="strong",
    )
    p.arrow((440, 288), (630, 288))
    p.arrow((612, 102), (650, 266), dashed=True)
    return p.svg()


PICTURES = {
    "late.svg": late,
    "event.svg": event,
    "batch.svg": batch,
    "gap.svg": gap,
    "fold.svg": fold,
}

if __name__ == "__main__":
    for name, picture in PICTURES.items():
        (HERE / name).write_text(picture(), encoding="utf-8")
