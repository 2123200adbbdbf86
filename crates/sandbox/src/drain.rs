//! Drain of a pod's inbound connections before its programs are stopped.
//!
//! Sidecars that have acknowledged the removal of an endpoint may still have requests to it on their way. The pod's
//! sidecar closes its listener, asks clients to close their connections, and forwards what arrives on them until they
//! are closed.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use skysail_core::names::{ADMIN_PORT, INBOUND_PORT};
use tokio::time::{sleep, timeout};

use crate::http::{self, Call, Event};

/// Time limit of the drain. The sidecar closes idle connections after 1 s; requests that take longer continue while the
/// programs stop.
const LIMIT: Duration = Duration::from_secs(3);
/// Interval at which the number of connections is read.
const POLL: Duration = Duration::from_millis(50);
/// Maximum size of a page, in bytes. If the sidecar has ended, a program of the pod may listen on its port and send
/// more.
const MAX_PAGE: usize = 16 << 10;

/// Drains the inbound connections of the sidecar in this thread's network namespace. Returns after [`LIMIT`] at the
/// latest, and at once if no sidecar listens.
pub(crate) async fn inbound() {
    // A connection in its handshake has no request yet, but will have one.
    let connections = format!("/stats?filter={INBOUND_PORT}.downstream_.*cx_active");
    let drained = async {
        page("POST", "/drain_listeners?inboundonly").await?;
        while active(&page("GET", &connections).await?) {
            sleep(POLL).await;
        }
        Ok::<_, io::Error>(())
    };
    // Neither a sidecar that does not answer nor a long request may delay the end of the pod.
    let _ = timeout(LIMIT, drained).await;
}

/// Requests a page of the sidecar's admin server.
async fn page(method: &str, path: &str) -> io::Result<String> {
    let admin = SocketAddr::from((Ipv4Addr::LOCALHOST, ADMIN_PORT));
    let call = Call { method: method.to_owned(), url: format!("http://{admin}{path}"), ..Call::default() };
    let mut page = Vec::new();
    let take = |event: Event<'_>| match event {
        Event::Body(piece) if page.len() + piece.len() > MAX_PAGE => {
            Err(io::Error::other("the page is too large"))
        }
        Event::Body(piece) => {
            page.extend_from_slice(piece);
            Ok(())
        }
        _ => Ok(()),
    };
    http::exchange(&call, LIMIT, take).await?;
    Ok(String::from_utf8_lossy(&page).into_owned())
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
        let in_handshake = "listener.0.0.0.0_15006.downstream_cx_active: 0\n\
                            listener.0.0.0.0_15006.downstream_pre_cx_active: 1\n";
        assert!(active(in_handshake));
        assert!(!active(""));
    }
}
