//! What the control plane finds wrong with the configuration, asked for from its admin page.

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;
use skysail_sandbox::http;

/// One finding, as shown.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Diagnostic {
    /// Whether it makes the mesh unhealthy.
    pub(crate) error: bool,
    /// File, line, object, field, problem and remedy.
    pub(crate) text: String,
}

const LIMIT: Duration = Duration::from_secs(2);

/// Asks for the current findings; nothing if the control plane does not answer.
pub(crate) async fn ask(control: SocketAddr) -> Option<Vec<Diagnostic>> {
    let (status, body) = http::get(control, "/debug/config_errors", LIMIT).await.ok()?;
    let body: Value = serde_json::from_str(&body).ok().filter(|_| status == 200)?;
    let list = body.as_array().or_else(|| body["diagnostics"].as_array()).cloned().unwrap_or_default();
    Some(list.iter().map(read).collect())
}

fn read(item: &Value) -> Diagnostic {
    let severity = item["severity"].as_str().unwrap_or("error").to_lowercase();
    let text = item["text"].as_str().or_else(|| item["display"].as_str()).or_else(|| item.as_str());
    Diagnostic { error: severity == "error", text: text.map_or_else(|| item.to_string(), str::to_owned) }
}
