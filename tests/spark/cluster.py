"""A standalone cluster of Spark on this machine: a master, and two workers that see no folder of
each other's but those that are shared.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pyspark

HOME = Path(pyspark.__file__).parent
_ROLE = "org.apache.spark.deploy"
_EXECUTOR = "CoarseGrainedExecutorBackend"


class Cluster:
    """See the module.

    Attributes:
        master: its address, spark://….
    """

    def __init__(self, master: str, workers: Sequence[subprocess.Popen[bytes]]) -> None:
        self.master = master
        self._workers = workers

    def executors(self) -> list[psutil.Process]:
        """The processes of executors."""
        found = []
        for worker in self._workers:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(worker.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):  # or a zombie
                        if _EXECUTOR in " ".join(child.cmdline()):
                            found.append(child)
        return found

    def kill_one(self, chance: random.Random) -> bool:
        """Kill an executor with its Python workers; whether there was one."""
        for executor in chance.sample(found := self.executors(), len(found)):
            with suppress(psutil.NoSuchProcess):
                for process in [executor, *executor.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGKILL)
                return True
        return False

    def lose_one(self) -> None:
        """Kill a worker that has an executor, with all that its machine runs."""
        worker = next(each for each in self._workers if psutil.Process(each.pid).children())
        machine = psutil.Process(worker.pid)
        for process in [*machine.children(recursive=True), machine]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


@contextmanager
def cluster(folder: Path, private: Sequence[Path]) -> Iterator[Cluster]:
    """Two workers of one core each.

    Args:
        folder: for logs and work.
        private: folders of which each worker has its own, in memory.
    """
    environment = {
        **os.environ,
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    for each in private:
        each.mkdir(parents=True, exist_ok=True)
    mounts = " && ".join(f"mount -t tmpfs private {each}" for each in private)

    def start(name: str, *arguments: str, is_private: bool = False) -> subprocess.Popen[bytes]:
        command = [str(HOME / "bin" / "spark-class"), *arguments]
        if is_private:
            command = ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh", *command]
        log = stack.enter_context((folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        stack.callback(lambda: _end(process))
        return process

    with ExitStack() as stack:
        port = _free_port()
        address = f"spark://127.0.0.1:{port}"
        common = ("--host", "127.0.0.1", "--webui-port", "0")
        start("master", f"{_ROLE}.master.Master", *common, "--port", str(port))
        _wait_for(port)
        workers = [
            start(
                f"worker{number}",
                f"{_ROLE}.worker.Worker",
                *common,
                *("--cores", "1", "--memory", "700m", "--work-dir", str(folder / f"work{number}")),
                address,
                is_private=bool(private),
            )
            for number in range(2)
        ]
        yield Cluster(address, workers)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise RuntimeError("Spark's master does not answer")
