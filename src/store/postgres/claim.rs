//! How claims are decided.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashMap, HashSet};

use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::query_builder::{AstPass, QueryFragment, QueryId};
use diesel::sql_types::{Array, BigInt, Nullable, Text};

use super::insert::{Made, insert};
use super::lane::{Lane, enter};
use super::{
    PostgresStore, clock, lock_gate, lock_ledger, mark_opened, statement_timestamp, write_entries,
    write_events, write_gate,
};
use crate::domain::Time;
use crate::domain::claim::{Batch, Claim, Decided, Found, Write, decide_all, first};
use crate::domain::ledger::Event;
use crate::domain::text::IdempotencyKey;
use crate::store::rows::{self, At, GateRow, LedgerRow};
use crate::store::schema::{Instant, processed_orders as gate, run_ledger as ledger};
use crate::store::{StoreError, first_of_each_key};

/// How often a row is tried to be made that is neither made nor there.
const INSERT_TRIES: u32 = 5;

impl PostgresStore {
    /// What is new is won by one statement, unless an entry of the ledger is to be opened with it.
    pub(super) fn decide_new(&self, claims: &[Claim]) -> Vec<Result<Option<Decided>, StoreError>> {
        let mut new = enter(&self.new);
        let asked: Vec<&Claim> = first_of_each_key(claims)
            .into_values()
            .filter(|claim| claim.pending.is_none() && !new.left.contains(&claim.key))
            .collect();
        let made = match asked.as_slice() {
            [] => Ok(None),
            asked => new.lane.win(asked),
        };
        let won = made
            .as_ref()
            .map(|made| made.as_ref().map_or_else(HashMap::new, Made::won));
        // The first claim on a key is the one that was asked for.
        let mut asked: HashSet<&IdempotencyKey> = asked.iter().map(|claim| &claim.key).collect();
        let answers: Vec<_> = claims
            .iter()
            .map(|claim| match &won {
                _ if !asked.remove(&claim.key) => Ok(None),
                Ok(won) => Ok(won.get(claim.key.as_str()).map(|&at| Ok(first(claim, at)))),
                Err(error) => Err((*error).clone()),
            })
            .collect();
        new.left = claims
            .iter()
            .zip(&answers)
            .filter(|(_, answer)| matches!(answer, Ok(None)))
            .map(|(claim, _)| claim.key.clone())
            .collect();
        answers
    }

    /// Most are duplicates, or claimants that ask again: what they are told follows from what is
    /// there, and no more than counters change. Only what changes more is decided behind locks.
    pub(super) fn decide_known(&self, claims: &[Claim]) -> Vec<Result<Decided, StoreError>> {
        let mut lane = enter(&self.known);
        let seen = match lane.run(|connection| self.see(connection, claims)) {
            Ok(seen) => seen,
            Err(error) => return vec![Err(error); claims.len()],
        };
        let rest: Vec<&Claim> = claims
            .iter()
            .zip(&seen)
            .filter(|(_, seen)| seen.is_none())
            .map(|(claim, _)| claim)
            .collect();
        let mut decided = match rest.as_slice() {
            [] => Ok(Vec::new()),
            rest => lane.transact(|connection| self.decide(connection, rest, Batch::Lane)),
        }
        .map(Vec::into_iter);
        seen.into_iter()
            .map(|seen| match (seen, &mut decided) {
                (Some(seen), _) => Ok(seen),
                (None, Ok(decided)) => Ok(decided.next().expect("one for each that was not seen")),
                (None, Err(error)) => Err(error.clone()),
            })
            .collect()
    }

    /// Decides, without a lock, claims that change no more than counters, and counts them. Each has
    /// the answer that was right when the rows were read.
    fn see(
        &self,
        connection: &mut PgConnection,
        claims: &[Claim],
    ) -> Result<Vec<Option<Decided>>, StoreError> {
        let keys: Vec<&str> = first_of_each_key(claims)
            .keys()
            .map(|key| key.as_str())
            .collect();
        let rows: Vec<(GateRow, Option<LedgerRow>, At)> = gate::table
            .left_join(ledger::table.on(ledger::idempotency_key.eq(gate::idempotency_key)))
            .filter(gate::idempotency_key.eq_any(keys))
            .select((
                GateRow::as_select(),
                Option::<LedgerRow>::as_select(),
                statement_timestamp(),
            ))
            .load(connection)?;
        let Some(now) = rows.iter().map(|(_, _, now)| now.0).max() else {
            return Ok(claims.iter().map(|_| None).collect());
        };
        let mut found = BTreeMap::new();
        for (row, entry, _) in rows {
            if let Some(state) = rows::state(Some(&row), entry.as_ref())? {
                found.insert(
                    IdempotencyKey::from_store(row.idempotency_key),
                    Found::Known(state),
                );
            }
        }
        let known: Vec<&Claim> = claims
            .iter()
            .filter(|claim| found.contains_key(&claim.key))
            .collect();
        let (decided, writes) = decide_all(&known, Batch::Lane, &found, now, self.replay_window);
        let changed: HashSet<&IdempotencyKey> = writes
            .iter()
            .filter(|write| write.changed)
            .map(|write| &write.key)
            .collect();
        let seen: Vec<&Write> = writes
            .iter()
            .filter(|write| !write.changed && write.seen > 0)
            .collect();
        count(connection, &seen)?;
        let mut decided = decided.into_iter();
        Ok(claims
            .iter()
            .map(|claim| {
                let decided = found
                    .contains_key(&claim.key)
                    .then(|| decided.next())
                    .flatten();
                decided.filter(|_| !changed.contains(&claim.key))
            })
            .collect())
    }

    /// Decides claims, and writes what that changes.
    pub(super) fn decide(
        &self,
        connection: &mut PgConnection,
        claims: &[impl Borrow<Claim>],
        batch: Batch,
    ) -> Result<Vec<Decided>, StoreError> {
        let found = find(connection, &first_of_each_key(claims))?;
        // Where all are new, it is the time at which they were made.
        let made: Option<Vec<Time>> = found.values().map(Found::made_at).collect();
        let now = match made.and_then(|made| made.into_iter().max()) {
            Some(now) => now,
            None => clock(connection)?,
        };
        let (verdicts, writes) = decide_all(claims, batch, &found, now, self.replay_window);
        // An array with a fault is rolled back: see Store::claim.
        if batch == Batch::Lane || verdicts.iter().all(Result::is_ok) {
            write_all(connection, &writes, &found)?;
        }
        Ok(verdicts)
    }
}

/// The lane for what is new.
pub(super) struct New {
    pub(super) lane: Lane,
    /// What the last batch left. A key that is in each of them is hot, and not asked for each time:
    /// it is left again.
    pub(super) left: HashSet<IdempotencyKey>,
}

/// Makes or locks the row of every key that is claimed, and says what is known of it.
fn find(
    connection: &mut PgConnection,
    firsts: &BTreeMap<&IdempotencyKey, &Claim>,
) -> Result<BTreeMap<IdempotencyKey, Found>, StoreError> {
    let mut new: HashMap<String, Time> = HashMap::new();
    let mut old = BTreeMap::new();
    let mut in_ledger = Vec::new();
    // A row that stood in the way of the insert may be deleted by hand before it is locked:
    // then its key is free, and the insert is tried again. Not for ever: a trigger may keep the
    // row from appearing.
    for _ in 0..INSERT_TRIES {
        let missing: Vec<&Claim> = firsts
            .iter()
            .filter(|(key, _)| !new.contains_key(key.as_str()) && !old.contains_key(key.as_str()))
            .map(|(_, claim)| *claim)
            .collect();
        if missing.is_empty() {
            break;
        }
        if let Some(made) = insert(connection, &missing)? {
            new.extend(made.keys.into_iter().map(|key| (key, made.at)));
            in_ledger.extend(made.in_ledger);
        }
        let losers: Vec<&str> = missing
            .iter()
            .filter(|claim| !new.contains_key(claim.key.as_str()))
            .map(|claim| claim.key.as_str())
            .collect();
        old.extend(lock_gate(connection, &losers)?);
    }
    let known: Vec<&str> = in_ledger
        .iter()
        .chain(old.keys())
        .map(String::as_str)
        .collect();
    let entries = lock_ledger(connection, &known)?;
    firsts
        .keys()
        .map(|&key| {
            let row = old.get(key.as_str());
            let entry = entries.get(key.as_str());
            let found = match (rows::state(row, entry)?, new.get(key.as_str())) {
                (Some(state), _) => Found::Known(state),
                (None, Some(&at)) => Found::New(at),
                (None, None) => {
                    return Err(StoreError::Unavailable(format!(
                        "the row of {:?} neither can be made nor is there",
                        key.as_str()
                    )));
                }
            };
            Ok((key.clone(), found))
        })
        .collect()
}

/// Writes what a batch of claims has changed.
fn write_all(
    connection: &mut PgConnection,
    writes: &[Write],
    found: &BTreeMap<IdempotencyKey, Found>,
) -> Result<(), StoreError> {
    let seen: Vec<&Write> = writes.iter().filter(|write| write.seen > 0).collect();
    count(connection, &seen)?;
    let changed: Vec<&Write> = writes.iter().filter(|write| write.changed).collect();
    let entries: Vec<LedgerRow> = changed
        .iter()
        .filter(|write| write.state.in_ledger)
        .map(|write| LedgerRow::of_state(&write.key, &write.state))
        .collect();
    write_entries(connection, &entries)?;
    let opened: Vec<&str> = changed
        .iter()
        .filter(|write| write.state.in_ledger)
        .filter(|write| match &found[&write.key] {
            Found::Known(state) => !state.in_ledger,
            Found::New(_) => write.changed_again,
        })
        .map(|write| write.key.as_str())
        .collect();
    if !opened.is_empty() {
        mark_opened(connection, &opened)?;
    }
    // A row that was made just now says all this already.
    let claimed_anew: Vec<GateRow> = changed
        .iter()
        .filter(|write| !write.state.in_ledger)
        .filter(|write| write.changed_again || matches!(found[&write.key], Found::Known(_)))
        .map(|write| GateRow::of_state(&write.key, &write.state))
        .collect();
    write_gate(connection, &claimed_anew)?;
    let events: Vec<(&IdempotencyKey, &[Event])> = changed
        .iter()
        .map(|write| (&write.key, write.events.as_slice()))
        .collect();
    write_events(connection, &events)
}

/// Adds up the duplicates of all keys in one statement.
fn count(connection: &mut PgConnection, writes: &[&Write]) -> QueryResult<()> {
    if writes.is_empty() {
        return Ok(());
    }
    let count = Count {
        keys: writes.iter().map(|write| write.key.as_str()).collect(),
        seen: writes
            .iter()
            .map(|write| write.seen.cast_signed())
            .collect(),
        at: writes
            .iter()
            .map(|write| write.state.last_seen_at.map(At))
            .collect(),
    };
    count.execute(connection)?;
    Ok(())
}

struct Count<'a> {
    keys: Vec<&'a str>,
    seen: Vec<i64>,
    at: Vec<Option<At>>,
}

impl QueryFragment<Pg> for Count<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(
            "UPDATE processed_orders SET seen_again = seen_again + seen.n, \
                 last_seen_at = greatest(last_seen_at, seen.at) \
             FROM unnest(",
        );
        out.push_bind_param::<Array<Text>, _>(&self.keys)?;
        out.push_sql(", ");
        out.push_bind_param::<Array<BigInt>, _>(&self.seen)?;
        out.push_sql(", ");
        out.push_bind_param::<Array<Nullable<Instant>>, _>(&self.at)?;
        out.push_sql(") AS seen (k, n, at) WHERE idempotency_key = seen.k");
        Ok(())
    }
}

impl QueryId for Count<'_> {
    type QueryId = Count<'static>;
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl RunQueryDsl<PgConnection> for Count<'_> {}
