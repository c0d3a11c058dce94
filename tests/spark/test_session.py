"""The session that the publisher's tasks run in."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from eventpub.config import App, Config, Run, Sink, Store
from eventpub.spark.session import Session


def test_a_spark_that_has_stopped_itself_is_not_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its master is gone, or somebody has ended the application: the JVM goes on, and
    refuses every job. It counted as alive, and nobody published any more.

    Nor does it start a second task of a shard where a cluster's defaults let it.
    """
    (tmp_path / "spark-defaults.conf").write_text("spark.speculation true\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    config = Config(
        app=App(id="stopped", state_dir=tmp_path),
        store=Store.model_validate({"url": "mysql+pymysql://nobody@localhost/none"}),
        sink=Sink(topic="none"),
        run=Run(shards=1),
    )
    found: list[bool] = []
    speculates: list[str] = []

    def live() -> None:
        with Session(config, tmp_path / "spark.log") as session:
            found.append(session.is_alive())
            jvm: Any = session.context._jsc
            speculates.append(jvm.sc().conf().get("spark.speculation", "unset"))
            jvm.sc().stop()
            found.append(session.is_alive())

    thread = threading.Thread(target=live)  # as the publisher's; see `Session`
    thread.start()
    thread.join(120.0)
    assert found == [True, False]
    assert speculates == ["false"]
