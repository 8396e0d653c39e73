//! `POST /key`: the key of the work, made of the values that identify it.

use actix_web::web::Json;
use chrono::Utc;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use uuid::Uuid;

use super::problem::Problem;
use super::request::{JsonBody, decode, first_faults};
use crate::domain::Invalid;
use crate::domain::key::{Material, Normalization, Recipe, UuidVersion, uuid_of};

/// What a key is to be made of. Exactly one of `parts` and `fields`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"parts": ["ORD-2041", 129.9]}))]
pub struct KeyRequest {
    /// Strings, numbers or booleans, joined with `:` as a JavaScript template literal writes
    /// them: the key is what
    /// `` crypto.createHash('sha256').update(`${a}:${b}`).digest('hex') `` gives.
    #[schema(min_items = 1, max_items = 32)]
    parts: Option<Vec<Value>>,
    /// Members of any JSON, written canonically (RFC 8785): their order does not matter.
    #[schema(value_type = Option<Object>)]
    fields: Option<Map<String, Value>>,
    /// Keeps the keys of two uses apart: it becomes the first part, or the canonical form
    /// becomes that of the array `[scope, fields]`.
    scope: Option<String>,
    /// Applied to the scope and to every string value at any depth, always in the order
    /// `nfc`, `trim`, `lowercase`.
    #[schema(value_type = Option<Vec<NormalizationName>>)]
    normalize: Option<Vec<Normalization>>,
    /// Whether parts and top-level members may be null, empty or only white space.
    #[schema(default = false)]
    allow_empty: Option<bool>,
    /// The version that `uuid` is stamped with.
    #[schema(value_type = Option<i32>, minimum = 4, maximum = 5, default = 5)]
    uuid_version: Option<UuidVersionNumber>,
}

/// A step of normalisation.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "it only describes the names of `Normalization`")]
pub(super) enum NormalizationName {
    Nfc,
    Trim,
    Lowercase,
}

/// 4 or 5.
#[derive(Debug, Clone, Copy)]
struct UuidVersionNumber(UuidVersion);

impl<'de> Deserialize<'de> for UuidVersionNumber {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)?.as_f64() {
            Some(5.0) => Ok(Self(UuidVersion::V5)),
            Some(4.0) => Ok(Self(UuidVersion::V4)),
            _ => Err(serde::de::Error::custom("must be 5 or 4")),
        }
    }
}

/// A key.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({
    "idempotency_key": "5fd4b988da1e9a5bbdd5d16bc450989caf8bec1a3a2ee087a0f8afbf128d90a0",
    "uuid": "a01bce06-78c0-57e2-9110-22202ca56f08",
    "canonical": "ORD-2041:129.9",
    "warnings": []
}))]
pub struct KeyReply {
    /// SHA-256 of `canonical`, in lower-case hex.
    #[schema(pattern = "^[0-9a-f]{64}$")]
    idempotency_key: String,
    /// The UUID that goes with the key, for headers such as `PayPal-Request-Id`.
    uuid: Uuid,
    /// The text that was hashed.
    canonical: String,
    /// What is probably a mistake.
    warnings: Vec<String>,
}

/// The options that only a key made of values has.
pub(super) struct RecipeMembers {
    pub(super) parts: Option<Vec<Value>>,
    pub(super) fields: Option<Map<String, Value>>,
    pub(super) scope: Option<String>,
    pub(super) normalize: Option<Vec<Normalization>>,
    pub(super) allow_empty: Option<bool>,
}

impl RecipeMembers {
    /// The recipe; none where neither parts nor fields are given.
    pub(super) fn recipe(self) -> Result<Option<Recipe>, Vec<Invalid>> {
        let material = match (self.parts, self.fields) {
            (Some(_), Some(_)) => {
                return Err(vec![Invalid::new(
                    "/fields",
                    "cannot be given beside \"parts\": give one of them",
                )]);
            }
            (Some(parts), None) => Material::Parts(parts),
            (None, Some(fields)) => Material::Fields(fields),
            (None, None) => {
                let unusable = [
                    ("/scope", self.scope.is_some()),
                    ("/normalize", self.normalize.is_some()),
                    ("/allow_empty", self.allow_empty.is_some()),
                ];
                let faults: Vec<Invalid> = unusable
                    .into_iter()
                    .filter(|(_, is_given)| *is_given)
                    .map(|(pointer, _)| {
                        Invalid::new(pointer, "goes with \"parts\" or \"fields\" only")
                    })
                    .collect();
                return if faults.is_empty() {
                    Ok(None)
                } else {
                    Err(faults)
                };
            }
        };
        Ok(Some(Recipe {
            material,
            scope: self.scope,
            normalize: self.normalize.unwrap_or_default(),
            allow_empty: self.allow_empty.unwrap_or(false),
        }))
    }
}

/// Make a key
///
/// Makes the key of the work from the values that identify it. Nothing is stored. `/claim`
/// takes the same values, so that one call does both.
#[utoipa::path(post, path = "/key", tag = "key",
    request_body(content = KeyRequest, examples(
        ("parts" = (value = json!({"parts": ["ORD-2041", 129.9]}))),
        ("fields" = (value = json!({"scope": "order-triage", "normalize": ["trim"], "fields": {
            "customer_id": "C-7", "lines": [{"sku": "LUNA-1", "qty": 2}], "created_at": "2026-11-30T09:12:00Z"}})))
    )),
    responses((status = 200, description = "The key", body = KeyReply)))]
pub async fn derive(body: JsonBody) -> Result<Json<KeyReply>, Problem> {
    let request: KeyRequest = decode(body.0, "")?;
    let version = request
        .uuid_version
        .map_or(UuidVersion::V5, |version| version.0);
    let recipe = RecipeMembers {
        parts: request.parts,
        fields: request.fields,
        scope: request.scope,
        normalize: request.normalize,
        allow_empty: request.allow_empty,
    }
    .recipe()?
    .ok_or_else(|| Invalid::new("/parts", "is missing: give \"parts\" or \"fields\""))?;
    let derived = recipe.derive(Utc::now()).map_err(first_faults)?;
    Ok(Json(KeyReply {
        uuid: uuid_of(&derived.key, version),
        idempotency_key: derived.key.as_str().to_owned(),
        canonical: derived.canonical,
        warnings: derived.warnings,
    }))
}
