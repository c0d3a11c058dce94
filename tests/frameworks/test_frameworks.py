"""Tables of frameworks: `init`, what it prints done to the letter, `doctor`, `run`, `verify`."""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from eventpub.cli import main
from eventpub.config import Store
from eventpub.errors import Check
from eventpub.local.servers import Kafka
from eventpub.sources.mysql.checking import checks
from eventpub.sources.mysql.table import FRAMEWORKS
from tests.cli.test_command import eventpub
from tests.conftest import FreshDatabase
from tests.docs.pages import ROOT
from tests.frameworks.layouts import (
    LAYOUTS,
    PROOPH_AGGREGATE,
    PROOPH_SIMPLE,
    RAILS,
    Layout,
    adapted,
)
from tests.in_process import commands_run_in
from tests.publisher.harness import Topic

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
SERVERS = ("mysql", "mariadb")


def kind(database: FreshDatabase) -> str:
    return database.server.name.split()[0].lower()


def make(database: FreshDatabase, layout: Layout) -> None:
    for statement in layout.sql(kind(database)):
        database.execute(statement)


def command(folder: Path, *arguments: str, **environ: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the envelope of a command, run in this process."""
    with tempfile.TemporaryFile("w+") as out, commands_run_in(folder) as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        stdout = os.dup(1)
        os.dup2(out.fileno(), 1)
        try:
            status = main([*arguments, "--json"])
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        out.seek(0)
        answer: dict[str, Any] = json.load(out)
    return status, answer


def init(database: FreshDatabase, folder: Path, *arguments: str) -> dict[str, Any]:
    """The result of an `init` that writes a file."""
    status, answer = command(folder, "init", "--url", database.url, *arguments)
    assert status == 0, answer
    result: dict[str, Any] = answer["result"]
    return result


def refused(database: FreshDatabase, folder: Path, *arguments: str) -> dict[str, Any]:
    """The error of an `init` that writes nothing."""
    status, answer = command(folder, "init", "--url", database.url, *arguments)
    assert status == 1, answer
    assert not (folder / "eventpub.toml").exists()
    error: dict[str, Any] = answer["error"]
    return error


def written(folder: Path) -> dict[str, Any]:
    """The section [store] of the file."""
    store: dict[str, Any] = tomllib.loads((folder / "eventpub.toml").read_text())["store"]
    return store


def found(config: Store) -> dict[str, Check]:
    """What doctor says of the store, by the name of the check."""
    return {check.name.removeprefix("event store: "): check for check in checks(config)}


@both
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_init_maps_a_framework_and_what_it_prints_satisfies_doctor(
    database: FreshDatabase, layout: Layout, tmp_path: Path
) -> None:
    make(database, layout)
    result = init(database, tmp_path)
    assert (result["framework"], result["table"]) == (layout.name, layout.table)
    store = written(tmp_path)
    url = store.pop("url")
    assert store == layout.store | {"table": layout.table, "columns": layout.columns}
    assert [statement.count("ALTER TABLE") for statement in result["statements"]] == [1]
    added = re.findall(r"ADD (?:COLUMN `\w+`|(?:UNIQUE )?INDEX \([^)]*\))", *result["statements"])
    assert tuple(added) == layout.adds
    # what doctor says until it is done is the same
    before = found(Store.model_validate(store | {"url": database.url}))["table"]
    assert (before.status, f"{before.suggestion};") == ("wrong", result["statements"][0])
    database.execute(result["statements"][0])

    account = f"fw{database.name[-8:]}"
    for statement in result["account"]:
        sql = statement.partition("  --")[0].replace("'eventpub'", f"'{account}'")
        database.execute(sql.replace("…", "secret").rstrip(";"))
    try:
        config = Store.model_validate(store | {"url": database.url_of(account, "secret")})
        after = found(config)
    finally:
        database.execute(f"DROP USER IF EXISTS '{account}'@'%'")
    assert url.startswith("mysql+pymysql://eventpub@")
    assert {name: check for name, check in after.items() if check.status == "wrong"} == {}
    # each statement that doctor prints all the same can be executed
    for check in after.values():
        if str(check.suggestion).startswith("ALTER TABLE"):
            database.execute(str(check.suggestion).partition("; or ")[0])
    # nothing is left for a second init to ask for
    again = init(database, tmp_path, "--force")
    assert again["statements"] == []
    assert result["columns"].items() <= again["columns"].items()


def pairs() -> list[Any]:
    """Each layout on one of the servers; on the other one with `script/test --long`."""
    found = []
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        for server in SERVERS:
            marks = [] if SERVERS[number % 2] == server else [pytest.mark.long]
            found.append(pytest.param(server, layout, id=f"{name}-{server}", marks=marks))
    return found


@pytest.mark.parametrize(("database", "layout"), pairs(), indirect=["database"])
def test_what_init_writes_publishes_all_of_it(
    database: FreshDatabase, layout: Layout, tmp_path: Path, kafka_server: Kafka, topic_name: str
) -> None:
    make(database, layout)
    given = ("--bootstrap-servers", kafka_server.bootstrap_servers, "--topic", topic_name)
    result = init(database, tmp_path, *given)
    for statement in result["statements"]:
        database.execute(statement)
    environ = {
        "EVENTPUB_STORE__URL": database.url,
        "EVENTPUB_READ__DELAY": "300ms",
        "EVENTPUB_OPS__HTTP": "",
        "EVENTPUB_RUN__ENGINE": "threads",  # starts sooner than Spark
    }
    for arguments in (["doctor"], ["run", "--available-now"], ["verify"]):
        done = eventpub(*arguments, cwd=tmp_path, **environ)
        assert done.returncode == 0, done.stdout + done.stderr
    topic = Topic(kafka_server.bootstrap_servers, topic_name)
    versions: dict[str, list[int]] = defaultdict(list)
    for record in topic.read():
        versions[record.key].append(record.version)
        expected = layout.types.get((record.key, record.version))
        assert expected in {None, record.headers["ce_type"].decode()}
        assert record.value
    assert versions == layout.published
    assert Topic(kafka_server.bootstrap_servers, f"{topic_name}.dead").read() == []


@both
def test_a_framework_that_cannot_be_published_is_told_why(
    database: FreshDatabase, tmp_path: Path
) -> None:
    for statement in RAILS:
        database.execute(statement)
    error = refused(database, tmp_path)
    assert error["code"] == "init.not_publishable"
    assert "event_store_events cannot be published: Rails Event Store: " in error["message"]
    assert "no table has a version and the payload" in error["message"]
    for table in ("event_store_events", "event_store_events_in_streams"):
        error = refused(database, tmp_path, "--table", table)
        assert error["code"] == "init.not_publishable"


@both
def test_prooph_s_other_strategies(database: FreshDatabase, tmp_path: Path) -> None:
    """A table for each aggregate cannot be published; a simple stream gets columns."""
    for statement in (*PROOPH_AGGREGATE, *PROOPH_SIMPLE):
        database.execute(adapted(statement, kind(database)))
    error = refused(database, tmp_path, "--table", "_a1b3")
    assert error["code"] == "init.not_publishable"
    assert "single stream strategy" in error["message"]

    result = init(database, tmp_path)
    assert (result["table"], result["framework"]) == ("_a1b2", "prooph, simple stream")
    assert result["columns"]["aggregate_id"] == ["aggregate_type", "aggregate_id"]
    for statement in result["statements"]:
        database.execute(statement)
    database.execute(
        "INSERT INTO _a1b2 (event_id, event_name, payload, metadata, created_at) VALUES ('e', 'x',"
        """ '{}', '{"_aggregate_id":"a","_aggregate_type":"T","_aggregate_version":7}', NOW())"""
    )
    rows = database.execute("SELECT aggregate_type, aggregate_id, aggregate_version FROM _a1b2")
    assert rows == (("T", "a", 7),)
    again = init(database, tmp_path, "--force")
    assert again["statements"] == []


def test_each_framework_has_a_line_on_the_page() -> None:
    page = (ROOT / "docs" / "how-to" / "my-framework.md").read_text()
    names = {framework.name for framework in FRAMEWORKS}
    assert names == {name for name in names if f"| {name} |" in page}
    tested = {layout.name for layout in LAYOUTS.values()}
    refused_ones = {framework.name for framework in FRAMEWORKS if framework.refused}
    assert names - tested - refused_ones <= {"prooph, simple stream", "Akka, JDBC before 5.0"}
