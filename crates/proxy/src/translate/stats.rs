//! Translates Istio's metrics.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use skysail_xds::istio::StatsConfig;

use super::{At as _, Reject, Result, access_log, duration};
use skysail_policy::{
    config::stats::{HTTP, MetricOverride, Stats, TCP, TCP_INTERVAL},
    expression::Expression,
};

/// Minimum interval at which the bytes of open connections are counted. Each count costs CPU for each connection.
const MIN_TCP_INTERVAL: Duration = Duration::from_millis(100);

/// Translates Istio's filter, the same for requests and connections.
pub(super) fn translate(proto: &StatsConfig, strict: bool) -> Result<Arc<Stats>> {
    let mut compiled = HashMap::new();
    for (index, metric) in proto.metrics.iter().enumerate() {
        let path = format_args!("metrics[{index}]").to_string();
        if !metric.name.is_empty() && !HTTP.iter().chain(&TCP).any(|known| *known == metric.name) {
            let reason = format!("there is no metric istio_{}, so its change has no effect", metric.name);
            if strict {
                return Err(Reject::new(reason).at_field(path));
            }
            super::warn_once(format!("{path}: {reason}"));
        }
        for (label, text) in &metric.dimensions {
            let expression = access_log::expression(text, strict);
            let expression = expression.at(format_args!("dimensions[{label:?}]")).at(&path)?;
            compiled.insert(text.as_str(), Arc::new(expression));
        }
    }
    let time = |proto: Option<_>, name| proto.map_or(Ok(Duration::ZERO), |time| duration(time).at(name));
    let expiry = time(proto.rotation_interval.as_ref(), "rotation_interval")?
        + time(proto.graceful_deletion_interval.as_ref(), "graceful_deletion_interval")?;
    let interval = time(proto.tcp_reporting_duration.as_ref(), "tcp_reporting_duration")?;
    // Without a rotation interval, Istio's filter deletes no series; here the default applies.
    let rotates = proto.rotation_interval.is_some() && !expiry.is_zero();
    Ok(Arc::new(Stats {
        http: changes(proto, &HTTP, &compiled),
        tcp: changes(proto, &TCP, &compiled),
        expiry: rotates.then_some(expiry),
        tcp_interval: if interval.is_zero() { TCP_INTERVAL } else { interval.max(MIN_TCP_INTERVAL) },
    }))
}

/// Returns the changes, each for all metrics with the same labels; empty if no metric is changed.
fn changes(
    proto: &StatsConfig,
    metrics: &[&str],
    compiled: &HashMap<&str, Arc<Expression>>,
) -> Vec<MetricOverride> {
    let mut found: Vec<(BTreeMap<&str, Option<&str>>, u8)> = Vec::new();
    let mut touched = false;
    for (bit, name) in metrics.iter().enumerate() {
        let (mut labels, mut dropped) = (BTreeMap::new(), false);
        for change in proto.metrics.iter().filter(|change| change.name.is_empty() || change.name == *name) {
            touched = true;
            dropped |= change.drop;
            labels.extend(change.tags_to_remove.iter().map(|label| (label.as_str(), None)));
            labels
                .extend(change.dimensions.iter().map(|(label, text)| (label.as_str(), Some(text.as_str()))));
        }
        match found.iter_mut().find(|(known, _)| *known == labels) {
            _ if dropped => {}
            Some((_, metrics)) => *metrics |= 1 << bit,
            None => found.push((labels, 1 << bit)),
        }
    }
    if !touched {
        return Vec::new();
    }
    if found.is_empty() {
        // All metrics are dropped.
        return vec![MetricOverride { metrics: 0, labels: Vec::new() }];
    }
    let change = |(labels, metrics): (BTreeMap<&str, Option<&str>>, u8)| {
        let labels = labels.into_iter();
        let labels = labels
            .map(|(label, text)| (label_name(label), text.and_then(|text| compiled.get(text).cloned())));
        MetricOverride { metrics, labels: labels.collect() }
    };
    found.into_iter().map(change).collect()
}

/// Returns a valid Prometheus label name: letters, digits and underscores, as in Envoy.
fn label_name(name: &str) -> Box<str> {
    let plain = name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    let digit = plain.starts_with(|c: char| c.is_ascii_digit());
    if digit { format!("_{plain}").into() } else { plain.into() }
}

#[cfg(test)]
mod tests {
    use skysail_xds::{envoy::pb::google::protobuf::Duration as DurationProto, istio::MetricConfig};

    use super::*;

    fn metric(name: &str, labels: &[(&str, &str)], remove: &[&str]) -> MetricConfig {
        MetricConfig {
            name: name.to_owned(),
            dimensions: labels
                .iter()
                .map(|(label, text)| ((*label).to_owned(), (*text).to_owned()))
                .collect(),
            tags_to_remove: remove.iter().map(|label| (*label).to_owned()).collect(),
            ..MetricConfig::default()
        }
    }

    #[test]
    fn metrics_with_the_same_labels_share_a_change() {
        let dropped = MetricConfig { drop: true, ..metric("request_bytes", &[], &[]) };
        let metrics = vec![
            metric("requests_total", &[("request_method", "request.method")], &["destination_port"]),
            dropped,
        ];
        let stats = translate(&StatsConfig { metrics, ..StatsConfig::default() }, true).unwrap();
        assert_eq!(stats.tcp_interval, TCP_INTERVAL);
        let settings: Vec<_> = stats
            .http
            .iter()
            .map(|change| {
                let labels = change.labels.iter();
                let labels = labels.map(|(name, value)| format!("{name} {}", value.is_some()));
                (change.metrics, labels.collect::<Vec<_>>())
            })
            .collect();
        let first = vec!["destination_port false".to_owned(), "request_method true".to_owned()];
        assert_eq!(settings, [(0b00_0001, first), (0b11_1010, vec![])]);
        assert!(stats.tcp.is_empty() && stats.expiry.is_none());

        let all = MetricConfig { drop: true, ..MetricConfig::default() };
        let stats = translate(&StatsConfig { metrics: vec![all], ..StatsConfig::default() }, true).unwrap();
        assert!(stats.http.len() == 1 && stats.http[0].metrics == 0 && stats.tcp[0].metrics == 0);
    }

    #[test]
    fn connections_are_not_counted_too_often() {
        let interval = |seconds, nanos| {
            let tcp_reporting_duration = Some(DurationProto { seconds, nanos });
            translate(&StatsConfig { tcp_reporting_duration, ..StatsConfig::default() }, true)
                .unwrap()
                .tcp_interval
        };
        assert_eq!(interval(0, 0), TCP_INTERVAL);
        assert_eq!(interval(0, 1), MIN_TCP_INTERVAL);
        assert_eq!(interval(7, 0), Duration::from_secs(7));
    }

    #[test]
    fn label_names_are_valid_for_prometheus() {
        for (name, taken) in [("a_B9", "a_B9"), ("my-tag.x\"\n", "my_tag_x__"), ("9a", "_9a"), ("é", "_")] {
            assert_eq!(&*label_name(name), taken);
        }
    }

    #[test]
    fn series_expire_as_with_rotation() {
        let seconds = |seconds| Some(DurationProto { seconds, nanos: 0 });
        let expiry = |rotation, graceful| {
            let config = StatsConfig {
                rotation_interval: rotation,
                graceful_deletion_interval: graceful,
                ..StatsConfig::default()
            };
            translate(&config, true).unwrap().expiry
        };
        assert_eq!(expiry(seconds(60), seconds(30)), Some(Duration::from_secs(90)));
        assert_eq!(expiry(None, seconds(30)), None);
        assert_eq!(expiry(seconds(0), None), None);
    }

    #[test]
    fn errors_name_the_field() {
        let refused = |metric| {
            let config = StatsConfig { metrics: vec![metric], ..StatsConfig::default() };
            translate(&config, true).unwrap_err().to_string()
        };
        let wrong = refused(metric("", &[("a", "request.method ==")], &[]));
        assert!(wrong.starts_with("metrics[0].dimensions[\"a\"]: ") && wrong.contains("line 1"), "{wrong}");
        let wrong = refused(metric("", &[("a", "node.id")], &[]));
        assert!(wrong.ends_with("uses an unknown attribute: node"), "{wrong}");
        assert_eq!(
            refused(metric("none", &[], &[])),
            "metrics[0]: there is no metric istio_none, so its change has no effect"
        );
    }
}
