//! What is found once everything is healed: in the history by itself, and in the database against it.

use std::collections::{BTreeMap, BTreeSet};

use chrono::{TimeDelta, Utc};
use dedup_gate::domain::Time;
use dedup_gate::domain::act::Act;
use dedup_gate::domain::ledger::{Outcome, Report};
use dedup_gate::domain::text::IdempotencyKey;
use serde_json::Value;

use super::callers::Kind;
use super::effects::{ARRIVAL, Delivered, Recipient, Stored, judge, pending};
use super::helpers::database::Database;
use super::helpers::service::Client;
use super::helpers::{wait_until, wait_within};
use super::history::{Call, Effect, Heard, Record, Request};
use super::linearize::{Fault, check};

/// Who reads all entries in the end.
const AUDITOR: &str = "auditor";

/// What a run came to.
#[derive(Default)]
pub(crate) struct Findings {
    /// What is wrong; empty where nothing is.
    pub(crate) wrong: Vec<String>,
    pub(crate) keys: usize,
    /// Calls, by what came of them.
    pub(crate) calls: BTreeMap<String, usize>,
    pub(crate) effects: usize,
    /// Entries that hang, and are listed as stale.
    pub(crate) stale: usize,
    /// The most steps that the check of one key took.
    pub(crate) steps: u64,
    pub(crate) delivered: Delivered,
}

/// Reads every entry, and judges all that was recorded. Nothing may be on its way any more.
pub(crate) fn verify(
    record: &Record,
    clients: &[Client],
    database: &Database,
    recipient: &Recipient,
) -> Findings {
    let (mut calls, effects) = record.take();
    let mut findings = Findings {
        keys: calls.len(),
        calls: count(&calls),
        effects: effects.len(),
        ..Findings::default()
    };
    for (key, client) in calls.keys().zip(clients.iter().cycle()) {
        let read = Request::Read(IdempotencyKey::from_store(key.clone()));
        let read = record.call(client, AUDITOR, &read);
        read.expect("a service that nothing disturbs answers");
    }
    for (key, read) in record.take().0 {
        calls.entry(key).or_default().extend(read);
    }
    let stored = Stored::read(database);
    for calls in calls.values_mut() {
        stored.name(calls);
    }
    findings.delivered = judge(&calls, &stored, recipient, false);
    findings.wrong.append(&mut findings.delivered.wrong);
    for calls in calls.values() {
        findings.wrong.extend(internal_faults(calls));
        findings.wrong.extend(two_winners(calls));
        findings.wrong.extend(lost_outcomes(calls));
        findings.wrong.extend(too_many_effects(calls, &effects));
        match check(calls) {
            Ok(steps) => findings.steps = findings.steps.max(steps),
            Err(fault) => findings.wrong.push(told(calls, &fault)),
        }
    }
    findings.wrong.extend(unknown_rows(&calls, database));
    let hanging = hanging(&calls);
    findings.stale = hanging.len();
    // This waits for leases to run out, which can be spared where enough is known.
    if findings.wrong.is_empty() {
        let unlisted = unlisted(&hanging, &clients[0], &calls);
        findings.wrong.extend(unlisted);
    }
    // So does this, for leases of effects.
    if findings.wrong.is_empty() {
        wait_within(ARRIVAL, "the last effects have arrived", || {
            pending(database) == 0
        });
        findings.delivered = judge(&calls, &Stored::read(database), recipient, true);
        findings.wrong.append(&mut findings.delivered.wrong);
    }
    findings
}

fn count(calls: &BTreeMap<String, Vec<Call>>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for call in calls.values().flatten() {
        let outcome = match &call.answer {
            Err(why) => format!("unknown: {why}"),
            Ok(heard) if heard.status != 200 => {
                format!(
                    "{} {}",
                    heard.status,
                    heard.body["code"].as_str().unwrap_or_default()
                )
            }
            Ok(heard) => match (
                &heard.body["claimed"],
                &heard.body["replayed"],
                &heard.body["changed"],
            ) {
                (Value::Bool(true), Value::Bool(true), _) => "claimed, again".to_owned(),
                (Value::Bool(true), ..) => "claimed".to_owned(),
                (Value::Bool(false), ..) => "duplicate".to_owned(),
                (_, _, Value::Bool(true)) => "recorded".to_owned(),
                (_, _, Value::Bool(false)) => "known already".to_owned(),
                _ => "read".to_owned(),
            },
        };
        *counts.entry(outcome).or_default() += 1;
    }
    counts
}

fn key_of(calls: &[Call]) -> &str {
    calls[0].request.key()
}

fn answers(calls: &[Call]) -> impl Iterator<Item = (&Call, &Heard)> {
    calls
        .iter()
        .filter_map(|call| Some((call, call.answer.as_ref().ok()?)))
}

/// What breaks around the service is no fault of its own.
fn internal_faults(calls: &[Call]) -> Option<String> {
    let fault = calls
        .iter()
        .find(|call| matches!(&call.answer, Err(why) if why.starts_with("500")))?;
    Some(format!("the service has a fault of its own: {fault}"))
}

/// Nobody but one execution is told that an attempt is its own.
fn two_winners(calls: &[Call]) -> Option<String> {
    let mut winners: BTreeMap<u64, BTreeSet<&str>> = BTreeMap::new();
    for (call, heard) in answers(calls) {
        if heard.body["claimed"] == true && heard.body["replayed"] == false {
            let attempt = heard.body["attempt"].as_u64().unwrap_or_default();
            winners.entry(attempt).or_default().insert(&call.process);
        }
    }
    let (attempt, winners) = winners.iter().find(|(_, winners)| winners.len() > 1)?;
    Some(format!(
        "{}: {winners:?} have all won attempt {attempt}\n{}",
        key_of(calls),
        lines(calls, &[])
    ))
}

/// What was accepted as done stands in the history, with its id: each execution has an id of its own.
fn lost_outcomes(calls: &[Call]) -> Option<String> {
    let history = last_entry(calls).and_then(|entry| entry["history"].as_array());
    let is_lost = |call: &Call, heard: &Heard| match &call.request {
        Request::Act(Act::Report(Report {
            outcome: Outcome::Done { external_id, .. },
            ..
        })) if heard.status == 200 => !history.into_iter().flatten().any(|event| {
            let known = event["detail"]["external_id"].as_str();
            event["event"] == "done" && (external_id.is_none() || known == external_id.as_deref())
        }),
        _ => false,
    };
    let (lost, _) = answers(calls).find(|(call, heard)| is_lost(call, heard))?;
    Some(format!(
        "{}: what was accepted is lost: {lost}\n{}",
        key_of(calls),
        lines(calls, &[])
    ))
}

/// Where stale work is held, no window passes, nobody decides by hand, and every report is honest,
/// an order has one effect at most.
fn too_many_effects(calls: &[Call], effects: &[Effect]) -> Option<String> {
    let key = key_of(calls);
    let effects: Vec<&Effect> = effects.iter().filter(|effect| effect.key == key).collect();
    let is_too_many = Kind::of(key) == Kind::Hold && effects.len() > 1;
    is_too_many.then(|| {
        let by: Vec<&str> = effects
            .iter()
            .map(|effect| effect.process.as_str())
            .collect();
        format!("{key}: effects by {by:?}\n{}", lines(calls, &[]))
    })
}

/// The entry as the auditor has read it; none where the key is unknown.
fn last_entry(calls: &[Call]) -> Option<&Value> {
    let (call, heard) = answers(calls).last()?;
    (call.process == AUDITOR && heard.status == 200).then_some(&heard.body)
}

/// The gate has a row of each key that somebody was told of, and of no other.
fn unknown_rows(calls: &BTreeMap<String, Vec<Call>>, database: &Database) -> Option<String> {
    let known: BTreeSet<&str> = calls
        .iter()
        .filter(|(_, calls)| last_entry(calls).is_some())
        .map(|(key, _)| key.as_str())
        .collect();
    let (first, last) = (known.first()?, known.last()?);
    let rows = database.sql(&format!(
        "SELECT idempotency_key FROM processed_orders WHERE idempotency_key BETWEEN '{first}' AND '{last}'"
    ));
    let rows: BTreeSet<&str> = rows.lines().collect();
    let differing: Vec<&&str> = known.symmetric_difference(&rows).collect();
    (!differing.is_empty()).then(|| format!("entries and rows differ: {differing:?}"))
}

/// The keys of which an attempt was opened that nobody has reported on, by what callers know as well as
/// by what the entry says.
fn hanging(calls: &BTreeMap<String, Vec<Call>>) -> BTreeSet<&str> {
    let hangs = |calls: &[Call]| {
        let Some(entry) = last_entry(calls) else {
            return false;
        };
        if matches!(entry["status"].as_str(), Some("pending" | "stale")) {
            return true;
        }
        // Somebody has heard that it is theirs, and nobody has said anything of it since.
        let attempt = &entry["attempt"];
        let is_opened = answers(calls).any(|(_, heard)| {
            heard.body["claimed"] == true
                && heard.body["status"] == "pending"
                && heard.body["attempt"] == *attempt
        });
        let is_spoken_of = calls.iter().any(|call| match &call.request {
            Request::Act(Act::Report(report)) => {
                report.attempt.is_none_or(|named| *attempt == named)
                    // It counts for the entry whatever its attempt.
                    || matches!(report.outcome, Outcome::Done { .. })
            }
            Request::Act(Act::Review(_) | Act::Reset(_)) => true,
            _ => false,
        });
        is_opened && !is_spoken_of
    };
    let hanging = calls.iter().filter(|(_, calls)| hangs(calls));
    hanging.map(|(key, _)| key.as_str()).collect()
}

/// What hangs is listed, as stale once its lease has run out.
fn unlisted(
    hanging: &BTreeSet<&str>,
    client: &Client,
    calls: &BTreeMap<String, Vec<Call>>,
) -> Option<String> {
    let listed = |status| {
        let mut keys = list(client, status);
        keys.retain(|key| calls.contains_key(key));
        keys
    };
    // A renewal by a claim without a lease of its own has one of 15 minutes: those stay pending.
    let is_long = |key: &String| {
        let entry = last_entry(&calls[key]);
        let lease = entry.and_then(|entry| entry["lease_expires_at"].as_str()?.parse().ok());
        lease.is_some_and(|lease: Time| lease - Utc::now() > TimeDelta::seconds(60))
    };
    let mut pending = BTreeSet::new();
    wait_until("the last leases have run out", || {
        pending = listed("pending");
        pending.iter().all(is_long)
    });
    let stale = listed("stale");
    let listed: BTreeSet<&str> = stale.iter().chain(&pending).map(String::as_str).collect();
    let differing: Vec<&str> = hanging.symmetric_difference(&listed).copied().collect();
    (!differing.is_empty()).then(|| {
        let histories: Vec<String> = differing
            .iter()
            .map(|&key| lines(&calls[key], &[]))
            .collect();
        format!(
            "what hangs and what is listed differ: {differing:?}\n{}",
            histories.join("\n")
        )
    })
}

/// The keys of all entries in a state.
fn list(client: &Client, status: &str) -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    let mut path = format!("/ledger?status={status}&limit=500");
    loop {
        let page = client.get(&path).ok();
        let entries = page["entries"].as_array().unwrap();
        let names = entries
            .iter()
            .filter_map(|entry| entry["idempotency_key"].as_str());
        keys.extend(names.map(str::to_owned));
        let Some(cursor) = page["next_cursor"].as_str() else {
            return keys;
        };
        path = format!("/ledger?status={status}&limit=500&cursor={cursor}");
    }
}

fn told(calls: &[Call], fault: &Fault) -> String {
    match fault {
        Fault::NotLinearizable(explained) => format!(
            "{}: no order explains this (the order that goes furthest has those with a +)\n{}",
            key_of(calls),
            lines(calls, explained)
        ),
        Fault::TooManySteps => format!(
            "{}: too many steps to say whether an order explains this\n{}",
            key_of(calls),
            lines(calls, &[])
        ),
    }
}

fn lines(calls: &[Call], marked: &[usize]) -> String {
    let line = |(index, call)| {
        let mark = if marked.contains(&index) { '+' } else { ' ' };
        format!("  {mark} {call}\n")
    };
    calls.iter().enumerate().map(line).collect()
}
