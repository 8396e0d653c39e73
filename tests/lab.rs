//! The lab: what its routes show, on one process and on two, and that it leaves the gate alone.

use std::process::Command;
use std::sync::Arc;

use serde_json::{Value, json};

use super::helpers::pgbouncer::PgBouncer;
use super::helpers::postgres::{SHARED, psql, said_by};
use super::helpers::service::{BINARY, Client, refusal, run};
use super::helpers::{Backend, Database, Service, on_both_with, wait_until};

const ON: [(&str, &str); 1] = [("LAB", "true")];

const VARIANTS: [&str; 3] = ["charge-unsafe", "charge-in-memory", "charge-idempotent"];

/// What charges, what shows, and the page.
const PATHS: [&str; 8] = [
    "/lab/charge-unsafe?key=k",
    "/lab/charge-in-memory?key=k",
    "/lab/charge-idempotent?key=k",
    "/lab/reset-lab",
    "/lab/idempotency/state",
    "/lab/outbox",
    "/lab/diagnostics/summary",
    "/lab",
];

fn charge(client: &Client, variant: &str, query: &str) -> Value {
    client.get(&format!("/lab/{variant}?{query}")).ok()
}

/// What a reply says of the members named.
fn members(reply: &Value, names: &[&str]) -> Vec<i64> {
    names
        .iter()
        .map(|name| reply[name].as_i64().unwrap())
        .collect()
}

/// Runs SQL in the lab's part of a database.
fn lab_sql(database: &Database, sql: &str) -> Result<String, String> {
    match database.backend {
        Backend::Postgres => {
            let url = format!("{}?options=-csearch_path%3Ddedup_gate_lab", database.url);
            psql(&url, sql)
        }
        Backend::Sqlite => {
            let file = format!("{}-lab", database.path());
            said_by(Command::new("sqlite3").args(["-bail", "-cmd", ".timeout 5000", &file, sql]))
        }
    }
}

#[test]
fn it_is_off_unless_somebody_turns_it_on() {
    for (settings, arguments, is_on) in [
        (&[][..], &[][..], false),
        (&[("LAB", "false")], &[], false),
        (&[("LAB", "")], &[], false),
        (&ON, &[], true),
        (&[("LAB", "1")], &[], true),
        (&[], &["--lab"], true),
    ] {
        for backend in Backend::ALL {
            let database = Arc::new(Database::new(backend));
            let command = super::helpers::service::command(&database, arguments, settings);
            let service = Service::spawn(Arc::clone(&database), command);
            for path in PATHS {
                let reply = service.get(path);
                match is_on {
                    true => assert_eq!(reply.status, 200, "{path}"),
                    false => assert_eq!(reply.problem(404), "not_found", "{path}"),
                }
            }
            let is_there = match backend {
                Backend::Postgres => {
                    database.sql("SELECT to_regnamespace('dedup_gate_lab') IS NOT NULL") == "t"
                }
                Backend::Sqlite => std::fs::exists(format!("{}-lab", database.path())).unwrap(),
            };
            assert_eq!(is_there, is_on);
        }
    }
}

#[test]
fn retries_charge_every_time_or_once() {
    on_both_with(&ON, |service| {
        let names = [
            "attempts",
            "charges_applied",
            "duplicates_prevented",
            "charged_cents",
            "overcharged_cents",
            "charges_of_key",
            "balance_cents",
        ];
        let query = "key=order-4711&account=acc-1&attempts=5&amount=2500";
        for (variant, first, again) in [
            (
                "charge-unsafe",
                [5, 5, 0, 12_500, 10_000, 5, 7_500],
                [5, 5, 0, 12_500, 12_500, 10, -5_000],
            ),
            (
                "charge-in-memory",
                [5, 1, 4, 2_500, 0, 1, 17_500],
                [5, 0, 5, 0, 0, 1, 17_500],
            ),
            (
                "charge-idempotent",
                [5, 1, 4, 2_500, 0, 1, 17_500],
                [5, 0, 5, 0, 0, 1, 17_500],
            ),
        ] {
            for expected in [first, again] {
                let reply = charge(service, variant, query);
                assert_eq!(members(&reply, &names), expected, "{variant}: {reply}");
                assert_eq!(reply["key"], "order-4711");
                assert_eq!(reply["account"], "acc-1");
                assert_eq!(reply["amount_cents"], 2500);
            }
        }
        let defaults = charge(service, "charge-unsafe", "key=order-4712");
        assert_eq!(members(&defaults, &["attempts", "amount_cents"]), [5, 2500]);
        assert_eq!(defaults["account"], "acc-1");
    });
}

#[test]
fn the_state_and_the_sums_tell_what_was_done() {
    on_both_with(&ON, |service| {
        for variant in VARIANTS {
            charge(
                service,
                variant,
                "key=a&account=acc-1&attempts=3&amount=100",
            );
            charge(service, variant, "key=b&account=acc-2&attempts=2&amount=50");
        }
        let state = service.get("/lab/idempotency/state").ok();
        assert_eq!(state["window_seconds"], 86_400);
        assert_eq!(state["opening_cents"], 20_000);
        assert_eq!(state["keys_in_memory"], 2);
        assert_eq!(state["more_keys"], false);
        let keys = state["keys"].as_array().unwrap();
        assert_eq!(keys.len(), 2);
        for (key, (name, prevented)) in keys.iter().zip([("b", 1), ("a", 2)]) {
            assert_eq!(key["key"], name);
            assert_eq!(key["status"], "done");
            assert_eq!(key["duplicates_prevented"], prevented);
            assert!((0..60).contains(&key["age_seconds"].as_i64().unwrap()));
            assert!(key["charge_id"].as_str().unwrap().starts_with("ch_"));
            assert!(key["expires_at"].is_string());
        }
        let accounts: Vec<(&str, &str, i64, i64)> = state["accounts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|account| {
                let text = |name: &str| account[name].as_str().unwrap();
                let cents = members(account, &["balance_cents", "overcharged_cents"]);
                (text("account"), text("variant"), cents[0], cents[1])
            })
            .collect();
        assert_eq!(
            accounts,
            [
                ("acc-1", "idempotent", 19_900, 0),
                ("acc-1", "in_memory", 19_900, 0),
                ("acc-1", "unsafe", 19_700, 200),
                ("acc-2", "idempotent", 19_950, 0),
                ("acc-2", "in_memory", 19_950, 0),
                ("acc-2", "unsafe", 19_900, 50),
            ]
        );
        let one = service.get("/lab/idempotency/state?account=acc-2").ok();
        let rest: Vec<&Value> = state["accounts"].as_array().unwrap()[3..].iter().collect();
        assert_eq!(one["accounts"], json!(rest));
        let sum = |variant: &str, numbers: [i64; 6]| {
            let [keys, attempts, charges, prevented, charged, overcharged] = numbers;
            json!({
                "variant": variant, "keys": keys, "attempts": attempts, "charges_applied": charges,
                "duplicates_prevented": prevented, "charged_cents": charged,
                "overcharged_cents": overcharged
            })
        };
        let summary = || service.get("/lab/diagnostics/summary").ok();
        assert_eq!(
            summary()["variants"],
            json!([
                sum("unsafe", [2, 5, 5, 0, 400, 250]),
                sum("in_memory", [2, 5, 2, 3, 150, 0]),
                sum("idempotent", [2, 5, 2, 3, 150, 0])
            ])
        );
        // One for each charge at the gate, and none for the others.
        let effects = |query: &str| service.get(&format!("/lab/outbox?{query}")).ok();
        let listed = effects("limit=20");
        let keys: Vec<&Value> = listed["effects"]
            .as_array()
            .unwrap()
            .iter()
            .map(|effect| &effect["idempotency_key"])
            .collect();
        assert_eq!(keys, ["b", "a"]);
        assert_eq!(listed["effects"][0]["topic"], "lab.receipt");
        let first = effects("limit=1");
        let cursor = first["next_cursor"].as_str().unwrap();
        let second = effects(&format!("limit=1&cursor={cursor}"));
        assert_eq!(second["effects"][0]["idempotency_key"], "a");
        assert_eq!(service.get("/outbox").ok()["effects"], json!([]));
        wait_until("the receipts are delivered", || {
            effects("status=delivered")["effects"]
                .as_array()
                .unwrap()
                .len()
                == 2
        });
        assert_eq!(service.get("/lab/reset-lab").ok(), json!({"reset": true}));
        assert_eq!(effects("limit=20")["effects"], json!([]));
        let none = ["unsafe", "in_memory", "idempotent"].map(|variant| sum(variant, [0; 6]));
        assert_eq!(summary()["variants"], json!(none));
        let state = service.get("/lab/idempotency/state").ok();
        assert_eq!(state["keys"], json!([]));
        assert_eq!(state["accounts"], json!([]));
        assert_eq!(state["keys_in_memory"], 0);
        for variant in VARIANTS {
            let reply = charge(service, variant, "key=a&attempts=1");
            assert_eq!(reply["charges_of_key"], 1, "{reply}");
        }
    });
}

/// They go to the lab itself, by a path that nobody else knows; and a restart makes another.
#[test]
fn receipts_are_delivered_to_the_lab_alone() {
    on_both_with(&[("LAB", "true"), ("API_KEYS", "n8n:s3cret")], |service| {
        let headers = [("X-API-Key", "s3cret")];
        let charge = "/lab/charge-idempotent?key=a&attempts=3";
        assert_eq!(service.send("GET", charge, &headers, b"").status, 200);
        wait_until("the receipt is delivered", || {
            let delivered = service.send("GET", "/lab/outbox?status=delivered", &headers, b"");
            delivered.ok()["effects"].as_array().unwrap().len() == 1
        });
        let receipt = [
            ("webhook-id", "msg_x"),
            ("Content-Type", "application/json"),
        ];
        for token in ["x", "00000000000000000000000000000000", "%00"] {
            let reply = service.send("POST", &format!("/lab/receipts/{token}"), &receipt, b"{}");
            assert_eq!(reply.problem(404), "not_found");
        }
    });
}

/// Whoever has a gate where the lab would be does not lose its keys to a reset.
#[test]
fn a_gate_of_somebody_else_is_left_alone() {
    for backend in Backend::ALL {
        let database = Database::new(backend);
        let place = match backend {
            Backend::Postgres => {
                database.sql("CREATE SCHEMA dedup_gate_lab");
                format!("{}?options=-csearch_path%3Ddedup_gate_lab", database.url)
            }
            Backend::Sqlite => format!("{}-lab", database.url),
        };
        let theirs = run(&database, &["migrate"], &[("DATABASE_URL", &place)]);
        assert!(theirs.status.success(), "{theirs:?}");
        let refused = refusal(&run(&database, &[], &ON));
        assert!(refused.contains("holds"), "{refused}");
        assert!(refused.starts_with("dedup-gate: LAB: "), "{refused}");
    }
}

/// Spreads `attempts` over replicas, as many on each, and sums up what they answer.
fn spread(replicas: &[&Service], variant: &str, query: &str, names: &[&str]) -> Vec<i64> {
    let replies: Vec<Vec<i64>> = std::thread::scope(|scope| {
        let calls: Vec<_> = replicas
            .iter()
            .map(|replica| scope.spawn(|| members(&charge(replica, variant, query), names)))
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    (0..names.len())
        .map(|place| replies.iter().map(|reply| reply[place]).sum())
        .collect()
}

#[test]
fn two_processes_charge_once_by_the_gate_and_twice_from_memory() {
    let database = Arc::new(Database::new(Backend::Postgres));
    let [one, two] = [(); 2].map(|()| Service::start_beside(Arc::clone(&database), &ON));
    let names = [
        "charges_applied",
        "duplicates_prevented",
        "overcharged_cents",
    ];
    for round in 0..3 {
        for key in 0..10 {
            let query = format!("key=order-{key}&attempts=16&amount=100&account=acc-{round}");
            for (variant, expected) in [
                ("charge-unsafe", [32, 0, 3100]),
                ("charge-in-memory", [2, 30, 100]),
                ("charge-idempotent", [1, 31, 0]),
            ] {
                let heard = spread(&[&one, &two], variant, &query, &names);
                assert_eq!(heard, expected, "{variant} {query}");
            }
        }
        for replica in [&one, &two] {
            let summary = replica.get("/lab/diagnostics/summary").ok();
            let charges: Vec<i64> = summary["variants"]
                .as_array()
                .unwrap()
                .iter()
                .map(|sum| sum["charges_applied"].as_i64().unwrap())
                .collect();
            assert_eq!(charges, [320, 20, 10]);
        }
        // By turns, since it empties the memory of both.
        let replica = if round == 0 { &one } else { &two };
        replica.get("/lab/reset-lab").ok();
    }
}

#[test]
fn as_many_as_may_be_tried_at_once_are_charged_once() {
    on_both_with(&ON, |service| {
        let names = ["charges_applied", "duplicates_prevented"];
        let callers = [service; 4];
        let query = "key=order-1&attempts=64&amount=1";
        assert_eq!(
            spread(&callers, "charge-idempotent", query, &names),
            [1, 255]
        );
        assert_eq!(
            charge(service, "charge-unsafe", query)["charges_applied"],
            64
        );
    });
}

#[test]
fn the_gate_is_left_alone() {
    on_both_with(&ON, |service| {
        service.claim(json!({"idempotency_key": "order-4711", "claimant": "a"}));
        service.pending_key("order-4712", "a", 900);
        let counted = |text: &str| -> Vec<String> {
            let is_of_claims = |line: &&str| {
                line.starts_with("dedup_gate_claims") || line.starts_with("dedup_gate_dup")
            };
            text.lines()
                .filter(is_of_claims)
                .map(str::to_owned)
                .collect()
        };
        let seen = || {
            let metrics = counted(&service.get("/metrics").text);
            (service.database.dump(), metrics)
        };
        let before = seen();
        for key in ["order-4711", "order-4712", "order-4713"] {
            for variant in VARIANTS {
                let reply = charge(service, variant, &format!("key={key}"));
                assert!(reply["charges_applied"].as_i64() > Some(0), "{reply}");
            }
        }
        assert_eq!(seen(), before);
        service.get("/lab/reset-lab").ok();
        assert_eq!(seen(), before);
        let claimed = service.claim(json!({"idempotency_key": "order-4713", "claimant": "a"}));
        assert_eq!(claimed["claimed"], true);
    });
}

#[test]
fn bounds_are_checked() {
    on_both_with(&ON, |service| {
        let long = "k".repeat(256);
        for (query, pointer) in [
            ("", "/key"),
            ("key=", "/key"),
            ("key=%20k", "/key"),
            (&format!("key={long}"), "/key"),
            ("key=k&account=", "/account"),
            (&format!("key=k&account={long}"), "/account"),
            ("key=k&attempts=0", "/attempts"),
            ("key=k&attempts=65", "/attempts"),
            ("key=k&attempts=-1", "/attempts"),
            ("key=k&attempts=%2B1", "/attempts"),
            ("key=k&attempts=1.0", "/attempts"),
            ("key=k&attempts=", "/attempts"),
            ("key=k&amount=0", "/amount"),
            ("key=k&amount=1000001", "/amount"),
            ("key=k&amount=99999999999999999999", "/amount"),
            ("key=k&amount=25.00", "/amount"),
            ("key=k&currency=EUR", "/currency"),
            ("key=k&key=k", "/key"),
            ("key=%FF", "/key"),
        ] {
            for variant in VARIANTS {
                let reply = service.get(&format!("/lab/{variant}?{query}"));
                assert_eq!(reply.problem(422), "invalid_request", "{query}");
                assert_eq!(reply.pointers(), [pointer], "{query}");
            }
        }
        let reply = service.get("/lab/outbox?limit=0");
        assert_eq!(reply.pointers(), ["/limit"]);
        for path in ["idempotency/state", "diagnostics/summary", "reset-lab"] {
            let reply = service.get(&format!("/lab/{path}?all=true"));
            assert_eq!(reply.pointers(), ["/all"], "{path}");
        }
        let greatest = format!("key={}&attempts=64&amount=1000000", "k".repeat(255));
        let reply = charge(service, "charge-unsafe", &greatest);
        assert_eq!(reply["balance_cents"], 20_000 - 64_000_000);
    });
}

#[test]
fn what_acts_is_never_done_by_looking() {
    on_both_with(&ON, |service| {
        for path in PATHS {
            let acts = path.contains("charge-") || path.contains("reset");
            let head = service.send("HEAD", path, &[], b"");
            assert_eq!(head.status, if acts { 405 } else { 200 }, "{path}");
            let posted = service.send("POST", path, &[], b"");
            assert_eq!(posted.problem(405), "method_not_allowed", "{path}");
            let allowed = if acts { "GET" } else { "GET, HEAD" };
            assert_eq!(posted.headers["allow"], allowed, "{path}");
            if path != "/lab" {
                assert_eq!(service.get(path).headers["cache-control"], "no-store");
            }
        }
        let summary = service.get("/lab/diagnostics/summary").ok();
        assert_eq!(summary["variants"][0]["attempts"], 0, "{summary}");
        assert_eq!(service.get("/lab/nothing").problem(404), "not_found");
    });
}

#[test]
fn a_key_of_another_payment_is_refused_by_the_gate_alone() {
    on_both_with(&ON, |service| {
        for variant in VARIANTS {
            charge(service, variant, "key=k&account=acc-1&amount=100");
            for other in ["account=acc-1&amount=101", "account=acc-2&amount=100"] {
                let reply = service.get(&format!("/lab/{variant}?key=k&{other}"));
                if variant == "charge-idempotent" {
                    assert_eq!(reply.problem(422), "key_reused");
                    assert_eq!(reply.pointers(), ["/account", "/amount"]);
                } else {
                    reply.ok();
                }
            }
        }
    });
}

#[test]
fn all_but_the_page_needs_an_api_key() {
    let settings = [("LAB", "true"), ("API_KEYS", "n8n:s3cret")];
    on_both_with(&settings, |service| {
        for path in PATHS {
            if path == "/lab" {
                assert_eq!(service.get(path).status, 200);
                continue;
            }
            assert_eq!(service.get(path).problem(401), "unauthorized", "{path}");
            let reply = service.send("GET", path, &[("X-API-Key", "s3cret")], b"");
            assert_eq!(reply.status, 200, "{path}");
        }
    });
}

/// The charge cannot be written: then nothing was taken, nothing was reported, and it is taken over when the lease
/// of who won has run out.
#[test]
fn a_charge_and_its_report_are_one() {
    on_both_with(&ON, |service| {
        let database = &service.database;
        let sql = |statement: &str| lab_sql(database, statement).unwrap();
        let pay = || service.get("/lab/charge-idempotent?key=k&attempts=4");
        sql("ALTER TABLE lab_charges RENAME TO lab_charges_away");
        assert!(pay().status >= 500);
        assert_eq!(sql("SELECT count(*) FROM lab_accounts"), "0");
        assert_eq!(sql("SELECT count(*) FROM lab_keys"), "0");
        assert_eq!(sql("SELECT count(*) FROM run_outbox"), "0");
        assert_eq!(sql("SELECT status FROM run_ledger"), "pending");
        sql("ALTER TABLE lab_charges_away RENAME TO lab_charges");
        // Somebody may be at it still.
        assert_eq!(pay().ok()["charges_applied"], 0);
        sql("UPDATE run_ledger SET lease_expires_at = '2020-01-01T00:00:00.000Z'");
        let reply = pay().ok();
        assert_eq!(
            members(&reply, &["charges_applied", "charges_of_key"]),
            [1, 1]
        );
        let charge = sql("SELECT id FROM lab_charges");
        assert_eq!(sql("SELECT external_id FROM run_ledger"), charge);
        assert_eq!(sql("SELECT status FROM run_ledger"), "done");
        assert_eq!(sql("SELECT count(*) FROM run_outbox"), "1");
    });
}

#[test]
fn the_database_may_be_gone_meanwhile() {
    let server = super::helpers::postgres::Postgres::start(&["fsync=off"]);
    let database = Database::at(server.create("lab"));
    let service = Service::start_on(database, &ON);
    charge(&service, "charge-idempotent", "key=before");
    server.end("QUIT");
    let reply = service.get("/lab/charge-idempotent?key=during");
    assert_eq!(reply.problem(503), "store_unavailable");
    server.start_again();
    wait_until("the service answers", || {
        service.get("/lab/charge-idempotent?key=after").status == 200
    });
    let charges = "SELECT idempotency_key, count(*) FROM lab_charges GROUP BY 1 ORDER BY 1";
    assert_eq!(
        lab_sql(&service.database, charges).unwrap(),
        "after|1\nbefore|1"
    );
}

#[test]
fn a_start_that_cannot_have_a_lab_says_why() {
    let refused = |url: String, reason: &str| {
        let line = refusal(&run(&Database::at(url), &[], &[ON[0], ("RUST_LOG", "off")]));
        assert!(line.contains("LAB: "), "{line}");
        assert!(line.contains(reason), "{line}");
    };
    let pooler = PgBouncer::start(&SHARED, "transaction", 3, "");
    SHARED.create("lab_pooled");
    refused(pooler.url("lab_pooled"), "a pooler in transaction mode");
    // One for sessions does as well, where it passes on what the lab asks for.
    let ignoring = "ignore_startup_parameters = options";
    let pooler = PgBouncer::start(&SHARED, "session", 30, ignoring);
    refused(pooler.url("lab_pooled"), "does not pass on");

    let url = SHARED.create("lab_inside");
    psql(&url, "CREATE SCHEMA dedup_gate_lab").unwrap();
    let inside = format!("{url}?options=-csearch_path%3Ddedup_gate_lab");
    refused(inside, "holds the tables of a gate");

    let url = SHARED.create("lab_forbidden");
    psql(
        &url,
        "CREATE ROLE lab_visitor LOGIN; GRANT ALL ON SCHEMA public TO lab_visitor",
    )
    .unwrap();
    let visitor = url.replace("postgres@", "lab_visitor@");
    refused(visitor.clone(), "permission denied");
    psql(
        &url,
        "CREATE SCHEMA dedup_gate_lab AUTHORIZATION lab_visitor",
    )
    .unwrap();
    let service = Service::start_on(Database::at(visitor), &ON);
    charge(&service, "charge-idempotent", "key=k");
}

/// Its own schema, whatever the service's is.
#[test]
fn options_of_the_url_are_kept() {
    let url = SHARED.create("lab_options");
    psql(&url, "CREATE SCHEMA gate").unwrap();
    let within = format!("{url}?options=-csearch_path%3Dgate%20-cwork_mem%3D5MB");
    let service = Service::start_on(Database::at(within), &ON);
    charge(&service, "charge-idempotent", "key=k");
    let tables = "SELECT table_schema FROM information_schema.tables WHERE table_name = 'run_ledger' ORDER BY 1";
    assert_eq!(psql(&url, tables).unwrap(), "dedup_gate_lab\ngate");
    let rows = "SELECT (SELECT count(*) FROM gate.run_ledger), (SELECT count(*) FROM dedup_gate_lab.run_ledger)";
    assert_eq!(psql(&url, rows).unwrap(), "0|1");
}

/// Many replicas that start at once make one lab.
#[test]
fn replicas_may_start_at_once() {
    let database = Arc::new(Database::new(Backend::Postgres));
    let replicas: Vec<Service> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| Service::start_beside(Arc::clone(&database), &ON)))
            .collect();
        starts
            .into_iter()
            .map(|start| start.join().unwrap())
            .collect()
    });
    let replicas: Vec<&Service> = replicas.iter().collect();
    let query = "key=k&attempts=8";
    assert_eq!(
        spread(&replicas, "charge-idempotent", query, &["charges_applied"]),
        [1]
    );
    assert_eq!(
        spread(&replicas, "charge-in-memory", query, &["charges_applied"]),
        [4]
    );
    let generations = lab_sql(&database, "SELECT count(*) FROM lab_generation");
    assert_eq!(generations.unwrap(), "1");
}

/// The page in a real browser: its buttons are clicked, and the balances read.
fn browse(service: &Service, picture: &str, settings: &[&str]) -> Value {
    const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/lab/page.cjs");
    const PICTURES: &str = env!("CARGO_TARGET_TMPDIR");
    let temporary = tempfile::tempdir().unwrap();
    let said = said_by(
        Command::new("node")
            .args([SCRIPT, &service.base, &format!("{PICTURES}/{picture}")])
            .args(settings)
            .env("TMPDIR", temporary.path()),
    );
    serde_json::from_str(&said.unwrap()).unwrap()
}

#[test]
fn the_page_shows_three_balances() {
    let service = Service::start_on(Database::new(Backend::Sqlite), &ON);
    let seen = browse(&service, "lab.png", &["en-GB"]);
    assert_eq!(seen["lang"], "en");
    assert_eq!(seen["asks_for_key"], false);
    assert_eq!(seen["opening"], json!(["200.00", "200.00", "200.00"]));
    assert_eq!(seen["charged"], json!(["75.00", "175.00", "175.00"]));
    assert_eq!(
        seen["said"],
        json!([
            "5 tries: 5 charged, 0 prevented. 100.00 too much.",
            "5 tries: 1 charged, 4 prevented. 0.00 too much.",
            "5 tries: 1 charged, 4 prevented. 0.00 too much."
        ])
    );
    // Of the account's two hundred: charged once, too much, left.
    assert_eq!(
        seen["bars"],
        json!([["13", "50", "38"], ["13", "0", "88"], ["13", "0", "88"]])
    );
    assert_eq!(
        seen["bar_names"][0],
        "25.00 charged, 100.00 too much, 75.00 left"
    );
    // The first one alone, once more: below zero.
    assert_eq!(seen["again"], json!(["-50.00", "175.00", "175.00"]));
    assert_eq!(seen["other_account"], json!(["200.00", "200.00", "200.00"]));
    let fault = seen["fault"].as_str().unwrap();
    assert!(fault.contains("/account"), "{fault}");
    assert_eq!(seen["emptied"], json!(["200.00", "200.00", "200.00"]));
    // As wide as a phone, it is not wider than that.
    assert_eq!(seen["overflow"], 0);
    assert_eq!(seen["complaints"], json!([]));
    let summary = service.get("/lab/diagnostics/summary").ok();
    assert_eq!(summary["variants"][0]["attempts"], 0);
}

#[test]
fn the_page_asks_for_the_api_key_in_the_readers_language() {
    let settings = [("LAB", "true"), ("API_KEYS", "n8n:s3cret")];
    let service = Service::start_on(Database::new(Backend::Sqlite), &settings);
    let seen = browse(&service, "laboratorio.png", &["es-MX", "s3cret"]);
    assert_eq!(seen["lang"], "es");
    assert_eq!(seen["asks_for_key"], true);
    assert_eq!(seen["opening"], json!(["200,00", "200,00", "200,00"]));
    assert_eq!(seen["charged"], json!(["75,00", "175,00", "175,00"]));
    assert_eq!(
        seen["said"][0],
        "5 intentos: 5 cobrados, 0 evitados. 100,00 de más."
    );
}

/// As it is run by hand, but for the build.
#[test]
fn the_script_prints_a_table() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/lab");
    for (postgres_bin, replicas, in_memory) in
        [(None, "two replicas", "2"), (Some("/"), "one", "1")]
    {
        let mut command = Command::new(script);
        command.arg(BINARY);
        if let Some(folder) = postgres_bin {
            command.env("POSTGRES_BIN", folder);
        }
        let table = said_by(&mut command).unwrap();
        assert!(table.contains(replicas), "{table}");
        let row = |name: &str| -> Vec<&str> {
            let line = table.lines().find(|line| line.starts_with(name));
            let numbers = line.unwrap_or_else(|| panic!("{table}"));
            numbers[name.len()..].split_whitespace().collect()
        };
        assert_eq!(row("no key")[..2], ["5", "0"], "{table}");
        assert_eq!(row("keys in memory")[0], in_memory, "{table}");
        assert_eq!(row("keys at the gate")[..2], ["1", "4"], "{table}");
    }
}
