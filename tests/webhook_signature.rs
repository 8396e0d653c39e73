//! What is signed, another implementation of Standard Webhooks takes for signed.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use dedup_gate::domain::webhook::{SigningSecret, signatures};
use serde_json::json;

/// 24 and 64 bytes: the shortest and the longest.
const SECRETS: [&str; 2] = [
    "whsec_MDEyMzQ1Njc4OWFiY2RlZmdoaWprbG1u",
    "whsec_/////////////////////////////////////////////////////////////////////////////////////w==",
];

const ID: &str = "0b7ab0e4-2c8c-5c0d-9b1c-0a7a3f0f3c55";
const BODY: &str = r#"{"order": "4711", "sum": 1.0, "to": "Zoë"}"#;

/// Whether the authors' own library takes `body` for signed with `secret`.
fn is_taken(secret: &str, timestamp: i64, signature: &str, body: &str) -> bool {
    const PROGRAM: &str = "
import json, sys
from standardwebhooks.webhooks import Webhook, WebhookVerificationError
secret, headers, body = json.load(sys.stdin)
try:
    Webhook(secret).verify(body, headers)
    print('taken')
except WebhookVerificationError as fault:
    print('refused:', fault)
";
    let headers = json!({
        "webhook-id": ID,
        "webhook-timestamp": timestamp.to_string(),
        "webhook-signature": signature,
    });
    let mut process = Command::new("python3")
        .args(["-c", PROGRAM])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("Python is needed: scripts/test installs it");
    let input = json!([secret, headers, body]).to_string();
    let mut pipe = process.stdin.take().unwrap();
    pipe.write_all(input.as_bytes()).unwrap();
    drop(pipe);
    let output = process.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "Python's standardwebhooks is needed: scripts/test installs it"
    );
    match String::from_utf8(output.stdout).unwrap().trim() {
        "taken" => true,
        "refused: No matching signature found" => false,
        other => panic!("{other}"),
    }
}

#[test]
fn another_implementation_takes_what_is_signed_and_nothing_else() {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let now = i64::try_from(now.as_secs()).unwrap();
    let one = SigningSecret::parse_list(SECRETS[0]).unwrap();
    let both = SigningSecret::parse_list(&SECRETS.join(",")).unwrap();
    let by_one = signatures(&one, ID, now, BODY.as_bytes());
    let by_both = signatures(&both, ID, now, BODY.as_bytes());

    assert!(is_taken(SECRETS[0], now, &by_one, BODY));
    assert!(!is_taken(SECRETS[1], now, &by_one, BODY));
    for secret in SECRETS {
        assert!(is_taken(secret, now, &by_both, BODY));
        assert!(!is_taken(
            secret,
            now,
            &by_both,
            &BODY.replace("4711", "4712")
        ));
        assert!(!is_taken(secret, now, &by_both, &BODY.replace(": ", ":")));
        assert!(!is_taken(secret, now + 1, &by_both, BODY));
    }
}
