//! The receiver of `scripts/bench`: takes every webhook, and says how fast they came.
//!
//! As the load generator does, it costs little: one thread, one epoll, one answer that is made once. Of a request
//! only the length and the `webhook-id` are read.

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};

/// Longer than any webhook that is expected.
const REQUEST: usize = 8192;

const ANSWER: &[u8] = b"HTTP/1.1 204 No Content\r\n\r\n";

const LISTENER: Token = Token(usize::MAX);

type Failure = Box<dyn std::error::Error>;

/// Says on which port of 127.0.0.1 it listens, in a line, and takes webhooks
#[derive(Parser)]
struct Options {
    /// When so many different ones have come, says how fast that was, in a line of JSON, and ends with the input
    #[arg(long)]
    count: Option<usize>,
    /// Says of each one when it came, in a line: Unix time in nanoseconds
    #[arg(long)]
    each: bool,
    /// What `cargo bench` adds
    #[arg(long, hide = true)]
    bench: bool,
}

struct Connection {
    stream: TcpStream,
    received: Vec<u8>,
    length: usize,
}

struct Receiver {
    options: Options,
    received: usize,
    ids: HashSet<Vec<u8>>,
    first: Option<Instant>,
}

impl Receiver {
    fn run(&mut self) -> Result<(), Failure> {
        let mut poll = Poll::new()?;
        let mut listener = TcpListener::bind("127.0.0.1:0".parse()?)?;
        poll.registry()
            .register(&mut listener, LISTENER, Interest::READABLE)?;
        println!("{}", listener.local_addr()?.port());
        let mut connections: Vec<Option<Connection>> = Vec::new();
        let mut events = Events::with_capacity(256);
        loop {
            match poll.poll(&mut events, None) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                polled => polled?,
            }
            for event in &events {
                if event.token() == LISTENER {
                    while let Some(mut stream) = accepted(&listener)? {
                        let token = Token(connections.len());
                        poll.registry()
                            .register(&mut stream, token, Interest::READABLE)?;
                        connections.push(Some(Connection {
                            stream,
                            received: vec![0; REQUEST],
                            length: 0,
                        }));
                    }
                } else if let Some(connection) = &mut connections[event.token().0]
                    && !self.serve(connection)?
                {
                    connections[event.token().0] = None;
                }
            }
            let is_enough = |count: usize| self.ids.len() >= count;
            if let (true, Some(first)) = (self.options.count.is_some_and(is_enough), self.first) {
                let (received, distinct) = (self.received, self.ids.len());
                let seconds = first.elapsed().as_secs_f64();
                println!(
                    r#"{{"received":{received},"distinct":{distinct},"seconds":{seconds:.3},"per_second":{:.1}}}"#,
                    distinct as f64 / seconds
                );
                std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
                return Ok(());
            }
        }
    }

    /// Takes what has come, and answers it; whether the connection goes on.
    fn serve(&mut self, connection: &mut Connection) -> Result<bool, Failure> {
        loop {
            let room = &mut connection.received[connection.length..];
            if room.is_empty() {
                return Err("a webhook is longer than expected".into());
            }
            match connection.stream.read(room) {
                Ok(0) => return Ok(false),
                Ok(read) => connection.length += read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                // The sender has gone.
                Err(_) => return Ok(false),
            }
            let Some(id) = whole(&connection.received[..connection.length])? else {
                continue;
            };
            self.received += 1;
            self.first.get_or_insert_with(Instant::now);
            self.ids.insert(id.to_vec());
            connection.length = 0;
            if self.options.each {
                let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
                println!("{}", now.as_nanos());
            }
            // A socket that holds nothing has room for an answer.
            if connection.stream.write(ANSWER).ok() != Some(ANSWER.len()) {
                return Ok(false);
            }
        }
    }
}

fn accepted(listener: &TcpListener) -> Result<Option<TcpStream>, Failure> {
    match listener.accept() {
        Ok((stream, _)) => Ok(Some(stream)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The `webhook-id`, once all of the request is there.
fn whole(bytes: &[u8]) -> Result<Option<&[u8]>, Failure> {
    let Some(blank) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
        return Ok(None);
    };
    let header = |wanted: &str| {
        let mut lines = bytes[..blank].split(|byte| *byte == b'\n');
        lines.find_map(|line| {
            let (name, value) = line.split_at_checked(wanted.len())?;
            name.eq_ignore_ascii_case(wanted.as_bytes())
                .then(|| value.trim_ascii())
        })
    };
    let length = header("content-length:").ok_or("a webhook does not say its length")?;
    let length: usize = str::from_utf8(length)?.parse()?;
    match bytes.len() - blank - 4 {
        received if received < length => Ok(None),
        received if received > length => Err("more came than the webhook".into()),
        _ => Ok(Some(header("webhook-id:").ok_or("a webhook has no id")?)),
    }
}

fn main() -> ExitCode {
    let mut receiver = Receiver {
        options: Options::parse(),
        received: 0,
        ids: HashSet::new(),
        first: None,
    };
    match receiver.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("receiver: {failure}");
            ExitCode::FAILURE
        }
    }
}
