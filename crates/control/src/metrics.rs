//! Metrics, under the names that Istio's dashboards use.

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

use crate::authority::Status;

/// A limit that is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// Of scopes in all.
    Total,
    /// Of scopes of one identity.
    Identity,
    /// Of declared views in all.
    Views,
    /// Of declared views of one identity.
    IdentityViews,
}

impl Limit {
    /// As metrics name them, in the order of the variants.
    pub(crate) const REASONS: [&'static str; 4] = ["total", "identity", "views", "identity_views"];
}

/// Condition of a name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Condition {
    /// No answer yet.
    #[default]
    New,
    /// It has addresses.
    Resolved,
    /// It has no addresses.
    Missing,
    /// The lookup fails; its last addresses are in force.
    Stale,
    /// The lookup fails, and no addresses are known.
    Failed,
}

impl Condition {
    /// All conditions, as values of labels.
    pub(crate) const ALL: [(Self, &str); 5] = [
        (Self::New, "new"),
        (Self::Resolved, "resolved"),
        (Self::Missing, "missing"),
        (Self::Stale, "stale"),
        (Self::Failed, "failed"),
    ];
}

/// One number per kind of resource.
type PerKind = [AtomicU64; Kind::ALL.len()];

/// The control plane's counters.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    pub(crate) pushes: PerKind,
    pub(crate) push_bytes: PerKind,
    pub(crate) rejects: PerKind,
    pub(crate) connections: AtomicU64,
    /// Of those, how many ended.
    pub(crate) departures: AtomicU64,
    pub(crate) refused_connections: AtomicU64,
    /// Connections to the discovery ports, once those are open.
    pub(crate) held: OnceLock<Arc<Connections>>,
    pub(crate) certificate_requests: AtomicU64,
    pub(crate) certificates_issued: AtomicU64,
    /// Refused because their pod or identity asked for too many.
    pub(crate) certificates_over_quota: AtomicU64,
    pub(crate) authentication_failures: AtomicU64,
    pub(crate) signing_failures: AtomicU64,
    /// Records of the audit log.
    pub(crate) audit_written: AtomicU64,
    /// Records that found no room in the queue.
    pub(crate) audit_dropped: AtomicU64,
    /// Records that could not be written.
    pub(crate) audit_failed: AtomicU64,
    /// Requests refused, by reason.
    pub(crate) refusals: [AtomicU64; Refusal::REASONS.len()],
    /// Scopes compiled because a proxy of them came.
    pub(crate) scopes_opened: AtomicU64,
    /// Proxies refused for a limit of scopes, by limit.
    pub(crate) scope_refusals: [AtomicU64; Limit::REASONS.len()],
    /// Compiles that panicked.
    pub(crate) compile_panics: AtomicU64,
    pub(crate) publications: AtomicU64,
    pub(crate) publication_micros: AtomicU64,
    pub(crate) dns_queries_udp: AtomicU64,
    pub(crate) dns_queries_tcp: AtomicU64,
    /// Limits of clients, and how often each was reached.
    pub(crate) limits: Arc<Limits>,
    /// By result: addresses, none, no answer.
    pub(crate) dns_lookups: [AtomicU64; 3],
}

/// Values that are looked up rather than counted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gauges {
    pub(crate) clients: usize,
    pub(crate) views: usize,
    pub(crate) scopes: usize,
    pub(crate) services: usize,
    pub(crate) config_errors: usize,
    pub(crate) config_warnings: usize,
    pub(crate) authority: Option<Status>,
    /// Names that are looked up, by how they get on.
    pub(crate) names: BTreeMap<Condition, usize>,
}

/// Adds one.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Metrics {
    /// Records that a change was compiled and handed to all streams.
    pub(crate) fn published(&self, took: Duration) {
        count(&self.publications);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.publication_micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// How much has happened that takes memory or gives it back.
    pub(crate) fn events(&self) -> u64 {
        let counters = [&self.connections, &self.departures, &self.publications];
        counters.into_iter().map(|counter| counter.load(Ordering::Relaxed)).sum()
    }

    /// Prometheus' text format.
    pub(crate) fn render(&self, gauges: &Gauges) -> String {
        let mut out = String::with_capacity(4096);
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut family = |name: &str, kind: &str, help: &str, samples: &[(String, f64)]| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in samples {
                let _ = writeln!(out, "{name}{labels} {value}");
            }
        };
        let one = |value: f64| vec![(String::new(), value)];
        let per_kind = |counters: &PerKind| -> Vec<_> {
            Kind::ALL
                .iter()
                .map(|kind| (format!("{{type=\"{kind}\"}}"), get(&counters[*kind as usize]) as f64))
                .collect()
        };
        let version = format!("{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
        family("pilot_info", "gauge", "Which control plane this is.", &[(version.clone(), 1.0)]);
        family("pilot_xds", "gauge", "Proxies connected.", &[(version, gauges.clients as f64)]);
        family("pilot_xds_pushes", "counter", "Responses sent, by type.", &per_kind(&self.pushes));
        family("pilot_total_xds_rejects", "counter", "Responses proxies refused.", &per_kind(&self.rejects));
        family("skysail_xds_push_bytes", "counter", "Bytes of resources sent.", &per_kind(&self.push_bytes));
        self.render_dns(gauges, &mut family);
        self.render_limits(&mut family);
        self.render_refusals(&mut family);
        if let Some(held) = self.held.get() {
            render_connections(held, &mut family);
        }
        if let Some(authority) = &gauges.authority {
            render_authority(authority, &mut family);
        }
        for (name, kind, help, value) in [
            ("skysail_xds_connections", "counter", "Streams opened.", get(&self.connections) as f64),
            (
                "skysail_xds_refused_connections",
                "counter",
                "Streams refused for who asked or what it asked with.",
                get(&self.refused_connections) as f64,
            ),
            ("skysail_xds_views", "gauge", "Different configurations served.", gauges.views as f64),
            (
                "skysail_xds_scopes",
                "gauge",
                "Scopes: what proxies of the same surroundings share.",
                gauges.scopes as f64,
            ),
            (
                "skysail_xds_scopes_opened",
                "counter",
                "Scopes compiled because a proxy of them came.",
                get(&self.scopes_opened) as f64,
            ),
            (
                "skysail_compile_panics",
                "counter",
                "Compiles that panicked; their proxies keep the last good configuration.",
                get(&self.compile_panics) as f64,
            ),
            ("pilot_services", "gauge", "Services known.", gauges.services as f64),
            ("skysail_config_errors", "gauge", "Errors in the configuration.", gauges.config_errors as f64),
            ("skysail_config_warnings", "gauge", "Warnings about it.", gauges.config_warnings as f64),
            (
                "citadel_server_csr_count",
                "counter",
                "Certificate requests received.",
                get(&self.certificate_requests) as f64,
            ),
            (
                "citadel_server_success_cert_issuance_count",
                "counter",
                "Certificates issued.",
                get(&self.certificates_issued) as f64,
            ),
            (
                "citadel_server_authentication_failure_count",
                "counter",
                "Callers that did not prove who they are.",
                get(&self.authentication_failures) as f64,
            ),
            (
                "citadel_server_csr_sign_err_count",
                "counter",
                "Requests that could not be signed.",
                get(&self.signing_failures) as f64,
            ),
            (
                "skysail_publications",
                "counter",
                "Configuration changes published.",
                get(&self.publications) as f64,
            ),
            (
                "skysail_publication_seconds_sum",
                "counter",
                "Time from a change read to the last stream told.",
                get(&self.publication_micros) as f64 / 1e6,
            ),
        ] {
            family(name, kind, help, &one(value));
        }
        out
    }

    /// Records the result of a lookup: whether it found addresses, or `None` for a failure.
    pub(crate) fn looked_up(&self, has_addresses: Option<bool>) {
        let which = match has_addresses {
            Some(true) => 0,
            Some(false) => 1,
            None => 2,
        };
        count(&self.dns_lookups[which]);
    }

    fn render_limits(&self, family: &mut impl FnMut(&str, &str, &str, &[(String, f64)])) {
        let bounds = Bound::ALL
            .map(|bound| (format!("{{bound=\"{}\"}}", bound.label()), self.limits.reached(bound) as f64));
        let help = "Times a client reached a limit of discovery.";
        family("skysail_xds_limits_reached", "counter", help, &bounds);
    }

    /// Refusals by reason, and what came of the audit log's records.
    fn render_refusals(&self, family: &mut impl FnMut(&str, &str, &str, &[(String, f64)])) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let reasons = Refusal::REASONS.iter().zip(&self.refusals);
        let refusals = reasons.map(|(reason, count)| (format!("{{reason=\"{reason}\"}}"), get(count) as f64));
        let help = "Signing requests refused, by reason.";
        family("skysail_csr_refusals", "counter", help, &refusals.collect::<Vec<_>>());
        let over = [(String::new(), get(&self.certificates_over_quota) as f64)];
        let help = "Certificate requests refused because their pod or identity made too many.";
        family("skysail_certificates_over_quota", "counter", help, &over);
        let reasons = Limit::REASONS.iter().zip(&self.scope_refusals);
        let refusals = reasons.map(|(limit, count)| (format!("{{limit=\"{limit}\"}}"), get(count) as f64));
        let help = "Streams refused because there are too many scopes or views, by limit.";
        family("skysail_xds_scope_refusals", "counter", help, &refusals.collect::<Vec<_>>());
        let records = [
            ("written", &self.audit_written),
            ("dropped", &self.audit_dropped),
            ("failed", &self.audit_failed),
        ];
        let records = records.map(|(result, count)| (format!("{{result=\"{result}\"}}"), get(count) as f64));
        family("skysail_audit_records", "counter", "Records of the audit log.", &records);
    }

    fn render_dns(&self, gauges: &Gauges, family: &mut impl FnMut(&str, &str, &str, &[(String, f64)])) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let labelled = |label: &str, value: &str, number: f64| (format!("{{{label}=\"{value}\"}}"), number);
        let queries = [("udp", &self.dns_queries_udp), ("tcp", &self.dns_queries_tcp)];
        let queries = queries.map(|(transport, counter)| labelled("transport", transport, get(counter)));
        family("skysail_dns_queries", "counter", "Questions sent to DNS servers.", &queries);
        let results = ["addresses", "nothing", "failure"].iter().zip(&self.dns_lookups);
        let lookups: Vec<_> =
            results.map(|(result, counter)| labelled("result", result, get(counter))).collect();
        family("skysail_dns_lookups", "counter", "Lookups of a name's A or AAAA records.", &lookups);
        let names = Condition::ALL.map(|(condition, word)| {
            labelled("condition", word, gauges.names.get(&condition).copied().unwrap_or_default() as f64)
        });
        family("skysail_dns_names", "gauge", "Names of endpoints that are looked up.", &names);
    }
}

fn render_connections(held: &Connections, family: &mut impl FnMut(&str, &str, &str, &[(String, f64)])) {
    for (name, kind, help, value) in [
        ("skysail_connections", "gauge", "Connections to the discovery ports.", held.open() as f64),
        (
            "skysail_connections_unauthenticated",
            "gauge",
            "Connections that have not authenticated or have no call in progress.",
            held.unproven() as f64,
        ),
        (
            "skysail_connections_shed",
            "counter",
            "Such connections closed to make room for others.",
            held.sheds() as f64,
        ),
        (
            "skysail_connections_refused",
            "counter",
            "Connections closed because there was no room for them, and calls refused because their identity had too many.",
            held.refused() as f64,
        ),
    ] {
        family(name, kind, help, &[(String::new(), value)]);
    }
}

fn render_authority(authority: &Status, family: &mut impl FnMut(&str, &str, &str, &[(String, f64)])) {
    let step =
        |step: &Step| (format!("{{step=\"{}\"}}", step.name()), f64::from(u8::from(*step == authority.step)));
    let steps: Vec<_> = Step::ALL.iter().map(step).collect();
    let help = "Where the replacement of the root stands: 1 for the step it is in.";
    family("skysail_ca_step", "gauge", help, &steps);
    for (name, help, value) in [
        (
            "citadel_server_root_cert_expiry_timestamp",
            "When the authority ends, seconds since 1970.",
            authority.not_after,
        ),
        ("skysail_ca_step_since_timestamp", "When this step began.", authority.since),
        ("skysail_ca_trusted_roots", "Roots that workloads trust.", authority.trusted()),
        (
            "skysail_ca_problem",
            "1 if what is in --ca-dir cannot be used.",
            u64::from(authority.problem.is_some()),
        ),
    ] {
        family(name, "gauge", help, &[(String::new(), value as f64)]);
    }
}
