//! ServiceEntry, WorkloadEntry and the endpoints that a retry selects, for `skysail-proxy` and for a real Envoy.

use crate::{CLIENTS, get, mesh_with, pools_connections::address, wait};

const RULES: &str = include_str!("workloads_entries.yaml");
const V1: &str = "\"version\":\"v1\"";
const V2: &str = "\"version\":\"v2\"";

#[test]
fn endpoints_have_places_and_accounts() {
    let mesh = mesh_with("", &["shop/by-envoy"]).ready();
    let [one, two] = ["api-v1", "api-v2"].map(|workload| address(&mesh, workload));
    mesh.put("rules.yaml", &RULES.replace("V1", &one).replace("V2", &two));
    let caller = "\"caller\":\"spiffe://cluster.local/ns/shop/sa/buyer\"";
    let retried = &[V2, "\"x-envoy-attempt-count\":\"3\""];
    for client in CLIENTS {
        wait(&mesh, client, &get("http://elsewhere.example.com/", 200, retried));
        for host in ["labelled", "machines"] {
            let url = format!("http://{host}.example.com/");
            wait(&mesh, client, &get(&url, 200, &[V2]));
            let output = mesh.run(&["call", client, &url, "-n", "20"]);
            let text = String::from_utf8_lossy(&output.stdout);
            assert_eq!((text.matches(V1).count(), text.matches(V2).count()), (0, 20), "{client} {host}");
        }
        let dump = mesh.call(client, "http://127.0.0.1:15000/config_dump", &[]).body;
        let dump: String = dump.split_whitespace().collect();
        assert!(dump.contains("\"zone_aware_lb_config\":{\"min_cluster_size\":\"3\"}"), "{client}: {dump}");

        wait(&mesh, client, &get("http://account.example.com/", 200, &[caller]));
        wait(&mesh, client, &get("http://other-account.example.com/", 503, &["upstream connect error"]));

        wait(&mesh, client, &get("http://nearby.example.com/", 503, &[]));

        wait(&mesh, client, &get("http://waiting/long?status=503", 504, &["upstream request timeout"]));
        wait(&mesh, client, &get("http://waiting/short?status=503", 503, &["\"pod\""]));
    }
}
