//! DestinationRule: connections of a client's proxy to a service, its limits, and the ejection of endpoints.

use std::collections::BTreeSet;

use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, check, get, log, mesh_with, wait, wait_logged, with};

const RULES: &str = include_str!("pools.yaml");

fn start() -> Mesh {
    let mesh = mesh_with(RULES, &["shop/by-envoy"]).ready();
    for client in CLIENTS {
        wait(&mesh, client, &get("http://plain/", 200, &["\"pod\""]));
        wait(&mesh, client, &get("http://upgraded/", 200, &["\"pod\""]));
    }
    mesh
}

/// Sends requests one after the other on one connection, and returns how many connections the proxy used to the server.
/// Requests with `between` are separated by one to that URL.
fn connections(mesh: &Mesh, client: &str, host: &str, between: Option<&str>) -> usize {
    let paths: Vec<String> = (0..4).map(|index| format!("/{client}/{host}/{index}")).collect();
    for path in &paths {
        check(mesh, &[client], &[get(&format!("http://{host}{path}"), 200, &["\"pod\""])]);
        between.iter().for_each(|url| check(mesh, &[client], &[get(url, 200, &[])]));
    }
    let last = paths.last().unwrap();
    wait_logged(mesh, &["server", "-c", "proxy"], &[&format!(" {last} ")]);
    let log = log(mesh, &["server", "-c", "proxy"]);
    let peers = paths.iter().map(|path| {
        let line = log.lines().find(|line| line.contains(&format!(" {path} "))).unwrap_or_default();
        // The end of Istio's format: local address, peer's address, server name, route.
        line.split(' ').rev().nth(2).unwrap_or_default().to_owned()
    });
    let peers: BTreeSet<String> = peers.collect();
    assert!(peers.iter().all(|peer| peer.starts_with("10.244.")), "{peers:?}: {log}");
    peers.len()
}

#[test]
fn connections_are_pooled() {
    let mesh = start();
    for client in CLIENTS {
        assert_eq!(connections(&mesh, client, "one-request", None), 4, "{client}");
        let late = Some("http://plain/?delay=1500ms");
        for host in ["idle-http", "short-life"] {
            assert_eq!(connections(&mesh, client, host, late), 4, "{client} {host}");
        }
        let mut protocols = vec![
            ("http://plain/protocol", &[][..], "HTTP/1.1"),
            ("http://upgraded/protocol", &[], "HTTP/2"),
            ("http://as-client/protocol/1", &[], "HTTP/1.1"),
        ];
        // A public Envoy lacks Istio's filter that selects the protocol by ALPN.
        if client == "by-skysail" {
            protocols.push(("http://as-client/protocol/2", &["--http2"], "HTTP/2"));
        }
        for (url, arguments, protocol) in protocols {
            let path = format!("/{}/{client}", url.rsplit_once('/').unwrap().1);
            check(&mesh, &[client], &[with(arguments, &format!("{url}/{client}"), 200, &[])]);
            wait_logged(&mesh, &["server", "-c", "proxy"], &[&format!("{path} {protocol}\"")]);
        }
        keepalive(&mesh, client);
    }
}

/// The kernel has a timer for each idle connection with keepalive probes.
fn keepalive(mesh: &Mesh, client: &str) {
    eventually("a connection is probed", || {
        check(mesh, &[client], &[get("http://probed/", 200, &[])]);
        let table = mesh.run(&["exec", client, "--", "cat", "/proc/net/tcp"]);
        let table = String::from_utf8_lossy(&table.stdout).into_owned();
        // Remote port 8080, state ESTABLISHED, timer 2 (keepalive).
        let is_probed = |line: &&str| {
            let cells: Vec<&str> = line.split_whitespace().collect();
            cells.len() > 5 && cells[2].ends_with(":1F90") && cells[3] == "01" && cells[5].starts_with("02:")
        };
        if table.lines().any(|line| is_probed(&line)) { Ok(()) } else { Err(table) }
    });
}

#[test]
fn limits_refuse_requests() {
    let mesh = start();
    for client in CLIENTS {
        for host in ["few-pending", "few-requests"] {
            wait(&mesh, client, &get(&format!("http://{host}/"), 200, &[]));
            eventually(&format!("{host} is limited for {client}"), || {
                let url = format!("http://{host}/?delay=300ms");
                let load = mesh.load(client, &[&url, "-n", "16", "-c", "8", "--count", "x-envoy-overloaded"]);
                let report = load.finish();
                let refused = report.status.get(&503).copied().unwrap_or_default();
                let is_it = refused > 0 && refused < 16 && report.count("true") == refused;
                if is_it { Ok(()) } else { Err(format!("{report:?}")) }
            });
        }
        // Half of the requests of the last hour may be retries; half of those in flight would be too few.
        mesh.load(client, &["http://budget/", "-n", "120", "-c", "1"]).finish();
        let path = format!("/budget/{client}?");
        let url = format!("http://budget{path}status=503&delay=300ms");
        mesh.load(client, &[&url, "-n", "12", "-c", "12"]).finish();
        eventually(&format!("every request of {client} is retried twice"), || {
            let log = log(&mesh, &["server", "-c", "proxy"]);
            let tries = log.lines().filter(|line| line.contains(&path)).count();
            if tries == 36 { Ok(()) } else { Err(format!("{tries} tries")) }
        });
    }
}

#[test]
fn endpoints_are_ejected() {
    let mesh = start();
    for client in CLIENTS {
        // Status 500 is no error of a gateway.
        for _ in 0..6 {
            check(&mesh, &[client], &[get("http://gateway-errors/?status=500", 500, &["\"pod\""])]);
        }
        for (url, status) in
            [("http://gateway-errors/?status=502", 502), ("http://server-errors/?status=500", 500)]
        {
            for _ in 0..3 {
                check(&mesh, &[client], &[get(url, status, &["\"pod\""])]);
            }
            wait(&mesh, client, &get(url, 503, &["no healthy upstream"]));
        }
        wait(&mesh, client, &get("http://local-errors/", 503, &["no healthy upstream"]));
        check(&mesh, &[client], &[get("http://plain/", 200, &["\"pod\""])]);
    }
}
