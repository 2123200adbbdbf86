//! Annotations of a pod about its metrics: the page that the sidecar serves along with its own, as Istio's injector
//! reads them.

use serde_json::json;
use skysail_core::names::{
    ADMIN_PORT, HEALTH_PORT, INBOUND_PORT, MERGED_METRICS_PORT, METRICS_PORT, OUTBOUND_PORT,
};

use crate::objects::Labels;

/// Variable of the sidecar with the page of the workload.
pub(crate) const VARIABLE: &str = "ISTIO_PROMETHEUS_ANNOTATIONS";
/// Annotation that says whether metrics are merged. It overrides the mesh configuration.
pub(crate) const MERGE: &str = "prometheus.istio.io/merge-metrics";
/// Annotation with several pages.
const TARGETS: &str = "prometheus.istio.io/scrape-targets";
/// Ports of the sidecar, which are no ports of the workload.
const OWN: [u16; 6] =
    [ADMIN_PORT, HEALTH_PORT, INBOUND_PORT, MERGED_METRICS_PORT, METRICS_PORT, OUTBOUND_PORT];

/// Parses a boolean as Go does.
pub(crate) fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// Returns the value of [`VARIABLE`] for a pod with these annotations. `None`: its metrics are not merged.
///
/// # Errors
/// An annotation is invalid: a text that names it.
pub(crate) fn page(annotations: &Labels) -> Result<Option<String>, String> {
    let of = |name: &str| {
        let is_it = |key: &str| key.replace(|c: char| !c.is_ascii_alphanumeric(), "_") == name;
        annotations.iter().find(|(key, _)| is_it(key)).map(|(_, value)| value.as_str())
    };
    let [scrape, port, path] = ["prometheus_io_scrape", "prometheus_io_port", "prometheus_io_path"].map(of);
    if annotations.contains_key(TARGETS) {
        return Err(format!(
            "annotation {TARGETS} is not supported, so the metrics of the workload are not merged; use \
             prometheus.io/port and prometheus.io/path"
        ));
    }
    if scrape.and_then(boolean) == Some(false) || (scrape, port, path) == (None, None, None) {
        return Ok(None);
    }
    if let Some(text) = port {
        let number = text.parse::<u16>().ok().filter(|port| *port != 0 && !OWN.contains(port));
        number.ok_or_else(|| {
            format!(
                "annotation prometheus.io/port: {text:?} is not a port of the workload, so its metrics are not merged"
            )
        })?;
    }
    let [scrape, port, path] = [scrape, port, path].map(Option::unwrap_or_default);
    Ok(Some(json!({ "scrape": scrape, "port": port, "path": path }).to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(annotations: &[(&str, &str)]) -> Result<Option<String>, String> {
        page(&annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn annotations_describe_the_page_of_the_workload() {
        let page = of(&[("prometheus.io/scrape", "true"), ("prometheus.io/port", "8080")]).unwrap();
        assert_eq!(page.unwrap(), r#"{"path":"","port":"8080","scrape":"true"}"#);
        assert!(of(&[("prometheus.io/path", "/stats")]).unwrap().is_some());
        for none in [&[][..], &[("prometheus.io/scrape", "false"), ("prometheus.io/port", "8080")]] {
            assert_eq!(of(none), Ok(None));
        }
        for invalid in ["0", "http", "15020", "65536"] {
            let problem = of(&[("prometheus.io/port", invalid)]).unwrap_err();
            assert!(problem.starts_with("annotation prometheus.io/port: "), "{problem}");
        }
        assert!(of(&[(TARGETS, ":8080/metrics")]).unwrap_err().contains("is not supported"));
    }
}
