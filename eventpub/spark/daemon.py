"""The process that Spark forks its Python workers from, with what they need already imported.

Spark's own daemon imports nothing before it forks, so each worker of a starting publisher spends
1.4 s of CPU on imports; ten of them made up two thirds of the CPU time until the first event. It
does so because a library may start threads when it is imported, which a fork would lose. Of those
that are imported here NumPy's BLAS does, unless it is set to use one thread, and Arrow does, which
takes care of forks itself. Whatever else starts a thread is a defect, and is said.
"""

from __future__ import annotations

import gc
import os
import sys
import threading

# Spark puts its zipped Python sources first on the path; a zip's modules are compiled anew by every
# process, those of the installed package are not.
_ZIP = f"{os.sep}pyspark.zip"
sys.path = [entry for entry in sys.path if not entry.endswith(_ZIP)]
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pyspark import daemon  # noqa: E402

import eventpub.spark.leases  # noqa: E402

_ = eventpub.spark.leases


def main() -> None:
    """Serve Spark's requests for workers."""
    if threading.active_count() > 1:
        print("eventpub: a library started a thread before a fork", file=sys.stderr)
    for module in ("pyspark.worker", sys.argv[1] if len(sys.argv) > 1 else ""):
        if module:
            __import__(module)
    gc.freeze()  # what is imported lives as long as the process
    daemon.manager()


if __name__ == "__main__":
    main()
