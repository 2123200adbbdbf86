//! MeshConfig: balancing between localities, for all hosts.

use std::collections::BTreeSet;

use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, check, get, log, mesh_with, wait};

const RULES: &str = include_str!("mesh_config_localities.yaml");

/// Settings of the mesh, a host, and the versions of the pods that answer.
const CASES: [(&str, &str, &[&str]); 9] = [
    ("localityLbSetting: {enabled: false}", "near", &["v1", "v2"]),
    ("localityLbSetting: {enabled: true}", "near", &["v2"]),
    ("localityLbSetting: {distribute: [{from: r1/z1/*, to: {r2/z2/*: 100}}]}", "near", &["v1"]),
    ("localityLbSetting: {enabled: true}", "far", &["v1", "v2"]),
    ("localityLbSetting: {failover: [{from: r1, to: r3}]}", "far", &["v2"]),
    ("localityLbSetting: {failoverPriority: [tier]}", "labelled", &["v2"]),
    ("zoneAwareLbSetting: {enabled: false, failover: [{from: r1, to: r3}]}", "far", &["v1", "v2"]),
    (
        "zoneAwareLbSetting: {enabled: true, minClusterSize: 77, failover: [{from: r1, to: r3}]}",
        "far",
        &["v2"],
    ),
    ("zoneAwareLbSetting: {failoverPriority: [tier]}", "labelled", &["v2"]),
];

fn address(mesh: &Mesh, workload: &str) -> String {
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let is_it =
        |pod: &&serde_json::Value| pod["name"].as_str().is_some_and(|name| name.starts_with(workload));
    pods.iter().find(is_it).unwrap()["address"].as_str().unwrap().to_owned()
}

#[test]
fn localities_are_balanced_for_the_mesh() {
    let mesh = mesh_with(RULES, &["shop/by-envoy"]).ready();
    let rules = RULES.replace("V1", &address(&mesh, "api-v1")).replace("V2", &address(&mesh, "api-v2"));
    for (setting, host, expected) in CASES {
        mesh.put("rules.yaml", &rules.replace("# SETTING", setting));
        let url = format!("http://{host}.example.com/");
        for client in CLIENTS {
            let expected: BTreeSet<String> = expected.iter().map(ToString::to_string).collect();
            eventually(&format!("{setting} for {client}"), || {
                let output = mesh.run(&["call", client, &url, "-n", "20"]);
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                let answers = text.split("\"version\":\"").skip(1);
                let answered: BTreeSet<String> =
                    answers.filter_map(|rest| Some(rest.split('"').next()?.to_owned())).collect();
                if answered == expected { Ok(()) } else { Err(text) }
            });
            if setting.contains("minClusterSize") {
                let dump = mesh.call(client, "http://127.0.0.1:15000/config_dump", &[]).body;
                let dump: String = dump.split_whitespace().collect();
                assert!(dump.contains("\"min_cluster_size\":\"77\""), "{client}: {dump}");
            }
        }
    }
    remote(&mesh, &rules.replace("# SETTING", "localityLbSetting: {enabled: true}"));
}

/// Retries reach the endpoint of another locality if the mesh says so.
fn remote(mesh: &Mesh, rules: &str) {
    for (client, is_remote) in CLIENTS.into_iter().flat_map(|client| [(client, true), (client, false)]) {
        let setting = format!("retryRemoteLocalities: {is_remote}");
        mesh.put("rules.yaml", &rules.replace("retryRemoteLocalities: true", &setting));
        let mut round = 0;
        wait(mesh, client, &get("http://near.example.com/", 200, &["\"version\":\"v2\""]));
        eventually(&setting, || {
            round += 1;
            let path = format!("/status/503/{client}/{is_remote}/{round}");
            check(mesh, &[client], &[get(&format!("http://near.example.com{path}"), 503, &[])]);
            let count = |server: &str| log(mesh, &[server]).matches(&format!("path={path} ")).count();
            let (far, near) = (count("api-v1"), count("api-v2"));
            let is_it = near + far == 5 && near > 0 && (far > 0) == is_remote;
            if is_it { Ok(()) } else { Err(format!("{near} near, {far} far")) }
        });
    }
}
