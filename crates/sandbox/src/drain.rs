//! Drain of a pod's inbound connections before its programs are stopped.
//!
//! Sidecars that have acknowledged the removal of an endpoint may still have requests to it on their way. The pod's sidecar
//! closes its listener, asks clients to close their connections, and forwards what arrives on them until they are closed.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use skysail_core::names::{ADMIN_PORT, INBOUND_PORT};
use tokio::time::{sleep, timeout};

use crate::http::{self, Call};

/// Time limit of the drain. The sidecar closes idle connections after 1 s; requests that take longer continue while the programs
/// stop.
const LIMIT: Duration = Duration::from_secs(3);
/// Interval at which the number of connections is read.
const POLL: Duration = Duration::from_millis(50);

/// Drains the inbound connections of the sidecar in this thread's network namespace. Returns at once if no sidecar answers.
pub(crate) async fn inbound() {
    let admin = SocketAddr::from((Ipv4Addr::LOCALHOST, ADMIN_PORT));
    let url = format!("http://{admin}/drain_listeners?inboundonly");
    let drain = Call { method: "POST".to_owned(), url, ..Call::default() };
    let connections = format!("/stats?filter={INBOUND_PORT}.downstream_cx_active");
    let drained = async {
        http::call(&drain, LIMIT).await?;
        while active(&http::get(admin, &connections, LIMIT).await?.1) {
            sleep(POLL).await;
        }
        Ok::<_, std::io::Error>(())
    };
    // Neither a sidecar that does not answer nor a long request may delay the end of the pod.
    let _ = timeout(LIMIT, drained).await;
}

/// Returns whether a gauge of this page, in the form `NAME: VALUE`, is above 0.
fn active(page: &str) -> bool {
    page.lines().filter_map(|line| line.rsplit_once(": ")).any(|(_, value)| value.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::active;

    #[test]
    fn a_listener_without_connections_or_without_statistics_is_drained() {
        assert!(active("listener.0.0.0.0_15006.downstream_cx_active: 1\n"));
        assert!(!active("listener.0.0.0.0_15006.downstream_cx_active: 0\n"));
        assert!(!active(""));
    }
}
