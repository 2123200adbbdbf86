//! Loads over TLS and mutual TLS, against a server that decrypts for the echo servers.

use std::{
    collections::BTreeMap,
    fs,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    sync::Arc,
};

use clap::Parser as _;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};
use rustls::{
    RootCertStore, ServerConfig,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};
use tokio::{
    io::{copy, copy_bidirectional, sink},
    net::TcpStream,
    sync::mpsc,
};
use tokio_rustls::TlsAcceptor;

use super::{CommandLine, http1, http2, load, try_load};
use crate::{server, text};

/// Name in the certificate of the server.
const HOST: &str = "server.test";
/// Number of requests of a load, and of its connections.
const REQUESTS: u64 = 30;
const CONNECTIONS: u64 = 3;

/// An authority, and certificates in files.
struct Pki {
    folder: tempfile::TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
    root: PathBuf,
}

impl Pki {
    /// Creates an authority with this name.
    fn new(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let root = folder.path().join("root.pem");
        fs::write(&root, authority.pem()).unwrap();
        Self { folder, authority, root }
    }

    /// Issues a certificate for a name. Returns the files of its chain and its key.
    fn issue(&self, name: &str) -> (PathBuf, PathBuf) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = certificate.signed_by(&key, &self.authority).unwrap();
        let files = ["crt", "key"].map(|end| self.folder.path().join(format!("{name}.{end}")));
        fs::write(&files[0], certificate.pem()).unwrap();
        fs::write(&files[1], key.serialize_pem()).unwrap();
        files.into()
    }
}

/// A protocol over TLS.
struct Secured {
    flags: &'static str,
    scheme: &'static str,
    /// Server behind the one for TLS.
    behind: SocketAddr,
    alpn: Option<&'static [u8]>,
    /// Code of a successful request.
    code: &'static str,
}

fn protocols() -> Vec<Secured> {
    let (one, two, tcp) = (http1(), http2(), echo());
    let of = |flags, scheme, behind, alpn, code| Secured { flags, scheme, behind, alpn, code };
    let (http, h2): (Option<&[u8]>, Option<&[u8]>) = (Some(b"http/1.1"), Some(b"h2"));
    vec![
        of("-payload-size 100000", "https", one, http, "200"),
        of("-h2 -s 2", "https", two, h2, "200"),
        of("-s 2", "grpcs", two, h2, "SERVING"),
        of("-grpc -ping -payload x", "https", two, h2, "SERVING"),
        of("-payload-size 100000", "tls", tcp, None, "OK"),
    ]
}

fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || server::serve_echo(&listener).unwrap());
    address
}

/// What the server learned in a handshake.
#[derive(Debug, PartialEq)]
struct Handshake {
    server_name: Option<String>,
    alpn: Option<Vec<u8>>,
    has_certificate: bool,
}

/// A server that decrypts for another one.
struct TlsServer {
    address: SocketAddr,
    /// Successful handshakes.
    handshakes: mpsc::UnboundedReceiver<Handshake>,
}

impl TlsServer {
    /// Starts a server with a certificate of this authority. `clients` is the authority of the certificates that clients
    /// need; `None` if they need none.
    fn start(pki: &Pki, protocol: &Secured, clients: Option<&Pki>) -> Self {
        let (chain, key) = pki.issue(HOST);
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(clients) => {
                let mut roots = RootCertStore::empty();
                roots.add(CertificateDer::from_pem_file(&clients.root).unwrap()).unwrap();
                let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
                builder.with_client_cert_verifier(verifier.build().unwrap())
            }
        };
        let chain = vec![CertificateDer::from_pem_file(chain).unwrap()];
        let mut config = builder.with_single_cert(chain, PrivateKeyDer::from_pem_file(key).unwrap()).unwrap();
        config.alpn_protocols = protocol.alpn.into_iter().map(<[u8]>::to_vec).collect();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, handshakes) = mpsc::unbounded_channel();
        let behind = protocol.behind;
        std::thread::spawn(move || serve(listener, config, behind, &sender));
        Self { address, handshakes }
    }

    /// Returns the arguments of a load to the server by this name, with further flags.
    fn line(&self, protocol: &Secured, name: &str, flags: &str) -> String {
        let Secured { flags: usual, scheme, .. } = protocol;
        let port = self.address.port();
        let counts = format!("-qps 0 -n {REQUESTS} -c {CONNECTIONS}");
        format!("{counts} {usual} {flags} -resolve 127.0.0.1 {scheme}://{name}:{port}")
    }
}

fn serve(
    listener: TcpListener,
    config: ServerConfig,
    behind: SocketAddr,
    handshakes: &mpsc::UnboundedSender<Handshake>,
) {
    listener.set_nonblocking(true).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(connection(acceptor.clone(), stream, behind, handshakes.clone()));
        }
    });
}

async fn connection(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    behind: SocketAddr,
    handshakes: mpsc::UnboundedSender<Handshake>,
) {
    let mut stream = match acceptor.accept(stream).into_fallible().await {
        Ok(stream) => stream,
        Err((_, mut stream)) => {
            // The kernel would discard the alert with a reset if bytes of the client were unread.
            let _ = copy(&mut stream, &mut sink()).await;
            return;
        }
    };
    let (_, session) = stream.get_ref();
    // The receiver is dropped with its test.
    let _ = handshakes.send(Handshake {
        server_name: session.server_name().map(str::to_owned),
        alpn: session.alpn_protocol().map(<[u8]>::to_vec),
        has_certificate: session.peer_certificates().is_some(),
    });
    let mut upstream = TcpStream::connect(behind).await.unwrap();
    // Clients close their connections without an alert.
    let _ = copy_bidirectional(&mut stream, &mut upstream).await;
}

#[test]
fn every_protocol_counts_its_requests_over_tls() {
    let pki = Pki::new("servers");
    let root = pki.root.display();
    for protocol in protocols() {
        let mut server = TlsServer::start(&pki, &protocol, None);
        let line = server.line(&protocol, HOST, &format!("-cacert {root}"));
        let result = load(&line);
        assert_eq!(result.ret_codes, BTreeMap::from([(protocol.code.to_owned(), REQUESTS)]), "{line}");
        assert_eq!((result.socket_count, &result.failures), (CONNECTIONS, &BTreeMap::new()), "{line}");
        for _ in 0..CONNECTIONS {
            let expected = Handshake {
                server_name: Some(HOST.to_owned()),
                alpn: protocol.alpn.map(<[u8]>::to_vec),
                has_certificate: false,
            };
            assert_eq!(server.handshakes.try_recv(), Ok(expected), "{line}");
        }
        let line = server.line(&protocol, HOST, &format!("-keepalive=false -cacert {root}"));
        let result = load(&line);
        assert_eq!(result.ret_codes, BTreeMap::from([(protocol.code.to_owned(), REQUESTS)]), "{line}");
        assert_eq!(result.socket_count, REQUESTS + CONNECTIONS, "{line}");
    }
}

#[test]
fn a_server_may_need_the_certificate_of_the_client() {
    let (pki, clients) = (Pki::new("servers"), Pki::new("others"));
    let (root, (chain, key)) = (pki.root.display(), clients.issue("client.test"));
    let (other_chain, other_key) = pki.issue("other.test");
    for protocol in protocols() {
        let mut server = TlsServer::start(&pki, &protocol, Some(&clients));
        let with = |chain: &PathBuf, key: &PathBuf| {
            format!("-allow-initial-errors -cacert {root} -cert {} -key {}", chain.display(), key.display())
        };
        let line = server.line(&protocol, HOST, &with(&chain, &key));
        let result = load(&line);
        assert_eq!(result.ret_codes, BTreeMap::from([(protocol.code.to_owned(), REQUESTS)]), "{line}");
        for _ in 0..CONNECTIONS {
            assert!(server.handshakes.try_recv().unwrap().has_certificate, "{line}");
        }
        // The server refuses a client without a certificate, and one whose authority it does not know.
        for (flags, alert) in [
            (format!("-allow-initial-errors -cacert {root}"), "CertificateRequired"),
            (with(&other_chain, &other_key), "UnknownCA"),
        ] {
            let line = server.line(&protocol, HOST, &flags);
            fails_in_the_handshake(&line, &format!("received fatal alert: {alert}"));
        }
        assert_eq!(server.handshakes.try_recv(), Err(mpsc::error::TryRecvError::Empty));
    }
}

/// Runs a load of which each request fails in the TLS handshake, with this text in the first error.
fn fails_in_the_handshake(line: &str, expected: &str) {
    let result = load(line);
    assert_eq!(result.failures, BTreeMap::from([("TLS handshake".to_owned(), REQUESTS)]), "{line}");
    assert_eq!(result.errors_duration_histogram.count, REQUESTS, "{line}");
    let error = &result.failure_errors["TLS handshake"];
    assert!(error.contains(expected), "{line}: {error}");
    let shown = format!("no response  TLS handshake: {REQUESTS} ({error})");
    assert!(text::of(&result).contains(&shown), "{shown}: {}", text::of(&result));
}

#[test]
fn an_unknown_authority_fails_every_request() {
    let (pki, other) = (Pki::new("servers"), Pki::new("others"));
    let root = other.root.display();
    for protocol in protocols() {
        let mut server = TlsServer::start(&pki, &protocol, None);
        let line = server.line(&protocol, HOST, &format!("-cacert {root}"));
        let reason = "invalid peer certificate: UnknownIssuer";
        let error = try_load(&line).unwrap_err().to_string();
        let expected = format!("failed: TLS handshake: {reason}; -allow-initial-errors begins anyway");
        assert!(error.ends_with(&expected), "{line}: {error}");
        fails_in_the_handshake(&format!("-allow-initial-errors {line}"), reason);
        assert_eq!(server.handshakes.try_recv(), Err(mpsc::error::TryRecvError::Empty), "{line}");

        let result = load(&server.line(&protocol, HOST, "-k"));
        assert_eq!(result.ret_codes.get(protocol.code), Some(&REQUESTS), "-k accepts it");
    }
}

#[test]
fn the_name_of_the_server_is_verified() {
    let pki = Pki::new("servers");
    let root = pki.root.display();
    for protocol in protocols() {
        let server = TlsServer::start(&pki, &protocol, None);
        let flags = format!("-allow-initial-errors -cacert {root}");
        let line = server.line(&protocol, "other.test", &flags);
        fails_in_the_handshake(&line, "certificate not valid for name \"other.test\"");
        let line = server.line(&protocol, "other.test", &format!("-server-name {HOST} {flags}"));
        assert_eq!(load(&line).ret_codes.get(protocol.code), Some(&REQUESTS), "{line}");
    }
}

#[test]
fn unusable_tls_settings_are_errors() {
    let pki = Pki::new("servers");
    let (chain, key) = pki.issue("client.test");
    let (_, other_key) = pki.issue("other.test");
    let (chain, key, other_key, root) =
        (chain.display(), key.display(), other_key.display(), pki.root.display());
    for (flags, expected) in [
        (String::new(), "-cacert FILE".to_owned()),
        (format!("-cacert {key}"), format!("{key} has no certificate")),
        (format!("-cacert {root}.none"), format!("cannot read {root}.none")),
        (format!("-cacert {root} -cert {chain} -key {other_key}"), "does not match the key".to_owned()),
        (format!("-cacert {root} -cert {chain} -key {chain}"), format!("private key from {chain}")),
    ] {
        let line = format!("{flags} https://{HOST}/").trim_start().replace("  ", " ");
        let line = format!("-resolve 127.0.0.1 {line}");
        let error = format!("{:#}", try_load(&line).unwrap_err());
        assert!(error.contains(&expected), "{line}: {error}");
    }
    for alone in [format!("--cert={chain}"), format!("--key={key}")] {
        let parsed = CommandLine::try_parse_from(["load", &alone, "https://a/"]);
        assert!(parsed.is_err(), "{alone} needs the other flag");
    }
}
