//! Diagnostics of the control plane about the configuration, from its admin page.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Duration,
};

use serde::{Deserialize, de::DeserializeOwned};
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
/// Maximum number of different messages of proxies that are shown.
const MAX_REFUSALS: usize = 20;

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

/// A proxy in `/debug/syncz`.
#[derive(Debug, Deserialize)]
struct ProxyState {
    /// Node id, `sidecar~ADDRESS~POD.NAMESPACE~…`.
    proxy: String,
    types: BTreeMap<String, TypeState>,
}

/// State of a type of resources at a proxy.
#[derive(Debug, Deserialize)]
struct TypeState {
    /// Error message of the last response, if the proxy has rejected it.
    #[serde(default)]
    error: String,
}

/// Requests the current diagnostics, and what proxies refuse; `None` if the control plane does not answer.
pub(crate) async fn request(control: SocketAddr) -> Option<Vec<Diagnostic>> {
    let findings: Vec<Finding> = page(control, "/debug/config_errors").await?;
    let proxies: Vec<ProxyState> = page(control, "/debug/syncz").await.unwrap_or_default();
    Some(findings.into_iter().map(Diagnostic::from).chain(refusals(&proxies)).collect())
}

async fn page<T: DeserializeOwned>(control: SocketAddr, path: &str) -> Option<T> {
    let (status, body) = http::get(control, path, TIMEOUT).await.ok()?;
    serde_json::from_str(&body).ok().filter(|_| status == 200)
}

/// Returns an error for each message with which proxies refuse resources.
fn refusals(proxies: &[ProxyState]) -> Vec<Diagnostic> {
    let mut by_error: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
    for ProxyState { proxy, types } in proxies {
        for (kind, TypeState { error }) in types.iter().filter(|(_, state)| !state.error.is_empty()) {
            let name = proxy.split('~').nth(2).unwrap_or(proxy);
            by_error.entry((kind, error)).or_default().insert(name);
        }
    }
    let described = by_error.into_iter().map(|((kind, error), names)| {
        let (first, others) = (names.first().copied().unwrap_or_default(), names.len().saturating_sub(1));
        let (pod, namespace) = first.rsplit_once('.').unwrap_or((first, ""));
        let others = match others {
            0 => String::new(),
            1 => " and of 1 other pod".to_owned(),
            more => format!(" and of {more} other pods"),
        };
        let text = format!("the proxy of {namespace}/{pod}{others} refuses resources ({kind}): {error}");
        Diagnostic { severity: "error".to_owned(), text }
    });
    described.take(MAX_REFUSALS).collect()
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
