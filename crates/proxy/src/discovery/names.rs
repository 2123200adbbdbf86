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
use crate::config::{Cluster, Endpoint, Endpoints, cluster::Discovery};

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
        Discovery::Dns { names, logical, refresh } => (names.clone(), *logical, *refresh),
        _ => return None,
    };
    let mut found = Vec::new();
    for (host, port, weight) in names {
        match tokio::net::lookup_host((&*host, port)).await {
            Ok(addresses) => {
                let mut addresses: Vec<SocketAddr> = addresses.collect();
                if logical {
                    addresses.truncate(1);
                }
                addresses.sort_unstable();
                addresses.dedup();
                found.extend(addresses.into_iter().map(|address| (address, weight, host.clone())));
            }
            Err(error) => {
                tracing::debug!(%host, %error, "not found");
                let cluster = cluster.upgrade()?;
                let before = cluster.endpoints.load();
                let kept = before.iter().filter(|e| e.hostname.as_deref() == Some(&*host));
                found.extend(kept.map(|endpoint| (endpoint.address, weight, host.clone())));
            }
        }
    }
    let cluster = cluster.upgrade()?;
    store(&cluster, found);
    Some(refresh)
}

/// Stores the addresses, and leaves all as it is where nothing changed, so that connections stay.
fn store(cluster: &Cluster, found: Vec<(SocketAddr, u32, Box<str>)>) {
    let before = cluster.endpoints.load();
    let same = before.iter().map(|endpoint| (endpoint.address, endpoint.weight));
    if same.eq(found.iter().map(|(address, weight, _)| (*address, *weight))) {
        return;
    }
    let tracks = cluster.tracks();
    let endpoint = |(address, weight, host): (SocketAddr, u32, Box<str>)| {
        let plain = Endpoint::new(address, cluster.tls.clone());
        let track = cluster.track(address, &tracks);
        Arc::new(Endpoint { weight, hostname: Some(host), track, ..plain })
    };
    let all = found.into_iter().map(endpoint).collect();
    cluster.endpoints.store(Arc::new(Endpoints::of(all)));
}
