//! Diagnostics of the control plane about the configuration, from its admin page.

use std::{net::SocketAddr, time::Duration};

use serde::Deserialize;
use skysail_sandbox::http;

/// A diagnostic as printed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Diagnostic {
    /// `error`, `warning` or `info`.
    pub(crate) severity: String,
    /// File, line, object, field, problem and remedy.
    pub(crate) text: String,
}

const TIMEOUT: Duration = Duration::from_secs(2);

/// An entry of `/debug/config_errors`.
#[derive(Debug, Deserialize)]
struct Finding {
    file: String,
    line: u32,
    severity: String,
    object: String,
    field: String,
    message: String,
    remedy: String,
    /// Empty in the answers of older control planes.
    #[serde(default)]
    code: String,
}

/// Requests the current diagnostics; `None` if the control plane does not answer.
pub(crate) async fn request(control: SocketAddr) -> Option<Vec<Diagnostic>> {
    let (status, body) = http::get(control, "/debug/config_errors", TIMEOUT).await.ok()?;
    let findings: Vec<Finding> = serde_json::from_str(&body).ok().filter(|_| status == 200)?;
    Some(findings.into_iter().map(Diagnostic::from).collect())
}

impl From<Finding> for Diagnostic {
    fn from(finding: Finding) -> Self {
        let Finding { file, line, severity, object, field, message, remedy, code } = finding;
        let location = if line > 0 { format!("{file}:{line}") } else { file };
        let parts = [location, object, field, message].into_iter().filter(|part| !part.is_empty());
        let mut text = parts.collect::<Vec<_>>().join(": ");
        if !remedy.is_empty() {
            text = format!("{text} ({remedy})");
        }
        if !code.is_empty() {
            text = format!("{text} [{code}]");
        }
        Self { severity, text }
    }
}

impl From<skysail_model::Diagnostic> for Diagnostic {
    fn from(found: skysail_model::Diagnostic) -> Self {
        let skysail_model::Diagnostic { file, line, severity, object, field, message, remedy, code } = found;
        let (severity, code) = (severity.to_string(), code.to_string());
        Finding { file, line, severity, object, field, message, remedy, code }.into()
    }
}

impl Diagnostic {
    /// Returns whether it makes the mesh unhealthy.
    pub(crate) fn is_error(&self) -> bool {
        self.severity == "error"
    }
}
