//! Effective telemetry of a proxy on one side: Telemetries of the root namespace, of its own, and of its workload, over
//! the defaults of the mesh configuration. Later settings override earlier ones, by the rules of Istio.

use std::collections::{BTreeMap, BTreeSet};

use skysail_core::names::Direction;
use skysail_xds::{
    envoy::pb::envoy::{
        config::accesslog::v3::AccessLog,
        extensions::filters::network::http_connection_manager::v3::http_connection_manager::Tracing,
    },
    istio::{MetricConfig, StatsConfig},
};

use super::{
    access_log,
    pb::{Any, duration, pack},
    tracing::{self, Spans},
};
use crate::{
    ProxyView, Role, World,
    api::{
        Duration,
        telemetry::{AccessLogging, LogFilter, Metric, Metrics, Mode, ProviderRef, TagOperation, Telemetry},
    },
};

/// Telemetry of all filters of a proxy on one side.
pub(super) struct SideTelemetry {
    /// Access logs of filters.
    pub(super) logs: Vec<AccessLog>,
    /// Access logs of listeners, for connections without a matching filter chain.
    pub(super) listener_logs: Vec<AccessLog>,
    pub(super) tracing: Option<Tracing>,
    /// Whether the request id carries the sampling decision.
    pub(super) samples_by_request_id: bool,
    /// Configuration of Istio's metrics; `None` without any.
    pub(super) stats: Option<Any>,
}

impl SideTelemetry {
    /// Returns the telemetry of a proxy on one side.
    pub(super) fn new(world: &World, view: &ProxyView, direction: Direction) -> Self {
        // Gateways count as clients.
        let side = match (direction, view.role) {
            (Direction::Inbound, Role::Sidecar) => Mode::Server,
            _ => Mode::Client,
        };
        let telemetries = world.telemetries(&view.namespace, &view.labels);
        let specs = || telemetries.iter().map(|telemetry| &telemetry.spec);
        let logs = logs(world, specs().map(|spec| spec.access_logging.as_slice()), side);
        let spans = spans(world, specs(), side);
        let samples_by_request_id = spans.as_ref().is_none_or(|spans| spans.uses_request_id);
        let stats = metrics(world, specs(), side).map(|metrics| {
            let disable_host_header_fallback = side == Mode::Server || view.role == Role::Router;
            pack(&StatsConfig { disable_host_header_fallback, ..metrics })
        });
        Self {
            listener_logs: match world.mesh().disable_envoy_listener_log {
                true => Vec::new(),
                false => access_log::of_listener(logs.iter().cloned()),
            },
            logs,
            tracing: tracing::compile(world, view, spans.as_ref()),
            samples_by_request_id: samples_by_request_id
                || !spans.as_ref().is_some_and(|spans| tracing::can_report(world, spans)),
            stats,
        }
    }
}

fn names(providers: &[ProviderRef]) -> Vec<&str> {
    providers.iter().map(|provider| provider.name.as_str()).collect()
}

/// Setting of an access log.
#[derive(Clone, Default)]
struct Log<'a> {
    is_disabled: bool,
    filter: Option<&'a LogFilter>,
}

/// Returns the access logs of a side; those of the mesh configuration if no provider applies.
fn logs<'a>(
    world: &'a World,
    levels: impl Iterator<Item = &'a [AccessLogging]>,
    side: Mode,
) -> Vec<AccessLog> {
    let levels: Vec<&[AccessLogging]> = levels.filter(|level| !level.is_empty()).collect();
    let defaults: Vec<&str> =
        world.mesh().default_providers.access_logging.iter().map(String::as_str).collect();
    let known = providers_of_logs(&levels, &defaults, side);
    let mut any = false;
    let mut made = Vec::new();
    for (name, log) in known {
        let Some(provider) = world.provider(name) else { continue };
        let Some(compiled) = access_log::of_provider(world, &provider) else { continue };
        any = true;
        if !log.is_disabled {
            made.push(access_log::with_expression(compiled, log.filter));
        }
    }
    if any { made } else { access_log::of_mesh(world.mesh()) }
}

/// Returns the providers of access logs by name. The last level that names any decides which are in scope.
fn providers_of_logs<'a>(
    levels: &[&'a [AccessLogging]],
    defaults: &[&'a str],
    side: Mode,
) -> BTreeMap<&'a str, Log<'a>> {
    if levels.is_empty() {
        return defaults.iter().map(|name| (*name, Log::default())).collect();
    }
    let covers = |log: &AccessLogging| log.matched.unwrap_or_default().mode.covers(side);
    let mut in_scope: BTreeSet<&str> = defaults.iter().copied().collect();
    let mut filters: BTreeMap<&str, Option<&LogFilter>> = BTreeMap::new();
    for level in levels {
        let mut named = BTreeSet::new();
        for log in level.iter().filter(|log| covers(log)) {
            for name in names(&log.providers) {
                named.insert(name);
                filters.insert(name, log.filter.as_ref());
            }
        }
        if !named.is_empty() {
            in_scope = named;
        }
    }
    let mut inherited: Vec<&str> = defaults.to_vec();
    let mut made: BTreeMap<&str, Log<'_>> = BTreeMap::new();
    for log in levels.iter().copied().flatten() {
        if !log.providers.is_empty() {
            inherited = names(&log.providers);
        }
        for name in inherited.iter().filter(|name| in_scope.contains(*name) && covers(log)) {
            let filter = filters.get(name).copied().flatten();
            made.insert(name, Log { is_disabled: log.disabled.unwrap_or_default(), filter });
        }
    }
    made
}

/// Returns the settings of traces; `None` if nothing configures any.
fn spans<'a>(world: &'a World, specs: impl Iterator<Item = &'a Telemetry>, side: Mode) -> Option<Spans<'a>> {
    let default = world.mesh().default_providers.tracing.first();
    let all: Vec<_> = specs.flat_map(|spec| &spec.tracing).collect();
    if all.is_empty() && default.is_none() {
        return None;
    }
    let mut spans = Spans::new(default.map(String::as_str));
    for one in all.into_iter().filter(|one| one.matched.unwrap_or_default().mode.covers(side)) {
        if let Some(provider) = one.providers.first() {
            spans.provider = Some(&provider.name);
        }
        spans.is_disabled = one.disable_span_reporting.unwrap_or(spans.is_disabled);
        spans.tags = one.custom_tags.as_ref().or(spans.tags);
        spans.sampling = one.random_sampling_percentage.or(spans.sampling);
        spans.uses_request_id = one.use_request_id_for_trace_sampling.unwrap_or(spans.uses_request_id);
        spans.has_istio_tags = one.enable_istio_tags.unwrap_or(spans.has_istio_tags);
        spans.has_no_propagation = one.disable_context_propagation.unwrap_or(spans.has_no_propagation);
    }
    Some(spans)
}

/// Change to a metric.
#[derive(Default)]
struct Override<'a> {
    is_disabled: bool,
    tags: BTreeMap<&'a str, (TagOperation, &'a str)>,
}

/// Returns the changes to metrics, or `None` if none are recorded.
fn metrics<'a>(
    world: &'a World,
    specs: impl Iterator<Item = &'a Telemetry>,
    side: Mode,
) -> Option<StatsConfig> {
    let all: Vec<&Metrics> = specs.flat_map(|spec| &spec.metrics).collect();
    let defaults: Vec<&str> = world.mesh().default_providers.metrics().collect();
    let last = all.iter().rev().find(|metrics| !metrics.providers.is_empty());
    let in_scope = last.map_or_else(|| defaults.clone(), |metrics| names(&metrics.providers));
    // All proxies have one set of metrics, so one provider for Prometheus is enough.
    let is_prometheus =
        |name: &&&str| world.provider(name).is_some_and(|provider| provider.prometheus.is_some());
    let provider = *in_scope.iter().filter(is_prometheus).min()?;
    let mut inherited = defaults;
    let mut interval: Option<Duration> = None;
    let mut is_disabled = false;
    let mut overrides: BTreeMap<&str, Override<'_>> = BTreeMap::new();
    for metrics in all {
        if !metrics.providers.is_empty() {
            inherited = names(&metrics.providers);
        }
        if !inherited.contains(&provider) {
            continue;
        }
        interval = metrics.reporting_interval.or(interval);
        for one in &metrics.overrides {
            let (mode, custom, metric) = one
                .matched
                .as_ref()
                .map_or((Mode::default(), "", None), |of| (of.mode, of.custom_metric.as_str(), of.metric));
            if !mode.covers(side) {
                continue;
            }
            let is_for_all = custom.is_empty() && metric.is_none_or(|metric| metric == Metric::AllMetrics);
            if is_for_all && one.disabled == Some(true) {
                is_disabled = true;
                continue;
            }
            is_disabled = false;
            let named = Metric::ALL.iter().filter(|(_, of, _)| is_for_all || metric == Some(*of));
            let named: Vec<&str> = match custom {
                "" => named.map(|(name, ..)| *name).collect(),
                custom => vec![custom],
            };
            for name in named {
                let change = overrides.entry(name).or_default();
                change.is_disabled = one.disabled.unwrap_or(change.is_disabled);
                let tags = one.tag_overrides.iter();
                change.tags.extend(tags.map(|(tag, to)| (&**tag, (to.operation, &*to.value))));
            }
        }
    }
    (!is_disabled).then(|| StatsConfig {
        tcp_reporting_duration: interval.map(|interval| duration(interval.0)),
        metrics: overrides.into_iter().map(|(name, change)| metric(name, &change)).collect(),
        ..Default::default()
    })
}

fn metric(name: &str, change: &Override<'_>) -> MetricConfig {
    let known = Metric::ALL.iter().find(|(known, ..)| *known == name);
    let removed = change.tags.iter().filter(|(_, (operation, _))| *operation == TagOperation::Remove);
    let set = change.tags.iter().filter(|(_, (operation, _))| *operation == TagOperation::Upsert);
    MetricConfig {
        name: known.map_or(name, |(.., name)| name).to_owned(),
        dimensions: set.map(|(tag, (_, value))| ((*tag).to_owned(), (*value).to_owned())).collect(),
        tags_to_remove: removed.map(|(tag, _)| (*tag).to_owned()).collect(),
        drop: change.is_disabled,
        ..Default::default()
    }
}
