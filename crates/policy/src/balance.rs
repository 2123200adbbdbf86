//! Load balancing: selects the endpoint of a request. Does no IO; the caller supplies the load of endpoints and the
//! random numbers.
//!
//! The selection has four steps: the priority (by health, `priorities`); the healthy endpoints, the degraded ones or,
//! in panic, all; the locality, if localities are weighted; the endpoint. The state belongs to one worker and one
//! cluster. It is rebuilt when the endpoints or their health have changed.
//!
//! Endpoints of equal weight are selected in turn, or by the fewest requests among a few. Endpoints of unequal weight
//! are selected by earliest deadline (`schedule`), as in Envoy. Hashing balancers (`ring`, `maglev`) map a key to the
//! same endpoint as Envoy.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

use crate::config::{
    Cluster, Endpoint, Endpoints,
    cluster::{Balancer, HashTable, HashTables, Health},
};

pub mod hash;
pub mod key;
pub mod latency;
mod maglev;
mod normal;
pub mod priorities;
mod ring;
mod schedule;

use normal::Normal;
use priorities::{EndpointCounts, Load};
use schedule::Schedule;

#[cfg(test)]
mod tests;

/// A worker's selection state for one cluster.
#[derive(Debug, Default)]
pub struct PickState {
    /// Endpoints that the state was built for. They are immutable, so the same `Arc` is the same set.
    endpoints: Option<Arc<Endpoints>>,
    /// Version of the ejections that the state was built for.
    version: u32,
    /// Groups with a share of the load, in the order of their percentages.
    groups: Vec<Group>,
    /// For each priority, whether earlier attempts of a request used it; and the groups of the unused priorities.
    unused: Option<(Vec<bool>, Vec<Group>)>,
    hashed: Option<Arc<HashTables>>,
    /// End of the last slow start; `None` if no endpoint is in slow start.
    warm: Option<Instant>,
    /// The last selection was in panic: among all endpoints, whatever their health.
    panicked: bool,
}

/// Endpoints of one priority that share a part of the load.
#[derive(Debug)]
struct Group {
    priority: usize,
    /// Upper end of the group's percentages, which are in 1 to 100.
    upto: u64,
    panic: bool,
    /// Order of the sets by weight; empty for a single set.
    turns: Schedule,
    /// One set per locality if localities are weighted, else a single set.
    sets: Vec<Set>,
}

/// Endpoints of which one is selected.
#[derive(Debug)]
struct Set {
    weight: f64,
    /// Indices into the endpoints of the priority.
    members: Vec<u32>,
    /// Position in `members` of the last round-robin selection.
    position: usize,
    /// Order by weight; empty if all weights are equal.
    schedule: Schedule,
}

/// Constraints of a request on the selection.
#[derive(Clone, Copy, Debug, Default)]
pub struct PickOptions<'a> {
    /// Hash of the request, for hashing balancers.
    pub hash: Option<u64>,
    /// Endpoints to avoid: those of earlier attempts.
    pub avoid: &'a [SocketAddr],
    /// Maximum number of repeated selections. The last one is accepted even if its endpoint is to be avoided.
    pub attempts: u32,
    /// Number of attempts between updates of the avoided priorities (`update_frequency` of `previous_priorities`); 0
    /// avoids none.
    pub priority_frequency: u32,
}

/// Selects an endpoint; returns `None` if there is none, as with `Balancer::OriginalDst`. `load` returns the load of
/// an endpoint: its requests in flight, or their expected latency.
pub fn pick<'a>(
    cluster: &Cluster,
    endpoints: &'a Arc<Endpoints>,
    state: &mut PickState,
    load: impl Fn(&Endpoint) -> u64,
    want: PickOptions<'_>,
    rng: &mut fastrand::Rng,
) -> Option<&'a Arc<Endpoint>> {
    state.follow(cluster, endpoints, rng);
    let avoids_priorities =
        want.priority_frequency > 0 && state.avoid_priorities(cluster, endpoints, want, rng);
    let mut attempt = 0;
    loop {
        let of = (want.hash, attempt, avoids_priorities);
        let picked = state.once(cluster, endpoints, &load, of, rng)?;
        if attempt == want.attempts || !want.avoid.contains(&picked.address) {
            return Some(picked);
        }
        attempt += 1;
    }
}

impl PickState {
    /// Returns whether the last selection was in panic: among all endpoints, whatever their health.
    pub fn has_panicked(&self) -> bool {
        self.panicked
    }

    /// Rebuilds the state if the endpoints or their health have changed.
    fn follow(&mut self, cluster: &Cluster, endpoints: &Arc<Endpoints>, rng: &mut fastrand::Rng) {
        let version = cluster.outlier.as_ref().map_or(0, |outlier| outlier.state.version.load(Relaxed));
        if self.version == version
            && self.warm.is_none_or(|warm| Instant::now() < warm)
            && self.endpoints.as_ref().is_some_and(|known| Arc::ptr_eq(known, endpoints))
        {
            return;
        }
        (self.version, self.endpoints, self.unused) = (version, Some(Arc::clone(endpoints)), None);
        let census: Vec<_> = endpoints.priorities.iter().map(census).collect();
        let loads = loads(cluster, endpoints, &census);
        self.groups = groups(cluster, endpoints, &loads, rng);
        self.hashed = hashed(cluster, endpoints, version, &loads);
        self.warm = warm(cluster, endpoints);
    }

    /// Prepares the groups of the priorities that earlier attempts have not used. Returns false if there is nothing to
    /// avoid.
    #[cold]
    fn avoid_priorities(
        &mut self,
        cluster: &Cluster,
        endpoints: &Endpoints,
        want: PickOptions<'_>,
        rng: &mut fastrand::Rng,
    ) -> bool {
        let frequency = want.priority_frequency as usize;
        // As in Envoy, a hash alone decides about the endpoint.
        if frequency == 0 || want.avoid.len() < frequency || self.hashed.is_some() {
            return false;
        }
        let mut census: Vec<_> = endpoints.priorities.iter().map(census).collect();
        let used = used_priorities(endpoints, &census, want.avoid.chunks_exact(frequency));
        if !used.contains(&true) {
            return false;
        }
        if self.unused.as_ref().is_none_or(|(known, _)| *known != used) {
            let whole = loads(cluster, endpoints, &census);
            let avoided = census.iter_mut().zip(&used).filter(|(_, used)| **used);
            avoided.for_each(|(census, _)| *census = EndpointCounts::default());
            let mut loads = priorities::loads(&census, endpoints.overprovisioning as usize, 0);
            // Whether a priority panics does not depend on the attempts.
            loads.iter_mut().zip(whole).for_each(|(load, whole)| load.panic = whole.panic);
            self.unused = Some((used, groups(cluster, endpoints, &loads, rng)));
        }
        true
    }

    fn once<'a>(
        &mut self,
        cluster: &Cluster,
        endpoints: &'a Endpoints,
        load: &impl Fn(&Endpoint) -> u64,
        (hash, attempt, avoids_priorities): (Option<u64>, u32, bool),
        rng: &mut fastrand::Rng,
    ) -> Option<&'a Arc<Endpoint>> {
        self.panicked = false;
        let hash = if self.hashed.is_some() { Some(hash.unwrap_or_else(|| rng.u64(..))) } else { None };
        let groups = match &mut self.unused {
            Some((_, unused)) if avoids_priorities => unused,
            _ => &mut self.groups,
        };
        let group = match &mut **groups {
            [only] => only,
            several => {
                let percent = hash.unwrap_or_else(|| rng.u64(..)) % 100 + 1;
                several.iter_mut().find(|group| percent <= group.upto)?
            }
        };
        self.panicked = group.panic;
        let list = endpoints.priorities.get(group.priority)?;
        let index = match (&self.hashed, hash) {
            (Some(hashed), Some(hash)) => match hashed.tables.get(group.priority)? {
                HashTable::Ring(ring) => ring::find(ring, hash, attempt)?,
                HashTable::Maglev(table) => maglev::find(table, hash, attempt)?,
            },
            _ => group.next(cluster, list, load, rng)?,
        };
        list.get(index as usize)
    }
}

impl Group {
    fn next(
        &mut self,
        cluster: &Cluster,
        list: &[Arc<Endpoint>],
        load: &impl Fn(&Endpoint) -> u64,
        rng: &mut fastrand::Rng,
    ) -> Option<u32> {
        let sets = &mut self.sets;
        let set = match &mut **sets {
            [only] => only,
            several => {
                let next = self.turns.next(|index| several.get(index).map_or(1.0, |set| set.weight))?;
                several.get_mut(next)?
            }
        };
        let Set { members, position, schedule, .. } = set;
        if let [only] = **members {
            return (cluster.balancer != Balancer::OriginalDst).then_some(only);
        }
        let get = |place: usize| members.get(place).and_then(|index| list.get(*index as usize));
        let weight = |place: usize| get(place).map_or(1.0, |one| weight(cluster, one));
        let load = |place: usize| get(place).map_or(0, |one| load(one));
        let place = match cluster.balancer {
            Balancer::RoundRobin if schedule.is_empty() => {
                *position = (*position + 1) % members.len().max(1);
                *position
            }
            Balancer::RoundRobin => schedule.next(weight)?,
            Balancer::LeastRequest { choices, .. } if schedule.is_empty() => {
                // With 64 times the number of endpoints, nearly all are compared; more choices change nothing.
                let choices = (choices.max(1) as usize).min(members.len() * 64);
                let any = || rng.usize(..members.len());
                std::iter::repeat_with(any).take(choices).min_by_key(|place| load(*place))?
            }
            Balancer::LeastRequest { bias, .. } => {
                schedule.next(|place| weight(place) / (load(place) as f64 + 1.0).powf(bias))?
            }
            Balancer::PeakEwma { .. } => {
                let first = rng.usize(..members.len());
                let other = (first + rng.usize(1..members.len())) % members.len();
                [first, other].into_iter().min_by_key(|place| load(*place))?
            }
            Balancer::Random => rng.usize(..members.len().max(1)),
            Balancer::RingHash { .. } | Balancer::Maglev(_) | Balancer::OriginalDst => return None,
        };
        members.get(place).copied()
    }
}

/// Endpoints of a priority among which one is selected, by their health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HealthTier {
    Healthy,
    Degraded,
    All,
}

impl HealthTier {
    fn takes(self, endpoint: &Endpoint) -> bool {
        match self {
            Self::Healthy => health(endpoint) == Health::Healthy,
            Self::Degraded => health(endpoint) == Health::Degraded,
            Self::All => true,
        }
    }
}

/// Returns the health of an endpoint, including its ejection.
fn health(endpoint: &Endpoint) -> Health {
    match &endpoint.state {
        Some(track) if track.is_ejected() && endpoint.health != Health::Draining => Health::Unhealthy,
        _ => endpoint.health,
    }
}

/// Returns the current weight of an endpoint.
fn weight(cluster: &Cluster, endpoint: &Endpoint) -> f64 {
    let weight = f64::from(endpoint.weight);
    match (&cluster.slow_start, &endpoint.state) {
        (Some(slow_start), Some(track)) if health(endpoint) == Health::Healthy => {
            weight * slow_start.factor(track.age(Instant::now()))
        }
        _ => weight,
    }
}

/// Returns the end of the last slow start; `None` if no endpoint is in slow start.
fn warm(cluster: &Cluster, endpoints: &Endpoints) -> Option<Instant> {
    let slow_start = cluster.slow_start.filter(|_| cluster.balancer.takes_endpoints_in_turn())?;
    let now = Instant::now();
    let left = endpoints.iter().filter_map(|one| slow_start.window.checked_sub(one.state.as_ref()?.age(now)));
    left.max().filter(|left| !left.is_zero()).map(|left| now + left)
}

fn census<'a>(endpoints: impl IntoIterator<Item = &'a Arc<Endpoint>>) -> EndpointCounts {
    let mut census = EndpointCounts::default();
    for endpoint in endpoints {
        census.all += 1;
        match health(endpoint) {
            Health::Healthy => census.healthy += 1,
            Health::Degraded => census.degraded += 1,
            Health::Unhealthy => {}
            Health::Draining => continue,
        }
        census.counted += 1;
    }
    census
}

/// Returns the shares of all priorities in the load.
fn loads(cluster: &Cluster, endpoints: &Endpoints, census: &[EndpointCounts]) -> Vec<Load> {
    priorities::loads(census, endpoints.overprovisioning as usize, cluster.panic_threshold as usize)
}

/// Returns the groups with a share of the load, in the order of their percentages.
fn groups(cluster: &Cluster, endpoints: &Endpoints, loads: &[Load], rng: &mut fastrand::Rng) -> Vec<Group> {
    let (mut groups, mut upto) = (Vec::new(), 0);
    // Healthy endpoints come first, so that a percentage always leads to the same group.
    let parts = |of: fn(&Load) -> usize, taken: HealthTier| {
        loads.iter().enumerate().map(move |(priority, load)| (priority, of(load), taken, load.panic))
    };
    let all = parts(|load| load.healthy, HealthTier::Healthy)
        .chain(parts(|load| load.degraded, HealthTier::Degraded));
    for (priority, part, taken, panic) in all.filter(|(_, part, ..)| *part > 0) {
        upto += part as u64;
        let taken = if panic { HealthTier::All } else { taken };
        let sets = sets(cluster, endpoints, priority, taken, rng);
        let turns = match &*sets {
            [_] => Schedule::default(),
            several => Schedule::new(several.iter().map(|set| set.weight), rng),
        };
        groups.push(Group { priority, upto, panic, turns, sets });
    }
    groups
}

/// Returns which priorities the attempts have used. Without an available endpoint in the others, all are unused again.
/// Source: Envoy's retry priority `previous_priorities`.
fn used_priorities<'a>(
    endpoints: &Endpoints,
    census: &[EndpointCounts],
    attempts: impl Iterator<Item = &'a [SocketAddr]>,
) -> Vec<bool> {
    let mut used = vec![false; endpoints.priorities.len()];
    for addresses in attempts {
        for (used, list) in used.iter_mut().zip(&endpoints.priorities) {
            *used |= list.iter().any(|one| addresses.contains(&one.address));
        }
        let overprovisioning = endpoints.overprovisioning as usize;
        let is_left = |(census, used): (&EndpointCounts, &bool)| {
            !used && census.percentages(overprovisioning).iter().any(|part| *part > 0)
        };
        if !census.iter().zip(&used).any(is_left) {
            used.fill(false);
        }
    }
    used
}

/// Returns the sets of a priority, by locality if localities are weighted.
fn sets(
    cluster: &Cluster,
    endpoints: &Endpoints,
    priority: usize,
    taken: HealthTier,
    rng: &mut fastrand::Rng,
) -> Vec<Set> {
    let list = &*endpoints.priorities[priority];
    let warm = warm(cluster, endpoints);
    let set = |share: f64, locality: Option<u32>, rng: &mut fastrand::Rng| {
        let here = |one: &Endpoint| locality.is_none_or(|locality| one.locality == locality);
        let members: Vec<_> =
            list.iter().zip(0_u32..).filter(|(one, _)| here(one) && taken.takes(one)).collect();
        let equal = warm.is_none() && members.iter().is_sorted_by(|a, b| a.0.weight == b.0.weight);
        let weights = members.iter().map(|(one, _)| weight(cluster, one));
        let schedule = if equal { Schedule::default() } else { Schedule::new(weights, rng) };
        // Workers start at different positions, so that they do not all select the same endpoint first.
        let position = rng.usize(..members.len().max(1));
        Set {
            weight: share,
            members: members.into_iter().map(|(_, index)| index).collect(),
            position,
            schedule,
        }
    };
    if cluster.locality_weighted && taken != HealthTier::All {
        let weighed: Vec<_> = endpoints
            .localities
            .iter()
            .zip(0_u32..)
            .filter(|(locality, _)| locality.weight > 0)
            .filter_map(|(locality, index)| {
                let here = census(list.iter().filter(|one| one.locality == index));
                let used = if taken == HealthTier::Healthy { here.healthy } else { here.degraded };
                // A locality keeps its share as long as its remaining endpoints can carry it.
                let overprovisioning = f64::from(endpoints.overprovisioning) / 100.0;
                let part = (overprovisioning * used as f64 / here.counted as f64).min(1.0);
                (used > 0).then(|| (f64::from(locality.weight) * part, index))
            })
            .collect();
        if !weighed.is_empty() {
            return weighed.into_iter().map(|(weight, index)| set(weight, Some(index), rng)).collect();
        }
    }
    vec![set(1.0, None, rng)]
}

/// Returns the lookup tables of a hashing balancer, shared between workers with the same endpoints.
fn hashed(
    cluster: &Cluster,
    endpoints: &Arc<Endpoints>,
    version: u32,
    loads: &[Load],
) -> Option<Arc<HashTables>> {
    if !cluster.balancer.hashes() {
        return None;
    }
    if let Some(made) = &*cluster.hash_tables.load()
        && made.version == version
        && Arc::ptr_eq(&made.endpoints, endpoints)
    {
        return Some(Arc::clone(made));
    }
    let table = |(list, load): (&Vec<Arc<Endpoint>>, &Load)| {
        let taken = if load.panic { HealthTier::All } else { HealthTier::Healthy };
        let normal = Normal::new(endpoints, list, cluster.locality_weighted, |one| taken.takes(one));
        match cluster.balancer {
            Balancer::RingHash { minimum, maximum, function } => {
                HashTable::Ring(ring::build(&normal, minimum, maximum, function))
            }
            Balancer::Maglev(size) => HashTable::Maglev(maglev::build(&normal, size)),
            _ => HashTable::Maglev(Box::default()),
        }
    };
    let tables = endpoints.priorities.iter().zip(loads).map(table).collect();
    let made = Arc::new(HashTables { endpoints: Arc::clone(endpoints), version, tables });
    cluster.hash_tables.store(Some(Arc::clone(&made)));
    Some(made)
}
