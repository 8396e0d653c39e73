"""What is measured: each server on a free port of 127.0.0.1, with its files in one temporary folder."""

import glob
import http.client
import json
import os
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time

LOAD = os.environ["LOAD"]
RECEIVER = os.environ["RECEIVER"]
SERVICE = os.path.abspath(os.environ["SERVICE"])
HERE = os.path.dirname(os.path.abspath(__file__))

# What one would give a Postgres that has the machine to itself for the most part; what is on by default and matters
# here (fsync, synchronous_commit, full_page_writes) is said so that it can be read. A checkpoint in the middle of a
# measurement would hit one system and not the next: there is one before each instead.
POSTGRES_SETTINGS = [
    "shared_buffers=1GB",
    "max_wal_size=8GB",
    "checkpoint_timeout=1h",
    "max_connections=200",
    "fsync=on",
    "synchronous_commit=on",
    "full_page_writes=on",
]

GATE_TABLES = "processed_orders, run_ledger, run_history, run_outbox"
PLAIN_TABLE = """CREATE TABLE processed_orders (idempotency_key TEXT PRIMARY KEY, order_id TEXT NOT NULL,
    processed_at TIMESTAMPTZ NOT NULL DEFAULT now())"""

# The raw statement. pgbench has no random text: the key is made of four numbers of sixteen hex digits.
PGBENCH_SCRIPT = "".join(
    f"\\set {name} random(1152921504606846976, 9223372036854775807)\n" for name in "abcd"
) + """\\set n random(1000000000, 9999999999)
INSERT INTO processed_orders (idempotency_key, order_id)
VALUES (to_hex(:a::bigint) || to_hex(:b::bigint) || to_hex(:c::bigint) || to_hex(:d::bigint), 'ORD-' || :n::bigint)
ON CONFLICT (idempotency_key) DO NOTHING RETURNING idempotency_key;
"""

IS_ROOT = os.geteuid() == 0


def as_postgres(command):
    """Postgres refuses to run as root."""
    if not IS_ROOT:
        return command
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", "--", *command]


def ends_with_us(command, by="KILL"):
    """Ends with this process, even where that is killed."""
    return ["setpriv", f"--pdeathsig={by}", "--", *command]


def output(command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    if done.returncode != 0:
        raise RuntimeError(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def eventually(what, is_so, process):
    deadline = time.monotonic() + 30
    while not is_so():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{what} does not start; its log: {process.log}\n{open(process.log).read()}")
        time.sleep(0.02)


def answers(port, path="/health/ready"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def cpu_seconds(process):
    """What a process and its children have used so far, those included that have ended."""

    def times(pid, fields):
        try:
            with open(f"/proc/{pid}/stat") as file:
                # The name, in brackets, may hold spaces.
                values = file.read().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return 0
        return sum(int(values[field]) for field in fields)

    ticks = times(process.pid, (11, 12, 13, 14))
    for path in glob.glob(f"/proc/{process.pid}/task/*/children"):
        with open(path) as file:
            ticks += sum(times(child, (11, 12)) for child in file.read().split())
    return ticks / os.sysconf("SC_CLK_TCK")


def memory(process, field="VmRSS"):
    """Resident memory in MiB; at its highest with VmHWM."""
    with open(f"/proc/{process.pid}/status") as file:
        line = next(line for line in file if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024


class Stage:
    """All that was started, and its folder."""

    def __init__(self):
        # /tmp is memory on many machines, and there a flush costs nothing.
        self.folder = tempfile.mkdtemp(prefix="dedup-gate-bench.", dir=os.environ.get("TMPDIR", "/var/tmp"))
        os.chmod(self.folder, 0o711)
        kind = output(["stat", "--file-system", "--format=%T", self.folder])
        if kind in ("tmpfs", "ramfs"):
            self.stop()
            raise SystemExit(f"{self.folder} is on {kind}, where nothing is flushed: set TMPDIR to a folder on a disk")
        self.processes = []
        self.names = 0

    def path(self, name):
        self.names += 1
        return os.path.join(self.folder, f"{self.names}-{name}")

    def start(self, name, command, ends_by=signal.SIGTERM, **options):
        log = self.path(name + ".log")
        with open(log, "w") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **options)
        process.log = log
        process.ends_by = ends_by
        self.processes.append(process)
        return process

    def end(self, process):
        self.processes.remove(process)
        process.send_signal(process.ends_by)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self):
        for process in reversed(getattr(self, "processes", [])[:]):
            self.end(process)
        shutil.rmtree(self.folder, ignore_errors=True)


class Postgres:
    def __init__(self, stage):
        found = glob.glob("/usr/lib/postgresql/*/bin/initdb")
        newest = max(found, key=lambda path: int(path.split("/")[4]), default=None)
        self.programs = os.path.dirname(newest) if newest else output(["pg_config", "--bindir"])
        self.stage = stage
        self.port = free_port()
        self.data = stage.path("postgres")
        os.mkdir(self.data)
        if IS_ROOT:
            shutil.chown(self.data, "postgres", "postgres")
        output(as_postgres([f"{self.programs}/initdb", "--pgdata", self.data, "--username=postgres", "--auth=trust",
                            "--encoding=UTF8", "--no-locale"]), cwd="/")
        settings = ["listen_addresses=127.0.0.1", f"port={self.port}", "unix_socket_directories=", *POSTGRES_SETTINGS]
        arguments = [argument for setting in settings for argument in ("-c", setting)]
        command = as_postgres(ends_with_us([f"{self.programs}/postgres", "-D", self.data, *arguments], "INT"))
        # Its children end with it by themselves.
        self.process = stage.start("postgres", command, signal.SIGINT, cwd="/")
        eventually("Postgres", lambda: listens(self.port) and self.is_up(), self.process)

    def is_up(self):
        ready = [f"{self.programs}/pg_isready", "--quiet", "--host=127.0.0.1", f"--port={self.port}"]
        return subprocess.run(ready).returncode == 0

    def url(self, database):
        return f"postgres://postgres@127.0.0.1:{self.port}/{database}"

    def sql(self, database, *statements):
        commands = [argument for statement in statements for argument in ("-c", statement)]
        return output(["psql", "-XqAt", "-v", "ON_ERROR_STOP=1", self.url(database), *commands])

    def create(self, database):
        self.sql("postgres", f"CREATE DATABASE {database}")
        return self.url(database)

    def position(self):
        """How much was written to the log so far, in bytes."""
        return int(self.sql("postgres", "SELECT pg_current_wal_insert_lsn() - '0/0'"))


class Gate:
    """dedup-gate, as it comes; several processes of it are replicas."""

    protocol = "claim"

    def __init__(self, stage, database_url, replicas=1, settings=None):
        self.stage = stage
        self.url = database_url
        self.replicas = replicas
        self.settings = settings or {}
        self.start()

    def start(self):
        self.service, self.ports = [], []
        for _ in range(self.replicas):
            port = free_port()
            # Nothing else is inherited, so that it runs with its defaults.
            environment = {"PATH": os.environ["PATH"], "DATABASE_URL": self.url, "LISTEN": f"127.0.0.1:{port}",
                           **self.settings}
            process = self.stage.start("dedup-gate", ends_with_us([SERVICE]), env=environment)
            eventually("dedup-gate", lambda: answers(port), process)
            self.service.append(process)
            self.ports.append(port)

    def end(self):
        for process in self.service:
            self.stage.end(process)
        self.service = []


class GateOnPostgres(Gate):
    def __init__(self, stage, postgres, database, replicas=1, settings=None):
        self.postgres, self.database, self.store = postgres, database, [postgres.process]
        super().__init__(stage, postgres.url(database), replicas, settings)

    def sql(self, *statements):
        return self.postgres.sql(self.database, *statements)

    def reset(self):
        self.sql(f"TRUNCATE {GATE_TABLES}", "CHECKPOINT")

    def keys(self):
        return int(self.postgres.sql(self.database, "SELECT count(*) FROM processed_orders"))


class GateOnSqlite(Gate):
    store = ()

    def __init__(self, stage, name="gate", settings=None):
        self.file = stage.path(f"{name}.db")
        super().__init__(stage, f"sqlite:{self.file}", settings=settings)

    def sql(self, *statements):
        with sqlite3.connect(self.file, timeout=30) as connection:
            for statement in statements:
                row = connection.execute(statement).fetchone()
        connection.close()
        return row[0] if row else None

    def reset(self):
        self.end()
        for file in glob.glob(self.file + "*"):
            os.remove(file)
        self.start()

    def keys(self):
        with sqlite3.connect(self.file) as connection:
            return connection.execute("SELECT count(*) FROM processed_orders").fetchone()[0]


class Receiver:
    """Takes every webhook."""

    def __init__(self, *options):
        self.process = subprocess.Popen(ends_with_us([RECEIVER, *options]), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)
        self.routes = {"OUTBOX_ROUTES": f"*=http://127.0.0.1:{int(self.said(10))}/"}

    def said(self, seconds):
        """Its next line."""
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise RuntimeError(f"the receiver has had nothing to say for {seconds} s")
        return self.process.stdout.readline()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class NodePg:
    """See node-pg.mjs."""

    protocol = "claim"

    def __init__(self, stage, postgres, database):
        self.postgres, self.database, self.store = postgres, database, [postgres.process]
        self.ports = [free_port()]
        postgres.sql(database, PLAIN_TABLE)
        command = ["node", f"{HERE}/node-pg.mjs", str(self.ports[0]), postgres.url(database)]
        self.service = [stage.start("node", ends_with_us(command))]
        eventually("node-pg.mjs", lambda: listens(self.ports[0]), self.service[0])

    def reset(self):
        self.postgres.sql(self.database, "TRUNCATE processed_orders", "CHECKPOINT")

    keys = GateOnPostgres.keys


class Webdis:
    """Redis, and Webdis before it."""

    protocol = "webdis"

    def __init__(self, stage, appendfsync=None):
        folder = stage.path("redis")
        os.mkdir(folder)
        self.port = free_port()
        durable = ["--appendonly", "yes", "--appendfsync", appendfsync] if appendfsync else ["--appendonly", "no"]
        # No snapshots, and no rewriting of the log in the middle of a measurement.
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--dir", folder, "--save", "",
                   "--auto-aof-rewrite-percentage", "0", *durable]
        redis = stage.start("redis", ends_with_us(command))
        eventually("Redis", lambda: listens(self.port), redis)
        self.ports = [free_port()]
        settings = {"redis_host": "127.0.0.1", "redis_port": self.port, "http_host": "127.0.0.1",
                    "http_port": self.ports[0], "threads": 2, "daemonize": False, "database": 0, "verbosity": 0,
                    "logfile": os.path.join(folder, "webdis.log")}
        config = os.path.join(folder, "webdis.json")
        with open(config, "w") as file:
            json.dump(settings, file)
        webdis = stage.start("webdis", ends_with_us(["webdis", config]), cwd=folder)
        eventually("Webdis", lambda: answers(self.ports[0], "/PING"), webdis)
        self.service, self.store = [webdis], [redis]
        self.is_durable = appendfsync is not None

    def redis(self, *command):
        return output(["redis-cli", "-h", "127.0.0.1", "-p", str(self.port), *command])

    def reset(self):
        self.redis("FLUSHALL", "SYNC")
        if self.is_durable:
            # Its log begins anew, or all rounds together would fill the disk.
            self.redis("BGREWRITEAOF")
            while "aof_rewrite_in_progress:1" in self.redis("INFO", "persistence"):
                time.sleep(0.05)

    def keys(self):
        return int(self.redis("DBSIZE"))


class Pgbench:
    """The raw statement, without HTTP."""

    def __init__(self, stage, postgres, database):
        self.postgres, self.database, self.store = postgres, database, [postgres.process]
        self.service = []
        self.log = stage.path("pgbench")
        self.script = stage.path("raw.sql")
        postgres.sql(database, PLAIN_TABLE)
        with open(self.script, "w") as file:
            file.write(PGBENCH_SCRIPT)

    reset = NodePg.reset
    keys = GateOnPostgres.keys

    def run(self, clients, seconds):
        for old in glob.glob(self.log + ".*"):
            os.remove(old)
        # Every latency is too much to write where there are many clients.
        command = [f"{self.postgres.programs}/pgbench", "--no-vacuum", "--protocol=prepared", f"--file={self.script}",
                   f"--client={clients}", f"--jobs={min(clients, os.cpu_count())}", f"--time={seconds}", "--log",
                   f"--log-prefix={self.log}", f"--sampling-rate={1 if clients == 1 else 0.1}",
                   "--host=127.0.0.1", f"--port={self.postgres.port}", "--username=postgres", self.database]
        text = output(ends_with_us(command), timeout=seconds + 60)
        # What its backends have used is read when they have ended, not while they do.
        time.sleep(0.3)

        def after(words):
            return text.split(words)[1].split()[0]

        latencies = []
        for name in glob.glob(self.log + ".*"):
            with open(name) as file:
                latencies += [int(line.split()[2]) for line in file]
        latencies.sort()
        at = lambda share: latencies[min(int(len(latencies) * share), len(latencies) - 1)] / 1000
        count = int(after("transactions actually processed: "))
        return {"requests": count, "sent": count, "seconds": seconds, "per_second": float(after("tps = ")),
                "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": latencies[-1] / 1000, "errors": 0}
