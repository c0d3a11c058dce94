"""Named places where a test can stop a process in order to kill it.

``EVENTPUB_FAILPOINT=name:hit:file``: the `hit`-th time a process passes `name`, it writes its
process id to `file` and stops until it is killed or ``<file>.go`` exists. If `file` exists already,
the failpoint is off, so a restarted publisher passes. Several, separated by commas, are used in
order.

| name | the process is |
|---|---|
| `during_fold` | a shard that has read back a part of its topics |
| `after_baseline` | where rows were counted as published that the topic has lost |
| `before_begin`, `after_begin` | at a shard's transaction |
| `during_produce`, `after_produce` | where half of a batch, all of it was given to the client |
| `before_commit`, `after_commit` | where all of it was delivered, is visible |
| `before_index`, `after_index` | at the index's write of published events |
| `before_report` | in a shard with unreported work |
| `before_remember`, `after_remember` | in the coordinator, at the write of the position |
| `after_plan` | Spark's driver, where a batch is planned that is in no log |
| `before_step`, `during_step` | a task of the source, before its first rows, after some |
| `before_journal`, `after_journal` | where a batch is decided, and the index without it |
| `before_replay` | a task whose batch has a journal |
| `before_snapshot`, `during_snapshot` | where none, all of an index's files are uploaded |
| `after_snapshot` | where they are a snapshot |
| `during_fetch` | where a snapshot was downloaded into no index yet |
| `during_prune` | the driver, where files of old snapshots are gone, and these are not |
| `after_take` | a task of the sink that owns its transactional id |
| `before_marker`, `after_marker` | where all rows, and the batch's marker, were delivered |
| `before_settle`, `after_settle` | the driver, where all tasks have published |
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

_SPEC = os.environ.get("EVENTPUB_FAILPOINT")
_hits: Counter[str] = Counter()


def failpoint(name: str) -> None:
    if _SPEC is None:
        return
    specs = (spec.split(":", 2) for spec in _SPEC.split(","))
    wanted, hit, file = next((s for s in specs if not Path(s[2]).exists()), ("", "", ""))
    if name != wanted:
        return
    _hits[file] += 1
    if _hits[file] < int(hit):
        return
    partial = Path(f"{file}.{os.getpid()}")
    partial.write_text(str(os.getpid()))
    try:
        os.link(partial, file)  # two shards may arrive at once: only one of them stops
    except FileExistsError:
        return
    while not Path(f"{file}.go").exists():
        time.sleep(0.05)
