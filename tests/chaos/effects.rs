//! Where effects go, on a bad day; and whether all of them came that had to, and no other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dedup_gate::domain::act::Act;
use dedup_gate::domain::effect::Effect;
use serde_json::{Value, json};

use super::helpers::database::Database;
use super::helpers::random::Random;
use super::helpers::receiver::{Answer, Received, Receiver};
use super::history::{Call, Request};

/// How long a replica waits for the receiver.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(1);

/// How long effects may take to arrive once everything is whole: the lease of a replica that was killed lasts for
/// 16 s, and what waits behind that effect may be leased by one more.
pub(crate) const ARRIVAL: Duration = Duration::from_secs(60);

/// In which mood the receiver is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mood {
    /// It takes everything.
    Well,
    /// Now and then something goes wrong.
    Normal,
    /// Most of it is refused with 500 or 503.
    Failing,
    /// Most of it is never answered.
    Hanging,
    /// Most connections end before the answer: of some webhooks that it has taken.
    Dropping,
    /// It answers late, and sometimes so late that nobody waits any more.
    Slow,
}

/// A webhook that the receiver has seen.
#[derive(Debug, Clone)]
struct Sight {
    id: String,
    key: String,
    topic: String,
    payload: String,
    /// Whether it was answered 2xx, or would have been.
    is_taken: bool,
}

/// A receiver of effects with moods. It remembers what it has seen, in order, and what it has taken.
pub(crate) struct Recipient {
    receiver: Receiver,
    mood: Arc<Mutex<Mood>>,
    seen: Arc<Mutex<Vec<Sight>>>,
}

impl Recipient {
    pub(crate) fn start() -> Self {
        let receiver = Receiver::start();
        let mood = Arc::new(Mutex::new(Mood::Well));
        let seen: Arc<Mutex<Vec<Sight>>> = Arc::default();
        let (current, sights) = (Arc::clone(&mood), Arc::clone(&seen));
        let mut random = Random::of(u64::from(receiver.port));
        receiver.behave(move |received| {
            let (answer, is_taken) = answer(*current.lock().unwrap(), &mut random);
            sights.lock().unwrap().push(Sight::new(received, is_taken));
            answer
        });
        Self {
            receiver,
            mood,
            seen,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.receiver.port
    }

    pub(crate) fn set(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    fn seen(&self) -> Vec<Sight> {
        self.seen.lock().unwrap().clone()
    }
}

impl Sight {
    fn new(received: &Received, is_taken: bool) -> Self {
        let header = |name: &str| received.headers[name].clone();
        Self {
            id: received.id().to_owned(),
            key: header("x-dedup-gate-key"),
            topic: header("x-dedup-gate-topic"),
            payload: received.text().to_owned(),
            is_taken,
        }
    }
}

/// What it does in a mood, and whether it has taken the webhook then.
fn answer(mood: Mood, random: &mut Random) -> (Answer, bool) {
    let often = match mood {
        Mood::Well => 0,
        Mood::Normal => 15,
        _ => 70,
    };
    if random.below(100) >= often {
        return (Answer::Status(204), true);
    }
    let moods = [Mood::Failing, Mood::Hanging, Mood::Dropping, Mood::Slow];
    match if mood == Mood::Normal {
        *random.one_of(&moods)
    } else {
        mood
    } {
        Mood::Failing => (Answer::Status(*random.one_of(&[500, 503])), false),
        Mood::Hanging => (Answer::Hang, random.below(2) == 0),
        Mood::Dropping => (Answer::Drop, random.below(2) == 0),
        _ => {
            let millis = random.below(1400) as u64;
            (Answer::Late(Duration::from_millis(millis), 200), true)
        }
    }
}

/// What is asked of the service: its name among callers is its payload, which no other effect has.
pub(crate) fn named(topic: &str, payload: &Value, due: dedup_gate::domain::effect::Due) -> Effect {
    Effect {
        id: payload.to_string(),
        topic: topic.to_owned(),
        payload: payload.to_string(),
        due,
    }
}

/// The effects of a report, as its request has them.
pub(crate) fn written(effects: &[Effect]) -> Value {
    use dedup_gate::domain::effect::Due;
    let effect = |effect: &Effect| {
        let payload: Value = serde_json::from_str(&effect.payload).unwrap();
        let after = match effect.due {
            Due::In(seconds) => json!(seconds),
            _ => Value::Null,
        };
        json!({"topic": effect.topic, "payload": payload, "deliver_after": after})
    };
    effects.iter().map(effect).collect()
}

/// An effect, as the database has it.
#[derive(Debug)]
struct Row {
    id: String,
    seq: u32,
    topic: String,
    status: String,
    has_failed: bool,
    is_put_off: bool,
    payload: String,
}

/// The outbox, by keys.
pub(crate) struct Stored(BTreeMap<String, Vec<Row>>);

impl Stored {
    pub(crate) fn read(database: &Database) -> Self {
        let rows = database.sql(
            "SELECT idempotency_key, id, seq, topic, status, failures, \
                 CASE WHEN due_at > created_at THEN 1 ELSE 0 END, payload \
             FROM run_outbox ORDER BY idempotency_key, seq",
        );
        let mut stored: BTreeMap<String, Vec<Row>> = BTreeMap::new();
        for line in rows.lines() {
            let columns: Vec<&str> = line.splitn(8, '|').collect();
            let [key, id, seq, topic, status, failures, is_put_off, payload] = columns[..] else {
                panic!("a row has eight columns: {line}");
            };
            stored.entry(key.to_owned()).or_default().push(Row {
                id: id.to_owned(),
                seq: seq.parse().unwrap(),
                topic: topic.to_owned(),
                status: status.to_owned(),
                has_failed: failures != "0",
                is_put_off: is_put_off == "1",
                payload: payload.to_owned(),
            });
        }
        Self(stored)
    }

    fn of(&self, key: &str) -> &[Row] {
        self.0.get(key).map_or(&[], Vec::as_slice)
    }

    /// Puts callers' own names of effects in the place of the service's, in every history that was heard: a
    /// model cannot know those. What is not stored keeps its name, which nothing explains then.
    pub(crate) fn name(&self, calls: &mut [Call]) {
        let Some(key) = calls.first().map(|call| call.request.key().to_owned()) else {
            return;
        };
        let rows = self.of(&key);
        let heard = calls
            .iter_mut()
            .filter_map(|call| call.answer.as_mut().ok());
        let events = heard.filter_map(|heard| heard.body["history"].as_array_mut());
        for event in events.flatten().filter(|event| event["event"] == "effects") {
            for id in event["detail"]["ids"].as_array_mut().into_iter().flatten() {
                if let Some(row) = rows.iter().find(|row| *id == row.id.as_str()) {
                    *id = row.payload.as_str().into();
                }
            }
        }
    }
}

/// What became of the effects of a run.
#[derive(Debug, Default)]
pub(crate) struct Delivered {
    pub(crate) stored: usize,
    /// What the receiver saw of them, and how many times it saw one again.
    pub(crate) seen: usize,
    pub(crate) again: usize,
    pub(crate) taken_again: usize,
    pub(crate) wrong: Vec<String>,
}

/// How many effects are still to be delivered.
pub(crate) fn pending(database: &Database) -> usize {
    let count = "SELECT count(*) FROM run_outbox WHERE status = 'pending'";
    database.sql(count).parse().unwrap()
}

/// Judges what is stored, and what was seen, of these keys, whose effects are `named`. Once `is_over`, every
/// effect has to be delivered.
pub(crate) fn judge(
    calls: &BTreeMap<String, Vec<Call>>,
    stored: &Stored,
    recipient: &Recipient,
    is_over: bool,
) -> Delivered {
    let mut delivered = Delivered::default();
    let mut seen: BTreeMap<String, Vec<Sight>> = BTreeMap::new();
    for sight in recipient.seen() {
        seen.entry(sight.key.clone()).or_default().push(sight);
    }
    for (key, calls) in calls {
        let rows = stored.of(key);
        let seen = seen.remove(key).unwrap_or_default();
        let ids: BTreeSet<&str> = seen.iter().map(|sight| sight.id.as_str()).collect();
        let taken = seen.iter().filter(|sight| sight.is_taken);
        let taken_ids: BTreeSet<&str> = taken.clone().map(|sight| sight.id.as_str()).collect();
        delivered.stored += rows.len();
        delivered.seen += seen.len();
        delivered.again += seen.len() - ids.len();
        delivered.taken_again += taken.count() - taken_ids.len();
        let faults = wrongly_stored(calls, rows)
            .into_iter()
            .chain(wrongly_sent(rows, &seen, is_over));
        for fault in faults {
            let text = format!("{key}: {fault}\n  stored: {rows:?}\n  seen: {seen:?}");
            delivered.wrong.push(text);
        }
    }
    delivered
}

/// What was accepted is stored, once; and what was refused is not.
fn wrongly_stored(calls: &[Call], rows: &[Row]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut sets = BTreeMap::new();
    for row in rows {
        let payload: Value = serde_json::from_str(&row.payload).unwrap();
        let name = |member: &str| payload[member].to_string();
        let set = (name("attempt"), name("outcome"), name("by"));
        sets.entry(set).or_insert_with(Vec::new).push(row);
        let may_be = calls.iter().any(|call| {
            let is_possible = call
                .answer
                .as_ref()
                .map_or(true, |heard| heard.status == 200);
            is_possible
                && effects_of(call)
                    .iter()
                    .any(|effect| effect.payload == row.payload)
        });
        if !may_be {
            wrong.push(format!(
                "{} is stored, and no report of it was accepted",
                row.id
            ));
        }
    }
    for call in calls {
        let effects = effects_of(call);
        let is_accepted = call.answer.as_ref().is_ok_and(|heard| heard.status == 200);
        for effect in effects.iter().filter(|_| is_accepted) {
            let found = rows
                .iter()
                .filter(|row| row.payload == effect.payload)
                .count();
            if found != 1 {
                wrong.push(format!(
                    "{effect:?} was accepted, and is stored {found} times"
                ));
            }
        }
    }
    // By the history, which names the attempt that was meant where the report did not.
    let history = calls.last().and_then(|call| call.answer.as_ref().ok());
    let history = history.and_then(|heard| heard.body["history"].as_array());
    let events: Vec<&Value> = history
        .into_iter()
        .flatten()
        .filter(|event| event["event"] == "effects")
        .collect();
    let outcomes: BTreeSet<(u64, &str)> = events
        .iter()
        .map(|event| {
            let outcome = event["detail"]["outcome"].as_str().unwrap();
            (event["attempt"].as_u64().unwrap(), outcome)
        })
        .collect();
    if outcomes.len() < events.len() {
        wrong.push("an outcome has effects twice".to_owned());
    }
    let told: Vec<&str> = events
        .iter()
        .flat_map(|event| event["detail"]["ids"].as_array().into_iter().flatten())
        .filter_map(Value::as_str)
        .collect();
    let kept: Vec<&str> = rows.iter().map(|row| row.payload.as_str()).collect();
    if told != kept {
        wrong.push(format!("the history tells of other effects: {told:?}"));
    }
    wrong
}

/// What was sent is stored, and the same each time; what counts as delivered was taken; and all in its turn.
fn wrongly_sent(rows: &[Row], seen: &[Sight], is_over: bool) -> Vec<String> {
    let mut wrong = Vec::new();
    for sight in seen {
        let is_stored = rows.iter().any(|row| {
            row.id == sight.id && row.payload == sight.payload && row.topic == sight.topic
        });
        if !is_stored {
            wrong.push(format!("this was sent, and is not stored: {sight:?}"));
        }
    }
    let first = |row: &Row| seen.iter().position(|sight| sight.id == row.id);
    for (index, row) in rows.iter().enumerate() {
        let is_taken = seen
            .iter()
            .any(|sight| sight.id == row.id && sight.is_taken);
        if row.status == "delivered" && !is_taken {
            wrong.push(format!(
                "{} counts as delivered, and nobody has taken it",
                row.id
            ));
        }
        if is_over && row.status != "delivered" {
            wrong.push(format!("{} is {} in the end", row.id, row.status));
        }
        // One that waits, for its time or for another try, lets those behind it pass.
        let is_before = |before: &Row| !before.has_failed && !before.is_put_off;
        for before in rows[..index].iter().filter(|before| is_before(before)) {
            let (Some(earlier), later) = (first(row), first(before)) else {
                continue;
            };
            if later.is_none_or(|later| later > earlier) {
                wrong.push(format!(
                    "{} was sent before {} (seq {})",
                    row.id, before.id, before.seq
                ));
            }
        }
    }
    wrong
}

fn effects_of(call: &Call) -> &[Effect] {
    match &call.request {
        Request::Act(Act::Report(report)) => &report.effects,
        _ => &[],
    }
}
