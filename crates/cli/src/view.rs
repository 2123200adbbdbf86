//! Output formats: tables, and JSON for scripts, whose fields `docs/scripting.md` lists.

use comfy_table::{ContentArrangement, Table, presets::NOTHING};
use serde::Serialize;
use skysail_sandbox::rundir::{Phase, PodState, ProgramState, State};

/// Output format of a result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, serde::Deserialize)]
pub(crate) enum Output {
    /// Tables and sentences.
    #[default]
    Text,
    /// JSON, for scripts.
    Json,
}

/// Output of `skysail status --output json`.
#[derive(Debug, Serialize)]
pub(crate) struct MeshStatus<'a> {
    mesh: &'a str,
    control: Option<u32>,
    pods: Vec<RunningPod<'a>>,
}

#[derive(Debug, Serialize)]
struct RunningPod<'a> {
    #[serde(flatten)]
    pod: Pod<'a>,
    programs: &'a [ProgramState],
}

/// A pod in JSON output.
#[derive(Debug, Serialize)]
pub(crate) struct Pod<'a> {
    namespace: &'a str,
    name: &'a str,
    kind: &'a str,
    workload: &'a str,
    service_account: &'a str,
    address: &'a str,
    sidecar: bool,
    phase: Phase,
    ready: bool,
    reason: Option<&'a str>,
    restarts: u32,
}

impl<'a> From<&'a PodState> for Pod<'a> {
    fn from(pod: &'a PodState) -> Self {
        Self {
            namespace: &pod.namespace,
            name: &pod.name,
            kind: &pod.kind,
            workload: &pod.workload,
            service_account: &pod.account,
            address: &pod.address,
            sidecar: pod.sidecar,
            phase: pod.phase,
            ready: pod.ready.is_ok(),
            reason: pod.ready.as_ref().err().map(String::as_str),
            restarts: pod.restarts,
        }
    }
}

/// Returns a running mesh for JSON output.
pub(crate) fn status(mesh: &State) -> MeshStatus<'_> {
    let pods = mesh.pods.iter().map(|pod| RunningPod { pod: pod.into(), programs: &pod.programs });
    MeshStatus { mesh: &mesh.name, control: mesh.control, pods: pods.collect() }
}

/// Returns a table of pods.
pub(crate) fn pods(mesh: &State) -> String {
    let mut table = table(&["NAMESPACE", "POD", "IP", "SIDECAR", "RESTARTS", "READY"]);
    for pod in &mesh.pods {
        let ready = match (&pod.ready, pod.phase) {
            (_, Phase::Succeeded) => "completed".to_owned(),
            (Err(problem), _) => format!("no: {problem}"),
            (Ok(()), _) => "yes".to_owned(),
        };
        let sidecar = if pod.sidecar { "yes" } else { "no" };
        table.add_row([&pod.namespace, &pod.name, &pod.address, sidecar, &pod.restarts.to_string(), &ready]);
    }
    table.to_string()
}

/// Returns a table of root certificates.
pub(crate) fn roots(rows: impl Iterator<Item = [String; 5]>) -> String {
    let mut table = table(&["ROOT", "SERIAL", "SIGNS", "TRUSTED", "ENDS IN"]);
    table.add_rows(rows);
    table.to_string()
}

/// Returns a table of proxies that hold an object's resources.
pub(crate) fn deliveries(rows: impl Iterator<Item = [String; 3]>) -> String {
    let mut table = table(&["PROXY", "STATE", "ERROR"]);
    table.add_rows(rows);
    table.to_string()
}

/// Formats a duration in the largest unit of which it has at least two.
pub(crate) fn time(seconds: u64) -> String {
    let units = [(24 * 3600, "d"), (3600, "h"), (60, "m"), (1, "s")];
    let (unit, name) = units.into_iter().find(|(unit, _)| seconds >= 2 * unit).unwrap_or((1, "s"));
    format!("{}{name}", seconds / unit)
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(header);
    table
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_has_the_documented_fields_only() {
        let mesh = json!({
            "name": "shop", "process": 5, "control": null,
            "pods": [{
                "namespace": "shop", "name": "web-x", "kind": "Deployment", "workload": "web",
                "account": "default", "address": "10.244.0.2", "sidecar": false,
                "ready": { "Err": "starting" }, "restarts": 0, "logs": "/run/logs",
                "programs": [{ "name": "proxy", "process": 7 }], "handles": null,
            }],
        });
        let mesh: State = serde_json::from_value(mesh).unwrap();
        let expected = json!({
            "mesh": "shop",
            "control": null,
            "pods": [{
                "namespace": "shop", "name": "web-x", "kind": "Deployment", "workload": "web",
                "service_account": "default", "address": "10.244.0.2", "sidecar": false,
                "phase": "Running", "ready": false, "reason": "starting", "restarts": 0,
                "programs": [{ "name": "proxy", "process": 7 }],
            }],
        });
        assert_eq!(serde_json::to_value(status(&mesh)).unwrap(), expected);
    }
}
