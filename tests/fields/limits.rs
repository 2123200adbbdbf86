//! RateLimitPolicy: conditions on headers, blocks of addresses, and the number of values that are counted apart, at
//! `skysail-proxy` and at a real Envoy.

use skysail_testkit::Mesh;

use crate::{check, mesh_with, wait, with};

const RULES: &str = include_str!("limits.yaml");
const CLIENT: &str = "by-skysail";

/// Sends requests with a header, and checks the status of each.
fn statuses(mesh: &Mesh, server: &str, path: &str, header: &str, expected: &[u16]) {
    let (url, to) = (format!("http://api{path}"), format!("x-to: {server}"));
    let arguments = ["-H", &to, "-H", header];
    for status in expected {
        check(mesh, &[CLIENT], &[with(&arguments, &url, *status, &[])]);
    }
}

#[test]
fn requests_are_limited_by_headers_and_addresses() {
    let mesh = mesh_with(RULES, &["shop/api-v2"]).ready();
    for server in ["v1", "v2"] {
        let (to, version) = (format!("x-to: {server}"), format!("\"version\":\"{server}\""));
        wait(&mesh, CLIENT, &with(&["-H", &to], "http://api/free", 200, &[&version]));
        let of = |path: &str, header: &str, expected: &[u16]| statuses(&mesh, server, path, header, expected);
        of("/prefix", "x-tier: a-free", &[200, 200]);
        of("/prefix", "x-tier: free", &[200, 429]);
        of("/regex", "x-tier: abb", &[200, 200]);
        of("/regex", "x-tier: bbb", &[200, 429]);
        of("/without", "x-tier: free", &[200, 200]);
        of("/without", "x-skip: yyy", &[200, 200]);
        of("/without", "x-tier: gold", &[200, 429]);
        blocks(of);
        // Of the values only the last two are known, so that the first one has a new limit.
        for (path, again) in [("/two", 200), ("/many", 429)] {
            of(path, "x-user: a", &[200, 429]);
            of(path, "x-user: b", &[200]);
            of(path, "x-user: c", &[200]);
            of(path, "x-user: a", &[again]);
        }
    }
}

/// Addresses of one block have one limit; by default they are those of one host.
fn blocks(of: impl Fn(&str, &str, &[u16])) {
    of("/blocks", "x-forwarded-for: 192.0.2.1", &[200]);
    of("/blocks", "x-forwarded-for: 192.0.2.250", &[429]);
    of("/blocks", "x-forwarded-for: 192.0.3.1", &[200]);
    of("/blocks", "x-forwarded-for: 2001:db8:1:1::1", &[200]);
    of("/blocks", "x-forwarded-for: 2001:db8:1:2::1", &[429]);
    of("/blocks", "x-forwarded-for: 2001:db8:2:1::1", &[200]);
    of("/hosts", "x-forwarded-for: 192.0.2.1", &[200]);
    of("/hosts", "x-forwarded-for: 192.0.2.250", &[200]);
    of("/hosts", "x-forwarded-for: 2001:db8:1:1::1", &[200]);
    of("/hosts", "x-forwarded-for: 2001:db8:1:2::1", &[200]);
}
