//! The sidecar program with a bootstrap file.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::{fs, net::SocketAddr, path::Path, process::Stdio};

use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    net::TcpStream,
    process::{Child, ChildStderr, Command},
};

use crate::support::{Client, within};

/// A running sidecar that is ready.
pub(crate) struct Program {
    child: Child,
    log: Lines<BufReader<ChildStderr>>,
    admin: SocketAddr,
}

impl Program {
    pub(crate) async fn start(folder: &Path, bootstrap: &str) -> Self {
        Self::with(folder, bootstrap, &[]).await
    }

    /// Starts a sidecar with further arguments.
    pub(crate) async fn with(folder: &Path, bootstrap: &str, more: &[&str]) -> Self {
        let file = folder.join("bootstrap.yaml");
        fs::write(&file, bootstrap).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_skysail-proxy"))
            .args(more)
            .args(["--concurrency", "1", "--admin-port", "0", "--bootstrap"])
            .arg(file)
            .env("NO_COLOR", "1")
            .env_remove("SKYSAIL_LOG")
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut program = Self { child, log, admin: SocketAddr::from(([0; 4], 0)) };
        let line = program.until("admin page").await;
        program.admin = line.rsplit('=').next().unwrap().trim().parse().unwrap();
        program.until("ready: the first configuration").await;
        program
    }

    /// Returns the next line of its log that contains `words`.
    pub(crate) async fn until(&mut self, words: &str) -> String {
        loop {
            let line = within(self.log.next_line()).await.unwrap().expect("the sidecar ended");
            println!("{line}");
            if line.contains(words) {
                return line;
            }
        }
    }

    /// Requests a page of the admin port and returns the response.
    pub(crate) async fn page(&self, method: &str, path: &str) -> String {
        self.page_with(method, path, "host: localhost").await
    }

    /// Requests a page with these header fields.
    pub(crate) async fn page_with(&self, method: &str, path: &str, fields: &str) -> String {
        let mut client = Client::new(TcpStream::connect(self.admin).await.unwrap());
        client.send(&format!("{method} {path} HTTP/1.1\r\n{fields}\r\nconnection: close\r\n\r\n")).await;
        client.rest().await
    }

    /// Returns the address of a listener.
    pub(crate) async fn listener(&self, name: &str) -> SocketAddr {
        let listeners = self.page("GET", "/listeners").await;
        let address = listeners.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix("::"));
        address.unwrap().parse().unwrap()
    }

    /// Shuts it down and returns the rest of its log.
    pub(crate) async fn quit(mut self) -> String {
        assert!(self.page("POST", "/quitquitquit").await.starts_with("HTTP/1.1 200 "));
        let mut rest = String::new();
        while let Some(line) = within(self.log.next_line()).await.unwrap() {
            rest.push_str(&line);
            rest.push('\n');
        }
        assert!(within(self.child.wait()).await.unwrap().success(), "{rest}");
        rest
    }
}
