//! Propagation of the mesh's changes: read by the control plane, and acknowledged by the sidecars.
//!
//! A pod is ready only when other pods can call it, and may stop only when no pod calls it any more. Both follow from
//! the objects that the mesh writes. The control plane's admin pages show which proxies have acknowledged them.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Deserialize;
use skysail_core::fingerprint;
use tokio::time::sleep;

use crate::{http, rundir::PodState};

/// Files with the objects that the mesh writes for the control plane, in its folder.
pub(crate) const PODS: &str = "generated/pods.yaml";
pub(crate) const SERVICES: &str = "generated/services.yaml";

/// Interval of the requests to the admin page.
const INTERVAL: Duration = Duration::from_millis(50);
const TIMEOUT: Duration = Duration::from_secs(2);

/// State of the propagation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The control plane has not read the objects, or some proxies have not answered.
    UnderWay,
    /// All proxies have answered, and some have rejected a resource.
    Refused,
    /// All proxies have acknowledged.
    Taken,
}

/// State of a proxy, as the control plane's `/debug/syncz` shows it.
#[derive(Debug, Deserialize)]
struct ProxyState {
    /// Node id, `sidecar~ADDRESS~…`.
    proxy: String,
    types: BTreeMap<String, TypeState>,
}

#[derive(Debug, Deserialize)]
struct TypeState {
    sent: u64,
    nacked: u64,
    synced: bool,
}

/// Returns how far the objects in the mesh's folder have propagated. Every connected proxy must have answered, and the
/// sidecars of these pods must be connected.
pub async fn query<'a>(
    control: SocketAddr,
    folder: &Path,
    pods: impl Iterator<Item = &'a PodState>,
) -> Progress {
    let sidecars = pods.filter(|pod| pod.sidecar).map(|pod| pod.address.as_str());
    try_query(control, folder, sidecars).await.unwrap_or(Progress::UnderWay)
}

async fn try_query<'a>(
    control: SocketAddr,
    folder: &Path,
    mut sidecars: impl Iterator<Item = &'a str>,
) -> Option<Progress> {
    let taken: BTreeMap<PathBuf, u64> = page(control, "/debug/config_files").await?;
    for file in [PODS, SERVICES] {
        let file = folder.join(file);
        if *taken.get(&file)? != fingerprint(&fs::read_to_string(&file).ok()?) {
            return None;
        }
    }
    let clients: Vec<ProxyState> = page(control, "/debug/syncz").await?;
    let address = |client: &ProxyState| client.proxy.split('~').nth(1).map(str::to_owned);
    let connected: Vec<_> = clients.iter().filter_map(address).collect();
    if !sidecars.all(|sidecar| connected.iter().any(|address| address == sidecar)) {
        return None;
    }
    let mut progress = Progress::Taken;
    for kind in clients.iter().flat_map(|client| client.types.values()) {
        match kind {
            TypeState { synced: true, .. } => {}
            TypeState { sent, nacked, .. } if sent == nacked => progress = Progress::Refused,
            _ => return None,
        }
    }
    Some(progress)
}

async fn page<T: for<'a> Deserialize<'a>>(control: SocketAddr, path: &str) -> Option<T> {
    match http::get(control, path, TIMEOUT).await {
        Ok((200, body)) => serde_json::from_str(&body).ok(),
        _ => None,
    }
}

/// Waits until all proxies have answered. Three results in a row must say so, because a push may be about to start.
pub(crate) async fn wait_until_answered(control: SocketAddr, folder: &Path, pods: &[PodState]) {
    let mut results = 0;
    while results < 3 {
        sleep(INTERVAL).await;
        let progress = query(control, folder, pods.iter()).await;
        results = if progress == Progress::UnderWay { 0 } else { results + 1 };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::{Json, Router, routing::get};
    use serde_json::{Value, json};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn the_control_plane_and_all_proxies_must_be_up_to_date() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("generated")).unwrap();
        let write = |file: &str, text: &str| fs::write(folder.path().join(file), text).unwrap();
        write(PODS, "pods");
        write(SERVICES, "services");
        let taken: BTreeMap<_, _> = [(PODS, "pods"), (SERVICES, "services")]
            .map(|(file, text)| (folder.path().join(file), fingerprint(text)))
            .into();
        let clients = Arc::new(Mutex::new(Value::Null));
        let shown = Arc::clone(&clients);
        let router = Router::new()
            .route("/debug/config_files", get(async move || Json(taken)))
            .route("/debug/syncz", get(async move || Json(shown.lock().unwrap().clone())));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let control = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });

        let one = |proxy: &str, sent: u64, nacked: u64, synced: bool| {
            let types = json!({ "cds": { "sent": sent, "nacked": nacked, "synced": synced, "acked": 0 } });
            json!({ "proxy": format!("sidecar~{proxy}~p.n~n"), "types": types })
        };
        let try_query = async |answer: Value| {
            *clients.lock().unwrap() = answer;
            try_query(control, folder.path(), ["10.244.0.2", "10.244.0.3"].into_iter()).await
        };
        let (good, other) =
            (one("10.244.0.2", 1, 0, true), |sent, nacked, synced| one("10.244.0.3", sent, nacked, synced));
        assert_eq!(try_query(json!([good])).await, None);
        assert_eq!(try_query(json!([good, other(2, 0, false)])).await, None);
        assert_eq!(try_query(json!([good, other(3, 2, false)])).await, None);
        assert_eq!(try_query(json!([good, other(3, 3, false)])).await, Some(Progress::Refused));
        let all = json!([good, other(3, 0, true)]);
        assert_eq!(try_query(all.clone()).await, Some(Progress::Taken));
        write(PODS, "other pods");
        assert_eq!(try_query(all).await, None);
    }
}
