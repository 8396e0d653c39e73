//! How requests are read: strictly, and with the faults named.

use std::time::Duration;

use actix_web::dev::Payload;
use actix_web::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap};
use actix_web::{FromRequest, HttpMessage, HttpRequest, web};
use futures_util::StreamExt;
use futures_util::future::{LocalBoxFuture, Ready, ready};
use percent_encoding::percent_decode_str;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use serde_path_to_error::Segment;
use tokio::time::timeout;

use super::auth::Caller;
use super::problem::{Code, Problem};
use crate::domain::key::escaped;
use crate::domain::{Invalid, json};

/// How large a body may be, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimit(pub usize);

/// How much of a body that is too large is read and thrown away, so that the client, which is
/// still sending, hears the answer before the connection ends.
const DISCARD_LIMIT: usize = 64 * 1024 * 1024;

/// How long a body may take: one that never ends must not hold a connection for good.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// How many faults a reply names.
const MAX_FAULTS: usize = 50;

/// The JSON document in the body of a request that has no query.
pub struct JsonBody(pub Value);

impl FromRequest for JsonBody {
    type Error = Problem;
    type Future = LocalBoxFuture<'static, Result<Self, Problem>>;

    fn from_request(request: &HttpRequest, payload: &mut Payload) -> Self::Future {
        let checks = check_no_query(request).and_then(|()| check_headers(request.headers()));
        let limit = request.app_data::<BodyLimit>().map_or(0, |limit| limit.0);
        let announced = request
            .headers()
            .get(CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok()?.parse().ok())
            .unwrap_or(0);
        let mut payload = payload.take();
        Box::pin(async move {
            let body = timeout(BODY_TIMEOUT, read(&mut payload, limit, announced))
                .await
                .map_err(|_| {
                    let detail = format!("the body did not arrive within {BODY_TIMEOUT:?}");
                    Problem::new(Code::MalformedJson, detail)
                })??;
            checks?;
            json::parse(&body)
                .map(Self)
                .map_err(|fault| Problem::new(Code::MalformedJson, fault))
        })
    }
}

async fn read(
    payload: &mut Payload,
    limit: usize,
    announced: usize,
) -> Result<web::BytesMut, Problem> {
    let too_large = || {
        Problem::new(
            Code::PayloadTooLarge,
            format!("the body may have {limit} bytes (BODY_LIMIT)"),
        )
    };
    if announced > DISCARD_LIMIT {
        return Err(too_large());
    }
    let mut body = web::BytesMut::new();
    let mut length = 0;
    while let Some(chunk) = payload.next().await {
        let chunk = chunk.map_err(|error| {
            Problem::new(Code::MalformedJson, format!("the body broke off: {error}"))
        })?;
        length += chunk.len();
        if length <= limit {
            body.extend_from_slice(&chunk);
        } else if length > DISCARD_LIMIT {
            break;
        }
    }
    if length > limit {
        return Err(too_large());
    }
    Ok(body)
}

fn check_headers(headers: &HeaderMap) -> Result<(), Problem> {
    let unsupported = |detail: &str| Err(Problem::new(Code::UnsupportedMediaType, detail));
    if headers
        .get(CONTENT_ENCODING)
        .is_some_and(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity"))
    {
        return unsupported("send the body without Content-Encoding");
    }
    let Some(media_type) = headers.get(CONTENT_TYPE) else {
        return unsupported("send the header Content-Type: application/json");
    };
    let mut parts = media_type.to_str().unwrap_or_default().split(';');
    let essence = parts.next().unwrap_or_default().trim();
    let is_utf8 = parts.all(|parameter| match parameter.trim().split_once('=') {
        Some((name, charset)) if name.trim().eq_ignore_ascii_case("charset") => charset
            .trim()
            .trim_matches('"')
            .eq_ignore_ascii_case("utf-8"),
        _ => true,
    });
    if essence.eq_ignore_ascii_case("application/json") && is_utf8 {
        Ok(())
    } else {
        unsupported("send the body as Content-Type: application/json, in UTF-8")
    }
}

/// The parameters of a query, each given once.
pub struct Query(pub Map<String, Value>);

impl FromRequest for Query {
    type Error = Problem;
    type Future = Ready<Result<Self, Problem>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(
            parameters(request.query_string())
                .map(Self)
                .map_err(Problem::from),
        )
    }
}

fn parameters(query: &str) -> Result<Map<String, Value>, Invalid> {
    for parameter in query.split('&') {
        if percent_decode_str(parameter).decode_utf8().is_err() {
            let name = parameter.split('=').next().unwrap_or_default();
            let name = percent_decode_str(name).decode_utf8_lossy();
            return Err(Invalid::new(format!("/{}", escaped(&name)), "is not UTF-8"));
        }
    }
    let mut parameters = Map::new();
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        let pointer = format!("/{}", escaped(&name));
        if parameters
            .insert(name.into_owned(), Value::from(value.into_owned()))
            .is_some()
        {
            return Err(Invalid::new(pointer, "is given twice"));
        }
    }
    Ok(parameters)
}

/// A request without a query.
pub struct NoQuery;

impl FromRequest for NoQuery {
    type Error = Problem;
    type Future = Ready<Result<Self, Problem>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(check_no_query(request).map(|()| Self))
    }
}

fn check_no_query(request: &HttpRequest) -> Result<(), Problem> {
    let faults: Vec<Invalid> = parameters(request.query_string())?
        .keys()
        .take(MAX_FAULTS)
        .map(|name| {
            Invalid::new(
                format!("/{}", escaped(name)),
                "is an unknown query parameter",
            )
        })
        .collect();
    if faults.is_empty() {
        Ok(())
    } else {
        Err(faults.into())
    }
}

impl FromRequest for Caller {
    type Error = Problem;
    type Future = Ready<Result<Self, Problem>>;

    /// A route that nobody guards has no caller; it is refused rather than served to anybody.
    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let caller = request.extensions().get::<Self>().cloned();
        ready(caller.ok_or_else(|| Problem::new(Code::Unauthorized, "nobody asked who calls")))
    }
}

/// Reads a request from an object, which stands at `pointer` in its document.
///
/// # Errors
///
/// The first member at fault: of the wrong type, out of its bounds, or unknown.
pub fn decode<T: DeserializeOwned>(value: Value, pointer: &str) -> Result<T, Invalid> {
    if !value.is_object() {
        return Err(Invalid::new(pointer, "must be an object"));
    }
    // Where nothing is wrong, nobody needs the path to it.
    T::deserialize(&value).or_else(|_| with_path(value, pointer))
}

fn with_path<T: DeserializeOwned>(value: Value, pointer: &str) -> Result<T, Invalid> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let mut pointer = pointer.to_owned();
        for segment in error.path() {
            match segment {
                Segment::Seq { index } => pointer.push_str(&format!("/{index}")),
                Segment::Map { key } => pointer.push_str(&format!("/{}", escaped(key))),
                Segment::Enum { .. } | Segment::Unknown => {}
            }
        }
        let detail = error.into_inner().to_string();
        // serde says this of the object; the others are about a member.
        if let Some(missing) = detail.strip_prefix("missing field `") {
            let name = missing.trim_end_matches('`');
            return Invalid::new(format!("{pointer}/{}", escaped(name)), "is missing");
        }
        Invalid::new(pointer, detail)
    })
}

/// As many of the faults as a reply names.
pub fn first_faults(mut faults: Vec<Invalid>) -> Vec<Invalid> {
    faults.truncate(MAX_FAULTS);
    faults
}

/// A whole number from `MIN` to `MAX`. As in JSON Schema, `60.0` is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Whole<const MIN: u32, const MAX: u32>(pub u32);

impl<'de, const MIN: u32, const MAX: u32> Deserialize<'de> for Whole<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        value
            .as_f64()
            .filter(|number| number.fract() == 0.0)
            .filter(|number| (f64::from(MIN)..=f64::from(MAX)).contains(number))
            .map(|number| {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "it is whole and within the bounds of a u32"
                )]
                Self(number as u32)
            })
            .ok_or_else(|| {
                D::Error::custom(format_args!("must be a whole number from {MIN} to {MAX}"))
            })
    }
}

/// [`Whole`], as a query has it: written in digits alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct WholeParameter<const MIN: u32, const MAX: u32>(pub u32);

impl<const MIN: u32, const MAX: u32> TryFrom<String> for WholeParameter<MIN, MAX> {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_digits = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse()
            .ok()
            .filter(|number| is_digits && (MIN..=MAX).contains(number))
            .map(Self)
            .ok_or_else(|| format!("must be a whole number from {MIN} to {MAX}"))
    }
}

/// How many elements a page of a list holds at most.
pub type Limit = WholeParameter<1, 500>;

impl Limit {
    /// What it is where the caller does not say.
    pub const DEFAULT: Self = WholeParameter(50);
}

/// The number of an attempt, from 1.
pub type Attempt = Whole<1, { i32::MAX.cast_unsigned() }>;

/// Any JSON, where `null` is a value and not an absent member.
///
/// # Errors
///
/// Those of the deserializer.
pub fn any_value<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}
