//! What a control plane serves to its proxies, from its admin pages.

use std::time::Duration;

use anyhow::{Context as _, bail};
use serde::Deserialize;
use skysail_sandbox::{
    OfflinePod,
    http::{self, Call, Event},
};

/// Timeout of a request to the control plane.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum size of a page in bytes.
const MAX_PAGE: usize = 256 << 20;

/// A control plane with its admin address.
pub(super) struct ControlPlane {
    address: String,
    /// Node ids of the connected proxies.
    pub(super) proxies: Vec<String>,
}

/// A connected proxy on the page `/debug/syncz`.
#[derive(Deserialize)]
struct ConnectedProxy {
    proxy: String,
}

impl ControlPlane {
    /// Asks a control plane which proxies are connected.
    ///
    /// # Errors
    /// When it does not answer, or refuses access.
    pub(super) fn connect(address: &str) -> anyhow::Result<Self> {
        let page = request(address, "/debug/syncz").with_context(|| format!("--control {address}"))?;
        let proxies: Vec<ConnectedProxy> = serde_json::from_slice(&page)
            .with_context(|| format!("--control {address}: /debug/syncz is no list of proxies"))?;
        let proxies = proxies.into_iter().map(|of| of.proxy).collect();
        Ok(Self { address: address.to_owned(), proxies })
    }

    /// Returns the resources that the control plane serves to the proxy of a pod, as `envoy.admin.v3.ConfigDump`.
    ///
    /// # Errors
    /// When the proxy is not connected, or the control plane does not answer.
    pub(super) fn resources_of(&self, pod: &OfflinePod) -> anyhow::Result<Vec<u8>> {
        request(&self.address, &format!("/debug/config_dump?proxyID={}.{}", pod.name, pod.namespace))
    }
}

fn request(address: &str, path: &str) -> anyhow::Result<Vec<u8>> {
    let call = Call { method: "GET".to_owned(), url: format!("http://{address}{path}"), ..Call::default() };
    let mut body = Vec::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let exchange = http::exchange(&call, TIMEOUT, |event| {
        if let Event::Body(piece) = event {
            if body.len() + piece.len() > MAX_PAGE {
                return Err(std::io::Error::other("the page is too large"));
            }
            body.extend_from_slice(piece);
        }
        Ok(())
    });
    let status = runtime.block_on(exchange).with_context(|| {
        format!("requesting {address}, which must be the admin address of a control plane")
    })?;
    if status != 200 {
        let body = String::from_utf8_lossy(&body);
        bail!("the control plane answered {path} with status {status}: {}", body.trim());
    }
    Ok(body)
}
