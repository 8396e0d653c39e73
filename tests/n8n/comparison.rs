//! The gate beside n8n's own means, for the READMEs' table. Only what is promised is asserted:
//! that the gate lets each order through once.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::helpers::postgres::SHARED;
use super::stage::{RAW_SQL, Stage, fire_all, order, stage};

/// What is compared, by its webhook; the first is measured against.
const MEANS: [(&str, &str); 4] = [
    ("no-gate", "nothing"),
    ("dedup-gate", "dedup-gate"),
    ("raw-sql", "raw SQL in a Postgres node"),
    (
        "remove-duplicates",
        "Remove Duplicates (v2, across executions)",
    ),
];
const ROUNDS: usize = 5;
/// Executions in a round of timing.
const TIMED: usize = 100;

/// How many charges each of five rounds makes, in which twenty equal webhooks are fired at once.
fn charges_of_twenty_at_once(stage: &Stage, webhook: &str) -> Vec<usize> {
    let round = |round| {
        let order_id = format!("twenty-{webhook}-{round}");
        fire_all(&stage.n8n, webhook, &vec![order(&order_id); 20], 20);
        stage.provider.charges_of(&order_id).len()
    };
    (0..ROUNDS).map(round).collect()
}

/// How many of forty orders, fired at a width of 20 and once more one by one, are charged more
/// than once.
fn leaked_of_forty(stage: &Stage, webhook: &str) -> usize {
    let prefix = format!("forty-{webhook}-");
    let orders: Vec<Value> = (0..40)
        .map(|number| order(&format!("{prefix}{number}")))
        .collect();
    fire_all(&stage.n8n, webhook, &orders, 20);
    fire_all(&stage.n8n, webhook, &orders, 1);
    let counts = stage.provider.counts(&prefix);
    assert_eq!(
        counts.len(),
        40,
        "{webhook} lets each through at least once"
    );
    counts.values().filter(|count| **count > 1).count()
}

/// How long one execution takes in a row of new orders, fired one by one.
fn time_of_an_execution(stage: &Stage, webhook: &str, round: usize) -> Duration {
    let orders: Vec<Value> = (0..TIMED)
        .map(|number| order(&format!("timed-{webhook}-{round}-{number}")))
        .collect();
    let begin = Instant::now();
    fire_all(&stage.n8n, webhook, &orders, 1);
    begin.elapsed() / u32::try_from(TIMED).unwrap()
}

#[test]
fn comparison() {
    let stage = stage();
    SHARED.create(RAW_SQL);
    let table =
        "CREATE TABLE processed_orders (idempotency_key TEXT PRIMARY KEY, order_id TEXT NOT NULL,
        processed_at TIMESTAMPTZ NOT NULL DEFAULT now())";
    SHARED.try_sql(RAW_SQL, table).unwrap();
    let mut times: BTreeMap<&str, Vec<Duration>> = BTreeMap::new();
    // The first round warms up.
    for round in 0..=ROUNDS {
        for (webhook, _) in MEANS {
            let time = time_of_an_execution(&stage, webhook, round);
            if round > 0 {
                times.entry(webhook).or_default().push(time);
            }
        }
    }
    let median = |webhook: &str| {
        let mut times = times[webhook].clone();
        times.sort_unstable();
        times[ROUNDS / 2].as_secs_f64() * 1_000.0
    };
    let bare = median(MEANS[0].0);
    let mut table = String::from(
        "| means | charges, 20 equal webhooks at once (5 rounds) | charged twice, of 40 orders sent twice | ms an execution (median) | ratio |\n\
         | --- | --- | --- | --- | --- |\n",
    );
    for (webhook, name) in MEANS {
        let charges = charges_of_twenty_at_once(&stage, webhook);
        let leaked = leaked_of_forty(&stage, webhook);
        if webhook == "dedup-gate" {
            assert_eq!((&charges, leaked), (&vec![1; ROUNDS], 0));
        }
        let charges: Vec<String> = charges.iter().map(usize::to_string).collect();
        let time = median(webhook);
        table += &format!(
            "| {name} | {} | {leaked} | {time:.1} | {:.2} |\n",
            charges.join(", "),
            time / bare
        );
    }
    println!("{table}");
}
