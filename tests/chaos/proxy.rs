//! A network between two parts that can be told to fail.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

/// What becomes of what is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weather {
    /// It arrives.
    Fair,
    /// It arrives late.
    Slow(Duration),
    /// It is held back, in both directions, until the weather changes; connections stay open.
    Silent,
    /// Requests arrive, and their replies never do: the connections end.
    Lossy,
}

/// A proxy on 127.0.0.1. It ends with the test.
pub(crate) struct Proxy {
    /// Which parts it stands between.
    pub(crate) between: &'static str,
    pub(crate) port: u16,
    network: Arc<Network>,
}

struct Network {
    state: Mutex<State>,
    change: Condvar,
}

struct State {
    weather: Weather,
    is_over: bool,
    /// Both ends of every connection, by their numbers.
    open: Vec<(u64, TcpStream, TcpStream)>,
    connections: u64,
}

impl Proxy {
    /// Listens on a free port, for what listens on `upstream`.
    pub(crate) fn start(between: &'static str, upstream: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let network = Arc::new(Network {
            state: Mutex::new(State {
                weather: Weather::Fair,
                is_over: false,
                open: Vec::new(),
                connections: 0,
            }),
            change: Condvar::new(),
        });
        let shared = Arc::clone(&network);
        thread::spawn(move || {
            for client in listener.incoming() {
                if shared.state.lock().unwrap().is_over {
                    return;
                }
                // Where nobody listens, the client's connection ends as well.
                if let (Ok(client), Ok(server)) =
                    (client, TcpStream::connect(("127.0.0.1", upstream)))
                {
                    let _ = Network::relay(&shared, client, server);
                }
            }
        });
        Self {
            between,
            port,
            network,
        }
    }

    pub(crate) fn set(&self, weather: Weather) {
        self.network.state.lock().unwrap().weather = weather;
        self.network.change.notify_all();
    }

    /// Ends every connection, and loses what is on its way.
    pub(crate) fn cut(&self) {
        for (_, client, server) in self.network.state.lock().unwrap().open.drain(..) {
            let _ = client.shutdown(Shutdown::Both);
            let _ = server.shutdown(Shutdown::Both);
        }
        self.network.change.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.network.state.lock().unwrap().is_over = true;
        self.set(Weather::Fair);
        self.cut();
        // For the listener to notice.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

/// Which way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    There,
    Back,
}

impl Network {
    fn relay(shared: &Arc<Self>, client: TcpStream, server: TcpStream) -> std::io::Result<()> {
        let ends = (client.try_clone()?, server.try_clone()?);
        let (from, to) = (client.try_clone()?, server.try_clone()?);
        let number = {
            let mut state = shared.state.lock().unwrap();
            state.connections += 1;
            let number = state.connections;
            state.open.push((number, ends.0, ends.1));
            number
        };
        let other = Arc::clone(shared);
        thread::spawn(move || carry(&other, from, to, Way::There, number));
        let other = Arc::clone(shared);
        thread::spawn(move || carry(&other, server, client, Way::Back, number));
        Ok(())
    }

    /// Waits as the weather has it; whether what was read may go on.
    fn lets_pass(&self, way: Way, number: u64) -> bool {
        let mut state = self.state.lock().unwrap();
        loop {
            match state.weather {
                Weather::Fair => return true,
                Weather::Lossy => return way == Way::There,
                Weather::Slow(delay) => {
                    drop(state);
                    thread::sleep(delay);
                    return true;
                }
                Weather::Silent => {
                    if !state.open.iter().any(|(open, ..)| *open == number) {
                        return false;
                    }
                    state = self.change.wait(state).unwrap();
                }
            }
        }
    }
}

/// Carries one direction of a connection until either end closes it, or the weather does.
fn carry(network: &Network, mut from: TcpStream, mut to: TcpStream, way: Way, number: u64) {
    let mut buffer = [0; 16_384];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if !network.lets_pass(way, number) || to.write_all(&buffer[..length]).is_err() {
            break;
        }
    }
    // Neither side of these protocols goes on alone.
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
    let mut state = network.state.lock().unwrap();
    state.open.retain(|(open, ..)| *open != number);
}
