//! HTTP clients outside the mesh.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName},
};

use crate::eventually;

/// Timeout of reads. A test that waits longer has failed.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Certificate chain of a client and its key.
pub type ClientCertificate = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// Client outside the mesh, on the same machine. It opens a connection for each request.
#[derive(Clone, Debug)]
pub struct Client {
    address: SocketAddr,
    /// TLS settings; `None` for plain text.
    tls: Option<Arc<ClientConfig>>,
}

impl Client {
    /// Returns a client that connects to an address in plain text.
    pub fn plain(address: SocketAddr) -> Self {
        Self { address, tls: None }
    }

    /// Returns a client that connects to an address with TLS. It trusts one root, and presents `own` if there is one.
    pub fn tls(address: SocketAddr, root: CertificateDer<'static>, own: Option<ClientCertificate>) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(root).unwrap();
        let config =
            ClientConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots);
        let config = match own {
            None => config.with_no_client_auth(),
            Some((chain, key)) => config.with_client_auth_cert(chain, key).unwrap(),
        };
        Self { address, tls: Some(Arc::new(config)) }
    }

    /// Opens a TCP connection to the address.
    ///
    /// # Errors
    /// The connection is refused.
    pub fn connect(&self) -> Result<TcpStream, String> {
        let stream = TcpStream::connect(self.address).map_err(|error| error.to_string())?;
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        Ok(stream)
    }

    /// Returns a TLS session with this server name.
    pub fn session(&self, host: &str) -> ClientConnection {
        let config = Arc::clone(self.tls.as_ref().expect("a client of TLS"));
        ClientConnection::new(config, ServerName::try_from(host.to_owned()).unwrap()).unwrap()
    }

    /// Sends a GET request with these further header lines, each with its end. Returns the whole response as text.
    ///
    /// # Errors
    /// There is no response.
    pub fn get(&self, host: &str, path: &str, headers: &str) -> Result<String, String> {
        self.get_from(host, host, path, headers)
    }

    /// Sends a request like [`Client::get`], on a connection to another server name of TLS.
    fn get_from(&self, server: &str, host: &str, path: &str, headers: &str) -> Result<String, String> {
        let stream = self.connect()?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\n{headers}connection: close\r\n\r\n");
        match &self.tls {
            None => exchange(stream, &request),
            Some(_) => exchange(StreamOwned::new(self.session(server), stream), &request),
        }
    }

    /// Returns the status of the response to a GET request.
    ///
    /// # Errors
    /// There is no response.
    pub fn status(&self, host: &str, path: &str) -> Result<u16, String> {
        self.status_from(host, host, path)
    }

    /// Returns the status of the response on a connection to another server name of TLS.
    ///
    /// # Errors
    /// There is no response.
    pub fn status_from(&self, server: &str, host: &str, path: &str) -> Result<u16, String> {
        let response = self.get_from(server, host, path, "")?;
        response.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or(response)
    }
}

/// Waits until a response has this status and contains this text; spaces are ignored. Returns the response.
pub fn wait_response(
    what: &str,
    status: u16,
    text: &str,
    mut request: impl FnMut() -> Result<String, String>,
) -> String {
    let without_spaces = |text: &str| text.replace(' ', "");
    eventually(what, || {
        let response = request()?;
        let has_status = response.starts_with(&format!("HTTP/1.1 {status}"));
        if has_status && without_spaces(&response).contains(&without_spaces(text)) {
            Ok(response)
        } else {
            Err(response)
        }
    })
}

/// Sends a request and returns the whole response. A server that ends TLS without a notification is tolerated.
fn exchange(mut stream: impl Read + Write, request: &str) -> Result<String, String> {
    stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
    let mut response = Vec::new();
    match stream.read_to_end(&mut response) {
        Err(error) if response.is_empty() => Err(error.to_string()),
        _ => Ok(String::from_utf8_lossy(&response).into_owned()),
    }
}
