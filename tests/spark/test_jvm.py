"""How the JVM is started: what others on the machine can see of it, and when it is not wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventpub.errors import StateError
from eventpub.spark.jvm import Jvm

_SECRET = 'top secret "x" \\ = ü 😀'

_JAVA = """#!/bin/sh
[ "$1" = -version ] && exit 0
printf '%s\\n' "$@" >{folder}/arguments
for argument in "$@"; do
  case "$argument" in @*) cp "${{argument#@}}" {folder}/options ;; esac
  [ "$before" = --properties-file ] && cp "$argument" {folder}/properties
  before=$argument
done
[ -n "$TEST_WAITS" ] && exec sleep 60
exit 1
"""


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A java that keeps what it was given, and ends."""
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text(_JAVA.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    return program


def test_secrets_of_spark_properties_are_not_in_the_process_list(
    java: Path, tmp_path: Path
) -> None:
    properties = {
        "spark.driver.memory": "1g",
        "spark.hadoop.fs.s3a.secret.key": _SECRET,
        "spark.driver.extraJavaOptions": '-Dpassword=hidden-one -Dquoted="x\\y"',
    }
    with pytest.raises(StateError) as error:
        Jvm(properties, tmp_path / "spark.log")
    assert error.value.code == "spark.start_failed"
    arguments = (tmp_path / "arguments").read_text()
    assert "org.apache.spark.deploy.SparkSubmit" in arguments
    assert "secret" not in arguments
    assert "hidden-one" not in arguments
    options = (tmp_path / "options").read_text()
    assert options.splitlines() == ['"-Dpassword=hidden-one"', '"-Dquoted=\\"x\\\\y\\""']
    kept = (tmp_path / "properties").read_text()
    assert kept.isascii()
    read = dict(line.split("=", 1) for line in kept.splitlines())
    decoded = {_decoded(k): _decoded(v) for k, v in read.items()}
    assert decoded == properties


_SCRIPT = """#!/bin/sh
printf '%s\\n' "$@" >{folder}/arguments
env >{folder}/environment
cp "$2" {folder}/properties
cp "$(dirname "$2")/java.options" {folder}/options
ls -ld "$(dirname "$2")" >{folder}/rights
exit 1
"""


def test_nor_are_they_on_a_cluster_nor_is_the_configuration_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyspark passed each to Spark's script as an argument."""
    script = tmp_path / "bin" / "spark-submit"
    script.parent.mkdir()
    script.write_text(_SCRIPT.format(folder=tmp_path))
    script.chmod(0o755)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--jars 'a b.jar' pyspark-shell")
    monkeypatch.setenv("EVENTPUB_STORE__PASSWORD", "hidden-two")
    monkeypatch.setenv("EVENTPUB_TEST_KEPT", "kept")
    properties = {
        "spark.master": "spark://somewhere:7077",
        "spark.hadoop.fs.s3a.secret.key": _SECRET,
        "spark.driver.extraJavaOptions": "-Dpassword=hidden-one -Da=b",
    }
    scratch = tmp_path / "state" / "spark"
    with pytest.raises(StateError) as error:
        Jvm(properties, tmp_path / "spark.log", scratch=scratch, by_script=True)
    assert error.value.code == "spark.start_failed"
    name, settings, *others = (tmp_path / "arguments").read_text().splitlines()
    assert name == "--properties-file"
    assert Path(settings).is_relative_to(scratch)
    assert others == ["--load-spark-defaults", "--jars", "a b.jar", "pyspark-shell"]
    assert (tmp_path / "rights").read_text().startswith("drwx------")
    assert list(scratch.iterdir()) == [], "nothing is left"
    kept = dict(line.split("=", 1) for line in (tmp_path / "properties").read_text().splitlines())
    decoded = {_decoded(k): _decoded(v) for k, v in kept.items()}
    options = f'"@{Path(settings).with_name("java.options")}"'
    assert decoded == properties | {"spark.driver.extraJavaOptions": options}
    assert (tmp_path / "options").read_text().splitlines() == ['"-Dpassword=hidden-one"', '"-Da=b"']
    environment = (tmp_path / "environment").read_text()
    assert "hidden-two" not in environment
    assert "EVENTPUB_TEST_KEPT=kept" in environment


def _decoded(text: str) -> str:
    plain = text.encode("ascii").decode("unicode_escape")
    return plain.encode("utf-16", "surrogatepass").decode("utf-16")


def test_a_jvm_that_nobody_wants_any_more_is_not_waited_for(
    java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_WAITS", "1")
    with pytest.raises(StateError) as error:
        Jvm({"spark.driver.memory": "1g"}, tmp_path / "spark.log", stops=lambda: True)
    assert error.value.code == "run.stopping"
