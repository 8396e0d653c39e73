//! Two n8n on one gate.

use serde_json::Value;

use super::instance::Instance;
use super::stage::{SECRET, Stage, fire_all, furnish, import_credentials, order, stage};

const WEBHOOKS: [&str; 2] = ["dedup-gate", "order-triage"];

/// The API key of an n8n that has one of its own.
const OTHER_SECRET: &str = "secret-of-shop";

/// Fires the same orders at both at the same time.
fn assert_each_charged_once(stage: &Stage, instances: &[Instance; 2], name: &str) {
    for webhook in WEBHOOKS {
        let prefix = format!("both-{name}-{webhook}-");
        let orders: Vec<Value> = (0..50)
            .map(|number| order(&format!("{prefix}{number}")))
            .collect();
        let [one, other] = instances;
        let since = one.last_execution();
        assert_eq!(
            since,
            other.last_execution(),
            "their executions are numbered alike"
        );
        std::thread::scope(|scope| {
            for n8n in instances {
                scope.spawn(|| fire_all(n8n, webhook, &orders, 10));
            }
        });
        for n8n in instances {
            assert_eq!(
                n8n.executions_since(since),
                ["success"; 50],
                "{}",
                n8n.log()
            );
        }
        let counts = stage.provider.counts(&prefix);
        assert_eq!(counts.len(), 50);
        assert!(counts.values().all(|count| *count == 1), "{counts:?}");
    }
}

/// Each has a database of its own. With an API key each, the key's name tells their claimants
/// apart; with one for both, the hash in the claimant does.
#[test]
fn two_n8n_with_equal_execution_ids_charge_each_order_once() {
    let stage = stage();
    let mut instances = [("n8n_one", SECRET), ("n8n_other", OTHER_SECRET)].map(|(name, secret)| {
        let mut n8n = Instance::new(name);
        // What a schedule starts would count in one of them before it does in the other.
        let is_fired = |workflow: &Value| {
            WEBHOOKS.iter().any(|webhook| {
                workflow
                    .to_string()
                    .contains(&format!("\"path\":\"{webhook}\""))
            })
        };
        furnish(&mut n8n, &stage.gate, &stage.provider, secret, is_fired);
        n8n.start();
        n8n
    });
    assert_each_charged_once(&stage, &instances, "own");
    let [_, other] = &mut instances;
    other.kill();
    import_credentials(other, SECRET);
    other.start();
    assert_each_charged_once(&stage, &instances, "shared");
}
