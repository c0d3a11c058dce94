"""Loading the configuration: what wins, what is refused and by which words, what is never shown."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventpub import masking
from eventpub.config import format_time, parse_time
from eventpub.config_values import PROTECTED_PROPERTIES
from eventpub.errors import ConfigError
from eventpub.settings import (
    DEFAULTS,
    CombinedConfigError,
    Loaded,
    effective,
    load,
    variable_of,
)
from eventpub.sink import client_settings
from eventpub.sources.mysql.connection import connect_arguments
from tests.in_process import forget_secrets

ENOUGH = {
    "app.id": "orders",
    "store.url": "mysql+pymysql://reader@127.0.0.1:3306/shop",
    "sink.topic": "orders.events",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    forget_secrets()


def file(text: str) -> Path:
    path = Path("eventpub.toml")
    path.write_text(text)
    return path


def refused(
    overrides: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    path: Path | None = None,
) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(path, ENOUGH | (overrides or {}), environ or {})
    return caught.value


def test_flag_beats_environment_beats_file_beats_default() -> None:
    file('[app]\nid = "a"\n[read]\ndelay = "2s"\npage_rows = 5\n[run]\nshards = 3\n')
    loaded = load(
        None,
        ENOUGH | {"read.delay": "4s"},
        {"EVENTPUB_READ__DELAY": "3s", "EVENTPUB_READ__PAGE_ROWS": "6"},
        flags={"read.delay": "--delay"},
    )
    assert loaded.config.read.delay == 4_000_000
    assert loaded.config.read.page_rows == 6
    assert loaded.config.run.shards == 3
    assert loaded.origins["read.delay"] == "flag --delay"
    assert loaded.origins["read.page_rows"] == "env EVENTPUB_READ__PAGE_ROWS"
    assert loaded.origins["run.shards"] == "file eventpub.toml"
    assert loaded.origins["gaps.policy"] == "default"


def test_the_environment_alone_is_enough() -> None:
    loaded = load(
        None,
        {},
        {
            "EVENTPUB_APP__ID": "orders",
            "EVENTPUB_STORE__URL": "mysql+pymysql://reader@h/shop",
            "EVENTPUB_SINK__TOPIC": "t",
            "EVENTPUB_STORE__COLUMNS__PAYLOAD": "body",
            "EVENTPUB_SINK__CREATE_TOPICS": "false",
            "EVENTPUB_SINK__PROPERTIES": '{"compression.type": "lz4"}',
            "EVENTPUB_SINK__PROPERTIES__SASL_USERNAME": "me",
        },
    )
    assert loaded.config.store.columns.payload == "body"
    assert loaded.config.sink.create_topics is False
    assert loaded.config.sink.properties == {"compression.type": "lz4", "sasl.username": "me"}


@pytest.mark.parametrize(
    ("text", "key", "suggested"),
    [
        ('[store]\ntabel = "x"', "store.tabel", "store.table"),
        ('[stor]\nurl = "x"', "stor.url", "store.url"),
        ('topic = "x"', "topic", "sink.topic"),
        ('[read]\ntopic = "x"', "read.topic", "sink.topic"),
        ('[store.columns]\naggregat_id = "x"', "store.columns.aggregat_id", "aggregate_id"),
        ('[gaps]\nzzzzzz = "x"', "gaps.zzzzzz", "policy"),
        ("[nonsense]\nzzzzzz = 1", "nonsense.zzzzzz", "app, run, store"),
        ('[SINK]\ntopic = "x"', "SINK.topic", "did you mean sink.topic?"),
        ('[sink]\nTopic = "x"', "sink.Topic", "did you mean sink.topic?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(text: str, key: str, suggested: str) -> None:
    error = refused(path=file(text))
    assert error.code == "config.unknown_key"
    assert error.where == key
    assert suggested in (error.suggestion or "")
    assert "eventpub.toml" in error.message


@pytest.mark.parametrize(
    ("variable", "suggested"),
    [
        ("EVENTPUB_SINK_TOPIC", "EVENTPUB_SINK__TOPIC"),
        ("EVENTPUB_STORE__PASWORD", "EVENTPUB_STORE__PASSWORD"),
        ("EVENTPUB_DELAY", "EVENTPUB_READ__DELAY"),
        ("EVENTPUB_DEBUG", "two underscores"),
        ("EVENTPUB_FOO", "two underscores"),
        ("eventpub_sink__topic", "EVENTPUB_SINK__TOPIC"),
        ("Eventpub_Sink__Topic", "EVENTPUB_SINK__TOPIC"),
        ("EVENTPUB_sink__topic", "EVENTPUB_SINK__TOPIC"),
    ],
)
def test_an_unknown_variable_is_refused(variable: str, suggested: str) -> None:
    error = refused(environ={variable: "secret value"})
    assert error.code == "config.unknown_key"
    assert error.where == variable
    assert "secret value" not in str(error)
    assert suggested in (error.suggestion or "")


def test_variables_of_kubernetes_service_links_are_not_ours() -> None:
    load(
        None,
        ENOUGH,
        {
            "EVENTPUB_SERVICE_HOST": "10.0.0.1",
            "EVENTPUB_SERVICE_PORT_HTTP": "8077",
            "EVENTPUB_PORT": "tcp://10.0.0.1:8077",
            "EVENTPUB_PORT_8077_TCP_ADDR": "10.0.0.1",
        },
    )
    load(None, ENOUGH, {"eventpub_home": "/opt", "eventpub__private": "1", "eventpub_sink_": ""})
    assert refused(environ={"EVENTPUB_PORT": "8077"}).code == "config.unknown_key"


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("read.delay", "1", "unit"),
        ("read.delay", "1 fortnight", "unit"),
        ("read.delay", "-1s", "unit"),
        ("recount.horizon", "-5m", "unit"),
        ("read.start", "yesterday", "RFC 3339"),
        ("read.start", "2026-01-31T09:30:00", "zone"),
        ("read.start", "2026-13-31T09:30:00Z", "beginning"),
        ("read.watermark", "on", "'auto' or 'off'"),
        ("read.page_rows", "many", "a whole number"),
        ("read.page_rows", "0", "at least 1"),
        ("read.page_rows", "1.5", "a whole number"),
        ("store.connect_timeout", "10ms", "at least 1s"),
        ("recount.horizon", "48h", "at most 1d"),
        ("spark.master", "", "local[N]"),
        ("gaps.late", "ignore", "'publish', 'divert' or 'drop'"),
        ("store.first_version", "2", "at most 1"),
        ("store.time_zone", "Middle/Earth", "IANA"),
        ("store.url", "postgresql://h/x", "mysql+pymysql://"),
        ("store.url", "mysql+pymysql://h", "database"),
        ("sink.topic", "a topic", "A-Z"),
        ("sink.bootstrap_servers", "a b", "host:port"),
        ("ops.http", "8077", "127.0.0.1:8077"),
        ("app.id", "", "1 to 200"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(key: str, value: str, allowed: str) -> None:
    error = refused({key: value})
    assert error.code == "config.invalid_value"
    assert error.where == key
    assert allowed in (error.suggestion or ""), error.suggestion
    assert f"--set {key}" in error.message
    assert value in error.message or key == "store.url"


@pytest.mark.parametrize("value", ["5", "true", '["events"]', "1979-05-27"])
def test_a_text_without_quotes_is_refused_with_what_it_lacks(value: str) -> None:
    error = refused(path=file(f"[store]\ntable = {value}\n"))
    assert (error.code, error.where) == ("config.invalid_value", "store.table")
    assert error.suggestion == "it must be: text, in quotes"


@pytest.mark.parametrize("key", ["app.id", "store.url", "sink.topic"])
def test_what_must_be_set_says_every_place_that_was_tried(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {k: v for k, v in ENOUGH.items() if k != key}, {})
    error = caught.value
    assert error.code == "config.missing_key"
    assert error.where == key
    assert "eventpub.toml (no such file)" in error.message
    assert variable_of(key) in error.message


def test_several_problems_are_reported_together() -> None:
    error = refused({"read.delay": "1", "gaps.late": "no", "sink.tpoic": "x"})
    assert isinstance(error, CombinedConfigError)
    assert {p.where for p in error.problems} == {"read.delay", "gaps.late", "sink.tpoic"}
    for text in ("read.delay", "gaps.late", "sink.tpoic"):
        assert text in str(error)


@pytest.mark.parametrize(
    ("value", "columns"),
    [
        ("stream", ("stream",)),
        ("a,b", ("a,b",)),
        (["type", "id"], ("type", "id")),
        ('["type", "a|b"]', ("type", "a|b")),
    ],
)
def test_the_aggregate_id_is_one_column_or_a_list(value: object, columns: tuple[str, ...]) -> None:
    loaded = load(None, ENOUGH | {"store.columns.aggregate_id": value}, {})
    assert loaded.config.store.columns.aggregate_id == columns
    shown_as = columns[0] if len(columns) == 1 else [*columns]
    assert effective(loaded.config)["store.columns.aggregate_id"] == shown_as
    if isinstance(value, str):
        variable = {"EVENTPUB_STORE__COLUMNS__AGGREGATE_ID": value}
        assert load(None, ENOUGH, variable).config.store.columns.aggregate_id == columns


@pytest.mark.parametrize("value", [[], "", ["a", ""], ["a", "A"], ["a", "b", "c", "d", "e"], "[1"])
def test_a_list_of_columns_has_one_to_four_names(value: object) -> None:
    error = refused({"store.columns.aggregate_id": value})
    assert (error.code, error.where) == ("config.invalid_value", "store.columns.aggregate_id")
    assert "a list" in str(error.suggestion)


def test_a_missing_file_is_refused_only_when_it_was_named() -> None:
    named = {"EVENTPUB_CONFIG": "other.toml"}
    for error in (refused(path=Path("other.toml")), refused(environ=named)):
        assert error.code == "config.file_unreadable"
        assert error.message == "other.toml cannot be read: No such file or directory"
    assert load(None, ENOUGH, {}).file is None


def test_a_folder_in_the_place_of_the_file_is_said_to_be_one(tmp_path: Path) -> None:
    for error in (refused(path=tmp_path), refused(environ={"EVENTPUB_CONFIG": str(tmp_path)})):
        assert error.code == "config.file_unreadable"
        assert error.message == f"{tmp_path} cannot be read: Is a directory"


def test_wrong_toml_is_refused_with_its_line() -> None:
    error = refused(path=file('[app]\nid = "orders\n'))
    assert error.code == "config.file_invalid"
    assert "line 2" in error.message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[app]\nid = "a"\nid = "b"\n\n[sink]\ntopic = "t"\n', 3),
        ('[app]\nid = "a"\n[sink]\ntopic = "t"\n[app]\nstate_dir = "s"\n', 5),
        ('[sink]\nproperties = {a = "1", a = "2"}\n', 2),
    ],
)
def test_what_is_there_twice_is_named_with_its_line(text: str, line: int) -> None:
    error = refused(path=file(text))
    assert error.code == "config.file_invalid"
    assert "eventpub.toml is not TOML: " in error.message
    assert f"at line {line}," in error.message
    assert "appears twice, remove one" in str(error.suggestion)


def test_a_section_that_is_a_value_is_refused() -> None:
    error = refused(path=file('store = "x"'))
    assert error.code == "config.unknown_key"
    assert error.suggestion == "did you mean [store]?"


def test_both_passwords_contradict_each_other() -> None:
    error = refused({"store.password": "hunter2hunter2", "store.password_file": "x"})
    assert error.code == "config.contradiction"
    assert "hunter2" not in str(error)


def test_there_may_be_more_shards_than_a_topic_would_be_created_with() -> None:
    """It may exist, and have more partitions by now."""
    stated = {"run.shards": "9", "sink.partitions": "8"}
    assert load(None, ENOUGH | stated, {}).config.run.shards == 9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "1") for name in sorted(PROTECTED_PROPERTIES)),
        ("acks", "1"),
        ("enable.idempotence", "false"),
        ("max.in.flight", "6"),
        ("retries", "0"),
    ],
)
def test_properties_that_guarantees_stand_on_are_refused(name: str, value: str) -> None:
    error = refused({f"sink.properties.{name}": value})
    assert error.code == "config.contradiction"
    assert error.where == f"sink.properties.{name}"


def test_properties_may_say_what_holds_anyway() -> None:
    said = {"sink.properties.acks": "all", "sink.properties.enable.idempotence": "true"}
    assert load(None, ENOUGH | said, {}).config.sink.properties["acks"] == "all"
    open_ = {"sink.delivery": "at_least_once", "sink.properties.log.connection.close": "false"}
    assert load(None, ENOUGH | {"run.engine": "threads"} | open_, {})
    weak = {"sink.delivery": "at_most_once", "sink.properties.acks": "0"}
    with_threads = ENOUGH | {"run.engine": "threads"} | weak
    assert load(None, with_threads, {}).config.sink.properties["acks"] == "0"


@pytest.mark.parametrize(
    ("stated", "milliseconds"),
    [
        ({}, 600),
        ({"run.trigger": "100ms"}, 100),
        ({"run.trigger": "2s"}, 2_000),
        ({"run.trigger": "100ms", "spark.trigger": "300ms"}, 300),
        ({"run.trigger": "2s", "spark.trigger": "300ms"}, 2_000),
    ],
)
def test_the_trigger_that_is_set_is_that_of_micro_batches(
    stated: dict[str, str], milliseconds: int
) -> None:
    assert load(None, ENOUGH | stated, {}).config.batch_trigger == 1_000 * milliseconds


def test_spark_delivers_exactly_once_only() -> None:
    with pytest.raises(ConfigError) as failed:
        load(None, ENOUGH | {"sink.delivery": "at_least_once"}, {})
    assert (failed.value.code, failed.value.where) == ("config.contradiction", "sink.delivery")


def test_what_relies_on_the_recount_is_refused_without_one() -> None:
    """Rows of the past were warned of, and never published."""
    stated = {"recount.horizon": "0", "recount.rows_in_past": "count"}
    with pytest.raises(ConfigError) as failed:
        load(None, ENOUGH | stated, {})
    where = failed.value.where
    assert (failed.value.code, where) == ("config.contradiction", "recount.rows_in_past")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sink.properties", '{"sasl.password":"hunter2hunter2",'),
        ("sink.properties", "sasl.password=hunter2hunter2"),
        ("spark.properties", '["hunter2hunter2"]'),
    ],
)
def test_properties_that_cannot_be_read_are_not_shown(key: str, value: str) -> None:
    """A comma too many in JSON, and the password was in the error."""
    error = refused({key: value})
    assert error.code == "config.invalid_value"
    assert "hunter2" not in str(error)
    assert "hunter2" not in json.dumps(error.to_dict())


def test_property_names_need_no_quotes_and_values_no_text() -> None:
    path = file('[sink.properties]\ncompression.type = "lz4"\n"linger.ms" = 5\na.b = true\n')
    properties = load(path, ENOUGH, {}).config.sink.properties
    assert properties == {"compression.type": "lz4", "linger.ms": "5", "a.b": "true"}


def test_properties_may_be_one_json_object() -> None:
    text = '{"compression.type": "lz4", "linger.ms": 5}'
    for loaded in (
        load(None, ENOUGH | {"sink.properties": text}, {}),
        load(None, ENOUGH, {"EVENTPUB_SINK__PROPERTIES": text}),
    ):
        properties = loaded.config.sink.properties
        assert properties == {"compression.type": "lz4", "linger.ms": "5"}
    environ = {"EVENTPUB_SINK__PROPERTIES__A": "b"}
    assert refused({"sink.properties": "lz4"}, environ).code == "config.invalid_value"
    assert refused(path=file('[sink]\nproperties = "lz4"')).where == "sink.properties"


def test_the_password_file_is_read_without_its_line_end(tmp_path: Path) -> None:
    (tmp_path / "pw").write_text("s3cret s3cret\n")
    loaded = load(None, ENOUGH | {"store.password_file": str(tmp_path / "pw")}, {})
    assert loaded.config.store.password is not None
    assert loaded.config.store.password.get_secret_value() == "s3cret s3cret"
    assert loaded.origins["store.password"] == f"file {tmp_path / 'pw'}"
    assert refused({"store.password_file": "not there"}).code == "config.file_unreadable"
    (tmp_path / "pw").write_text("\n")
    assert refused({"store.password_file": str(tmp_path / "pw")}).code == "config.password_file"


def test_a_secret_of_a_file_is_the_one_that_stands_there_now(tmp_path: Path) -> None:
    """A password that was rotated ended the publisher with its next connection."""
    file = tmp_path / "secret"
    file.write_text("first-1\n")
    files = {
        "store.password_file": str(file),
        "sink.properties.sasl.password.file": str(file),
        "sink.properties.sasl.mechanism": "PLAIN",
        "sink.properties.security.protocol": "SASL_PLAINTEXT",
    }
    config = pickle.loads(pickle.dumps(load(None, ENOUGH | files, {}).config))

    def used() -> set[str]:
        of_store = connect_arguments(config.store)["password"].decode()
        return {of_store, client_settings.settings(config.sink)["sasl.password"]}

    assert used() == {"first-1"}
    file.write_text("second-2\n")
    assert used() == {"second-2"}
    assert "second-2" not in masking.mask("with second-2")
    file.write_text("")  # it is being written
    assert used() == {"first-1"}
    file.unlink()
    assert used() == {"first-1"}


WITH_PASSWORD = "mysql+pymysql://reader:of%20url@127.0.0.1:3306/shop"


def database_password(loaded: Loaded) -> bytes:
    return bytes(connect_arguments(loaded.config.store)["password"])


@pytest.mark.parametrize("flag", ["--store-url", None])
@pytest.mark.parametrize("kind", ["password", "password_file"])
@pytest.mark.parametrize("in_environment", [True, False])
def test_a_password_in_a_url_on_the_command_line_beats_environment_and_file(
    flag: str | None, kind: str, in_environment: bool
) -> None:
    Path("secret").write_text("of key")
    value = "secret" if kind == "password_file" else "of key"
    environ = {f"EVENTPUB_STORE__{kind.upper()}": value} if in_environment else {}
    file("" if in_environment else f'[store]\n{kind} = "{value}"\n')
    flags = {"store.url": flag} if flag else {}
    loaded = load(None, ENOUGH | {"store.url": WITH_PASSWORD}, environ, flags=flags)
    assert database_password(loaded) == b"of url"
    assert loaded.origins["store.password"] == "default"
    assert loaded.origins["store.url"] == f"flag {flag or '--set store.url'}"
    # without one in the URL, or with an own key beside it, nothing changes
    assert database_password(load(None, ENOUGH, environ)) == b"of key"
    both = ENOUGH | {"store.url": WITH_PASSWORD, "store.password": "of flag"}
    assert database_password(load(None, both, environ)) == b"of flag"


def test_an_empty_password_in_a_url_on_the_command_line_is_one() -> None:
    environ = {"EVENTPUB_STORE__PASSWORD": "of key"}
    url = WITH_PASSWORD.replace("of%20url", "")
    assert database_password(load(None, ENOUGH | {"store.url": url}, environ)) == b""


def test_a_password_of_the_environment_beats_one_in_the_url_of_the_file() -> None:
    file(f'[store]\nurl = "{WITH_PASSWORD}"\n')
    enough = {key: value for key, value in ENOUGH.items() if key != "store.url"}
    assert database_password(load(None, enough, {})) == b"of url"
    environ = {"EVENTPUB_STORE__PASSWORD": "of key"}
    assert database_password(load(None, enough, environ)) == b"of key"
    environ["EVENTPUB_STORE__URL"] = WITH_PASSWORD
    assert database_password(load(None, enough, environ)) == b"of key"


@pytest.mark.parametrize("key", ["password", "password_file"])
def test_a_password_in_the_url_of_the_environment_beats_one_of_the_file(key: str) -> None:
    Path("secret").write_text("of key")
    file(f'[store]\n{key} = "secret"\n')
    enough = {key: value for key, value in ENOUGH.items() if key != "store.url"}
    environ = {"EVENTPUB_STORE__URL": WITH_PASSWORD}
    assert database_password(load(None, enough, environ)) == b"of url"


def test_a_later_source_replaces_a_password_file_that_cannot_be_read() -> None:
    path = file('[store]\npassword_file = "not there"\n')
    environ = {"EVENTPUB_STORE__PASSWORD": "of key"}
    assert database_password(load(path, ENOUGH, environ)) == b"of key"
    assert load(path, ENOUGH, {"EVENTPUB_STORE__PASSWORD_FILE": ""}).config.store.password is None


def test_an_empty_password_file_names_none_and_takes_no_password_away() -> None:
    """Templates of containers set variables that are empty."""
    environ = {"EVENTPUB_STORE__PASSWORD": "of key", "EVENTPUB_STORE__PASSWORD_FILE": ""}
    assert database_password(load(None, ENOUGH, environ)) == b"of key"
    del environ["EVENTPUB_STORE__PASSWORD_FILE"]
    later = ENOUGH | {"store.password_file": ""}
    assert database_password(load(None, later, environ)) == b"of key"


def test_a_token_beside_its_file_is_refused_even_if_it_is_empty() -> None:
    error = refused({"ops.token": "", "ops.token_file": "x"})
    assert "both ops.token and ops.token_file are set" in str(error)


@pytest.mark.parametrize("token", ["", "2short", "x" * 15, "ключ" * 5, " " * 20, "x" * 16 + "\x7f"])
def test_a_token_that_can_be_guessed_or_sent_by_nobody_is_refused(
    token: str, tmp_path: Path
) -> None:
    """In a library's own words where it was written down, and not at all where it is a file's."""
    file = tmp_path / "token"
    file.write_text(token, encoding="utf-8")
    given = refused({"ops.token": token})
    assert (given.code, given.where) == ("config.invalid_value", "ops.token")
    of_environment = refused(environ={"EVENTPUB_OPS__TOKEN": token})
    assert "EVENTPUB_OPS__TOKEN" in of_environment.message
    of_file = refused({"ops.token_file": str(file)})
    assert str(file) in of_file.message
    if token:
        assert (of_file.code, of_file.where) == (given.code, given.where)
        assert of_file.suggestion == given.suggestion
    for error in (given, of_environment, of_file):
        assert error.suggestion
        assert not token or token not in str(error)


def test_the_token_s_file_is_missed_by_name_and_read_without_its_line_end(tmp_path: Path) -> None:
    file = tmp_path / "token"
    error = refused({"ops.token_file": str(file)})
    assert error.message == f"{file} cannot be read: No such file or directory"
    assert (error.code, error.where) == ("config.file_unreadable", "ops.token_file")
    file.write_bytes(b"\xff" * 20)
    assert "it is not UTF-8" in refused({"ops.token_file": str(file)}).message
    assert "is a directory" in refused({"ops.token_file": str(tmp_path)}).message.lower()
    file.write_text("0123456789abcdef\n")
    token = load(None, ENOUGH | {"ops.token_file": str(file)}, {}).config.ops.token
    assert token is not None
    assert token.get_secret_value() == "0123456789abcdef"


def test_a_property_may_come_from_a_file_and_is_a_secret_then(tmp_path: Path) -> None:
    file = tmp_path / "word"
    file.write_text("s3cret of Kafka\n")
    key = "sink.properties.sasl.password"
    variable = {"EVENTPUB_SINK__PROPERTIES__SASL_PASSWORD_FILE": str(file)}
    for loaded in (
        load(None, ENOUGH | {f"{key}.file": str(file)}, {}),
        load(None, ENOUGH, variable),
    ):
        assert loaded.config.sink.properties == {"sasl.password": "s3cret of Kafka"}
        assert loaded.origins[key] == f"file {file}"
        assert effective(loaded.config)[key] == "***"
        assert "s3cret" not in str(effective(loaded.config))
    # a name that does not sound like a secret, too
    loaded = load(None, ENOUGH | {"sink.properties.sasl.username.file": str(file)}, {})
    assert effective(loaded.config)["sink.properties.sasl.username"] == "***"
    both: dict[str, object] = {f"{key}.file": str(file), key: "x"}
    assert refused(both).code == "config.contradiction"
    missing = refused({f"{key}.file": str(tmp_path / "none")})
    assert (missing.code, missing.where) == ("config.file_unreadable", f"{key}.file")
    assert "none" in missing.message
    file.write_text("")
    assert refused({f"{key}.file": str(file)}).code == "config.password_file"
    of_library = "sasl.oauthbearer.assertion.claim.sub"
    named: dict[str, object] = {f"sink.properties.{of_library}.file": str(file)}
    file.write_text("me")
    assert load(None, ENOUGH | named, {}).config.sink.properties == {of_library: "me"}
    # what may not be set may not come from a file either
    file.write_text("1")
    assert refused({"sink.properties.acks.file": str(file)}).code == "config.contradiction"


@pytest.mark.parametrize("name", ["file", "jwt.template.file", "private.key.file"])
def test_a_property_of_librdkafka_that_is_a_file_stays_one(name: str) -> None:
    """Their contents went to properties that there are not."""
    given = f"sasl.oauthbearer.assertion.{name}"
    loaded = load(None, ENOUGH | {f"sink.properties.{given}": "/no/such"}, {})
    assert loaded.config.sink.properties == {given: "/no/such"}


def test_a_token_provider_is_a_function_of_a_module() -> None:
    tokens: dict[str, object] = {"sink.properties.sasl.mechanism": "OAUTHBEARER"}
    assert refused(tokens).message.endswith("nor sasl.oauthbearer.method = oidc is set")
    assert refused({"sink.token_provider": "shop.auth:token"}).code == "config.contradiction"
    tokens["sink.token_provider"] = "shop.auth:token"
    loaded = load(None, ENOUGH | tokens, {})
    assert loaded.config.sink.token_provider == "shop.auth:token"
    assert effective(loaded.config)["sink.token_provider"] == "shop.auth:token"
    assert refused({"sink.token_provider": "shop.auth.token"}).where == "sink.token_provider"


def test_secrets_are_shown_nowhere() -> None:
    secret = "hunter2/pass@word"
    loaded = load(
        None,
        ENOUGH
        | {
            "store.url": "mysql+pymysql://reader:urlsecret1@h/shop",
            "store.password": secret,
            "sink.properties.sasl.password": "kafkasecret",
            "sink.properties.ssl.key.password": "keysecret1",
            "sink.properties.sasl.oauthbearer.client.secret": "oauthsecret",
            "spark.properties.spark.driver.extraJavaOptions": "-Da.password='option secret'"
            " -Db.password=sec#ret1&zz",
        },
        {},
    )
    everything = f"{effective(loaded.config)} {loaded} {loaded.config!r}"
    words = ["urlsecret1", secret, "kafkasecret", "keysecret1", "oauthsecret", "option secret"]
    for word in (*words, "sec#ret1&zz"):
        assert word not in everything
        assert word not in masking.mask(f"Traceback: could not use {word}")
    assert effective(loaded.config)["store.url"] == "mysql+pymysql://reader:***@h/shop"
    assert masking.mask("hunter2%2Fpass%40word") == "***"


def test_a_wrong_url_is_refused_without_its_password() -> None:
    for url in (
        "mysql://reader:urlsecret1@h/shop",
        "mysql+pymysql://reader:url#secret1@h/shop",
        "mysql+pymysql://reader:urlsecret1@h:port/shop",
    ):
        error = refused({"store.url": url})
        assert error.code == "config.invalid_value"
        assert "secret1" not in str(error)


def test_effective_values_are_written_as_the_file_would() -> None:
    values = effective(load(None, ENOUGH | {"read.delay": "1500ms"}, {}).config)
    assert values["read.delay"] == "1500ms"
    assert values["recount.horizon"] == "5m"
    assert values["app.state_dir"] == "state"
    assert DEFAULTS["gaps.backoff_base"] == "250ms"


def test_every_default_can_be_written_into_the_file() -> None:
    defaults = {k: str(v) for k, v in DEFAULTS.items() if v is not None}
    del defaults["store.columns.id"]
    assert load(None, ENOUGH | defaults, {}).config == load(None, ENOUGH, {}).config


@pytest.mark.parametrize(
    "text", ["1970-01-01T00:00:00.000001Z", "2026-01-31T09:30:00.123456Z", "1969-12-31T23:59:59.5Z"]
)
def test_times_survive(text: str) -> None:
    assert parse_time(format_time(parse_time(text))) == parse_time(text)
    assert parse_time("2026-01-31T11:30:00+02:00") == parse_time("2026-01-31T09:30:00Z")
