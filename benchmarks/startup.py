"""Time to ready with a cold and a warm kernel cache, and memory when ready.

    python -m benchmarks.startup [--workers N] [--warm N] [--json OUT]

Each start is a real one: `python -m app` from its first line of Python to the first 200 from /readyz. Cold means an
empty kernel cache; the warm starts that follow use the cache left by the cold one. Memory is read a second later.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Start:
    """One start: seconds to ready and to a clean stop, and MiB held by the server process and by all others.

    RSS counts a page once for every process that maps it; PSS divides it among them, so PSS may be added up.
    """

    ready_s: float
    stop_s: float
    exit_code: int
    server_rss_mib: float
    workers_rss_mib: list[float]
    total_pss_mib: float


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_ready(port: int) -> bool:
    """Return whether /readyz answers that the service is ready."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def descendants(pid: int) -> list[int]:
    """Return all processes below `pid`."""
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        children += [int(word) for word in task.read_text(encoding="ascii").split()]
    return children + [below for child in children for below in descendants(child)]


def memory_mib(pid: int, kind: str) -> float:
    """Return Rss or Pss of a process in MiB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith(kind + ":"):
            return int(line.split()[1]) / 1024
    return 0.0


def held_mib(server: int) -> float:
    """Return the memory of a service's processes in MiB: shared pages once, tensor memory whether mapped or not."""
    total = 0.0
    for pid in (server, *descendants(server)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += memory_mib(pid, "Pss_Anon") + memory_mib(pid, "Pss_File")
    files = dict[int, float]()  # by inode: a mapping has its own descriptor
    for entry in Path(f"/proc/{server}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if entry.readlink().name.startswith("memfd:convgrad"):
                status = entry.stat()
                files[status.st_ino] = status.st_blocks / 2048
    return total + sum(files.values())


def start(cache: Path, workers: int, limit_s: float) -> Start:
    """Start the service with `cache` as its kernel cache, measure it, and stop it with SIGTERM."""
    port = free_port()
    env = os.environ | {
        "NUMBA_CACHE_DIR": str(cache),
        "CONVGRAD_PORT": str(port),
        "CONVGRAD_WORKERS": str(workers),
    }
    with tempfile.TemporaryFile("w+") as log:
        begin = time.perf_counter()
        server = subprocess.Popen([sys.executable, "-m", "app"], cwd=ROOT, env=env, stdout=log, stderr=log)
        try:
            while not is_ready(port):
                if server.poll() is not None or time.perf_counter() - begin > limit_s:
                    log.seek(0)
                    raise SystemExit(f"the service did not become ready:\n{log.read()[-4000:]}")
                time.sleep(0.01)
            ready_s = time.perf_counter() - begin
            time.sleep(1.0)  # the first worker makes the service ready; the others follow
            others = descendants(server.pid)
            server_rss, others_rss = memory_mib(server.pid, "Rss"), [memory_mib(p, "Rss") for p in others]
            pss = sum(memory_mib(p, "Pss") for p in [server.pid, *others])
            begin = time.perf_counter()
            server.send_signal(signal.SIGTERM)
            code = server.wait(timeout=60)
            return Start(ready_s, time.perf_counter() - begin, code, server_rss, others_rss, pss)
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()


def main() -> None:
    """Measure one cold and several warm starts and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=0, help="worker processes; 0: one per processor")
    parser.add_argument("--warm", type=int, default=5, help="warm starts (default 5)")
    parser.add_argument("--limit", type=float, default=600, help="seconds to wait for one start (default 600)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        cold = start(cache, arguments.workers, arguments.limit)
        compiled = sum(1 for _ in cache.rglob("*.nbc"))
        size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
        warm = [start(cache, arguments.workers, arguments.limit) for _ in range(arguments.warm)]

    note = f"{compiled} specialisations compiled, {size >> 10} KiB"
    print(f"cold start to ready     {cold.ready_s:7.2f} s   ({note})")
    if warm:
        times = sorted(each.ready_s for each in warm)
        note = f"median of {len(times)}, {times[0]:.2f} to {times[-1]:.2f}"
        print(f"warm start to ready     {statistics.median(times):7.2f} s   ({note})")
    last = warm[-1] if warm else cold
    rss = ", ".join(f"{each:.0f}" for each in last.workers_rss_mib)
    print(f"resident when ready     {last.server_rss_mib:7.0f} MiB server; other processes {rss} MiB")
    print(f"shared pages once (PSS) {last.total_pss_mib:7.0f} MiB in all")
    print(f"SIGTERM to exit         {last.stop_s:7.2f} s   (exit code {last.exit_code})")
    if arguments.json:
        result = {
            "compiled": compiled,
            "cache_bytes": size,
            "cold": asdict(cold),
            "warm": [asdict(w) for w in warm],
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
