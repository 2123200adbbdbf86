//! Traffic between workloads: Istio's standard metrics of all sidecars, merged into edges.
//!
//! The caller's sidecar reports requests and latencies. Only the receiver's sidecar knows whether the connection used
//! mutual TLS. If the caller has no sidecar, the receiver's report is used alone. Counters are added from poll to poll,
//! so the counts of a sidecar survive its restart.
//!
//! A public Envoy as the sidecar has none of Istio's metrics and does not send its workload's name. Receivers report
//! its identity, which determines the workload if only one workload with an Envoy has it. Envoy's own connection
//! counters tell whether the workload is reached over mutual TLS.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    time::{Duration, Instant},
};

use serde::Serialize;
use skysail_core::SpiffeId;

/// Source and destination workload, each `NAMESPACE/NAME`.
pub(crate) type Route = (String, String);

/// Counters of an edge.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    /// Requests that did not fail.
    good: f64,
    /// Requests denied (403). They are no failures, because a policy denies them on purpose.
    denied: f64,
    /// Requests that failed (5xx, or no response).
    failed: f64,
    /// Requests received over mutual TLS, and in plain text.
    mutual: f64,
    plain: f64,
    /// Requests by upper bound of their latency in milliseconds; cumulative over the bounds.
    buckets: BTreeMap<Bound, f64>,
}

/// Bound of a histogram's bucket, ordered as a number.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bound(f64);

/// An edge of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Edge {
    /// Source workload.
    pub(crate) source: String,
    /// Destination workload.
    pub(crate) destination: String,
    /// Number of requests.
    pub(crate) requests: u64,
    pub(crate) requests_per_second: f64,
    /// Percentage of requests that did not fail.
    pub(crate) success_percent: f64,
    pub(crate) failed: u64,
    /// Number of requests denied (403).
    pub(crate) denied: u64,
    pub(crate) p50_ms: Option<f64>,
    pub(crate) p99_ms: Option<f64>,
    /// True if all were received over mutual TLS; `None` if no receiver reported it.
    pub(crate) mtls: Option<bool>,
}

/// Metrics page of one sidecar.
#[derive(Debug)]
pub(crate) struct MetricsPage {
    /// `NAMESPACE/NAME`, like the workload and its service account.
    pub(crate) pod: String,
    pub(crate) workload: String,
    pub(crate) account: String,
    /// True if the sidecar is a public Envoy.
    pub(crate) envoy: bool,
    pub(crate) text: String,
}

/// Counters of all sidecars over time.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    last: HashMap<String, f64>,
    envoys: Envoys,
    /// HTTP connections received, and those of them over TLS, by workload with an Envoy. TLS is mutual here, because
    /// the configuration requires a client certificate.
    received: BTreeMap<String, (f64, f64)>,
    total: BTreeMap<Route, Reports>,
    window: VecDeque<(Instant, BTreeMap<Route, Reports>)>,
}

/// Reports of an edge by its two sidecars.
#[derive(Clone, Debug, Default)]
struct Reports {
    source: Counts,
    destination: Counts,
}

/// Period that the live table covers.
const WINDOW: Duration = Duration::from_secs(10);

const REQUESTS: &str = "istio_requests_total";
const TIMES: &str = "istio_request_duration_milliseconds_bucket";
/// Suffixes of Envoy's connection counters. The rest of the filter's name may precede them, because Envoy cuts the name
/// at the first dot.
const CONNECTIONS: &str = "_downstream_cx_total";
const TLS_CONNECTIONS: &str = "_downstream_cx_ssl_total";

impl Eq for Bound {}

impl PartialOrd for Bound {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Bound {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Traffic {
    /// Adds the current metrics of the sidecars.
    pub(crate) fn update(&mut self, now: Instant, pages: &[MetricsPage]) {
        let mut step: BTreeMap<Route, Reports> = BTreeMap::new();
        let mut received: BTreeMap<String, (f64, f64)> = BTreeMap::new();
        for page in pages.iter().filter(|page| page.envoy) {
            self.envoys.entry(page.account.clone()).or_default().insert(page.workload.clone());
            let received = received.entry(page.workload.clone()).or_default();
            for sample in page.text.lines().filter_map(Sample::parse).filter(Sample::is_inbound) {
                if sample.name.ends_with(CONNECTIONS) {
                    received.0 += sample.value;
                } else if sample.name.ends_with(TLS_CONNECTIONS) {
                    received.1 += sample.value;
                }
            }
        }
        self.received.extend(received);
        for MetricsPage { pod, text, .. } in pages {
            for line in text.lines().filter(|line| line.starts_with(REQUESTS) || line.starts_with(TIMES)) {
                self.count(pod, line, &mut step);
            }
        }
        for (route, reports) in &step {
            self.total.entry(route.clone()).or_default().add(reports);
        }
        self.window.push_back((now, step));
        while self.window.len() > 2 && self.window.front().is_some_and(|(then, _)| now - *then > WINDOW) {
            self.window.pop_front();
        }
    }

    fn count(&mut self, pod: &str, line: &str, step: &mut BTreeMap<Route, Reports>) {
        let Some(sample) = Sample::parse(line) else { return };
        let before = self.last.insert(format!("{pod} {}", sample.series), sample.value).unwrap_or(0.0);
        // A lower value means that the sidecar was restarted.
        let more = if sample.value < before { sample.value } else { sample.value - before };
        if more <= 0.0 {
            return;
        }
        let label = |name: &str| sample.labels.get(name).copied().unwrap_or("unknown");
        let workload_of = |side: &str| match label(&format!("{side}_workload")) {
            // The request reached no workload, or one whose sidecar sends no metadata.
            "unknown" | "" if side == "destination" => {
                format!("{}/{}", label("destination_service_namespace"), label("destination_service_name"))
            }
            "unknown" | "" => caller(label("source_principal"), &self.envoys),
            name => format!("{}/{name}", label(&format!("{side}_workload_namespace"))),
        };
        if label("response_code") == "0" && label("response_flags") == "DC" {
            // The client closed the connection, which is no failure.
            return;
        }
        let reports = step.entry((workload_of("source"), workload_of("destination"))).or_default();
        let counts =
            if label("reporter") == "source" { &mut reports.source } else { &mut reports.destination };
        if sample.name == TIMES {
            let bound = label("le").parse().unwrap_or(f64::INFINITY);
            *counts.buckets.entry(Bound(bound)).or_default() += more;
            return;
        }
        match label("response_code").parse::<u16>() {
            Ok(403) => counts.denied += more,
            Ok(1..=499) => counts.good += more,
            _ => counts.failed += more,
        }
        match label("connection_security_policy") {
            "mutual_tls" => counts.mutual += more,
            "none" => counts.plain += more,
            _ => {}
        }
    }

    /// Clears the edges. Counters continue from their last values.
    pub(crate) fn reset(&mut self) {
        self.total.clear();
        self.window.clear();
    }

    /// Returns the edges of the last seconds, and idle edges that had traffic before.
    pub(crate) fn live(&self) -> Vec<Edge> {
        let mut recent: BTreeMap<Route, Reports> =
            self.total.keys().map(|r| (r.clone(), Reports::default())).collect();
        // The counters of the first poll started before the window.
        for (_, step) in self.window.iter().skip(1) {
            for (route, reports) in step {
                recent.entry(route.clone()).or_default().add(reports);
            }
        }
        let span = match (self.window.front(), self.window.back()) {
            (Some((first, _)), Some((last, _))) => *last - *first,
            _ => Duration::ZERO,
        };
        self.edges(&recent, span)
    }

    /// Returns all edges since the last reset, over this time.
    pub(crate) fn total(&self, span: Duration) -> Vec<Edge> {
        self.edges(&self.total, span)
    }

    fn edges(&self, reports: &BTreeMap<Route, Reports>, span: Duration) -> Vec<Edge> {
        let edge = |(route, reports): (&Route, &Reports)| {
            let mut edge = reports.edge(route, span);
            edge.mtls = edge.mtls.or_else(|| match self.received.get(&edge.destination)? {
                (all, _) if *all == 0.0 => None,
                (all, tls) if all == tls => Some(true),
                (_, tls) if *tls == 0.0 => Some(false),
                // The counters do not tell which callers use TLS.
                _ => None,
            });
            edge
        };
        reports.iter().map(edge).collect()
    }
}

/// Workloads with an Envoy, by service account.
type Envoys = BTreeMap<String, BTreeSet<String>>;

/// Returns the name of a caller whose sidecar does not send its workload. It is the only workload with an Envoy that
/// has this identity, or else the identity, or `outside`.
fn caller(principal: &str, envoys: &Envoys) -> String {
    let Ok(id) = principal.parse::<SpiffeId>() else { return "outside".to_owned() };
    match envoys
        .get(&format!("{}/{}", id.namespace, id.service_account))
        .map(|found| (found.len(), found.first()))
    {
        Some((1, Some(workload))) => workload.clone(),
        _ => format!("{}/sa:{}", id.namespace, id.service_account),
    }
}

impl Reports {
    fn add(&mut self, more: &Self) {
        self.source.add(&more.source);
        self.destination.add(&more.destination);
    }

    fn edge(&self, (source, destination): &Route, span: Duration) -> Edge {
        let counts = if self.source.requests() > 0.0 { &self.source } else { &self.destination };
        let requests = counts.requests();
        let security = &self.destination;
        Edge {
            source: source.clone(),
            destination: destination.clone(),
            requests: requests as u64,
            requests_per_second: if span.is_zero() { 0.0 } else { round(requests / span.as_secs_f64()) },
            success_percent: if requests > 0.0 {
                round((requests - counts.failed) / requests * 100.0)
            } else {
                100.0
            },
            failed: counts.failed as u64,
            denied: counts.denied as u64,
            p50_ms: counts.percentile(0.5).map(round),
            p99_ms: counts.percentile(0.99).map(round),
            mtls: (security.mutual + security.plain > 0.0).then_some(security.plain == 0.0),
        }
    }
}

fn round(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}

impl Counts {
    fn requests(&self) -> f64 {
        self.good + self.denied + self.failed
    }

    fn add(&mut self, more: &Self) {
        self.good += more.good;
        self.denied += more.denied;
        self.failed += more.failed;
        self.mutual += more.mutual;
        self.plain += more.plain;
        for (bound, count) in &more.buckets {
            *self.buckets.entry(*bound).or_default() += count;
        }
    }

    /// Returns a quantile of the latency, interpolated within its bucket as Prometheus does.
    fn percentile(&self, share: f64) -> Option<f64> {
        let all = *self.buckets.last_key_value()?.1;
        let wanted = all * share;
        let (mut lower, mut below) = (0.0, 0.0);
        for (Bound(upper), count) in &self.buckets {
            if *count >= wanted && *count > below {
                // The last bucket has no upper bound.
                let upper = if upper.is_finite() { *upper } else { lower };
                return Some(lower + (upper - lower) * (wanted - below) / (count - below));
            }
            (lower, below) = (*upper, *count);
        }
        None
    }
}

/// A line of Prometheus' text format.
struct Sample<'a> {
    name: &'a str,
    /// Name and labels.
    series: &'a str,
    labels: HashMap<&'a str, &'a str>,
    value: f64,
}

impl<'a> Sample<'a> {
    /// Returns whether it counts inbound connections, by the control plane's name of the filter.
    fn is_inbound(&self) -> bool {
        let prefix = self.labels.get("envoy_http_conn_manager_prefix");
        prefix.is_some_and(|prefix| prefix.to_ascii_lowercase().starts_with("inbound"))
    }

    fn parse(line: &'a str) -> Option<Self> {
        let end = line.rfind('}')?;
        let (series, value) = line.split_at(end + 1);
        let (name, labels) = series[..end].split_once('{')?;
        let value = value.split_whitespace().next()?.parse().ok()?;
        Some(Self { name, series, labels: split_labels(labels), value })
    }
}

/// Parses `a="b",c="d"`. A value may contain commas; the labels that are read here contain no escaped quotes.
fn split_labels(mut text: &str) -> HashMap<&str, &str> {
    let mut labels = HashMap::new();
    while let Some((name, rest)) = text.split_once("=\"") {
        let mut from = 0;
        let end = loop {
            let Some(at) = rest[from..].find('"').map(|at| at + from) else { return labels };
            if !rest[..at].ends_with('\\') {
                break at;
            }
            from = at + 1;
        };
        labels.insert(name, &rest[..end]);
        text = rest[end + 1..].trim_start_matches(',');
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(reporter: &str, code: u16, security: &str, count: u32) -> String {
        format!(
            "istio_requests_total{{reporter=\"{reporter}\",source_workload=\"a\",source_workload_namespace=\"n\",\
             destination_workload=\"b\",destination_workload_namespace=\"n\",response_code=\"{code}\",\
             connection_security_policy=\"{security}\"}} {count}\n"
        )
    }

    fn time(le: &str, count: u32) -> String {
        format!(
            "istio_request_duration_milliseconds_bucket{{reporter=\"source\",source_workload=\"a\",\
             source_workload_namespace=\"n\",destination_workload=\"b\",destination_workload_namespace=\"n\",\
             le=\"{le}\"}} {count}\n"
        )
    }

    fn page(name: &str, envoy: bool, text: &str) -> MetricsPage {
        MetricsPage {
            pod: format!("n/{name}-1"),
            workload: format!("n/{name}"),
            account: "n/all".to_owned(),
            envoy,
            text: text.to_owned(),
        }
    }

    #[test]
    fn an_envoy_is_identified_by_its_principal_and_counts_tls_connections() {
        let unnamed = "istio_requests_total{reporter=\"destination\",source_workload=\"unknown\",\
                       source_principal=\"spiffe://cluster.local/ns/n/sa/all\",destination_workload=\"a\",\
                       destination_workload_namespace=\"n\",response_code=\"200\",\
                       connection_security_policy=\"mutual_tls\"} 5\n";
        let ours = request("source", 200, "unknown", 7) + unnamed;
        let received = |all: u32, tls: u32| {
            format!(
                "# TYPE envoy_http_0_0_0_8080__downstream_cx_total counter\n\
                 envoy_http_0_0_0_8080__downstream_cx_total{{envoy_http_conn_manager_prefix=\"inbound_0\"}} {all}\n\
                 envoy_http_0_0_0_8080__downstream_cx_ssl_total{{envoy_http_conn_manager_prefix=\"inbound_0\"}} {tls}\n\
                 envoy_http_0_0_0_8080__downstream_cx_total{{envoy_http_conn_manager_prefix=\"outbound_0\"}} 8\n\
                 envoy_http_downstream_cx_total{{envoy_http_conn_manager_prefix=\"metrics\"}} 90\n"
            )
        };
        let edges = |envoys: &[MetricsPage]| {
            let mut traffic = Traffic::default();
            let mut pages = vec![page("a", false, &ours)];
            pages.extend(envoys.iter().map(|envoy| page(&envoy.workload[2..], true, &envoy.text)));
            traffic.update(Instant::now(), &pages);
            let edges = traffic.total(Duration::from_secs(1)).into_iter();
            edges.map(|edge| (edge.source, edge.destination, edge.mtls)).collect::<Vec<_>>()
        };
        let named = |source: &str, destination: &str, mtls| (source.to_owned(), destination.to_owned(), mtls);
        for (counts, mtls) in [((3, 3), Some(true)), ((3, 0), Some(false)), ((3, 1), None), ((0, 0), None)] {
            let found = edges(&[page("b", true, &received(counts.0, counts.1))]);
            assert_eq!(found, [named("n/a", "n/b", mtls), named("n/b", "n/a", Some(true))]);
        }
        // Two Envoys with one identity cannot be distinguished.
        let found = edges(&[page("b", true, &received(1, 1)), page("c", true, "")]);
        assert_eq!(found, [named("n/a", "n/b", Some(true)), named("n/sa:all", "n/a", Some(true))]);
    }

    #[test]
    fn both_reports_make_one_edge_and_restarts_lose_no_requests() {
        let mut traffic = Traffic::default();
        let start = Instant::now();
        let source = [request("source", 200, "unknown", 90), request("source", 503, "unknown", 10)].concat();
        let times = [time("1", 50), time("10", 100), time("+Inf", 100)].concat();
        let destination = request("destination", 200, "mutual_tls", 90);
        let pods = |source: &str| vec![page("a", false, source), page("b", false, &destination)];
        traffic.update(start, &pods(&(source + &times)));
        traffic.update(start + Duration::from_secs(1), &pods(&request("source", 403, "unknown", 5)));
        // The sidecar was restarted: 2 is less than 5, so all 2 are new.
        traffic.update(start + Duration::from_secs(2), &pods(&request("source", 403, "unknown", 2)));
        let edges = traffic.total(Duration::from_secs(2));
        let [edge] = edges.as_slice() else { panic!("one edge: {edges:?}") };
        assert_eq!((edge.requests, edge.failed, edge.denied, edge.mtls), (107, 10, 7, Some(true)));
        assert_eq!((edge.source.as_str(), edge.destination.as_str()), ("n/a", "n/b"));
        assert_eq!((edge.p50_ms, edge.p99_ms), (Some(1.0), Some(9.82)));
        assert_eq!(traffic.live()[0].requests_per_second, 3.5);
    }

    #[test]
    fn labels_may_contain_commas_and_quotes() {
        let labels = split_labels(r#"a="x,y",b="q\"r",c="""#);
        assert_eq!((labels["a"], labels["b"], labels["c"]), ("x,y", r#"q\"r"#, ""));
    }
}
