//! The READMEs' example is run as it stands there, and its replies are compared.

use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::helpers::{Backend, Service};

/// The blocks of a language in a Markdown text.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    text.split(&format!("```{language}\n"))
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect()
}

/// The same document with every time replaced.
fn without_times(value: &Value) -> Value {
    match value {
        Value::String(text) if chrono::DateTime::parse_from_rfc3339(text).is_ok() => {
            Value::from("a time")
        }
        Value::Array(items) => items.iter().map(without_times).collect(),
        Value::Object(members) => Value::Object(
            members
                .iter()
                .map(|(name, member)| (name.clone(), without_times(member)))
                .collect(),
        ),
        other => other.clone(),
    }
}

fn assert_example_holds(readme: &str) {
    let service = Service::start(Backend::Sqlite);
    let address = service.base.trim_start_matches("http://");
    let commands: Vec<&str> = blocks(readme, "sh")
        .into_iter()
        .filter(|block| block.starts_with("curl -s localhost:8080"))
        .collect();
    let replies = blocks(readme, "json");
    assert_eq!(commands.len(), 5);
    assert_eq!(commands.len(), replies.len());
    for (command, reply) in commands.into_iter().zip(replies) {
        let output = Command::new("sh")
            .args(["-c", &command.replace("localhost:8080", address)])
            .output()
            .unwrap();
        let heard: Value = serde_json::from_slice(&output.stdout).expect(command);
        let told: Value = serde_json::from_str(reply).expect(reply);
        assert_eq!(without_times(&heard), without_times(&told), "{command}");
    }
}

#[test]
fn the_english_example_holds() {
    assert_example_holds(include_str!("../README.md"));
}

#[test]
fn the_spanish_example_holds() {
    assert_example_holds(include_str!("../README.es.md"));
}

/// What n8n has as text is what the service has as bytes.
#[test]
fn the_example_of_a_secret_gives_both_sides_the_same() {
    for readme in [
        include_str!("../README.md"),
        include_str!("../README.es.md"),
    ] {
        let mut blocks = blocks(readme, "sh").into_iter();
        let command = blocks.find(|block| block.starts_with("secret=")).unwrap();
        let output = Command::new("sh").args(["-c", command]).output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        let (text, encoded) = said
            .trim()
            .strip_prefix("Hmac Secret: ")
            .and_then(|rest| rest.split_once("\nOUTBOX_SECRETS=whsec_"))
            .expect(&said);
        assert_eq!(STANDARD.decode(encoded).unwrap(), text.as_bytes());
        assert!((24..=64).contains(&text.len()), "{text}");
    }
}
