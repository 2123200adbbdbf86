//! Envoy and our sidecar side by side, and what both say to the same bytes.

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;

/// Nothing here takes so long.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Twins {
    envoy: Proxy,
    skysail: Proxy,
}

struct Proxy {
    child: Child,
    /// By the names of listeners.
    addresses: HashMap<String, SocketAddr>,
    _folder: TempDir,
}

impl Twins {
    pub(crate) fn start(bootstrap: &Value) -> Self {
        let log = |folder: &Path| fs::File::create(folder.join("log")).unwrap();
        let envoy = Proxy::start(bootstrap, |folder| {
            let mut command = Command::new(envoy());
            command.args([
                "--concurrency",
                "1",
                "--use-dynamic-base-id",
                "--log-level",
                "warning",
                "--admin-address-path",
            ]);
            command
                .arg(folder.join("admin"))
                .arg("-c")
                .arg(folder.join("bootstrap.json"))
                .stderr(log(folder));
            command
        });
        let skysail = Proxy::start(bootstrap, |folder| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_skysail-proxy"));
            command
                .args(["--concurrency", "1", "--admin-port", "0", "--bootstrap"])
                .arg(folder.join("bootstrap.json"));
            command.env("NO_COLOR", "1").env_remove("SKYSAIL_LOG").stderr(log(folder));
            command
        });
        Self { envoy, skysail }
    }

    /// What both answer on this listener, in a form in which it can be compared.
    pub(crate) fn ask(&self, listener: usize, request: &str) -> (String, String) {
        let name = format!("listener-{listener}");
        (self.envoy.ask(&name, request), self.skysail.ask(&name, request))
    }
}

impl Proxy {
    fn start(bootstrap: &Value, command: impl Fn(&Path) -> Command) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("bootstrap.json"), bootstrap.to_string()).unwrap();
        let child = command(folder.path()).stdout(Stdio::null()).spawn().unwrap();
        let mut proxy = Self { child, addresses: HashMap::new(), _folder: folder };
        let folder = proxy._folder.path().to_owned();
        let begun = Instant::now();
        while proxy.addresses.is_empty() {
            let told = || fs::read_to_string(folder.join("log")).unwrap_or_default();
            assert!(proxy.child.try_wait().unwrap().is_none(), "it ended: {}", told());
            assert!(begun.elapsed() < PATIENCE, "it is not ready: {}", told());
            thread::yield_now();
            let Some(admin) = admin(&folder) else { continue };
            if page(admin, "/ready").0 == 200 {
                proxy.addresses = addresses(&page(admin, "/listeners?format=json").1);
            }
        }
        proxy
    }

    fn ask(&self, listener: &str, request: &str) -> String {
        let request = request.replacen("\r\n\r\n", "\r\nconnection: close\r\n\r\n", 1);
        comparable(&exchange(self.addresses[listener], &request))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where the page for administrators is: Envoy writes it into a file, our sidecar says it.
fn admin(folder: &Path) -> Option<SocketAddr> {
    let text = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let log = text("log");
    let line = log.split_inclusive('\n').find(|line| line.contains("admin page") && line.ends_with('\n'));
    let said = line.and_then(|line| line.trim().rsplit('=').next()?.parse().ok());
    said.or_else(|| text("admin").trim().parse().ok())
}

/// Status, sorted headers and body, without what is different every time.
fn comparable(answer: &str) -> String {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let mut lines = head.lines();
    // The version and the status: what it is called in words is nobody's business.
    let mut told: String = lines.next().unwrap_or_default().split_inclusive(' ').take(2).collect();
    told.push('\n');
    let mut headers: Vec<&str> = lines.collect();
    headers.retain(|line| {
        !["date: ", "x-envoy-upstream-service-time: "].iter().any(|name| line.starts_with(name))
    });
    headers.sort_unstable();
    for line in headers {
        // Two slashes at the beginning, or one and a backslash, would read as another host; we write `/.//`.
        let _ = writeln!(told, "{}", line.replacen("location: /./", "location: /", 1));
    }
    let _ = writeln!(told, "\n{body}");
    told
}

/// A cluster whose server answers with what came.
pub(crate) fn upstream(name: &'static str) -> Value {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for connection in listener.incoming() {
            thread::spawn(move || serve(name, connection.unwrap()));
        }
    });
    cluster(name, port)
}

/// A cluster of one server here.
pub(crate) fn cluster(name: &str, port: u16) -> Value {
    let address = json!({"socket_address": {"address": "127.0.0.1", "port_value": port}});
    let endpoints = json!([{"lb_endpoints": [{"endpoint": {"address": address}}]}]);
    json!({
        "name": name, "type": "STATIC", "connect_timeout": "5s",
        "load_assignment": {"cluster_name": name, "endpoints": endpoints},
    })
}

fn serve(name: &str, mut connection: TcpStream) {
    let mut input = Vec::new();
    loop {
        let Some(head) = read_head(&mut connection, &mut input) else { return };
        let Some(body) = read_body(&mut connection, &mut input, &head) else { return };
        let mut lines: Vec<&str> = head.lines().map(str::trim_end).collect();
        lines[1..].sort_unstable();
        let said = format!("{name} got\n{}\n{body}", lines.join("\n"));
        let answer = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nserver: upstream\r\nx-a: one\r\nx-b: two\r\n\r\n{said}",
            said.len()
        );
        if connection.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

pub(crate) fn read_body(connection: &mut TcpStream, input: &mut Vec<u8>, head: &str) -> Option<String> {
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length = length.map_or(0, |length| length.parse().unwrap());
    while input.len() < length {
        let mut block = [0; 4096];
        let Ok(count @ 1..) = connection.read(&mut block) else { return None };
        input.extend_from_slice(&block[..count]);
    }
    Some(String::from_utf8(input.drain(..length).collect()).unwrap())
}

pub(crate) fn read_head(connection: &mut TcpStream, input: &mut Vec<u8>) -> Option<String> {
    loop {
        if let Some(end) = input.windows(4).position(|window| window == b"\r\n\r\n") {
            return Some(
                String::from_utf8_lossy(&input.drain(..end + 4).collect::<Vec<_>>()).trim_end().to_owned(),
            );
        }
        let mut block = [0; 4096];
        let Ok(count @ 1..) = connection.read(&mut block) else { return None };
        input.extend_from_slice(&block[..count]);
    }
}

/// An answer, whole; what comes until the other end closes if it does not say its length. A reset is an end, too.
fn exchange(address: SocketAddr, request: &str) -> String {
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = Vec::new();
    if connection.write_all(request.as_bytes()).is_ok() {
        let mut block = [0; 4096];
        while !is_whole(&answer) {
            match connection.read(&mut block) {
                Ok(0) | Err(_) => break,
                Ok(count) => answer.extend_from_slice(&block[..count]),
            }
        }
    }
    String::from_utf8_lossy(&answer).into_owned()
}

/// Envoy waits a second before it closes a connection, lest its last answer be lost.
fn is_whole(answer: &[u8]) -> bool {
    let answer = String::from_utf8_lossy(answer);
    let Some((head, body)) = answer.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    length.is_some_and(|length| body.len() >= length.parse().unwrap())
}

/// Status and body of a page for administrators; 0 if there is none yet.
fn page(admin: SocketAddr, path: &str) -> (u16, String) {
    let Ok(mut connection) = TcpStream::connect(admin) else { return (0, String::new()) };
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = write!(connection, "GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
    let mut answer = String::new();
    let _ = connection.read_to_string(&mut answer);
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    let (head, mut body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    if !head.contains("transfer-encoding: chunked") {
        return (status, body.to_owned());
    }
    let mut whole = String::new();
    while let Some((length, rest)) = body.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).unwrap();
        whole.push_str(&rest[..length]);
        body = rest[length..].trim_start();
    }
    (status, whole)
}

fn addresses(page: &str) -> HashMap<String, SocketAddr> {
    let page: Value = serde_json::from_str(page).unwrap();
    let of = |status: &Value| {
        let address = &status["local_address"]["socket_address"];
        let port = address["port_value"].as_u64().and_then(|port| u16::try_from(port).ok()).unwrap();
        let address = SocketAddr::new(address["address"].as_str().unwrap().parse().unwrap(), port);
        (status["name"].as_str().unwrap().to_owned(), address)
    };
    page["listener_statuses"].as_array().unwrap().iter().map(of).collect()
}

fn envoy() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache")));
    let path = std::env::var_os("SKYSAIL_ENVOY")
        .map(PathBuf::from)
        .or_else(|| Some(cache?.join("skysail/envoy-1.40.0/envoy")))
        .unwrap();
    assert!(path.is_file(), "there is no Envoy at {}: run ./test.sh, which fetches it", path.display());
    path
}
