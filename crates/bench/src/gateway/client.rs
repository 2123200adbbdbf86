//! A client of the gateway: TLS by host name, and one request on each connection.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::bail;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, Stream,
    client::Resumption,
    pki_types::{CertificateDer, ServerName},
};

use super::{POLL, TIMEOUT, config::PORT};
use crate::child::Running;

/// Timeout of a read.
const READ: Duration = Duration::from_secs(10);

/// Settings of the client's connections.
pub(super) struct HttpsClient {
    config: Arc<ClientConfig>,
}

impl HttpsClient {
    /// Creates a client that trusts this authority.
    pub(super) fn new(authority: &CertificateDer<'static>) -> anyhow::Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(authority.clone())?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.resumption = Resumption::disabled();
        Ok(Self { config: Arc::new(config) })
    }

    /// Waits until the gateway answers a request for the host, with this certificate.
    pub(super) async fn wait(
        &mut self,
        host: &str,
        certificate: &[u8],
        gateway: &Running,
    ) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            let reason = match self.get(host) {
                Ok((presented, status)) if presented == certificate && status.starts_with("HTTP/1.1 200") => {
                    return Ok(());
                }
                Ok((presented, _)) if presented != certificate => "another certificate".to_owned(),
                Ok((_, status)) => status,
                Err(error) => format!("{error:#}"),
            };
            if start.elapsed() > TIMEOUT {
                bail!("{host} is not served after {TIMEOUT:?}: {reason}; {}", gateway.output_tail());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Sends a request. Returns the certificate of the server and the beginning of the response.
    fn get(&self, host: &str) -> anyhow::Result<(Vec<u8>, String)> {
        let mut socket = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], PORT)))?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(READ))?;
        let mut connection =
            ClientConnection::new(self.config.clone(), ServerName::try_from(host.to_owned())?)?;
        let mut stream = Stream::new(&mut connection, &mut socket);
        stream.write_all(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes())?;
        let mut response = [0; 256];
        let length = stream.read(&mut response)?;
        let status =
            String::from_utf8_lossy(&response[..length]).lines().next().unwrap_or_default().to_owned();
        let presented = connection.peer_certificates().and_then(|chain| chain.first());
        Ok((presented.map(|one| one.to_vec()).unwrap_or_default(), status))
    }
}
