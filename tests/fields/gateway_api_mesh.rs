//! GRPCRoute, HTTPRoute and TCPRoute for the services of the mesh: backends of other kinds and namespaces, mirrors, and
//! names of rules.

use skysail_testkit::Mesh;

use crate::{CLIENTS, Case, check, get, log, mesh_with, wait, wait_logged, with};

const RULES: &str = include_str!("gateway_api_mesh.yaml");
const FAR: &[&str] = &["\"namespace\":\"other\""];
const ONE: &[&str] = &["\"version\":\"v1\""];
const TWO: &[&str] = &["\"version\":\"v2\""];

#[test]
fn routes_have_backends_of_all_kinds() {
    let mesh = mesh_with(RULES, &["shop/by-envoy"]).ready();
    for client in CLIENTS {
        wait(&mesh, client, &get("http://calls/shop.Headers/Any", 200, ONE));
        wait(&mesh, client, &get("http://calls/shop.Far/Any", 200, FAR));
        wait(&mesh, client, &get("http://web/hostname", 200, TWO));
        wait(&mesh, client, &get("http://store.other:9000/", 200, TWO));
        wait(&mesh, client, &get("http://till:9000/", 200, FAR));
    }
    check(&mesh, &CLIENTS, &calls());
    // The parent is one port, and the clients are those of the route's namespace.
    check(&mesh, &CLIENTS, &[get("http://store.other:9001/", 200, FAR)]);
    wait(&mesh, "outsider", &get("http://store.other:9000/", 200, FAR));
    mirrors(&mesh);
    for client in CLIENTS {
        wait_logged(&mesh, &[client, "-c", "proxy"], &["GET /shop.Modify/Any ", "of-calls"]);
        wait_logged(&mesh, &[client, "-c", "proxy"], &["GET /mirror/hostname/", "of-web"]);
    }
}

fn calls() -> Vec<Case<'static>> {
    let old = &["-H", "x-set: old", "-H", "x-add: old", "-H", "x-remove: old"];
    let changed =
        &["\"x-set\":\"new\"", "\"x-add\":\"old, more\"", "\"x-backend\":\"two\"", "\"version\":\"v2\""];
    let modified = || Case {
        url: "http://calls/shop.Modify/Any",
        arguments: old,
        status: 200,
        has: changed,
        lacks: &["\"x-remove\""],
    };
    vec![
        // Each request selects a backend anew.
        modified(),
        modified(),
        modified(),
        modified(),
        with(&["-H", "x-regex: bbb"], "http://calls/shop.Headers/Any", 200, TWO),
        with(&["-H", "x-regex: abc"], "http://calls/shop.Headers/Any", 200, ONE),
        get("http://calls/shop.Headers/Any", 200, ONE),
        get("http://calls/shop.Hostname/Any", 200, TWO),
        get("http://calls/shop.Closed/Any", 500, &[]),
    ]
}

fn mirrors(mesh: &Mesh) {
    for client in CLIENTS {
        let paths =
            ["None", "Few", "Fraction", "All", "Far"].map(|kind| format!("shop.Mirror{kind}/{client}"));
        for path in &paths {
            check(mesh, &[client], &[get(&format!("http://calls/{path}"), 200, ONE)]);
        }
        for kind in ["hostname", "service"] {
            check(mesh, &[client], &[get(&format!("http://web/mirror/{kind}/{client}"), 200, ONE)]);
            wait_logged(mesh, &["api-v2"], &[&format!("path=/mirror/{kind}/{client} ")]);
        }
        for (kind, to) in [("Fraction", "api-v2"), ("All", "api-v2"), ("Far", "outsider")] {
            wait_logged(mesh, &[to], &[&format!("path=/shop.Mirror{kind}/{client} ")]);
        }
    }
    // The copies of later requests have arrived.
    let copies = log(mesh, &["api-v2"]);
    assert!(!copies.contains("MirrorNone") && !copies.contains("MirrorFew"), "{copies}");
}
