//! A receiver of webhooks, which answers as a test wants it, and remembers what came.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// A receiver on 127.0.0.1. Its thread ends with the process.
#[derive(Clone)]
pub(crate) struct Receiver {
    pub(crate) port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    received: Mutex<Vec<Received>>,
    has_come: Condvar,
    behave: Mutex<Behaviour>,
}

type Behaviour = Box<dyn FnMut(&Received) -> Answer + Send>;

/// A webhook that came.
#[derive(Debug, Clone)]
pub(crate) struct Received {
    pub(crate) path: String,
    /// By their names in small letters.
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
    pub(crate) at: Instant,
}

impl Received {
    /// Its `webhook-id`.
    pub(crate) fn id(&self) -> &str {
        &self.headers["webhook-id"]
    }

    /// The body as text.
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

/// What the receiver does with a webhook.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    /// Answers with this status.
    Status(u16),
    /// Answers with this status and header.
    With(u16, &'static str, String),
    /// Answers with this status, so late.
    Late(Duration, u16),
    /// Never answers, and keeps the connection.
    Hang,
    /// Ends the connection.
    Drop,
}

impl Receiver {
    /// A receiver that takes everything.
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared {
            received: Mutex::new(Vec::new()),
            has_come: Condvar::new(),
            behave: Mutex::new(Box::new(|_| Answer::Status(200))),
        });
        let serving = Arc::clone(&shared);
        thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                let shared = Arc::clone(&serving);
                thread::spawn(move || serve(connection, &shared));
            }
        });
        Self { port, shared }
    }

    /// Its URL, with this path.
    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// From now on it does this.
    pub(crate) fn behave(&self, behave: impl FnMut(&Received) -> Answer + Send + 'static) {
        *self.shared.behave.lock().unwrap() = Box::new(behave);
    }

    /// What has come so far, in order.
    pub(crate) fn received(&self) -> Vec<Received> {
        self.shared.received.lock().unwrap().clone()
    }

    /// Waits until so many have come, and gives them all.
    pub(crate) fn wait_for(&self, count: usize) -> Vec<Received> {
        let received = self.shared.received.lock().unwrap();
        let (received, waited) = self
            .shared
            .has_come
            .wait_timeout_while(received, Duration::from_secs(30), |received| {
                received.len() < count
            })
            .unwrap();
        assert!(
            !waited.timed_out(),
            "waited in vain for {count} webhooks; there are {}",
            received.len()
        );
        received.clone()
    }
}

fn serve(connection: TcpStream, shared: &Shared) {
    let mut writer = connection.try_clone().unwrap();
    let mut reader = BufReader::new(connection);
    while let Some(received) = read(&mut reader) {
        let answer = (shared.behave.lock().unwrap())(&received);
        shared.received.lock().unwrap().push(received);
        shared.has_come.notify_all();
        let (status, header) = match answer {
            Answer::Status(status) => (status, String::new()),
            Answer::With(status, name, value) => (status, format!("{name}: {value}\r\n")),
            Answer::Late(time, status) => {
                thread::sleep(time);
                (status, String::new())
            }
            Answer::Hang => {
                // Until the other side has had enough.
                let _ = reader.read(&mut [0]);
                return;
            }
            Answer::Drop => return,
        };
        let head = format!("HTTP/1.1 {status} x\r\ncontent-length: 0\r\n{header}\r\n");
        if writer.write_all(head.as_bytes()).is_err() {
            return;
        }
    }
}

fn read(reader: &mut BufReader<TcpStream>) -> Option<Received> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let mut body = vec![0; headers.get("content-length")?.parse().ok()?];
    reader.read_exact(&mut body).ok()?;
    Some(Received {
        path,
        headers,
        body,
        at: Instant::now(),
    })
}
