//! What `skysail` shows: tables of pods and of edges.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets::NOTHING};
use skysail_sandbox::rundir::State;

use crate::traffic::Edge;

/// How a result is printed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
pub(crate) enum Output {
    /// For people.
    #[default]
    Text,
    /// For scripts.
    Json,
}

/// A table of pods.
pub(crate) fn pods(mesh: &State) -> String {
    let mut table = table(&["NAMESPACE", "POD", "IP", "SIDECAR", "RESTARTS", "READY"]);
    for pod in &mesh.pods {
        let ready = pod.ready.as_ref().map_or_else(|problem| format!("no: {problem}"), |()| "yes".to_owned());
        let sidecar = if pod.sidecar { "yes" } else { "no" };
        table.add_row([&pod.namespace, &pod.name, &pod.address, sidecar, &pod.restarts.to_string(), &ready]);
    }
    table.to_string()
}

/// A table of edges.
pub(crate) fn edges(edges: &[Edge]) -> String {
    let mut table = table(&["FROM", "TO", "REQ/S", "SUCCESS", "DENIED", "P50", "P99", "MTLS"]);
    for column in 2..7 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for edge in edges {
        let time = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1} ms"));
        let success =
            if edge.requests == 0 { "-".to_owned() } else { format!("{:.1} %", edge.success_percent) };
        let mtls = match edge.mtls {
            Some(true) => "yes",
            Some(false) => "no",
            None => "-",
        };
        table.add_row([
            edge.source.clone(),
            edge.destination.clone(),
            format!("{:.1}", edge.requests_per_second),
            success,
            edge.denied.to_string(),
            time(edge.p50_ms),
            time(edge.p99_ms),
            mtls.to_owned(),
        ]);
    }
    table.to_string()
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(header);
    table
}
