//! Metrics of workloads that the proxies serve along with their own, from `skysail-proxy` and a real Envoy.

use skysail_testkit::Mesh;

use crate::{Case, mesh_with, wait};

const PAGE: &str =
    "prometheus.io/scrape: \"true\", prometheus.io/port: \"8080\", prometheus.io/path: /figures";
/// Metrics of each proxy, and of the merging itself.
const OWN: &str = "\nenvoy_cluster_manager_cds_update_success{} ";
const MERGING: &str = "\nistio_agent_scrape_failures_total{type=\"application\"} ";
/// Request to the workload, as the stand-in repeats it.
const WORKLOAD: &str = "\"path\":\"/figures\"";

/// Returns a pod with annotations and the Service of its metrics.
fn pod(name: &str, annotations: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\n\
         metadata: {{name: {name}, namespace: shop, labels: {{app: {name}}}, annotations: {{{annotations}}}}}\n\
         spec: {{containers: [{{name: c, image: registry.example/server, ports: [{{containerPort: 8080}}]}}]}}\n\
         ---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\n\
         spec: {{selector: {{app: {name}}}, ports: [{{name: http-metrics, port: 15020}}]}}\n"
    )
}

/// Client without a sidecar, as Prometheus is.
const CLIENT: &str = "apiVersion: v1\nkind: Pod\n\
    metadata: {name: plain, namespace: shop, labels: {sidecar.istio.io/inject: \"false\"}}\n\
    spec: {containers: [{name: c, image: registry.example/plain}]}\n";

fn mesh_of(prometheus_merge: bool, pods: &[String], envoys: &[&str]) -> Mesh {
    let config = format!(
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: istio, namespace: istio-system}}\n\
         data: {{mesh: 'enablePrometheusMerge: {prometheus_merge}'}}\n"
    );
    mesh_with(&[CLIENT, &config, &pods.concat()].concat(), envoys).ready()
}

fn serves(mesh: &Mesh, pod: &str, has: &[&str], lacks: &[&str]) {
    let url = format!("http://{pod}:15020/stats/prometheus");
    wait(mesh, "plain", &Case { url: &url, arguments: &[], status: 200, has, lacks });
}

#[test]
fn metrics_of_workloads_follow_those_of_their_proxies() {
    let apart = format!("{PAGE}, prometheus.istio.io/merge-metrics: \"false\"");
    let pods = [
        pod("of-skysail", PAGE),
        pod("of-envoy", PAGE),
        pod("away", "prometheus.io/port: \"9\""),
        pod("apart", &apart),
        pod("silent", ""),
    ];
    let mesh = mesh_of(true, &pods, &["shop/of-envoy"]);
    for name in ["of-skysail", "of-envoy"] {
        serves(&mesh, name, &[OWN, &format!("{MERGING}0\n"), WORKLOAD], &[]);
    }
    // The metrics of the proxy do not depend on the workload.
    serves(&mesh, "away", &[OWN, MERGING], &[WORKLOAD, &format!("{MERGING}0\n")]);
    for name in ["apart", "silent"] {
        serves(&mesh, name, &[OWN, MERGING], &[WORKLOAD]);
    }
}

#[test]
fn a_mesh_can_leave_metrics_apart() {
    let asked = format!("{PAGE}, prometheus.istio.io/merge-metrics: \"true\"");
    let mesh = mesh_of(false, &[pod("apart", PAGE), pod("asked", &asked)], &[]);
    serves(&mesh, "apart", &[OWN], &[WORKLOAD]);
    serves(&mesh, "asked", &[OWN, WORKLOAD], &[]);
}
