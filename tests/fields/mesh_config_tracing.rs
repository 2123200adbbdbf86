//! Traces that `defaultConfig.tracing` of the mesh configuration configures, of `skysail-proxy` and of a real Envoy.

use skysail_testkit::{Mesh, eventually};

use crate::{check, get, mesh_config_collector::Collector, mesh_with, wait, with};

/// A client and a server whose proxies are the same program.
const PAIRS: [(&str, &str); 2] = [("by-skysail", "ours"), ("by-envoy", "theirs")];

#[test]
fn proxies_report_to_their_own_collector() {
    let rules = include_str!("mesh_config_tracing.yaml");
    let mesh = mesh_with(rules, &["shop/by-envoy", "shop/api-v2", "shop/annotated-envoy"]).ready();
    let collector = Collector::start(&mesh, "collector");
    // A name with one dot is that of a Kubernetes Service, or else a host of a ServiceEntry.
    for address in ["collector.shop:81", "spans.example:81"] {
        mesh.edit("rules.yaml", "collector.shop:81", address);
        spans_arrive(&mesh, &collector, address.trim_end_matches(":81"));
    }
    for client in ["annotated-skysail", "annotated-envoy"] {
        let path = format!("/{client}/long-path-to-its-END");
        let url = format!("http://ours{path}");
        let texts = ["/api/v2/spans", &path[..29], "pod-literal", "istio.mesh_id"];
        let line = collector.wait_after("spans", &texts, || check(&mesh, &[client], &[get(&url, 200, &[])]));
        assert!(!line.contains("END") && !line.contains("own-variable"), "{line}");
    }
}

/// Sends requests until the collector receives their spans for its host.
fn spans_arrive(mesh: &Mesh, collector: &Collector, host: &str) {
    for (client, server) in PAIRS {
        let path = format!("/{client}/long-path-to-its-END");
        let request = || {
            let own = &["-H", "x-own: own-header"];
            check(mesh, &[client], &[with(own, &format!("http://{server}{path}"), 200, &[])]);
        };
        wait(mesh, client, &get(&format!("http://{server}/"), 200, &[]));
        let texts = [
            "/api/v2/spans",
            host,
            &path[..19],
            "own-literal",
            "own-variable",
            "form-own-header",
            "\\\"own-header",
            "istio.mesh_id",
        ];
        let line = collector.wait_after("spans", &texts, request);
        assert!(!line.contains("END"), "{line}");
    }
    mesh.edit("rules.yaml", "enableIstioTags: true", "enableIstioTags: false");
    for (client, server) in PAIRS {
        let mut round = 0;
        eventually(&format!("{client} reports no tags of Istio"), || {
            round += 1;
            let path = format!("/{client}/{round}");
            check(mesh, &[client], &[get(&format!("http://{server}{path}"), 200, &[])]);
            let line = collector.wait("spans", &["/api/v2/spans", &format!("{path}\\\""), "own-literal"]);
            if line.contains("istio.mesh_id") { Err(line) } else { Ok(()) }
        });
    }
    mesh.edit("rules.yaml", "enableIstioTags: false", "enableIstioTags: true");
}
