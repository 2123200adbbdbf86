//! MeshConfig: how often proxies look names up.

use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, check, get, mesh_with, wait};

const RULES: &str = include_str!("mesh_config_dns.yaml");
const ENTRY: &str = include_str!("mesh_config_dns_entry.yaml");
const URL: &str = "http://moving.example.com/";
const LATER: &str = "http://later.example.com/";

/// Moves the name to the pods of another version, and waits until DNS answers with their addresses.
fn move_to(mesh: &Mesh, before: &str, version: &str) {
    let [from, to] = [before, version].map(|version| format!("{{app: api, version: {version}}}"));
    mesh.edit("rules.yaml", &from, &to);
    wait_for_name(mesh, version);
}

/// Waits until DNS answers with the address of the pod of a version.
fn wait_for_name(mesh: &Mesh, version: &str) {
    let pods = mesh.names(&format!("api-{version}"));
    let status = mesh.status();
    let mut all = status["pods"].as_array().unwrap().iter();
    let pod = all.find(|pod| pod["name"] == pods[0].as_str()).unwrap();
    let address = pod["address"].as_str().unwrap();
    eventually("the name has the address", || {
        let found =
            mesh.run(&["exec", "outsider", "--", "getent", "ahostsv4", "moving.shop.svc.cluster.local"]);
        let found = String::from_utf8_lossy(&found.stdout).into_owned();
        if found.starts_with(address) { Ok(()) } else { Err(format!("{found}, not {address}")) }
    });
}

#[test]
fn names_are_looked_up_as_often_as_configured() {
    let mesh = mesh_with(RULES, &["shop/by-envoy"]).ready();
    // An Envoy whose first lookup fails repeats it only after dnsRefreshRate.
    wait_for_name(&mesh, "v1");
    mesh.put("entry.yaml", ENTRY);
    for client in CLIENTS {
        wait(&mesh, client, &get(URL, 200, &["\"version\":\"v1\""]));
    }
    move_to(&mesh, "v1", "v2");
    // skysail-proxy repeats a failed lookup sooner.
    wait(&mesh, "by-skysail", &get(LATER, 503, &[]));
    mesh.edit("rules.yaml", "{app: none}", "{app: api, version: v1}");
    wait(&mesh, "by-skysail", &get(LATER, 200, &["\"version\":\"v1\""]));
    // An Envoy follows the TTL of the answer, which getaddrinfo() does not show.
    (0..20).for_each(|_| check(&mesh, &["by-skysail"], &[get(URL, 200, &["\"version\":\"v1\""])]));
    mesh.edit("rules.yaml", "dnsRefreshRate: 9000s", "dnsRefreshRate: 1s");
    for client in CLIENTS {
        wait(&mesh, client, &get(URL, 200, &["\"version\":\"v2\""]));
    }
    for (before, version) in [("v2", "v1"), ("v1", "v2")] {
        move_to(&mesh, before, version);
        for client in CLIENTS {
            wait(&mesh, client, &get(URL, 200, &[&format!("\"version\":\"{version}\"")]));
        }
    }
}
