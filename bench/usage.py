"""CPU time and memory of groups of processes, those that come and go included.

Sampled twice a second from /proc: what a process used after its last sample is not known, so a
process that lives for less than that is missed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Self

import numpy as np
import psutil

EVERY = 0.5
"""Seconds between two samples."""

Group = Callable[[], Mapping[str, list[psutil.Process]]]
"""Finds the processes by the name of their group, each time anew."""


class Usage:
    """Measures while it is entered.

    Attributes:
        peak_memory: the largest sum by group, in bytes; pages that processes share count once (PSS)
            where the system tells.
        peak_rss: the same with shared pages counted for each process: what one process needs on a
            machine of its own.
        others: CPU seconds that the rest of the machine used, this process included, and what a
            hypervisor took away: what disturbed the measurement.
    """

    def __init__(self, *groups: Group) -> None:
        self._groups = groups
        self._last: dict[tuple[int, float], float] = {}
        self._total: dict[str, float] = {}
        self._series: list[tuple[float, dict[str, float]]] = []
        self.peak_memory: dict[str, int] = {}
        self.peak_rss: dict[str, int] = {}
        self.others = 0.0
        self._busy_before = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._busy_before = _busy()
        self._sample(new=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._sample(new=True)
        self.others = max(0.0, _busy() - self._busy_before - sum(self._total.values()))

    @property
    def cpu(self) -> dict[str, float]:
        """Seconds of user and system time since the beginning, by group."""
        return {group: round(seconds, 2) for group, seconds in self._total.items()}

    def cpu_between(self, first: float, last: float) -> dict[str, float]:
        """The same for a part of the time (Unix, s), interpolated between samples."""
        times = [t for t, _ in self._series]
        found = {}
        for group in self._total:
            values = [total.get(group, 0.0) for _, total in self._series]
            low, high = np.interp([first, last], times, values)
            found[group] = round(float(high - low), 2)
        return found

    def _watch(self) -> None:
        while not self._done.wait(EVERY):
            self._sample(new=True)

    def _sample(self, *, new: bool) -> None:
        memory: dict[str, int] = {}
        resident: dict[str, int] = {}
        for find in self._groups:
            for group, processes in find().items():
                for process in processes:
                    try:
                        times = process.cpu_times()
                        key = (process.pid, process.create_time())
                        proportional, rss = _memory(process)
                        memory[group] = memory.get(group, 0) + proportional
                        resident[group] = resident.get(group, 0) + rss
                    except psutil.Error:
                        continue
                    seconds = times.user + times.system
                    used = seconds - self._last.get(key, 0.0) if new else 0.0
                    self._last[key] = seconds
                    self._total[group] = self._total.get(group, 0.0) + used
        self._series.append((time.time(), dict(self._total)))
        for group, size in memory.items():
            self.peak_memory[group] = max(self.peak_memory.get(group, 0), size)
        for group, size in resident.items():
            self.peak_rss[group] = max(self.peak_rss.get(group, 0), size)


def _busy() -> float:
    """CPU seconds that all cores were not idle."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # in user already
    return float(sum(times) - idle - guests)


def _memory(process: psutil.Process) -> tuple[int, int]:
    """PSS and RSS."""
    full = process.memory_full_info()
    return getattr(full, "pss", 0) or full.rss, full.rss


def one(group: str, pid: int) -> Group:
    """A group of one process and its children."""

    def find() -> dict[str, list[psutil.Process]]:
        try:
            process = psutil.Process(pid)
            return {group: [process, *process.children(recursive=True)]}
        except psutil.NoSuchProcess:
            return {}

    return find


def publisher(pid: int) -> Group:
    """The publisher's processes: its driver, Spark's JVM, and the Python workers."""

    def find() -> dict[str, list[psutil.Process]]:
        groups: dict[str, list[psutil.Process]] = {"driver": [], "jvm": [], "workers": []}
        try:
            driver = psutil.Process(pid)
            groups["driver"].append(driver)
            for process in driver.children(recursive=True):
                try:
                    name = process.name()
                except psutil.Error:
                    continue
                groups["jvm" if name.startswith("java") else "workers"].append(process)
        except psutil.NoSuchProcess:
            pass
        return groups

    return find
