"""The machine, and what runs on it: figures mean nothing without."""

import os
import platform
import statistics
import subprocess
import sys
import time


def said_by(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def field(path, name):
    with open(path) as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith(name)), "")


def about(seconds, rounds):
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"  something else is at work on this machine (load average {load:.1f}): expect odd figures",
              file=sys.stderr)
    # Not every part needs all of them.
    word = lambda text, index: "".join(text.split()[index:index + 1])
    versions = {
        "Postgres": word(said_by("psql", "--version"), 2),
        "Redis": word(said_by("redis-server", "--version"), 2),
        "Webdis": said_by("dpkg-query", "--show", "--showformat=${Version}", "webdis"),
        "Node.js": said_by("node", "--version").removeprefix("v"),
        "Rust": word(said_by("rustc", "--version"), 1),
    }
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": said_by("git", "describe", "--always", "--dirty"),
        "seconds": seconds,
        "rounds": rounds,
        "cpu": field("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory_gib": round(int(field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "load_before": load,
        "versions": {name: version.removeprefix("v=") for name, version in versions.items() if version},
    }


def disk(folder):
    """What the folder is on, and how long a flush takes there: each durable claim waits for at least one, alone or
    with others."""
    times = []
    file = os.open(os.path.join(folder, "flush"), os.O_CREAT | os.O_WRONLY)
    for _ in range(200):
        os.pwrite(file, os.urandom(8192), 0)
        began = time.perf_counter()
        os.fdatasync(file)
        times.append(time.perf_counter() - began)
    os.close(file)
    return {
        "filesystem": said_by("findmnt", "--noheadings", "--output=FSTYPE", "--target", folder),
        "flush_ms": round(statistics.median(times) * 1000, 3),
    }
