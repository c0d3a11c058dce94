"""`config check` names what cannot work by its key, with what is allowed; and shows no secret."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from docs.generate import configuration
from eventpub.cli import main
from eventpub.settings import KEYS, variable_of
from tests.in_process import commands_run_in

INTERFACE = """
[app]
id = "orders"
state_dir = "./state"

[store]
url = "mysql+pymysql://reader@127.0.0.1:3306/shop"
table = "events"
first_version = 1
[store.columns]
aggregate_id = "aggregate_id"

[read]
start = "beginning"
delay = "1s"
page_rows = 50_000
watermark = "auto"

[gaps]
policy = "hold_aggregate"
max_backoff = 8
backoff_base = "250ms"
late = "publish"

[recount]
horizon = "5m"

[sink]
topic = "orders.events"
bootstrap_servers = "127.0.0.1:9092"
kind = "kafka"
delivery = "exactly_once"
[sink.properties]
"compression.type" = "lz4"

[run]
engine = "spark"
shards = 2
trigger = "100ms"

[spark]
master = "local[*]"

[state]
location = ""

[ops]
http = "127.0.0.1:8077"
log = "auto"
"""
"""The configuration that users hold on to, with all of its keys."""

ENOUGH = {
    "EVENTPUB_APP__ID": "orders",
    "EVENTPUB_STORE__URL": "mysql+pymysql://reader@127.0.0.1:3306/shop",
    "EVENTPUB_SINK__TOPIC": "orders.events",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path) -> Iterator[None]:
    with commands_run_in(tmp_path):
        yield


def check(
    capfd: pytest.CaptureFixture[str], *arguments: str, environ: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """The exit status of `config check --json`, and its error."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (environ or {}).items():
            patch.setenv(name, value)
        status = main(["config", "check", "--json", *arguments])
    out, _ = capfd.readouterr()
    answer = json.loads(out)
    assert answer["ok"] == (status == 0)
    return status, answer["error"] or {}


def test_the_interface_s_example_is_valid_and_all_of_its_keys_are_documented(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("eventpub.toml").write_text(INTERFACE)
    status, error = check(capfd)
    assert (status, error) == (0, {})
    page = configuration()
    for section, table in tomllib.loads(INTERFACE).items():
        for key in table:
            keys = page.partition(f"\n## [{section}]\n")[2].partition("\n## ")[0]
            assert f"\n- `{key}" in keys or key in {"columns", "properties"}, key


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("sink.kind", "sql", "'kafka'"),
        ("sink.kind", "redis", "'kafka'"),
        ("sink.bootstrap_servers", "host:99999", "1 to 65535"),
        ("sink.bootstrap_servers", "host:0", "1 to 65535"),
        ("sink.bootstrap_servers", "", "host:port"),
        ("sink.bootstrap_servers", "a:1,,b:2", "host:port"),
        ("sink.bootstrap_servers", "http://a:1", "host:port"),
        ("spark.master", "yarnn", "'yarn'"),
        ("spark.master", "local[0]", "local[N]"),
        ("spark.master", "spark://host", "spark://host:port"),
        ("spark.master", "k8s://", "k8s://"),
        ("state.location", "ftp://x", "s3://"),
        ("state.location", "hdfs://host:8020/x", "s3://"),
        ("state.location", "s3://", "all executors share"),
        ("state.location", "file:/x", "a folder"),
        ("store.time_zone", "+99:99", "IANA"),
        ("app.state_dir", "", "folder"),
        ("read.delay", "9" * 400 + "d", "365d"),
        ("read.start", "9999-12-31T23:59:59-10:00", "RFC 3339"),
        ("sink.create_topics", "maybe", "true or false"),
        ("store.table", "a\0b", "NUL"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_what_is_allowed(
    capfd: pytest.CaptureFixture[str], key: str, value: str, allowed: str
) -> None:
    status, error = check(capfd, "--set", f"{key}={value}", environ=ENOUGH)
    assert status == 2
    assert (error["code"], error["where"]) == ("config.invalid_value", key)
    assert f"--set {key}" in error["message"]
    assert allowed in error["suggestion"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sink.bootstrap_servers", "nohost"),  # at librdkafka's port, 9092
        ("sink.bootstrap_servers", "SASL_SSL://a:9093, [::1]:9092"),
        ("spark.master", "local[4]"),
        ("spark.master", "local-cluster[2,1,512]"),
        ("spark.master", "spark://a:7077,b:7077"),
        ("spark.master", "spark://[::1]:7077"),
        ("spark.master", "local[2,4]"),
        ("spark.properties.spark.app.name", "orders"),
        ("spark.properties.spark.security.credentials.hive.enabled", "false"),
        ("spark.master", "k8s://https://10.0.0.1:6443"),
        ("spark.master", "yarn"),
        ("state.location", "./shared"),
        ("state.location", "file:///shared"),
        ("state.location", "s3://bucket/shared"),
        ("state.location", "abfss://c@a.dfs.core.windows.net/p"),
        ("spark.properties.spark.app.color", "blue"),
        ("store.password_file", ""),
        ("store.time_zone", "+05:45"),
        ("spark.properties.spark.submit.deployMode", "client"),
    ],
)
def test_what_works_is_taken(capfd: pytest.CaptureFixture[str], key: str, value: str) -> None:
    assert check(capfd, "--set", f"{key}={value}", environ=ENOUGH) == (0, {})


@pytest.mark.parametrize(
    ("key", "value", "code", "said"),
    [
        ("spark.properties.spark.master", "yarn", "config.contradiction", "keys that replace it"),
        ("spark.properties.spark.task.maxFailures", "4", "config.contradiction", "does not use it"),
        ("spark.properties.spark.speculation", "true", "config.contradiction", "must be false"),
        (
            "spark.properties.spark.submit.deployMode",
            "cluster",
            "config.contradiction",
            "must be client",
        ),
        ("sink.properties.linger.ms", "abc", "config.sink_property", "linger.ms"),
        ("sink.properties.linger.ms", "-1", "config.sink_property", "allowed range 0..900000"),
        ("sink.properties.compression.type", "zip", "config.sink_property", '"zip"'),
        ("sink.properties.message.timeout.ms", "abc", "config.sink_property", "not a number"),
        ("sink.properties.delivery.timeout.ms", "", "config.sink_property", "not a number"),
        ("sink.properties.security.protocol", "ssll", "config.sink_property", "ssll"),
        (
            "spark.properties.sprak.executor.memory",
            "1g",
            "config.contradiction",
            "begin with spark.",
        ),
        ("sink.properties.stats_cb", "x", "config.contradiction", "does not use it"),
    ],
)
def test_a_property_that_cannot_work_is_named_as_the_user_wrote_it(
    capfd: pytest.CaptureFixture[str], key: str, value: str, code: str, said: str
) -> None:
    status, error = check(capfd, "--set", f"{key}={value}", environ=ENOUGH)
    assert (status, error["code"], error["where"]) == (2, code, key)
    assert said in error["message"]
    assert "queue.buffering" not in error["message"]


def test_a_property_of_tls_is_named_where_its_file_is_not_there(
    capfd: pytest.CaptureFixture[str],
) -> None:
    key = "sink.properties.ssl.ca.location"
    given = ("--set", "sink.properties.security.protocol=ssl", "--set", f"{key}=/nope")
    status, error = check(capfd, *given, environ=ENOUGH)
    assert (status, error["code"], error["where"]) == (2, "config.sink_property", key)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("store.url", ("store.url=mysql+pymysql://u@h/d?ssl_ca=/nope.pem",)),
    ],
)
def test_a_file_that_is_not_there_is_named(
    capfd: pytest.CaptureFixture[str], key: str, given: tuple[str, ...]
) -> None:
    sets = [word for text in given for word in ("--set", text)]
    status, error = check(capfd, *sets, environ=ENOUGH)
    assert (status, error["code"], error["where"]) == (2, "config.file_unreadable", key)
    assert "/nope.pem cannot be read: No such file" in error["message"]


def test_a_login_without_a_mechanism_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    given = ("--set", "sink.properties.security.protocol=SASL_SSL")
    status, error = check(capfd, *given, environ=ENOUGH)
    assert (status, error["code"]) == (2, "config.sink_property")
    assert error["where"] == "sink.properties.sasl.mechanism"
    assert "SCRAM-SHA-512" in error["suggestion"]


@pytest.mark.parametrize("text", ["[1", '["a"'])
def test_a_list_on_the_command_line_is_json_or_named_with_how_to_write_it(
    capfd: pytest.CaptureFixture[str], text: str
) -> None:
    key = "store.columns.aggregate_id"
    status, error = check(capfd, "--set", f"{key}={text}", environ=ENOUGH)
    assert (status, error["code"], error["where"]) == (2, "config.invalid_value", key)
    assert '["aggregate_type", "aggregate_id"]' in error["suggestion"]
    assert check(capfd, "--set", f'{key}=["a", "b"]', environ=ENOUGH) == (0, {})


def test_a_token_provider_that_is_not_there_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    mechanism = ("--set", "sink.properties.sasl.mechanism=OAUTHBEARER")
    status, error = check(
        capfd, *mechanism, "--set", "sink.token_provider=no.such:function", environ=ENOUGH
    )
    assert (status, error["code"]) == (2, "config.token_provider")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("?charset=foo", "MySQL does not know"),
        ("?chraset=utf8mb4", "known are connect_timeout"),
        ("?connect_timeout=" + "9" * 5000, "not a number of seconds"),
        ("?ssl_verify_cert=perhaps", "true or false"),
    ],
)
def test_options_of_the_url_are_checked(
    capfd: pytest.CaptureFixture[str], options: str, said: str
) -> None:
    url = ENOUGH["EVENTPUB_STORE__URL"] + options
    status, error = check(capfd, environ=ENOUGH | {"EVENTPUB_STORE__URL": url})
    assert (status, error["code"], error["where"]) == (2, "config.store_url", "store.url")
    assert said in error["message"]


SECRET = "hunter2-hunter2"
TEXTS = (
    "", " ", "-1", "0", "9" * 30, "9" * 5000, "1e999", "nan", "true", "null", "[", "[1]", "[[1]]",
    "[" * 100_000, "{}", '{"a": {"b": [1]}}', "\n", "ü", "\ud800", "-5s", "9" * 400 + "d", "+99:99",
    "0001-01-01T00:00:00+10:00", "2026-01-31T09:30:00+99:99", "://", "//[", "a:b@c:d", "%00", "a=b",
    "/", "/nonexistent/x", ".", "local[", f"mysql+pymysql://u:{SECRET}@h:x/d",
    f"mysql+pymysql://u@h/d?ssl_key_password={SECRET}&x=1", "mysql+pymysql://u@h/d?ssl_ca=%00",
    "mysql+pymysql://%00:%ff@h%00/%00?ssl_ca=%ff", "mysql+pymysql://u@[::1]:1/d?", "mysql+pymysql://u@[/d",
)  # fmt: skip
IN_A_FILE = (
    *(json.dumps(text) for text in TEXTS if len(text) < 9000 and "\ud800" not in text),
    "-1", "0", "9" * 30, "9" * 5000, "1.5", "nan", "inf", "true", "[]", "[1]", "[[]]", "{}",
    "{a = 1}", "{a.b = [1]}", "1979-05-27", "07:32:00", "1979-05-27T07:32:00",
    "9999-12-31T23:59:59-10:00",
    "[" * 2000 + "]" * 2000,
)  # fmt: skip


def unexpected(code: str) -> bool:
    return code.startswith("internal.") or code == "cli.usage"


@pytest.mark.parametrize("key", KEYS)
def test_no_text_in_the_environment_is_unexpected(
    capfd: pytest.CaptureFixture[str], key: str
) -> None:
    for text in TEXTS:
        if "\0" in text or (
            len(text) > 90_000 and not key.endswith(("properties", "_ids", "sources"))
        ):
            continue  # no environment holds it
        environ = ENOUGH | {variable_of(key): text.encode("utf-8", "replace").decode()}
        status, error = check(capfd, environ=environ)
        assert status in {0, 2}, (text[:50], error)
        assert status == 0 or not unexpected(error["code"]), (text[:50], error)
        assert status == 0 or key in str(error) or error["where"] == key, error
        assert status == 0 or error["code"] == "config.password_file" or error["suggestion"], error


@pytest.mark.parametrize("key", KEYS)
def test_no_value_in_a_file_is_unexpected(capfd: pytest.CaptureFixture[str], key: str) -> None:
    section, _, name = key.rpartition(".")
    environ = {n: v for n, v in ENOUGH.items() if n != variable_of(key)}
    for value in IN_A_FILE:
        Path("eventpub.toml").write_text(f"[{section}]\n{name} = {value}\n")
        status, error = check(capfd, environ=environ)
        assert status in {0, 2}, (value[:50], error)
        assert status == 0 or not unexpected(error["code"]), (value[:50], error)
        is_file = error.get("code") == "config.file_invalid"
        assert status == 0 or key in str(error) or is_file or error["code"] == "config.store_url"


LIBRDKAFKA = """
    acks allow.auto.create.topics api.version.fallback.ms api.version.request
    api.version.request.timeout.ms auto.commit.interval.ms auto.offset.reset batch.num.messages
    batch.size bootstrap.servers broker.address.family broker.address.ttl
    broker.version.fallback check.crcs client.dns.lookup client.rack compression.codec
    compression.level compression.type connections.max.idle.ms coordinator.query.interval.ms
    debug delivery.timeout.ms enable.auto.commit enable.auto.offset.store enable.idempotence
    enable.metrics.push enable.partition.eof enable.sasl.oauthbearer.unsecure.jwt
    enable.sparse.connections enable.ssl.certificate.verification fetch.error.backoff.ms
    fetch.max.bytes fetch.message.max.bytes fetch.min.bytes fetch.queue.backoff.ms
    fetch.wait.max.ms group.id group.instance.id group.protocol group.remote.assignor
    heartbeat.interval.ms https.ca.location https.ca.pem isolation.level linger.ms
    log.connection.close log.thread.name max.in.flight max.in.flight.requests.per.connection
    max.partition.fetch.bytes max.poll.interval.ms message.copy.max.bytes message.max.bytes
    message.send.max.retries message.timeout.ms metadata.max.age.ms
    metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy
    metadata.request.timeout.ms partition.assignment.strategy partitioner
    queue.buffering.backpressure.threshold queue.buffering.max.kbytes
    queue.buffering.max.messages queue.buffering.max.ms queued.max.messages.kbytes
    queued.min.messages receive.message.max.bytes reconnect.backoff.jitter.ms
    reconnect.backoff.max.ms reconnect.backoff.ms request.required.acks request.timeout.ms
    retries retry.backoff.max.ms retry.backoff.ms sasl.kerberos.keytab sasl.kerberos.kinit.cmd
    sasl.kerberos.min.time.before.relogin sasl.kerberos.principal sasl.kerberos.service.name
    sasl.mechanism sasl.mechanisms sasl.oauthbearer.assertion.algorithm
    sasl.oauthbearer.assertion.claim.aud sasl.oauthbearer.assertion.claim.exp.seconds
    sasl.oauthbearer.assertion.claim.iss sasl.oauthbearer.assertion.claim.jti.include
    sasl.oauthbearer.assertion.claim.nbf.seconds sasl.oauthbearer.assertion.claim.sub
    sasl.oauthbearer.assertion.file sasl.oauthbearer.assertion.jwt.template.file
    sasl.oauthbearer.assertion.private.key.file
    sasl.oauthbearer.assertion.private.key.passphrase sasl.oauthbearer.assertion.private.key.pem
    sasl.oauthbearer.client.credentials.client.id
    sasl.oauthbearer.client.credentials.client.secret sasl.oauthbearer.client.id
    sasl.oauthbearer.client.secret sasl.oauthbearer.config sasl.oauthbearer.extensions
    sasl.oauthbearer.grant.type sasl.oauthbearer.metadata.authentication.type
    sasl.oauthbearer.method sasl.oauthbearer.scope sasl.oauthbearer.sub.claim.name
    sasl.oauthbearer.token.endpoint.url sasl.password sasl.username security.protocol
    session.timeout.ms socket.connection.setup.timeout.ms socket.keepalive.enable
    socket.nagle.disable socket.receive.buffer.bytes socket.send.buffer.bytes socket.timeout.ms
    ssl.ca.certificate.stores ssl.ca.location ssl.ca.pem ssl.certificate.location
    ssl.certificate.pem ssl.cipher.suites ssl.crl.location ssl.curves.list
    ssl.endpoint.identification.algorithm ssl.engine.id ssl.engine.location ssl.key.location
    ssl.key.password ssl.key.pem ssl.keystore.location ssl.keystore.password ssl.providers
    ssl.sigalgs.list statistics.interval.ms sticky.partitioning.linger.ms
    topic.metadata.propagation.max.ms topic.metadata.refresh.fast.interval.ms
    topic.metadata.refresh.interval.ms topic.metadata.refresh.sparse transaction.timeout.ms
    transactional.id
"""
"""Names of librdkafka's properties."""


@pytest.mark.parametrize("name", LIBRDKAFKA.split())
def test_no_property_is_unexpected(capfd: pytest.CaptureFixture[str], name: str) -> None:
    for text in ("", "-1", "9" * 30, "abc", "true"):
        status, error = check(capfd, "--set", f"sink.properties.{name}={text}", environ=ENOUGH)
        assert status in {0, 2}, (text, error)
        assert status == 0 or not unexpected(error["code"]), (text, error)
        assert status == 0 or "sink.properties" in error["where"], (text, error)


SECRETS = [
    '[store]\npassword = {}\n',
    '[store]\nurl = {}\n',
    '[ops]\ntoken = {}\n',
    '[sink.properties]\n"sasl.password" = {}\n"linger.ms" = "abc"\n',
    '[sink.properties.sasl]\npassword = {}\nkerberos = []\n',
    '[spark.properties]\n"spark.ssl.keyPassword" = {}\n"spark.master" = "x"\n',
]  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
@pytest.mark.parametrize("value", ['"{}"', "['{}']", "{{a = '{}'}}", "{}", "{}.5", '"\\u0000{}"'])
def test_no_secret_of_a_wrong_type_is_shown(
    capfd: pytest.CaptureFixture[str], text: str, value: str
) -> None:
    secret = "73917391739173917391"
    Path("eventpub.toml").write_text(text.replace("{}", value.format(secret)))
    for arguments in (["config", "check"], ["config", "show"], ["config", "check", "--json"]):
        with pytest.MonkeyPatch.context() as patch:
            for name, given_value in ENOUGH.items():
                if "url" not in text or name != "EVENTPUB_STORE__URL":
                    patch.setenv(name, given_value)
            assert main(arguments) in {0, 2}
        out, err = capfd.readouterr()
        assert secret not in out + err
        assert "Traceback" not in err


@hypothesis_settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    key=st.sampled_from(sorted(KEYS)),
    value=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40),
)
@example(key="read.start", value="1970-01-01T00:00:00+24:00")
def test_no_text_at_all_is_unexpected(
    capfd: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    status, error = check(capfd, environ=ENOUGH | {variable_of(key): value})
    assert status in {0, 2}, error
    assert status == 0 or not unexpected(error["code"]), error
