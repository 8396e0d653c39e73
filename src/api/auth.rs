//! Who calls: API keys.

use actix_web::body::BoxBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{AUTHORIZATION, HeaderMap};
use actix_web::middleware::Next;
use actix_web::{Error, HttpMessage, ResponseError, web};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::problem::{Code, Problem};

/// The header that n8n's Header Auth credential sends.
pub const API_KEY_HEADER: &str = "X-API-Key";

/// The API keys that are let in.
pub struct ApiKeys {
    keys: Vec<(String, [u8; 32])>,
}

/// The name of the API key that a request came with; none where no keys are configured.
#[derive(Debug, Clone)]
pub struct Caller(pub Option<String>);

impl ApiKeys {
    /// Lets in whoever sends one of these; everybody where there are none.
    pub fn new<'a>(names_and_secrets: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        Self {
            keys: names_and_secrets
                .map(|(name, secret)| (name.to_owned(), Sha256::digest(secret).into()))
                .collect(),
        }
    }

    /// Who sends this secret. Digests of one length are compared, each with every key and in
    /// constant time, so that the time tells nothing of how much of a guess is right.
    fn caller(&self, secret: &[u8]) -> Option<&str> {
        let digest: [u8; 32] = Sha256::digest(secret).into();
        self.keys.iter().fold(None, |found, (name, key)| {
            if bool::from(key.ct_eq(&digest)) {
                Some(name.as_str())
            } else {
                found
            }
        })
    }
}

/// Lets a request through that comes with a valid key, and notes whose it is; 401 where it does not.
///
/// # Errors
///
/// Those of what comes next.
pub async fn authenticate(
    keys: web::Data<ApiKeys>,
    request: ServiceRequest,
    next: Next<BoxBody>,
) -> Result<ServiceResponse, Error> {
    let caller = if keys.keys.is_empty() {
        None
    } else {
        let Some(name) = secret(request.headers()).and_then(|secret| keys.caller(secret)) else {
            let problem = Problem::new(
                Code::Unauthorized,
                "send an API key as X-API-Key: SECRET or Authorization: Bearer SECRET",
            );
            return Ok(request.into_response(problem.error_response()));
        };
        Some(name.to_owned())
    };
    request.extensions_mut().insert(Caller(caller));
    next.call(request).await
}

fn secret(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(value) = headers.get(API_KEY_HEADER) {
        return Some(value.as_bytes());
    }
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, secret) = value.split_at_checked(7)?;
    scheme
        .eq_ignore_ascii_case(b"bearer ")
        .then(|| secret.trim_ascii())
}
