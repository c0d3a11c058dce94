"""What people see of text that came from outside: nothing that a terminal obeys."""

from __future__ import annotations

import io

import pytest
from rich.console import RenderableType

from eventpub.cli import live, output, terminal
from eventpub.cli.output import printable
from eventpub.cli.terminal import SafeConsole

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
        terminal.drawn(output.Line((EVIL, "bold"))),
        terminal.drawn(output.Table(("id", "n"), [[EVIL, "1"]])),
        terminal.drawn(output.Table(("id",), [[EVIL]], title="held")),
    ],
    ids=["text", "line", "table", "titled"],
)
def test_whatever_is_drawn_is_escaped(what: RenderableType) -> None:
    assert SHOWN in drawn(what)


def test_a_style_of_ours_stays() -> None:
    line = terminal.drawn(output.Line(("is ", "bold"), (EVIL, "green")))
    seen = drawn(line, force_terminal=True, color_system="standard")
    assert seen == f"\x1b[1mis \x1b[0m\x1b[32m{SHOWN}\x1b[0m\n"


def test_what_a_publisher_is_called_is_no_markup() -> None:
    """A name like a closing tag ended the command."""
    panel = live.Panel(f"[/x] {EVIL}")
    assert f"[/x] {SHOWN}" in drawn(panel)


def test_an_id_is_no_markup() -> None:
    for id in ("[red]a[/red]", "[/]", ":bug:"):
        assert drawn(id) == f"{id}\n"
