//! A control plane beside a cluster.

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Lines, Read as _, Write as _},
    net::TcpStream,
    process::{Child, ChildStderr, Command, Stdio},
};

use serde_json::Value;

use crate::cluster::Cluster;

/// A control plane whose authority is in the Secrets of a namespace.
pub(crate) struct Replica {
    pub(crate) child: Child,
    pub(crate) log: Lines<BufReader<ChildStderr>>,
    /// Holds its kubeconfig.
    _folder: tempfile::TempDir,
    admin: String,
}

impl Replica {
    /// Starts a process, which may end with an error.
    pub(crate) fn spawn(cluster: &Cluster, kubeconfig: Option<&str>, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = match kubeconfig {
            None => env::var("KUBECONFIG").unwrap(),
            Some(text) => {
                let file = folder.path().join("kubeconfig");
                fs::write(&file, text).unwrap();
                file.to_str().unwrap().to_owned()
            }
        };
        let mut child = Command::new(env!("CARGO_BIN_EXE_skysail"))
            .args(["control", "--listen", "127.0.0.1", "--tls-port", "0", "--admin-port", "0", "--log-json"])
            .args(["--kubeconfig", &file, "--namespace", &cluster.namespace])
            .args(arguments)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, log, _folder: folder, admin: String::new() }
    }

    pub(crate) fn start(cluster: &Cluster, arguments: &[&str]) -> Self {
        Self::spawn(cluster, None, arguments).started()
    }

    /// Waits until the control plane serves.
    pub(crate) fn started(mut self) -> Self {
        self.admin = loop {
            let line = self.log.next().unwrap().unwrap();
            let line: Value = serde_json::from_str(&line).unwrap();
            if line["fields"]["message"] == "serving admin" {
                break line["fields"]["address"].as_str().unwrap().to_owned();
            }
        };
        self
    }

    /// Returns the log of a control plane that ends with an error.
    pub(crate) fn refused(mut self) -> String {
        let lines: Vec<String> = self.log.by_ref().map(Result::unwrap).collect();
        assert!(!self.child.wait().unwrap().success());
        lines.join("\n")
    }

    pub(crate) fn ask(&self, method: &str, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.admin).unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    pub(crate) fn status(&self) -> Value {
        let (status, body) = self.ask("GET", "/debug/ca");
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Returns the step and the serial numbers of the roots, the signing one first.
    pub(crate) fn roots(&self) -> (String, Vec<String>) {
        let status = self.status();
        let roots = status["roots"].as_array().unwrap().iter();
        (
            status["step"].as_str().unwrap().to_owned(),
            roots.map(|root| root["serial"].as_str().unwrap().to_owned()).collect(),
        )
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.kill();
    }
}
