//! What every reply that is not 2xx looks like, and the one place where faults become statuses.

use std::fmt;

use actix_web::body::BoxBody;
use actix_web::http::StatusCode;
use actix_web::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use actix_web::{HttpRequest, HttpResponse, Responder, ResponseError};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{PartialSchema, ToSchema};

use crate::domain::Invalid;
use crate::domain::ledger::Refusal;
use crate::gate::GateError;
use crate::store::StoreError;

/// How long to wait before asking again, in seconds, where the fault is ours and passes.
const RETRY_AFTER_SECONDS: u32 = 1;

/// How many characters of a text are repeated that somebody sent.
const MAX_TEXT: usize = 300;

/// What went wrong; stable, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "each is explained by its title")]
pub enum Code {
    MalformedJson,
    Unauthorized,
    NotFound,
    UnknownKey,
    MethodNotAllowed,
    AlreadyDone,
    Superseded,
    NotHolder,
    Conflict,
    PayloadTooLarge,
    UnsupportedMediaType,
    InvalidRequest,
    AttemptRequired,
    KeyReused,
    Internal,
    StoreUnavailable,
    Overloaded,
}

impl Code {
    /// Its HTTP status.
    pub fn status(self) -> u16 {
        self.status_and_title().0.as_u16()
    }

    /// What it stands for, for people.
    pub fn title(self) -> &'static str {
        self.status_and_title().1
    }

    /// Its name, for programs.
    pub fn name(self) -> String {
        let name = serde_json::to_value(self).unwrap_or_default();
        name.as_str().unwrap_or_default().to_owned()
    }

    /// The names of all.
    pub fn names() -> Vec<String> {
        let schema = serde_json::to_value(Self::schema()).unwrap_or_default();
        let names = schema["enum"].as_array().into_iter().flatten();
        names.filter_map(Value::as_str).map(str::to_owned).collect()
    }

    /// Its HTTP status and its title.
    fn status_and_title(self) -> (StatusCode, &'static str) {
        match self {
            Self::MalformedJson => (StatusCode::BAD_REQUEST, "The body is not valid JSON"),
            Self::Unauthorized => (StatusCode::UNAUTHORIZED, "No valid API key"),
            Self::NotFound => (StatusCode::NOT_FOUND, "No such path"),
            Self::UnknownKey => (StatusCode::NOT_FOUND, "The key was never claimed"),
            Self::MethodNotAllowed => (
                StatusCode::METHOD_NOT_ALLOWED,
                "The path does not know this method",
            ),
            Self::AlreadyDone => (
                StatusCode::CONFLICT,
                "The work was reported as done already",
            ),
            Self::Superseded => (StatusCode::CONFLICT, "A later attempt has begun"),
            Self::NotHolder => (StatusCode::CONFLICT, "Somebody else holds the attempt"),
            Self::Conflict => (
                StatusCode::CONFLICT,
                "The state of the work does not allow it",
            ),
            Self::PayloadTooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "The body is too large"),
            Self::UnsupportedMediaType => (
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "The body is not declared as JSON",
            ),
            Self::InvalidRequest => (StatusCode::UNPROCESSABLE_ENTITY, "The request has faults"),
            Self::AttemptRequired => (
                StatusCode::UNPROCESSABLE_ENTITY,
                "The attempt must be named",
            ),
            Self::KeyReused => (
                StatusCode::UNPROCESSABLE_ENTITY,
                "The key was claimed with another payload",
            ),
            Self::Internal => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "The service has a fault of its own",
            ),
            Self::StoreUnavailable => (
                StatusCode::SERVICE_UNAVAILABLE,
                "The database is out of reach",
            ),
            Self::Overloaded => (
                StatusCode::SERVICE_UNAVAILABLE,
                "The service has too much to do",
            ),
        }
    }
}

/// What a request came to instead of its reply.
#[derive(Debug, Clone)]
pub struct Problem {
    code: Code,
    detail: String,
    errors: Vec<Invalid>,
    ids: Option<Box<ConflictingIds>>,
    /// For the log alone.
    fault: Option<GateError>,
}

/// A problem (RFC 9457), sent as `application/problem+json`.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Problem, example = json!({
    "type": "urn:dedup-gate:problem:invalid_request", "title": "The request has faults", "status": 422,
    "detail": "/ttl_seconds must be a whole number from 1 to 315360000", "code": "invalid_request",
    "errors": [{"pointer": "/ttl_seconds", "detail": "must be a whole number from 1 to 315360000"}]
}))]
pub struct ProblemReply {
    /// Names the kind of problem; the same for the same `code`.
    #[serde(rename = "type")]
    #[schema(example = "urn:dedup-gate:problem:invalid_request")]
    uri: String,
    /// The kind of problem, for people.
    title: &'static str,
    /// The HTTP status.
    #[schema(minimum = 400, maximum = 599)]
    status: u16,
    /// What is wrong in this request, for people.
    detail: String,
    /// The kind of problem, for programs.
    code: Code,
    /// Which members are at fault: in one claim or report the first that is found, in an array
    /// the first of each claim.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    errors: Vec<MemberFault>,
    /// With `already_done`: the two ids.
    #[serde(flatten)]
    ids: Option<ConflictingIds>,
}

/// A member at fault.
#[derive(Debug, Serialize, ToSchema)]
struct MemberFault {
    /// RFC 6901 pointer to the member; for a query parameter, `/` and its name.
    #[schema(example = "/ttl_seconds")]
    pointer: String,
    /// What is wrong with it.
    detail: String,
}

/// Two effects may have happened.
#[derive(Debug, Clone, Serialize, ToSchema)]
struct ConflictingIds {
    /// The provider's id that was reported first.
    external_id: Option<String>,
    /// The provider's id in this report.
    reported_external_id: Option<String>,
}

impl Problem {
    /// A problem of this kind.
    pub fn new(code: Code, detail: impl Into<String>) -> Self {
        Self {
            code,
            detail: shortened(detail.into()),
            errors: Vec::new(),
            ids: None,
            fault: None,
        }
    }

    /// A problem of this kind with the members at fault; its detail names the first.
    fn with_members(code: Code, faults: Vec<Invalid>) -> Self {
        let detail = match faults.first() {
            Some(fault) if fault.pointer.is_empty() => format!("the body {}", fault.detail),
            Some(fault) => format!("{} {}", fault.pointer, fault.detail),
            None => String::new(),
        };
        let errors = faults
            .into_iter()
            .map(|fault| Invalid::new(shortened(fault.pointer), shortened(fault.detail)))
            .collect();
        Self {
            errors,
            ..Self::new(code, detail)
        }
    }

    /// A request with faults.
    pub fn invalid(faults: Vec<Invalid>) -> Self {
        Self::with_members(Code::InvalidRequest, faults)
    }

    /// Keys that were claimed with another payload; the pointers lead to the payloads.
    pub fn key_reused(pointers: impl Iterator<Item = String>) -> Self {
        let faults = pointers
            .map(|pointer| {
                Invalid::new(pointer, "is not the payload that the key was claimed with")
            })
            .collect();
        Self::with_members(Code::KeyReused, faults)
    }
}

/// Cuts what got long by what was sent.
fn shortened(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(MAX_TEXT) {
        text.truncate(end);
        text.push('…');
    }
    text
}

impl From<Vec<Invalid>> for Problem {
    fn from(faults: Vec<Invalid>) -> Self {
        Self::invalid(faults)
    }
}

impl From<Invalid> for Problem {
    fn from(fault: Invalid) -> Self {
        Self::invalid(vec![fault])
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::AttemptAhead { current } => Self::invalid(vec![Invalid::new(
                "/attempt",
                format!("has not begun: the current attempt is {current}"),
            )]),
            Refusal::AttemptRequired { current } => Self::with_members(
                Code::AttemptRequired,
                vec![Invalid::new(
                    "/attempt",
                    format!(
                        "is required: {current} attempts have begun; send the one of the verdict"
                    ),
                )],
            ),
            Refusal::Superseded { current } => Self::new(
                Code::Superseded,
                format!("the current attempt is {current}: this comes from an earlier one"),
            ),
            Refusal::Ended => Self::new(
                Code::Superseded,
                "the attempt was ended by a reset: claim the key anew",
            ),
            Refusal::NotHolder => Self::new(
                Code::NotHolder,
                "the attempt was claimed by another claimant, or with another API key",
            ),
            Refusal::AlreadyDone {
                external_id,
                reported_external_id,
            } => {
                let detail = if reported_external_id.is_some() {
                    "the attempt was reported as done before, with another external_id: two effects may have happened"
                } else {
                    "the attempt was reported as done before: it stays done"
                };
                Self {
                    ids: Some(Box::new(ConflictingIds {
                        external_id,
                        reported_external_id,
                    })),
                    ..Self::new(Code::AlreadyDone, detail)
                }
            }
            Refusal::Unfit(why) => Self::new(Code::Conflict, why),
        }
    }
}

/// The text of a fault of ours stays inside: it goes along for [`super::request_log`], which logs it.
impl From<GateError> for Problem {
    fn from(error: GateError) -> Self {
        let problem = match &error {
            GateError::Overloaded => Self::new(
                Code::Overloaded,
                "nothing is known of what was asked: ask again, with the same claimant",
            ),
            GateError::Store(StoreError::Unavailable(_) | StoreError::CommitLost(_)) => Self::new(
                Code::StoreUnavailable,
                "nothing is known of what was asked: ask again, with the same claimant",
            ),
            GateError::Store(StoreError::Unexpected(_)) => {
                Self::new(Code::Internal, "the log of the service says more")
            }
        };
        Self {
            fault: Some(error),
            ..problem
        }
    }
}

impl From<&Problem> for ProblemReply {
    fn from(problem: &Problem) -> Self {
        Self {
            uri: format!("urn:dedup-gate:problem:{}", problem.code.name()),
            title: problem.code.title(),
            status: problem.code.status(),
            detail: problem.detail.clone(),
            code: problem.code,
            errors: problem
                .errors
                .iter()
                .map(|fault| MemberFault {
                    pointer: fault.pointer.clone(),
                    detail: fault.detail.clone(),
                })
                .collect(),
            ids: problem.ids.as_deref().cloned(),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.code.title(), self.detail)
    }
}

impl ResponseError for Problem {
    fn status_code(&self) -> StatusCode {
        self.code.status_and_title().0
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.status_code());
        if self.status_code() == StatusCode::SERVICE_UNAVAILABLE {
            response.insert_header((RETRY_AFTER, RETRY_AFTER_SECONDS));
        }
        if self.code == Code::Unauthorized {
            response.insert_header((WWW_AUTHENTICATE, "Bearer realm=\"dedup-gate\""));
        }
        response.extensions_mut().insert(self.code);
        if let Some(fault) = &self.fault {
            response.extensions_mut().insert(fault.clone());
        }
        response
            .content_type("application/problem+json")
            .body(serde_json::to_string(&ProblemReply::from(self)).unwrap_or_default())
    }
}

impl Responder for Problem {
    type Body = BoxBody;

    fn respond_to(self, _: &HttpRequest) -> HttpResponse {
        self.error_response()
    }
}
