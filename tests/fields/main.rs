//! Fields of configuration from YAML to behaviour. `crates/model/fields` names these tests.
//!
//! Each mesh has many fields. Where a client's proxy decides, the same requests are sent through `skysail-proxy` and
//! through a real Envoy, and both must get the same result.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

mod balancing;
mod entries;
mod extensions;
mod gateway;
mod gateway_api;
mod gateway_api_backend_tls;
mod gateway_api_certificates;
mod gateway_api_edge;
mod gateway_api_mesh;
mod gateway_api_tls;
mod ingress_tls;
mod limits;
mod merged_metrics;
mod mesh_config;
mod mesh_config_authorizers;
mod mesh_config_clients;
mod mesh_config_collector;
mod mesh_config_connections;
mod mesh_config_defaults;
mod mesh_config_dns;
mod mesh_config_edges;
mod mesh_config_localities;
mod mesh_config_servers;
mod mesh_config_start;
mod mesh_config_telemetry;
mod mesh_config_tracers;
mod mesh_config_tracing;
mod mesh_config_unknown_hosts;
mod patch_operations;
mod patches;
mod policies;
mod pools;
mod pools_balancing;
mod pools_connections;
mod pools_tls;
mod routing;
mod secure;
mod secure_files;
mod sidecar;
mod sidecar_ingress;
mod telemetry;
mod telemetry_intervals;
mod tokens;
mod tracing;
mod values;
mod workloads_entries;
mod workloads_health;
mod workloads_machines;
mod workloads_services;

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixListener,
    path::Path,
    thread,
};

use skysail_testkit::{Mesh, Setup, eventually};

const BINARY: &str = env!("CARGO_BIN_EXE_skysail");
/// Clients of one identity, the second with a real Envoy.
const CLIENTS: [&str; 2] = ["by-skysail", "by-envoy"];

/// A request and what its response must be.
struct Case<'a> {
    url: &'a str,
    arguments: &'a [&'a str],
    status: u16,
    /// Texts that the head or the body of the response contains.
    has: &'a [&'a str],
    /// Texts that the response does not contain.
    lacks: &'a [&'a str],
}

/// A request without arguments whose response only has to contain something.
const fn get<'a>(url: &'a str, status: u16, has: &'a [&'a str]) -> Case<'a> {
    Case { url, arguments: &[], status, has, lacks: &[] }
}

/// A request with arguments.
const fn with<'a>(arguments: &'a [&'a str], url: &'a str, status: u16, has: &'a [&'a str]) -> Case<'a> {
    Case { url, arguments, status, has, lacks: &[] }
}

/// Configures the mesh of all tests with further objects, and with a real Envoy in these workloads.
fn mesh_with(objects: &str, envoys: &[&str]) -> Setup {
    let setup = Setup::of_text(BINARY, include_str!("mesh.yaml"));
    setup.put("rules.yaml", objects);
    setup.with_envoys(envoys)
}

/// Sends each request from each client once, and fails with all responses that are not as expected.
fn check(mesh: &Mesh, clients: &[&str], cases: &[Case<'_>]) {
    let mut wrong = Vec::new();
    for client in clients {
        for case in cases {
            if let Err(answer) = ask(mesh, client, case) {
                wrong.push(format!("{client} {} {:?}: {answer}", case.url, case.arguments));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Sends a request until its response is as expected.
fn wait(mesh: &Mesh, client: &str, case: &Case<'_>) {
    eventually(&format!("{client} {} {:?}", case.url, case.arguments), || ask(mesh, client, case));
}

/// Sends a request; the error is a response that is not as expected.
fn ask(mesh: &Mesh, client: &str, case: &Case<'_>) -> Result<(), String> {
    let arguments = [&["-i"], case.arguments].concat();
    let answer = mesh.call(client, case.url, &arguments);
    let has = |text: &&str| answer.body.contains(*text);
    let is_it = answer.status == Some(case.status) && case.has.iter().all(has) && !case.lacks.iter().any(has);
    if is_it { Ok(()) } else { Err(format!("expected {} {:?}, found {answer:?}", case.status, case.has)) }
}

/// Body of the responses of [`serve_socket`].
const OF_SOCKET: &str = "served at a socket";

/// Serves HTTP/1.1 at a Unix socket until the process ends: each connection gets one response.
fn serve_socket(path: &Path) {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let head = BufReader::new(&stream).lines().map_while(Result::ok);
            // The head ends with an empty line.
            head.take_while(|line| !line.is_empty()).for_each(drop);
            let length = OF_SOCKET.len();
            let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
            let _ = stream.write_all([&head, OF_SOCKET].concat().as_bytes());
        }
    });
}

/// Waits until one line of a log has all these texts. `of` are arguments of `skysail logs`.
fn wait_logged(mesh: &Mesh, of: &[&str], texts: &[&str]) {
    eventually(&format!("{of:?} logs {texts:?}"), || {
        let log = log(mesh, of);
        let is_found = log.lines().any(|line| texts.iter().all(|text| line.contains(text)));
        if is_found { Ok(()) } else { Err(log) }
    });
}

fn log(mesh: &Mesh, of: &[&str]) -> String {
    let output = mesh.run(&[&["logs"], of].concat());
    String::from_utf8_lossy(&output.stdout).into_owned()
}
