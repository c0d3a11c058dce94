"""What people see of text that came from outside: nothing that a terminal obeys."""

from __future__ import annotations

import io

import pytest
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from eventpub.cli import console, output
from eventpub.cli.console import SafeConsole
from eventpub.terminal import printable

EVIL = "\x1b]0;pwned\x07\x1b[31mred\x9b2J\u202egnp\x7f"
SHOWN = r"\x1b]0;pwned\x07\x1b[31mred\x9b2J\u202egnp\x7f"


def drawn(what: RenderableType, **options: object) -> str:
    out = io.StringIO()
    SafeConsole(out, width=120, **options).print(what)
    return out.getvalue()


def test_control_characters_are_escaped_and_nothing_else() -> None:
    assert printable(EVIL) == SHOWN
    for harmless in ("a\tb\nc", "Grüße, 日本, \U0001f469\u200d\U0001f680", r"\x1b", "עברית"):
        assert printable(harmless) == harmless


@pytest.mark.parametrize(
    "what",
    [
        EVIL,
        console.drawn(output.Line((EVIL, "bold"))),
        console.drawn(output.Table(("id", "n"), [[EVIL, "1"]])),
        console.drawn(output.Table(("id",), [[EVIL]], title="held")),
    ],
    ids=["text", "line", "table", "titled"],
)
def test_whatever_is_drawn_is_escaped(what: RenderableType) -> None:
    assert SHOWN in drawn(what)


def test_a_style_of_ours_stays() -> None:
    plain = "\x1b]0;pwned\x1b[31mred"
    escaped = r"\x1b]0;pwned\x1b[31mred"
    line = Text("is ", style="bold").append(plain, style="green")
    seen = drawn(line, force_terminal=True, color_system="standard")
    assert seen.startswith("\x1b[1mis \x1b[0m")
    assert "\x1b]0" not in seen
    assert "\x1b[31m" not in seen
    grid = Table.grid()
    grid.add_row(Text(plain))
    assert "\x1b" not in drawn(grid)
    assert drawn(line) == f"is {escaped}\n"


def test_an_id_is_no_markup() -> None:
    for id in ("[red]a[/red]", "[/]", ":bug:"):
        assert drawn(id) == f"{id}\n"
