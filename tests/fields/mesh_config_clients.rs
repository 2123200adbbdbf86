//! MeshConfig: settings of the clients' proxies: retries, connections, headers, and names that nobody knows.

use std::collections::BTreeMap;

use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, check, get, log, mesh_config_collector::Collector, mesh_with, wait, with};

const RULES: &str = include_str!("mesh_config_clients.yaml");
/// Response to a request for a host about which the control plane has not answered.
const UNANSWERED: &str = "no answer from the control plane about this host";
/// What a response of a server contains.
const POD: [&str; 1] = ["\"pod\""];
/// Requests of which each is retried once.
const MANY: usize = 100;

#[test]
fn clients_follow_the_mesh() {
    let mesh = mesh_with(RULES, &["shop/by-envoy", "shop/api-v2"]).ready();
    let collector = Collector::start(&mesh, "collector");
    for client in CLIENTS {
        for version in ["v1", "v2"] {
            wait(&mesh, client, &get("http://pair/", 200, &[&format!("\"version\":\"{version}\"")]));
        }
        // The default is 10 s.
        let late = with(&["-m", "9"], "http://silent.example.com/", 503, &["connection timeout"]);
        wait(&mesh, client, &late);
        check(&mesh, &[client], &[get("http://pair/?delay=20s", 504, &[])]);
        keepalive(&mesh, client);
    }
    names(&mesh);
    headers(&mesh, &collector);
    previous_hosts(&mesh);
    backoff(&mesh);
    unanswered(&mesh);
}

/// The kernel's timer of an idle connection is below that of the setting. The default is two hours.
fn keepalive(mesh: &Mesh, client: &str) {
    eventually("a connection is probed", || {
        check(mesh, &[client], &[get("http://pair/", 200, &[])]);
        let table = mesh.run(&["exec", client, "--", "cat", "/proc/net/tcp"]);
        let table = String::from_utf8_lossy(&table.stdout).into_owned();
        // Remote port 8080, state ESTABLISHED, timer 2 (keepalive) in hundredths of a second.
        let is_probed = |line: &str| {
            let cells: Vec<&str> = line.split_whitespace().collect();
            let timer = cells.get(5).and_then(|timer| timer.strip_prefix("02:"));
            let left = timer.and_then(|left| u32::from_str_radix(left, 16).ok());
            cells.len() > 5 && cells[2].ends_with(":1F90") && left.is_some_and(|left| left <= 7700)
        };
        if table.lines().any(is_probed) { Ok(()) } else { Err(table) }
    });
}

/// What a proxy shows of its clusters.
fn names(mesh: &Mesh) {
    for client in CLIENTS {
        let page = |path: &str| mesh.call(client, &format!("http://127.0.0.1:{path}"), &[]).body;
        let dump: String = page("15000/config_dump").split_whitespace().collect();
        for text in ["\"keepalive_probes\":33", "\"keepalive_interval\":11"] {
            assert!(dump.contains(text), "{client} has no {text}: {dump}");
        }
        // The name is one of an Envoy.
        let metrics = page("15090/stats/prometheus");
        assert!(client == "by-skysail" || metrics.contains("own-outbound-pair"), "{metrics}");
    }
}

fn headers(mesh: &Mesh, collector: &Collector) {
    let (client, took) = ("by-envoy", "x-envoy-upstream-service-time");
    check(mesh, &[client], &[get("http://pair/", 200, &[took])]);
    let cases = |request_name: &str, response_name: &str| {
        for client in CLIENTS {
            let request = format!(
                "GET / HTTP/1.1\\r\\nHost: raw\\r\\nX-Own-Name: {client}\\r\\nConnection: close\\r\\n\\r\\n"
            );
            let script = format!("exec 3<>/dev/tcp/raw/80; printf '{request}' >&3; cat <&3");
            eventually(&format!("{client} has {request_name} and {response_name}"), || {
                let answer = mesh.run(&["exec", client, "--", "bash", "-c", &script]);
                let text = String::from_utf8_lossy(&answer.stdout).into_owned();
                let sent = collector.find(&["raw", &format!("{request_name}: {client}")]);
                let is_it = sent.is_some() && text.contains(&format!("{response_name}: raw"));
                if is_it { Ok(()) } else { Err(format!("{sent:?} {answer:?}")) }
            });
        }
    };
    cases("X-Own-Name", "X-Own-Case");

    let client = "by-skysail";
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let outside = pods.iter().find(|pod| pod["name"] == "collector").unwrap()["address"].as_str().unwrap();
    // The address belongs to no service.
    let outside = format!("http://{outside}/");
    (0..3).for_each(|_| check(mesh, &[client], &[get(&outside, 200, &["\"x-envoy-peer-metadata\""])]));
    mesh.edit("rules.yaml", "{mode: UNDEFINED}", "{mode: IN_MESH}");
    mesh.edit("rules.yaml", "{disabled: false}", "{disabled: true}");
    mesh.edit("rules.yaml", "preserveHttp1HeaderCase: true", "preserveHttp1HeaderCase: false");
    wait(mesh, client, &crate::Case { lacks: &["x-envoy-peer-metadata"], ..get(&outside, 200, &POD) });
    wait(mesh, "by-envoy", &crate::Case { lacks: &[took], ..get("http://pair/", 200, &POD) });
    cases("x-own-name", "x-own-case");
}

/// Returns how many of many requests reached one server twice.
fn repeated(mesh: &Mesh, client: &str, path: &str) -> Result<usize, String> {
    let url = format!("http://pair{path}");
    mesh.run(&["call", client, &url, "-n", &MANY.to_string()]);
    let mut counts = BTreeMap::new();
    let mut total = 0;
    for server in ["api-v1", "api-v2"] {
        let log = log(mesh, &[server]);
        for line in log.lines().filter(|line| line.contains(&format!("path={path} "))) {
            let id =
                line.split("request_id=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or_default();
            *counts.entry((server, id.to_owned())).or_insert(0) += 1;
            total += 1;
        }
    }
    let is_whole = total == 2 * MANY;
    let twice = counts.values().filter(|count| **count == 2).count();
    if is_whole { Ok(twice) } else { Err(format!("{total} requests arrived")) }
}

/// A retry selects up to five times until it finds another server, so that one in 64 reaches the same one; without the
/// setting one in two does.
fn previous_hosts(mesh: &Mesh) {
    for (ignores, path) in [(true, "other"), (false, "any")] {
        for client in CLIENTS {
            let mut round = 0;
            eventually(&format!("{client} ignores previous hosts: {ignores}"), || {
                round += 1;
                let twice = repeated(mesh, client, &format!("/status/503/{path}/{client}/{round}"))?;
                if (twice < MANY / 4) == ignores { Ok(()) } else { Err(format!("{twice} of {MANY}")) }
            });
        }
        if ignores {
            mesh.edit("rules.yaml", "IgnorePreviousHosts: true", "IgnorePreviousHosts: false");
        }
    }
}

/// The retry comes after the timeout of the route if the mesh says so.
fn backoff(mesh: &Mesh) {
    check(mesh, &CLIENTS, &[get("http://late/status/503", 503, &[])]);
    mesh.edit("rules.yaml", "backoff: 1ms", "backoff: 9000s");
    for client in CLIENTS {
        wait(mesh, client, &get("http://late/status/503", 504, &[]));
    }
}

/// Requests for a host of which the control plane does not tell are refused, or treated as those of unknown hosts.
fn unanswered(mesh: &Mesh) {
    let client = "by-skysail";
    let control = mesh.status()["control"].clone();
    let signal = |name: &str| {
        let kill = mesh.run(&["exec", client, "--", "sh", "-c", &format!("kill -{name} {control}")]);
        assert!(kill.status.success(), "{kill:?}");
    };
    let asked_without_control = |url: &str| {
        signal("STOP");
        let answer = mesh.call(client, url, &[]);
        signal("CONT");
        answer
    };
    let refused = asked_without_control("http://unused-one.shop/");
    assert_eq!((refused.status, refused.body.as_str()), (Some(503), UNANSWERED));
    mesh.edit("rules.yaml", "unansweredHosts: REFUSE", "unansweredHosts: CATCH_ALL");
    eventually("the proxy knows the setting", || {
        let dump = mesh.call(client, "http://127.0.0.1:15000/config_dump", &[]).body;
        if dump.contains("takes_unanswered") { Ok(()) } else { Err(dump) }
    });
    let passed = asked_without_control("http://unused-two.shop/");
    assert!(passed.status.is_some() && passed.body != UNANSWERED, "{passed:?}");
}
