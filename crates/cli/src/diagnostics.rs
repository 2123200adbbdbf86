//! What the control plane finds wrong with the configuration, and whether all sidecars have it, asked for from its
//! admin page.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, time::Duration};

use serde::Deserialize;
use skysail_sandbox::http;

/// One finding, as shown.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Diagnostic {
    /// `error`, `warning` or `info`.
    pub(crate) severity: String,
    /// File, line, object, field, problem and remedy.
    pub(crate) text: String,
}

const LIMIT: Duration = Duration::from_secs(2);

/// A finding as the control plane writes it.
#[derive(Debug, Deserialize)]
struct Finding {
    file: String,
    line: u32,
    severity: String,
    object: String,
    field: String,
    message: String,
    remedy: String,
}

/// Asks for the current findings; nothing if the control plane does not answer.
pub(crate) async fn ask(control: SocketAddr) -> Option<Vec<Diagnostic>> {
    let (status, body) = http::get(control, "/debug/config_errors", LIMIT).await.ok()?;
    let findings: Vec<Finding> = serde_json::from_str(&body).ok().filter(|_| status == 200)?;
    Some(findings.into_iter().map(Diagnostic::from).collect())
}

/// How a sidecar gets on, by type of resource.
#[derive(Debug, Deserialize)]
struct Client {
    types: BTreeMap<String, Progress>,
}

#[derive(Debug, Deserialize)]
struct Progress {
    synced: bool,
}

/// Whether the control plane has read these files as they are now, and every one of so many sidecars has taken all
/// it was sent.
pub(crate) async fn settled(control: SocketAddr, files: &[PathBuf], sidecars: usize) -> bool {
    let Ok((200, body)) = http::get(control, "/debug/config_files", LIMIT).await else { return false };
    let taken: BTreeMap<PathBuf, u64> = serde_json::from_str(&body).unwrap_or_default();
    let read = |file: &PathBuf| {
        let text = std::fs::read_to_string(file).ok();
        text.is_some_and(|text| taken.get(file) == Some(&skysail_control::fingerprint(&text)))
    };
    if !files.iter().all(read) {
        return false;
    }
    let Ok((200, body)) = http::get(control, "/debug/syncz", LIMIT).await else { return false };
    let clients: Vec<Client> = serde_json::from_str(&body).unwrap_or_default();
    clients.len() >= sidecars && clients.iter().all(|client| client.types.values().all(|kind| kind.synced))
}

impl From<Finding> for Diagnostic {
    fn from(finding: Finding) -> Self {
        let Finding { file, line, severity, object, field, message, remedy } = finding;
        let place = if line > 0 { format!("{file}:{line}") } else { file };
        let parts = [place, object, field, message].into_iter().filter(|part| !part.is_empty());
        let mut text = parts.collect::<Vec<_>>().join(": ");
        if !remedy.is_empty() {
            text = format!("{text} ({remedy})");
        }
        Self { severity, text }
    }
}

impl Diagnostic {
    /// Whether it makes the mesh unhealthy.
    pub(crate) fn is_error(&self) -> bool {
        self.severity == "error"
    }
}
