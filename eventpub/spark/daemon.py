"""The parent of Spark's Python workers on this machine, which imports once what all of them need.

`pyspark.daemon` imports nothing of that before it forks, so that each of the four workers of two
shards takes 0.7 CPU s for it; set as `spark.python.daemon.module`.
"""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> None:
    """As `pyspark.daemon`, with the module of the workers as the argument."""
    for module in (sys.argv[1], "eventpub.spark.task", "eventpub.spark.sink_task"):
        import_module(module)
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
