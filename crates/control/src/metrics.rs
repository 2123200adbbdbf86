//! Metrics of the control plane, with the names that Istio's dashboards use where Istio has the metric.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde::Serialize;
use skysail_core::connections::Connections;
use skysail_identity::{Refusal, rotation::Step};
use skysail_xds::{
    Kind,
    limits::{Bound, Limits},
};

use crate::authority::AuthorityStatus;

/// A limit of scopes or views that a proxy has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// Scopes in total (`--max-scopes`).
    Total,
    /// Scopes of one identity (`--max-scopes-per-identity`).
    Identity,
    /// Declared views in total (`--max-views`).
    Views,
    /// Declared views of one identity (`--max-views-per-identity`).
    IdentityViews,
}

impl Limit {
    /// Label values, in the order of the variants.
    pub(crate) const REASONS: [&'static str; 4] = ["total", "identity", "views", "identity_views"];
}

/// Condition of a DNS name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Condition {
    /// No lookup has ended yet.
    #[default]
    New,
    /// The name has addresses.
    Resolved,
    /// The name has no addresses.
    Missing,
    /// The lookup fails; the last addresses are in use.
    Stale,
    /// The lookup fails, and no addresses are known.
    Failed,
}

impl Condition {
    /// All conditions with their label values.
    pub(crate) const ALL: [(Self, &str); 5] = [
        (Self::New, "new"),
        (Self::Resolved, "resolved"),
        (Self::Missing, "missing"),
        (Self::Stale, "stale"),
        (Self::Failed, "failed"),
    ];
}

/// One counter per resource type.
type PerKind = [AtomicU64; Kind::ALL.len()];

/// Counters of the control plane.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    pub(crate) pushes: PerKind,
    pub(crate) push_bytes: PerKind,
    pub(crate) rejects: PerKind,
    /// Discovery streams opened.
    pub(crate) connections: AtomicU64,
    /// Discovery streams ended.
    pub(crate) disconnects: AtomicU64,
    /// Discovery streams refused.
    pub(crate) refused_connections: AtomicU64,
    /// Connections to the discovery ports; set when the ports open.
    pub(crate) open_connections: OnceLock<Arc<Connections>>,
    pub(crate) certificate_requests: AtomicU64,
    pub(crate) certificates_issued: AtomicU64,
    /// Certificate requests refused by the rate limit of their pod or identity.
    pub(crate) certificates_over_quota: AtomicU64,
    pub(crate) authentication_failures: AtomicU64,
    pub(crate) signing_failures: AtomicU64,
    /// Audit records written.
    pub(crate) audit_written: AtomicU64,
    /// Audit records dropped because the queue was full.
    pub(crate) audit_dropped: AtomicU64,
    /// Audit records that could not be written or put on disk.
    pub(crate) audit_failed: AtomicU64,
    /// Certificate signing requests refused, by reason.
    pub(crate) csr_refusals: [AtomicU64; Refusal::REASONS.len()],
    /// Scopes compiled for the first proxy that needs them.
    pub(crate) scopes_opened: AtomicU64,
    /// Discovery streams refused by a limit, by [`Limit`].
    pub(crate) limit_refusals: [AtomicU64; Limit::REASONS.len()],
    /// Compilations that panicked.
    pub(crate) compile_panics: AtomicU64,
    pub(crate) publications: AtomicU64,
    pub(crate) publication_micros: AtomicU64,
    pub(crate) dns_queries_udp: AtomicU64,
    pub(crate) dns_queries_tcp: AtomicU64,
    /// Limits of discovery clients, with a counter for each.
    pub(crate) limits: Arc<Limits>,
    /// DNS lookups by result: addresses, no addresses, failure.
    pub(crate) dns_lookups: [AtomicU64; 3],
    /// Fetches of key sets by result: success, failure.
    pub(crate) key_fetches: [AtomicU64; 2],
}

/// Values that are read when the metrics are rendered.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gauges {
    pub(crate) clients: usize,
    pub(crate) views: usize,
    pub(crate) scopes: usize,
    pub(crate) services: usize,
    pub(crate) config_errors: usize,
    pub(crate) config_warnings: usize,
    pub(crate) authority: Option<AuthorityStatus>,
    /// Number of DNS names by condition.
    pub(crate) dns_names: BTreeMap<Condition, usize>,
}

/// Increments a counter.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn value(counter: &AtomicU64) -> f64 {
    counter.load(Ordering::Relaxed) as f64
}

impl Metrics {
    /// Records a publication and its duration. That of changed files includes their parsing.
    pub(crate) fn record_publication(&self, duration: Duration) {
        count(&self.publications);
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.publication_micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// Records the result of a DNS lookup: whether it returned addresses, or `None` for a failure.
    pub(crate) fn record_lookup(&self, has_addresses: Option<bool>) {
        let result = match has_addresses {
            Some(true) => 0,
            Some(false) => 1,
            None => 2,
        };
        count(&self.dns_lookups[result]);
    }

    /// Records the result of a fetch of a key set.
    pub(crate) fn record_key_fetch(&self, is_ok: bool) {
        count(&self.key_fetches[usize::from(!is_ok)]);
    }

    /// Returns the number of events so far that allocate or free much memory.
    pub(crate) fn memory_events(&self) -> u64 {
        let counters = [&self.connections, &self.disconnects, &self.publications];
        counters.into_iter().map(|counter| counter.load(Ordering::Relaxed)).sum()
    }

    /// Returns all metrics in Prometheus' text format.
    pub(crate) fn render(&self, gauges: &Gauges) -> String {
        let mut text = PrometheusText(String::with_capacity(4096));
        self.render_pushes(gauges, &mut text);
        self.render_dns(gauges, &mut text);
        self.render_refusals(&mut text);
        if let Some(connections) = self.open_connections.get() {
            render_connections(connections, &mut text);
        }
        if let Some(authority) = &gauges.authority {
            render_authority(authority, &mut text);
        }
        self.render_scopes(gauges, &mut text);
        self.render_configuration(gauges, &mut text);
        self.render_certificates(&mut text);
        text.0
    }

    fn render_pushes(&self, gauges: &Gauges, text: &mut PrometheusText) {
        let per_kind = |counters: &PerKind| {
            Kind::ALL.map(|kind| (format!("{{type=\"{kind}\"}}"), value(&counters[kind as usize])))
        };
        let version = format!("{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
        text.family("pilot_info", "gauge", "Version of the control plane.", &[(version.clone(), 1.0)]);
        text.family("pilot_xds", "gauge", "Connected proxies.", &[(version, gauges.clients as f64)]);
        text.family(
            "pilot_xds_pushes",
            "counter",
            "Responses sent, by resource type.",
            &per_kind(&self.pushes),
        );
        let help = "Responses that proxies rejected, by resource type.";
        text.family("pilot_total_xds_rejects", "counter", help, &per_kind(&self.rejects));
        let help = "Bytes of resources sent, by resource type.";
        text.family("skysail_xds_push_bytes", "counter", help, &per_kind(&self.push_bytes));
    }

    fn render_dns(&self, gauges: &Gauges, text: &mut PrometheusText) {
        let queries = [("udp", &self.dns_queries_udp), ("tcp", &self.dns_queries_tcp)];
        let help = "Queries sent to DNS servers, by transport.";
        text.counters("skysail_dns_queries", help, "transport", queries);
        let results = ["addresses", "nothing", "failure"].into_iter().zip(&self.dns_lookups);
        let help = "Lookups of the A or AAAA records of a name, by result.";
        text.counters("skysail_dns_lookups", help, "result", results);
        let results = ["success", "failure"].into_iter().zip(&self.key_fetches);
        let help = "Fetches of key sets of token issuers, by result.";
        text.counters("skysail_key_set_fetches", help, "result", results);
        let names = Condition::ALL.map(|(condition, label)| {
            let count = gauges.dns_names.get(&condition).copied().unwrap_or_default();
            (format!("{{condition=\"{label}\"}}"), count as f64)
        });
        let help = "DNS names of endpoints that the control plane looks up, by condition.";
        text.family("skysail_dns_names", "gauge", help, &names);
    }

    /// Renders refusals by reason, and the results of audit records.
    fn render_refusals(&self, text: &mut PrometheusText) {
        let bounds = Bound::ALL
            .map(|bound| (format!("{{bound=\"{}\"}}", bound.label()), self.limits.reached(bound) as f64));
        let help = "Times a client reached a limit of discovery, by limit.";
        text.family("skysail_xds_limits_reached", "counter", help, &bounds);
        let help = "Certificate signing requests refused, by reason.";
        let reasons = Refusal::REASONS.into_iter().zip(&self.csr_refusals);
        text.counters("skysail_csr_refusals", help, "reason", reasons);
        let help = "Certificate requests refused by the rate limit of their pod or identity.";
        text.counter("skysail_certificates_over_quota", help, &self.certificates_over_quota);
        let help = "Discovery streams refused by a limit of scopes or views, by limit.";
        let limits = Limit::REASONS.into_iter().zip(&self.limit_refusals);
        text.counters("skysail_xds_scope_refusals", help, "limit", limits);
        let records = [
            ("written", &self.audit_written),
            ("dropped", &self.audit_dropped),
            ("failed", &self.audit_failed),
        ];
        text.counters("skysail_audit_records", "Records of the audit log, by result.", "result", records);
    }

    fn render_scopes(&self, gauges: &Gauges, text: &mut PrometheusText) {
        text.counter("skysail_xds_connections", "Discovery streams opened.", &self.connections);
        let help =
            "Discovery streams refused by authorization, an invalid node, a limit or a failed compilation.";
        text.counter("skysail_xds_refused_connections", help, &self.refused_connections);
        let help = "Views: sets of resources that proxies with equal properties share.";
        text.gauge("skysail_xds_views", help, gauges.views as f64);
        let help = "Scopes: sets of clusters, endpoints and routes that several views share.";
        text.gauge("skysail_xds_scopes", help, gauges.scopes as f64);
        let help = "Scopes compiled for the first proxy that needs them.";
        text.counter("skysail_xds_scopes_opened", help, &self.scopes_opened);
        let help = "Compilations that panicked; the affected proxies keep their last valid configuration.";
        text.counter("skysail_compile_panics", help, &self.compile_panics);
    }

    fn render_configuration(&self, gauges: &Gauges, text: &mut PrometheusText) {
        text.gauge("pilot_services", "Services in the configuration.", gauges.services as f64);
        text.gauge("skysail_config_errors", "Errors in the configuration.", gauges.config_errors as f64);
        text.gauge(
            "skysail_config_warnings",
            "Warnings about the configuration.",
            gauges.config_warnings as f64,
        );
        text.counter("skysail_publications", "Configuration changes published.", &self.publications);
        let help = "Seconds from reading a change to notifying the last stream, in total.";
        let seconds = value(&self.publication_micros) / 1e6;
        text.family("skysail_publication_seconds_sum", "counter", help, &[(String::new(), seconds)]);
    }

    fn render_certificates(&self, text: &mut PrometheusText) {
        let help = "Certificate requests received.";
        text.counter("citadel_server_csr_count", help, &self.certificate_requests);
        let help = "Certificates issued.";
        text.counter("citadel_server_success_cert_issuance_count", help, &self.certificates_issued);
        let help = "Calls and requests whose credential is missing, invalid or not allowed.";
        text.counter("citadel_server_authentication_failure_count", help, &self.authentication_failures);
        let help = "Certificate requests that could not be signed.";
        text.counter("citadel_server_csr_sign_err_count", help, &self.signing_failures);
    }
}

fn render_connections(connections: &Connections, text: &mut PrometheusText) {
    text.gauge("skysail_connections", "Connections to the discovery ports.", connections.open() as f64);
    let help = "Connections without authentication or without a call in progress.";
    text.gauge("skysail_connections_unauthenticated", help, connections.evictable() as f64);
    let help = "Connections without authentication or call in progress that were closed for new ones.";
    let shed = connections.sheds() as f64;
    text.family("skysail_connections_shed", "counter", help, &[(String::new(), shed)]);
    let help = "Connections closed by --max-connections or --max-connections-per-address, and calls refused by \
                --max-connections-per-identity.";
    let refused = connections.refused() as f64;
    text.family("skysail_connections_refused", "counter", help, &[(String::new(), refused)]);
}

fn render_authority(authority: &AuthorityStatus, text: &mut PrometheusText) {
    let steps: Vec<_> = Step::ALL
        .iter()
        .map(|step| (format!("{{step=\"{}\"}}", step.name()), f64::from(u8::from(*step == authority.step))))
        .collect();
    let help = "Step of the root rotation: 1 for the current step, 0 for the others.";
    text.family("skysail_ca_step", "gauge", help, &steps);
    let help = "Expiry of the certificate authority, in seconds since 1970.";
    text.gauge("citadel_server_root_cert_expiry_timestamp", help, authority.not_after as f64);
    let help = "Start of the current step, in seconds since 1970.";
    text.gauge("skysail_ca_step_since_timestamp", help, authority.since as f64);
    let help = "Root certificates in the trust bundle of workloads.";
    text.gauge("skysail_ca_trusted_roots", help, authority.trusted_roots() as f64);
    let help = "1 if the certificate authority in --ca-dir or in its Secret cannot be read, used or changed, else 0.";
    text.gauge("skysail_ca_problem", help, f64::from(u8::from(authority.problem.is_some())));
}

/// Metrics in Prometheus' text format.
struct PrometheusText(String);

impl PrometheusText {
    /// Appends a metric. Each sample has its labels, in braces if any, and its value.
    fn family(&mut self, name: &str, kind: &str, help: &str, samples: &[(String, f64)]) {
        let Self(text) = self;
        // Writing to a string does not fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in samples {
            let _ = writeln!(text, "{name}{labels} {value}");
        }
    }

    /// Appends a gauge without labels.
    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, "gauge", help, &[(String::new(), value)]);
    }

    /// Appends a counter without labels.
    fn counter(&mut self, name: &str, help: &str, counter: &AtomicU64) {
        self.family(name, "counter", help, &[(String::new(), value(counter))]);
    }

    /// Appends a counter with one label.
    fn counters<'a>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        counters: impl IntoIterator<Item = (&'a str, &'a AtomicU64)>,
    ) {
        let samples = counters
            .into_iter()
            .map(|(of, counter)| (format!("{{{label}=\"{of}\"}}"), value(counter)))
            .collect::<Vec<_>>();
        self.family(name, "counter", help, &samples);
    }
}
