//! A time series of Istio's metrics: its labels, which name both peers, and its values.
//!
//! Labels have the order and the rules of Istio's own filter. They come from the peer's metadata; at the
//! source, the endpoint and the cluster complete them.

use std::{fmt::Write as _, sync::Arc, time::Duration};

use skysail_policy::{
    config::{
        cluster::{Service, Workload},
        listener::Direction,
    },
    peer::LocalWorkload,
    record::Record,
    state::demand::MAX_AUTHORITY,
};

/// Upper bounds of the histogram buckets, for milliseconds and for bytes: those of Envoy.
pub(super) const BOUNDS: [f64; 19] = [
    0.5,
    1.0,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
    500.0,
    1000.0,
    2500.0,
    5000.0,
    10_000.0,
    30_000.0,
    60_000.0,
    300_000.0,
    600_000.0,
    1_800_000.0,
    3_600_000.0,
];

/// A histogram.
#[derive(Clone, Debug, Default)]
pub(super) struct Histogram {
    /// Counts by bucket, not cumulative; the last bucket is above all bounds.
    pub(super) counts: [u64; BOUNDS.len() + 1],
    pub(super) sum: f64,
}

impl Histogram {
    fn record(&mut self, value: f64) {
        let bucket = BOUNDS.partition_point(|bound| *bound < value);
        self.counts[bucket] += 1;
        self.sum += value;
    }

    pub(super) fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
        self.sum += other.sum;
    }
}

/// Values of one set of labels, for requests.
#[derive(Clone, Debug, Default)]
pub(super) struct HttpSeries {
    pub(super) requests: u64,
    pub(super) duration: Histogram,
    pub(super) request_bytes: Histogram,
    pub(super) response_bytes: Histogram,
    pub(super) request_messages: u64,
    pub(super) response_messages: u64,
    /// The requests are gRPC, so messages are counted.
    pub(super) grpc: bool,
    /// Metrics without a series of these labels, as bits of the indices in
    /// [`skysail_policy::config::stats::HTTP`].
    pub(super) hidden: u8,
}

impl HttpSeries {
    /// Counts a request in the metrics of a bit mask (indices in [`skysail_policy::config::stats::HTTP`]).
    pub(super) fn add_some(&mut self, record: &Record<'_>, metrics: u8) {
        let has = |bit: u8| metrics & (1 << bit) != 0;
        self.requests += u64::from(has(0));
        if has(1) {
            self.duration.record(milliseconds(record.duration));
        }
        if has(2) {
            self.request_bytes.record(bytes(record.wire_received));
        }
        if has(3) {
            self.response_bytes.record(bytes(record.wire_sent));
        }
        self.grpc |= record.grpc;
        self.request_messages += if has(4) { record.request_messages } else { 0 };
        self.response_messages += if has(5) { record.response_messages } else { 0 };
    }

    /// Returns whether a metric has a series of these labels; `metric` is its index in
    /// [`skysail_policy::config::stats::HTTP`].
    pub(super) fn shows(&self, metric: u8) -> bool {
        self.hidden & (1 << metric) == 0 && (metric < 4 || self.grpc)
    }

    pub(super) fn add(&mut self, record: &Record<'_>) {
        self.requests += 1;
        self.duration.record(milliseconds(record.duration));
        self.request_bytes.record(bytes(record.wire_received));
        self.response_bytes.record(bytes(record.wire_sent));
        self.grpc |= record.grpc;
        self.request_messages += record.request_messages;
        self.response_messages += record.response_messages;
    }

    pub(super) fn merge(&mut self, other: &Self) {
        self.requests += other.requests;
        self.duration.merge(&other.duration);
        self.request_bytes.merge(&other.request_bytes);
        self.response_bytes.merge(&other.response_bytes);
        self.grpc |= other.grpc;
        self.hidden &= other.hidden;
        self.request_messages += other.request_messages;
        self.response_messages += other.response_messages;
    }
}

impl Series for HttpSeries {
    fn hidden(&mut self) -> &mut u8 {
        &mut self.hidden
    }

    fn counted(&self) -> u64 {
        let of = |histogram: &Histogram| histogram.counts.iter().sum::<u64>();
        let histograms = of(&self.duration) + of(&self.request_bytes) + of(&self.response_bytes);
        self.requests + histograms + self.request_messages + self.response_messages
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

#[expect(clippy::cast_precision_loss, reason = "a histogram of sizes needs no exact petabytes")]
fn bytes(count: u64) -> f64 {
    count as f64
}

/// Counts of connections.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpCounts {
    /// Connections opened.
    pub opened: u64,
    /// Connections closed.
    pub closed: u64,
    /// Bytes sent to clients.
    pub sent: u64,
    /// Bytes received from clients.
    pub received: u64,
}

/// Values of one set of labels, for connections.
#[derive(Clone, Debug, Default)]
pub(super) struct TcpSeries {
    pub(super) counts: TcpCounts,
    /// Metrics without a series of these labels, as bits of the indices in
    /// [`skysail_policy::config::stats::TCP`].
    pub(super) hidden: u8,
}

impl TcpSeries {
    pub(super) fn merge(&mut self, other: &Self) {
        self.add(other.counts);
        self.hidden &= other.hidden;
    }

    pub(super) fn add(&mut self, more: TcpCounts) {
        let counts = &mut self.counts;
        counts.opened += more.opened;
        counts.closed += more.closed;
        counts.sent += more.sent;
        counts.received += more.received;
    }

    /// Returns whether a metric has a series of these labels; `metric` is its index in
    /// [`skysail_policy::config::stats::TCP`].
    pub(super) fn shows(&self, metric: u8) -> bool {
        self.hidden & (1 << metric) == 0
    }
}

impl TcpCounts {
    /// Returns only the counts of the metrics of a bit mask (indices in
    /// [`skysail_policy::config::stats::TCP`]).
    pub(super) fn only(self, metrics: u8) -> Self {
        let of = |bit: u8, count| if metrics & (1 << bit) == 0 { 0 } else { count };
        Self {
            sent: of(0, self.sent),
            received: of(1, self.received),
            opened: of(2, self.opened),
            closed: of(3, self.closed),
        }
    }
}

impl Series for TcpSeries {
    fn hidden(&mut self) -> &mut u8 {
        &mut self.hidden
    }

    fn counted(&self) -> u64 {
        let TcpCounts { opened, closed, sent, received } = self.counts;
        opened + closed + sent + received
    }
}

/// Values of one set of labels.
pub(super) trait Series: Default {
    /// Metrics without a series of these labels.
    fn hidden(&mut self) -> &mut u8;
    /// Returns a number that changes with every update.
    fn counted(&self) -> u64;
}

/// The peer, as far as labels describe it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct PeerLabels {
    pub(super) workload: Option<Arc<Workload>>,
    /// First URI SAN of the peer's certificate.
    pub(super) principal: Option<Arc<str>>,
    /// First URI SAN of the sidecar's own certificate.
    pub(super) local_principal: Option<Arc<str>>,
}

/// The requested service, before its labels fall back to the peers' names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Destination<'a> {
    host: &'a str,
    name: &'a str,
    namespace: &'a str,
    /// The authority determines the name.
    pub(super) by_authority: bool,
}

/// Returns the requested service: from the cluster's metadata, or else (at the source) from the authority.
pub(super) fn destination<'a>(record: &Record<'a>, authority: &'a str) -> Destination<'a> {
    // At the destination a client could create any number of series with this header. A longer text is not a
    // DNS name.
    let named = record.direction != Direction::Inbound && authority.len() <= MAX_AUTHORITY;
    let authority = if named { authority } else { "" };
    let fallback =
        Destination { host: authority, name: authority, namespace: "", by_authority: !authority.is_empty() };
    let cluster = record.cluster.map_or("", |cluster| &*cluster.name);
    match (record.route_name, cluster) {
        ("block_all", _) => Destination { name: "BlackHoleCluster", ..fallback },
        ("allow_any", _) => Destination { name: "PassthroughCluster", ..fallback },
        (
            _,
            "BlackHoleCluster"
            | "PassthroughCluster"
            | "InboundPassthroughCluster"
            | "InboundPassthroughClusterIpv4"
            | "InboundPassthroughClusterIpv6",
        ) => Destination { name: cluster, ..fallback },
        _ => record.cluster.and_then(|cluster| cluster.service.as_ref()).map_or(fallback, of_service),
    }
}

fn of_service(service: &Service) -> Destination<'_> {
    let name = if service.name.is_empty() {
        service.host.split('.').next().unwrap_or_default()
    } else {
        &service.name
    };
    Destination { host: &service.host, name, namespace: &service.namespace, by_authority: false }
}

/// Returns the labels of a request (`http`) or connection, as text between the braces.
pub(super) fn labels(
    local: &LocalWorkload,
    other: &PeerLabels,
    record: &Record<'_>,
    destination: Destination<'_>,
    (http, changes): (bool, &[LabelChange<'_>]),
) -> String {
    let inbound = record.direction == Direction::Inbound;
    let us = Ends::new(&local.workload, other.local_principal.as_deref(), &local.workload.namespace);
    let unknown = Workload::default();
    let theirs = other.workload.as_deref().unwrap_or(&unknown);
    let namespace = other.principal.as_deref().and_then(namespace_of).unwrap_or(&theirs.namespace);
    let them = Ends::new(theirs, other.principal.as_deref(), namespace);
    let (source, target) = if inbound { (&them, &us) } else { (&us, &them) };

    let mut text = Labels { text: String::with_capacity(1024), changes, made: Vec::new() };
    text.add("reporter", if inbound { "destination" } else { "source" });
    source.add_source(&mut text);
    let service = if inbound { or(destination.host, us.canonical_name) } else { destination.host };
    let service_name = if inbound { or(destination.name, us.canonical_name) } else { destination.name };
    let service_namespace = if inbound { us.namespace } else { or(destination.namespace, them.namespace) };
    target.add_destination(&mut text, service, [service_name, service_namespace]);

    match (http, record.grpc) {
        (false, _) => text.add("request_protocol", "tcp"),
        (true, true) => text.add("request_protocol", "grpc"),
        (true, false) => text.add("request_protocol", "http"),
    }
    if http {
        text.add("response_code", &record.status.to_string());
        let status = record.grpc_status.filter(|_| record.grpc).map(|status| grpc_status(status).to_string());
        text.add_as_is("grpc_response_status", &status.unwrap_or_default());
    }
    text.add("response_flags", &record.flags.to_string());
    let mutual = other.principal.is_some() && other.local_principal.is_some();
    let security = match (inbound, mutual) {
        (true, true) => "mutual_tls",
        (true, false) => "none",
        (false, _) => "unknown",
    };
    text.add("connection_security_policy", security);
    text.finish()
}

/// Name of a label and its new value; `None` removes the label.
pub(super) type LabelChange<'a> = (&'a str, Option<String>);

/// Replaces a status that gRPC does not define with UNKNOWN (2), so that a server cannot create any number of series.
pub(super) fn grpc_status(status: u32) -> u32 {
    if status > 16 { 2 } else { status }
}

/// Returns the namespace of a principal: `default` in `spiffe://cluster.local/ns/default/sa/x`.
fn namespace_of(principal: &str) -> Option<&str> {
    principal.split("/ns/").nth(1)?.split('/').next().filter(|namespace| !namespace.is_empty())
}

fn or<'a>(text: &'a str, other: &'a str) -> &'a str {
    if text.is_empty() { other } else { text }
}

/// A workload with its principal, as labels name them.
struct Ends<'a> {
    workload: &'a Workload,
    canonical_name: &'a str,
    canonical_revision: &'a str,
    namespace: &'a str,
    principal: &'a str,
}

impl<'a> Ends<'a> {
    fn new(workload: &'a Workload, principal: Option<&'a str>, namespace: &'a str) -> Self {
        Self {
            workload,
            canonical_name: &workload.canonical_name,
            canonical_revision: or(&workload.canonical_revision, "latest"),
            namespace,
            principal: principal.unwrap_or_default(),
        }
    }

    fn add_source(&self, text: &mut Labels<'_>) {
        text.add("source_workload", &self.workload.name);
        text.add("source_canonical_service", self.canonical_name);
        text.add("source_canonical_revision", self.canonical_revision);
        text.add("source_workload_namespace", self.namespace);
        text.add("source_principal", self.principal);
        text.add("source_app", &self.workload.app);
        text.add("source_version", &self.workload.version);
        text.add("source_cluster", &self.workload.cluster);
    }

    fn add_destination(&self, text: &mut Labels<'_>, service: &str, [name, namespace]: [&str; 2]) {
        text.add("destination_workload", &self.workload.name);
        text.add("destination_workload_namespace", self.namespace);
        text.add("destination_principal", self.principal);
        text.add("destination_app", &self.workload.app);
        text.add("destination_version", &self.workload.version);
        text.add("destination_service", service);
        text.add("destination_canonical_service", self.canonical_name);
        text.add("destination_canonical_revision", self.canonical_revision);
        text.add("destination_service_name", name);
        text.add("destination_service_namespace", namespace);
        text.add("destination_cluster", &self.workload.cluster);
    }
}

/// Builder of label text.
struct Labels<'a> {
    text: String,
    changes: &'a [LabelChange<'a>],
    /// Names of the labels whose changes have been applied.
    made: Vec<&'a str>,
}

impl Labels<'_> {
    /// Adds a label. An empty value becomes `unknown`.
    fn add(&mut self, name: &str, value: &str) {
        self.add_as_is(name, or(value, "unknown"));
    }

    fn add_as_is(&mut self, name: &str, value: &str) {
        let Some((name, value)) = self.changes.iter().find(|(changed, _)| *changed == name) else {
            return self.write(name, value);
        };
        self.made.push(name);
        if let Some(value) = value {
            self.write(name, value);
        }
    }

    fn write(&mut self, name: &str, value: &str) {
        let comma = if self.text.is_empty() { "" } else { "," };
        // Writing into memory cannot fail.
        let _ = write!(self.text, "{comma}{name}=\"");
        escape(value, &mut self.text);
        self.text.push('"');
    }

    /// Returns all labels; those that Istio does not define come last.
    fn finish(mut self) -> String {
        for (name, value) in self.changes {
            if let Some(value) = value
                && !self.made.contains(name)
            {
                self.write(name, value);
            }
        }
        self.text
    }
}

/// Escapes a label value for Prometheus' text format.
pub(super) fn escape(value: &str, out: &mut String) {
    for c in value.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '"' => out.push_str("\\\""),
            '\n' => out.push_str("\\n"),
            // A terminal would interpret control characters.
            c if c.is_control() => out.push('_'),
            c => out.push(c),
        }
    }
}
