//! Envoy and the sidecar side by side, and their responses to the same bytes.

use std::{
    collections::HashMap,
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::{Child, Command},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::{
    client::{self, TIMEOUT},
    request::Request,
    secrets,
};

/// If both have logged the same number of lines, time without a new line after which the logs are complete.
const PAUSE: Duration = Duration::from_millis(200);
/// The same time if the numbers differ.
const MAX_PAUSE: Duration = Duration::from_secs(2);

pub(crate) struct Twins {
    envoy: Proxy,
    skysail: Proxy,
    runtime: Runtime,
    /// TLS configuration of each listener's clients.
    tls: Vec<Option<Arc<rustls::ClientConfig>>>,
}

struct Proxy {
    child: Child,
    /// Addresses by listener name.
    addresses: HashMap<String, SocketAddr>,
    folder: TempDir,
}

impl Twins {
    pub(crate) fn start(bootstrap: &Value) -> Self {
        let log = |folder: &Path| fs::File::create(folder.join("log")).unwrap();
        let envoy = Proxy::start(bootstrap, |folder| {
            let mut command = Command::new(skysail_testkit::envoy());
            command.args([
                "--concurrency",
                "1",
                "--use-dynamic-base-id",
                "--log-level",
                "warning",
                "--file-flush-interval-msec",
                "50",
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
        let listeners = bootstrap["static_resources"]["listeners"].as_array().unwrap();
        let is_tls = |listener: &Value| !listener["filter_chains"][0]["transport_socket"].is_null();
        let tls = listeners.iter().map(|listener| is_tls(listener).then(secrets::client)).collect();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Self { envoy, skysail, runtime, tls }
    }

    /// Sends a request to both on this listener, one after the other; `after` adds its result to each.
    pub(crate) fn ask<T>(
        &self,
        listener: usize,
        request: &Request,
        mut after: impl FnMut() -> T,
    ) -> [(String, T); 2] {
        [&self.envoy, &self.skysail].map(|proxy| {
            (
                self.runtime.block_on(client::ask(
                    proxy.addresses[&format!("listener-{listener}")],
                    self.tls[listener].clone(),
                    request,
                )),
                after(),
            )
        })
    }

    /// Returns the counters of both for routes with a `stat_prefix`.
    pub(crate) fn route_stats(&self) -> [String; 2] {
        let compared = |name: &str| {
            let counted = name.rsplit_once(".upstream_rq_").map_or("", |(_, counted)| counted);
            counted == "completed" || counted == "retry" || counted.starts_with(|c: char| c.is_ascii_digit())
        };
        [&self.envoy, &self.skysail].map(|proxy| {
            let text = page(admin(proxy.folder.path()).unwrap(), "/stats?filter=vhost").1;
            let lines = text.lines().filter_map(|line| line.split_once(": "));
            let lines = lines.filter(|(name, count)| compared(name) && *count != "0");
            lines.map(|(name, count)| format!("{name}: {count}\n")).collect()
        })
    }

    /// Returns the log lines of both by case, once no more arrive.
    pub(crate) fn logs(&self) -> [HashMap<String, Value>; 2] {
        let proxies = [&self.envoy, &self.skysail];
        let (mut since, mut seen) = (Instant::now(), [0, 0]);
        loop {
            let now = proxies.map(|proxy| proxy.log().lines().count());
            if now != seen {
                (since, seen) = (Instant::now(), now);
            }
            let silence = if now[0] == now[1] { PAUSE } else { MAX_PAUSE };
            if since.elapsed() > silence {
                return proxies.map(Proxy::by_case);
            }
            self.runtime.block_on(async { tokio::time::sleep(PAUSE / 10).await });
        }
    }
}

impl Proxy {
    fn start(bootstrap: &Value, command: impl Fn(&Path) -> Command) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("bootstrap.json"), bootstrap.to_string()).unwrap();
        let child = command(folder.path())
            .stdout(fs::File::create(folder.path().join("access")).unwrap())
            .spawn()
            .unwrap();
        let mut proxy = Self { child, addresses: HashMap::new(), folder };
        let folder = proxy.folder.path().to_owned();
        let begun = Instant::now();
        while proxy.addresses.is_empty() {
            let received = || fs::read_to_string(folder.join("log")).unwrap_or_default();
            assert!(proxy.child.try_wait().unwrap().is_none(), "it ended: {}", received());
            assert!(begun.elapsed() < TIMEOUT, "it is not ready: {}", received());
            thread::yield_now();
            let Some(admin) = admin(&folder) else { continue };
            if page(admin, "/ready").0 == 200 {
                proxy.addresses = addresses(&page(admin, "/listeners?format=json").1);
            }
        }
        proxy
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("access")).unwrap_or_default()
    }

    /// Returns access log lines by case. Lines without a readable head are numbered in the order of their
    /// requests.
    fn by_case(&self) -> HashMap<String, Value> {
        let text = self.log();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let mut unread = 0;
        let mut all = HashMap::new();
        for line in lines {
            let key = line["case"].as_str().map(str::to_owned);
            let key = key.unwrap_or_else(|| {
                unread += 1;
                format!("unread {unread}")
            });
            all.insert(key, line);
        }
        all
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the address of the admin page: Envoy writes it into a file, the sidecar logs it.
fn admin(folder: &Path) -> Option<SocketAddr> {
    let text = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let log = text("log");
    let line = log.split_inclusive('\n').find(|line| line.contains("admin page") && line.ends_with('\n'));
    let port = line.and_then(|line| line.trim().rsplit('=').next()?.parse().ok());
    port.or_else(|| text("admin").trim().parse().ok())
}

/// Requests an admin page; returns status and body, or status 0 if the page is not available yet.
fn page(admin: SocketAddr, path: &str) -> (u16, String) {
    let Ok(mut connection) = TcpStream::connect(admin) else { return (0, String::new()) };
    connection.set_read_timeout(Some(TIMEOUT)).unwrap();
    let _ = write!(connection, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
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
