//! A control plane process, and credentials for its clients.

#![allow(dead_code, reason = "each test uses a part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests may end the test")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use serde_json::Value;
use skysail_identity::{BoundPod, Identity, Issuer, KeyAndCsr, ServiceAccount};
use skysail_xds::{certificates::create_certificate, istio::IstioCertificateRequest};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    net::TcpStream,
    process::{Child, ChildStderr, Command},
};
use tonic::{
    metadata::MetadataMap,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};

const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: NAME, namespace: default}\nspec:\n  clusterIP: 10.96.0.LAST\n  ports: [{name: http, port: 80, targetPort: 8080}]\n  selector: {app: NAME}\n";

/// A running control plane.
pub(crate) struct Control {
    pub(crate) child: Child,
    log: Lines<BufReader<ChildStderr>>,
    pub(crate) tls: String,
    pub(crate) admin: String,
}

/// The directory of a control plane: configuration, authority and token key.
pub(crate) struct Folder {
    path: tempfile::TempDir,
    pub(crate) issuer: Issuer,
}

impl Folder {
    pub(crate) fn new() -> Self {
        let folder = Self { path: tempfile::tempdir().unwrap(), issuer: Issuer::generate().unwrap() };
        fs::create_dir(folder.at("config")).unwrap();
        fs::write(folder.at("token.pem"), folder.issuer.public_pem()).unwrap();
        folder
    }

    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.path.path().join(name)
    }

    /// Writes a file with a service in place, as editors do.
    pub(crate) fn service(&self, name: &str, ip: u8) {
        let text = SERVICE.replace("NAME", name).replace("LAST", &ip.to_string());
        fs::write(self.at("config").join(format!("{name}.yaml")), text).unwrap();
    }

    pub(crate) fn token(&self, account: &str) -> String {
        self.token_of("default", account)
    }

    pub(crate) fn token_of(&self, namespace: &str, account: &str) -> String {
        self.token_for(namespace, account, None)
    }

    /// Returns a token that is bound to a pod.
    pub(crate) fn token_of_pod(&self, account: &str, name: &str, uid: &str) -> String {
        self.token_for("default", account, Some(BoundPod { name: name.into(), uid: uid.into() }))
    }

    fn token_for(&self, namespace: &str, account: &str, pod: Option<BoundPod>) -> String {
        let account = ServiceAccount { namespace: namespace.into(), name: account.into(), pod };
        self.issuer.issue(&account, "istio-ca", Duration::from_secs(60)).unwrap()
    }

    pub(crate) fn root(&self) -> Certificate {
        Certificate::from_pem(fs::read(self.at("ca/root-cert.pem")).unwrap())
    }

    pub(crate) async fn start(&self, tls_port: &str) -> Control {
        self.start_with(tls_port, &[]).await
    }

    fn command(&self, tls_port: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_skysaild"));
        command
            .args(["--listen", "127.0.0.1", "--tls-port", tls_port, "--admin-port", "0", "--log-json"])
            .args([Path::new("--config"), &self.at("config"), Path::new("--ca-dir"), &self.at("ca")])
            .args(arguments);
        // A cluster has tokens of its own.
        if !arguments.contains(&"--kubeconfig") {
            command.args([Path::new("--token-key"), &self.at("token.pem")]);
        }
        command
    }

    /// Returns the error output of a control plane that fails to start.
    pub(crate) async fn refused(&self, arguments: &[&str]) -> String {
        let output = self.command("0", arguments).output().await.unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Starts a control plane with further arguments.
    pub(crate) async fn start_with(&self, tls_port: &str, arguments: &[&str]) -> Control {
        let mut child =
            self.command(tls_port, arguments).stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let log = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut control = Control { child, log, tls: String::new(), admin: String::new() };
        control.tls =
            control.logged("serving discovery and certificates").await["address"].as_str().unwrap().into();
        control.admin = control.logged("serving admin").await["address"].as_str().unwrap().into();
        control
    }
}

impl Control {
    /// Reads the log up to a message with this text. Returns the fields of the line.
    pub(crate) async fn logged(&mut self, text: &str) -> Value {
        loop {
            let line = self.log.next_line().await.unwrap().expect("the control plane ended");
            let line: Value = serde_json::from_str(&line).unwrap();
            if line["fields"]["message"].as_str().is_some_and(|message| message.contains(text)) {
                return line["fields"].clone();
            }
        }
    }

    pub(crate) async fn page(&self, path: &str) -> String {
        let (status, body) = self.ask("GET", path).await;
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// Requests an admin page. Returns status and body.
    pub(crate) async fn ask(&self, method: &str, path: &str) -> (u16, String) {
        self.ask_with(method, path, "host: localhost").await
    }

    /// Requests an admin page with these header fields. Returns status and body.
    pub(crate) async fn ask_with(&self, method: &str, path: &str, fields: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.admin).await.unwrap();
        let request =
            format!("{method} {path} HTTP/1.1\r\n{fields}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    /// Kills the process (SIGKILL).
    pub(crate) async fn child_killed(mut self) {
        self.child.kill().await.unwrap();
    }

    pub(crate) async fn terminate(mut self) -> String {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
        assert!(self.child.wait().await.unwrap().success());
        self.tls
    }
}

pub(crate) fn endpoint(address: &str, tls: ClientTlsConfig) -> Endpoint {
    Endpoint::from_shared(format!("https://{address}"))
        .unwrap()
        .tls_config(tls.domain_name("istiod.istio-system.svc"))
        .unwrap()
}

pub(crate) fn bearer(token: &str) -> MetadataMap {
    let mut metadata = MetadataMap::new();
    metadata.insert("authorization", format!("Bearer {token}").parse().unwrap());
    metadata
}

pub(crate) async fn connect(control: &Control, folder: &Folder) -> Channel {
    let tls = ClientTlsConfig::new().ca_certificate(folder.root());
    endpoint(&control.tls, tls).connect().await.unwrap()
}

/// Requests a certificate for a service account. Returns TLS settings with it, and its identity.
pub(crate) async fn certificate(
    control: &Control,
    folder: &Folder,
    account: &str,
) -> (ClientTlsConfig, Identity) {
    certificate_by(control, folder, &folder.token(account)).await
}

/// Requests a certificate with this token. Returns TLS settings with it, and its identity.
pub(crate) async fn certificate_by(
    control: &Control,
    folder: &Folder,
    token: &str,
) -> (ClientTlsConfig, Identity) {
    let key = KeyAndCsr::generate(None).unwrap();
    let request = IstioCertificateRequest {
        csr: key.csr_pem.clone(),
        validity_duration: 999_999_999,
        ..IstioCertificateRequest::default()
    };
    let channel = connect(control, folder).await;
    let chain = create_certificate(channel, bearer(token), request).await.unwrap().concat();
    let identity = key.finish(chain.as_bytes()).unwrap();
    let tls = ClientTlsConfig::new()
        .ca_certificate(folder.root())
        .identity(tonic::transport::Identity::from_pem(&chain, key.key_pem()));
    (tls, identity)
}
