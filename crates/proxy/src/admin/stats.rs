//! `/stats` and `/stats/prometheus`: the workers' statistics, and the process's own under Envoy's names.

use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::{Arc, PoisonError, Weak},
    time::{Duration, Instant},
};

use axum::{
    Json,
    body::Body,
    extract::{Query, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use skysail_xds::Kind as Resources;
use tokio::sync::Mutex;

use super::{Admin, Options, server};
use crate::telemetry::{
    Metrics, Page,
    plain::{Kind, StatsFilter},
};

/// Maximum size of a compiled filter, in bytes.
const MAX_FILTER: usize = 1 << 18;

/// Maximum number of metric snapshots that are being written to clients at the same time. Beyond it, the
/// clients that read the oldest are disconnected: they are at least `(SNAPSHOTS - 1) * FRESH` behind.
const SNAPSHOTS: usize = 4;
/// Maximum age of a snapshot that another client may share.
const FRESH: Duration = Duration::from_secs(1);

/// Snapshots that are being written. Concurrent clients share one, so that memory does not grow with the number
/// of clients.
#[derive(Default)]
pub(super) struct Snapshots(Mutex<VecDeque<Weak<Snapshot>>>);

/// All metrics at one moment.
struct Snapshot {
    taken: Instant,
    /// `None` after the snapshot was taken away from slow clients.
    metrics: std::sync::Mutex<Option<Arc<Metrics>>>,
}

impl Snapshot {
    fn metrics(&self) -> io::Result<Arc<Metrics>> {
        let metrics = self.metrics.lock().unwrap_or_else(PoisonError::into_inner).clone();
        metrics.ok_or_else(|| {
            io::Error::other("the client read too slowly and other clients requested newer metrics")
        })
    }
}

impl Snapshots {
    /// Makes the next client take a new snapshot.
    pub(super) async fn expire(&self) {
        self.0.lock().await.clear();
    }

    /// Returns a snapshot younger than `fresh` that is still being written to another client, or takes a new
    /// one.
    async fn current(&self, fresh: Duration, take: impl Future<Output = Metrics>) -> Arc<Snapshot> {
        let mut kept = self.0.lock().await;
        kept.retain(|snapshot| snapshot.strong_count() > 0);
        let last = kept.back().and_then(Weak::upgrade);
        if let Some(last) = last.filter(|last| last.taken.elapsed() < fresh) {
            return last;
        }
        if kept.len() >= SNAPSHOTS
            && let Some(oldest) = kept.pop_front().as_ref().and_then(Weak::upgrade)
        {
            oldest.metrics.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
        let metrics = std::sync::Mutex::new(Some(Arc::new(take.await)));
        let snapshot = Arc::new(Snapshot { taken: Instant::now(), metrics });
        kept.push_back(Arc::downgrade(&snapshot));
        snapshot
    }
}

/// Returns `/stats` in the requested format.
pub(super) async fn page(State(admin): State<Arc<Admin>>, Query(options): Options) -> Response {
    let format = options.get("format").map_or("text", String::as_str);
    match (format, wanted(&options)) {
        (_, Err(reason)) => (StatusCode::BAD_REQUEST, reason).into_response(),
        // Only callers of the same network namespace get these pages, so they are rendered at once.
        ("text", Ok(wanted)) => metrics(&admin).await.text(&wanted).into_response(),
        ("json", Ok(wanted)) => Json(metrics(&admin).await.json(&wanted)).into_response(),
        ("prometheus", Ok(wanted)) => exposition(&admin, wanted).await,
        _ => {
            let usage = "usage: /stats?format=(text|json|prometheus)\n".to_owned();
            (StatusCode::BAD_REQUEST, usage).into_response()
        }
    }
}

/// Returns `/stats/prometheus`.
pub(super) async fn prometheus(State(admin): State<Arc<Admin>>, Query(options): Options) -> Response {
    match wanted(&options) {
        Ok(wanted) => exposition(&admin, wanted).await,
        Err(reason) => (StatusCode::BAD_REQUEST, reason).into_response(),
    }
}

/// Returns Prometheus text. The page is open to the network and peers influence its length, so it is rendered
/// while the client reads it.
async fn exposition(admin: &Admin, wanted: StatsFilter) -> Response {
    let snapshot = admin.snapshots.current(FRESH, metrics(admin)).await;
    let body = pieces(snapshot, wanted);
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], body).into_response()
}

/// Returns the page in pieces. A page of one piece has a `content-length`.
fn pieces(snapshot: Arc<Snapshot>, wanted: StatsFilter) -> Body {
    let mut page = Page::new(wanted);
    let mut rest = std::iter::from_fn(move || {
        let piece = snapshot.metrics().map(|metrics| page.next(&metrics));
        piece.transpose()
    });
    match (rest.next(), rest.next()) {
        (None, _) => Body::empty(),
        (Some(Ok(only)), None) => Body::from(only),
        (first, second) => Body::from_stream(tokio_stream::iter(first.into_iter().chain(second).chain(rest))),
    }
}

/// Parses the parameters. Envoy's parameters for formats that are not served are ignored.
fn wanted(options: &HashMap<String, String>) -> Result<StatsFilter, String> {
    let filter = options.get("filter").filter(|filter| !filter.is_empty());
    // Metrics are open to the network, so the filter's size is limited.
    let compiled = |filter: &String| regex::RegexBuilder::new(filter).size_limit(MAX_FILTER).build();
    let filter = filter.map(compiled).transpose();
    let kind = match options.get("type").map(|kind| kind.to_ascii_lowercase()).as_deref() {
        None | Some("all") => None,
        Some("counters") => Some(Kind::Counters),
        Some("gauges") => Some(Kind::Gauges),
        Some("histograms") => Some(Kind::Histograms),
        Some("textreadouts") => Some(Kind::TextReadouts),
        Some(other) => {
            return Err(format!(
                "type: {other:?} is none of All, Counters, Gauges, Histograms, TextReadouts\n"
            ));
        }
    };
    if let Some(buckets) = options.get("histogram_buckets").filter(|buckets| *buckets != "none") {
        return Err(format!("histogram_buckets: {buckets:?} is not supported, only none\n"));
    }
    Ok(StatsFilter {
        filter: filter.map_err(|error| format!("Invalid re2 regex: {error}\n"))?,
        used_only: options.contains_key("usedonly"),
        kind,
    })
}

/// Collects all metrics.
async fn metrics(admin: &Admin) -> Metrics {
    let shards = admin.workers.scrape().await;
    let mut metrics = Metrics::new(shards, &admin.shared.local, Some(&admin.shared.access_log));
    add_server(admin, &mut metrics);
    add_discovery(admin, &mut metrics).await;
    for (name, value) in admin.shared.pressure.stats() {
        metrics.add_gauge(name, value);
    }
    metrics
}

/// Adds `server.`: statistics of this process.
fn add_server(admin: &Admin, metrics: &mut Metrics) {
    let state = admin.state();
    let memory = server::Memory::now();
    let connections = metrics.sum("envoy_listener_downstream_cx_active");
    for (name, value) in [
        ("server.state", state.number()),
        ("server.live", u64::from(state == server::ServerState::Live)),
        ("server.uptime", admin.since.elapsed().as_secs()),
        ("server.concurrency", admin.workers.count() as u64),
        ("server.hot_restart_epoch", 0),
        ("server.parent_connections", 0),
        ("server.total_connections", connections),
        ("server.memory_allocated", memory.allocated),
        ("server.memory_heap_size", memory.heap),
        ("server.memory_physical_size", memory.physical),
        ("server.days_until_first_cert_expiring", days_left(admin)),
    ] {
        metrics.add_gauge(name, value);
    }
}

/// Returns the number of days until the first certificate expires; without a certificate the maximum, as Envoy
/// does.
fn days_left(admin: &Admin) -> u64 {
    let tls = admin.configuration.tls();
    let named = tls.identities().into_iter().filter_map(|(_, identity)| identity);
    let ends = named.chain(tls.unnamed_identities()).map(|identity| {
        identity.not_after.duration_since(std::time::SystemTime::now()).unwrap_or(Duration::ZERO).as_secs()
            / 86_400
    });
    ends.min().unwrap_or(u32::MAX.into())
}

/// Adds `cluster_manager.`, `listener_manager.` and `control_plane.`: discovery updates and resources in effect.
async fn add_discovery(admin: &Admin, metrics: &mut Metrics) {
    let configuration = &admin.configuration;
    for (scope, kind) in
        [("cluster_manager.cds", Resources::Cluster), ("listener_manager.lds", Resources::Listener)]
    {
        let updates = configuration.updates(kind);
        metrics.add_counter(format!("{scope}.update_attempt"), updates.success + updates.rejected);
        metrics.add_counter(format!("{scope}.update_success"), updates.success);
        metrics.add_counter(format!("{scope}.update_rejected"), updates.rejected);
        metrics.add_counter(format!("{scope}.update_failure"), 0);
        metrics.add_gauge(format!("{scope}.update_time"), updates.at_ms);
    }
    metrics.add_gauge("control_plane.connected_state", configuration.is_connected().into());
    let inventory = configuration.inventory().await;
    let clusters = inventory.clusters.values();
    let [active, warming] = counts(clusters.map(|slot| (slot.active.is_some(), slot.warming.is_some())));
    metrics.add_gauge("cluster_manager.active_clusters", active);
    metrics.add_gauge("cluster_manager.warming_clusters", warming);
    let listeners = inventory.listeners.values();
    let [active, warming] = counts(listeners.map(|slot| (slot.active.is_some(), slot.warming.is_some())));
    metrics.add_gauge("listener_manager.total_listeners_active", active);
    metrics.add_gauge("listener_manager.total_listeners_warming", warming);
    metrics.add_gauge("listener_manager.total_listeners_draining", 0);
    // Envoy starts its workers with the first configuration. Workers here start earlier, but serve nothing
    // before it.
    metrics.add_gauge("listener_manager.workers_started", configuration.is_ready().into());
}

fn counts(slots: impl Iterator<Item = (bool, bool)>) -> [u64; 2] {
    slots.fold([0, 0], |[active, warming], (is_active, is_warming)| {
        [active + u64::from(is_active), warming + u64::from(is_warming)]
    })
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;

    use super::*;
    use crate::telemetry::ShardSnapshot;
    use skysail_policy::peer::LocalWorkload;

    async fn take() -> Metrics {
        let mut metrics = Metrics::new(vec![ShardSnapshot::default()], &LocalWorkload::default(), None);
        (0..20_000).for_each(|n| metrics.add_gauge(format!("a_gauge_whose_name_has_a_number.{n}"), n));
        metrics
    }

    #[tokio::test]
    async fn clients_share_few_snapshots() {
        let snapshots = Snapshots::default();
        let hour = Duration::from_hours(1);
        let first = snapshots.current(hour, take()).await;
        let second = snapshots.current(hour, async { unreachable!("there is one") }).await;
        assert!(Arc::ptr_eq(&first, &second));
        // No client uses it any more.
        drop((first, second));
        let mut held = vec![snapshots.current(hour, take()).await];
        for _ in 1..3 * SNAPSHOTS {
            held.push(snapshots.current(Duration::ZERO, take()).await);
        }
        let readable = |snapshot: &Arc<Snapshot>| snapshot.metrics().is_ok();
        let (old, new) = held.split_at(2 * SNAPSHOTS);
        assert!(!old.iter().any(readable) && new.iter().all(readable));
    }

    #[tokio::test]
    async fn a_page_is_written_as_it_is_read() {
        let snapshots = Snapshots::default();
        let whole = |snapshot: &Arc<Snapshot>| {
            let (metrics, mut page) = (snapshot.metrics().unwrap(), Page::new(StatsFilter::default()));
            std::iter::from_fn(|| page.next(&metrics)).collect::<String>()
        };
        let snapshot = snapshots.current(FRESH, take()).await;
        let expected = whole(&snapshot);
        let mut body = pieces(snapshot, StatsFilter::default()).into_data_stream();
        let mut text = Vec::new();
        while let Some(piece) = body.next().await {
            let piece = piece.unwrap();
            assert!(piece.len() < 64 << 10 && piece.ends_with(b"\n"), "{} bytes", piece.len());
            text.extend(piece);
        }
        assert!(text.len() > 1 << 20 && text == expected.as_bytes());
        drop(body);
        // A slow client whose snapshot is needed by others gets an error, not an apparent end of the page.
        let mut slow =
            pieces(snapshots.current(FRESH, take()).await, StatsFilter::default()).into_data_stream();
        assert!(slow.next().await.unwrap().is_ok());
        let mut others = Vec::new();
        for _ in 0..SNAPSHOTS {
            others.push(snapshots.current(Duration::ZERO, take()).await);
        }
        // The piece that was already rendered arrives.
        assert!(slow.next().await.unwrap().is_ok());
        assert!(slow.next().await.unwrap().is_err());
    }
}
