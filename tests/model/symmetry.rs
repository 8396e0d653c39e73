//! Callers are all alike, and so are keys: of states that differ in nothing but their names, one is enough.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::entry::{Caller, Entry, Mark, Standing, What};
use super::rules::{Request, Said};
use super::world::{Key, World};

/// The state with its callers and keys in an order that does not depend on their names. Any order
/// would be sound, since no rule looks at a name; this one brings nearly all of those states together.
pub(crate) fn representative(world: &World) -> World {
    let keys = &world.keys;
    let mut orders = vec![keys.clone()];
    if keys.len() > 1 {
        orders.push(keys.iter().rev().cloned().collect());
    }
    orders
        .into_iter()
        .map(|keys| World {
            keys: in_order_of_callers(&keys),
            witness: world.witness,
        })
        .min()
        .expect("there is an order")
}

fn in_order_of_callers(keys: &[Arc<Key>]) -> Vec<Arc<Key>> {
    let callers = Caller::try_from(keys[0].runs.len()).expect("a model has a few callers");
    let mut order: Vec<Caller> = (0..callers).collect();
    order.sort_by_cached_key(|&caller| {
        let seen: Vec<_> = keys.iter().map(|key| seen_of(key, caller)).collect();
        seen
    });
    if order.is_sorted() {
        return keys.to_vec();
    }
    let mut names = vec![0; order.len()];
    for (name, &caller) in (0..).zip(&order) {
        names[usize::from(caller)] = name;
    }
    keys.iter()
        .map(|key| Arc::new(renamed(key, &order, &names)))
        .collect()
}

/// What is seen of a caller at a key, whatever its name is.
fn seen_of(key: &Key, caller: Caller) -> impl Ord + use<> {
    let requests: Vec<(Request, bool)> = key
        .sent
        .iter()
        .filter(|(request, _)| is_of(request, caller))
        .map(|(request, was_handled)| (rename(*request, &|_| 0), *was_handled))
        .collect();
    let told: Vec<bool> = key.told.iter().map(|&told| told == caller).collect();
    (key.runs[usize::from(caller)], told, requests)
}

fn is_of(request: &Request, caller: Caller) -> bool {
    match request {
        Request::Claim { caller: of, .. } => *of == caller,
        Request::Report {
            said: Said::Done { id },
            ..
        } => *id == Some(caller),
        _ => false,
    }
}

fn renamed(key: &Key, order: &[Caller], names: &[Caller]) -> Key {
    let name = |caller: Caller| names[usize::from(caller)];
    Key {
        entry: key.entry.as_ref().map(|entry| Entry {
            holder: entry.holder.map(name),
            standing: match entry.standing {
                Standing::Done { id } => Standing::Done { id: id.map(name) },
                standing => standing,
            },
            history: entry
                .history
                .iter()
                .map(|mark| Mark {
                    what: match mark.what {
                        What::Claimed { holder } => What::Claimed {
                            holder: holder.map(name),
                        },
                        What::Done { id } => What::Done { id: id.map(name) },
                        What::Conflict { vague, holder, id } => What::Conflict {
                            vague,
                            holder: holder.map(name),
                            id: id.map(name),
                        },
                        what => what,
                    },
                    ..*mark
                })
                .collect(),
            ..*entry
        }),
        runs: order
            .iter()
            .map(|&caller| key.runs[usize::from(caller)])
            .collect(),
        sent: key
            .sent
            .iter()
            .map(|(request, was_handled)| (rename(*request, &name), *was_handled))
            .collect::<BTreeMap<_, _>>(),
        told: key.told.iter().map(|&caller| name(caller)).collect(),
        ..*key
    }
}

fn rename(request: Request, name: &impl Fn(Caller) -> Caller) -> Request {
    match request {
        Request::Claim {
            caller,
            wish,
            entrance,
        } => Request::Claim {
            caller: name(caller),
            wish,
            entrance,
        },
        Request::Report {
            caller,
            attempt,
            said,
            of,
        } => Request::Report {
            caller: caller.map(name),
            attempt,
            said: match said {
                Said::Done { id } => Said::Done { id: id.map(name) },
                failed @ Said::Failed { .. } => failed,
            },
            of,
        },
        request => request,
    }
}
