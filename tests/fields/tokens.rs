//! RequestAuthentication: targets, fetches of keys, and claims, at `skysail-proxy` and at a real Envoy.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Child, Stdio},
    thread,
    time::Duration,
};

use skysail_testkit::{Mesh, eventually};

use crate::{ask, check, mesh_with, wait, with};

const RULES: &str = include_str!("tokens.yaml");
const FETCHED: &str = include_str!("tokens_fetched.yaml");
/// Key set and token of other tests.
const KEYS: &str = include_str!("keys.json");
const TOKEN: &str = include_str!("alice.jwt");
/// Key set of the next token. Its private key was deleted after it was signed.
const SPACES: &str = r#"{"keys":[{"kty":"EC","kid":"s","alg":"ES256","use":"sig","crv":"P-256","x":"JRSRcx84zv3brJvaMgkiHwnpRRqUoyYLT1_RbAYIDas","y":"iXL8xDZnRM01VtA1HWijCmuC0HiV-fUnmXf_NoDzFww"}]}"#;
/// Token with the claims `listed` and `other`, both `read write`, valid until 2100.
const SPACED: &str = "eyJhbGciOiJFUzI1NiIsImtpZCI6InMiLCJ0eXAiOiJKV1QifQ.eyJpc3MiOiJodHRwczovL3NwYWNlcy5leGFtcGxlLmNvbSIsInN1YiI6ImFsaWNlIiwiZXhwIjo0MTAyNDQ0ODAwLCJsaXN0ZWQiOiJyZWFkIHdyaXRlIiwib3RoZXIiOiJyZWFkIHdyaXRlIn0.zJlV6yrjMe2NiSLknUFvR-YdCt5CkM_4Fdye4Q7VSO1lqlV9KydYLeJ-SOP2YiB9iQXYmceAjEpm8jgnPWfT_A";
/// Time after which the server of keys answers: longer than the short timeout, and shorter than the default.
const DELAY: Duration = Duration::from_secs(1);
/// Address on which the server of keys listens; set in the process that serves them.
const SERVER: &str = "SKYSAIL_TEST_KEYS";
/// Port of the server of keys.
const PORT: u16 = 9080;
const CLIENT: &str = "by-skysail";

#[test]
fn tokens_are_verified_at_targets_and_with_fetched_keys() {
    let fill = |text: &str| text.replace("KEYS", KEYS.trim()).replace("SPACES", SPACES);
    let mesh = mesh_with(&fill(RULES), &["shop/api-v2", "shop/edge-envoy"]).ready();
    targets(&mesh);
    mesh.put("fetched.yaml", &fill(FETCHED).replace("SERVER", &server_address(&mesh)));
    fetch_failed(&mesh, "Connection refused");
    let mut keys = start_server(&mesh);
    fetch_failed(&mesh, "no answer within 100ms");
    for server in ["v1", "v2"] {
        let to = format!("x-to: {server}");
        let header = |name: &str, token: &str| format!("x-{name}: {}", token.trim());
        let is = |path: &str, header: &str, status: u16| {
            let arguments = ["-H", &to, "-H", header];
            ask(&mesh, CLIENT, &with(&arguments, &format!("http://api{path}"), status, &[]))
        };
        let spaced = header("spaces", SPACED);
        eventually("a claim is a list", || is("/listed", &spaced, 200));
        assert_eq!(is("/other", &spaced, 403), Ok(()), "{server}");
        let patient = header("patient", TOKEN);
        eventually("a token is valid once the keys have arrived", || is("/", &patient, 200));
        assert_eq!(is("/", &header("hasty", TOKEN), 401), Ok(()), "{server}");
    }
    keys.kill().unwrap();
    keys.wait().unwrap();
    keys_survive_issuer_and_control_plane(&mesh, &fill(FETCHED));
}

/// Restarts the control plane while the server of keys is away. Its keys stay in effect, also for a later change.
fn keys_survive_issuer_and_control_plane(mesh: &Mesh, fetched: &str) {
    let old = mesh.status()["control"].clone();
    let kill = mesh.run(&["exec", "plain", "--", "sh", "-c", &format!("kill -KILL {old}")]);
    assert!(kill.status.success(), "{kill:?}");
    eventually("another control plane runs", || match mesh.status()["control"].clone() {
        new if new == old || new.is_null() => Err(format!("{new} runs")),
        _ => Ok(()),
    });
    let later = fetched.replace("{name: x-patient}", "{name: x-patient}, {name: x-later}");
    mesh.put("fetched.yaml", &later.replace("SERVER", &server_address(mesh)));
    for server in ["v1", "v2"] {
        let to = format!("x-to: {server}");
        let is = |token: &str, status: u16| {
            let token = format!("x-later: {token}");
            ask(mesh, CLIENT, &with(&["-H", &to, "-H", &token], "http://api/", status, &[]))
        };
        eventually("the other header is read", || is("no.token.here", 401));
        assert_eq!(is(TOKEN.trim(), 200), Ok(()), "{server}");
    }
}

/// Checks which policies apply to the gateways.
fn targets(mesh: &Mesh) {
    for gateway in ["edge-skysail", "edge-envoy"] {
        let url = format!("http://{gateway}/");
        wait(mesh, "plain", &with(&[], &url, 298, &[]));
        for (name, status) in
            [("one", 401), ("several", 401), ("other-name", 298), ("other-kind", 298), ("other-group", 298)]
        {
            let header = format!("x-{name}: no.token.here");
            check(mesh, &["plain"], &[with(&["-H", &header], &url, status, &[])]);
        }
    }
}

/// Waits until the control plane has logged an error of the fetch with the short timeout.
fn fetch_failed(mesh: &Mesh, error: &str) {
    eventually("a failed fetch is logged", || {
        let log = fs::read_to_string(mesh.run_folder().join("config/logs/control.log")).unwrap();
        let is_it = |line: &str| line.contains("/hasty ") && line.contains(error);
        if log.lines().any(is_it) { Ok(()) } else { Err(log) }
    });
}

/// Returns the address of the server of keys.
fn server_address(mesh: &Mesh) -> String {
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let pod = pods.iter().find(|pod| pod["name"] == "plain").unwrap();
    format!("{}:{PORT}", pod["address"].as_str().unwrap())
}

/// Starts the server of keys in a pod.
fn start_server(mesh: &Mesh) -> Child {
    let program = std::env::current_exe().unwrap().to_string_lossy().into_owned();
    let variable = format!("{SERVER}=0.0.0.0:{PORT}");
    let test = ["env", &variable, &program, "--exact", "tokens::the_server_of_keys", "--test-threads", "1"];
    let mut command = mesh.command(&[&["exec", "plain", "--"], &test[..]].concat());
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Serves the key set in the process that another test starts within a pod.
#[test]
fn the_server_of_keys() {
    let Ok(address) = std::env::var(SERVER) else { return };
    for stream in TcpListener::bind(address).unwrap().incoming() {
        thread::spawn(move || answer(stream.unwrap()));
    }
}

/// Answers after a delay, or when the client has given up.
fn answer(mut stream: TcpStream) {
    let mut part = [0; 4096];
    let _ = stream.read(&mut part);
    stream.set_read_timeout(Some(DELAY)).unwrap();
    let _ = stream.read(&mut part);
    let keys = KEYS.trim();
    let head = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", keys.len());
    let _ = stream.write_all(format!("{head}{keys}").as_bytes());
}
