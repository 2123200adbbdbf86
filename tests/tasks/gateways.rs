//! Tasks of gateways: clients outside of the mesh, and hosts outside of it.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use skysail_testkit::eventually;

use crate::{app_with, published};

/// Timeout of reads. A test that waits longer has failed.
const PATIENCE: Duration = Duration::from_secs(20);

fn connect(address: SocketAddr) -> Result<TcpStream, String> {
    let stream = TcpStream::connect(address).map_err(|error| error.to_string())?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    Ok(stream)
}

/// Sends a request and returns the whole response.
fn exchange(mut stream: impl Read + Write, host: &str, path: &str) -> Result<String, String> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
    let mut response = Vec::new();
    match stream.read_to_end(&mut response) {
        Err(error) if response.is_empty() => Err(error.to_string()),
        _ => Ok(String::from_utf8_lossy(&response).into_owned()),
    }
}

/// Waits until a response has this status and contains this text.
fn wait_response(what: &str, status: u16, text: &str, mut ask: impl FnMut() -> Result<String, String>) {
    eventually(what, || {
        let response = ask()?;
        let is_it = response.starts_with(&format!("HTTP/1.1 {status}")) && response.contains(text);
        if is_it { Ok(()) } else { Err(response) }
    });
}

#[test]
fn clients_outside_reach_services_by_host_and_path() {
    let mesh = app_with(&["ingress"]).ready();
    let address = published(&mesh, "default/ingress:8080");
    let get = |host: &str, path: &str| exchange(connect(address)?, host, path);
    wait_response("films", 200, r#""name":"films-v"#, || get("cinema.example.com", "/films"));
    wait_response("seats", 200, r#""name":"seats-"#, || get("cinema.example.com", "/seats"));
    wait_response("another path", 404, "", || get("cinema.example.com", "/other"));
    wait_response("another host", 404, "", || get("other.example.com", "/films"));
}
