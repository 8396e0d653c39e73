//! A proxy that loses replies: what was asked is done, and nobody hears of it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// A proxy between n8n and the service. It ends with the test.
pub(crate) struct Lossy {
    address: String,
    plan: Arc<Plan>,
}

#[derive(Default)]
struct Plan {
    /// The paths whose next replies will be lost, once for each.
    losses: Mutex<Vec<&'static str>>,
    over: AtomicBool,
}

impl Lossy {
    /// Listens on `port`, for what listens on `upstream`.
    pub(crate) fn start(port: u16, upstream: u16) -> Self {
        let address = format!("127.0.0.1:{port}");
        let listener = TcpListener::bind(&address).unwrap();
        let plan = Arc::new(Plan::default());
        let shared = Arc::clone(&plan);
        thread::spawn(move || {
            for client in listener.incoming() {
                if shared.over.load(Ordering::SeqCst) {
                    return;
                }
                let (client, plan) = (client.unwrap(), Arc::clone(&shared));
                thread::spawn(move || relay(client, upstream, &plan));
            }
        });
        Self { address, plan }
    }

    /// Loses the next `times` replies to a path.
    pub(crate) fn lose(&self, path: &'static str, times: usize) {
        self.plan.losses.lock().unwrap().extend(vec![path; times]);
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
        let _ = TcpStream::connect(&self.address);
    }
}

/// Carries one connection. n8n makes one request on each, and asks for it to be closed.
fn relay(client: TcpStream, upstream: u16, plan: &Plan) {
    let mut request = BufReader::new(client.try_clone().unwrap());
    let mut line = String::new();
    request.read_line(&mut line).unwrap();
    let mut server = TcpStream::connect(("127.0.0.1", upstream)).unwrap();
    server.write_all(line.as_bytes()).unwrap();
    let mut sink = server.try_clone().unwrap();
    thread::spawn(move || std::io::copy(&mut request, &mut sink));
    let mut reply = Vec::new();
    // The service has answered, and so has committed, before anything is lost.
    server.read_to_end(&mut reply).unwrap();
    let path = line.split(' ').nth(1).unwrap();
    let mut losses = plan.losses.lock().unwrap();
    match losses.iter().position(|lost| *lost == path) {
        Some(index) => drop(losses.remove(index)),
        None => (&client).write_all(&reply).unwrap(),
    }
    let _ = client.shutdown(Shutdown::Both);
}
