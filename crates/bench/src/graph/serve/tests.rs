//! Tests of the mock service over real sockets.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    time::Instant,
};

use super::*;
use crate::graph::format;

/// Starts threads that run a service of a graph.
fn start(graph: &str, name: &str, threads: usize, connections: usize) -> WorkerSwitch {
    let graph = format::parse(graph).unwrap_or_else(|error| panic!("{error}\n{graph}"));
    let switch = WorkerSwitch::open("127.0.0.1:0".parse().unwrap()).unwrap();
    let counters = Arc::new(Counters::new(&graph, name).unwrap());
    let permits = Arc::new(Semaphore::new(connections));
    for _ in 0..threads {
        let (graph, name, counters) = (graph.clone(), name.to_owned(), Arc::clone(&counters));
        let (state, permits) = (switch.watch(), Arc::clone(&permits));
        thread::spawn(move || serve(state, permits, &graph, &name, counters));
    }
    switch
}

/// Runs a service of a graph on a thread. Returns its address.
fn run_service(graph: &str, name: &str) -> SocketAddr {
    let switch = start(graph, name, 1, 100);
    let address = switch.address;
    // The service ends with its switch.
    std::mem::forget(switch);
    address
}

/// Runs the endpoint of a service on a thread. Returns its address.
fn run_control(switch: WorkerSwitch) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            match control::serve(listener, switch).await {}
        })
    });
    address
}

/// Sets a behaviour. Returns status and body of the response.
fn put(control: SocketAddr, behavior: &str) -> (u16, String) {
    let request = format!(
        "PUT / HTTP/1.1\r\nHost: {control}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{behavior}",
        behavior.len()
    );
    status_and_body(&send(control, &request))
}

/// A service without calls and its address.
fn leaf(fields: &str) -> SocketAddr {
    run_service(&format!("services:\n- name: leaf\n  isEntrypoint: true\n  {fields}\n"), "leaf")
}

/// Sends bytes and reads until the server closes the connection.
fn send(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

/// Returns status and body of a GET.
pub(super) fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    status_and_body(&send(address, &request))
}

fn status_and_body(response: &str) -> (u16, String) {
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), body.to_owned())
}

/// Returns a counter of a service.
pub(super) fn counter(address: SocketAddr, name: &str) -> u64 {
    let (_, text) = get(address, "/metrics");
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    text.lines().find_map(value).unwrap_or(0)
}

pub(super) const RECEIVED: &str = "service_incoming_requests_total";

/// A recorder of requests: answers each with this response, and sends the requests of its connections, one text for each
/// connection, once they are closed.
fn recorder(response: &'static str, requests: usize) -> (SocketAddr, thread::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let record = move || {
        let (mut stream, _) = listener.accept().unwrap();
        let (mut input, mut buffer) = (Vec::new(), [0; 4096]);
        for number in 1..=requests {
            while input.windows(4).filter(|window| window == b"\r\n\r\n").count() < number {
                let length = stream.read(&mut buffer).unwrap();
                assert!(length > 0, "the connection was closed early");
                input.extend_from_slice(&buffer[..length]);
            }
            stream.write_all(response.as_bytes()).unwrap();
        }
        String::from_utf8(input).unwrap()
    };
    (address, thread::spawn(record))
}

#[test]
fn responses_have_their_size() {
    for size in [0, 5, 100_000] {
        let address = leaf(&format!("responseSize: {size}"));
        let (status, body) = get(address, "/any");
        assert_eq!((status, body.len()), (200, size));
        let head = send(address, "HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        assert!(
            head.contains(&format!("Content-Length: {size}\r\n")) && head.ends_with("\r\n\r\n"),
            "{head}"
        );
    }
}

#[test]
fn bodies_are_skipped_and_connections_kept() {
    let address = leaf("responseSize: 1");
    let response = send(
        address,
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc\
         POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n\
         GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n\
         GET / HTTP/1.0\r\n\r\n",
    );
    assert_eq!(response.matches("HTTP/1.1 200 OK").count(), 4, "{response}");
    assert_eq!(response.matches("Connection: keep-alive").count(), 1, "{response}");
    assert_eq!(response.matches("Connection: close").count(), 1, "{response}");
    assert_eq!(counter(address, RECEIVED), 4);
}

#[test]
fn invalid_requests_are_refused() {
    let address = leaf("responseSize: 1");
    let response = send(address, "POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n");
    assert!(response.starts_with("HTTP/1.1 400 "), "{response}");
    let response = send(address, "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n");
    assert!(response.starts_with("HTTP/1.1 400 "), "{response}");
    // Unread bytes would reset the connection, so these are exactly the maximum.
    let start = "GET / HTTP/1.1\r\nX: ";
    let response = send(address, &format!("{start}{}", "y".repeat((64 << 10) - start.len())));
    assert!(response.starts_with("HTTP/1.1 431 "), "{response}");
}

#[test]
fn the_share_of_errors_is_exact() {
    let address = leaf("errorRate: 25%");
    let statuses: Vec<u16> = (0..8).map(|_| get(address, "/").0).collect();
    assert_eq!(statuses, [200, 200, 200, 500, 200, 200, 200, 500]);
    assert_eq!(counter(address, "service_response_size_count{code=\"500\"}"), 2);
    assert_eq!(counter(address, "service_request_duration_seconds_count{code=\"200\"}"), 6);
}

#[test]
fn calls_keep_connections_and_forward_tracing_headers() {
    let (address, requests) = recorder("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 3);
    let graph = format!(
        "services:\n- name: a\n  isEntrypoint: true\n  script:\n  - call: {{service: b, hostname: \"{address}\", \
         extra-header: {{x-tenant: blue}}}}\n- name: b\n"
    );
    let front = run_service(&graph, "a");
    let request =
        "GET / HTTP/1.1\r\nHost: a\r\nTraceParent: 00-1-2-01\r\nx-other: 1\r\nX-B3-TraceId: 7\r\n\r\n";
    let last = "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    let response = send(front, &format!("{request}{request}{last}"));
    assert_eq!(response.matches("200 OK").count(), 3, "{response}");
    let head = format!("GET / HTTP/1.1\r\nHost: {address}\r\nx-tenant: blue\r\n");
    let traced = format!("{head}TraceParent: 00-1-2-01\r\nX-B3-TraceId: 7\r\n\r\n");
    assert_eq!(requests.join().unwrap(), format!("{traced}{traced}{head}\r\n"));
    let calls = format!("service_outgoing_requests_total{{destination_service=\"{address}\"}}");
    assert_eq!(counter(front, &calls), 3);
}

#[test]
fn a_connection_that_the_callee_has_closed_is_replaced() {
    let (first, requests) = recorder("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 1);
    let graph = format!(
        "services:\n- name: a\n  isEntrypoint: true\n  script:\n  - call: {{service: b, hostname: \"{first}\"}}\n- name: b\n"
    );
    let front = run_service(&graph, "a");
    assert_eq!(get(front, "/").0, 200);
    // The recorder has closed its connection and its listener.
    requests.join().unwrap();
    let (status, body) = get(front, "/");
    assert_eq!((status, body.starts_with(&format!("cannot call {first}: "))), (500, true), "{body}");
    let listener = TcpListener::bind(first).unwrap();
    let again = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = [0; 4096];
        assert!(stream.read(&mut buffer).unwrap() > 0);
        stream.write_all(b"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n").unwrap();
    });
    assert_eq!(get(front, "/"), (500, format!("{first} responded with 503\n")));
    again.join().unwrap();
}

#[test]
fn the_commands_of_a_step_run_concurrently() {
    // Each callee answers only once both calls have arrived.
    let listeners = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let addresses = [0, 1].map(|at: usize| listeners[at].local_addr().unwrap());
    let callees = thread::spawn(move || {
        let mut streams = listeners.map(|listener| listener.accept().unwrap().0);
        for stream in &mut streams {
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
        }
        for stream in &mut streams {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
        }
    });
    let graph = format!(
        "services:\n- name: a\n  isEntrypoint: true\n  script:\n  - sleep: 20ms\n  - - call: {{service: b, hostname: \"{}\"}}\n    \
         - call: {{service: b, hostname: \"{}\"}}\n    - sleep: 1ms\n- name: b\n",
        addresses[0], addresses[1]
    );
    let front = run_service(&graph, "a");
    let started = Instant::now();
    assert_eq!(get(front, "/").0, 200);
    // A sleep never ends early, however slow the machine is.
    assert!(started.elapsed() >= Duration::from_millis(20));
    callees.join().unwrap();
}

#[test]
fn a_tree_makes_the_calls_of_its_graph() {
    for protocol in ["http", "grpc"] {
        let defaults = format!("defaults: {{type: {protocol}, requestSize: 100 KB, responseSize: 300 KB}}\n");
        let alone = format!("{defaults}services: [{{name: c, isEntrypoint: true}}]\n");
        let c = run_service(&alone, "c");
        let call =
            |to: &str, address: SocketAddr| format!("call: {{service: {to}, hostname: \"{address}\"}}");
        let graph = |calls: String| {
            format!(
                "{defaults}services:\n- name: a\n  type: http\n  isEntrypoint: true\n  script:\n{calls}- name: b\n- name: c\n"
            )
        };
        // `b` calls `c` as the first service of a graph of its own.
        let of_b = format!(
            "{defaults}services:\n- name: b\n  isEntrypoint: true\n  script: [{{{}}}]\n- name: c\n",
            call("c", c)
        );
        let b = run_service(&of_b, "b");
        let a = run_service(
            &graph(format!("  - - {}\n    - {}\n  - {}\n", call("b", b), call("c", c), call("c", c))),
            "a",
        );
        for _ in 0..3 {
            let (status, body) = get(a, "/");
            assert_eq!((status, body.len()), (200, 300 << 10), "{protocol}: {body:.100}");
        }
        assert_eq!([a, b, c].map(|address| counter(address, RECEIVED)), [3, 3, 9], "{protocol}");
        let sizes = format!("service_outgoing_request_size_sum{{destination_service=\"{c}\"}}");
        assert_eq!(counter(a, &sizes), 6 * (100 << 10), "{protocol}");
    }
}

#[test]
fn an_error_of_a_callee_is_one_of_its_caller() {
    for (protocol, expected) in [("http", "responded with 500"), ("grpc", "responded with gRPC status 13")] {
        let callee = run_service(
            &format!("services:\n- {{name: b, type: {protocol}, errorRate: 1.0, isEntrypoint: true}}\n"),
            "b",
        );
        let graph = format!(
            "services:\n- name: a\n  isEntrypoint: true\n  script:\n  - call: {{service: b, hostname: \"{callee}\"}}\n\
             - {{name: b, type: {protocol}}}\n"
        );
        let front = run_service(&graph, "a");
        assert_eq!(get(front, "/"), (500, format!("{callee} {expected}\n")));
    }
}

#[test]
fn hosts_have_the_namespace_of_another_service() {
    let graph = "services:\n- name: a\n  namespace: one\n  isEntrypoint: true\n  script:\n  - call: b\n  - call: c\n  - call: \
                 {service: c, hostname: c.global}\n- {name: b, namespace: one}\n- {name: c, namespace: two}\n";
    let graph = format::parse(graph).unwrap();
    assert_eq!(script::hosts(&graph, &graph.services[0]), ["b:8080", "c.global", "c.two:8080"]);
    let error = Counters::new(&graph, "d").err().unwrap().to_string();
    assert_eq!(error, "the graph has no service d; its services: a, b, c");
}

#[test]
fn a_probability_is_the_share_of_calls() {
    let callee = leaf("responseSize: 0");
    let graph = format!(
        "services:\n- name: a\n  isEntrypoint: true\n  script:\n  - call: {{service: b, hostname: \"{callee}\", probability: 30}}\n- name: b\n"
    );
    let front = run_service(&graph, "a");
    let request = "GET / HTTP/1.1\r\nHost: a\r\n\r\n".repeat(1_999);
    send(front, &format!("{request}GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"));
    let calls = counter(callee, RECEIVED);
    // Ten standard deviations around the mean.
    assert!((395..=805).contains(&calls), "{calls}");
}

#[test]
fn a_service_that_is_down_refuses_connections_until_it_returns() {
    let graph = "services:\n- {name: leaf, isEntrypoint: true, responseSize: 1}\n";
    let switch = start(graph, "leaf", 3, 100);
    let address = switch.address;
    let control = run_control(switch);
    let connect = || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
        stream
    };
    let kept = [0; 4].map(|_| connect());
    for _ in 0..2 {
        assert_eq!(put(control, r#"{"down": true}"#), (200, r#"{"down":true}"#.to_owned()));
    }
    for mut stream in kept {
        assert_eq!(stream.read(&mut [0; 16]).unwrap_or_default(), 0, "the connection is closed");
    }
    assert_eq!(TcpStream::connect(address).unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(put(control, "{}").0, 200);
    assert_eq!(get(address, "/"), (200, "x".to_owned()));
    assert_eq!(counter(address, RECEIVED), 5, "the counters are kept");
}

#[test]
fn latency_and_errors_change_while_connections_stay() {
    let graph = "services:\n- {name: leaf, isEntrypoint: true, errorRate: 100%}\n";
    let switch = start(graph, "leaf", 1, 100);
    let address = switch.address;
    let control = run_control(switch);
    let mut stream = TcpStream::connect(address).unwrap();
    let mut exchange = || {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut response = [0; 4096];
        let length = stream.read(&mut response).unwrap();
        String::from_utf8_lossy(&response[9..length.min(12)]).into_owned()
    };
    assert_eq!(exchange(), "500");
    let behavior = r#"{"delay":"20ms","errors":"0%","down":false}"#;
    assert_eq!(put(control, behavior), (200, behavior.to_owned()));
    assert_eq!(get(control, "/"), (200, behavior.to_owned()));
    // The thread may not have seen the change yet.
    while exchange() == "500" {}
    let started = Instant::now();
    assert_eq!(exchange(), "200");
    assert!(started.elapsed() >= Duration::from_millis(20));
    for invalid in ["", "{", r#"{"delay": 5}"#, r#"{"down": true, "x": 1}"#] {
        assert_eq!(put(control, invalid).0, 400, "{invalid}");
    }
    assert_eq!(get(control, "/").1, behavior);
    let foreign = send(control, "GET / HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n");
    assert!(foreign.starts_with("HTTP/1.1 403 "), "{foreign}");
}

#[test]
fn connections_above_the_limit_wait() {
    let switch = start("services:\n- {name: leaf, isEntrypoint: true}\n", "leaf", 2, 2);
    let request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut streams = [0; 3].map(|_| TcpStream::connect(switch.address).unwrap());
    for stream in &mut streams {
        stream.write_all(request).unwrap();
    }
    // Connections are accepted in their order.
    let mut buffer = [0; 4096];
    let [first, second, third] = &mut streams;
    assert!(first.read(&mut buffer).unwrap() > 0 && second.read(&mut buffer).unwrap() > 0);
    third.set_nonblocking(true).unwrap();
    assert_eq!(third.read(&mut buffer).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    third.set_nonblocking(false).unwrap();
    first.shutdown(std::net::Shutdown::Both).unwrap();
    assert!(third.read(&mut buffer).unwrap() > 0);
}
