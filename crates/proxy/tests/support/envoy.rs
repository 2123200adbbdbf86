//! Runs a real Envoy.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::{net::SocketAddr, process::Stdio, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::{Child, Command},
};

use crate::support::within;

/// A running Envoy.
pub(crate) struct Running {
    admin: SocketAddr,
    _process: Child,
    _folder: tempfile::TempDir,
}

impl Running {
    /// Starts Envoy with a bootstrap that has an admin page.
    pub(crate) async fn start(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let admin = folder.path().join("admin");
        let bootstrap = folder.path().join("bootstrap.yaml");
        std::fs::write(&bootstrap, text).unwrap();
        let process = Command::new(skysail_testkit::envoy())
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
        let admin = within(async {
            loop {
                if let Ok(admin) = std::fs::read_to_string(&admin)
                    && page(admin.trim(), "/ready").await.is_some_and(|ready| ready.contains("LIVE"))
                {
                    return admin.trim().parse().unwrap();
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Self { admin: admin.await, _process: process, _folder: folder }
    }

    /// Requests a page of the admin port and returns the response.
    pub(crate) async fn page(&self, path: &str) -> String {
        page(&self.admin.to_string(), path).await.unwrap()
    }

    /// Returns the address of a listener.
    pub(crate) async fn listener(&self, name: &str) -> SocketAddr {
        let listeners = self.page("/listeners").await;
        let address = listeners.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix("::"));
        address.unwrap().parse().unwrap()
    }
}

/// Requests a page of the admin port and returns the response.
async fn page(admin: &str, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(admin).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer)
}
