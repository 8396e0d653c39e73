//! A proxy that loses replies: the request is done, and nobody hears of it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// A proxy between n8n and the service.
pub(crate) struct Lossy {
    /// How many replies it has still to lose.
    left: Arc<AtomicUsize>,
    address: String,
}

impl Lossy {
    /// Listens on `port`, and loses the first `losses` replies of what listens at `upstream`.
    pub(crate) fn start(port: u16, upstream: &str, losses: usize) -> Self {
        let address = format!("127.0.0.1:{port}");
        let listener = TcpListener::bind(&address).unwrap();
        let left = Arc::new(AtomicUsize::new(losses));
        let (upstream, counter) = (upstream.to_owned(), Arc::clone(&left));
        thread::spawn(move || {
            for client in listener.incoming() {
                // Woken up to end.
                if Arc::strong_count(&counter) == 1 {
                    return;
                }
                let (client, counter) = (client.unwrap(), Arc::clone(&counter));
                let server = TcpStream::connect(&upstream).unwrap();
                thread::spawn(move || relay(&client, &server, &counter));
            }
        });
        Self { left, address }
    }

    /// How many replies it has still to lose.
    pub(crate) fn left(&self) -> usize {
        self.left.load(Ordering::SeqCst)
    }
}

impl Drop for Lossy {
    fn drop(&mut self) {
        self.left = Arc::default();
        // For the listener to notice.
        let _ = TcpStream::connect(&self.address);
    }
}

/// Carries one connection, on which n8n makes one request.
fn relay(client: &TcpStream, server: &TcpStream, left: &AtomicUsize) {
    let (mut from_client, mut to_server) =
        (client.try_clone().unwrap(), server.try_clone().unwrap());
    thread::spawn(move || {
        let _ = std::io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Write);
    });
    let mut reply = Vec::new();
    // The service has answered, and so has committed, before anything is lost.
    let _ = (&*server).read_to_end(&mut reply);
    let lose = |left: usize| left.checked_sub(1);
    if left
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose)
        .is_err()
    {
        let _ = (&*client).write_all(&reply);
    }
    let _ = client.shutdown(Shutdown::Both);
}
