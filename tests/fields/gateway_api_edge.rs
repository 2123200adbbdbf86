//! Gateways of Gateway API at their edge: isolation of listeners, kinds of Services, the features of HTTPRoutes,
//! WebSockets, TCPRoutes, and listeners that come and go, at `skysail-proxy` and at a real Envoy.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Stdio},
    thread,
};

use skysail_testkit::{Client, Mesh, eventually};

use crate::{log, mesh_with, wait_logged};

const RULES: &str = include_str!("gateway_api_edge.yaml");
const GATEWAYS: [&str; 2] = ["edge-skysail", "edge-envoy"];

/// Ports of the Gateways `intersecting`, `isolated` and `features`, of the TCPRoutes, and of the Gateway `live`.
const INTERSECTING: u16 = 8080;
const ISOLATED: u16 = 8081;
const FEATURES: u16 = 8082;
const BYTES: u16 = 8083;
const LIVE: u16 = 8084;
const LATER: u16 = 8085;

/// Address on which this program serves WebSockets in a pod.
const SOCKETS: &str = "SKYSAIL_TEST_SOCKETS";

/// Number of requests by which a share of one half is seen on both sides; the chance to miss one is below 1e-11.
const REQUESTS: usize = 40;

/// One of the gateways.
struct GatewayEdge<'a> {
    mesh: &'a Mesh,
    gateway: &'a str,
}

/// A request and what its response must be.
struct EdgeCase<'a> {
    /// Method and path.
    line: &'a str,
    headers: &'a [&'a str],
    status: u16,
    has: &'a [&'a str],
    lacks: &'a [&'a str],
}

/// Returns a request without headers.
const fn sent<'a>(line: &'a str, status: u16, has: &'a [&'a str]) -> EdgeCase<'a> {
    EdgeCase { line, headers: &[], status, has, lacks: &[] }
}

impl GatewayEdge<'_> {
    fn connect(&self, port: u16) -> Result<TcpStream, String> {
        Client::plain(self.mesh.published(&format!("shop/{}:{port}", self.gateway))).connect()
    }

    /// Sends a request for a host. Returns the whole response.
    fn send(&self, port: u16, host: &str, line: &str, headers: &[&str]) -> Result<String, String> {
        let mut stream = self.connect(port)?;
        let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
        let head = format!("{line} HTTP/1.1\r\nhost: {host}\r\n{headers}connection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).map_err(|error| error.to_string())?;
        let mut response = Vec::new();
        stream.read_to_end(&mut response).map_err(|error| error.to_string())?;
        Ok(String::from_utf8_lossy(&response).into_owned())
    }

    /// Sends a request; the error is a response that is not as expected.
    fn ask(&self, port: u16, host: &str, case: &EdgeCase<'_>) -> Result<(), String> {
        let response = self.send(port, host, case.line, case.headers)?;
        let has = |text: &&str| response.contains(*text);
        let is_it = response.starts_with(&format!("HTTP/1.1 {} ", case.status))
            && case.has.iter().all(has)
            && !case.lacks.iter().any(has);
        if is_it { Ok(()) } else { Err(format!("expected {} {:?}: {response}", case.status, case.has)) }
    }

    fn wait(&self, port: u16, host: &str, case: &EdgeCase<'_>) {
        let what = format!("{} {host}:{port} {} {:?}", self.gateway, case.line, case.headers);
        eventually(&what, || self.ask(port, host, case));
    }

    /// Sends each request once.
    fn check(&self, cases: &[EdgeCase<'_>]) {
        let ask = |case: &EdgeCase<'_>| {
            let answer = self.ask(FEATURES, "any.example", case);
            answer.err().map(|error| format!("{} {} {:?}: {error}", self.gateway, case.line, case.headers))
        };
        let wrong: Vec<String> = cases.iter().filter_map(ask).collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}

#[test]
fn gateways_serve_what_the_conformance_suite_asks() {
    let mut setup = mesh_with(&[RULES, &isolation()].join("---\n"), &["shop/edge-envoy"]);
    for port in INTERSECTING..=LATER {
        let ports = GATEWAYS.map(|gateway| format!("0:{gateway}:{port}"));
        setup = setup.with(&["-p", &ports[0], "-p", &ports[1]]);
    }
    let mesh = setup.ready();
    mesh.put("slices.yaml", &slices(&mesh));
    let mut server = start_sockets(&mesh);
    for gateway in GATEWAYS {
        let edge = GatewayEdge { mesh: &mesh, gateway };
        services(&edge);
        sockets(&edge);
        listeners_are_isolated(&edge);
        edge.check(&matches());
        edge.check(&filters());
        edge.check(&redirects());
        edge.check(&times());
        edge.check(&cors());
        mirrors(&edge);
        connections(&edge);
        tries_after_timeouts(&edge);
    }
    server.kill().unwrap();
    server.wait().unwrap();
    listeners_come_and_go(&mesh);
}

/// Parts of hosts and paths, and the names of the listeners: those of the suite.
const LISTENERS: [(&str, &str); 4] = [
    ("empty-hostname", "bar.com"),
    ("wildcard-example-com", "bar.example.com"),
    ("wildcard-foo-example-com", "bar.foo.example.com"),
    ("abc-foo-example-com", "abc.foo.example.com"),
];

/// Returns the routes of each listener of the Gateways `isolated` and `intersecting`.
fn isolation() -> String {
    let hostnames = "hostnames: [bar.com, '*.example.com', '*.foo.example.com', abc.foo.example.com]";
    let route = |gateway: &str, listener: &str, hostnames: &str| {
        format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\n\
             metadata: {{name: {gateway}-{listener}, namespace: shop}}\nspec:\n  \
             parentRefs: [{{name: {gateway}, sectionName: {listener}}}]\n  {hostnames}\n  \
             rules: [{{matches: [{{path: {{value: /{listener}}}}}], backendRefs: [{{name: one, port: 80}}]}}]\n"
        )
    };
    let routes = LISTENERS.iter().flat_map(|(listener, _)| {
        [route("isolated", listener, ""), route("intersecting", listener, hostnames)]
    });
    routes.collect::<Vec<_>>().join("---\n")
}

/// A request reaches the routes of the most specific listener of its host alone.
fn listeners_are_isolated(edge: &GatewayEdge<'_>) {
    for port in [ISOLATED, INTERSECTING] {
        for (listener, host) in LISTENERS {
            edge.wait(port, host, &sent(&format!("GET /{listener}"), 200, &["\"version\":\"v1\""]));
        }
        for (own, host) in LISTENERS {
            for (other, _) in LISTENERS.iter().filter(|(other, _)| *other != own) {
                let answer = edge.ask(port, host, &sent(&format!("GET /{other}"), 404, &[]));
                assert_eq!(answer, Ok(()), "{} {port} {host} {other}", edge.gateway);
            }
        }
    }
}

/// Returns EndpointSlices with the address of a pod.
fn slices(mesh: &Mesh) -> String {
    let status = mesh.status();
    let pods = status["pods"].as_array().unwrap();
    let pod = pods.iter().find(|pod| pod["workload"] == "api-v1").unwrap();
    let address = pod["address"].as_str().unwrap();
    let slice = |name: &str| {
        format!(
            "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\n\
             metadata: {{name: {name}-ip4, namespace: shop, labels: {{kubernetes.io/service-name: {name}}}}}\n\
             addressType: IPv4\nports: [{{name: first-port, port: 8080, protocol: TCP}}]\n\
             endpoints: [{{addresses: [{address}], conditions: {{ready: true, serving: true, terminating: false}}}}]\n"
        )
    };
    ["manual", "headless-manual"].map(slice).join("---\n")
}

/// Services without an address of their own, without a selector, and with a protocol that the port declares.
fn services(edge: &GatewayEdge<'_>) {
    for name in ["manual", "headless", "headless-manual"] {
        edge.wait(FEATURES, "any.example", &sent(&format!("GET /{name}"), 200, &["\"version\":\"v1\""]));
    }
    edge.wait(FEATURES, "any.example", &sent("GET /h2c", 200, &["\"protocol\":\"HTTP/2.0\""]));
}

fn matches() -> Vec<EdgeCase<'static>> {
    const HEADERS: &[&str] = &["x-exact: a", "x-regex: bb"];
    let with = |headers, line, has| EdgeCase { line, headers, status: 200, has, lacks: &[] };
    vec![
        sent("PUT /match", 200, &["\"version\":\"v2\""]),
        sent("GET /match", 200, &["\"version\":\"v1\""]),
        with(HEADERS, "GET /match/more?q=1&r=12", &["\"version\":\"v2\""]),
        with(HEADERS, "GET /match?q=2&r=12", &["\"version\":\"v1\""]),
        with(HEADERS, "GET /match?q=1&r=x", &["\"version\":\"v1\""]),
        with(&HEADERS[..1], "GET /match?q=1&r=12", &["\"version\":\"v1\""]),
    ]
}

fn filters() -> Vec<EdgeCase<'static>> {
    vec![
        EdgeCase {
            line: "GET /modify",
            headers: &["x-set: old", "x-add: old", "x-remove: old"],
            status: 200,
            has: &["\"x-set\":\"new\"", "\"x-add\":\"old, more\"", "\"x-backend\":\"one\"", "x-answer: set"],
            lacks: &["\"x-remove\"", "x-envoy-upstream-service-time"],
        },
        sent("GET /rewrite/prefix/a", 200, &["\"path\":\"/new/a\"", "\"host\":\"inner.example\""]),
        sent("GET /rewrite/full/a", 200, &["\"path\":\"/full\"", "\"host\":\"any.example\""]),
    ]
}

/// Without a scheme or a port, a redirect leads to the port of the listener.
fn redirects() -> Vec<EdgeCase<'static>> {
    vec![
        sent("GET /redirect/303", 303, &["location: http://new.example:8082/redirect/303"]),
        sent("GET /redirect/307", 307, &["location: https://any.example/redirect/307"]),
        sent("GET /redirect/308", 308, &["location: http://any.example:8443/redirect/308"]),
        sent("GET /redirect/prefix/a", 301, &["location: http://any.example:8082/new/a"]),
        sent("GET /redirect/full/a", 302, &["location: http://any.example:8082/all"]),
    ]
}

fn times() -> Vec<EdgeCase<'static>> {
    const ATTEMPTS: &[&str] = &["\"x-envoy-attempt-count\":\"4\""];
    vec![
        sent("GET /timeout/request?delay=20s", 504, &[]),
        sent("GET /timeout/backend?delay=20s", 504, &[]),
        sent("GET /timeout/none?delay=400ms", 200, &[]),
        sent("GET /retry/codes?status=500", 500, ATTEMPTS),
        sent("GET /retry/codes?status=503", 503, &["\"x-envoy-attempt-count\":\"1\""]),
    ]
}

/// A try that ends by the timeout of its backend is repeated.
fn tries_after_timeouts(edge: &GatewayEdge<'_>) {
    let path = format!("/retry/timeout/{}", edge.gateway);
    edge.check(&[sent(&format!("GET {path}?delay=20s"), 504, &["upstream request timeout"])]);
    eventually(&format!("four tries of {path}"), || {
        let tries = log(edge.mesh, &["api-v1"]).matches(&format!("path={path}?")).count();
        if tries == 4 { Ok(()) } else { Err(format!("{tries} tries")) }
    });
}

fn cors() -> Vec<EdgeCase<'static>> {
    const ASKED: &str = "access-control-request-headers: x-header-1, x-header-2";
    let with = |headers, line, has, lacks| EdgeCase { line, headers, status: 200, has, lacks };
    vec![
        with(
            &["origin: https://xpto.www.bar.com", "access-control-request-method: GET", ASKED],
            "OPTIONS /cors/named",
            &[
                "access-control-allow-origin: https://xpto.www.bar.com",
                "access-control-allow-methods: GET,OPTIONS",
                "access-control-allow-headers: x-header-1,x-header-2",
                "access-control-expose-headers: x-header-3,x-header-4",
                "access-control-max-age: 3600",
                "access-control-allow-credentials: true",
            ],
            &["\"pod\""],
        ),
        with(
            &["origin: https://foobar.com", "access-control-request-method: GET"],
            "OPTIONS /cors/named",
            &["access-control-allow-methods: GET,OPTIONS", "access-control-max-age: 3600"],
            &["access-control-allow-origin", "access-control-expose-headers", "\"pod\""],
        ),
        with(
            &["origin: https://www.foo.com"],
            "GET /cors/named",
            &["access-control-allow-origin: https://www.foo.com", "\"pod\""],
            &[],
        ),
        with(
            &["origin: https://foobar.com"],
            "GET /cors/named",
            &["\"pod\""],
            &["access-control-allow-origin"],
        ),
        with(
            &["origin: https://www.foo.com", "access-control-request-method: POST"],
            "OPTIONS /cors/methods",
            &["access-control-allow-methods: POST", "access-control-allow-origin: https://www.foo.com"],
            &["access-control-allow-credentials", "access-control-allow-headers"],
        ),
        with(
            &["origin: https://foobar.com:12345", "access-control-request-method: PUT"],
            "OPTIONS /cors/origin",
            &["access-control-allow-methods: PUT", "access-control-allow-origin: https://foobar.com:12345"],
            &["access-control-allow-credentials"],
        ),
        with(&["origin: null"], "GET /cors/origin", &["\"pod\""], &["access-control-allow-origin"]),
        with(
            &["origin: https://other.foo.com", "access-control-request-method: PUT", ASKED],
            "OPTIONS /cors/all",
            &[
                "access-control-allow-origin: https://other.foo.com",
                "access-control-allow-methods: PUT",
                "access-control-allow-headers: x-header-1, x-header-2",
                "access-control-allow-credentials: true",
            ],
            &["\"pod\""],
        ),
        with(
            &["origin: https://other.foo.com", "access-control-request-method: PUT"],
            "OPTIONS /cors/all",
            &["access-control-allow-headers:"],
            &["x-header-1"],
        ),
    ]
}

fn mirrors(edge: &GatewayEdge<'_>) {
    let path = format!("/mirror/two/{}", edge.gateway);
    edge.check(&[sent(&format!("GET {path}"), 200, &["\"version\":\"v1\"", "\"x-set\":\"new\""])]);
    for server in ["api-v2", "third"] {
        wait_logged(edge.mesh, &[server], &[&format!("path={path} ")]);
    }
    let path = format!("/mirror/half/{}", edge.gateway);
    for _ in 0..REQUESTS {
        edge.check(&[sent(&format!("GET {path}"), 200, &["\"version\":\"v1\""])]);
    }
    // The copies arrive after the responses, in order.
    let last = format!("/mirror/two/{}/last", edge.gateway);
    edge.check(&[sent(&format!("GET {last}"), 200, &["\"version\":\"v1\""])]);
    wait_logged(edge.mesh, &["third"], &[&format!("path={last} ")]);
    let copies = log(edge.mesh, &["third"]).matches(&format!("path={path} ")).count();
    assert!(0 < copies && copies < REQUESTS, "{} mirrors {copies} of {REQUESTS}", edge.gateway);
}

/// Of two TCPRoutes of a listener, the older one is used.
fn connections(edge: &GatewayEdge<'_>) {
    edge.wait(BYTES, "any.example", &sent("GET /", 200, &["\"version\":\"v1\""]));
    for _ in 0..8 {
        let answer = edge.ask(BYTES, "any.example", &sent("GET /", 200, &["\"version\":\"v1\""]));
        assert_eq!(answer, Ok(()), "{}", edge.gateway);
    }
}

fn sockets(edge: &GatewayEdge<'_>) {
    eventually(&format!("{} upgrades a connection", edge.gateway), || {
        let mut stream = edge.connect(FEATURES)?;
        let head =
            "GET /socket HTTP/1.1\r\nhost: any.example\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
        stream.write_all(head.as_bytes()).map_err(|error| error.to_string())?;
        let answer = head_of(&mut stream).map_err(|error| error.to_string())?;
        if !answer.starts_with("HTTP/1.1 101 ") {
            return Err(answer);
        }
        stream.write_all(b"ping").map_err(|error| error.to_string())?;
        let mut echo = [0; 4];
        stream.read_exact(&mut echo).map_err(|error| error.to_string())?;
        if &echo == b"ping" { Ok(()) } else { Err(format!("{echo:?}")) }
    });
}

/// Reads the head of a message.
fn head_of(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte)? > 0 {
        head.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

/// Starts the server of WebSockets in a pod.
fn start_sockets(mesh: &Mesh) -> Child {
    let program = std::env::current_exe().unwrap().to_string_lossy().into_owned();
    let variable = format!("{SOCKETS}=0.0.0.0:9090");
    let test = ["env", &variable, &program, "--exact", "gateway_api_edge::the_server_of_sockets"];
    let mut command = mesh.command(&[&["exec", "sockets", "--"], &test[..]].concat());
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Accepts WebSockets and returns their bytes, in the process that another test starts within a pod.
#[test]
fn the_server_of_sockets() {
    let Ok(address) = std::env::var(SOCKETS) else { return };
    for stream in TcpListener::bind(address).unwrap().incoming() {
        thread::spawn(move || {
            let mut stream = stream.unwrap();
            let request = head_of(&mut stream).unwrap().to_lowercase();
            let upgrades = request.contains("upgrade: websocket");
            let status =
                if upgrades { "101 Switching Protocols" } else { "400 Bad Request\r\ncontent-length: 0" };
            let upgrade = "connection: upgrade\r\nupgrade: websocket";
            stream.write_all(format!("HTTP/1.1 {status}\r\n{upgrade}\r\n\r\n").as_bytes()).unwrap();
            let mut answers = stream.try_clone().unwrap();
            std::io::copy(&mut stream, &mut answers).unwrap();
        });
    }
}

/// Returns a Gateway with these listeners (name and port), and a route to all of them.
fn live(listeners: &[(&str, u16)]) -> String {
    let listeners = listeners.iter().map(|(name, port)| {
        format!("{{name: {name}, port: {port}, protocol: HTTP, hostname: {name}.live.example}}")
    });
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: live, namespace: shop}}\nspec:\n  \
         gatewayClassName: istio\n  addresses: [{{type: Hostname, value: edges.shop.svc.cluster.local}}]\n  \
         listeners: [{}]\n---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\n\
         metadata: {{name: live, namespace: shop}}\nspec:\n  parentRefs: [{{name: live}}]\n  \
         rules: [{{backendRefs: [{{name: one, port: 80}}]}}]\n",
        listeners.collect::<Vec<_>>().join(", ")
    )
}

fn listeners_come_and_go(mesh: &Mesh) {
    let edges = GATEWAYS.map(|gateway| GatewayEdge { mesh, gateway });
    let answers = |port: u16, name: &str, status: u16| {
        for edge in &edges {
            edge.wait(port, &format!("{name}.live.example"), &sent("GET /", status, &[]));
        }
    };
    mesh.put("live.yaml", &live(&[("first", LIVE)]));
    answers(LIVE, "first", 200);
    mesh.put("live.yaml", &live(&[("first", LIVE), ("second", LIVE), ("later", LATER)]));
    answers(LIVE, "second", 200);
    answers(LATER, "later", 200);
    answers(LIVE, "first", 200);
    answers(LIVE, "later", 404);
    mesh.put("live.yaml", &live(&[("second", LIVE)]));
    answers(LIVE, "first", 404);
    answers(LIVE, "second", 200);
    for edge in &edges {
        eventually(&format!("{} closes the port of no listener", edge.gateway), || {
            match edge.send(LATER, "later.live.example", "GET /", &[]) {
                Ok(response) if response.starts_with("HTTP/1.1 ") => Err(response),
                _ => Ok(()),
            }
        });
    }
}

/// The features that the documentation lists name tests, and the tests exist.
#[test]
fn features_of_the_conformance_suite_have_tests() {
    const PAGE: &str = include_str!("../../docs/gateway-api.md");
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (_, tables) = PAGE.split_once("## Features of the conformance suite").unwrap();
    let row = |line: &str| -> Vec<String> { line.split('|').map(|cell| cell.trim().to_owned()).collect() };
    let rows: Vec<Vec<String>> = tables.lines().filter(|line| line.starts_with("| ")).map(row).collect();
    let (features, places): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.len() == 5);
    let places: BTreeMap<&str, &str> =
        places.iter().skip(1).map(|row| (row[1].as_str(), row[2].trim_matches('`'))).collect();
    let mut used = BTreeSet::new();
    for row in features.iter().skip(1) {
        let names: Vec<&str> = row[3].split(", ").filter(|name| !name.is_empty()).collect();
        assert!(!names.is_empty() || !row[2].starts_with("yes"), "{} has no test", row[1]);
        used.extend(names);
    }
    assert_eq!(used, places.keys().copied().collect());
    for place in places.values() {
        let (file, function) = place.split_once("::").unwrap();
        let paths = [project.join(file), project.join("crates").join(file)];
        let text = paths.iter().find_map(|path| fs::read_to_string(path).ok());
        let text = text.unwrap_or_else(|| panic!("there is no {file}"));
        assert!(text.contains(&format!("fn {function}(")), "{place}");
    }
}
