//! How long what is over is kept: removes it in small batches, beside the load.

use std::fmt;
use std::time::{Duration, Instant};

use chrono::TimeDelta;
use tokio::time::sleep;

use crate::gate::{Gate, GateError};
use crate::store::{Sweep, Table};

/// How many keys go in one batch.
const BATCH: u32 = 500;

/// How often it is looked for what is over.
const EVERY: Duration = Duration::from_secs(600);

/// After a batch it rests for as many times as long as that took, so that the store has most of its
/// time for callers.
const REST: u32 = 9;

/// How long to wait for another replica that is at it.
const TURN: Duration = Duration::from_millis(200);

/// What to do where another replica is at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Others {
    /// Leave it to them.
    Yield,
    /// Wait for a turn.
    Wait,
}

/// Removes again and again what has been over for `kept`.
pub async fn run(gate: &Gate, kept: TimeDelta) {
    loop {
        match purge(gate, kept, Others::Yield).await {
            Ok(purged) if purged == Purged::default() => {}
            Ok(purged) => log::info!("removed {purged} that were over (RETENTION)"),
            Err(error) => log::warn!("nothing more is removed for now: {error}"),
        }
        sleep(EVERY).await;
    }
}

/// What was removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Purged {
    /// Keys, with all that was known of them.
    pub keys: u64,
    /// Effects that were delivered.
    pub effects: u64,
}

impl fmt::Display for Purged {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} keys", self.keys)?;
        match self.effects {
            0 => Ok(()),
            effects => write!(formatter, ", and {effects} delivered effects"),
        }
    }
}

/// Removes all that has been over for `kept`, and says how much that was.
///
/// # Errors
///
/// The store could not do it; the batches before stand.
pub async fn purge(gate: &Gate, kept: TimeDelta, others: Others) -> Result<Purged, GateError> {
    let mut purged = Purged::default();
    for table in [Table::Ledger, Table::Gate] {
        let mut from = None;
        loop {
            let begun = Instant::now();
            let sweep = Sweep {
                table,
                from,
                kept,
                limit: BATCH,
            };
            let Some(removed) = gate.remove(sweep).await? else {
                if others == Others::Yield {
                    return Ok(purged);
                }
                sleep(TURN).await;
                continue;
            };
            purged.keys += removed.count;
            from = removed.next;
            if from.is_none() {
                break;
            }
            sleep(begun.elapsed() * REST).await;
        }
    }
    loop {
        let begun = Instant::now();
        match gate.remove_effects(kept, BATCH).await? {
            Some(removed) => {
                purged.effects += removed;
                if removed < u64::from(BATCH) {
                    break;
                }
                sleep(begun.elapsed() * REST).await;
            }
            None if others == Others::Yield => break,
            None => sleep(TURN).await,
        }
    }
    Ok(purged)
}
