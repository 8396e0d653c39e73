//! How acts are done.

use std::collections::{BTreeMap, BTreeSet};

use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::{clock, lock_gate, lock_ledger, mark_opened, outbox, write_entries, write_events};
use crate::domain::act::Act;
use crate::domain::effect::Effect;
use crate::domain::ledger::Event;
use crate::domain::text::IdempotencyKey;
use crate::store::rows::{self, HistoryRow, LedgerRow};
use crate::store::schema::run_history as history;
use crate::store::{Acted, Known, StoreError};

/// Does what is asked, in its order; none where a key is unknown.
pub(super) fn act_all(
    connection: &mut PgConnection,
    acts: &[Act],
) -> Result<Vec<Option<Acted>>, StoreError> {
    let keys: BTreeSet<&IdempotencyKey> = acts.iter().map(Act::key).collect();
    let keys: Vec<&IdempotencyKey> = keys.into_iter().collect();
    let texts: Vec<&str> = keys.iter().map(|key| key.as_str()).collect();
    let rows = lock_gate(connection, &texts)?;
    let entries = lock_ledger(connection, &texts)?;
    let now = clock(connection)?;
    let mut histories = read_histories(connection, &texts)?;
    let mut found = BTreeMap::new();
    for key in keys {
        let (row, entry) = (rows.get(key.as_str()), entries.get(key.as_str()));
        if let Some(state) = rows::state(row, entry)? {
            let history = histories.remove(key.as_str()).unwrap_or_default();
            found.insert(key, Known::new(state, history));
        }
    }
    let acted = acts
        .iter()
        .map(|act| Some(found.get_mut(act.key())?.act(act, now)))
        .collect();

    found.retain(|_, known| known.is_changed);
    let entries: Vec<LedgerRow> = found
        .iter()
        .map(|(key, known)| LedgerRow::of_state(key, &known.state))
        .collect();
    write_entries(connection, &entries)?;
    let opened: Vec<&str> = found
        .iter()
        .filter(|(_, known)| known.is_opened())
        .map(|(key, _)| key.as_str())
        .collect();
    if !opened.is_empty() {
        mark_opened(connection, &opened)?;
    }
    let events: Vec<(&IdempotencyKey, &[Event])> = found
        .iter()
        .map(|(key, known)| (*key, known.events()))
        .collect();
    write_events(connection, &events)?;
    let effects: Vec<(&IdempotencyKey, &[Effect])> = found
        .iter()
        .map(|(key, known)| (*key, known.effects.as_slice()))
        .collect();
    outbox::store(connection, &effects, now)?;
    Ok(acted)
}

/// What happened to a key.
pub(super) fn read_history(
    connection: &mut PgConnection,
    key: &IdempotencyKey,
) -> Result<Vec<Event>, StoreError> {
    let mut histories = read_histories(connection, &[key.as_str()])?;
    Ok(histories.remove(key.as_str()).unwrap_or_default())
}

fn read_histories(
    connection: &mut PgConnection,
    keys: &[&str],
) -> Result<BTreeMap<String, Vec<Event>>, StoreError> {
    let rows: Vec<HistoryRow> = history::table
        .filter(history::idempotency_key.eq_any(keys))
        .order((history::idempotency_key, history::seq))
        .select(HistoryRow::as_select())
        .load(connection)?;
    let mut histories: BTreeMap<String, Vec<Event>> = BTreeMap::new();
    for row in &rows {
        let events = histories.entry(row.idempotency_key.clone()).or_default();
        events.push(row.event()?);
    }
    Ok(histories)
}
