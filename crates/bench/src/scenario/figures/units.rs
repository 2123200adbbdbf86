//! What figures measure, in words, and their units. Titles of columns in tables are short; plots spell them out.

use crate::scenario::format::Figure;

/// What a figure measures, by its name in results.
const MEASURED: &[(&str, &str)] = &[
    ("latency_p50_us", "P50 of latency"),
    ("latency_p90_us", "P90 of latency"),
    ("latency_p99_us", "P99 of latency"),
    ("latency_p99_9_us", "P99.9 of latency"),
    ("added_p50_us", "P50 of latency over the baseline"),
    ("added_p90_us", "P90 of latency over the baseline"),
    ("added_p99_us", "P99 of latency over the baseline"),
    ("cpu_client_proxy_us_per_request", "CPU time of the client's sidecar"),
    ("cpu_gateway_proxy_us_per_request", "CPU time of the gateway"),
    ("cpu_server_proxy_us_per_request", "CPU time of the server's sidecar"),
    ("cpu_proxies_us_per_request", "CPU time of all sidecars"),
    ("cpu_ends_us_per_request", "CPU time of client and server"),
    ("cpu_access_log_us_per_request", "CPU time of sidecars for the access log"),
    ("cpu_collectors_us_per_request", "CPU time of log collectors"),
    ("cpu_variant_us_per_request", "CPU time over the usual configuration"),
    ("cpu_authorizers_us_per_request", "CPU time of the authorizer"),
    ("cpu_sidecars_us_per_request", "CPU time of all sidecars"),
    ("cpu_services_us_per_request", "CPU time of services"),
    ("cpu_telemetry_us_per_request", "CPU time of sidecars for telemetry"),
    ("cpu_idle_sidecar_us_per_second", "CPU time of an idle sidecar"),
    ("cpu_control_percent", "CPU time of the control plane"),
    ("cpu_sidecars_us_per_call", "CPU time of sidecars and gateway"),
    ("cpu_services_us_per_call", "CPU time of services"),
    ("cpu_database_us_per_call", "CPU time of the database"),
    ("rss_client_proxy_kb", "Memory of the client's sidecar"),
    ("rss_gateway_proxy_kb", "Memory of the gateway"),
    ("rss_server_proxy_kb", "Memory of the server's sidecar"),
    ("rss_proxies_kb", "Memory of both sidecars"),
    ("rss_sidecar_kb", "Memory of a sidecar"),
    ("rss_sidecars_kb", "Memory of all sidecars"),
    ("rss_services_kb", "Memory of all services"),
    ("rss_control_kb", "Memory of the control plane"),
    ("cost_month", "Price of the sidecars' CPU time"),
    ("ready_seconds", "Time until the mesh is ready"),
    ("failed_percent", "Failed requests"),
    ("errors_connect_percent", "no connection"),
    ("errors_closed_percent", "connection closed"),
    ("errors_timeout_percent", "timeout"),
    ("errors_unsent_percent", "not sent"),
    ("errors_500_percent", "status 500"),
    ("errors_503_percent", "status 503"),
    ("errors_504_percent", "status 504"),
    ("errors_other_percent", "other errors"),
    ("limit_calls_per_second", "Throughput within the latency limit"),
    ("users_calls_per_second", "Throughput of all users"),
    ("connect_seconds", "Time until all sidecars are configured"),
    ("connect_p99_ms", "P99 of the time until a sidecar is configured"),
    ("connect_cpu_ms", "Control plane's CPU time to configure a sidecar"),
    ("endpoint_last_ms", "Time until the last sidecar has a changed endpoint"),
    ("endpoint_cpu_ms", "Control plane's CPU time for a changed endpoint"),
    ("route_last_ms", "Time until the last sidecar has a changed route"),
    ("route_cpu_ms", "Control plane's CPU time for a changed route"),
    ("service_last_ms", "Time until the last sidecar has a changed service"),
    ("service_cpu_ms", "Control plane's CPU time for a changed service"),
    ("policy_last_ms", "Time until the last sidecar has a changed policy"),
    ("policy_cpu_ms", "Control plane's CPU time for a changed policy"),
    ("idle_mb", "Memory of the control plane before sidecars connect"),
    ("resident_mb", "Memory of the control plane with all sidecars"),
    ("peak_mb", "Maximum memory of the control plane"),
    ("left_mb", "Memory of the control plane after all have left"),
    ("churn_interval_ms", "Time between two sidecars that reconnect"),
    ("churn_p99_ms", "P99 of the time until a sidecar has reconnected"),
    ("churn_cpu_ms", "Control plane's CPU time for a reconnection"),
    ("most_sidecars", "Largest number of sidecars within the limits"),
    ("queries_skysail_per_second", "DNS queries of Skysail's control plane"),
    ("queries_envoys_per_second", "DNS queries of all Envoys"),
    ("parse_cpu_us", "parse"),
    ("index_cpu_us", "index"),
    ("services_cpu_us", "services"),
    ("routes_cpu_us", "routes"),
    ("names_cpu_us", "names"),
    ("own_cpu_us", "own"),
    ("compile_cpu_us", "CPU time to compile all resources"),
    ("parse_time_us", "parse"),
    ("index_time_us", "index"),
    ("compile_time_us", "compile"),
    ("resources", "Number of all resources"),
    ("bytes", "Size of all resources"),
];

/// Ends of the names of figures, with the unit for a divisor. The first that fits holds.
const UNITS: &[(&str, f64, &str)] = &[
    ("_us_per_request", 1.0, "µs for a request"),
    ("_us_per_call", 1.0, "µs for a call"),
    ("_us_per_second", 1.0, "µs a second"),
    ("_calls_per_second", 1.0, "calls/s"),
    ("_per_second", 1.0, "queries/s"),
    ("control_percent", 1.0, "% of one CPU"),
    ("_percent", 1.0, "% of requests"),
    ("_us", 1.0, "µs"),
    ("_us", 1e3, "ms"),
    ("_ms", 1.0, "ms"),
    ("_seconds", 1.0, "s"),
    ("_kb", 1_024.0, "MB"),
    ("_mb", 1.0, "MB"),
    ("bytes", 1e3, "kB"),
    ("resources", 1.0, "resources"),
    ("_sidecars", 1.0, "sidecars"),
    ("cost_month", 1.0, "$ a month for 1,000,000 requests/s"),
];

/// Returns the unit of a figure; empty if its name has no known end.
pub(in crate::scenario) fn unit(figure: &Figure) -> &'static str {
    let fits = |(end, divisor, _): &&(&str, f64, &str)| {
        figure.metric.ends_with(end) && (figure.unit - divisor).abs() < f64::EPSILON
    };
    UNITS.iter().find(fits).map_or("", |(_, _, unit)| unit)
}

/// Returns what a figure measures, without its unit. A figure that has no words yet has the title of its column.
pub(in crate::scenario) fn measured(figure: &Figure) -> &'static str {
    let of = MEASURED.iter().find(|(metric, _)| *metric == figure.metric);
    of.map_or_else(|| figure.title.trim_end_matches(unit(figure)).trim_end(), |(_, words)| words)
}

/// Returns what a figure measures, with its unit, as in `P99 of latency, µs`.
pub(in crate::scenario) fn title(figure: &Figure) -> String {
    with_unit(measured(figure), figure)
}

/// Returns a text with the unit of a figure, unless the text has it already.
pub(in crate::scenario) fn with_unit(text: &str, figure: &Figure) -> String {
    match unit(figure) {
        "" => text.to_owned(),
        unit if text.split(' ').any(|word| word == unit) => text.to_owned(),
        unit => format!("{text}, {unit}"),
    }
}

/// Returns true if all figures are percentiles of a latency. Each has a plot of its own.
pub(in crate::scenario) fn are_percentiles(figures: &[Figure]) -> bool {
    figures.iter().all(|figure| figure.metric.starts_with("latency_p"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::format::{Measure, figure};

    #[test]
    fn figures_of_traffic_have_words_and_a_unit() {
        let groups = [
            Measure::Latency,
            Measure::AddedLatency,
            Measure::Cpu,
            Measure::Memory,
            Measure::AccessLog,
            Measure::Variants,
        ];
        for figure in groups.iter().flat_map(|group| group.figures()) {
            assert!(!unit(figure).is_empty(), "{}", figure.metric);
            assert!(MEASURED.iter().any(|(metric, _)| *metric == figure.metric), "{}", figure.metric);
        }
    }

    #[test]
    fn the_unit_depends_on_the_divisor() {
        let titles = [
            figure("latency_p99_us", "P99 µs", 1.0, 0),
            figure("latency_p99_us", "P99 ms", 1e3, 2),
            figure("connect_seconds", "all configured s", 1.0, 2),
            figure("cpu_sidecars_us_per_request", "sidecars CPU µs", 1.0, 0),
            figure("most_sidecars", "most sidecars", 1.0, 0),
            figure("cds_bytes", "CDS kB", 1e3, 1),
        ]
        .map(|figure| title(&figure));
        let expected = [
            "P99 of latency, µs",
            "P99 of latency, ms",
            "Time until all sidecars are configured, s",
            "CPU time of all sidecars, µs for a request",
            "Largest number of sidecars within the limits",
            "CDS, kB",
        ];
        assert_eq!(titles, expected);
    }
}
