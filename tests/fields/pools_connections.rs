//! DestinationRule: further settings of the connections to a service, for `skysail-proxy` and for a real Envoy.

use std::{collections::BTreeSet, thread};

use skysail_testkit::{Mesh, Report, eventually};

use crate::{CLIENTS, get, log, mesh_with, wait, wait_logged, with};

const RULES: &str = include_str!("pools_connections.yaml");

/// Returns Services that select the pods with a label `app`. Their ports are in flow style.
pub(crate) fn services(app: &str, names: &[&str], ports: &str) -> String {
    let one = |name: &&str| {
        format!(
            "\n---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\n\
             spec: {{selector: {{app: {app}}}, ports: [{ports}]}}\n"
        )
    };
    names.iter().map(one).collect()
}

/// Port 80 of HTTP that leads to port 8080.
pub(crate) const ONE_PORT: &str = "{name: http, port: 80, targetPort: 8080}";

/// Ports 80 and 81 of HTTP that lead to port 8080.
pub(crate) const TWO_PORTS: &str =
    "{name: http, port: 80, targetPort: 8080}, {name: http-two, port: 81, targetPort: 8080}";

fn start() -> Mesh {
    let http =
        ["few-retries", "many-retries", "one-stream", "many-streams", "two-ports", "forwarder", "poster"];
    let tcp = ["idle-tcp", "lasting-tcp", "header-one", "header-two", "tunneled", "posted"];
    let services =
        [services("server", &http, TWO_PORTS), services("server", &tcp, "{name: tcp, port: 9000}")].concat();
    let mesh = mesh_with(&[RULES, &services].concat(), &["shop/by-envoy"]).ready();
    for client in CLIENTS {
        for host in ["one-stream", "many-streams", "two-ports", "frozen"] {
            wait(&mesh, client, &get(&format!("http://{host}/"), 200, &["\"pod\""]));
        }
    }
    mesh
}

/// Sends `n` requests, `c` at a time.
fn load(mesh: &Mesh, client: &str, url: &str, n: &str, c: &str) -> Report {
    mesh.load(client, &[url, "-n", n, "-c", c]).finish()
}

/// Returns the sum of the statistics of a client's proxy that end with a name, of clusters of a host.
pub(crate) fn statistic(mesh: &Mesh, client: &str, host: &str, name: &str) -> u64 {
    let url = format!("http://127.0.0.1:15000/stats?filter={host}.*{name}$");
    let page = mesh.call(client, &url, &[]).body;
    page.lines().filter_map(|line| line.rsplit_once(": ")?.1.trim().parse::<u64>().ok()).sum()
}

#[test]
fn connections_have_further_limits() {
    let mesh = start();
    for client in CLIENTS {
        // The default is 10 s.
        let late = with(&["-m", "9"], "http://silent.example.com/", 503, &["connection timeout"]);
        wait(&mesh, client, &late);

        let connections = ["one-stream", "many-streams"].map(|host| {
            let path = format!("/{host}/{client}?delay=3s");
            let report = load(&mesh, client, &format!("http://{host}{path}"), "4", "4");
            assert_eq!(report.status.get(&200), Some(&4), "{client} {host}: {report:?}");
            peers(&mesh, &path, 4)
        });
        assert_eq!(connections[0], 4, "{client}: a connection for each request");
        assert!(connections[1] < 4, "{client}: {connections:?}");

        eventually(&format!("retries of {client} are refused"), || {
            load(&mesh, client, "http://few-retries/?status=503&delay=100ms", "16", "8");
            match statistic(&mesh, client, "few-retries", "upstream_rq_retry_overflow") {
                0 => Err("none is refused".to_owned()),
                _ => Ok(()),
            }
        });
        load(&mesh, client, "http://many-retries/?status=503&delay=100ms", "16", "8");
        assert_eq!(statistic(&mesh, client, "many-retries", "upstream_rq_retry_overflow"), 0, "{client}");
        assert_eq!(statistic(&mesh, client, "many-retries", "upstream_rq_retry"), 32, "{client}");

        let refused = |port: u16| {
            let url = format!("http://two-ports:{port}/?delay=300ms");
            load(&mesh, client, &url, "16", "8").status.get(&503).copied().unwrap_or_default()
        };
        eventually(&format!("port 81 is limited for {client}"), || match refused(81) {
            1..16 => Ok(()),
            count => Err(format!("{count} refused")),
        });
        assert_eq!(refused(80), 0, "{client}");
    }
}

/// Returns how many connections the server got for `count` requests of a path.
fn peers(mesh: &Mesh, path: &str, count: usize) -> usize {
    eventually(&format!("{path} is logged"), || {
        let log = log(mesh, &["server", "-c", "proxy"]);
        let lines = log.lines().filter(|line| line.contains(&format!(" {path} ")));
        // The end of Istio's format: local address, peer's address, server name, route.
        let peers: Vec<&str> = lines.filter_map(|line| line.split(' ').rev().nth(2)).collect();
        if peers.len() == count { Ok(peers.into_iter().collect::<BTreeSet<_>>().len()) } else { Err(log) }
    })
}

#[test]
fn connections_of_tcp_have_settings() {
    let mesh = start();
    for client in CLIENTS {
        // The exit code of `read` is 1 at the end of the connection, and above 128 after the time limit.
        let idle = |host: &str, seconds: u32| {
            format!("exec 3<>/dev/tcp/{host}/9000; echo hi >&3; head -1 <&3; read -t {seconds} -u 3; echo $?")
        };
        wait_output(&mesh, client, &idle("idle-tcp", 40), |output| output == b"hi\n1\n");
        wait_output(&mesh, client, &idle("lasting-tcp", 2), |output| output == b"hi\n142\n");

        // The server returns what it gets.
        let head = |host: &str| format!("exec 3<>/dev/tcp/{host}/9000; echo hi >&3; head -c 20 <&3");
        wait_output(&mesh, client, &head("header-one"), |output| output.starts_with(b"PROXY TCP4 10.244."));
        let signature = b"\r\n\r\n\0\r\nQUIT\n\x21\x11";
        wait_output(&mesh, client, &head("header-two"), |output| output.starts_with(signature));

        // The server refuses to connect to the target.
        for (host, request, target) in [
            ("tunneled", "\"CONNECT - HTTP/1.1\" 404", "\"database.example.com:5432\""),
            ("posted", "\"POST / HTTP/1.1\" 403", "\"database.example.com:5433\""),
        ] {
            wait_output(&mesh, client, &head(host), <[u8]>::is_empty);
            wait_logged(&mesh, &["server", "-c", "proxy"], &[request, target, &address(&mesh, client)]);
        }
    }
}

/// Runs a script in a workload until its output is as expected.
fn wait_output(mesh: &Mesh, client: &str, script: &str, is_it: impl Fn(&[u8]) -> bool) {
    eventually(&format!("{client} {script}"), || {
        let output = mesh.run(&["exec", client, "--", "bash", "-c", script]);
        if is_it(&output.stdout) { Ok(()) } else { Err(format!("{output:?}")) }
    });
}

/// Returns the address of the only pod of a workload.
pub(crate) fn address(mesh: &Mesh, workload: &str) -> String {
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let pod = pods.iter().find(|pod| pod["workload"] == workload).unwrap();
    pod["address"].as_str().unwrap().to_owned()
}

/// A connection whose server does not answer a ping ends, and with it its request.
#[test]
fn connections_are_probed() {
    let mesh = start();
    for client in CLIENTS {
        thread::scope(|scope| {
            let url = "http://frozen/?delay=300s";
            // A request that is not safe to repeat.
            let call = scope.spawn(|| mesh.call(client, url, &["-m", "50", "-d", "once"]));
            eventually(&format!("{client} waits"), || {
                match statistic(&mesh, client, "frozen", "upstream_rq_active") {
                    1 => Ok(()),
                    count => Err(format!("{count} requests")),
                }
            });
            signal(&mesh, program(&mesh, "freezing", "proxy"), "STOP");
            let answer = call.join().unwrap();
            signal(&mesh, program(&mesh, "freezing", "proxy"), "CONT");
            assert_eq!(answer.status, Some(503), "{client}: {answer:?}");
        });
        wait(&mesh, client, &get("http://frozen/", 200, &["\"pod\""]));
    }
}

/// Returns the process of a program of the only pod of a workload.
pub(crate) fn program(mesh: &Mesh, workload: &str, name: &str) -> u64 {
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let pod = pods.iter().find(|pod| pod["workload"] == workload).unwrap();
    let programs = pod["programs"].as_array().unwrap();
    programs.iter().find(|program| program["name"] == name).unwrap()["process"].as_u64().unwrap()
}

/// Sends a signal to a program of the mesh. A client's pod has the tools for that.
pub(crate) fn signal(mesh: &Mesh, process: u64, signal: &str) {
    let kill = mesh.run(&["exec", "by-skysail", "--", "sh", "-c", &format!("kill -{signal} {process}")]);
    assert!(kill.status.success(), "{kill:?}");
}
