//! One delivery: a signed HTTP request, and what became of it.

use std::collections::HashMap;
use std::error::Error;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, io};

use bytes::Bytes;
use chrono::Utc;
use futures_util::future::join_all;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Client, Response, tls};
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use url::{Host, Url};

use crate::domain::retry::RetryAfter;
use crate::domain::route::{Routes, is_allowed, is_forbidden};
use crate::domain::webhook::{SigningSecret, signatures};

/// Who a receiver sees calling.
const USER_AGENT: &str = concat!("dedup-gate/", env!("CARGO_PKG_VERSION"));

/// How long a connection may take to be made, with its name and its TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection is kept for the next delivery: less than the 5 s after which Node.js, and so
/// n8n, closes its end, since what is sent at that moment is lost and has to be sent again.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// How many connections to a host are kept.
const IDLE_CONNECTIONS: usize = 64;

/// How much of a reply's body is read so that its connection can be used again, in bytes.
const MAX_DRAINED: usize = 65_536;

/// For how long a reply's body is read so that its connection can be used again.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// What a header's value does not hold as it is. A `%` is among it, so that decoding gives back
/// what was encoded.
const NOT_PLAIN: &AsciiSet = &CONTROLS.add(b' ').add(b'%');

/// Sends webhooks, any number at a time.
///
/// It follows no redirect, and takes no proxy from the environment: either would go where no check of
/// addresses looks.
pub struct Sender {
    client: Client,
    secrets: Vec<SigningSecret>,
    resolver: Resolver,
    timeout: Duration,
}

/// What is sent.
pub struct Message<'a> {
    /// Where to: the URL of a route.
    pub url: &'a Url,
    /// The same for each try of one delivery, and without a `.`: `webhook-id`.
    pub id: &'a str,
    /// What it is about: `x-dedup-gate-topic`.
    pub topic: &'a str,
    /// What it came of: `x-dedup-gate-key`, with `%`, spaces and what is not visible ASCII
    /// percent-encoded as UTF-8; JavaScript's `decodeURIComponent` gives it back.
    pub idempotency_key: &'a str,
    /// When this try is made, in Unix seconds: `webhook-timestamp`.
    pub timestamp: i64,
    /// JSON, sent byte for byte.
    pub body: Bytes,
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    /// What it was answered with, if it was.
    pub status: Option<u16>,
    /// Why it was not delivered, for a person to read. It holds nothing of the URL, and nothing of
    /// the reply but its status.
    pub fault: Option<String>,
    /// How long the receiver asks to be left alone, where it was not delivered; without a bound.
    pub retry_after: Option<Duration>,
    /// How long it took to be answered, or to fail.
    pub took: Duration,
}

impl Sent {
    /// Whether the receiver has it: it said so with a status of 2xx.
    pub fn is_delivered(&self) -> bool {
        self.fault.is_none()
    }

    /// Whether the receiver wants nothing more: 410, as Standard Webhooks has it.
    pub fn is_gone(&self) -> bool {
        self.status == Some(410)
    }
}

impl Sender {
    /// A sender that signs with each of `secrets`, gives a receiver `timeout` to answer, and reaches
    /// link-local addresses and the like only at `allowed_hosts`, as
    /// [`parse_hosts`](crate::domain::route::parse_hosts) gives them.
    ///
    /// # Errors
    ///
    /// TLS cannot be set up.
    pub fn new(
        secrets: Vec<SigningSecret>,
        allowed_hosts: Vec<String>,
        timeout: Duration,
    ) -> Result<Self, String> {
        Self::with_rule(secrets, allowed_hosts, timeout, is_forbidden)
    }

    fn with_rule(
        secrets: Vec<SigningSecret>,
        allowed_hosts: Vec<String>,
        timeout: Duration,
        is_forbidden: fn(IpAddr) -> bool,
    ) -> Result<Self, String> {
        let resolver = Resolver {
            allowed_hosts: allowed_hosts.into(),
            is_forbidden,
            turns: Arc::default(),
        };
        let client = Client::builder()
            .user_agent(USER_AGENT)
            .redirect(Policy::none())
            .no_proxy()
            .dns_resolver(resolver.clone())
            .tls_version_min(tls::Version::TLS_1_2)
            .connect_timeout(CONNECT_TIMEOUT.min(timeout))
            .timeout(timeout)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .build()
            .map_err(|error| format!("webhooks cannot be sent: {}", root(&error)))?;
        Ok(Self {
            client,
            secrets,
            resolver,
            timeout,
        })
    }

    /// Looks up the hosts of `routes`, for whoever starts the service to hear at once what would fail
    /// later. A name that cannot be looked up now is no fault: it may be by then.
    ///
    /// # Errors
    ///
    /// The name of a host leads to a forbidden address. One line, which names the entry by its number.
    pub async fn check(&self, routes: &Routes) -> Result<(), String> {
        let lookups = routes.iter().map(|route| async {
            match route.url.host() {
                Some(Host::Domain(name)) => {
                    let lookup = self.resolver.lookup(name.to_owned());
                    tokio::time::timeout(CONNECT_TIMEOUT, lookup).await.ok()
                }
                _ => None,
            }
        });
        for (found, number) in join_all(lookups).await.into_iter().zip(1..) {
            if let Some(Ok(found)) = found
                && found.has_forbidden
            {
                return Err(format!(
                    "OUTBOX_ROUTES: the name of entry {number}'s host {}; where that is meant, name the host in OUTBOX_ALLOWED_HOSTS",
                    ResolveFault::Forbidden
                ));
            }
        }
        Ok(())
    }

    /// Sends it, once.
    pub async fn send(&self, message: &Message<'_>) -> Sent {
        let begin = Instant::now();
        let answered = self.request(message).send().await;
        let took = begin.elapsed();
        let reply = match answered {
            Ok(reply) => reply,
            Err(error) => {
                return Sent {
                    status: None,
                    fault: Some(self.fault(&error)),
                    retry_after: None,
                    took,
                };
            }
        };
        let status = reply.status();
        let fault = if status.is_success() {
            None
        } else if status.is_redirection() {
            Some(format!("redirected ({})", status.as_u16()))
        } else {
            Some(format!("answered {}", status.as_u16()))
        };
        let retry_after = fault.as_ref().and_then(|_| retry_after(reply.headers()));
        // Whatever is wrong with the body, the answer was there.
        let _ = tokio::time::timeout(DRAIN_TIMEOUT, drain(reply)).await;
        Sent {
            status: Some(status.as_u16()),
            fault,
            retry_after,
            took,
        }
    }

    fn request(&self, message: &Message<'_>) -> reqwest::RequestBuilder {
        let mut request = self
            .client
            .post(message.url.clone())
            .header(CONTENT_TYPE, "application/json")
            .header("webhook-id", message.id)
            .header("webhook-timestamp", message.timestamp)
            .header("x-dedup-gate-topic", plain(message.topic))
            .header("x-dedup-gate-key", plain(message.idempotency_key));
        if !self.secrets.is_empty() {
            let signatures =
                signatures(&self.secrets, message.id, message.timestamp, &message.body);
            request = request.header("webhook-signature", signatures);
        }
        request.body(message.body.clone())
    }

    /// Why there is no answer.
    fn fault(&self, error: &reqwest::Error) -> String {
        if error.is_timeout() {
            let (what, limit) = if error.is_connect() {
                ("connection", CONNECT_TIMEOUT.min(self.timeout))
            } else {
                ("answer", self.timeout)
            };
            return format!("no {what} within {} s", limit.as_secs_f64());
        }
        for cause in causes(error) {
            if let Some(fault) = cause.downcast_ref::<ResolveFault>() {
                return format!("the name {fault}");
            }
            if let Some(fault) = cause.downcast_ref::<native_tls::Error>() {
                return format!("TLS: {}", openssl_reason(&fault.to_string()));
            }
            if let Some(fault) = cause.downcast_ref::<io::Error>()
                && fault.kind() != io::ErrorKind::Other
            {
                return fault.kind().to_string();
            }
        }
        root(error)
    }
}

fn plain(text: &str) -> String {
    utf8_percent_encode(text, NOT_PLAIN).to_string()
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?;
    let retry_after = RetryAfter::parse(text).ok()?;
    Some(Duration::from_secs(retry_after.seconds(Utc::now())))
}

/// Reads what is left of a reply, as long as that costs less than another connection.
async fn drain(mut reply: Response) {
    let mut drained = 0;
    while let Ok(Some(piece)) = reply.chunk().await {
        drained += piece.len();
        if drained > MAX_DRAINED {
            return;
        }
    }
}

/// An error and what it came of, from the outside in.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// What an error came of in the end: unlike what is around it, that knows no URL.
fn root(error: &reqwest::Error) -> String {
    causes(error)
        .skip(1)
        .last()
        .map_or_else(|| "it cannot be sent".into(), ToString::to_string)
}

/// What people can make use of in one of OpenSSL's texts,
/// `error:CODE:LIBRARY:FUNCTION:REASON:FILE:LINE:DATA (WHAT IS WRONG WITH THE CERTIFICATE)`.
fn openssl_reason(text: &str) -> &str {
    let verdict = text
        .strip_suffix(')')
        .and_then(|text| text.rsplit_once(" ("));
    match (verdict, text.strip_prefix("error:")) {
        (Some((_, verdict)), _) => verdict,
        (None, Some(error)) => error.split(':').nth(3).unwrap_or(error),
        (None, None) => text,
    }
}

/// Looks names up as the system does, and leaves out what must not be reached: a name may lead to
/// another address each time.
#[derive(Clone)]
struct Resolver {
    allowed_hosts: Arc<[String]>,
    is_forbidden: fn(IpAddr) -> bool,
    /// Whose turn it is to look up a name: one that hangs keeps its thread until the system gives up, and must not
    /// keep all of them.
    turns: Arc<StdMutex<HashMap<String, Arc<Mutex<()>>>>>,
}

/// What a name leads to.
struct Found {
    addresses: Vec<SocketAddr>,
    has_forbidden: bool,
}

/// Why a name leads nowhere.
#[derive(Debug)]
enum ResolveFault {
    /// It has no address, or nobody could be asked for it.
    Unknown,
    /// All its addresses are forbidden.
    Forbidden,
}

impl fmt::Display for ResolveFault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Unknown => "cannot be resolved",
            Self::Forbidden => "leads to a link-local address or a cloud's metadata",
        })
    }
}

impl Error for ResolveFault {}

impl Resolver {
    async fn lookup(&self, name: String) -> Result<Found, ResolveFault> {
        let is_allowed = is_allowed(&name, &self.allowed_hosts);
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(turns.entry(name.clone()).or_default())
        };
        let turn = turn.lock_owned().await;
        let found = spawn_blocking(move || {
            let _turn = turn;
            (name.as_str(), 0).to_socket_addrs()
        });
        let found = found.await.map_err(|_| ResolveFault::Unknown)?;
        let found = found.map_err(|_| ResolveFault::Unknown)?;
        let (forbidden, addresses): (Vec<_>, Vec<_>) =
            found.partition(|address| !is_allowed && (self.is_forbidden)(address.ip()));
        Ok(Found {
            addresses,
            has_forbidden: !forbidden.is_empty(),
        })
    }
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let resolver = self.clone();
        Box::pin(async move {
            let found = resolver.lookup(name.as_str().to_owned()).await?;
            match (found.addresses.is_empty(), found.has_forbidden) {
                (true, true) => Err(ResolveFault::Forbidden.into()),
                (true, false) => Err(ResolveFault::Unknown.into()),
                (false, _) => Ok(Box::new(found.addresses.into_iter()) as Addrs),
            }
        })
    }
}

#[cfg(test)]
mod tests;
