"""The shared location, journals and snapshots of a query, on a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from eventpub.channel import Report
from eventpub.errors import StateError
from eventpub.index import Facts, Index
from eventpub.spark import journal as journal_of_spark
from eventpub.spark.journal import (
    KEYS,
    Journal,
    Journals,
    Snapshots,
    _digest_of,
    prune,
    remove_unused,
)
from eventpub.spark.place import Place


def journal(shard: int, **changes: bytes) -> Journal:
    """One without rows that changes an index."""
    given = {name.encode(): value for name, value in changes.items()}
    return Journal(Report(shard, position=7), KEYS.empty_table(), given)


class TestPlace:
    def test_an_object_is_created_once(self, tmp_path: Path) -> None:
        place = Place(str(tmp_path / "place"))
        assert place.create("a/b", b"1")
        assert not place.create("a/b", b"2")
        assert (place.read("a/b"), place.read("a/c")) == (b"1", None)
        assert place.read("a/b", 100) == b"1"
        assert list(place.names("a")) == ["a/b"]
        place.delete("a/b", "a/c")
        assert list(place.names("a")) == []
        place.require_exclusive("a")

    def test_one_that_creates_an_object_twice_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Place, "create", lambda *_: True)
        with pytest.raises(StateError) as refused:
            Place(str(tmp_path)).require_exclusive("q")
        assert refused.value.code == "state.not_exclusive"

    def test_one_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises((StateError, OSError)):
            Place(str(tmp_path / "file" / "below")).create("a", b"")


class TestJournals:
    def test_the_first_of_two_attempts_decides(self, tmp_path: Path) -> None:
        journals = Journals(Place(str(tmp_path)), "q")
        assert journals.create(1, 0, journal(0, v=b"1"))
        assert not journals.create(1, 0, journal(0, v=b"2"))
        found = journals.read(1, 0)
        assert found is not None
        assert found.changes == {b"v": b"1"}
        assert found.report.position == 7
        assert journals.head(1, 1) is None
        assert journals.newest() == 1

    def test_the_changes_of_batches_that_an_index_lacks(self, tmp_path: Path) -> None:
        journals = Journals(Place(str(tmp_path)), "q")
        for batch in (1, 2, 3):
            made = journal(0, v=str(batch).encode())
            named = replace(made.report, journal=f"j{batch}", follows=f"j{batch - 1}")
            journals.create(batch, 0, replace(made, report=named))
        known = Facts(batch=1, journal="j1")
        assert [c[b"v"] for c in journals.changes(0, known, 3)] == [b"2", b"3"]
        for lacks in (replace(known, journal="of another history"), known):
            with pytest.raises(StateError) as missing:
                list(journals.changes(0, lacks, 3))
            assert missing.value.code == "state.journal_missing"
            journals.prune({0: 2})

    def test_a_head_may_be_longer_than_what_is_read_at_first(self, tmp_path: Path) -> None:
        journals = Journals(Place(str(tmp_path)), "q")
        report = Report(0, buckets={n: n for n in range(50_000)})
        assert journals.create(1, 0, Journal(report, KEYS.empty_table(), {b"k": b"v"}))
        head, whole = journals.head(1, 0), journals.read(1, 0)
        assert head is not None
        assert whole is not None
        assert head["report"] == whole.report == report
        assert head["digest"] == whole.digest

    def test_one_that_is_cut_off_anywhere_is_named(self, tmp_path: Path) -> None:
        """Arrow takes a cut between two messages for the end of its stream."""
        journals, place = Journals(Place(str(tmp_path)), "q"), Place(str(tmp_path))
        rows = pa.table({f.name: pa.nulls(2, f.type) for f in KEYS}, schema=KEYS)
        assert journals.create(1, 0, Journal(Report(0), rows, {b"k": b"v"}))
        whole = place.read(journals._name(1, 0))
        assert whole is not None
        read = journals.read(1, 0)
        assert read is not None
        assert read.keys.num_rows == 2
        for size in range(
            0, len(whole) - 8, 8
        ):  # Arrow aligns; the last 8 say that nothing follows
            place.delete(journals._name(1, 0))
            assert place.create(journals._name(1, 0), whole[:size])
            with pytest.raises(StateError) as damaged:
                journals.read(1, 0)
            assert damaged.value.code == "state.journal_damaged"

    def test_the_oldest_events_of_batches_without_those_that_are_damaged(
        self, tmp_path: Path
    ) -> None:
        """A new checkpoint asks for them, which may be there since one is damaged."""
        journals, place = Journals(Place(str(tmp_path)), "q"), Place(str(tmp_path))
        for batch, oldest in ((1, 10), (2, 7), (3, None)):
            report = Report(0, oldest=oldest)
            assert journals.create(batch, 0, Journal(report, KEYS.empty_table(), {}))
        assert place.create(journals._name(4, 0), b"")
        assert journals.oldest(0, 1) == [10, 7]
        assert journals.oldest(1, 2) == [7]

    @pytest.mark.parametrize("data", [b"", b"1234567", b"\x05" + bytes(7) + b"nojso", b"x" * 100])
    def test_one_that_cannot_be_read_is_named(self, tmp_path: Path, data: bytes) -> None:
        place = Place(str(tmp_path))
        place.create(f"q/journal/{1:012d}/0", data)
        with pytest.raises(StateError) as damaged:
            Journals(place, "q").head(1, 0)
        assert damaged.value.code == "state.journal_damaged"


def test_first_bytes_are_those_of_an_object_however_short(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    for size in (0, 3, 8, 20 << 20):
        place.create(f"q/{size}", bytes(size))
        assert place.read(f"q/{size}", 8) == bytes(min(8, size))
        assert place.read(f"q/{size}") == bytes(size)
    assert place.read("q/none", 8) is None


def test_an_index_is_fetched_from_the_newest_snapshot_that_is_not_too_new(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "place"))
    snapshots, journals = Snapshots(place, "q", 0), Journals(place, "q")
    for batch in (1, 2, 3, 4):
        with Index(tmp_path / "index", {}, redo=lambda _: ()) as index:
            if batch == 1:
                index.begin(None)
            assert journals.create(batch, 0, journal(0))
            index.end_batch(batch, "")
            index.flush()
            uploading = snapshots.begin(index, batch)
            assert uploading is not None
            uploading.join()
    assert snapshots.fetch(tmp_path / "new", 3) == 3
    seen: list[int | None] = []

    def redo(known: Facts) -> tuple[()]:
        seen.append(known.batch)
        return ()

    with Index(tmp_path / "new", {}, redo=redo) as index:
        assert not index.is_new
    assert seen == [3]
    prune(place, "q", committed=4, shards=1)
    assert snapshots.fetch(tmp_path / "old", 2) is None
    assert snapshots.fetch(tmp_path / "newest", 4) == 4
    assert journals.head(3, 0) is None
    assert journals.head(4, 0) is not None


def test_a_snapshot_that_a_power_failure_has_cut_is_not_used(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "place"))
    snapshots = Snapshots(place, "q", 0)
    folder = tmp_path / "index"
    folder.mkdir()
    for batch in (1, 2):
        (folder / "1.sst").write_text("of both")
        (folder / f"{batch + 1}.sst").write_text(f"since {batch}")
        snapshots.keep(folder, batch)
    [cut] = {*place.names("q/file/0")} - {
        *json.loads(place.read(f"q/snapshot/0/{1:012d}.json") or b"").values()
    }
    (tmp_path / "place" / cut).write_bytes(b"")
    assert snapshots.fetch(tmp_path / "new", 2) == 1
    snapshots.keep(folder, 3)
    assert snapshots.fetch(tmp_path / "newest", 3) == 3, "it is uploaded again"


def test_of_two_tasks_that_fetch_an_index_the_second_uses_that_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a union of the source with itself; it failed, with a wrong reason, for good."""
    snapshots = Snapshots(Place(str(tmp_path / "place")), "q", 0)
    for name in ("index", "of the first"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.sst").write_text(name)
    snapshots.keep(tmp_path / "index", 1)

    def overtaken(name: str) -> None:
        if name == "during_fetch":
            (tmp_path / "of the first").rename(tmp_path / "new")

    monkeypatch.setattr(journal_of_spark, "failpoint", overtaken)
    assert snapshots.fetch(tmp_path / "new", 1) == 1
    assert (tmp_path / "new" / "1.sst").read_text() == "of the first"


def test_what_a_killed_prune_leaves_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(str(tmp_path / "place"))
    for batch in range(1, 7):
        folder = tmp_path / f"index-{batch}"
        folder.mkdir()
        for number in range(30):
            (folder / f"{number}.sst").write_text(f"{batch} {number}")
        Snapshots(place, "q", 0).keep(folder, batch)
        if batch == 4:
            with monkeypatch.context() as patched:
                patched.setattr(journal_of_spark, "failpoint", _killed)
                with pytest.raises(InterruptedError):
                    prune(place, "q", committed=4, shards=1)
    prune(place, "q", committed=6, shards=1)
    assert len(list(place.names("q/snapshot/0"))) == 2
    assert len(list(place.names("q/file/0"))) == 60


def test_files_of_others_beside_journals_and_snapshots_are_left_alone(tmp_path: Path) -> None:
    """Starts ended with a ValueError, and nothing was pruned any more."""
    place, folder = Place(str(tmp_path / "place")), tmp_path / "index"
    folder.mkdir()
    (folder / "1.sst").write_text("")
    journals, snapshots = Journals(place, "q"), Snapshots(place, "q", 0)
    for batch in range(1, 6):
        assert journals.create(batch, 0, journal(0))
        snapshots.keep(folder, batch)
    strangers = {f"q/{below}/.DS_Store" for below in ("journal", "snapshot", "snapshot/0")}
    strangers.add(f"q/journal/{1:012d}/0 (conflicted copy)")
    for name in strangers:
        place.create(name, b"\0\0\0\1Bud1")
    assert (journals.newest(), journals.oldest(0, 1)) == (5, [])
    assert snapshots.fetch(tmp_path / "new", 9) == 5
    (tmp_path / "place" / f"q/snapshot/0/{5:012d}.json").write_text("")  # a power failure
    prune(place, "q", committed=5, shards=1)
    kept = {f"q/snapshot/0/{n:012d}.json" for n in (3, 4)}
    kept |= {f"q/journal/{n:012d}/0" for n in (4, 5)}
    assert {*place.names("q/journal"), *place.names("q/snapshot")} == kept | strangers


def test_files_of_a_killed_upload_are_removed_once_they_are_old(tmp_path: Path) -> None:
    """No list names them, and that of a copy half written, `…#1`, is not even listed."""
    place, folder = Place(str(tmp_path / "place")), tmp_path / "index"
    folder.mkdir()
    (folder / "1.sst").write_text("in use")
    Snapshots(place, "q", 0).keep(folder, 1)
    [used] = place.names("q/file/0")
    for name in ("old", "old#1", "young", "young#1"):
        (tmp_path / "place" / "q" / "file" / "0" / name).write_text("")
    old = time.time() - 7 * 3600
    for name in (used, "q/file/0/old", "q/file/0/old#1"):
        os.utime(tmp_path / "place" / name, (old, old))
    prune(place, "q", committed=1, shards=1)
    found = {file.name for file in (tmp_path / "place" / "q" / "file" / "0").iterdir()}
    assert found == {Path(used).name, "young", "young#1"}


def test_a_snapshot_has_files_that_are_pruned_while_it_is_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found one left by a killed upload, another of a snapshot that is removed meanwhile."""
    place, folder = Place(str(tmp_path / "place")), tmp_path / "index"
    folder.mkdir()
    snapshots = Snapshots(place, "q", 0)
    (folder / "1.sst").write_text("of the first")
    snapshots.keep(folder, 1)
    (folder / "2.sst").write_text("of a killed upload")
    upload = Place.upload
    with monkeypatch.context() as patched:
        upload(place, left := f"q/file/0/{_digest_of(folder / '2.sst')}", folder / "2.sst")
        old = time.time() - 7 * 3600
        os.utime(tmp_path / "place" / left, (old, old))
        (folder / "3.sst").write_text("its own")

        def pruned_meanwhile(place: Place, name: str, file: Path) -> None:
            if file.name == "3.sst":
                other = tmp_path / "of another executor"
                other.mkdir()
                for batch in (2, 3):
                    (other / "1.sst").write_text(f"{batch}")
                    snapshots.keep(other, batch)
                prune(place, "q", committed=3, shards=1)
            upload(place, name, file)

        patched.setattr(Place, "upload", pruned_meanwhile)
        snapshots.keep(folder, 4)
    assert snapshots.fetch(tmp_path / "new", 4) == 4


def test_an_index_is_not_uploaded_again_while_it_still_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy and thread would make all of them slower, until the disk is full."""
    snapshots, released = Snapshots(Place(str(tmp_path / "place")), "q", 0), threading.Event()
    with Index(tmp_path / "0", {}, redo=lambda _: ()) as index, monkeypatch.context() as patched:
        index.begin(None)
        index.end_batch(1, "")
        index.flush()
        patched.setattr(journal_of_spark, "failpoint", lambda _: released.wait(60))
        slow = snapshots.begin(index, 1)
        assert slow is not None
        assert snapshots.begin(index, 2) is None
        assert len([*tmp_path.glob("0.copy-*")]) == 1
        released.set()
        slow.join()
        again = snapshots.begin(index, 3)
        assert again is not None
        again.join()
    assert snapshots.fetch(tmp_path / "new", 9) == 3


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_an_index_is_uploaded_where_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """An attempt of each such batch failed, and there was no snapshot."""

    def refused(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    snapshots = Snapshots(Place(str(tmp_path / "place")), "q", 0)
    with Index(tmp_path / "0", {}, redo=lambda _: ()) as index:
        index.begin(None)
        index.end_batch(1, "")
        index.flush()
        uploading = snapshots.begin(index, 1)
        assert uploading is not None
        uploading.join()
    assert snapshots.fetch(tmp_path / "new", 1) == 1


def test_the_indexes_of_the_query_in_use_are_never_removed(tmp_path: Path) -> None:
    """After three quiet days one shard, whose index was gone, took those of the others away."""
    for query in ("in use", "former"):
        (tmp_path / query / "0").mkdir(parents=True)
    old = time.time() - 4 * 86_400
    for path in tmp_path.rglob("*"):
        os.utime(path, (old, old))
    remove_unused(tmp_path / "in use")
    assert [path.name for path in tmp_path.iterdir()] == ["in use"]
    assert (tmp_path / "in use" / "0").exists()


def _killed(step: str) -> None:
    raise InterruptedError(step)
