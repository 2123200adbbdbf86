//! The target of the load: its address, protocol, TLS settings, and the bytes of a request.

use std::{
    fs,
    io::Write as _,
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    path::Path,
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use http::{Uri, uri::Scheme};
use rustls::{
    ClientConfig, RootCertStore,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject as _},
};
use socket2::SockAddr;

use crate::{args::LoadArgs, stream::Tls};

/// Protocol of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http1,
    Http2,
    /// gRPC's health check, or Fortio's ping.
    Grpc,
    /// Bytes that the server echoes.
    Tcp,
}

/// Where and how to send.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// As the user gave it.
    pub(crate) url: String,
    pub(crate) uri: Uri,
    pub(crate) protocol: Protocol,
    pub(crate) address: SockAddr,
    /// The address for results.
    pub(crate) address_name: String,
    pub(crate) tls: Option<Tls>,
    pub(crate) method: String,
    /// Headers of the user with lower-case names, and default ones (`user-agent`, `content-type`).
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) payload: Vec<u8>,
}

impl Target {
    /// Reads the target from the command line. Looks its host up.
    pub(crate) fn of(args: &LoadArgs, url: &str) -> anyhow::Result<Self> {
        let given = if url.contains("://") {
            url.to_owned()
        } else {
            format!("{}://{url}", if args.grpc { "grpc" } else { "http" })
        };
        let uri: Uri = given.parse().with_context(|| format!("{url:?} is not a URL"))?;
        let scheme = uri.scheme().map_or("http", Scheme::as_str);
        let (is_tls, protocol) = match scheme {
            "http" | "https" if args.grpc => (scheme == "https", Protocol::Grpc),
            "http" | "https" => (scheme == "https", if args.h2 { Protocol::Http2 } else { Protocol::Http1 }),
            "grpc" | "grpcs" => (scheme == "grpcs", Protocol::Grpc),
            "tcp" | "tls" => (scheme == "tls", Protocol::Tcp),
            other => bail!("scheme {other} of {url} is unknown; use http, https, grpc, grpcs, tcp or tls"),
        };
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        ensure!(
            !authority.contains('@'),
            "{url} has a user name, which is not supported; use -H 'Authorization: …'"
        );
        let host = uri.host().filter(|host| !host.is_empty());
        let host = host.with_context(|| format!("{url} names no host"))?.trim_matches(['[', ']']).to_owned();
        let port = match (uri.port_u16(), protocol, is_tls) {
            (Some(port), ..) => port,
            (None, Protocol::Grpc, false) => 8_079,
            (None, Protocol::Tcp, _) => bail!("{url} names no port"),
            (None, _, true) => 443,
            (None, _, false) => 80,
        };
        let (address, address_name) = address(args, &host, port)?;
        let alpn: &[u8] =
            if matches!(protocol, Protocol::Http2 | Protocol::Grpc) { b"h2" } else { b"http/1.1" };
        let alpn = if protocol == Protocol::Tcp { None } else { Some(alpn) };
        let tls = is_tls.then(|| tls(args, &host, alpn)).transpose()?;
        let payload = args.payload()?;
        let method = match (&args.method, payload.is_empty()) {
            (Some(method), _) => method.to_ascii_uppercase(),
            (None, true) => "GET".to_owned(),
            (None, false) => "POST".to_owned(),
        };
        let headers = headers(args, &payload)?;
        Ok(Self { url: url.to_owned(), uri, protocol, address, address_name, tls, method, headers, payload })
    }

    /// Returns the value of `Host` or `:authority`.
    pub(crate) fn authority(&self) -> &str {
        let given = self.headers.iter().find(|(name, _)| name == "host");
        given
            .map_or_else(|| self.uri.authority().map_or("", |authority| authority.as_str()), |(_, host)| host)
    }

    /// Returns the path and the query.
    pub(crate) fn path(&self) -> &str {
        self.uri.path_and_query().map_or("/", |path| path.as_str())
    }

    /// Returns the bytes of a request over HTTP/1. With `is_last`, the server is to close the connection after it.
    pub(crate) fn http1_request(&self, is_version_10: bool, is_last: bool) -> anyhow::Result<Vec<u8>> {
        let mut request = Vec::with_capacity(self.payload.len() + 512);
        let version = if is_version_10 { "1.0" } else { "1.1" };
        write!(request, "{} {} HTTP/{version}\r\nHost: {}\r\n", self.method, self.path(), self.authority())?;
        for (name, value) in self.headers.iter().filter(|(name, _)| name != "host") {
            write!(request, "{name}: {value}\r\n")?;
        }
        let has = |name: &str| self.headers.iter().any(|(given, _)| given == name);
        let needs_length = !self.payload.is_empty() || self.method == "POST" || self.method == "PUT";
        if needs_length && !has("content-length") {
            write!(request, "content-length: {}\r\n", self.payload.len())?;
        }
        match (is_version_10, is_last) {
            _ if has("connection") => {}
            (false, true) => request.extend_from_slice(b"connection: close\r\n"),
            (true, false) => request.extend_from_slice(b"connection: keep-alive\r\n"),
            _ => {}
        }
        request.extend_from_slice(b"\r\n");
        request.extend_from_slice(&self.payload);
        Ok(request)
    }
}

/// Returns the address to connect to, with its name for results.
fn address(args: &LoadArgs, host: &str, port: u16) -> anyhow::Result<(SockAddr, String)> {
    if let Some(path) = &args.unix_socket {
        let address =
            SockAddr::unix(path).with_context(|| format!("the path {} is too long", path.display()))?;
        return Ok((address, path.display().to_string()));
    }
    let address = match args.resolve {
        Some(ip) => SocketAddr::new(ip, port),
        None => match host.parse::<IpAddr>() {
            Ok(ip) => SocketAddr::new(ip, port),
            Err(_) => {
                let found =
                    (host, port).to_socket_addrs().with_context(|| format!("cannot look up {host}"))?;
                let mut found: Vec<SocketAddr> = found.collect();
                // IPv4 comes first.
                found.sort_by_key(SocketAddr::is_ipv6);
                *found.first().with_context(|| format!("{host} has no address"))?
            }
        },
    };
    Ok((address.into(), address.to_string()))
}

fn headers(args: &LoadArgs, payload: &[u8]) -> anyhow::Result<Vec<(String, String)>> {
    let mut headers = Vec::new();
    for header in &args.headers {
        let (name, value) =
            header.split_once(':').with_context(|| format!("header {header:?} has no colon"))?;
        let (name, value) = (name.trim().to_ascii_lowercase(), value.trim());
        let is_valid = http::HeaderName::from_bytes(name.as_bytes()).is_ok()
            && http::HeaderValue::from_str(value).is_ok();
        ensure!(is_valid, "{header:?} is not a header");
        headers.push((name, value.to_owned()));
    }
    let mut default = |name: &str, value: &str| {
        if !headers.iter().any(|(given, _)| given == name) {
            headers.push((name.to_owned(), value.to_owned()));
        }
    };
    default("user-agent", concat!("skysail-load/", env!("CARGO_PKG_VERSION")));
    if let Some(content_type) = &args.content_type {
        default("content-type", content_type);
    } else if !payload.is_empty() {
        default("content-type", "application/octet-stream");
    }
    Ok(headers)
}

fn tls(args: &LoadArgs, host: &str, alpn: Option<&[u8]>) -> anyhow::Result<Tls> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder =
        ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
    let builder = match (&args.cacert, args.insecure) {
        (_, true) => builder.dangerous().with_custom_certificate_verifier(Arc::new(AcceptAll(provider))),
        (Some(file), false) => builder.with_root_certificates(roots(file)?),
        (None, false) => {
            bail!(
                "TLS needs the root certificates of the server (-cacert FILE), or -k to accept any certificate"
            )
        }
    };
    let mut config = match (&args.cert, &args.key) {
        (Some(cert), Some(key)) => {
            let chain = CertificateDer::pem_file_iter(cert).and_then(Iterator::collect::<Result<Vec<_>, _>>);
            let chain = chain.with_context(|| format!("cannot read certificates from {}", cert.display()))?;
            let key = PrivateKeyDer::from_pem_file(key)
                .with_context(|| format!("cannot read a private key from {}", key.display()))?;
            builder.with_client_auth_cert(chain, key).context("the certificate does not match the key")?
        }
        _ => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.into_iter().map(<[u8]>::to_vec).collect();
    let name = args.server_name.as_deref().unwrap_or(host).to_owned();
    let server = ServerName::try_from(name).with_context(|| format!("{host} is not a name for TLS"))?;
    Ok(Tls::new(Arc::new(config), server))
}

fn roots(file: &Path) -> anyhow::Result<RootCertStore> {
    let pem = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate =
            certificate.with_context(|| format!("{} has an invalid certificate", file.display()))?;
        roots.add(certificate).with_context(|| format!("{} has an invalid certificate", file.display()))?;
    }
    ensure!(!roots.is_empty(), "{} has no certificate", file.display());
    Ok(roots)
}

/// Accepts every certificate, for `-k`. Signatures of the handshake are verified.
#[derive(Debug)]
struct AcceptAll(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAll {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(
            message,
            cert,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &rustls::DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(
            message,
            cert,
            signature,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
