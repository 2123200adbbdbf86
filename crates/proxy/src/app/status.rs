//! Port 15020: the pages that Istio's agent serves beside its Envoy, in plain text and open to the network.

use std::net::SocketAddr;

use anyhow::Context as _;
use axum::Router;
use tokio::net::TcpListener;

use super::{merged_metrics, probes};

/// Serves merged metrics, probes and further pages. `metrics` is the port of the proxy's own metrics, `mark` the
/// `SO_MARK` of sockets.
///
/// # Errors
/// The address cannot be bound, or the probes are not valid.
pub(super) async fn serve(
    address: SocketAddr,
    metrics: u16,
    mark: Option<u32>,
    further: Router,
) -> anyhow::Result<()> {
    let router = further.merge(merged_metrics::router(metrics, mark)).merge(probes::router(mark)?);
    let listener = TcpListener::bind(address).await;
    let listener = listener.with_context(|| format!("cannot listen on {address} for the merged metrics"))?;
    tracing::info!(address = %listener.local_addr()?, "merged metrics and probes");
    tokio::spawn(skysail_admin::serve(listener, router));
    Ok(())
}
