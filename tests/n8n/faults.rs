//! What goes wrong between n8n, the service and the provider: nothing is charged twice, and
//! nothing is lost unseen.

use serde_json::{Value, json};

use super::helpers::wait_until;
use super::lossy::Lossy;
use super::stage::{Stage, fire_all, order, stage};

/// The webhooks of the workflows that charge, and know no other means than the gate.
const WEBHOOKS: [&str; 3] = ["dedup-gate", "order-triage", "order-by-reference"];

/// Lets the leases of all that is pending run out.
fn let_leases_run_out(stage: &Stage) {
    stage.gate().database.age_all(1_000);
}

/// The reply is lost after the commit: *Retry On Fail* sends the same claimant again.
#[test]
fn a_lost_reply_to_a_claim_loses_no_order_and_charges_none_twice() {
    let mut stage = stage();
    for webhook in WEBHOOKS {
        let order_id = format!("lost-{webhook}");
        // The service moves to another port, and the proxy stands where it was.
        let database = stage.kill_gate();
        let proxy = stage.open_gate_behind(database);
        proxy.lose_next_of("/claim", 2);
        proxy.lose_next_of("/ledger/pending", 2);
        let reply = stage.n8n.fire(webhook, &order(&order_id)).ok();
        assert!(proxy.lost() == 2, "{webhook}");
        let charges = stage.provider.charges_of(&order_id);
        assert_eq!(charges.len(), 1, "{webhook}");
        assert_eq!(reply["external_id"], charges[0]["id"]);
    }
}
