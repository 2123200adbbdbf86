//! DNS clusters: a task for each cluster resolves its host names periodically while the cluster exists.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;

use super::inventory::Inventory;
use skysail_policy::config::{
    Cluster, Endpoint, Endpoints,
    cluster::{Discovery, DnsName},
};

/// Starts a resolver task for every new DNS cluster.
pub(super) fn look_up(inventory: &mut Inventory, changed: &Arc<Notify>) {
    for accepted in inventory.clusters.values_mut().filter_map(|slot| slot.warming.as_mut()) {
        if matches!(accepted.value.discovery, Discovery::Dns { .. })
            && !std::mem::replace(&mut accepted.looked_up, true)
        {
            let (cluster, resolved) = (Arc::downgrade(&accepted.value), Arc::clone(&accepted.resolved));
            tokio::spawn(follow(cluster, resolved, Arc::clone(changed)));
        }
    }
}

/// Pause after the first failed lookup. Each consecutive failure doubles it, up to the cluster's `dns_refresh_rate`.
const FIRST_RETRY: Duration = Duration::from_secs(1);

/// Resolves a cluster's names until the cluster is dropped.
async fn follow(cluster: Weak<Cluster>, resolved: Arc<AtomicBool>, changed: Arc<Notify>) {
    let mut retry = FIRST_RETRY;
    while let Some(Lookup { refresh, complete }) = once(&cluster).await {
        if !resolved.swap(true, Ordering::AcqRel) {
            changed.notify_one();
        }
        tokio::time::sleep(if complete { refresh } else { refresh.min(retry) }).await;
        retry = if complete { FIRST_RETRY } else { retry.saturating_mul(2) };
    }
}

struct Lookup {
    /// Pause before the next lookup.
    refresh: Duration,
    /// The lookups of all names succeeded.
    complete: bool,
}

/// Resolves all names once; names that fail keep their previous addresses. Returns `None` when the cluster has
/// been dropped.
async fn once(cluster: &Weak<Cluster>) -> Option<Lookup> {
    let (names, logical, family, refresh) = match &cluster.upgrade()?.discovery {
        Discovery::Dns { names, logical, family, refresh, .. } => {
            (names.clone(), *logical, *family, *refresh)
        }
        _ => return None,
    };
    let (mut found, mut complete) = (Vec::new(), true);
    for name in names {
        match tokio::net::lookup_host((&*name.host, name.port)).await {
            Ok(addresses) => {
                let mut addresses = family.of(addresses.collect());
                if logical {
                    found.extend(
                        one_of_each_family(&addresses)
                            .map(|(address, others)| (address, others, name.clone())),
                    );
                    continue;
                }
                addresses.sort_unstable();
                addresses.dedup();
                let alone = |address| (address, Box::default(), name.clone());
                found.extend(addresses.into_iter().map(alone));
            }
            Err(error) => {
                tracing::debug!(host = %name.host, %error, "not found");
                complete = false;
                let cluster = cluster.upgrade()?;
                let before = cluster.endpoints.load();
                let accepted = before.iter().filter(|e| e.hostname.as_deref() == Some(&*name.host));
                found.extend(accepted.map(|one| (one.address, one.others.clone(), name.clone())));
            }
        }
    }
    let cluster = cluster.upgrade()?;
    store(&cluster, found);
    Some(Lookup { refresh, complete })
}

/// Returns the first address, and the first address of the other family if there is one. `None` without addresses.
fn one_of_each_family(addresses: &[SocketAddr]) -> Option<(SocketAddr, Box<[SocketAddr]>)> {
    let first = *addresses.first()?;
    let other = addresses.iter().find(|address| address.is_ipv4() != first.is_ipv4());
    Some((first, other.copied().into_iter().collect()))
}

/// Stores the endpoints. If no address has changed, the stored endpoints stay, so connections stay open.
fn store(cluster: &Cluster, found: Vec<(SocketAddr, Box<[SocketAddr]>, DnsName)>) {
    let Discovery::Dns { localities, overprovisioning, .. } = &cluster.discovery else { return };
    let tracks = cluster.endpoint_states();
    let mut endpoints = Endpoints {
        priorities: Vec::new(),
        localities: localities.clone(),
        overprovisioning: *overprovisioning,
    };
    for (address, others, name) in found {
        if endpoints.priorities.len() <= name.priority {
            endpoints.priorities.resize_with(name.priority + 1, Vec::new);
        }
        let DnsName { host, priority, weight, health, locality, .. } = name;
        let track = cluster.endpoint_state(address, &tracks);
        let plain = Endpoint::new(address, cluster.tls.clone());
        let one = Endpoint { others, weight, health, locality, hostname: Some(host), state: track, ..plain };
        endpoints.priorities[priority].push(Arc::new(one));
    }
    let before = cluster.endpoints.load();
    let addresses = |endpoint: &Arc<Endpoint>| (endpoint.address, endpoint.others.clone());
    if !before.iter().map(addresses).eq(endpoints.iter().map(addresses)) {
        cluster.endpoints.store(Arc::new(endpoints));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skysail_policy::config::cluster::{Family, Health, Locality};

    #[test]
    fn endpoints_have_the_locality_of_their_name() {
        let name = |priority| DnsName {
            host: "a".into(),
            port: 80,
            priority,
            weight: 2,
            health: Health::Healthy,
            locality: 1,
        };
        let address = |last| SocketAddr::from(([10, 0, 0, last], 80));
        let cluster = Cluster {
            discovery: Discovery::Dns {
                names: vec![name(0), name(1)],
                localities: vec![Locality::default(); 2],
                overprovisioning: 100,
                logical: false,
                family: Family::All,
                refresh: Duration::from_secs(1),
            },
            ..Cluster::new("c")
        };
        let found = || vec![(address(1), Box::default(), name(1)), (address(2), Box::default(), name(0))];
        store(&cluster, found());
        let endpoints = cluster.endpoints.load_full();
        assert_eq!((endpoints.localities.len(), endpoints.overprovisioning), (2, 100));
        let of = |priority: usize| endpoints.priorities[priority].iter().map(|one| (one.address, one.weight));
        assert_eq!(of(0).collect::<Vec<_>>(), [(address(2), 2)]);
        assert_eq!(of(1).collect::<Vec<_>>(), [(address(1), 2)]);
        // The same addresses change nothing.
        store(&cluster, found());
        assert!(Arc::ptr_eq(&endpoints, &cluster.endpoints.load_full()));
    }

    #[test]
    fn families_are_chosen_as_asked_for() {
        let (v4, v6): (SocketAddr, SocketAddr) =
            ("10.0.0.1:80".parse().unwrap(), "[::1]:80".parse().unwrap());
        let both = || vec![v4, v6];
        assert_eq!(Family::All.of(both()), [v4, v6]);
        assert_eq!(Family::V4.of(both()), [v4]);
        assert_eq!(Family::V6.of(both()), [v6]);
        assert_eq!(Family::V4.of(vec![v6]), []);
        assert_eq!(Family::V6Preferred.of(both()), [v6]);
        assert_eq!(Family::V6Preferred.of(vec![v4]), [v4]);
        assert_eq!(Family::V4Preferred.of(both()), [v4]);
        assert_eq!(Family::V4Preferred.of(vec![v6]), [v6]);
        assert_eq!(one_of_each_family(&[v6, v6, v4]), Some((v6, [v4].into())));
        assert_eq!(one_of_each_family(&[v4]), Some((v4, [].into())));
        assert_eq!(one_of_each_family(&[]), None);
    }
}
