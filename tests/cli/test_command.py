"""The command as scripts see it: one object on stdout, exit statuses, and no secret anywhere."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ops.documents import document

MAIN = "import sys; from eventpub.cli import main; sys.exit(main())"
SECRET = "hunter2-hunter2"
HEAVY = [
    "pyspark",
    "pyarrow",
    "numpy",
    "sqlalchemy",
    "pymysql",
    "confluent_kafka",
    "rich",
    "pydantic",
    "structlog",
]


def eventpub(
    *arguments: str, cwd: Path, before: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"{before}\n{MAIN}", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=_environ(environ),
        timeout=60,
        check=False,
    )


def _environ(more: dict[str, str]) -> dict[str, str]:
    mine = {k: v for k, v in os.environ.items() if not k.startswith("EVENTPUB_")}
    path = os.pathsep.join([str(Path(__file__).parents[2]), mine.get("PYTHONPATH", "")])
    return mine | {"PYTHONPATH": path} | more


def envelope(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout + done.stderr
    data: dict[str, Any] = json.loads(lines[0])
    assert set(data) == {"command", "ok", "summary", "result", "error"}
    return data


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    (tmp_path / "eventpub.toml").write_text(
        f"""
        [app]
        id = "orders"
        [store]
        url = "mysql+pymysql://reader:{SECRET}@127.0.0.1:1/shop"
        [sink]
        topic = "orders.events"
        bootstrap_servers = "127.0.0.1:1"
        [sink.properties]
        "sasl.password" = "{SECRET}-kafka"
        """
    )
    return tmp_path


def test_help_loads_no_package_of_a_command(tmp_path: Path) -> None:
    code = (
        "import sys; from eventpub.cli import main; main(['--help']); main(['run', '--help']);"
        f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=_environ({}),
        check=True,
    )
    assert done.stderr.strip() == "[]"
    for command in ("migrate", "doctor", "run", "verify", "config", "demo"):
        assert command in done.stdout
    assert "EVENTPUB_SINK__TOPIC" in done.stdout


def test_no_command_shows_the_help_and_is_wrong_use(tmp_path: Path) -> None:
    done = eventpub(cwd=tmp_path)
    assert done.returncode == 2
    assert "Commands:" in done.stderr


def test_the_version_is_said(tmp_path: Path) -> None:
    assert eventpub("--version", cwd=tmp_path).stdout.startswith("eventpub 0.")


def test_config_show_tells_each_value_and_where_it_came_from(configured: Path) -> None:
    done = eventpub(
        "config", "show", "--json", "--set", "read.delay=2s",
        cwd=configured, EVENTPUB_GAPS__LATE="drop",
    )  # fmt: skip
    data = envelope(done)
    keys = data["result"]["keys"]
    assert data["command"] == "config show"
    assert keys["read.delay"] == {"value": "2s", "origin": "flag --set read.delay"}
    assert keys["gaps.late"] == {"value": "drop", "origin": "env EVENTPUB_GAPS__LATE"}
    assert keys["store.url"]["value"] == "mysql+pymysql://reader:***@127.0.0.1:1/shop"
    assert keys["sink.properties.sasl.password"]["value"] == "***"
    text = eventpub("config", "show", cwd=configured)
    assert SECRET not in done.stdout + done.stderr + text.stdout + text.stderr


def test_an_unknown_key_is_wrong_use(configured: Path) -> None:
    done = eventpub("config", "check", "--json", "--set", "sink.tpic=x", cwd=configured)
    assert done.returncode == 2
    data = envelope(done)
    assert data["ok"] is False
    assert data["error"]["code"] == "config.unknown_key"
    assert data["error"]["where"] == "sink.tpic"
    assert "sink.topic" in data["error"]["suggestion"]


def test_several_problems_are_in_one_answer(configured: Path) -> None:
    done = eventpub("config", "check", "--json", "--set", "a.b=1", "--set", "c.d=2", cwd=configured)
    assert len(envelope(done)["error"]["problems"]) == 2
    text = eventpub("config", "check", "--set", "a.b=1", "--set", "c.d=2", cwd=configured)
    assert text.stdout == ""
    assert text.stderr.count("error: config.unknown_key") == 2


def test_a_flag_names_itself_in_errors(configured: Path) -> None:
    done = eventpub("run", "--shards", "some", cwd=configured)
    assert done.returncode == 2
    assert "(flag --shards)" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["verify", "--json", "--nonsense"], "verify"),
        (["--json", "verify", "--from"], "verify"),
        (["config", "nonsense", "--json"], "config"),
        (["nonsense", "--json"], ""),
        (["verify", "--json", "--from", "yesterday"], "verify"),
        (["verify", "--json", "--set", "nonsense"], "verify"),
    ],
)
def test_wrong_use_is_in_the_envelope_too(
    configured: Path, arguments: list[str], command: str
) -> None:
    done = eventpub(*arguments, cwd=configured)
    assert done.returncode == 2
    data = envelope(done)
    assert data["error"]["code"] == "cli.usage"
    assert data["command"] == command


def test_a_database_that_is_away_is_status_3(configured: Path) -> None:
    done = eventpub("verify", "--json", cwd=configured)
    assert done.returncode == 3
    data = envelope(done)
    assert data["error"]["code"] == "store.unreachable"
    assert SECRET not in done.stdout + done.stderr


def test_what_nobody_foresaw_has_a_code_and_hides_secrets(configured: Path) -> None:
    before = (
        "import eventpub.ops.verify as v\n"
        "def broken(config, **_):\n"
        "    raise RuntimeError('cannot use ' + config.store.url.get_secret_value())\n"
        "v.verify = broken"
    )
    done = eventpub("verify", "--json", cwd=configured, before=before)
    assert done.returncode == 70
    assert envelope(done)["error"]["code"] == "internal.unexpected"
    assert "Traceback" not in done.stderr
    text = eventpub("verify", cwd=configured, before=before)
    assert text.returncode == 70
    assert text.stdout == ""
    assert "Traceback" in text.stderr
    for output in (done.stdout, done.stderr, text.stderr):
        assert SECRET not in output
    assert "***" in text.stderr


def test_whatever_others_print_stays_off_stdout(configured: Path) -> None:
    before = (
        "import os, subprocess, eventpub.ops.verify as v\n"
        "def noisy(config, **_):\n"
        "    print('by print'); os.write(1, b'by fd'); subprocess.run(['echo', 'by child'])\n"
        "    return v.Verdict(1, 2)\n"
        "v.verify = noisy"
    )
    done = eventpub("verify", "--json", cwd=configured, before=before)
    assert done.returncode == 0
    data = envelope(done)
    assert data["ok"] is True
    assert data["result"]["missing"] == 0
    for text in ("by print", "by fd", "by child"):
        assert text in done.stderr


def test_a_difference_is_status_1(configured: Path) -> None:
    before = (
        "import eventpub.ops.verify as v\n"
        "from eventpub.ops.sides import Difference\n"
        "def differs(config, **_):\n"
        "    found = v.Verdict(1, 2); found.counts['missing'] = 3\n"
        "    found.examples['missing'] = [Difference('[red]x', 1, 1)]\n"
        "    return found\n"
        "v.verify = differs"
    )
    done = eventpub("verify", "--json", cwd=configured, before=before)
    assert done.returncode == 1
    data = envelope(done)
    assert (data["ok"], data["error"], data["result"]["missing"]) == (False, None, 3)
    text = eventpub("verify", cwd=configured, before=before)
    assert text.returncode == 1
    assert "[red]x/1" in text.stdout
    assert "3 missing" in text.stdout


_SIGNALS = pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["term", "int"]
)


@_SIGNALS
def test_a_signal_ends_a_command_cleanly(
    configured: Path, number: signal.Signals, status: int
) -> None:
    before = (
        "import time, eventpub.ops.verify as v\n"
        "def slow(config, **_):\n"
        "    try: open('started', 'w').close(); time.sleep(30)\n"
        "    finally: open('cleaned', 'w').close()\n"
        "v.verify = slow"
    )
    done = stopped(configured, before, number)
    assert done.returncode == status
    assert json.loads(done.stdout)["error"]["code"] == "cli.stopped"
    assert (configured / "cleaned").exists()


@_SIGNALS
def test_a_signal_that_became_another_exception_is_still_the_signal(
    configured: Path, number: signal.Signals, status: int
) -> None:
    """A library written in C replaces what the handler raises inside it by an error of its own."""
    before = (
        "import time, eventpub.ops.verify as v\n"
        "def slow(config, **_):\n"
        "    try: open('started', 'w').close(); time.sleep(30)\n"
        "    except BaseException: raise TypeError('expected header key to be unicode') from None\n"
        "v.verify = slow"
    )
    done = stopped(configured, before, number)
    assert done.returncode == status, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "cli.stopped"
    assert "Traceback" not in done.stderr


@_SIGNALS
def test_a_signal_that_was_swallowed_ends_a_command_that_says_how_far_it_is(
    configured: Path, number: signal.Signals, status: int
) -> None:
    before = (
        "import time, eventpub.ops.verify as v\n"
        "def slow(config, on_progress, **_):\n"
        "    try: open('started', 'w').close(); time.sleep(30)\n"
        "    except BaseException: pass\n"
        "    on_progress('reading', 0.0)\n"
        "v.verify = slow"
    )
    done = stopped(configured, before, number)
    assert done.returncode == status, done.stderr


def stopped(
    configured: Path, before: str, number: signal.Signals
) -> subprocess.CompletedProcess[str]:
    """`verify --json`, with a signal once it says that it has started."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"{before}\n{MAIN}", "verify", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=configured,
        env=_environ({}),
    )
    deadline = time.monotonic() + 60
    while not (configured / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert (configured / "started").exists(), out + err
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


@_SIGNALS
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("arguments", [["config", "show"], ["config", "nonsense"]], ids=" ".join)
def test_a_signal_while_the_answer_is_written_leaves_it_whole_and_alone(
    configured: Path, number: signal.Signals, status: int, when: str, arguments: list[str]
) -> None:
    """What was written was written once more: the signal hid that it was."""
    before = (
        "import os, signal, eventpub.cli.output as o\n"
        "write = o._Output.write\n"
        "def interrupted(self, data):\n"
        f"    if {when == 'before'}: os.kill(os.getpid(), {int(number)})\n"
        "    count = write(self, data)\n"
        f"    if {when == 'after'}: os.kill(os.getpid(), {int(number)})\n"
        "    return count\n"
        "o._Output.write = interrupted"
    )
    plain = eventpub(*arguments, "--json", cwd=configured)
    done = eventpub(*arguments, "--json", cwd=configured, before=before)
    assert (done.stdout, done.stderr) == (plain.stdout, plain.stderr)
    assert envelope(done)["command"]
    assert done.returncode == plain.returncode, "the answer was given before the signal"


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="a pipe's size is Linux's")
@pytest.mark.parametrize("form", [["--json"], []], ids=["json", "text"])
@_SIGNALS
def test_a_signal_ends_a_command_whose_answer_nobody_takes(
    configured: Path, number: signal.Signals, status: int, form: list[str]
) -> None:
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    child = subprocess.Popen(
        [sys.executable, "-c", MAIN, "config", "show", "--set", f"store.table={9000 * 'x'}", *form],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=configured,
        env=_environ({}),
    )
    os.close(writer)

    def waiting() -> int:
        return int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), sys.byteorder)

    deadline = time.monotonic() + 20
    while waiting() < size and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(number)
    _, err = child.communicate(timeout=20)
    assert (child.returncode, "Traceback" in err) == (status, False), err
    with open(reader, encoding="utf-8") as rest:
        written = rest.read()
    assert len(written.encode()) == size, "nothing was written after the signal"
    if form:
        assert written.startswith('{"command": "config show"')


def into_head(configured: Path, command: str, lines: int) -> subprocess.CompletedProcess[str]:
    """The first lines of a command; the last one of stdout is its exit status."""
    piped = f"{sys.executable} -c '{MAIN}' {command} | head -{lines}; echo ${{PIPESTATUS[0]}}"
    return subprocess.run(
        ["bash", "-c", piped],
        capture_output=True,
        text=True,
        cwd=configured,
        env=_environ({}),
        timeout=60,
        check=False,
    )


def test_a_reader_that_leaves_is_no_error(configured: Path) -> None:
    done = into_head(configured, "config show", 1)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_state_that_cannot_be_read_is_not_said_to_be_none(configured: Path) -> None:
    """It said that no publisher had run on this state directory."""
    state = configured / "state"
    state.mkdir()
    (state / "eventpub.lock").touch()
    status, progress = state / "status.json", state / "progress.json"

    def answer(*arguments: str) -> tuple[int, dict[str, Any]]:
        done = eventpub(*arguments, "--json", cwd=configured)
        return done.returncode, envelope(done)

    status_code, never = answer("status")
    assert (status_code, never["result"]["kind"]) == (1, "never")
    status.write_text('{"state": "stop')
    progress.write_text("")
    status_code, damaged = answer("status")
    assert (status_code, damaged["result"]["kind"]) == (1, "stopped")
    assert damaged["result"]["damaged"] == [str(progress), str(status)]
    assert damaged["summary"].startswith("no publisher runs, and how the last one ended is not")
    for word in (str(status), str(progress), "eventpub run", "the day before"):
        assert word in damaged["summary"]
    # of what can be read, it is shown
    status.write_text('{"state": "stopped", "stopped_at": 1.0, "stopped_by": "a reason"}')
    _, partly = answer("status")
    assert "by a reason; cannot be read: " in partly["summary"]
    assert partly["result"]["damaged"] == [str(progress)]
    # what is an object, and not the one that is shown
    for other in ({}, {"state": "stopped"}, {"state": "stopped", "stopped_at": 1, "checks": [1]}):
        status.write_text(json.dumps(other))
        status_code, wrong = answer("status")
        assert status_code == 1
        assert str(status) in wrong["result"]["damaged"]

    # what would be wrong without it says so
    status_code, refused = answer("gaps", "list")
    assert (status_code, refused["error"]["code"]) == (3, "state.file_damaged")
    assert refused["error"]["where"] == str(progress)
    assert "eventpub run" in refused["error"]["suggestion"]
    checks = answer("doctor")[1]["result"]["checks"]
    [files] = [check for check in checks if check["name"] == "state files"]
    assert files["status"] == "warn"
    assert files["message"] == "progress.json in state is damaged and cannot be read"


@pytest.mark.parametrize("by", [None, "store.unreachable: the database is away"])
def test_what_a_stopped_publisher_did_is_not_shown_as_if_it_ran(
    configured: Path, by: str | None
) -> None:
    """It had a rate, and the checks that its end as asked had interrupted."""
    state = configured / "state"
    state.mkdir()
    (state / "eventpub.lock").touch()
    ended = time.time() - 5_000
    kept = document() | {"at": ended, "state": "stopped", "stopped_at": ended, "stopped_by": by}
    (state / "status.json").write_text(json.dumps(kept))
    done = eventpub("status", cwd=configured)
    assert done.returncode == 1, done.stderr
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "as of 83 min ago" in rows
    assert not any(row.startswith("rate ") for row in rows)
    assert any(row.startswith("name state ") for row in rows) == (by is not None)


def test_gaps_are_shown_in_words(configured: Path) -> None:
    """`still missing` had Python's True and False."""
    before = (
        "import eventpub.ops.gaps as g\n"
        "gaps = [g.SkippedGap(a, 2, 3, 1, 2, 8, 'backoff') for a in ('gone', 'back')]\n"
        "g._recorded = lambda *_: (gaps, 2)\n"
        "g.pending = lambda *_: (g.Pending([], 0, {'gone': [(3, 3)]}), True)"
    )
    done = eventpub("gaps", "list", cwd=configured, before=before)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[-1] for row in rows if row[0] == "gone"] == ["yes"]
    assert [row[-1] for row in rows if row[0] == "back"] == ["no"]


@pytest.mark.parametrize(
    ("action", "words"), [("retry", "nothing is held or skipped"), ("skip", "nothing is held")]
)
def test_an_aggregate_of_which_nothing_is_held_is_told(
    configured: Path, action: str, words: str
) -> None:
    before = (
        "import eventpub.ops.gaps as g, eventpub.channel as c\n"
        "g.act = lambda *_, **__: ('nothing is held', c.Request('1', 'retry', 'order-7'))\n"
        "g.given_up = lambda *_: None"
    )
    done = eventpub("gaps", action, "order-7", cwd=configured, before=before)
    assert (done.returncode, done.stdout) == (1, f"order-7: {words} for this aggregate\n")


def test_a_width_that_is_none_is_as_if_it_was_not_set(
    configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `COLUMNS=0` nothing at all was printed."""
    monkeypatch.delenv("COLUMNS", raising=False)  # as a worker of xdist has it
    before = (
        "import eventpub.ops.gaps as g\n"
        "gap = g.SkippedGap('order-' + 20 * '17', 2, 3, 1, 2, 8, 'backoff')\n"
        "g._recorded = lambda *_: ([gap], 1)\n"
        "g.pending = lambda *_: (g.Pending([], 0, {}), True)"
    )

    def listed(**environ: str) -> str:
        done = eventpub("gaps", "list", cwd=configured, before=before, **environ)
        assert done.returncode == 0, done.stderr
        return done.stdout

    unset = listed()
    assert "order-1717" in unset
    for width in ("0", "x", "-1", ""):
        assert listed(COLUMNS=width) == unset
    assert listed(COLUMNS="60") != unset


@pytest.mark.parametrize("arguments", [["trace"], ["publish"]], ids=" ".join)
def test_an_id_of_other_bytes_than_utf_8_is_refused(configured: Path, arguments: list[str]) -> None:
    done = eventpub(*arguments, os.fsdecode(b"\xff"), "1", "--json", cwd=configured)
    assert done.returncode == 2
    assert envelope(done)["error"]["message"] == "the aggregate id is not UTF-8"


def test_gaps_list_says_that_no_publisher_runs(configured: Path) -> None:
    before = "import eventpub.ops.gaps as g\ng._recorded = lambda *_: ([], 0)"
    done = eventpub("gaps", "list", "--json", cwd=configured, before=before)
    answer = envelope(done)
    assert (answer["result"]["running"], answer["result"]["kind"]) == (False, "never")
    assert "no publisher has run" in answer["summary"]


ASKING = (
    ["status"], ["config", "check"], ["config", "show"], ["trace", "a"], ["gaps", "list"],
    ["gaps", "retry", "a"], ["gaps", "skip", "a", "--yes"], ["gaps", "cancel", "a"],
    ["dead", "list"], ["dead", "show", "a", "1"], ["dead", "retry", "a", "1"],
    ["verify"], ["doctor"], ["pause"], ["resume"], ["migrate", "--sql"], ["replay", "--help"],
)  # fmt: skip


@pytest.mark.parametrize("arguments", ASKING, ids=" ".join)
def test_a_command_that_asks_leaves_nothing_behind(configured: Path, arguments: list[str]) -> None:
    """`eventpub status` in a wrong folder made an empty state directory there."""
    done = eventpub(*arguments, cwd=configured)
    assert done.returncode in {0, 1, 3}, done.stderr
    assert [path.name for path in configured.iterdir()] == ["eventpub.toml"]


def test_a_request_that_is_kept_makes_the_state_directory(configured: Path) -> None:
    done = eventpub("gaps", "retry", "a", "--later", cwd=configured)
    assert done.returncode == 0, done.stderr
    [kept] = (configured / "state" / "requests").glob("*.json")
    assert json.loads(kept.read_text())["aggregate_id"] == "a"


def test_a_state_whose_files_are_gone_has_been_used(configured: Path) -> None:
    (configured / "state" / "index" / "2-shards").mkdir(parents=True)
    done = eventpub("status", "--json", cwd=configured)
    assert (done.returncode, envelope(done)["result"]["kind"]) == (1, "stopped")
    assert "how the last one ended is not known" in envelope(done)["summary"]


ANSWERS = (["config", "show"], ["config", "show", "--json"], ["status"], ["--version"], ["--help"])


def redirected(
    arguments: list[str], redirection: str, cwd: Path
) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m eventpub {' '.join(arguments)} {redirection}"
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=_environ({}),
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("arguments", ANSWERS)
def test_an_answer_that_cannot_be_written_is_no_answer(
    configured: Path, arguments: list[str]
) -> None:
    done = redirected(arguments, "> /dev/full", configured)
    assert done.returncode == 3
    first, second = done.stderr.splitlines()
    assert first.startswith("error: cli.output_failed: the output cannot be written: No space left")
    assert second.startswith("  to fix it: ")


@pytest.mark.parametrize("arguments", ANSWERS)
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-", "2> /dev/full"])
def test_a_closed_stream_is_one_that_nobody_reads(
    configured: Path, arguments: list[str], closed: str
) -> None:
    """The exit status is that of the answer."""
    done = redirected(arguments, closed, configured)
    assert done.returncode == (1 if arguments == ["status"] else 0)
    assert done.stderr == ""
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_log_goes_on_when_its_disk_has_space_again(tmp_path: Path) -> None:
    program = (
        "import os, sys; from eventpub.cli.output import take_streams; take_streams()\n"
        "own = os.dup(2); os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n"
        "sys.stderr.write('lost\\n'); os.dup2(own, 2); sys.stderr.write('kept\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=_environ({}),
        check=True,
    )
    assert done.stderr == "kept\n"


@pytest.mark.parametrize("arguments", ANSWERS)
def test_a_reader_that_leaves_at_once_is_no_answer_of_no(
    configured: Path, arguments: list[str]
) -> None:
    done = redirected(arguments, "| true", configured)
    # what fits into the pipe may be written before the reader ends
    assert done.returncode in {0, 141} or arguments == ["status"]
    assert done.stderr == ""


def unread(
    *arguments: str, cwd: Path, before: str = "", out: str = ""
) -> subprocess.CompletedProcess[str]:
    """A command whose stdout has no reader any more, or goes to a file."""
    if out:
        writer = os.open(out, os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-c", f"{before}\n{MAIN}", *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=_environ({}),
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)


_DAEMON = (
    "import atexit, threading, time\n"
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    "atexit.register(lambda: open('ended', 'w').close())\n"
)
_SAYS_AND_LEAVES = (
    "import click, eventpub.cli\n"
    "said = click.Command('say', callback=lambda: print('said'))\n"
    "eventpub.cli.eventpub.add_command(said)\n"
)
"""What it prints is written at the end of the process."""


@pytest.mark.parametrize("arguments", ANSWERS, ids=" ".join)
@pytest.mark.parametrize("before", ["", _DAEMON], ids=["alone", "with a daemon"])
def test_without_a_reader_it_ends_as_by_sigpipe(
    configured: Path, arguments: list[str], before: str
) -> None:
    done = unread(*arguments, cwd=configured, before=before)
    assert (done.returncode, done.stderr) == (141, "")
    # Python's own end, which threads of C++ libraries do not survive
    assert not (configured / "ended").exists()


def test_what_is_written_last_ends_it_in_the_same_way(configured: Path) -> None:
    """Python's end said "Exception ignored", with exit status 120."""
    for before in (_SAYS_AND_LEAVES, _SAYS_AND_LEAVES + _DAEMON):
        done = unread("say", cwd=configured, before=before)
        assert (done.returncode, done.stderr) == (141, "")
        if Path("/dev/full").exists():
            done = unread("say", cwd=configured, before=before, out="/dev/full")
            assert done.returncode == 3
            assert done.stderr.startswith("error: cli.output_failed")
            assert "Traceback" not in done.stderr


def test_log_lines_hide_secrets(tmp_path: Path) -> None:
    code = (
        "import logging, structlog; from eventpub import masking; from eventpub import log\n"
        f"masking.remember('{SECRET}'); log.configure('json')\n"
        f"structlog.get_logger('a').info('said', url='x:{SECRET}@y', more=['{SECRET}'])\n"
        "try: 1 / 0\n"
        f"except Exception: logging.getLogger('b').exception('with {SECRET}')\n"
        f"try: raise ValueError('{SECRET}')\n"
        "except Exception: structlog.get_logger().exception('failed')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=_environ({}), check=True
    )
    assert done.stdout == ""
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["said", "with ***", "failed"]
    assert SECRET not in done.stderr
    assert "ZeroDivisionError" in lines[1]["exception"]


def test_doctor_shows_what_it_did_not_check_and_why(configured: Path) -> None:
    done = eventpub("doctor", "--json", "--set", "spark.master=spark://away:7077", cwd=configured)
    assert done.returncode == 3
    checks = envelope(done)["result"]["checks"]
    skipped = {c["name"].split(":")[0]: c["message"] for c in checks if c["status"] == "skipped"}
    assert "event store: connection" in skipped["event store"]
    assert "transactions" in next(name for name in skipped if name.startswith("topics"))
    assert "others depend on them" in envelope(done)["summary"]


def test_migrate_sql_needs_no_database(configured: Path) -> None:
    done = eventpub("migrate", "--sql", cwd=configured)
    assert done.returncode == 0
    assert done.stdout.startswith("-- without looking at a database")
    assert "CREATE TABLE IF NOT EXISTS `events`" in done.stdout
    assert "cannot be reached" in done.stderr
    assert SECRET not in done.stdout + done.stderr


def test_a_crash_in_a_library_says_where() -> None:
    program = (
        "import os, sys, faulthandler\n"
        "from eventpub.cli import main\n"
        "sys.argv = ['eventpub', '--version']\n"
        "main()\n"
        "os.abort()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == -signal.SIGABRT
    assert b"most recent call first" in done.stderr
