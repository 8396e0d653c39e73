//! `/outbox`: what must happen after the work, and what became of it.

use actix_web::web::{Data, Json, Path};
use chrono::{DateTime, Datelike};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::problem::{Code, Problem};
use super::request::{Limit, NoQuery, Query, Whole, any_value, decode};
use crate::domain::effect::{Delivery, Due, Effect};
use crate::domain::route::Routes;
use crate::domain::text::Topic;
use crate::domain::{Invalid, Time, rfc3339};
use crate::gate::Gate;
use crate::store::outbox::{Parcel, ParcelFilter, Try};

/// How many effects a report may have.
const MAX_EFFECTS: usize = 20;

/// How far ahead an effect may be put off, in seconds: a year.
pub(super) const MAX_DELAY: u32 = 31_536_000;

/// What must happen after the work.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Effect, example = json!({"topic": "mail", "payload": {"to": "ana@example.com", "order": "ORD-2041"}}))]
pub struct EffectRequest {
    /// What it is about. It decides where the effect goes: `OUTBOX_ROUTES` must name a route for it.
    #[schema(value_type = String, min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._:/-]+$")]
    topic: Topic,
    /// What is sent, as JSON; `null` is a value.
    #[serde(default, deserialize_with = "any_value")]
    #[schema(required = true)]
    payload: Option<Value>,
    /// Not before then: a time of RFC 3339, or seconds from now, up to a year.
    #[schema(value_type = Option<Value>)]
    deliver_after: Option<DeliverAfterMember>,
}

/// [`Due`], as callers write it.
#[derive(Debug, Clone, Copy)]
struct DeliverAfterMember(Due);

impl<'de> Deserialize<'de> for DeliverAfterMember {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fault = |text: &str| serde::de::Error::custom(text);
        match Value::deserialize(deserializer)? {
            Value::String(text) => DateTime::parse_from_rfc3339(&text)
                .ok()
                .map(|time| time.to_utc())
                .filter(|time| time.year() <= 9999)
                .map(|time| Self(Due::At(time)))
                .ok_or_else(|| {
                    fault(
                        "must be a time of RFC 3339, such as \"2026-11-30T09:12:00Z\", or seconds",
                    )
                }),
            number @ Value::Number(_) => Whole::<0, MAX_DELAY>::deserialize(number)
                .map(|seconds| Self(Due::In(seconds.0)))
                .map_err(serde::de::Error::custom),
            _ => Err(fault("must be a time of RFC 3339, or seconds")),
        }
    }
}

/// The effects of a report, each with a name of its own.
///
/// # Errors
///
/// There are too many, one has no payload, or nothing delivers its topic.
pub(super) fn effects(
    requests: Option<Vec<EffectRequest>>,
    routes: &Routes,
) -> Result<Vec<Effect>, Vec<Invalid>> {
    let requests = requests.unwrap_or_default();
    if requests.len() > MAX_EFFECTS {
        let fault = format!(
            "has {} effects; at most {MAX_EFFECTS} are allowed",
            requests.len()
        );
        return Err(vec![Invalid::new("/effects", fault)]);
    }
    let mut faults = Vec::new();
    let mut effects = Vec::with_capacity(requests.len());
    for (request, index) in requests.into_iter().zip(0..) {
        let topic = request.topic.as_str();
        if routes.find(topic).is_none() {
            faults.push(Invalid::new(
                format!("/effects/{index}/topic"),
                format!("has no route: OUTBOX_ROUTES names none for {topic:?}"),
            ));
        }
        let Some(payload) = request.payload else {
            faults.push(Invalid::new(
                format!("/effects/{index}/payload"),
                "is missing",
            ));
            continue;
        };
        effects.push(Effect {
            id: format!("msg_{}", Uuid::now_v7().simple()),
            topic: topic.to_owned(),
            payload: payload.to_string(),
            due: request.deliver_after.map_or(Due::Now, |member| member.0),
        });
    }
    if faults.is_empty() {
        Ok(effects)
    } else {
        Err(faults)
    }
}

/// An effect, and how its delivery goes.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OutboxEntry, example = json!({
    "id": "msg_019ad8c16f5a7d12b3a8f0f7c4f4a9d1", "idempotency_key": "order-2041", "topic": "mail", "status": "delivered",
    "created_at": "2026-11-30T09:12:02.000Z", "next_try_at": null, "settled_at": "2026-11-30T09:12:07.100Z", "tried": 2,
    "payload": {"to": "ana@example.com", "order": "ORD-2041"},
    "tries": [
        {"try": 1, "at": "2026-11-30T09:12:02.010Z", "status_code": 500, "error": "answered 500", "milliseconds": 12},
        {"try": 2, "at": "2026-11-30T09:12:07.050Z", "status_code": 200, "error": null, "milliseconds": 31}
    ]
}))]
pub struct EffectReply {
    /// Its name, which is the `webhook-id` of every try.
    id: String,
    /// The key whose work it follows from.
    idempotency_key: String,
    /// What it is about.
    topic: String,
    /// Where it stands.
    status: DeliveryName,
    /// When it was stored.
    #[schema(format = DateTime)]
    created_at: String,
    /// When it is tried next; null where it is settled, or under way just now.
    #[schema(format = DateTime)]
    next_try_at: Option<String>,
    /// When it was delivered, or given up; null while it is pending.
    #[schema(format = DateTime)]
    settled_at: Option<String>,
    /// How many tries have begun.
    tried: u32,
    /// What is sent; absent in lists.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(required = false, nullable = false)]
    payload: Option<Value>,
    /// The tries, in order; absent in lists. One is missing whose replica died before it could note it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(required = false, nullable = false)]
    tries: Option<Vec<TryReply>>,
}

/// A try to deliver an effect.
#[derive(Debug, Serialize, ToSchema)]
struct TryReply {
    /// Its number.
    #[serde(rename = "try")]
    #[schema(minimum = 1)]
    number: i32,
    /// When it began.
    #[schema(format = DateTime)]
    at: String,
    /// The status code of the answer; null where there was none.
    #[schema(minimum = 100, maximum = 999)]
    status_code: Option<u16>,
    /// What went wrong; null where it was delivered.
    error: Option<String>,
    /// How long it took.
    milliseconds: u64,
}

/// Where the delivery of an effect stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Delivery)]
enum DeliveryName {
    /// It waits for its first try, or for another one.
    Pending,
    /// A receiver has taken it.
    Delivered,
    /// It was given up.
    Dead,
}

impl From<Delivery> for DeliveryName {
    fn from(delivery: Delivery) -> Self {
        match delivery {
            Delivery::Pending => Self::Pending,
            Delivery::Delivered => Self::Delivered,
            Delivery::Dead => Self::Dead,
        }
    }
}

impl EffectReply {
    fn new(parcel: Parcel, is_whole: bool) -> Self {
        let at = |time: Option<Time>| time.map(rfc3339::format);
        // It was written from JSON.
        let payload = || serde_json::from_str(&parcel.payload).unwrap_or(Value::Null);
        Self {
            status: parcel.delivery.into(),
            created_at: rfc3339::format(parcel.created_at),
            next_try_at: at(parcel.next_at),
            settled_at: at(parcel.settled_at),
            tried: parcel.tries,
            payload: is_whole.then(payload),
            tries: is_whole.then(|| parcel.log.into_iter().map(TryReply::new).collect()),
            id: parcel.id,
            idempotency_key: parcel.key.as_str().to_owned(),
            topic: parcel.topic,
        }
    }
}

impl TryReply {
    fn new(attempt: Try) -> Self {
        Self {
            number: attempt.number,
            at: rfc3339::format(attempt.at),
            status_code: attempt.status_code,
            error: attempt.error,
            milliseconds: attempt.milliseconds,
        }
    }
}

/// A part of the list.
#[derive(Debug, Serialize, ToSchema)]
pub struct EffectsReply {
    /// The effects, newest first.
    effects: Vec<EffectReply>,
    /// Send it as `cursor` for the next part; null at the end.
    next_cursor: Option<String>,
}

/// An effect that is to be delivered once more.
#[derive(Debug, Serialize, ToSchema)]
pub struct RedeliverReply {
    /// The effect.
    #[serde(flatten)]
    effect: EffectReply,
    /// Whether it is due by this; false: a try is under way just now.
    changed: bool,
}

/// Which effects to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct OutboxQuery {
    /// Only those that stand there.
    #[param(inline, value_type = Option<DeliveryName>)]
    status: Option<DeliveryParameter>,
    /// Only those of this topic.
    #[param(value_type = Option<String>, min_length = 1, max_length = 128)]
    topic: Option<Topic>,
    /// How many at most.
    #[param(value_type = Option<i32>, minimum = 1, maximum = 500, default = 50)]
    limit: Option<Limit>,
    /// The `next_cursor` of the part before.
    #[param(value_type = Option<String>)]
    cursor: Option<CursorParameter>,
}

#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct DeliveryParameter(Delivery);

impl TryFrom<String> for DeliveryParameter {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Delivery::of_name(&text)
            .map(Self)
            .ok_or("must be pending, delivered or dead")
    }
}

/// The name of an effect, behind which the list goes on.
#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct CursorParameter(String);

impl TryFrom<String> for CursorParameter {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        if is_id(&text) {
            Ok(Self(text))
        } else {
            Err("is not a cursor of this service")
        }
    }
}

/// Whether an effect can be named so.
fn is_id(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.len() <= 64 && text.starts_with("msg_") && text.bytes().all(is_plain)
}

/// The id in a path. The store is not asked for what cannot be one.
fn known_id(id: Path<String>) -> Result<String, Problem> {
    let id = id.into_inner();
    if is_id(&id) {
        Ok(id)
    } else {
        Err(unknown(&id))
    }
}

fn unknown(id: &str) -> Problem {
    Problem::new(Code::NotFound, format!("there is no effect {id:?}"))
}

/// List effects
///
/// Newest first, and stable while others are added. Their payloads and tries are left out.
#[utoipa::path(get, path = "/outbox", tag = "outbox", params(OutboxQuery),
    responses((status = 200, description = "A part of the list", body = EffectsReply)))]
pub async fn list_effects(query: Query, gate: Data<Gate>) -> Result<Json<EffectsReply>, Problem> {
    list_of(query, &gate).await
}

pub(super) async fn list_of(query: Query, gate: &Gate) -> Result<Json<EffectsReply>, Problem> {
    let query: OutboxQuery = decode(Value::Object(query.0), "")?;
    let filter = ParcelFilter {
        delivery: query.status.map(|status| status.0),
        topic: query.topic.map(|topic| topic.as_str().to_owned()),
        limit: query.limit.unwrap_or(Limit::DEFAULT).0,
        cursor: query.cursor.map(|cursor| cursor.0),
    };
    let page = gate.list_effects(filter).await?;
    let effects = page.parcels.into_iter();
    Ok(Json(EffectsReply {
        effects: effects
            .map(|parcel| EffectReply::new(parcel, false))
            .collect(),
        next_cursor: page.next,
    }))
}

/// Read an effect
///
/// With its payload and its tries.
#[utoipa::path(get, path = "/outbox/{id}", tag = "outbox",
    params(("id" = String, Path, description = "Its name, as the history of the key, or the receiver, has it")),
    responses((status = 200, description = "The effect", body = EffectReply)),
    extensions(("x-problems" = json!(["not_found"]))))]
pub async fn effect(
    id: Path<String>,
    _: NoQuery,
    gate: Data<Gate>,
) -> Result<Json<EffectReply>, Problem> {
    let id = known_id(id)?;
    let parcel = gate.effect(id.clone()).await?.ok_or_else(|| unknown(&id))?;
    Ok(Json(EffectReply::new(parcel, true)))
}

/// Deliver an effect once more
///
/// It is due at once, whatever has become of it, with the same `webhook-id`; after that it is tried as often as a
/// new one.
#[utoipa::path(post, path = "/outbox/{id}/redeliver", tag = "outbox",
    params(("id" = String, Path, description = "Its name")),
    responses((status = 200, description = "The effect", body = RedeliverReply)),
    extensions(("x-problems" = json!(["not_found", "conflict"]))))]
pub async fn redeliver(
    id: Path<String>,
    _: NoQuery,
    gate: Data<Gate>,
    routes: Data<Routes>,
) -> Result<Json<RedeliverReply>, Problem> {
    let id = known_id(id)?;
    let parcel = gate.effect(id.clone()).await?.ok_or_else(|| unknown(&id))?;
    if routes.find(&parcel.topic).is_none() {
        let topic = parcel.topic;
        let why = format!("it would go nowhere: OUTBOX_ROUTES names no route for {topic:?}");
        return Err(Problem::new(Code::Conflict, why));
    }
    let (parcel, changed) = gate
        .redeliver(id.clone())
        .await?
        .ok_or_else(|| unknown(&id))?;
    Ok(Json(RedeliverReply {
        effect: EffectReply::new(parcel, true),
        changed,
    }))
}
