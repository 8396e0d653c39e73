"""Measures; scripts/bench starts it and says how."""

import http.client
import json
import os
import resource
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import time

import machine
import report
from stage import LOAD, SERVICE, GateOnPostgres, GateOnSqlite, NodePg, Pgbench, Postgres, Receiver, Stage, Webdis
from stage import cpu_seconds, ends_with_us, memory, output

ARGUMENTS = sys.argv[1:]
QUICK = "--quick" in ARGUMENTS
SECONDS = int(os.environ.get("BENCH_SECONDS", 1 if QUICK else 5))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", 1 if QUICK else 5))
KEYS = [int(keys) for keys in os.environ.get("BENCH_KEYS", "0,100000" if QUICK else "0,1000000,10000000").split(",")]
WARM_UP = 0.5
OLD_KEYS = 20_000 if QUICK else 1_000_000
EFFECTS = 2_000 if QUICK else 20_000
LONE_EFFECTS = 20 if QUICK else 200
IDLE_SECONDS = 3 if QUICK else 30

IDLE = 10_000
STARTS = 21

# Kept-alive connections, and whether each request has one of its own instead.
WIDTHS = [(1, False), (16, False), (64, False), (256, False), (64, True)]

seed = 0


def width_name(connections, close):
    return f"{connections}, closed each time" if close else str(connections)


def load(system, *options):
    global seed
    seed += 1
    addresses = [f"127.0.0.1:{port}" for port in system.ports]
    return ends_with_us([LOAD, *addresses, f"--protocol={system.protocol}", f"--seed={seed}", *options])


def used_by(system):
    """CPU seconds so far."""
    return {"service": sum(map(cpu_seconds, system.service)), "store": sum(map(cpu_seconds, system.store))}


def measure(system, scenario="new", connections=64, close=False, warm_up=WARM_UP, reset=True):
    """One measurement. What it cost the CPU is told a request, by whose it was."""

    def used():
        ours = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used_by(system) | {"generator": ours.ru_utime + ours.ru_stime}

    if reset:
        system.reset()
    postgres = getattr(system, "postgres", None)
    keys = 0 if reset else system.keys()
    position = postgres.position() if postgres else 0
    before = used()
    if isinstance(system, Pgbench):
        result = system.run(connections, SECONDS)
    else:
        options = [f"--scenario={scenario}", f"--connections={connections}", f"--seconds={SECONDS}",
                   f"--warmup={warm_up}", *(["--close"] if close else [])]
        result = json.loads(output(load(system, *options), timeout=SECONDS + warm_up + 60))
    after = used()
    sent = result["sent"]
    result["cpu_us"] = {who: (after[who] - before[who]) / sent * 1e6 for who in after}
    if postgres:
        result["wal_bytes"] = (postgres.position() - position) / sent
    if scenario in ("new", "pending") and system.keys() - keys != sent:
        raise RuntimeError(f"{sent} keys were won, and {system.keys() - keys} are there")
    return result


def in_turns(cases, said=lambda result: f"{result['per_second']:>9,.0f}/s  p99 {result['p99_ms']:.2f} ms"):
    """Rounds in which each case has its turn, a different one first each time. A case: system's name, what it
    does, and how it is measured."""
    results = [{"system": system, "case": case, "rounds": []} for system, case, _ in cases]
    for round_ in range(ROUNDS):
        for turn in range(len(cases)):
            at = (turn + round_) % len(cases)
            result = cases[at][2]()
            results[at]["rounds"].append(result)
            name = f"{results[at]['system']}, {results[at]['case']}"
            print(f"  round {round_ + 1}/{ROUNDS}  {name:60} {said(result)}", file=sys.stderr)
    return results


def both_stores(stage, postgres):
    postgres.create("gate")
    return {report.ON_POSTGRES: GateOnPostgres(stage, postgres, "gate"), report.ON_SQLITE: GateOnSqlite(stage)}


def new(stage):
    """New keys, beside the peers."""
    postgres = Postgres(stage)
    postgres.create("node")
    postgres.create("raw")
    systems = both_stores(stage, postgres) | {
        report.REDIS_ALWAYS: Webdis(stage, "always"),
        report.REDIS_MEMORY: Webdis(stage),
        report.NODE: NodePg(stage, postgres, "node"),
    }
    pgbench = Pgbench(stage, postgres, "raw")
    cases = [
        (name, width_name(*width), lambda system=system, width=width: measure(system, "new", *width))
        for width in WIDTHS
        for name, system in systems.items()
    ]
    cases += [
        (report.PGBENCH, width_name(clients, False), lambda clients=clients: measure(pgbench, "new", clients))
        for clients in (1, 8, 16, 32)
    ]
    return in_turns(cases)


def scenarios(stage, names):
    systems = both_stores(stage, Postgres(stage))
    return in_turns([
        (name, scenario, lambda system=system, scenario=scenario: measure(system, scenario))
        for name, system in systems.items()
        for scenario in names
    ])


def duplicates(stage):
    """One hot key, and a tenth of repeats."""
    return scenarios(stage, ["new", "hot", "mix"])


def ledger(stage):
    """`pending: true`, and each then reported as done."""
    return scenarios(stage, ["new", "pending", "pending-done"])


def replicas(stage):
    """One and two on one Postgres."""
    postgres = Postgres(stage)
    cases = []
    for count in (1, 2):
        postgres.create(f"gate{count}")
        system = GateOnPostgres(stage, postgres, f"gate{count}", count)
        cases += [
            (f"{count} × dedup-gate", str(width), lambda system=system, width=width: measure(system, "new", width))
            for width in (64, 256)
        ]
    return in_turns(cases)


def fill(postgres, database, count):
    """As many keys as the service itself would have written."""
    print(f"  filling {database} with {count:,} keys", file=sys.stderr)
    began = time.monotonic()
    postgres.sql(
        database,
        "SET synchronous_commit = off",
        f"""INSERT INTO processed_orders (idempotency_key, order_id, processed_at, claimant)
            SELECT encode(sha256(('key ' || i)::bytea), 'hex'), 'ORD-' || lpad(i::text, 10, '0'),
                   now() - interval '1 second' * ({count} - i), lpad(i::text, 10, '0') || '@9f2c41d07be3:0:0'
            FROM generate_series(1, {count}) i""",
        "VACUUM ANALYZE processed_orders",
    )
    print(f"  took {time.monotonic() - began:.0f} s", file=sys.stderr)


def growth(stage):
    """Tables that hold keys already."""
    needed = 6 * 2**30 + sum(KEYS) * 1024
    if shutil.disk_usage(stage.folder).free < needed:
        raise SystemExit(f"growth needs {needed / 2**30:.0f} GiB in {stage.folder}: set BENCH_KEYS or TMPDIR")
    postgres = Postgres(stage)
    cases = []
    for keys in KEYS:
        database = f"keys_{keys}"
        postgres.create(database)
        system = GateOnPostgres(stage, postgres, database)
        if keys:
            fill(postgres, database, keys)
        # The first write to a page after a checkpoint logs all of it. Right behind one that is nearly every write to
        # a large table, so here there is none but this: the rounds together tell what it costs.
        cases.append((f"{keys:,} keys", "64", lambda system=system, keys=keys: measure(
            system, "new", 64, reset=keys == 0, warm_up=max(2, WARM_UP))))
    postgres.sql("postgres", "CHECKPOINT")
    return in_turns(cases)


TIME = {report.ON_POSTGRES: "TIMESTAMPTZ '2026-01-01'", report.ON_SQLITE: "'2026-01-01T00:00:00.000Z'"}


def put_old_keys(system, name):
    """Keys that have been over for long: half of them at the gate alone, half done, with a history."""
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {OLD_KEYS})"
    time = TIME[name]
    system.sql(
        f"""{numbers} INSERT INTO processed_orders (idempotency_key, order_id, processed_at, claimant, in_ledger)
            SELECT 'old ' || i, 'ORD-' || i, {time}, 'a', i % 2 = 0 FROM n""",
        f"""{numbers} INSERT INTO run_ledger (idempotency_key, order_id, status, attempt, claimant, processed_at,
                recognised_from, external_id, updated_at)
            SELECT 'old ' || i, 'ORD-' || i, 'done', 1, 'a', {time}, {time}, 'ch', {time} FROM n WHERE i % 2 = 0""",
        *(f"""{numbers} INSERT INTO run_history (idempotency_key, seq, at, event, attempt, claimant)
              SELECT 'old ' || i, {seq}, {time}, '{event}', 1, 'a' FROM n WHERE i % 2 = 0"""
          for seq, event in ((1, "pending"), (2, "done"))),
    )


def removal(stage):
    """Claims while keys that are over are removed, and while there are as many that stay."""
    postgres = Postgres(stage)
    cases = []
    for is_removed in (False, True):
        settings = {"RETENTION": "86400"} if is_removed else {}
        case = "removed" if is_removed else "kept"
        postgres.create(case)
        systems = {
            report.ON_POSTGRES: GateOnPostgres(stage, postgres, case, settings=settings),
            report.ON_SQLITE: GateOnSqlite(stage, case, settings=settings),
        }
        for name, system in systems.items():
            count = "SELECT count(*) FROM processed_orders WHERE idempotency_key {} 'old %'"
            left = lambda system=system: int(system.sql(count.format("LIKE")))
            system.keys = lambda system=system: int(system.sql(count.format("NOT LIKE")))

            system.end()
            put_old_keys(system, name)

            def once(system=system, left=left, is_removed=is_removed):
                # The removal begins at the start, and must be under way until the end.
                before = left()
                system.start()
                result = measure(system, reset=False)
                result["removed"] = before - left()
                system.end()
                if (result["removed"] > 0 and left() > 0) != is_removed:
                    raise RuntimeError(f"{result['removed']} old keys were removed, and {left()} are left")
                return result

            cases.append((name, case, once))
    postgres.sql("postgres", "CHECKPOINT")
    return in_turns(cases)


def put_effects(system, name, each):
    """Effects that are due, so many of each key."""
    system.sql(
        f"""WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {EFFECTS - 1})
            INSERT INTO run_outbox (idempotency_key, seq, id, topic, payload, status, created_at, due_at, next_at)
            SELECT 'key ' || (i / {each}), 1 + i % {each}, 'msg_' || i, 'mail', '{{"to":"ana@example.com","order":' || i || '}}',
                   'pending', {TIME[name]}, {TIME[name]}, {TIME[name]} FROM n"""
    )


def deliver(system, name, each):
    """How fast effects go out that are all due when the service starts."""
    system.settings = {}
    system.reset()
    system.end()
    put_effects(system, name, each)
    postgres = getattr(system, "postgres", None)
    position = postgres.position() if postgres else 0
    store = sum(map(cpu_seconds, system.store))
    with Receiver(f"--count={EFFECTS}") as receiver:
        system.settings = receiver.routes
        system.start()
        result = json.loads(receiver.said(120))
        used = used_by(system) | {"generator": cpu_seconds(receiver.process)}
    used["store"] -= store
    result["cpu_us"] = {who: seconds / EFFECTS * 1e6 for who, seconds in used.items()}
    if postgres:
        result["wal_bytes"] = (postgres.position() - position) / EFFECTS
    # What came last is settled before the end.
    system.end()
    left = int(system.sql("SELECT count(*) FROM run_outbox WHERE status <> 'delivered'"))
    if left or result["received"] != EFFECTS:
        raise RuntimeError(f"{left} of {EFFECTS} effects are not delivered, and {result['received']} were received")
    return result


def lone(system):
    """How long effects take that are stored one by one, from when the report is sent; and the report itself."""
    took, replied = [], []
    system.settings = {}
    system.reset()
    system.end()
    with Receiver("--each") as receiver:
        system.settings = receiver.routes
        system.start()
        clients = [http.client.HTTPConnection("127.0.0.1", port, timeout=10) for port in system.ports]

        def post(client, path, **body):
            client.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            reply = client.getresponse()
            text = reply.read()
            if reply.status != 200:
                raise RuntimeError(f"{path} was answered: {text}")

        for number in range(LONE_EFFECTS):
            client, key = clients[number % len(clients)], f"key {number}"
            post(client, "/ledger/pending", idempotency_key=key)
            time.sleep(0.02)
            began = time.time_ns()
            post(client, "/ledger/done", idempotency_key=key, attempt=1, effects=[{"topic": "mail", "payload": {"to": "ana"}}])
            replied.append((time.time_ns() - began) / 1e6)
            took.append((int(receiver.said(60)) - began) / 1e6)
        system.end()
    at = lambda times, share: sorted(times)[min(int(len(times) * share), len(times) - 1)]
    # How long its report took to be answered tells whether it was late before it was stored.
    late = [{"ms": ms, "reply_ms": reply} for ms, reply in zip(took, replied) if ms > 100]
    return {"reply_p50_ms": at(replied, 0.5), "reply_max_ms": max(replied), "p50_ms": at(took, 0.5), "p99_ms": at(took, 0.99),
            "max_ms": max(took), "late": late}


def rest(systems, postgres):
    """What it costs to wait for effects where none come, and what the same costs without routes."""
    results = {}
    for case in ("with routes", "without"):
        with Receiver() as receiver:
            for system in systems.values():
                system.settings = {}
                system.reset()
                system.end()
                system.settings = receiver.routes if case == "with routes" else {}
                system.start()
            count = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = '{}'"
            counted = lambda system: int(postgres.sql("postgres", count.format(system.database))) if system.store else 0
            # What a backend has done is counted when it has had nothing to do for a while.
            time.sleep(12 if not QUICK else 1)
            before = {name: (used_by(system)["service"], counted(system)) for name, system in systems.items()}
            time.sleep(IDLE_SECONDS)
            for name, system in systems.items():
                cpu, transactions = before[name]
                results[name, case] = {"seconds": IDLE_SECONDS, "cpu_seconds": used_by(system)["service"] - cpu,
                                       "transactions": counted(system) - transactions if system.store else None}
                system.end()
    return [{"system": name, "case": case, "rounds": [result]} for (name, case), result in results.items()]


def outbox(stage):
    """Effects: how many go out in a second, how soon one goes out, and what it costs that there are none."""
    postgres = Postgres(stage)
    systems = both_stores(stage, postgres)
    for system in systems.values():
        system.end()
    results = in_turns([
        (name, f"{each} of each key", lambda system=system, name=name, each=each: deliver(system, name, each))
        for each in (1, 10)
        for name, system in systems.items()
    ], lambda result: f"{result['per_second']:>9,.0f}/s")
    postgres.create("gate2")
    two = GateOnPostgres(stage, postgres, "gate2", 2)
    two.end()
    results += in_turns([
        (name, f"one by one, {count}", lambda system=system: lone(system))
        for name, count, system in [
            (report.ON_POSTGRES, "one replica", systems[report.ON_POSTGRES]),
            (report.ON_POSTGRES, "two replicas", two),
            (report.ON_SQLITE, "one process", systems[report.ON_SQLITE]),
        ]
    ], lambda result: f"p50 {result['p50_ms']:.2f} ms  p99 {result['p99_ms']:.2f} ms  max {result['max_ms']:.2f} ms")
    return results + rest(systems, postgres)


def ready_after(file):
    """How long a start takes, in ms, until /health/ready says so."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = listener.getsockname()
    environment = {"PATH": os.environ["PATH"], "DATABASE_URL": f"sqlite:{file}", "LISTEN": f"127.0.0.1:{address[1]}"}
    began = time.perf_counter()
    process = subprocess.Popen(ends_with_us([SERVICE]), env=environment, stderr=subprocess.DEVNULL)
    try:
        while time.perf_counter() - began < 30:
            try:
                with socket.create_connection(address) as client:
                    client.sendall(b"GET /health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    if client.recv(1024).startswith(b"HTTP/1.1 200"):
                        return (time.perf_counter() - began) * 1000
            except OSError:
                time.sleep(0.0005)
        raise RuntimeError("not ready within 30 s")
    finally:
        process.terminate()
        process.wait()


def with_idle_connections(system, count):
    """Resident memory with so many open connections, each of which was served."""
    with subprocess.Popen(load(system, f"--idle={count}"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as holder:
        if not holder.stdout.readline():
            raise RuntimeError("the connections could not be opened")
        resident = memory(system.service[0])
        still_open = json.loads(holder.communicate("", timeout=30)[0])["still_open"]
    # The service closes what is idle for long: then it was measured too late.
    if still_open != count:
        raise RuntimeError(f"of {count} connections only {still_open} are still open")
    return resident


def size(stage):
    """Memory, start and binary."""
    count = min(IDLE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 500)
    if count < IDLE:
        print(f"  only {count} idle connections: see ulimit -n", file=sys.stderr)
    systems = both_stores(stage, Postgres(stage))
    results = []
    for name, system in systems.items():
        figures = {"idle": [], "load": [], "open": []}
        for _ in range(ROUNDS):
            # A process of its own for each, since what it once took it may keep.
            for figure in figures:
                system.reset()
                system.end()
                system.start()
                if figure == "idle":
                    resident = memory(system.service[0])
                elif figure == "load":
                    measure(system, reset=False)
                    resident = memory(system.service[0], "VmHWM")
                else:
                    resident = with_idle_connections(system, count)
                figures[figure].append(resident)
        results.append({"system": name, "case": "memory", "rounds": figures | {"connections": count}})
        print(f"  {name}: {figures}", file=sys.stderr)

    gate = systems[report.ON_SQLITE]
    gate.reset()
    gate.end()
    with sqlite3.connect(gate.file) as connection:
        connection.executemany("INSERT INTO processed_orders (idempotency_key, order_id) VALUES (?, ?)",
                               ((f"key {number}", f"ORD-{number}") for number in range(100_000)))
    connection.close()
    starts = [ready_after(gate.file) for _ in range(STARTS)]
    gate.start()
    results.append({"system": report.ON_SQLITE, "case": "ready", "rounds": starts})
    results.append({"system": "dedup-gate", "case": "binary", "rounds": [os.path.getsize(SERVICE) / 2**20]})
    print(f"  ready after {statistics.median(starts):.1f} ms", file=sys.stderr)
    return results


PARTS = {"new": new, "duplicates": duplicates, "ledger": ledger, "replicas": replicas, "growth": growth,
         "removal": removal, "outbox": outbox, "size": size}


def main():
    parts = [argument for argument in ARGUMENTS if argument != "--quick"] or list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        raise SystemExit(f"usage: scripts/bench [--quick] [{' | '.join(PARTS)}]…; unknown: {' '.join(unknown)}")
    # Ended by a signal, it cleans up as at any end.
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(name, lambda number, _: sys.exit(128 + number))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    began = time.monotonic()
    for part in parts:
        print(f"== {part}", file=sys.stderr)
        about = machine.about(SECONDS, ROUNDS)
        stage = Stage()
        try:
            about["disk"] = machine.disk(stage.folder)
            results = PARTS[part](stage)
        finally:
            stage.stop()
        report.write(part, about, results, quick=QUICK)
    print(f"== took {(time.monotonic() - began) / 60:.1f} minutes", file=sys.stderr)


if __name__ == "__main__":
    main()
