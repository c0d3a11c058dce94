"""Named places where a test may stop a process for good, to kill it there.

Off unless ``EVENTPUB_FAILPOINT=name:hit:file`` is in the environment: the `hit`-th time that a
process passes `name`, it writes its process id to `file` and waits to be killed, or until there is
a file of that name with ``.go`` added. Where `file` exists already, the failpoint is off, so that a
restarted publisher passes. Of several, with commas between, each is on when those before were used.

| name | the process is |
|---|---|
| `during_fold` | in a shard that has read a part of its topics back |
| `after_baseline` | where rows were counted as published that the topic has lost |
| `before_begin`, `after_begin` | at a shard's transaction |
| `during_produce`, `after_produce` | where half of a batch, all of it was given to the client |
| `before_commit`, `after_commit` | where all of it was delivered, is visible |
| `before_index`, `after_index` | at the index's write of what was published |
| `before_report` | in a shard that has done something and not reported it |
| `before_remember`, `after_remember` | in the coordinator, at the write of the position |
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

_SPEC = os.environ.get("EVENTPUB_FAILPOINT")
_hits: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Stop here, if this place is the one."""
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
        os.link(partial, file)  # two shards may come here at the same moment: one of them stops
    except FileExistsError:
        return
    while not Path(f"{file}.go").exists():
        time.sleep(0.05)
