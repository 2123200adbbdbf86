//! EnvoyFilter: the operations of patches, in `skysail-proxy` and in a real Envoy.

use skysail_testkit::eventually;

use crate::{CLIENTS, Case, get, mesh_with, wait, with};

const RULES: &str = include_str!("patch_operations.yaml");

#[test]
fn patches_add_insert_replace_and_remove() {
    let mesh = mesh_with(RULES, &["shop/by-envoy", "shop/api-v2"]).ready();
    let headers = ["x-op-first: added", "x-op-merged: added", "x-op-after: added", "x-op-replaced: added"];
    let cases = [
        // Routes, by the status of a direct response.
        get("http://api/base", 281, &[]),
        get("http://api/base/before", 291, &[]),
        get("http://api/base/before/first", 293, &[]),
        get("http://api/after", 292, &[]),
        get("http://api/gone", 200, &["\"caller\":\"spiffe://"]),
        get("http://hosts/only", 282, &[]),
        get("http://hosts/other", 294, &[]),
        // Virtual hosts. A host without one passes through.
        with(&["-H", "host: added.example"], "http://api/", 296, &[]),
        get("http://replaced/", 297, &[]),
        get("http://removed/", 200, &["\"caller\":null"]),
        // Filters of HTTP.
        Case { lacks: &["x-op-not"], ..get("http://api/", 200, &headers) },
        // Filters of connections.
        get("http://streams:91/", 200, &["\"version\":\"v2\""]),
        get("http://streams:93/", 200, &["\"version\":\"v1\""]),
    ];
    for client in CLIENTS {
        cases.iter().for_each(|case| wait(&mesh, client, case));
        eventually("the connection is closed", || match mesh.call(client, "http://streams:92/", &[]) {
            answer if answer.status.is_none() => Ok(()),
            answer => Err(format!("{answer:?}")),
        });
    }
}
