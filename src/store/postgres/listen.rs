//! Hears of effects that other replicas have stored.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::pg::PgConnection;

use super::connect::Server;
use super::outbox::CHANNEL;
use crate::store::{StoreError, one_line};

/// How often it is looked for what has come: a look into the socket, which asks the server nothing.
const LOOK: Duration = Duration::from_millis(50);

/// How often the server is asked whether it is still there.
const PROBE: Duration = Duration::from_secs(30);

/// How long to wait before connecting again.
const REST: Duration = Duration::from_secs(1);

/// Starts a thread that listens for as long as the process lives; what is returned says whether it does just now.
/// Behind a pooler there is no session to listen in.
pub(super) fn start(server: &Server, on_effects: Box<dyn Fn() + Send>) -> Arc<AtomicBool> {
    let is_listening = Arc::new(AtomicBool::new(false));
    let (server, says) = (server.clone(), Arc::clone(&is_listening));
    thread::spawn(move || {
        while !server.is_pooled() {
            if let Err(error) = listen(&server, &on_effects, &says) {
                log::debug!("not listening for effects: {error}");
            }
            says.store(false, Ordering::Relaxed);
            // Whoever relied on it looks for themselves.
            on_effects();
            sleep(REST);
        }
    });
    is_listening
}

fn listen(server: &Server, on_effects: &dyn Fn(), says: &AtomicBool) -> Result<(), StoreError> {
    let mut connection: PgConnection = server
        .connect()
        .map_err(|error| StoreError::Unavailable(one_line(&error.to_string())))?;
    connection.batch_execute(&format!("LISTEN {CHANNEL}"))?;
    says.store(true, Ordering::Relaxed);
    // Whatever was stored meanwhile.
    on_effects();
    let mut asked = Instant::now();
    while !server.is_pooled() {
        sleep(LOOK);
        let mut has_heard = false;
        for notification in connection.notifications_iter() {
            notification?;
            has_heard = true;
        }
        if has_heard {
            on_effects();
        }
        if asked.elapsed() > PROBE {
            connection.batch_execute("SELECT")?;
            asked = Instant::now();
        }
    }
    Ok(())
}
