//! Metrics: the sidecar serves its own and those of the workload on one page, and annotations lead Prometheus there.

use serde_json::{Value, json};
use skysail_core::names::{ADMIN_PORT, HEALTH_PORT, INBOUND_PORT, METRICS_PORT, OUTBOUND_PORT};

use crate::{
    annotations::{AnnotationError, Annotations, boolean},
    merge::{as_map, map_at},
};

/// Variable of the sidecar with the annotations of the workload.
const VARIABLE: &str = "ISTIO_PROMETHEUS_ANNOTATIONS";
/// Page of the sidecar.
const PATH: &str = "/stats/prometheus";
/// Ports of the sidecar that have no metrics of a workload.
const OWN_PORTS: [u16; 5] = [ADMIN_PORT, OUTBOUND_PORT, INBOUND_PORT, HEALTH_PORT, METRICS_PORT];

/// Replaces the annotations for Prometheus by those of the sidecar's page. Returns the variable of the sidecar that names
/// the page of the workload.
pub(crate) fn merge(
    pod: &mut Value,
    annotations: &Annotations,
    status_port: u16,
) -> Result<Option<Value>, AnnotationError> {
    // Prometheus cannot tell annotations apart that differ only in such characters.
    let normal = |key: &str| key.replace(|c: char| !c.is_ascii_alphanumeric() && c != '_', "_");
    let find = |name: &str| annotations.iter().find(|(key, _)| normal(key) == name);
    let (scrape, path, port) =
        (find("prometheus_io_scrape"), find("prometheus_io_path"), find("prometheus_io_port"));
    if scrape.is_some_and(|(_, text)| boolean(text) == Some(false)) {
        return Ok(None);
    }
    if let Some((name, text)) = port {
        match text.parse::<u16>() {
            Ok(number) if number == status_port => return Ok(None),
            Ok(1..) if !OWN_PORTS.iter().any(|own| own.to_string() == text) => {}
            Ok(_) => return Err(annotations.error(name, "is no port of the workload")),
            Err(_) => return Err(annotations.error(name, "is not a port")),
        }
    }
    let map = map_at(map_at(as_map(pod), "metadata"), "annotations");
    map.retain(|key, _| {
        !["prometheus_io_scrape", "prometheus_io_path", "prometheus_io_port"].contains(&&*normal(key))
    });
    for (key, value) in [("port", &*status_port.to_string()), ("path", PATH), ("scrape", "true")] {
        map.insert(format!("prometheus.io/{key}"), value.into());
    }
    if scrape.or(path).or(port).is_none() {
        return Ok(None);
    }
    let text = |given: Option<(&str, &str)>| given.map_or("", |(_, text)| text).to_owned();
    let page = json!({ "scrape": text(scrape), "path": text(path), "port": text(port) });
    Ok(Some(json!({ "name": VARIABLE, "value": page.to_string() })))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(annotations: Value) -> (Value, Result<Option<Value>, AnnotationError>) {
        let mut pod = json!({ "metadata": { "annotations": annotations } });
        let annotations = Annotations::of(&pod).unwrap_or_default();
        let variable = merge(&mut pod, &annotations, 15020);
        (pod["metadata"]["annotations"].take(), variable)
    }

    #[test]
    fn the_page_of_the_sidecar_replaces_that_of_the_workload() {
        let page = json!({ "prometheus.io/path": "/stats/prometheus", "prometheus.io/port": "15020",
                           "prometheus.io/scrape": "true" });
        let given = json!({ "prometheus.io/scrape": "true", "prometheus.io/port": "9102",
                            "prometheus.io.path": "/m" });
        let (after, variable) = merged(given);
        let value = r#"{"path":"/m","port":"9102","scrape":"true"}"#;
        assert_eq!((after, variable), (page.clone(), Ok(Some(json!({ "name": VARIABLE, "value": value })))));
        assert_eq!(merged(json!({})), (page.clone(), Ok(None)));
        assert_eq!(merged(page.clone()), (page, Ok(None)), "merged already");
        let off = json!({ "prometheus.io/scrape": "false" });
        assert_eq!(merged(off.clone()), (off, Ok(None)));
    }

    #[test]
    fn a_port_of_the_sidecar_is_refused() {
        for port in ["http", "0", "15021", "99999"] {
            assert!(merged(json!({ "prometheus.io/port": port })).1.is_err(), "{port}");
        }
    }
}
