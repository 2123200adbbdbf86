//! Shares of the endpoints in the requests to their cluster, by health, ejection, priority, locality and
//! weight. The load of endpoints and the keys of hashing balancers are not considered.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use skysail_policy::{
    balance::priorities::{self, EndpointCounts, Load},
    config::{
        Cluster, Endpoints,
        cluster::{Endpoint, Health},
    },
};

/// Mark of an ejection whose time is not known.
const EJECTED: u64 = 1;

/// Marks an endpoint as ejected. It has no effect on endpoints of clusters without outlier detection.
pub(super) fn eject(endpoint: &Endpoint) {
    if let Some(state) = &endpoint.state {
        state.ejected.store(EJECTED, Relaxed);
    }
}

/// Returns whether outlier detection has ejected an endpoint.
pub(super) fn is_ejected(endpoint: &Endpoint) -> bool {
    endpoint.state.as_ref().is_some_and(|state| state.is_ejected())
}

/// Returns the share of each endpoint, from 0 to 1, in the order of the priorities.
pub(super) fn of(cluster: &Cluster, endpoints: &Endpoints) -> Vec<Vec<f64>> {
    let counts: Vec<EndpointCounts> = endpoints.priorities.iter().map(|list| count(list)).collect();
    let (overprovisioning, threshold) =
        (endpoints.overprovisioning as usize, cluster.panic_threshold as usize);
    let loads = priorities::loads(&counts, overprovisioning, threshold);
    let of_priority = |(list, load): (&Vec<Arc<Endpoint>>, &Load)| {
        let mut shares = vec![0.0; list.len()];
        for (part, wanted) in [(load.healthy, Health::Healthy), (load.degraded, Health::Degraded)] {
            let is_used = |endpoint: &Endpoint| load.panic || health(endpoint) == wanted;
            distribute(cluster, endpoints, list, (part, load.panic), is_used, &mut shares);
        }
        shares
    };
    endpoints.priorities.iter().zip(&loads).map(of_priority).collect()
}

/// Adds a part of the load, in percent, to the shares of the endpoints that take it.
fn distribute(
    cluster: &Cluster,
    endpoints: &Endpoints,
    list: &[Arc<Endpoint>],
    (part, panic): (usize, bool),
    is_used: impl Fn(&Endpoint) -> bool,
    shares: &mut [f64],
) {
    let by_locality = cluster.locality_weighted && !panic;
    let localities: Vec<(Option<u32>, f64)> = match by_locality {
        true => weights(endpoints, list, &is_used),
        false => Vec::new(),
    };
    let localities = if localities.is_empty() { vec![(None, 1.0)] } else { localities };
    let all: f64 = localities.iter().map(|(_, weight)| weight).sum();
    for (locality, weight) in localities {
        let is_here = |endpoint: &Endpoint| {
            is_used(endpoint) && locality.is_none_or(|locality| endpoint.locality == locality)
        };
        let here = || list.iter().enumerate().filter(|(_, endpoint)| is_here(endpoint));
        let sum: f64 = here().map(|(_, endpoint)| f64::from(endpoint.weight)).sum();
        for (index, endpoint) in here() {
            let of_locality = f64::from(endpoint.weight) / sum;
            if let Some(share) = shares.get_mut(index) {
                *share += part as f64 / 100.0 * weight / all * of_locality;
            }
        }
    }
}

/// Returns the localities with endpoints that are used, and their weights.
fn weights(
    endpoints: &Endpoints,
    list: &[Arc<Endpoint>],
    is_used: impl Fn(&Endpoint) -> bool,
) -> Vec<(Option<u32>, f64)> {
    let overprovisioning = f64::from(endpoints.overprovisioning) / 100.0;
    let weighed = endpoints.localities.iter().zip(0..).filter_map(|(locality, index)| {
        let here = || list.iter().filter(|endpoint| endpoint.locality == index);
        let used = here().filter(|endpoint| is_used(endpoint)).count();
        let counted = here().filter(|endpoint| endpoint.health != Health::Draining).count();
        // A locality keeps its share as long as its remaining endpoints can carry it.
        let part = (overprovisioning * used as f64 / counted.max(1) as f64).min(1.0);
        (used > 0 && locality.weight > 0).then(|| (Some(index), f64::from(locality.weight) * part))
    });
    weighed.collect()
}

fn count(list: &[Arc<Endpoint>]) -> EndpointCounts {
    let of = |wanted: Health| list.iter().filter(|endpoint| health(endpoint) == wanted).count();
    let (healthy, degraded, draining) = (of(Health::Healthy), of(Health::Degraded), of(Health::Draining));
    EndpointCounts { all: list.len(), counted: list.len() - draining, healthy, degraded }
}

/// Returns the health of an endpoint, including its ejection.
pub(super) fn health(endpoint: &Endpoint) -> Health {
    if is_ejected(endpoint) && endpoint.health != Health::Draining {
        return Health::Unhealthy;
    }
    endpoint.health
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use skysail_policy::{config::cluster::Locality, state::health::EndpointState};

    use super::*;

    fn endpoint(number: u8, weight: u32, locality: u32) -> Arc<Endpoint> {
        let address = ([10, 0, 0, number], 80).into();
        let state = Some(Arc::new(EndpointState::new(Instant::now())));
        Arc::new(Endpoint { weight, locality, state, ..Endpoint::new(address, None) })
    }

    fn percent(cluster: &Cluster, endpoints: &Endpoints) -> Vec<Vec<f64>> {
        let rounded =
            |list: Vec<f64>| list.into_iter().map(|share| (share * 1000.0).round() / 10.0).collect();
        of(cluster, endpoints).into_iter().map(rounded).collect()
    }

    #[test]
    fn ejected_endpoints_get_no_requests_and_the_next_priority_gets_the_rest() {
        let cluster = Cluster { panic_threshold: 0, ..Cluster::new("a") };
        let first = vec![endpoint(1, 1, 0), endpoint(2, 3, 0)];
        let endpoints =
            Endpoints { priorities: vec![first, vec![endpoint(3, 1, 0)]], ..Endpoints::default() };
        assert_eq!(percent(&cluster, &endpoints), [vec![25.0, 75.0], vec![0.0]]);
        eject(&endpoints.priorities[0][1]);
        assert_eq!(percent(&cluster, &endpoints), [vec![70.0, 0.0], vec![30.0]]);
        eject(&endpoints.priorities[0][0]);
        eject(&endpoints.priorities[1][0]);
        assert_eq!(percent(&cluster, &endpoints), [vec![0.0, 0.0], vec![0.0]]);
    }

    #[test]
    fn all_endpoints_get_requests_in_panic() {
        let cluster = Cluster { panic_threshold: 50, ..Cluster::new("a") };
        let endpoints = Endpoints::of(vec![endpoint(1, 1, 0), endpoint(2, 1, 0), endpoint(3, 1, 0)]);
        eject(&endpoints.priorities[0][0]);
        assert_eq!(percent(&cluster, &endpoints), [vec![0.0, 50.0, 50.0]]);
        eject(&endpoints.priorities[0][1]);
        assert_eq!(percent(&cluster, &endpoints), [vec![33.3, 33.3, 33.3]]);
    }

    #[test]
    fn localities_share_by_their_weights() {
        let cluster = Cluster { locality_weighted: true, ..Cluster::new("a") };
        let locality = |weight| Locality { place: Default::default(), weight };
        let endpoints = Endpoints {
            priorities: vec![vec![endpoint(1, 1, 0), endpoint(2, 1, 0), endpoint(3, 1, 1)]],
            localities: vec![locality(80), locality(20)],
            ..Endpoints::default()
        };
        assert_eq!(percent(&cluster, &endpoints), [vec![40.0, 40.0, 20.0]]);
    }
}
