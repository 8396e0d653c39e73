//! The load generator of `scripts/bench`.
//!
//! It shares the machine with what it measures, so it is made to cost little: one thread, one
//! epoll, requests that are made once and patched, replies of which only the length, the status
//! and the verdict are read. Each connection sends its next request when it has the reply to the
//! last. A wrong verdict is an error, and with one the run has failed.

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use fastrand::Rng;
use mio::event::Event;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

/// Longer than any reply that is expected.
const REPLY: usize = 8192;

/// Nothing that is measured here is silent for so long, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(10);

/// How many connections are opened at a time where they are opened to stay idle: more at once
/// would weigh more than idle ones.
const OPENING: usize = 64;

/// Sends claims to a service, checks each verdict, and prints one line of JSON.
#[derive(Parser)]
struct Options {
    /// Where the service listens; connections are spread over several
    #[arg(required = true)]
    addresses: Vec<SocketAddr>,
    /// What the service speaks
    #[arg(long, value_enum, default_value = "claim")]
    protocol: Protocol,
    /// What is asked
    #[arg(long, value_enum, default_value = "new")]
    scenario: Scenario,
    #[arg(long, default_value_t = 64)]
    connections: usize,
    /// Opens a connection for each request, as n8n does
    #[arg(long)]
    close: bool,
    /// How long is measured
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// How long requests are sent before
    #[arg(long, default_value_t = 0.5)]
    warmup: f64,
    /// Ends after so many requests, if that is earlier; those of the warm-up are among them, so
    /// it goes with `--warmup 0`
    #[arg(long, default_value_t = u64::MAX)]
    requests: u64,
    /// Where the random keys begin: the same seed makes the same keys
    #[arg(long, default_value_t = 2041)]
    seed: u64,
    /// Measures nothing: opens so many connections, asks for /health on each (which is over
    /// before the service closes what is idle for long), says so in a line, and holds them
    /// until the input ends; then says how many are still open
    #[arg(long, value_name = "COUNT")]
    idle: Option<usize>,
    /// What `cargo bench` adds
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Protocol {
    /// POST /claim
    Claim,
    /// SET NX EX, on Redis behind Webdis
    Webdis,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Scenario {
    /// New keys
    New,
    /// One key that is claimed already
    Hot,
    /// New keys, and every tenth time the last one again
    Mix,
    /// New keys with `pending: true`
    Pending,
    /// The same, and each is then reported as done
    PendingDone,
}

/// A request with room for a key and a number, and how its reply looks.
struct Template {
    bytes: Vec<u8>,
    key: Option<usize>,
    /// The number makes the order and the claimant different each time.
    numbers: Vec<usize>,
    /// What the body begins with, and what it ends with.
    reply: (&'static [u8], &'static [u8]),
}

const KEY: &str = "KKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKK";
const NUMBER: &str = "NNNNNNNNNN";

impl Template {
    fn new(text: &str, reply: (&'static str, &'static str)) -> Self {
        Self {
            bytes: text.as_bytes().to_vec(),
            key: text.find(KEY),
            numbers: text.match_indices(NUMBER).map(|(at, _)| at).collect(),
            reply: (reply.0.as_bytes(), reply.1.as_bytes()),
        }
    }

    fn post(path: &str, headers: &str, body: &str, reply: (&'static str, &'static str)) -> Self {
        let length = body.len();
        let text = format!(
            "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
        );
        Self::new(&text, reply)
    }

    fn patch(&mut self, key: &[u8; 64], mut number: u64) {
        if let Some(at) = self.key {
            self.bytes[at..at + key.len()].copy_from_slice(key);
        }
        let mut digits = [b'0'; NUMBER.len()];
        for digit in digits.iter_mut().rev() {
            *digit = b"0123456789"[(number % 10) as usize];
            number /= 10;
        }
        for &at in &self.numbers {
            self.bytes[at..at + digits.len()].copy_from_slice(&digits);
        }
    }
}

/// The requests of a run.
struct Templates {
    /// Claims a key and wins it.
    new: Template,
    /// Claims a key that somebody else has won.
    again: Template,
    /// Reports a pending key as done.
    done: Template,
    /// Only shows that the connection is served.
    health: Template,
}

impl Templates {
    fn new(protocol: Protocol, scenario: Scenario, close: bool) -> Self {
        let headers = if close { "Connection: close\r\n" } else { "" };
        let claimant = format!("{NUMBER}@9f2c41d07be3:0:0");
        let order = format!(r#""idempotency_key":"{KEY}","order_id":"ORD-{NUMBER}""#);
        let done = format!(
            r#"{{"idempotency_key":"{KEY}","attempt":1,"external_id":"ch_{NUMBER}","result":{{"charged":129.9}}}}"#
        );
        let done = Template::post(
            "/ledger/done",
            headers,
            &done,
            ("{\"idempotency_key\":", "\"changed\":true}"),
        );
        let (new, again) = match protocol {
            Protocol::Claim => {
                let (pending, won) = match scenario {
                    Scenario::Pending | Scenario::PendingDone => (
                        r#","pending":true"#,
                        r#"{"claimed":true,"status":"pending""#,
                    ),
                    _ => ("", r#"{"claimed":true"#),
                };
                let body = format!(r#"{{{order},"claimant":"{claimant}"{pending}}}"#);
                let claim = |reply| Template::post("/claim", headers, &body, reply);
                (claim((won, "}")), claim((r#"{"claimed":false"#, "}")))
            }
            Protocol::Webdis => {
                let request = format!(
                    "GET /SET/{KEY}/{claimant}/NX/EX/86400 HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n"
                );
                let set = |reply| Template::new(&request, (reply, ""));
                (set(r#"{"SET":[true,"OK"]}"#), set(r#"{"SET":null}"#))
            }
        };
        let health = Template::new(
            "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            ("{", "}"),
        );
        Self {
            new,
            again,
            done,
            health,
        }
    }
}

/// What a connection waits for.
#[derive(Clone, Copy)]
enum Asked {
    New,
    Again,
    Done,
    Health,
}

struct Connection {
    stream: TcpStream,
    /// It is being made: the request is sent when it can be written to.
    is_new: bool,
    /// It has asked, and has no answer yet.
    is_waiting: bool,
    received: Vec<u8>,
    length: usize,
    asked: Asked,
    /// The key of the last claim that was won, if it can be asked for once more.
    key: Option<[u8; 64]>,
    since: Instant,
}

struct Load<'a> {
    options: &'a Options,
    poll: Poll,
    random: Rng,
    templates: Templates,
    connections: Vec<Connection>,
    /// All that were sent; also what makes each claimant another one.
    sent: u64,
    waiting: usize,
    begin: Instant,
    end: Instant,
    latencies: Vec<Duration>,
    errors: u64,
    first_error: String,
    held: Vec<TcpStream>,
}

type Failure = Box<dyn std::error::Error>;

impl<'a> Load<'a> {
    fn new(options: &'a Options) -> Result<Self, Failure> {
        let now = Instant::now();
        Ok(Self {
            options,
            poll: Poll::new()?,
            random: Rng::with_seed(options.seed),
            templates: Templates::new(options.protocol, options.scenario, options.close),
            connections: Vec::new(),
            sent: 0,
            waiting: 0,
            begin: now,
            end: now,
            latencies: Vec::new(),
            errors: 0,
            first_error: String::new(),
            held: Vec::new(),
        })
    }

    fn run(&mut self) -> Result<(), Failure> {
        let hot = match self.options.scenario {
            Scenario::Hot => Some(self.claim_once()?),
            _ => None,
        };
        self.begin = Instant::now() + Duration::from_secs_f64(self.options.warmup);
        self.end = self.begin + Duration::from_secs_f64(self.options.seconds);
        let count = match self.options.idle {
            Some(idle) => idle.min(OPENING),
            None => self.options.connections,
        };
        for index in 0..count {
            let stream = self.connect(index)?;
            self.connections.push(Connection {
                stream,
                is_new: true,
                is_waiting: false,
                received: vec![0; REPLY],
                length: 0,
                asked: Asked::New,
                key: hot,
                since: Instant::now(),
            });
        }
        self.waiting = count;
        let mut events = Events::with_capacity(1024);
        while self.waiting > 0 {
            match self.poll.poll(&mut events, Some(PATIENCE)) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                polled => polled?,
            }
            if events.is_empty() {
                return Err(format!("no answer within {} s", PATIENCE.as_secs()).into());
            }
            for event in &events {
                self.go_on(event)?;
            }
        }
        // Earlier than it was meant, where the run was ended by its count.
        self.end = self.end.min(Instant::now()).max(self.begin);
        Ok(())
    }

    /// Claims a new key, and waits for it.
    fn claim_once(&mut self) -> Result<[u8; 64], Failure> {
        let key = self.new_key();
        let template = &mut self.templates.new;
        template.patch(&key, 0);
        let mut stream = std::net::TcpStream::connect(self.options.addresses[0])?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(&template.bytes)?;
        let mut received = vec![0; REPLY];
        let mut length = 0;
        loop {
            let read = stream.read(&mut received[length..])?;
            length += read;
            if let Some(reply) = whole(&received[..length])? {
                reply.check(template)?;
                return Ok(key);
            }
            if read == 0 {
                return Err("the connection was closed before the reply".into());
            }
        }
    }

    fn new_key(&mut self) -> [u8; 64] {
        let mut key = [0; 64];
        for sixteen in key.chunks_exact_mut(16) {
            let mut bits = self.random.u64(..);
            for digit in sixteen {
                *digit = b"0123456789abcdef"[(bits & 15) as usize];
                bits >>= 4;
            }
        }
        key
    }

    fn connect(&self, index: usize) -> Result<TcpStream, Failure> {
        let addresses = &self.options.addresses;
        let mut stream = TcpStream::connect(addresses[index % addresses.len()])?;
        let both = Interest::READABLE | Interest::WRITABLE;
        self.poll
            .registry()
            .register(&mut stream, Token(index), both)?;
        Ok(stream)
    }

    fn go_on(&mut self, event: &Event) -> Result<(), Failure> {
        let index = event.token().0;
        if self.connections[index].is_new {
            if event.is_error() {
                let fault = self.connections[index].stream.take_error()?;
                return Err(format!("cannot connect: {fault:?}").into());
            }
            if event.is_writable() {
                self.connections[index].is_new = false;
                return self.send(index);
            }
        }
        // Else the service has closed a connection that is not needed any more.
        if event.is_readable() && self.connections[index].is_waiting {
            return self.receive(index);
        }
        Ok(())
    }

    fn send(&mut self, index: usize) -> Result<(), Failure> {
        let asked = self.next(index);
        let connection = &mut self.connections[index];
        connection.asked = asked;
        connection.is_waiting = true;
        let template = self.templates.of(asked);
        self.sent += 1;
        template.patch(connection.key.as_ref().unwrap_or(&[0; 64]), self.sent);
        // A socket that holds nothing has room for a request.
        if connection.stream.write(&template.bytes)? != template.bytes.len() {
            return Err("a request was not taken as a whole".into());
        }
        Ok(())
    }

    /// Chooses what a connection asks next.
    fn next(&mut self, index: usize) -> Asked {
        let last = self.connections[index].asked;
        let has_key = self.connections[index].key.is_some();
        match self.options.scenario {
            _ if self.options.idle.is_some() => return Asked::Health,
            Scenario::Hot => return Asked::Again,
            Scenario::Mix if has_key && self.random.u8(0..10) == 0 => return Asked::Again,
            Scenario::PendingDone if has_key && matches!(last, Asked::New) => return Asked::Done,
            _ => {}
        }
        self.connections[index].key = Some(self.new_key());
        Asked::New
    }

    fn receive(&mut self, index: usize) -> Result<(), Failure> {
        loop {
            let connection = &mut self.connections[index];
            let room = &mut connection.received[connection.length..];
            if room.is_empty() {
                return Err("a reply is longer than expected".into());
            }
            match connection.stream.read(room) {
                Ok(0) => return Err("a connection was closed before the reply".into()),
                Ok(read) => connection.length += read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            let Some(reply) = whole(&connection.received[..connection.length])? else {
                continue;
            };
            if let Err(fault) = reply.check(self.templates.of(connection.asked)) {
                if self.errors == 0 {
                    self.first_error = fault;
                }
                self.errors += 1;
            }
            connection.length = 0;
            connection.is_waiting = false;
            return self.finish(index);
        }
    }

    /// Notes how long a reply took, and begins what comes next.
    fn finish(&mut self, index: usize) -> Result<(), Failure> {
        let now = Instant::now();
        if let Some(idle) = self.options.idle {
            return self.hold(index, idle);
        }
        if now >= self.begin && now < self.end {
            self.latencies.push(now - self.connections[index].since);
        }
        if now >= self.end || self.sent >= self.options.requests {
            self.waiting -= 1;
            return Ok(());
        }
        self.connections[index].since = now;
        if self.options.close {
            self.connections[index].stream = self.connect(index)?;
            self.connections[index].is_new = true;
            return Ok(());
        }
        self.send(index)
    }

    /// Puts a connection aside, open, and opens another in its place.
    fn hold(&mut self, index: usize, idle: usize) -> Result<(), Failure> {
        if self.held.len() + self.connections.len() >= idle {
            self.waiting -= 1;
            return Ok(());
        }
        let stream = self.connect(index)?;
        let mut stream = std::mem::replace(&mut self.connections[index].stream, stream);
        self.poll.registry().deregister(&mut stream)?;
        self.held.push(stream);
        self.connections[index].is_new = true;
        Ok(())
    }

    /// How many connections the other side has not closed.
    fn still_open(&mut self) -> usize {
        let last = self.connections.iter_mut().map(|last| &mut last.stream);
        let is_open = |stream: &mut TcpStream| matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        last.chain(&mut self.held)
            .map(is_open)
            .filter(|is_open| *is_open)
            .count()
    }

    fn summary(&mut self) -> String {
        self.latencies.sort_unstable();
        let count = self.latencies.len();
        let seconds = (self.end - self.begin).as_secs_f64();
        let at = |share: f64| {
            // Of the smallest that is not exceeded by this share of all.
            let index = (count as f64 * share).ceil() as usize;
            let latency = self.latencies.get(index.saturating_sub(1));
            latency.map_or(0.0, |latency| latency.as_secs_f64() * 1000.0)
        };
        format!(
            r#"{{"requests":{count},"seconds":{seconds:.3},"per_second":{:.1},"p50_ms":{:.4},"p99_ms":{:.4},"max_ms":{:.4},"errors":{},"sent":{}}}"#,
            count as f64 / seconds.max(f64::EPSILON),
            at(0.5),
            at(0.99),
            at(1.0),
            self.errors,
            self.sent,
        )
    }
}

impl Templates {
    fn of(&mut self, asked: Asked) -> &mut Template {
        match asked {
            Asked::New => &mut self.new,
            Asked::Again => &mut self.again,
            Asked::Done => &mut self.done,
            Asked::Health => &mut self.health,
        }
    }
}

/// A reply that has arrived as a whole.
struct Reply<'a> {
    bytes: &'a [u8],
    head: usize,
}

impl Reply<'_> {
    fn check(&self, template: &Template) -> Result<(), String> {
        let body = &self.bytes[self.head..];
        let (start, end) = template.reply;
        if self.bytes.starts_with(b"HTTP/1.1 200") && body.starts_with(start) && body.ends_with(end)
        {
            return Ok(());
        }
        Err(format!(
            "expected {}…{}, and was answered: {}",
            String::from_utf8_lossy(start),
            String::from_utf8_lossy(end),
            String::from_utf8_lossy(self.bytes)
        ))
    }
}

/// The reply, once all of it is there; it must say its length.
fn whole(bytes: &[u8]) -> Result<Option<Reply<'_>>, Failure> {
    let Some(blank) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
        return Ok(None);
    };
    let head = blank + 4;
    let length = bytes[..blank]
        .split(|byte| *byte == b'\n')
        .find_map(|line| {
            let (name, value) = line.split_at_checked("content-length:".len())?;
            name.eq_ignore_ascii_case(b"content-length:")
                .then(|| str::from_utf8(value).ok()?.trim().parse::<usize>().ok())?
        })
        .ok_or("a reply does not say its length")?;
    match bytes.len() - head {
        received if received < length => Ok(None),
        received if received > length => Err("more came than the reply".into()),
        _ => Ok(Some(Reply { bytes, head })),
    }
}

fn measure(options: &Options) -> Result<bool, Failure> {
    let mut load = Load::new(options)?;
    load.run()?;
    if let Some(idle) = options.idle {
        println!(r#"{{"open":{idle}}}"#);
        std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
        println!(r#"{{"still_open":{}}}"#, load.still_open());
    } else {
        println!("{}", load.summary());
    }
    if load.errors > 0 {
        eprintln!(
            "{} wrong answers; the first: {}",
            load.errors, load.first_error
        );
    }
    Ok(load.errors == 0)
}

fn main() -> ExitCode {
    let options = Options::parse();
    match measure(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(failure) => {
            eprintln!("load: {failure}");
            ExitCode::FAILURE
        }
    }
}
