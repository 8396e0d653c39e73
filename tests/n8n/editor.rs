//! The READMEs' three steps in n8n's editor, in a real browser.

use super::helpers::postgres::said_by;
use super::instance::{Instance, OWNER};
use super::stage::{SECRET, SHIPPED, files_in, localised, order, stage};

/// Where the pictures of the workflows go; that of the READMEs is one of them.
const PICTURES: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/pictures");

/// Imported by hand, the nodes find the credential by its name.
#[test]
fn a_workflow_is_imported_by_hand() {
    let stage = stage();
    let mut n8n = Instance::new("n8n_editor");
    n8n.start();
    n8n.set_up_owner();
    std::fs::create_dir_all(PICTURES).unwrap();
    let copies = tempfile::tempdir().unwrap();
    for file in &files_in(SHIPPED)[..2] {
        let copy = localised(file, stage.gate.port, stage.provider.port);
        std::fs::write(copies.path().join(file.file_name().unwrap()), copy).unwrap();
    }
    let temporary = tempfile::tempdir().unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/n8n/editor.cjs");
    let browsing = said_by(
        n8n.command("node")
            .args([script, &n8n.url(), OWNER.0, OWNER.1, SECRET, SHIPPED])
            .arg(copies.path())
            .arg(PICTURES)
            .env("TMPDIR", temporary.path()),
    );
    browsing.unwrap();
    for webhook in ["dedup-gate", "order-triage"] {
        let order_id = format!("by-hand-{webhook}");
        n8n.fire(webhook, &order(&order_id)).ok();
        n8n.fire(webhook, &order(&order_id)).ok();
        assert_eq!(stage.provider.charges_of(&order_id).len(), 1);
    }
}
