//! What every shipped workflow keeps to, whatever it does.

use serde_json::{Value, json};

use super::stage::{SHIPPED, files_in};

/// The versions that older n8n 2.x takes too.
const VERSIONS: [(&str, f64); 14] = [
    ("httpRequest", 4.2),
    ("if", 2.2),
    ("webhook", 2.0),
    ("respondToWebhook", 1.1),
    ("code", 2.0),
    ("executeWorkflow", 1.2),
    ("executeWorkflowTrigger", 1.1),
    ("wait", 1.1),
    ("scheduleTrigger", 1.2),
    ("errorTrigger", 1.0),
    ("stickyNote", 1.0),
    ("extractFromFile", 1.0),
    ("switch", 3.2),
    // Since n8n 2.7: the one before keeps its secret in the workflow.
    ("crypto", 2.0),
];

/// What makes a call safe to repeat: the gate knows the claimant, a provider the key; a search
/// changes nothing, and a message that is told twice does no harm.
fn is_repeatable(node: &Value) -> bool {
    let parameters = &node["parameters"];
    let text = parameters.to_string();
    parameters["method"] != "POST"
        || [
            "http://dedup-gate:8080/",
            "Idempotency-Key",
            "PayPal-Request-Id",
            "http://alerts.example/",
        ]
        .iter()
        .any(|known| text.contains(known))
}

#[test]
fn every_workflow_keeps_to_the_rules() {
    let files = files_in(SHIPPED);
    assert_eq!(files.len(), 9);
    for (file, number) in files.iter().zip(1..) {
        let text = std::fs::read_to_string(file).unwrap();
        let workflow: Value = serde_json::from_str(&text).unwrap();
        let name = workflow["name"].as_str().unwrap();
        assert_eq!(workflow["id"], format!("dedupGate{number:07}"));
        assert!(name.starts_with(&format!("{number}. ")), "{name}");
        assert!(
            !text.contains("$env") && !text.contains("require("),
            "{name}"
        );
        // After a crash, a retry would go on at the charge.
        assert_eq!(
            workflow["settings"]["saveExecutionProgress"], false,
            "{name}"
        );
        let nodes = workflow["nodes"].as_array().unwrap();
        assert!(
            nodes
                .iter()
                .any(|node| node["type"] == "n8n-nodes-base.stickyNote")
        );
        for node in nodes {
            let at = format!("{name}: {}", node["name"]);
            let kind = node["type"]
                .as_str()
                .unwrap()
                .trim_start_matches("n8n-nodes-base.");
            let version = VERSIONS.iter().find(|(known, _)| *known == kind);
            assert_eq!(
                node["typeVersion"].as_f64(),
                version.map(|(_, version)| *version),
                "{at}"
            );
            if kind != "httpRequest" {
                continue;
            }
            let parameters = &node["parameters"];
            assert!(parameters["options"]["timeout"].is_u64(), "{at}");
            if node["retryOnFail"] == true {
                assert!(is_repeatable(node), "{at}");
                assert!(
                    node["maxTries"].is_u64() && node["waitBetweenTries"].is_u64(),
                    "{at}"
                );
            }
            if parameters["url"]
                .as_str()
                .unwrap()
                .starts_with("http://dedup-gate:8080/")
            {
                assert_eq!(node["retryOnFail"], true, "{at}");
                // By name alone: the editor drops an id that it does not know.
                let credential = json!({"id": null, "name": "dedup-gate API key"});
                assert_eq!(node["credentials"]["httpHeaderAuth"], credential, "{at}");
            }
        }
    }
}
