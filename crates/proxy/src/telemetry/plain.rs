//! Statistics by Envoy's own names, for `/stats`: `cluster.a.upstream_rq_total`.
//!
//! Workers count under the Prometheus names (`envoy_cluster_upstream_rq_total{cluster_name="a"}`); this module
//! converts them back. Istio's metrics have their tags in the name, as Envoy prints them.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
};

use serde_json::{Value, json};

use super::{
    series::{BOUNDS, Histogram},
    stats::Type,
};

/// Quantiles of a histogram, in percent.
const QUANTILES: [f64; 10] = [0.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 100.0];
/// Groups of statistics that form a separate part of the name.
const GROUPS: [&str; 6] = ["outlier_detection", "ssl", "rbac", "ext_authz", "jwt_authn", "fault"];
/// Label of local rate limits, whose names begin with the prefix.
const LOCAL_LIMIT: &str = "envoy_local_http_ratelimit_prefix";

/// Selection of statistics.
#[derive(Debug, Default)]
pub struct StatsFilter {
    /// Regular expression for names; `None` selects all.
    pub filter: Option<regex::Regex>,
    /// Selects only statistics that have been updated.
    pub used_only: bool,
    /// Selects a kind; `None` selects all.
    pub kind: Option<Kind>,
}

/// Kinds of statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Monotonic counters.
    Counters,
    /// Values that rise and fall.
    Gauges,
    /// Distributions.
    Histograms,
    /// Texts; there are none.
    TextReadouts,
}

/// Statistics by name.
#[derive(Debug, Default)]
pub(super) struct NamedStats {
    /// Type, value, and whether it has been updated.
    numbers: BTreeMap<String, (Type, u64, bool)>,
    histograms: BTreeMap<String, Histogram>,
}

impl NamedStats {
    /// Adds a number by its Prometheus name and labels.
    pub(super) fn labelled(&mut self, name: &str, labels: &str, kind: Type, value: u64) {
        self.number(plain_name(name, &parse(labels)), kind, value, value > 0);
    }

    /// Adds a number by Envoy's name.
    pub(super) fn number(&mut self, name: String, kind: Type, value: u64, used: bool) {
        let sum = self.numbers.entry(name).or_insert((kind, 0, false));
        sum.1 = sum.1.wrapping_add(value);
        sum.2 |= used;
    }

    /// Adds a histogram.
    pub(super) fn histogram(&mut self, name: &str, labels: &str, values: &Histogram) {
        self.histograms.entry(plain_name(name, &parse(labels))).or_default().merge(values);
    }

    fn shown_numbers(&self, wanted: &StatsFilter) -> impl Iterator<Item = (&str, u64)> {
        self.numbers.iter().filter_map(|(name, (kind, value, used))| {
            let of_kind = match wanted.kind {
                None => true,
                Some(Kind::Counters) => *kind == Type::Counter,
                Some(Kind::Gauges) => *kind == Type::Gauge,
                Some(_) => false,
            };
            let used = *used || self.had_any(name);
            (of_kind && (used || !wanted.used_only) && wanted.matches(name))
                .then_some((name.as_str(), *value))
        })
    }

    /// Returns whether a gauge of 0 has been updated, judged by the counter of the same things.
    fn had_any(&self, name: &str) -> bool {
        let total = name.strip_suffix("_active").map(|stem| format!("{stem}_total"));
        total.is_some_and(|total| self.numbers.get(&total).is_some_and(|(_, _, used)| *used))
    }

    fn shown_histograms(&self, wanted: &StatsFilter) -> impl Iterator<Item = (&str, &Histogram)> {
        let of_kind = wanted.kind.is_none_or(|kind| kind == Kind::Histograms);
        self.histograms.iter().filter_map(move |(name, values)| {
            let used = values.counts.iter().any(|count| *count > 0);
            (of_kind && (used || !wanted.used_only) && wanted.matches(name))
                .then_some((name.as_str(), values))
        })
    }

    /// Formats the statistics as text, one per line.
    pub(super) fn text(&self, wanted: &StatsFilter) -> String {
        let mut out = String::new();
        // Writing into memory cannot fail.
        for (name, value) in self.shown_numbers(wanted) {
            let _ = writeln!(out, "{name}: {value}");
        }
        for (name, values) in self.shown_histograms(wanted) {
            let _ = write!(out, "{name}:");
            if values.counts.iter().all(|count| *count == 0) {
                out.push_str(" No recorded values");
            } else {
                for quantile in QUANTILES {
                    // The first number is for the last interval in Envoy, which is not recorded here.
                    let _ = write!(out, " P{quantile}(nan,{})", Number(values.quantile(quantile / 100.0)));
                }
            }
            out.push('\n');
        }
        out
    }

    /// Returns the statistics in Envoy's JSON form.
    pub(super) fn json(&self, wanted: &StatsFilter) -> Value {
        let mut stats: Vec<Value> =
            self.shown_numbers(wanted).map(|(name, value)| json!({"name": name, "value": value})).collect();
        let histograms: Vec<Value> = self
            .shown_histograms(wanted)
            .map(|(name, values)| {
                let any = values.counts.iter().any(|count| *count > 0);
                let value = |quantile: f64| any.then(|| values.quantile(quantile / 100.0));
                let values: Vec<Value> = QUANTILES
                    .iter()
                    .map(|quantile| json!({"interval": null, "cumulative": value(*quantile)}))
                    .collect();
                json!({"name": name, "values": values})
            })
            .collect();
        if !histograms.is_empty() {
            stats.push(
                json!({"histograms": {"supported_quantiles": QUANTILES, "computed_quantiles": histograms}}),
            );
        }
        json!({"stats": stats})
    }
}

impl StatsFilter {
    fn matches(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| filter.is_match(name))
    }

    /// Returns whether a Prometheus metric family is selected.
    pub(super) fn takes(&self, name: &str, kind: Kind) -> bool {
        self.kind.is_none_or(|wanted| wanted == kind) && self.matches(name)
    }
}

impl Histogram {
    /// Returns an estimate of a quantile; `share` is from 0 to 1.
    fn quantile(&self, share: f64) -> f64 {
        let all: u64 = self.counts.iter().sum();
        let rank = share * all as f64;
        let mut below = 0.0;
        for (index, count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let count = *count as f64;
            if below + count >= rank {
                let from = index.checked_sub(1).map_or(0.0, |index| BOUNDS[index]);
                let to = BOUNDS.get(index).copied().unwrap_or(from);
                return from + (to - from) * (rank - below) / count;
            }
            below += count;
        }
        BOUNDS[BOUNDS.len() - 1]
    }
}

/// A number, formatted with its significant digits.
struct Number(f64);

impl fmt::Display for Number {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(number) = self;
        write!(out, "{}", (number * 1000.0).round() / 1000.0)
    }
}

/// Parses the labels of a series: `a="b",c="d"`.
fn parse(labels: &str) -> Vec<(&str, String)> {
    let mut all = Vec::new();
    let mut rest = labels;
    while let Some((name, after)) = rest.split_once("=\"") {
        let (mut value, mut escaped, mut end) = (String::new(), false, after.len());
        for (at, letter) in after.char_indices() {
            match letter {
                '\\' if !escaped => escaped = true,
                '"' if !escaped => {
                    end = at + 1;
                    break;
                }
                'n' if escaped => {
                    value.push(' ');
                    escaped = false;
                }
                // A name must be a single line.
                '\n' | '\r' => value.push(' '),
                other => {
                    value.push(other);
                    escaped = false;
                }
            }
        }
        all.push((name.trim_start_matches(','), value));
        rest = &after[end..];
    }
    all
}

/// Returns Envoy's name for a Prometheus name and labels.
fn plain_name(name: &str, labels: &[(&str, String)]) -> String {
    let label =
        |wanted: &str| labels.iter().find(|(name, _)| *name == wanted).map(|(_, value)| value.as_str());
    let grouped = |rest: &str| {
        let group =
            GROUPS.iter().find_map(|group| Some((group, rest.strip_prefix(group)?.strip_prefix('_')?)));
        group.map_or_else(|| rest.to_owned(), |(group, rest)| format!("{group}.{rest}"))
    };
    if let (Some(rest), Some(host), Some(route)) =
        (name.strip_prefix("envoy_vhost_route_"), label("envoy_virtual_host"), label("envoy_route"))
    {
        let rest = match (label("envoy_response_code"), label("envoy_response_code_class")) {
            (Some(code), _) => format!("upstream_rq_{code}"),
            (None, Some(class)) => format!("upstream_rq_{class}xx"),
            (None, None) => rest.to_owned(),
        };
        return format!("vhost.{host}.route.{route}.{rest}");
    }
    for (prefix, owner, scope) in [
        ("envoy_cluster_", "cluster_name", "cluster"),
        ("envoy_http_", "http_conn_manager_prefix", "http"),
        ("envoy_listener_", "listener_address", "listener"),
        ("envoy_tcp_", "listener_address", "tcp"),
        ("envoy_connection_limit_", "connection_limit_prefix", "connection_limit"),
    ] {
        if let (Some(rest), Some(owner)) = (name.strip_prefix(prefix), label(owner)) {
            return format!("{scope}.{owner}.{}", grouped(rest));
        }
    }
    if let (Some(rest), Some(prefix)) =
        (name.strip_prefix("envoy_http_local_rate_limit_"), label(LOCAL_LIMIT))
    {
        return format!("{prefix}.http_local_rate_limit.{rest}");
    }
    if let Some(rest) = name.strip_prefix("envoy_http2_") {
        return format!("http2.{rest}");
    }
    let (mut out, tags) = match name.strip_prefix("skysail_") {
        Some(rest) => (format!("skysail.{rest}"), false),
        None => (format!("istiocustom.{name}"), true),
    };
    for (tag, value) in labels {
        if tags {
            let _ = write!(out, ".{tag}");
        }
        let _ = write!(out, ".{value}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_envoy() {
        let name = |name: &str, labels: &str| plain_name(name, &parse(labels));
        for (metric, labels, expected) in [
            ("envoy_cluster_upstream_rq_total", r#"cluster_name="a|80"#, "cluster.a|80.upstream_rq_total"),
            (
                "envoy_cluster_outlier_detection_ejections_active",
                r#"cluster_name="a""#,
                "cluster.a.outlier_detection.ejections_active",
            ),
            ("envoy_http_rbac_denied", r#"http_conn_manager_prefix="b""#, "http.b.rbac.denied"),
            (
                "envoy_http_downstream_rq_total",
                r#"http_conn_manager_prefix="b""#,
                "http.b.downstream_rq_total",
            ),
            (
                "envoy_listener_ssl_handshake",
                r#"listener_address="0.0.0.0_1""#,
                "listener.0.0.0.0_1.ssl.handshake",
            ),
            (
                "envoy_http_local_rate_limit_ok",
                r#"envoy_local_http_ratelimit_prefix="shop/a/b""#,
                "shop/a/b.http_local_rate_limit.ok",
            ),
            (
                "envoy_vhost_route_upstream_rq_xx",
                r#"envoy_response_code_class="2",envoy_virtual_host="a.b:80",envoy_route="c.d""#,
                "vhost.a.b:80.route.c.d.upstream_rq_2xx",
            ),
            ("envoy_http2_keepalive_timeout", r#"http_conn_manager_prefix="b""#, "http2.keepalive_timeout"),
            (
                "skysail_export_sent_total",
                r#"cluster_name="c",what="logs""#,
                "skysail.export_sent_total.c.logs",
            ),
            (
                "istio_build",
                r#"component="proxy",tag="1\"2\n3""#,
                "istiocustom.istio_build.component.proxy.tag.1\"2 3",
            ),
        ] {
            assert_eq!(name(metric, labels), expected);
        }
    }

    #[test]
    fn only_selected_statistics_are_shown() {
        let mut plain = NamedStats::default();
        for (name, kind, value, used) in [
            ("listener.a.downstream_cx_active", Type::Gauge, 0, false),
            ("listener.a.downstream_cx_total", Type::Counter, 2, true),
            ("listener.b.downstream_cx_active", Type::Gauge, 0, false),
            ("server.state", Type::Gauge, 0, true),
        ] {
            plain.number(name.to_owned(), kind, value, used);
        }
        let text = |filter: Option<&str>, used_only, kind| {
            let filter = filter.map(|filter| regex::Regex::new(filter).unwrap());
            plain.text(&StatsFilter { filter, used_only, kind })
        };
        assert_eq!(text(Some("^server\\."), true, None), "server.state: 0\n");
        assert_eq!(text(Some("_active$"), true, None), "listener.a.downstream_cx_active: 0\n");
        assert_eq!(text(None, false, Some(Kind::Counters)), "listener.a.downstream_cx_total: 2\n");
        assert_eq!(text(None, false, Some(Kind::Histograms)), "");
        let json = plain.json(&StatsFilter {
            used_only: true,
            kind: Some(Kind::Counters),
            ..StatsFilter::default()
        });
        assert_eq!(json, json!({"stats": [{"name": "listener.a.downstream_cx_total", "value": 2}]}));
    }

    #[test]
    fn quantiles_are_within_their_buckets() {
        let mut values = Histogram::default();
        // Ten values up to 0.5, ten up to 5.
        values.counts[0] = 10;
        values.counts[2] = 10;
        assert_eq!(
            [0.0, 0.25, 0.5, 0.75, 1.0].map(|share| values.quantile(share)),
            [0.0, 0.25, 0.5, 3.0, 5.0]
        );
        let mut plain = NamedStats::default();
        plain.histogram("istio_request_bytes", "a=\"b\"", &values);
        plain.histogram("istio_response_bytes", "a=\"b\"", &Histogram::default());
        let text = plain.text(&StatsFilter::default());
        assert!(text.starts_with("istiocustom.istio_request_bytes.a.b: P0(nan,0) P25(nan,0.25) "), "{text}");
        assert!(text.ends_with("istiocustom.istio_response_bytes.a.b: No recorded values\n"), "{text}");
        let json = plain.json(&StatsFilter { used_only: true, ..StatsFilter::default() });
        let histograms = &json["stats"][0]["histograms"];
        assert_eq!(histograms["computed_quantiles"].as_array().unwrap().len(), 1);
        assert_eq!(histograms["computed_quantiles"][0]["values"][9]["cumulative"], 5.0);
    }
}
