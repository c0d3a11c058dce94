"""What the doctor says about this machine, and what it makes of a service that is away."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from eventpub.config import Config
from eventpub.errors import Check, SinkError, StoreError
from eventpub.ops import doctor


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(
        {
            "app": {"id": "orders", "state_dir": tmp_path / "state"},
            "store": {"url": "mysql+pymysql://reader@127.0.0.1:1/shop"},
            "sink": {"topic": "orders.events", "bootstrap_servers": "127.0.0.1:1"},
        }
    )


def test_a_state_directory_that_can_be_made_is_fine(tmp_path: Path) -> None:
    check = doctor.state_dir(tmp_path / "a" / "b")
    assert check.status == "ok"
    assert not (tmp_path / "a").exists()


def test_a_file_in_the_place_of_the_state_directory_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    check = doctor.state_dir(tmp_path / "state" / "deeper")
    assert (check.status, check.code) == ("wrong", "state.not_writable")


@pytest.mark.parametrize(("free", "status"), [(10 << 20, "wrong"), (500 << 20, "warn")])
def test_little_disk_space_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": free}))
    check = doctor.state_dir(tmp_path)
    assert (check.status, check.code) == (status, "state.disk_full")


def java(folder: Path, says: str) -> dict[str, str]:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    return {"JAVA_HOME": str(folder)}


@pytest.mark.parametrize(
    ("says", "status", "code"),
    [
        ('openjdk version "17.0.9" 2023-10-17', "ok", None),
        ('openjdk version "21" 2023-09-19', "ok", None),
        ('java version "1.8.0_391"', "wrong", "spark.java_too_old"),
        ("Segmentation fault", "wrong", "spark.java_missing"),
    ],
)
def test_javas_version_is_read(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    status: str,
    code: str | None,
) -> None:
    monkeypatch.setenv("JAVA_HOME", java(tmp_path, says)["JAVA_HOME"])
    [check] = doctor._guarded(("Java", lambda: doctor._spark(config)))
    assert (check.name, check.status, check.code) == ("Java", status, code)


def test_a_missing_java_is_wrong(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    [check] = doctor._guarded(("Java", lambda: doctor._spark(config)))
    assert check.code == "spark.java_missing"
    assert check.suggestion


def test_without_spark_no_java_is_needed(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    def of_engine(engine: str) -> list[tuple[str, str]]:
        run = config.run.model_copy(update={"engine": engine})
        changed = config.model_copy(update={"run": run})
        checks = doctor._guarded(("Java", lambda: doctor._spark(changed)))
        return [(check.name, check.status) for check in checks]

    assert of_engine("threads") == [("Java", "ok")]
    assert ("Java", "wrong") in of_engine("spark")


def test_a_location_of_the_state_that_cannot_be_used_is_wrong(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()

    def at(location: object, engine: str = "spark") -> list[tuple[str, str | None]]:
        run = config.run.model_copy(update={"engine": engine})
        state = config.state.model_copy(update={"location": str(location)})
        changed = config.model_copy(update={"run": run, "state": state})
        checks = doctor._guarded(("state.location", lambda: doctor._location(changed)))
        return [(check.status, check.code) for check in checks]

    assert at(tmp_path / "folder") == [("ok", None)]
    assert at(tmp_path / "none") == at("") == at("s3://bucket/eventpub", "threads") == []
    assert not (tmp_path / "none").exists()
    unusable = [("wrong", "state.unreachable")]
    assert at(tmp_path / "file") == at("s3://bucket/eventpub") == unusable


def test_one_service_that_is_away_does_not_hide_the_others(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: Any) -> list[Check]:
        raise StoreError("store.unreachable", "away", where="127.0.0.1:1", suggestion="start it")

    def fine(_: Any) -> list[Check]:
        return [Check("topic", "ok", "8 partitions")]

    monkeypatch.setattr(doctor, "_store", away)
    monkeypatch.setattr(doctor, "_sink", fine)
    checks = doctor.examine(config)
    assert [c.name for c in checks][:2] == ["event store", "topic"]
    assert checks[0].status == "wrong"
    error = doctor.unreachable(checks)
    assert isinstance(error, StoreError)
    assert error.exit_status == 3


def test_what_is_wrong_but_reachable_is_no_outage() -> None:
    checks = [Check("index", "wrong", "missing", "ALTER TABLE …", "store.index_missing")]
    assert doctor.unreachable(checks) is None
    refused = Check("login", "wrong", "refused", None, "sink.auth_failed")
    assert isinstance(doctor.unreachable([*checks, refused]), SinkError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else_is_wrong() -> None:
    assert doctor.state_dir(Path("/root-only")).status == "wrong"
