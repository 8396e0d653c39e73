//! What `GET /metrics` says, to be compared.

use std::collections::BTreeMap;

use super::Service;

/// The samples of one reading, by name and labels as they are written: `claims_total{verdict="claimed"}`.
/// The prefix `dedup_gate_`, which all have, is left out.
#[derive(Debug)]
pub(crate) struct Samples(BTreeMap<String, f64>);

impl Samples {
    /// Reads the service's metrics.
    pub(crate) fn of(service: &Service) -> Self {
        let reply = service.get("/metrics");
        assert_eq!(reply.status, 200, "{}", reply.text);
        let samples = reply.text.lines().filter(|line| !line.starts_with('#'));
        Self(
            samples
                .map(|line| {
                    let (name, value) = line.rsplit_once(' ').unwrap();
                    let name = name.strip_prefix("dedup_gate_").unwrap();
                    (name.to_owned(), value.parse().unwrap())
                })
                .collect(),
        )
    }

    /// A sample; none where it is absent.
    pub(crate) fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).copied()
    }

    /// By how much the samples of a family have grown since an earlier reading, where they have.
    pub(crate) fn since(&self, before: &Self, family: &str) -> BTreeMap<String, f64> {
        let of_family = self.0.iter().filter(|(name, _)| name.starts_with(family));
        of_family
            .map(|(name, value)| (name.clone(), value - before.get(name).unwrap_or(0.0)))
            .filter(|(_, increase)| *increase != 0.0)
            .collect()
    }
}
