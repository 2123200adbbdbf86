//! Which endpoint a request goes to. Pure: how busy endpoints are is asked of the caller, chance comes from outside.
//!
//! The state belongs to one worker and one cluster. Endpoints of equal weight are taken in turn or by the
//! least busy of a few; those of unequal weight by earliest deadline, as in Envoy: each is due again after one
//! over its weight, which spreads picks evenly over time and costs log(n).

use std::{cmp::Reverse, collections::BinaryHeap, net::SocketAddr, sync::Arc};

use crate::config::{Endpoint, Endpoints, cluster::Balancer};

#[cfg(test)]
mod tests;

/// Where a worker stands with a cluster's endpoints.
#[derive(Debug, Default)]
pub struct PickState {
    /// The endpoints this state is about. They are immutable, so the same `Arc` is the same set.
    endpoints: Option<Arc<Endpoints>>,
    /// The priority in use.
    priority: usize,
    /// Next in turn.
    position: usize,
    /// By deadline, where weights differ.
    schedule: BinaryHeap<Reverse<Due>>,
    equal_weights: bool,
}

/// When an endpoint is due.
#[derive(Clone, Copy, Debug)]
struct Due {
    at: f64,
    index: usize,
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.total_cmp(&other.at).then(self.index.cmp(&other.index))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Due {}

/// Endpoints better not taken again.
#[derive(Clone, Copy, Debug, Default)]
pub struct Avoid<'a> {
    /// Those tried before.
    pub hosts: &'a [SocketAddr],
    /// How often another is looked for before one of them is taken after all.
    pub attempts: u32,
}

/// Picks an endpoint; `None` when there is none. `Balancer::OriginalDst` has none to pick from.
pub fn pick<'a>(
    endpoints: &'a Arc<Endpoints>,
    balancer: Balancer,
    state: &mut PickState,
    busy: impl Fn(&Endpoint) -> u32,
    avoid: Avoid<'_>,
    dice: &mut fastrand::Rng,
) -> Option<&'a Arc<Endpoint>> {
    state.follow(endpoints, dice);
    let candidates = endpoints.priorities.get(state.priority).filter(|list| !list.is_empty())?;
    let mut picked = pick_once(candidates, balancer, state, &busy, dice)?;
    for _ in 0..avoid.attempts {
        if !avoid.hosts.contains(&picked.address) {
            break;
        }
        picked = pick_once(candidates, balancer, state, &busy, dice)?;
    }
    Some(picked)
}

fn pick_once<'a>(
    candidates: &'a [Arc<Endpoint>],
    balancer: Balancer,
    state: &mut PickState,
    busy: &impl Fn(&Endpoint) -> u32,
    dice: &mut fastrand::Rng,
) -> Option<&'a Arc<Endpoint>> {
    if let [only] = candidates {
        return (balancer != Balancer::OriginalDst).then_some(only);
    }
    match balancer {
        Balancer::OriginalDst => None,
        Balancer::RoundRobin if state.equal_weights => {
            state.position = (state.position + 1) % candidates.len();
            candidates.get(state.position)
        }
        Balancer::RoundRobin => state.next_due(candidates, |_| 0),
        Balancer::LeastRequest(choices) if state.equal_weights => {
            let choices = (choices.max(1) as usize).min(candidates.len());
            let any = || candidates.get(dice.usize(..candidates.len()));
            std::iter::repeat_with(any).take(choices).flatten().min_by_key(|one| busy(one))
        }
        Balancer::LeastRequest(_) => state.next_due(candidates, busy),
        Balancer::Random if state.equal_weights => candidates.get(dice.usize(..candidates.len())),
        Balancer::Random => by_weight(candidates, dice),
    }
}

fn by_weight<'a>(candidates: &'a [Arc<Endpoint>], dice: &mut fastrand::Rng) -> Option<&'a Arc<Endpoint>> {
    let total: u64 = candidates.iter().map(|one| u64::from(one.weight.max(1))).sum();
    let mut at = dice.u64(..total);
    candidates.iter().find(|one| {
        let weight = u64::from(one.weight.max(1));
        let here = at < weight;
        at = at.saturating_sub(weight);
        here
    })
}

impl PickState {
    /// Starts anew when the endpoints are others than last time.
    fn follow(&mut self, endpoints: &Arc<Endpoints>, dice: &mut fastrand::Rng) {
        if self.endpoints.as_ref().is_some_and(|known| Arc::ptr_eq(known, endpoints)) {
            return;
        }
        self.endpoints = Some(Arc::clone(endpoints));
        self.priority = endpoints.priorities.iter().position(|list| !list.is_empty()).unwrap_or(0);
        let list = endpoints.priorities.get(self.priority).map_or(&[][..], Vec::as_slice);
        self.equal_weights = list.windows(2).all(|pair| pair[0].weight == pair[1].weight);
        // Each worker begins elsewhere, so that they do not all hit the same endpoint first.
        self.position = dice.usize(..list.len().max(1));
        self.schedule.clear();
        if !self.equal_weights {
            let due = |(index, one): (usize, &Arc<Endpoint>)| {
                Reverse(Due { at: dice.f64() / f64::from(one.weight.max(1)), index })
            };
            self.schedule.extend(list.iter().enumerate().map(due));
        }
    }

    /// Takes the one that is due first and puts it back for later: the later, the smaller its weight and the
    /// busier it is.
    fn next_due<'a>(
        &mut self,
        candidates: &'a [Arc<Endpoint>],
        busy: impl Fn(&Endpoint) -> u32,
    ) -> Option<&'a Arc<Endpoint>> {
        let mut due = self.schedule.peek_mut()?;
        let picked = candidates.get(due.0.index)?;
        due.0.at += (f64::from(busy(picked)) + 1.0) / f64::from(picked.weight.max(1));
        Some(picked)
    }
}
