//! A real Envoy in the proxy's place.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::{Child, Command},
};

use crate::support::within;

/// What an Envoy decides about a case.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Envoy {
    /// The same.
    Same,
    /// It is refused, with this status (0: the connection is closed).
    Refuses(u16),
    /// So many requests reach the server, and as many answers the client.
    Forwards(usize),
}

/// A running Envoy.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    _process: Child,
    _folder: tempfile::TempDir,
}

impl Running {
    /// With one listener in front of a server.
    pub(crate) async fn start(server: SocketAddr) -> Self {
        let program = program();
        assert!(
            program.is_file(),
            "there is no Envoy at {}: run ./test.sh, which fetches it",
            program.display()
        );
        let folder = tempfile::tempdir().unwrap();
        let admin = folder.path().join("admin");
        let bootstrap = folder.path().join("bootstrap.yaml");
        std::fs::write(&bootstrap, BOOTSTRAP.replace("SERVER_PORT", &server.port().to_string())).unwrap();
        let process = Command::new(program)
            .args([
                "--use-dynamic-base-id",
                "--concurrency",
                "1",
                "--log-level",
                "error",
                "--admin-address-path",
            ])
            .arg(&admin)
            .arg("-c")
            .arg(&bootstrap)
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let address = within(listens(&admin)).await;
        Self { address, _process: process, _folder: folder }
    }
}

/// Where the listener is, once there is one.
async fn listens(admin: &Path) -> SocketAddr {
    loop {
        if let Ok(admin) = std::fs::read_to_string(admin)
            && let Ok(mut stream) = TcpStream::connect(admin.trim()).await
        {
            let mut answer = String::new();
            stream
                .write_all(b"GET /listeners HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                .await
                .unwrap();
            stream.read_to_string(&mut answer).await.unwrap();
            if let Some(address) = answer.lines().find_map(|line| line.strip_prefix("cases::")) {
                return address.parse().unwrap();
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The Envoy that `test.sh` fetches.
fn program() -> PathBuf {
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).unwrap_or_default();
    let known = std::env::var_os("SKYSAIL_ENVOY").map(PathBuf::from);
    known.unwrap_or_else(|| cache.join("skysail/envoy-1.40.0/envoy"))
}

const BOOTSTRAP: &str = r#"
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
static_resources:
  listeners:
  - name: cases
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: cases
          generate_request_id: false
          normalize_path: true
          delayed_close_timeout: 0s
          http_protocol_options: {accept_http_10: true}
          upgrade_configs: [{upgrade_type: websocket}]
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{match: {prefix: /}, route: {cluster: server, timeout: 0s}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
  - name: server
    connect_timeout: 5s
    load_assignment:
      cluster_name: server
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: SERVER_PORT}}}
"#;
