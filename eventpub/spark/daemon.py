"""`spark.python.daemon.module`: the parent of Spark's Python workers imports once what all need.

With `pyspark.daemon` each worker takes 0.7 CPU s for that.
"""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> None:
    for module in (sys.argv[1], "eventpub.spark.task", "eventpub.spark.sink_task"):
        import_module(module)
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
