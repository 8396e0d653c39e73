"""Makes tables and a plot of what was measured. Nothing is measured here: `python3 benches/report.py` makes them
anew from the results in docs/benchmarks."""

import glob
import html
import json
import math
import os
import re
import statistics
import sys

ON_POSTGRES = "dedup-gate on Postgres"
ON_SQLITE = "dedup-gate on SQLite"
REDIS_ALWAYS = "Redis, appendfsync always, Webdis"
REDIS_MEMORY = "Redis in memory, Webdis"
NODE = "Node.js with pg"
PGBENCH = "raw SQL in pgbench"

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = os.path.join(ROOT, "docs", "benchmarks.md")


def median(rounds, figure):
    return statistics.median(figure(round_) for round_ in rounds)


def rate(round_):
    return round_["per_second"]


def p99(round_):
    return round_["p99_ms"]


def number(value):
    """Three digits, and no more than that is known."""
    if value >= 1000:
        digits = 10 ** (math.floor(math.log10(value)) - 2)
        return f"{round(value / digits) * digits:,}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0}f}"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def ratio(above, below, figure=rate):
    """Of two that took turns: round by round, so that what slows the machine for a while slows both."""
    ratios = [figure(one) / figure(other) for one, other in zip(above, below)]
    return statistics.median(ratios), min(ratios), max(ratios)


def goal(what, ratios, at_least, aim):
    middle, lowest, highest = ratios
    return [what, f"**{middle:.2f}**", f"{lowest:.2f} to {highest:.2f}", at_least, aim]


GOALS = ["", "median", "rounds", "at least", "aim"]
MEASURED = ["claims/s", "p50 ms", "p99 ms", "CPU µs: service", "store", "generator", "WAL bytes"]


def measured(rounds, calls=1):
    """The columns of one case; with several calls a claim, all but the latencies are those of a claim."""
    cpu = [number(calls * median(rounds, lambda round_: round_["cpu_us"][who])) for who in ("service", "store", "generator")]
    wal = number(calls * median(rounds, lambda round_: round_["wal_bytes"])) if "wal_bytes" in rounds[0] else ""
    p50 = median(rounds, lambda round_: round_["p50_ms"])
    return [number(median(rounds, rate) / calls), number(p50), number(median(rounds, p99)), *cpu, wal]


def new(found):
    rows = []
    for (system, case), rounds in found.items():
        ours = found.get((ON_POSTGRES, case))
        by = f"{ratio(ours, rounds)[0]:.2f}" if ours and system != ON_POSTGRES else ""
        rows.append([case, system, *measured(rounds), by])
    # Those of one width beside each other.
    order = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: (not row[0].isdigit(), int(row[0]) if row[0].isdigit() else order.index(row[0])))
    text = table(["connections", "system", *MEASURED, "on Postgres ÷ this"], rows)

    ours, sqlite, always = found[ON_POSTGRES, "64"], found[ON_SQLITE, "64"], found[REDIS_ALWAYS, "64"]
    best = max((case for system, case in found if system == PGBENCH), key=lambda case: median(found[PGBENCH, case], rate))
    goals = [
        goal(f"new keys ÷ raw SQL in pgbench (its best: {best} clients)", ratio(ours, found[PGBENCH, best]), 1.5, 2),
        goal("new keys ÷ Redis `appendfsync always` behind Webdis", ratio(ours, always), 1.05, 1.4),
        goal("new keys ÷ Redis in memory behind Webdis", ratio(ours, found[REDIS_MEMORY, "64"]), 0.8, 1),
        goal("p99 ÷ that of Redis `appendfsync always`", ratio(ours, always, p99), "at most 1.5", 1),
        goal("1 connection: claims/s ÷ pgbench with 1 client",
             ratio(found[ON_POSTGRES, "1"], found[PGBENCH, "1"]), 0.6, 0.85),
        goal("SQLite new keys ÷ Redis `appendfsync always` behind Webdis", ratio(sqlite, always), 1.05, 1.5),
    ]
    return text + "\n" + table(GOALS, goals)


SCENARIOS = {
    "new": "new keys",
    "hot": "one hot key, all repeats",
    "mix": "90 % new, 10 % repeated",
    "pending": "`pending: true`",
    "pending-done": "`pending: true`, then done: both calls",
}


def scenarios(found, goals=()):
    rows = []
    for (system, case), rounds in found.items():
        calls = 2 if case == "pending-done" else 1
        by = f"{ratio(rounds, found[system, 'new'])[0] / calls:.2f}"
        rows.append([system, SCENARIOS[case], *measured(rounds, calls), by])
    return table(["system", "64 connections", *MEASURED, "÷ new keys"], rows) + goals_table(goals)


def goals_table(goals):
    return "\n" + table(GOALS, goals) if goals else ""


def duplicates(found):
    hot = [goal(f"{system}: hot-key duplicates ÷ new keys", ratio(found[system, "hot"], found[system, "new"]), 1, 1.5)
           for system in (ON_POSTGRES, ON_SQLITE)]
    return scenarios(found, hot)


def ledger(found):
    return scenarios(found)


def replicas(found):
    rows = [
        [system, case, *measured(rounds), f"{ratio(rounds, found['1 × dedup-gate', case])[0]:.2f}"]
        for (system, case), rounds in found.items()
    ]
    return table(["replicas", "connections in all", *MEASURED, "÷ one"], rows)


def growth(found):
    empty = next(iter(found.values()))
    rows = [[system, *measured(rounds), f"{ratio(rounds, empty)[0]:.2f}"] for (system, _), rounds in found.items()]
    largest, last = list(found.items())[-1]
    goals = [goal(f"{largest[0]} ÷ an empty table", ratio(last, empty), 0.75, 0.9)]
    return table(["held before", *MEASURED, "÷ the first"], rows) + goals_table(goals)


def removal(found):
    cases = {"kept": "as many old keys that are kept", "removed": "old keys that are removed meanwhile"}
    rows = [[system, cases[case], *measured(rounds), f"{ratio(rounds, found[system, 'kept'])[0]:.2f}",
             f"{sum(round_['removed'] for round_ in rounds):,}"] for (system, case), rounds in found.items()]
    goals = [goal(f"{system}: while keys are removed ÷ while they are kept",
                  ratio(found[system, "removed"], found[system, "kept"]), 0.8, "") for system in (ON_POSTGRES, ON_SQLITE)]
    return table(["system", "beside new keys at 64 connections", *MEASURED, "÷ kept", "removed meanwhile"], rows) + goals_table(goals)


def outbox(found):
    cases = {"1 of each key": "one of each key", "10 of each key": "ten of each key"}
    delivered = {at: rounds for at, rounds in found.items() if at[1] in cases}
    rows = []
    for (system, case), rounds in delivered.items():
        cpu = [number(median(rounds, lambda round_: round_["cpu_us"][who])) for who in ("service", "store", "generator")]
        wal = number(median(rounds, lambda round_: round_["wal_bytes"])) if "wal_bytes" in rounds[0] else ""
        lowest, highest = min(map(rate, rounds)), max(map(rate, rounds))
        rows.append([system, cases[case], f"**{number(median(rounds, rate))}**", f"{number(lowest)} to {number(highest)}", 1000,
                     *cpu, wal])
    text = table(["system", f"{rounds[0]['distinct']:,} effects that are due", "deliveries/s", "rounds", "at least",
                  "CPU µs: service", "store", "receiver", "WAL bytes"], rows)

    rows = []
    for (system, case), rounds in found.items():
        if case.startswith("one by one, "):
            of = lambda name: number(median(rounds, lambda round_: round_[name]))
            rows.append([system, case.removeprefix("one by one, "), of("reply_p50_ms"), of("p50_ms"), of("p99_ms"),
                         f"**{number(max(round_['max_ms'] for round_ in rounds))}**", 100])
    text += "\n" + table(["system", "", "report answered, p50 ms", "effect received, p50 ms", "p99 ms", "longest of all rounds, ms",
                          "at most"], rows)

    rows = [[system, case, f"{round_['cpu_seconds']:.2f}", f"{round_['seconds']}",
             "" if round_["transactions"] is None else round_["transactions"]]
            for (system, case), rounds in found.items() if case in ("with routes", "without") for round_ in rounds]
    return text + "\n" + table(["nothing to deliver", "", "CPU s of the service", "in s", "transactions of the store"], rows)


def size(found):
    def row(what, values, unit, at_most, aim):
        return [what, f"**{number(statistics.median(values))} {unit}**", f"{number(min(values))} to {number(max(values))}",
                at_most, aim]

    rows = []
    for (system, case), rounds in found.items():
        if case == "memory":
            rows += [
                row(f"{system}: resident, idle", rounds["idle"], "MiB", "", ""),
                row(f"{system}: at most, under 64 connections", rounds["load"], "MiB", 64, 32),
                row(f"{system}: with {rounds['connections']:,} idle connections", rounds["open"], "MiB", 256, 128),
            ]
    rows.append(row("ready after exec (SQLite, a file with 100,000 keys)", found[ON_SQLITE, "ready"], "ms", 200, 50))
    rows.append(row("the stripped binary", found["dedup-gate", "binary"], "MiB", 20, 12))
    return table(["", "median", "rounds", "at most", "aim"], rows)


def header(about):
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{about['date']}, commit {about['commit']}: {about['cores']} cores of {about['cpu']}, "
        f"{about['memory_gib']} GiB, Linux {about['kernel']}; {about['disk']['filesystem']}, on which a flush of 8 KiB "
        f"takes {about['disk']['flush_ms']} ms; {versions}. {about['rounds']} rounds of {about['seconds']} s each; "
        f"load average before {about['load_before']:.1f}.\n"
    )


# Told apart by those who see few colours too (Okabe and Ito), and by their names at the lines' ends.
COLOURS = {
    ON_POSTGRES: "#0072b2", ON_SQLITE: "#009e73", REDIS_MEMORY: "#d55e00", REDIS_ALWAYS: "#cc79a7",
    PGBENCH: "#555555", NODE: "#b58900",
}


def plot(found):
    """Throughput by kept-alive connections, one line a system, as SVG."""
    lines = {}
    for (system, case), rounds in found.items():
        if case.isdigit():
            lines.setdefault(system, []).append((int(case), median(rounds, rate)))
    for points in lines.values():
        points.sort()
    highest = max(value for points in lines.values() for _, value in points)
    step = 10 ** math.floor(math.log10(highest))
    step = next(size for size in (step / 5, step / 2, step, step * 2) if highest / size <= 6)
    top = math.ceil(highest / step) * step
    left, right, upper, lower, width, height = 70, 560, 60, 380, 820, 430
    x = lambda connections: left + math.log2(connections) / 8 * (right - left)
    y = lambda value: lower - value / top * (lower - upper)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="28" font-size="17" font-weight="bold" fill="#222222">New keys claimed per second</text>',
        f'<text x="{left}" y="46" fill="#555555">by kept-alive connections (pgbench: clients)</text>',
    ]
    for tick in range(round(top / step) + 1):
        at = y(tick * step)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#555555">{tick * step:,.0f}</text>')
    for connections in (1, 4, 16, 64, 256):
        parts.append(f'<text x="{x(connections):.1f}" y="{lower + 20}" text-anchor="middle" fill="#555555">{connections}</text>')
    # The names keep their distance, in the order of the lines' ends.
    name_at = -math.inf
    for system, points in sorted(lines.items(), key=lambda line: -line[1][-1][1]):
        colour = COLOURS[system]
        thick = 3 if system.startswith("dedup-gate") else 1.8
        path = " ".join(f"{x(connections):.1f},{y(value):.1f}" for connections, value in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"/>')
        parts += [f'<circle cx="{x(connections):.1f}" cy="{y(value):.1f}" r="{thick + 1}" fill="{colour}"/>'
                  for connections, value in points]
        end = y(points[-1][1])
        name_at = max(name_at + 17, end)
        parts.append(f'<line x1="{x(points[-1][0]) + 6:.1f}" y1="{end:.1f}" x2="{right + 16}" y2="{name_at:.1f}" '
                     f'stroke="{colour}" stroke-dasharray="1 3"/>')
        weight = "bold" if system.startswith("dedup-gate") else "normal"
        parts.append(f'<text x="{right + 20}" y="{name_at + 4:.1f}" fill="{colour}" font-weight="{weight}">'
                     f"{html.escape(system)}</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def by_case(results):
    return {(result["system"], result["case"]): result["rounds"] for result in results}


def put_in_page(part, text):
    """Between the page's markers for the part; all else there is written by people."""
    with open(PAGE) as file:
        page = file.read()
    marks = re.compile(rf"(<!-- scripts/bench: {part} -->\n).*?(<!-- end -->)", re.DOTALL)
    page, count = marks.subn(lambda mark: mark[1] + text + mark[2], page)
    if count != 1:
        raise SystemExit(f"{PAGE} has no place for {part}")
    with open(PAGE, "w") as file:
        file.write(page)


def show(part, about, results, folder, is_quick):
    tables = {"new": new, "duplicates": duplicates, "ledger": ledger, "replicas": replicas, "growth": growth,
              "removal": removal, "outbox": outbox, "size": size}
    text = header(about) + "\n" + tables[part](by_case(results))
    print(text)
    if part == "new":
        with open(os.path.join(folder, "throughput.svg"), "w") as file:
            file.write(plot(by_case(results)))
    if is_quick:
        with open(os.path.join(folder, f"{part}.md"), "w") as file:
            file.write(text)
    else:
        put_in_page(part, text)


def write(part, about, results, quick):
    folder = os.path.join(ROOT, "target/bench" if quick else "docs/benchmarks")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"{part}.json"), "w") as file:
        json.dump({"about": about, "results": results}, file, indent=1)
        file.write("\n")
    show(part, about, results, folder, quick)


if __name__ == "__main__":
    for path in sorted(glob.glob(os.path.join(ROOT, "docs/benchmarks", "*.json"))):
        with open(path) as file:
            stored = json.load(file)
        show(os.path.splitext(os.path.basename(path))[0], stored["about"], stored["results"], os.path.dirname(path), False)
