//! Sidecar: the ports of a workload and the connections of its proxy to it, for `skysail-proxy` and for a real Envoy.

use std::thread;

use skysail_testkit::{Mesh, eventually};

use crate::{
    check, get, mesh_with,
    pools_connections::{program, services, signal, statistic},
    wait,
};

const RULES: &str = include_str!("sidecar_ingress.yaml");
const SERVERS: [&str; 2] = ["inner-skysail", "inner-envoy"];
const CLIENT: &str = "by-skysail";

fn start() -> Mesh {
    let kinds = ["http"; 12].into_iter().enumerate();
    // The ports of HTTP/2.
    let kinds = kinds.map(|(index, kind)| (index + 1, if matches!(index, 6 | 7) { "http2" } else { kind }));
    let ports: Vec<String> =
        kinds.map(|(index, kind)| format!("{{name: {kind}-{index}, port: {}}}", 9000 + index)).collect();
    let services = SERVERS.map(|server| services(server, &[server], &ports.join(", "))).concat();
    let mesh = mesh_with(&[RULES, &services].concat(), &["shop/inner-envoy"]).ready();
    for server in SERVERS {
        wait(&mesh, CLIENT, &get(&url(server, 9011, ""), 200, &[server]));
    }
    mesh
}

fn url(server: &str, port: u16, query: &str) -> String {
    format!("http://{server}:{port}/{query}")
}

/// Returns a statistic of a server's connections to its workload.
fn inbound(mesh: &Mesh, server: &str, port: u16, name: &str) -> u64 {
    statistic(mesh, server, &format!("inbound.{port}"), name)
}

/// Returns how many of 16 requests, 8 at a time, get status 503.
fn refused(mesh: &Mesh, server: &str, port: u16) -> u64 {
    let report = mesh.load(CLIENT, &[&url(server, port, "?delay=300ms"), "-n", "16", "-c", "8"]).finish();
    report.status.get(&503).copied().unwrap_or_default()
}

#[test]
fn ports_have_connections_of_their_own() {
    let mesh = start();
    for server in SERVERS {
        eventually(&format!("{server} is limited"), || match refused(&mesh, server, 9001) {
            1..16 => Ok(()),
            count => Err(format!("{count} refused")),
        });
        assert_eq!(refused(&mesh, server, 9011), 0, "{server}");
        reused(&mesh, server);

        // The workload sees the version of HTTP.
        for (port, protocol) in [(9005, "HTTP/2"), (9011, "HTTP/1.1")] {
            let text = format!("\"protocol\":\"{protocol}");
            check(&mesh, &[CLIENT], &[get(&url(server, port, ""), 200, &[&text])]);
        }

        // Each of these requests has a connection if it has one stream.
        let report = mesh.load(CLIENT, &[&url(server, 9007, "?delay=3s"), "-n", "4", "-c", "4"]).finish();
        assert_eq!(report.status.get(&200), Some(&4), "{report:?}");
        assert_eq!(inbound(&mesh, server, 9007, "upstream_cx_total"), 4, "{server}");
        let report = mesh.load(CLIENT, &[&url(server, 9008, "?delay=3s"), "-n", "4", "-c", "4"]).finish();
        assert_eq!(report.status.get(&200), Some(&4), "{report:?}");
        assert!(inbound(&mesh, server, 9008, "upstream_cx_total") < 4, "{server}");

        // A connection that is refused is tried again.
        eventually(&format!("{server} tries a few again"), || {
            mesh.load(CLIENT, &[&url(server, 9009, ""), "-n", "16", "-c", "8"]).finish();
            match inbound(&mesh, server, 9009, "upstream_rq_retry_overflow") {
                0 => Err("all are tried again".to_owned()),
                _ => Ok(()),
            }
        });
        bound(&mesh, server);
        kept(&mesh, server);
    }
}

/// Requests that use a connection each, unless the port has the defaults.
fn reused(mesh: &Mesh, server: &str) {
    for count in 1..4 {
        for port in [9002, 9003, 9004, 9006] {
            check(mesh, &[CLIENT], &[get(&url(server, port, ""), 200, &[server])]);
            assert_eq!(inbound(mesh, server, port, "upstream_cx_total"), count, "{server} {port}");
        }
        // The connections are idle meanwhile.
        check(mesh, &[CLIENT], &[get(&url(server, 9011, "?delay=1s"), 200, &[])]);
    }
    let before = inbound(mesh, server, 9011, "upstream_cx_total");
    for _ in 0..3 {
        check(mesh, &[CLIENT], &[get(&url(server, 9011, ""), 200, &[])]);
    }
    assert_eq!(inbound(mesh, server, 9011, "upstream_cx_total"), before, "{server}");
}

/// A port with a socket at the loopback address.
fn bound(mesh: &Mesh, server: &str) {
    let local = "http://127.0.0.1:9012/";
    check(mesh, &[server], &[get(local, 200, &[server])]);
    check(mesh, &[CLIENT], &[get(&url(server, 9012, ""), 503, &["connection failure"])]);
    // The other ports have no sockets.
    assert_ne!(mesh.call(server, "http://127.0.0.1:9011/", &[]).status, Some(200));
}

/// The kernel has a timer for each idle connection with keepalive probes. The timeout is in the configuration only:
/// connections to the own pod are never late.
fn kept(mesh: &Mesh, server: &str) {
    eventually("a connection is probed", || {
        check(mesh, &[CLIENT], &[get(&url(server, 9010, ""), 200, &[server])]);
        let table = mesh.run(&["exec", server, "--", "cat", "/proc/net/tcp"]);
        let table = String::from_utf8_lossy(&table.stdout).into_owned();
        let is_probed = |line: &str| {
            let cells: Vec<&str> = line.split_whitespace().collect();
            cells.len() > 5 && cells[2].ends_with(":1F90") && cells[3] == "01" && cells[5].starts_with("02:")
        };
        if table.lines().any(is_probed) { Ok(()) } else { Err(table) }
    });
    let dump = mesh.call(server, "http://127.0.0.1:15000/config_dump", &[]).body;
    let dump: String = dump.split_whitespace().collect();
    let cluster = dump.split("\"cluster\":{").find(|part| part.contains("\"name\":\"inbound|9010||\""));
    let cluster = cluster.unwrap_or_default();
    for text in [
        "\"connect_timeout\":\"0.777s\"",
        "\"keepalive_probes\":3",
        "\"keepalive_time\":77",
        "\"keepalive_interval\":11",
    ] {
        assert!(cluster.contains(text), "{server} {text}: {cluster}");
    }
}

/// A connection to a workload that does not answer a ping ends, and with it its request.
#[test]
fn connections_to_the_workload_are_probed() {
    let mesh = start();
    for server in SERVERS {
        wait(&mesh, CLIENT, &get(&url(server, 9008, ""), 200, &[server]));
        let workload = program(&mesh, server, "c");
        let late = url(server, 9008, "?delay=300s");
        thread::scope(|scope| {
            // A request that is not safe to repeat.
            let call = scope.spawn(|| mesh.call(CLIENT, &late, &["-m", "50", "-d", "once"]).status);
            eventually(&format!("{server} waits"), || {
                match inbound(&mesh, server, 9008, "upstream_rq_active") {
                    1 => Ok(()),
                    count => Err(format!("{count} requests")),
                }
            });
            signal(&mesh, workload, "STOP");
            let status = call.join().unwrap();
            signal(&mesh, workload, "CONT");
            assert_eq!(status, Some(503), "{server}");
        });
        wait(&mesh, CLIENT, &get(&url(server, 9008, ""), 200, &[server]));
    }
}
