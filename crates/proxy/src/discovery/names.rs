//! Clusters whose endpoints are host names: looked up again and again, as long as the cluster is there.

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
use crate::config::{
    Cluster, Endpoint, Endpoints,
    cluster::{Discovery, DnsName},
};

/// Starts to look up the names of clusters that are new.
pub(super) fn look_up(inventory: &mut Inventory, changed: &Arc<Notify>) {
    for kept in inventory.clusters.values_mut().filter_map(|slot| slot.warming.as_mut()) {
        if matches!(kept.value.discovery, Discovery::Dns { .. })
            && !std::mem::replace(&mut kept.looked_up, true)
        {
            let (cluster, resolved) = (Arc::downgrade(&kept.value), Arc::clone(&kept.resolved));
            tokio::spawn(follow(cluster, resolved, Arc::clone(changed)));
        }
    }
}

/// Ends when the cluster is gone.
async fn follow(cluster: Weak<Cluster>, resolved: Arc<AtomicBool>, changed: Arc<Notify>) {
    while let Some(pause) = once(&cluster).await {
        if !resolved.swap(true, Ordering::AcqRel) {
            changed.notify_one();
        }
        tokio::time::sleep(pause).await;
    }
}

/// Looks all names up; those that fail keep the addresses they had. Gives the pause until the next time.
async fn once(cluster: &Weak<Cluster>) -> Option<Duration> {
    let (names, logical, refresh) = match &cluster.upgrade()?.discovery {
        Discovery::Dns { names, logical, refresh, .. } => (names.clone(), *logical, *refresh),
        _ => return None,
    };
    let mut found = Vec::new();
    for name in names {
        match tokio::net::lookup_host((&*name.host, name.port)).await {
            Ok(addresses) => {
                let mut addresses: Vec<SocketAddr> = addresses.collect();
                if logical {
                    addresses.truncate(1);
                }
                addresses.sort_unstable();
                addresses.dedup();
                found.extend(addresses.into_iter().map(|address| (address, name.clone())));
            }
            Err(error) => {
                tracing::debug!(host = %name.host, %error, "not found");
                let cluster = cluster.upgrade()?;
                let before = cluster.endpoints.load();
                let kept = before.iter().filter(|e| e.hostname.as_deref() == Some(&*name.host));
                found.extend(kept.map(|endpoint| (endpoint.address, name.clone())));
            }
        }
    }
    let cluster = cluster.upgrade()?;
    store(&cluster, found);
    Some(refresh)
}

/// Stores the addresses, and leaves all as it is where nothing changed, so that connections stay.
fn store(cluster: &Cluster, found: Vec<(SocketAddr, DnsName)>) {
    let Discovery::Dns { localities, overprovisioning, .. } = &cluster.discovery else { return };
    let tracks = cluster.tracks();
    let mut endpoints = Endpoints {
        priorities: Vec::new(),
        localities: localities.clone(),
        overprovisioning: *overprovisioning,
    };
    for (address, name) in found {
        if endpoints.priorities.len() <= name.priority {
            endpoints.priorities.resize_with(name.priority + 1, Vec::new);
        }
        let DnsName { host, priority, weight, health, locality, .. } = name;
        let track = cluster.track(address, &tracks);
        let plain = Endpoint::new(address, cluster.tls.clone());
        let one = Endpoint { weight, health, locality, hostname: Some(host), track, ..plain };
        endpoints.priorities[priority].push(Arc::new(one));
    }
    let addresses = |endpoints: &Endpoints| -> Vec<_> { endpoints.iter().map(|one| one.address).collect() };
    if addresses(&cluster.endpoints.load()) != addresses(&endpoints) {
        cluster.endpoints.store(Arc::new(endpoints));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::cluster::{Health, Locality};

    #[test]
    fn addresses_are_where_their_name_is() {
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
                refresh: Duration::from_secs(1),
            },
            ..Cluster::new("c")
        };
        store(&cluster, vec![(address(1), name(1)), (address(2), name(0))]);
        let endpoints = cluster.endpoints.load_full();
        assert_eq!((endpoints.localities.len(), endpoints.overprovisioning), (2, 100));
        let of = |priority: usize| endpoints.priorities[priority].iter().map(|one| (one.address, one.weight));
        assert_eq!(of(0).collect::<Vec<_>>(), [(address(2), 2)]);
        assert_eq!(of(1).collect::<Vec<_>>(), [(address(1), 2)]);
        // The same once more changes nothing.
        store(&cluster, vec![(address(1), name(1)), (address(2), name(0))]);
        assert!(Arc::ptr_eq(&endpoints, &cluster.endpoints.load_full()));
    }
}
