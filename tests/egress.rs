//! `skysail up --egress`: workloads reach hosts outside the mesh, and closed addresses stay closed.
//!
//! Most of these meshes run inside a pod of another mesh, which represents the machine. Its neighbour there is a host
//! outside the inner mesh, at an address for documentation (RFC 5737).

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{
    fs,
    io::Write as _,
    net::{Ipv4Addr, TcpListener},
};

use nix::{
    ifaddrs::getifaddrs,
    sys::signal::{Signal, kill},
    unistd::{Pid, Uid},
};
use skysail_testkit::{Mesh, Setup, envoy, eventually, install};

const BINARY: &str = env!("CARGO_BIN_EXE_skysail");

/// The machine, and the host `real.example` outside the inner mesh.
const OUTER: &str = "
apiVersion: v1
kind: Pod
metadata: {name: machine}
spec: {containers: [{name: c, image: registry.example/machine, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: world, labels: {app: world}}
spec: {containers: [{name: c, image: registry.example/world, ports: [{containerPort: 8080}, {containerPort: 8443}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: world}
spec:
  clusterIP: 198.51.100.2
  selector: {app: world}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: tcp, port: 443, targetPort: 8443}]
";

/// Clients inside the inner mesh; the second has a real Envoy.
const CLIENTS: [&str; 2] = ["front", "by-envoy"];

/// The machine's /etc/hosts.
const HOSTS: &str = "198.51.100.2 real.example other.example a.wild.example turn.example a.named.example\n\
                     127.0.1.1 self.example\n";

const INNER: &str = "
apiVersion: v1
kind: Pod
metadata: {name: front}
spec: {containers: [{name: c, image: registry.example/front, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: by-envoy}
spec: {containers: [{name: c, image: registry.example/front, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: bare, labels: {sidecar.istio.io/inject: 'false'}}
spec: {containers: [{name: c, image: registry.example/bare, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: nobody}
spec: {clusterIP: 198.51.100.9, selector: {app: nobody}, ports: [{name: http, port: 80}]}
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: real}
spec:
  hosts: [real.example]
  ports: [{number: 80, name: http, protocol: HTTP}, {number: 443, name: tls, protocol: TLS}]
  resolution: DNS
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: wild}
spec:
  hosts: ['*.wild.example']
  ports: [{number: 80, name: http, protocol: HTTP}]
  resolution: NONE
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: turn}
spec:
  hosts: [turn.example]
  ports: [{number: 80, name: http, protocol: HTTP}]
  resolution: DNS_ROUND_ROBIN
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: named}
spec:
  hosts: ['*.named.example']
  ports: [{number: 80, name: http, protocol: HTTP}]
  resolution: DYNAMIC_DNS
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: real}
spec:
  hosts: [real.example]
  http: [{route: [{destination: {host: real.example}, headers: {request: {set: {x-routed: here}}}}]}]
";

const REGISTRY_ONLY: &str = "
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data: {mesh: 'outboundTrafficPolicy: {mode: REGISTRY_ONLY}'}
";

fn outer() -> Mesh {
    let setup = Setup::of_text(BINARY, OUTER).with(&["--plain"]);
    let mesh = if Uid::effective().is_root() { setup.as_user(65534) } else { setup }.ready();
    let hosts = mesh.run_folder().join("config/pods/default/machine/hosts");
    fs::OpenOptions::new().append(true).open(hosts).unwrap().write_all(HOSTS.as_bytes()).unwrap();
    mesh
}

/// Calls until the host outside the mesh answers.
fn wait_world(mesh: &Mesh, from: &str, url: &str) -> serde_json::Value {
    eventually(&format!("{url} answers {from}"), || match mesh.call(from, url, &[]) {
        answer if answer.status == Some(200) && answer.json()["pod"]["name"] == "world" => Ok(answer.json()),
        answer => Err(format!("{answer:?}")),
    })
}

fn assert_fails(mesh: &Mesh, from: &str, url: &str, reason: &str) {
    let answer = mesh.call(from, url, &[]);
    assert!(answer.status.is_none() && answer.body.contains(reason), "{url}: {answer:?}");
}

#[test]
fn hosts_outside_the_mesh_are_reached_by_name_and_by_address() {
    let outer = outer();
    // The user of the mesh may have no access to the folder of the Envoy.
    let program = outer.config().with_file_name("envoy");
    install(&envoy(), &program);
    let envoy = format!("default/by-envoy={}", program.display());
    let inner = Setup::of_text(BINARY, INNER).inside(&outer, "machine");
    let mesh = inner.with(&["--egress", "--envoy", &envoy]).ready();
    // Through the ServiceEntry, whose endpoint the control plane looks up, and its routes.
    for from in CLIENTS {
        let routed = wait_world(&mesh, from, "http://real.example/");
        assert_eq!(routed["headers"]["x-routed"], "here", "{from}: {routed:#}");
    }
    // A port with declared protocol TLS carries bytes, which return.
    let echo = mesh.call("front", "http://real.example:443/", &[]);
    assert!(echo.body.contains("no status line"), "{echo:?}");
    // Without a ServiceEntry: by the sidecar's passthrough, and without a sidecar.
    for (from, host) in [
        ("front", "other.example"),
        ("front", "198.51.100.2"),
        ("bare", "real.example"),
        ("bare", "198.51.100.2"),
    ] {
        let report = wait_world(&mesh, from, &format!("http://{host}/"));
        assert!(report["headers"]["x-routed"].is_null(), "{report:#}");
    }

    connections_to_closed_addresses_fail_at_once(&mesh);
    failures_are_reported_once(&mesh);
    // A name that the machine would complete with a search domain: it is looked up unchanged.
    let completed = outer.call("machine", "http://world.default/", &[]);
    assert_eq!(completed.status, Some(200), "{completed:?}");
    assert_fails(&mesh, "bare", "http://world.default/", "not known");

    mesh.put("policy.yaml", REGISTRY_ONLY);
    // The sidecar resolves the host of a request, whatever address the program has dialled: for hosts with
    // DYNAMIC_DNS, and with the second policy for all others.
    let dialled = "http://198.51.100.77/";
    for from in CLIENTS {
        mesh.wait_status(from, "http://other.example/", &[], 502);
        for host in ["real.example", "a.wild.example", "turn.example", "a.named.example"] {
            wait_world(&mesh, from, &format!("http://{host}/"));
        }
        mesh.wait_status(from, dialled, &["-H", "host: a.named.example"], 200);
        mesh.wait_status(from, dialled, &["-H", "host: other.example"], 502);
        // With resolution NONE, the request goes to the dialled address, where nobody listens.
        let unresolved = mesh.call(from, dialled, &["-H", "host: a.wild.example"]);
        assert_ne!(unresolved.status, Some(200), "{from}: {unresolved:?}");
    }
    mesh.put("policy.yaml", &REGISTRY_ONLY.replace("REGISTRY_ONLY", "ALLOW_ANY_DYNAMIC_DNS"));
    CLIENTS.iter().for_each(|from| mesh.wait_status(from, dialled, &["-H", "host: other.example"], 200));
}

fn connections_to_closed_addresses_fail_at_once(mesh: &Mesh) {
    for address in ["169.254.169.254", "100.100.100.200", "240.240.9.9", "10.96.9.9", "198.51.100.9"] {
        assert_fails(mesh, "bare", &format!("http://{address}/"), "unreachable");
    }
    assert_fails(mesh, "bare", "http://self.example/", "No address");
    mesh.wait_for_output(
        "the name self.example has no answer: 127.0.1.1, an address of this machine itself, is closed",
    );
}

fn failures_are_reported_once(mesh: &Mesh) {
    for _ in 0..2 {
        assert_fails(mesh, "bare", "http://198.51.100.3:81/", "reset");
        assert_fails(mesh, "front", "http://missing.example/", "not known");
        assert_fails(mesh, "front", "http://absent.example/", "not known");
    }
    for line in [
        "Pod default/bare: 198.51.100.3:81: ",
        "the name missing.example has no answer: it does not exist",
        "the name absent.example has no answer: it does not exist",
    ] {
        mesh.wait_for_output(line);
        assert_eq!(mesh.output().matches(line).count(), 1, "{}", mesh.output());
    }
}

#[test]
fn without_the_option_nothing_leaves_the_mesh() {
    let outer = outer();
    let mesh = Setup::of_text(BINARY, INNER).inside(&outer, "machine").with(&["--plain"]).ready();
    assert_fails(&mesh, "bare", "http://198.51.100.2/", "unreachable");
    assert_fails(&mesh, "bare", "http://other.example/", "not known");
    mesh.wait_for_output("start with --egress, or add a pod");
    assert!(!outer.output().contains("other.example"), "{}", outer.output());
}

/// On a machine that has loopback addresses only, only these are tested.
#[test]
fn addresses_of_this_machine_are_refused() {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mesh = Setup::of_text(BINARY, INNER).with(&["--plain", "--egress"]).ready();
    let own = getifaddrs().unwrap().filter_map(|link| Some(link.address?.as_sockaddr_in()?.ip()));
    for address in own.filter(|address: &Ipv4Addr| !address.is_loopback()) {
        assert_fails(&mesh, "bare", &format!("http://{address}:{port}/"), "");
        mesh.wait_for_output(&format!(
            "{address}:{port}: an address of this machine itself is closed to workloads"
        ));
    }
    assert!(listener.accept().is_err(), "nothing has come here");
    // A connection to the listener itself is refused as well.
    let port = listening(children(&mesh).find(|child| !is_forwarder(*child)).unwrap());
    assert_fails(&mesh, "bare", &format!("http://10.244.0.1:{port}/"), "reset");
    mesh.wait_for_output(&format!(
        "10.244.0.1:{port}: an address of the mesh's own pods is closed to workloads"
    ));
}

/// Returns the port on the bridge on which the mesh of this process listens, other than DNS.
fn listening(process: Pid) -> u16 {
    let table = fs::read_to_string(format!("/proc/{process}/net/tcp")).unwrap();
    // The columns are a number, the local address, the remote one and the state; 0A is LISTEN.
    let mut ports = table.lines().filter_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
        [_, local, _, "0A", ..] => u16::from_str_radix(local.strip_prefix("0100F40A:")?, 16).ok(),
        _ => None,
    });
    ports.find(|port| *port != 53).unwrap()
}

#[test]
fn the_forwarder_ends_with_the_mesh() {
    for signal in [Signal::SIGINT, Signal::SIGKILL] {
        let mut mesh = Setup::of_text(BINARY, INNER).with(&["--plain", "--egress"]).ready();
        let forwarder = forwarder(&mesh);
        mesh.signal(signal);
        mesh.ended();
        eventually("the forwarder has ended", || match is_forwarder(forwarder) {
            true => Err(format!("process {forwarder} runs")),
            false => Ok(()),
        });
    }
}

#[test]
fn an_end_of_the_forwarder_is_reported() {
    let mesh = Setup::of_text(BINARY, INNER).with(&["--plain", "--egress"]).ready();
    kill(forwarder(&mesh), Signal::SIGKILL).unwrap();
    mesh.wait_for_output("the forwarder of --egress has ended; no connection leaves the mesh");
    eventually("nothing listens any more", || match mesh.call("bare", "http://198.51.100.2/", &[]) {
        answer if answer.body.contains("refused") => Ok(()),
        answer => Err(format!("{answer:?}")),
    });
    assert!(mesh.interrupt().status.success());
}

/// Returns the process that makes connections for a mesh.
fn forwarder(mesh: &Mesh) -> Pid {
    children(mesh).find(|child| is_forwarder(*child)).unwrap()
}

/// Returns whether a process makes connections. A process that has ended does not, even before it is reaped.
fn is_forwarder(process: Pid) -> bool {
    fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default().contains("up-egress")
}

fn children(mesh: &Mesh) -> impl Iterator<Item = Pid> {
    let starter = mesh.process();
    let children = fs::read_to_string(format!("/proc/{starter}/task/{starter}/children")).unwrap();
    let children: Vec<_> =
        children.split_whitespace().map(|child| Pid::from_raw(child.parse().unwrap())).collect();
    children.into_iter()
}
