"""`spark.python.daemon.module`: imports once in the parent, saving 0.7 CPU s per Python worker."""

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
