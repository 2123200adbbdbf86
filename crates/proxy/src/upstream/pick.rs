//! The pick phase of requests and connections: from a cluster name to an endpoint.

use std::{cell::RefCell, net::SocketAddr, rc::Rc};

use crate::upstream::pool::{Host, Pool};
use skysail_policy::{
    balance::{self, PickOptions},
    config::{
        Endpoint,
        cluster::{Balancer, Discovery},
    },
    error::{Error, Kind},
};

/// Picks an endpoint of a cluster. `destination` is the original destination, for clusters that use it.
pub(crate) fn endpoint(
    rng: &RefCell<fastrand::Rng>,
    pool: &Rc<Pool>,
    destination: SocketAddr,
    want: PickOptions<'_>,
) -> Result<Rc<Host>, Error> {
    let cluster = &pool.cluster;
    if let Discovery::OriginalDst(port) = cluster.discovery {
        let address = SocketAddr::new(destination.ip(), port.unwrap_or(destination.port()));
        if destination.port() == 0 {
            // The client has connected to a Unix domain socket.
            return Err(Error::new(Kind::NoHealthyUpstream));
        }
        return Ok(pool.host(&pool.original(address)));
    }
    let endpoints = cluster.endpoints.load();
    let mut state = pool.pick.borrow_mut();
    let load = |endpoint: &Endpoint| match cluster.balancer {
        Balancer::PeakEwma { decay, unknown } => pool.expected_latency(endpoint, decay, unknown),
        _ => pool.active_requests(endpoint).into(),
    };
    let rng = &mut rng.borrow_mut();
    let picked = balance::pick(cluster, &endpoints, &mut state, load, want, rng);
    if state.has_panicked() {
        pool.stats.healthy_panic.inc();
    }
    match picked {
        Some(endpoint) => Ok(pool.host(endpoint)),
        None => {
            pool.stats.none_healthy.inc();
            Err(Error::new(Kind::NoHealthyUpstream))
        }
    }
}

/// Returns the endpoint of a dynamic forward proxy for a host, which may contain a port. Retries go from one address of
/// the host to the next. Returns `None` for all other clusters.
pub(crate) async fn resolved(
    pool: &Pool,
    host: &str,
    port: u16,
    attempt: u32,
) -> Option<Result<Rc<Host>, Error>> {
    let cache = pool.resolved.as_ref()?;
    let addresses = match cache.resolve(host, port).await {
        Ok(addresses) => addresses,
        Err(error) => return Some(Err(error)),
    };
    let address = addresses.get(attempt as usize % addresses.len().max(1));
    Some(
        address.map(|address| pool.host(&pool.original(*address))).ok_or_else(|| Error::new(Kind::DnsFailed)),
    )
}
