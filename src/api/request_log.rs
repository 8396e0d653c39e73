//! What is noted of every request: its id, a line in the log, and the code of a problem.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use actix_web::dev::{Service, ServiceRequest, ServiceResponse};
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use actix_web::web::Data;
use actix_web::{Error, HttpMessage};
use log::Level;
use uuid::Uuid;
use uuid::fmt::Simple;

use super::auth::Caller;
use super::problem::Code;
use crate::gate::GateError;
use crate::metrics::Metrics;
use crate::store::StoreError;

/// The header with the id of a request, and of its reply.
pub const REQUEST_ID_HEADER: &str = "X-Request-Id";

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// How many bytes a caller's id may have. A longer one is replaced.
const MAX_ID: usize = 128;

/// Tells the ids of one process from those of another. What seeds a hash map is random.
static PROCESS: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one("process"));

/// How many ids this process has made.
static MADE: AtomicU64 = AtomicU64::new(0);

/// Answers with the id of the request, logs it at debug, and a fault of ours at warn or error: here
/// alone, once. What is logged of a request is its route, never its path or its query, since a key
/// may say something of a customer.
///
/// # Errors
///
/// Those of what comes next; every problem of ours is a response by now.
pub fn observe<S, B>(
    request: ServiceRequest,
    next: &S,
) -> impl Future<Output = Result<ServiceResponse<B>, Error>> + use<S, B>
where
    S: Service<ServiceRequest, Response = ServiceResponse<B>, Error = Error>,
{
    let begun = log::log_enabled!(Level::Debug).then(Instant::now);
    let id = sent_id(request.headers()).unwrap_or_else(made_id);
    let answered = next.call(request);
    async move {
        let mut response = answered.await?;
        note(&id, &response, begun);
        response.headers_mut().insert(REQUEST_ID, id);
        Ok(response)
    }
}

/// Counts a problem, and logs what is to be logged. `begun` says when the request came, where each is
/// logged.
fn note<B>(id: &HeaderValue, response: &ServiceResponse<B>, begun: Option<Instant>) {
    let extensions = response.response().extensions();
    if let Some(code) = extensions.get::<Code>()
        && let Some(metrics) = response.request().app_data::<Data<Metrics>>()
    {
        metrics.count_problem(&code.name());
    }
    if let Some(fault) = extensions.get::<GateError>() {
        let level = match fault {
            GateError::Overloaded
            | GateError::Store(StoreError::Unavailable(_) | StoreError::CommitLost(_)) => {
                Level::Warn
            }
            GateError::Store(StoreError::Unexpected(_)) => Level::Error,
        };
        log::log!(level, "{}: {}", line(id, response), one_line(fault));
    }
    if let Some(begun) = begun {
        let milliseconds = begun.elapsed().as_secs_f64() * 1000.0;
        log::debug!("{} ms={milliseconds:.3}", line(id, response));
    }
}

/// The caller's id, if it may stand in a line of a log.
fn sent_id(headers: &HeaderMap) -> Option<HeaderValue> {
    let id = headers.get(REQUEST_ID)?;
    let is_id = (1..=MAX_ID).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic);
    is_id.then(|| id.clone())
}

/// An id that no other request has, of 32 hex digits.
fn made_id() -> HeaderValue {
    let id = Uuid::from_u64_pair(*PROCESS, MADE.fetch_add(1, Ordering::Relaxed));
    let mut text = [0; Simple::LENGTH];
    let text = id.simple().encode_lower(&mut text);
    HeaderValue::from_str(text).unwrap_or_else(|_| HeaderValue::from_static("-"))
}

/// What is said of a request in a line. A method may be any word, so that it is cut.
fn line<B>(id: &HeaderValue, response: &ServiceResponse<B>) -> String {
    let request = response.request();
    let extensions = request.extensions();
    let caller = extensions.get::<Caller>();
    format!(
        "request_id={} method={:.16} route={} status={} api_key={}",
        id.to_str().unwrap_or("-"),
        request.method().as_str(),
        request.match_pattern().as_deref().unwrap_or("-"),
        response.status().as_u16(),
        caller.and_then(|caller| caller.0.as_deref()).unwrap_or("-"),
    )
}

/// A server may write over several lines what is wrong.
fn one_line(fault: &GateError) -> String {
    let text = fault.to_string();
    let words: Vec<&str> = text
        .split(|c: char| c.is_whitespace() || c.is_control())
        .filter(|word| !word.is_empty())
        .collect();
    words.join(" ")
}
