//! The columns of `benchmark.csv`, which Istio's `perf/benchmark` tools write and plot.
//!
//! Latencies are in µs, CPU in thousandths of a CPU, memory in MiB. The label of a row ends with
//! `qps_RATE_c_CONNECTIONS_BYTES_MODE_PATH`, where PATH is `baseline`, `serveronly`, `clientonly`, `both` or `ingress`.

use std::{collections::BTreeMap, fmt::Write as _, path::Path};

use anyhow::{Context as _, ensure};

use super::{
    ScenarioResult,
    format::{Published, PublishedRow},
};
use crate::{
    access_log::AccessLog,
    load::LoadProtocol,
    peers::Peer,
    percentiles,
    report::{LatencySettings, Series},
    results, stage,
    topology::Topology,
    variant::Variant,
};

/// Maximum size of a file in bytes.
const MAX_FILE: u64 = 16 << 20;
/// Header of the file.
const HEADER: &str = "StartTime,ActualDuration,Labels,NumThreads,ActualQPS,p50,p90,p99,p999,\
    cpu_mili_avg_istio_proxy_fortioclient,cpu_mili_avg_istio_proxy_fortioserver,\
    cpu_mili_avg_istio_proxy_istio-ingressgateway,mem_Mi_avg_istio_proxy_fortioclient,\
    mem_Mi_avg_istio_proxy_fortioserver,mem_Mi_avg_istio_proxy_istio-ingressgateway";
/// Columns of latencies, with the names of the figures in results.
const LATENCIES: [(&str, &str); 4] = [
    ("p50", "latency_p50_us"),
    ("p90", "latency_p90_us"),
    ("p99", "latency_p99_us"),
    ("p999", "latency_p99_9_us"),
];
/// Sidecars and the gateway: their names in columns, in the names of figures, and in the parts of a measurement.
const SIDECARS: [(&str, &str, &str); 3] = [
    ("fortioclient", "client_proxy", "client-proxy"),
    ("fortioserver", "server_proxy", "server-proxy"),
    ("istio-ingressgateway", "gateway_proxy", "gateway-proxy"),
];
/// CPU in thousandths up to which a sidecar counts as idle. Its CPU and memory are then ignored.
const IDLE: f64 = 5.0;

/// Returns the header, and a line for each turn with a measurement. `StartTime` of each line is the start of the run. The
/// cell of a percentile that too few requests support is empty.
pub(super) fn write(result: &ScenarioResult) -> String {
    let settings = &result.report.settings;
    let start = stage::rfc3339(stage::utc(result.report.started), "");
    let mut text = format!("{HEADER}\n");
    for run in &result.report.runs {
        let Some(measurement) = &run.measurement else { continue };
        let label = format!(
            "{}-{}_qps_{}_c_{}_{}_{}_{}",
            result.scenario.name,
            run.round,
            settings.qps,
            run.connections,
            settings.payload,
            mode_of(run.series, settings.protocol),
            path_of(run.series.topology)
        );
        let latency = &measurement.latency_us;
        let mut cells = vec![
            start.clone(),
            settings.seconds.to_string(),
            label,
            run.connections.to_string(),
            format!("{:.1}", measurement.answers_per_second),
        ];
        let values = [latency.p50, latency.p90, latency.p99, latency.p99_9];
        cells.extend(LATENCIES.iter().zip(values).map(|((_, metric), value)| {
            let is_supported = percentiles::is_supported(metric, measurement.answered());
            if is_supported { format!("{value:.0}") } else { String::new() }
        }));
        let part = |name: &str| measurement.parts.get(name);
        let cpu = |name: &str| {
            part(name).map(|cost| cost.cpu_us_per_request * measurement.answers_per_second / 1e3)
        };
        let memory = |name: &str| Some(part(name)?.memory?.rss_kb as f64 / 1_024.0);
        let sidecars = || SIDECARS.iter().map(|(_, _, part)| *part);
        for value in sidecars().map(cpu).chain(sidecars().map(memory)) {
            cells.push(value.map_or_else(|| "0".to_owned(), |value| format!("{value:.3}")));
        }
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}", cells.join(","));
    }
    text
}

/// Reads the rows of a file that have the rate and the payload of a run, as published figures.
///
/// # Errors
/// The file cannot be read, lacks a column, has a broken row, or has no row of this load.
pub(super) fn read(file: &Path, settings: &LatencySettings) -> anyhow::Result<Vec<Published>> {
    let name = file.display();
    let text = results::read_text(file, MAX_FILE).with_context(|| format!("cannot read {name}"))?;
    let source = file.file_name().unwrap_or_default().to_string_lossy();
    let published = parse(&text, &source, settings).with_context(|| format!("cannot use {name}"))?;
    ensure!(
        !published.is_empty(),
        "{name} has no row with {} requests/s and {} bytes; measure with its rate and size, or leave the file out",
        settings.qps,
        settings.payload
    );
    Ok(published)
}

fn parse(text: &str, source: &str, settings: &LatencySettings) -> anyhow::Result<Vec<Published>> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap_or_default().split(',').map(str::trim).collect();
    for needed in ["Labels", "NumThreads", "p50", "p90", "p99"] {
        ensure!(
            names.contains(&needed),
            "line 1: no column {needed}; the file must have those of Istio's benchmark.csv"
        );
    }
    let mut all: BTreeMap<(Topology, String), Vec<PublishedRow>> = BTreeMap::new();
    for (index, line) in lines.enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let cells: BTreeMap<&str, &str> = names.iter().copied().zip(line.split(',').map(str::trim)).collect();
        let line = index + 2;
        ensure!(
            cells.len() == names.len(),
            "line {line}: {} cells, but {} columns",
            cells.len(),
            names.len()
        );
        let number = |column: &str| -> anyhow::Result<Option<f64>> {
            let Some(cell) = cells.get(column).filter(|cell| !cell.is_empty()) else { return Ok(None) };
            let value: f64 =
                cell.parse().with_context(|| format!("line {line}: {column} {cell:?} is not a number"))?;
            ensure!((0.0..1e12).contains(&value), "line {line}: {column} {cell} is out of bounds");
            Ok(Some(value))
        };
        let label = cells.get("Labels").copied().unwrap_or_default();
        let Some((mode, topology)) = mode_and_topology(label, settings) else { continue };
        let connections = number("NumThreads")?.map(|connections| connections as usize);
        let mut metrics = BTreeMap::new();
        for (column, metric) in LATENCIES {
            metrics.extend(number(column)?.map(|value| (metric.to_owned(), value)));
        }
        for (container, part, _) in SIDECARS {
            let Some(cpu) =
                number(&format!("cpu_mili_avg_istio_proxy_{container}"))?.filter(|cpu| *cpu > IDLE)
            else {
                continue;
            };
            metrics.insert(format!("cpu_{part}_us_per_request"), cpu * 1e3 / f64::from(settings.qps));
            let memory = number(&format!("mem_Mi_avg_istio_proxy_{container}"))?;
            metrics.extend(memory.map(|memory| (format!("rss_{part}_kb"), memory * 1_024.0)));
        }
        all.entry((topology, mode)).or_default().push(PublishedRow { connections, metrics });
    }
    let published = all.into_iter().map(|((topology, mode), mut rows)| {
        rows.sort_by_key(|row| row.connections);
        Published {
            system: mode,
            source: source.to_owned(),
            topology,
            access_log: AccessLog::None,
            variant: Variant::Usual,
            rows,
        }
    });
    Ok(published.collect())
}

/// Returns the mode and the topology of a label; `None` for another rate or payload, or an unknown path.
fn mode_and_topology(label: &str, settings: &LatencySettings) -> Option<(String, Topology)> {
    let (_, load) = label.split_once("_qps_")?;
    let (rate, rest) = load.split_once("_c_")?;
    let mut rest = rest.splitn(3, '_');
    let (_, payload) = (rest.next()?, rest.next()?);
    let (mode, path) = rest.next()?.rsplit_once('_')?;
    let is_same = rate.parse() == Ok(settings.qps) && payload.parse() == Ok(settings.payload);
    let topology = Topology::ALL.into_iter().find(|topology| path_of(*topology) == path)?;
    is_same.then(|| (mode.to_owned(), topology))
}

/// Returns the MODE of a label: the proxy, its variant, the destination of its access log, and the protocol if it is not
/// HTTP/1.1, as in `envoy-stdout` and `envoy-grpc`.
fn mode_of(series: Series, protocol: LoadProtocol) -> String {
    let mode = series.variant.after(series.peer.map_or("none", Peer::name));
    let mode = series.access_log.after(&mode).replace(", ", "-");
    if protocol.is_http1() { mode } else { format!("{mode}-{}", protocol.name()) }
}

/// Returns the PATH of a label. Istio has none for a client that uses mutual TLS without a sidecar: `servermtls` is
/// ours.
fn path_of(topology: Topology) -> &'static str {
    match topology {
        Topology::Baseline => "baseline",
        Topology::ClientSidecar => "clientonly",
        Topology::ServerSidecar => "serveronly",
        Topology::ServerMtls => "servermtls",
        Topology::BothSidecars => "both",
        Topology::Ingress => "ingress",
    }
}
