//! A proxy that loses replies: what was asked is done, and nobody hears of it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// A proxy on 127.0.0.1. It ends with the test.
pub(crate) struct Lossy {
    pub(crate) port: u16,
    plan: Arc<Plan>,
}

#[derive(Default)]
struct Plan {
    /// What a request contains whose reply will be lost, once for each.
    losses: Mutex<Vec<&'static str>>,
    over: AtomicBool,
}

impl Plan {
    /// Whether the reply to this request is to be lost.
    fn takes(&self, request: &[u8]) -> bool {
        let text = String::from_utf8_lossy(request);
        let mut losses = self.losses.lock().unwrap();
        let index = losses.iter().position(|part| text.contains(part));
        index.map(|index| losses.remove(index)).is_some()
    }
}

impl Lossy {
    /// Listens on `port` (0 for a free one), for what listens on `upstream`.
    pub(crate) fn start(port: u16, upstream: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let plan = Arc::new(Plan::default());
        let shared = Arc::clone(&plan);
        thread::spawn(move || {
            for client in listener.incoming() {
                if shared.over.load(Ordering::SeqCst) {
                    return;
                }
                let server = TcpStream::connect(("127.0.0.1", upstream)).unwrap();
                relay(client.unwrap(), server, &shared);
            }
        });
        Self { port, plan }
    }

    /// Loses the replies to the next `times` requests that contain a text, and their connections.
    pub(crate) fn lose(&self, part: &'static str, times: usize) {
        self.plan.losses.lock().unwrap().extend(vec![part; times]);
    }

    /// How many replies are still to be lost.
    pub(crate) fn left(&self) -> usize {
        self.plan.losses.lock().unwrap().len()
    }
}

impl Drop for Lossy {
    fn drop(&mut self) {
        self.plan.over.store(true, Ordering::SeqCst);
        // For the listener to notice.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// Carries one connection. A request is what comes at once, which is so for short ones.
fn relay(client: TcpStream, server: TcpStream, plan: &Arc<Plan>) {
    let is_losing = Arc::new(AtomicBool::new(false));
    let (plan, losing) = (Arc::clone(plan), Arc::clone(&is_losing));
    let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    carry(from, to, move |request| {
        if plan.takes(request) {
            losing.store(true, Ordering::SeqCst);
        }
        true
    });
    // Whoever has begun to answer has done what was asked.
    carry(server, client, move |_| !is_losing.load(Ordering::SeqCst));
}

/// Carries one direction, for as long as what comes `may_pass`.
fn carry(
    mut from: TcpStream,
    mut to: TcpStream,
    may_pass: impl Fn(&[u8]) -> bool + Send + 'static,
) {
    thread::spawn(move || {
        let mut buffer = [0; 65_536];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            if !may_pass(&buffer[..length]) || to.write_all(&buffer[..length]).is_err() {
                let _ = from.shutdown(Shutdown::Both);
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}
