"""The archive of Spark's classes: whose it is, and when it must be made again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from eventpub.spark import jvm, warm_up


@pytest.fixture
def jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment's jars; archives are files of a word."""
    folder = tmp_path / "one" / "jars"
    folder.mkdir(parents=True)
    monkeypatch.setenv("EVENTPUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jvm, "_jars", lambda: folder)
    monkeypatch.setattr(jvm, "find_java", lambda: shutil.which("true"))
    monkeypatch.setattr(warm_up, "run_a_little", lambda file: file.write_text("made"))
    return folder


def touched(folder: Path, seconds: float) -> None:
    """Changed so long before now."""
    now = folder.stat().st_mtime
    os.utime(folder, (now - seconds, now - seconds))


def test_an_archive_is_kept_until_the_jars_are_newer(jars: Path) -> None:
    touched(jars, 60)
    made = jvm.make_archive()
    assert jvm.has_archive(made)
    made.write_text("kept")
    assert jvm.make_archive() == made
    assert made.read_text() == "kept"

    touched(jars, -120)
    assert not jvm.has_archive(made)
    assert jvm.make_archive() == made
    assert made.read_text() == "made"


def test_each_environment_has_its_own_and_leaves_none_behind(
    jars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched(jars, 60)
    first = jvm.make_archive()
    other = tmp_path / "two" / "jars"
    other.mkdir(parents=True)
    touched(other, 60)
    monkeypatch.setattr(jvm, "_jars", lambda: other)
    second = jvm.make_archive()
    assert first != second
    assert first.exists()

    shutil.rmtree(jars)
    third = tmp_path / "three" / "jars"
    third.mkdir(parents=True)
    touched(third, 60)
    monkeypatch.setattr(jvm, "_jars", lambda: third)
    jvm.make_archive()
    assert not first.exists()
    assert second.exists()
    assert len(list(first.parent.iterdir())) == 4
