//! MeshConfig: tracers that only an Envoy has, and the names of proxies in traces.

use skysail_testkit::{Mesh, eventually};

use crate::{check, get, mesh_config_collector::Collector, mesh_with, wait, wait_logged};

const RULES: &str = include_str!("mesh_config_tracers.yaml");
const CLIENTS: [&str; 2] = ["named-skysail", "named-envoy"];

#[test]
fn envoys_report_to_further_tracers() {
    let mesh = mesh_with(RULES, &["shop/named-envoy"]).ready();
    let collector = Collector::start(&mesh, "collector");
    for client in CLIENTS {
        wait(&mesh, client, &get("http://api/", 200, &["\"pod\""]));
    }
    names(&mesh, &collector);
    for (provider, kind, path) in [
        ("datadog", "DatadogConfig", "/v0.4/traces"),
        ("skywalking", "SkyWalkingConfig", "/skywalking.v3.TraceSegmentReportService/collect"),
    ] {
        let before = if provider == "datadog" { "otlp" } else { "datadog" };
        mesh.edit("rules.yaml", &format!("tracing: [{before}]"), &format!("tracing: [{provider}]"));
        let own = format!("/{provider}/of-envoy");
        let request = || check(&mesh, &["named-envoy"], &[get(&format!("http://api{own}/END"), 200, &[])]);
        let line = collector.wait_after("spans", &[path, &own, "own-canonical"], request);
        assert_eq!(line.contains(&format!("{own}/END")), provider == "skywalking", "{line}");
        // The sidecar lacks the tracer, says so, and forwards requests.
        wait_logged(&mesh, &["named-skysail", "-c", "proxy"], &["requests are not traced", kind]);
        check(&mesh, &["named-skysail"], &[get("http://api/", 200, &["\"pod\""])]);
    }
}

/// Returns the name of the service in a client's spans with a path. The spans of the server have the same path.
fn named(collector: &Collector, client: &str, path: &str) -> Option<String> {
    let line = collector.find(&["TraceService/Export", &format!("~{client}-"), path, "service.name"])?;
    let (_, after) = line.split_once("service.name")?;
    Some(after.chars().take(60).filter(|letter| letter.is_ascii_graphic()).collect())
}

fn names(mesh: &Mesh, collector: &Collector) {
    let cluster = |pod: &str| {
        let info = mesh.call(pod, "http://127.0.0.1:15000/server_info", &[]).json();
        info["node"]["cluster"].as_str().unwrap_or_default().to_owned()
    };
    for client in CLIENTS {
        assert_eq!(cluster(client), "own-canonical", "{client}");
    }
    assert_eq!(cluster("annotated"), "annotated.shop");
    let mut before = "CANONICAL_NAME_ONLY";
    for (setting, of) in [
        ("CANONICAL_NAME_ONLY", ["own-canonical"; 2]),
        ("CANONICAL_NAME_AND_NAMESPACE", ["own-canonical.shop"; 2]),
        ("APP_LABEL_AND_NAMESPACE", ["named-skysail.shop", "named-envoy.shop"]),
    ] {
        if setting != before {
            mesh.edit("rules.yaml", before, setting);
            before = setting;
        }
        for (client, name) in CLIENTS.iter().zip(of) {
            let mut round = 0;
            eventually(&format!("{client} is {name}"), || {
                round += 1;
                let path = format!("/{setting}/{client}/{round}");
                check(mesh, &[client], &[get(&format!("http://api{path}"), 200, &[])]);
                let found =
                    eventually("spans arrive", || named(collector, client, &path).ok_or("none".to_owned()));
                let has_namespace = found.contains(".shop");
                if found.contains(name) && has_namespace == name.contains(".shop") {
                    Ok(())
                } else {
                    Err(found)
                }
            });
        }
    }
    mesh.edit("rules.yaml", before, "CANONICAL_NAME_ONLY");
}
