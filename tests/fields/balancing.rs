//! DestinationRule: which endpoint gets a request, and the scope of a rule.

use std::collections::BTreeMap;

use skysail_testkit::Mesh;

use crate::{CLIENTS, check, get, mesh_with, wait, with};

const RULES: &str = include_str!("balancing.yaml");
/// Requests by which three endpoints are all seen at random; the chance to miss one is below 1e-6.
const MANY: usize = 40;

/// Returns how many of `count` requests each pod answered.
pub(crate) fn pods(
    mesh: &Mesh,
    client: &str,
    url: &str,
    arguments: &[&str],
    count: usize,
) -> BTreeMap<String, usize> {
    let output = mesh.run(&[&["call", client, url, "-n", &count.to_string()], arguments].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    let mut found = BTreeMap::new();
    for part in text.split("\"name\":\"").skip(1) {
        *found.entry(part.split('"').next().unwrap_or_default().to_owned()).or_default() += 1;
    }
    assert_eq!(found.values().sum::<usize>(), count, "{client} {url}: {text}");
    found
}

/// Returns the pod that answers several requests alike.
fn only(mesh: &Mesh, client: &str, url: &str, arguments: &[&str]) -> String {
    let found = pods(mesh, client, url, arguments, 4);
    assert_eq!(found.len(), 1, "{client} {url} {arguments:?}: {found:?}");
    found.into_keys().next().unwrap()
}

fn start() -> Mesh {
    let mesh = mesh_with(RULES, &["shop/by-envoy"]).ready();
    for client in CLIENTS {
        // All pods are known as soon as each has answered.
        skysail_testkit::eventually("three pods answer", || {
            match pods_or(&mesh, client, "http://in-turn/") {
                3 => Ok(()),
                count => Err(format!("{count} pods answer {client}")),
            }
        });
    }
    wait(&mesh, "outsider", &get("http://of-namespace.shop/", 200, &[]));
    mesh
}

fn pods_or(mesh: &Mesh, client: &str, url: &str) -> usize {
    let output = mesh.run(&["call", client, url, "-n", "6"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let names = text.split("\"name\":\"").skip(1).map(|part| part.split('"').next().unwrap_or_default());
    names.collect::<std::collections::BTreeSet<_>>().len()
}

#[test]
fn endpoints_are_selected() {
    let mesh = start();
    for client in CLIENTS {
        let turns = pods(&mesh, client, "http://in-turn/", &[], 6);
        assert!(turns.len() == 3 && turns.values().all(|count| *count == 2), "{client}: {turns:?}");
        for url in ["http://at-random/", "http://at-least/"] {
            let found = pods(&mesh, client, url, &[], MANY);
            assert_eq!(found.len(), 3, "{client} {url}: {found:?}");
        }
        only(&mesh, client, "http://by-source/", &[]);
        only(&mesh, client, "http://of-subset/sticky", &[]);
        assert_eq!(pods(&mesh, client, "http://of-subset/", &[], 6).len(), 3);
        only(&mesh, client, "http://of-port:81/", &[]);
        assert_eq!(pods(&mesh, client, "http://of-port/", &[], MANY).len(), 3);
    }
    hashes(&mesh);
    cookies(&mesh);
    dialled(&mesh);
}

/// A request for the host of a service reaches the pod that the client has dialled.
fn dialled(mesh: &Mesh) {
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap().iter().filter(|pod| pod["workload"] == "pool");
    for (pod, client) in pods.flat_map(|pod| CLIENTS.map(|client| (pod, client))) {
        let url = format!("http://{}:8080/", pod["address"].as_str().unwrap());
        wait(mesh, client, &with(&["-H", "host: dialled:8080"], &url, 200, &[]));
        let found = only(mesh, client, &url, &["-H", "host: dialled:8080"]);
        assert_eq!(found, pod["name"].as_str().unwrap(), "{client}");
    }
}

/// A key selects the same pod for both proxies, and different keys select different pods.
fn hashes(mesh: &Mesh) {
    for host in ["by-header", "by-old-ring", "by-query"] {
        let mut all = BTreeMap::new();
        for user in 0..8 {
            let (url, header) = (format!("http://{host}/?user=u{user}"), format!("x-user: u{user}"));
            let [ours, theirs] = CLIENTS.map(|client| only(mesh, client, &url, &["-H", &header]));
            assert_eq!(ours, theirs, "{url}");
            *all.entry(ours).or_insert(0) += 1;
        }
        assert!(all.len() > 1, "{host}: {all:?}");
    }
}

/// A response sets the cookie, and requests with it reach the same pod.
fn cookies(mesh: &Mesh) {
    for client in CLIENTS {
        let first = mesh.call(client, "http://by-cookie/", &["-i"]).body;
        let cookie = first.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap_or_default();
        for part in ["session=", "Max-Age=60", "Path=/cart", "SameSite=Lax", "HttpOnly"] {
            assert!(cookie.contains(part), "{client}: {first}");
        }
        let header = format!("cookie: {}", cookie.split(';').next().unwrap());
        let pod = only(mesh, client, "http://by-cookie/", &["-H", &header]);
        assert!(first.contains(&pod), "{client}: {first} {pod}");
        let again = mesh.call(client, "http://by-cookie/", &["-i", "-H", &header]).body;
        assert!(!again.contains("set-cookie"), "{client}: {again}");
    }
    let [ours, theirs] =
        CLIENTS.map(|client| only(mesh, client, "http://by-cookie/", &["-H", "cookie: session=fixed"]));
    assert_eq!(ours, theirs);
}

#[test]
fn rules_have_a_scope() {
    let mesh = start();
    let (caller, none) = (&["\"caller\":\"spiffe://cluster.local/ns/"], &["\"caller\":null"]);
    let both = [
        get("http://of-port/", 200, caller),
        get("http://of-port:81/", 200, none),
        get("http://of-namespace/", 200, caller),
        get("http://mutual/", 200, caller),
    ];
    check(&mesh, &CLIENTS, &both);
    check(
        &mesh,
        &["outsider"],
        &[get("http://of-namespace.shop/", 200, none), get("http://of-workload.shop/", 200, caller)],
    );
    check(&mesh, &["by-skysail"], &[get("http://of-workload/", 200, none)]);
    check(&mesh, &["by-envoy"], &[get("http://of-workload/", 200, caller)]);
}
