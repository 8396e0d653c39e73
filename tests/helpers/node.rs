//! Node.js as the judge of what JavaScript does.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

/// Runs a script that makes one value of each line, and gives the values. The script sees the
/// line as `line`, and ends with `return`; `crypto` is there.
pub(crate) fn javascript(script: &str, lines: &[String]) -> Vec<Value> {
    assert!(lines.iter().all(|line| !line.contains(['\n', '\r'])));
    let program = format!(
        "const crypto = require('crypto');
         const answer = line => {{ {script} }};
         const lines = require('fs').readFileSync(0, 'utf8').split('\\n');
         console.log(lines.map(line => JSON.stringify(answer(line))).join('\\n'));"
    );
    let mut process = Command::new("node")
        .args(["-e", &program])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("Node.js is needed: scripts/test installs it");
    let mut input = process.stdin.take().unwrap();
    let text = lines.join("\n");
    let writer = std::thread::spawn(move || input.write_all(text.as_bytes()));
    let output = process.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success(), "node failed");
    let answers: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|answer| serde_json::from_str(answer).unwrap())
        .collect();
    assert_eq!(answers.len(), lines.len());
    answers
}
