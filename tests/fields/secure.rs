//! TLS of gateways: versions, suites, certificates of servers, and what clients must present, for `skysail-proxy` and
//! for a real Envoy.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use rcgen::{
    CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair, PKCS_ECDSA_P256_SHA256,
    PKCS_RSA_SHA256, PublicKeyData as _,
};
use rustls::{
    CipherSuite, ClientConfig, ClientConnection, NamedGroup, ProtocolVersion, RootCertStore, StreamOwned,
    SupportedProtocolVersion,
    crypto::{CryptoProvider, aws_lc_rs::default_provider},
    pki_types::{PrivateKeyDer, ServerName},
    version::{TLS12, TLS13},
};
use skysail_testkit::{Mesh, eventually};

use crate::mesh_with;

const RULES: &str = include_str!("secure.yaml");
/// Timeout of reads. A test that waits longer has failed.
const PATIENCE: Duration = Duration::from_secs(20);

static ALL: [&SupportedProtocolVersion; 2] = [&TLS12, &TLS13];
static OLD: [&SupportedProtocolVersion; 1] = [&TLS12];
static NEW: [&SupportedProtocolVersion; 1] = [&TLS13];
/// Names of keys of both kinds, as their Secrets and files have them.
const KINDS: [(&str, KeyKind); 2] = [("of-rsa", KeyKind::Rsa), ("of-ecdsa", KeyKind::Ecdsa)];

pub(crate) type Issuer = CertifiedIssuer<'static, KeyPair>;

/// A certificate, its key and hashes.
pub(crate) struct Member {
    pub(crate) chain: rcgen::Certificate,
    pub(crate) key: KeyPair,
}

/// Kind of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyKind {
    Rsa,
    Ecdsa,
}

/// What a client offers.
#[derive(Clone, Copy, Default)]
pub(crate) struct Offer<'a> {
    pub(crate) versions: Option<&'static [&'static SupportedProtocolVersion]>,
    pub(crate) member: Option<&'a Member>,
    /// Kind of the keys whose signatures it accepts; `None` for both.
    pub(crate) signatures: Option<KeyKind>,
}

/// Result of a handshake and a request.
pub(crate) struct Spoken {
    version: Option<ProtocolVersion>,
    suite: Option<CipherSuite>,
    group: Option<NamedGroup>,
    /// Certificate of the server.
    server: Vec<u8>,
}

impl Offer<'_> {
    /// Returns the cryptography of a client that accepts signatures of these keys alone.
    fn provider(&self) -> CryptoProvider {
        let mut provider = default_provider();
        let Some(kind) = self.signatures else { return provider };
        let (other_suite, scheme) = match kind {
            KeyKind::Rsa => ("_ECDSA_", "RSA_"),
            KeyKind::Ecdsa => ("_RSA_", "ECDSA_"),
        };
        let suite = |suite: &rustls::SupportedCipherSuite| format!("{:?}", suite.suite());
        provider.cipher_suites.retain(|of| !suite(of).contains(other_suite));
        let algorithms = &mut provider.signature_verification_algorithms;
        let mut mapping = algorithms.mapping.to_vec();
        mapping.retain(|(of, _)| format!("{of:?}").starts_with(scheme));
        algorithms.mapping = mapping.leak();
        provider
    }
}

/// Returns a certificate for a name with a key of each kind, by the names of `KINDS`.
pub(crate) fn of_both_kinds(issuer: &Issuer, name: &str) -> [(&'static str, Member); 2] {
    KINDS.map(|(file, kind)| {
        let algorithm = if kind == KeyKind::Rsa { &PKCS_RSA_SHA256 } else { &PKCS_ECDSA_P256_SHA256 };
        let key = KeyPair::generate_for(algorithm).unwrap();
        let chain = CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, issuer).unwrap();
        (file, Member { chain, key })
    })
}

pub(crate) fn issuer(name: &str) -> Issuer {
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    params.distinguished_name = named(name);
    params.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// Returns a subject. One that is the same as the issuer's would make a certificate self-signed for an Envoy.
fn named(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}

pub(crate) fn member(issuer: &Issuer, name: &str) -> Member {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    params.distinguished_name = named(&format!("member {name}"));
    let chain = params.signed_by(&key, issuer).unwrap();
    Member { chain, key }
}

pub(crate) fn secret(name: &str, entries: &[(&str, String)]) -> String {
    let block = |text: &str| text.lines().map(|line| format!("    {line}\n")).collect::<String>();
    let entries: String = entries.iter().map(|(key, text)| format!("  {key}: |\n{}", block(text))).collect();
    format!(
        "---\napiVersion: v1\nkind: Secret\nmetadata: {{name: {name}, namespace: shop}}\nstringData:\n{entries}"
    )
}

/// Returns the SHA-256 of bytes.
pub(crate) fn sha256(bytes: &[u8]) -> Vec<u8> {
    let suite = rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256;
    suite.tls13().unwrap().common.hash_provider.hash(bytes).as_ref().to_vec()
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let bits =
            chunk.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for index in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * index) & 63) as usize];
            text.push(if index > chunk.len() { '=' } else { char::from(letter) });
        }
    }
    text
}

/// Addresses of the gateways' published ports, and the authority of their certificates.
pub(crate) struct Edges {
    addresses: [SocketAddr; 2],
    roots: Arc<RootCertStore>,
}

impl Edges {
    /// Returns the edges of a mesh whose certificates an issuer has signed.
    pub(crate) fn of(mesh: &Mesh, issuer: &Issuer) -> Self {
        let mut roots = RootCertStore::empty();
        roots.add(issuer.der().clone()).unwrap();
        let ends = ["-> shop/edge-skysail:443", "-> shop/edge-envoy:443"];
        Self { addresses: ends.map(|end| published(mesh, end)), roots: Arc::new(roots) }
    }

    /// Sends a request to a host with TLS. The error is the reason of a failed handshake or response.
    pub(crate) fn ask(
        &self,
        address: SocketAddr,
        host: &'static str,
        offer: Offer<'_>,
    ) -> Result<Spoken, String> {
        let versions = offer.versions.unwrap_or(&ALL);
        let config = ClientConfig::builder_with_provider(Arc::new(offer.provider()));
        let config = config.with_protocol_versions(versions).unwrap();
        let config = config.with_root_certificates(Arc::clone(&self.roots));
        let config = match offer.member {
            None => config.with_no_client_auth(),
            Some(Member { chain, key }) => {
                let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
                config.with_client_auth_cert(vec![chain.der().clone()], key).unwrap()
            }
        };
        let session = ClientConnection::new(Arc::new(config), ServerName::try_from(host).unwrap()).unwrap();
        let stream = TcpStream::connect(address).map_err(|error| error.to_string())?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut stream = StreamOwned::new(session, stream);
        let request = format!("GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).map_err(|error| error.to_string())?;
        let mut response = Vec::new();
        if let Err(error) = stream.read_to_end(&mut response)
            && response.is_empty()
        {
            return Err(error.to_string());
        }
        let text = String::from_utf8_lossy(&response);
        if !text.starts_with("HTTP/1.1 298") {
            return Err(text.into_owned());
        }
        Ok(Spoken {
            version: stream.conn.protocol_version(),
            suite: stream.conn.negotiated_cipher_suite().map(|suite| suite.suite()),
            group: stream.conn.negotiated_key_exchange_group().map(|group| group.name()),
            server: stream.conn.peer_certificates().unwrap()[0].to_vec(),
        })
    }

    /// Applies a function to the address of each gateway.
    pub(crate) fn each<T>(&self, of: impl FnMut(SocketAddr) -> T) -> [T; 2] {
        self.addresses.map(of)
    }

    /// Checks that both gateways accept a client.
    pub(crate) fn accept(&self, host: &'static str, offer: Offer<'_>) -> [Spoken; 2] {
        self.addresses.map(|address| {
            eventually(&format!("{host} is served at {address}"), || self.ask(address, host, offer))
        })
    }

    /// Checks that both gateways present the certificate whose key the client accepts.
    pub(crate) fn present(&self, host: &'static str, both: &[(&str, Member); 2]) {
        for ((name, kind), (_, member)) in KINDS.iter().zip(both) {
            for versions in [&OLD[..], &NEW[..]] {
                let offer = Offer { versions: Some(versions), signatures: Some(*kind), ..Offer::default() };
                for spoken in self.accept(host, offer) {
                    assert_eq!(spoken.version, Some(versions[0].version), "{host}");
                    assert!(spoken.server == member.chain.der().to_vec(), "{host}: another than {name}");
                }
            }
        }
    }

    /// Checks that both gateways refuse a client of a host that they serve.
    pub(crate) fn refuse(&self, host: &'static str, offer: Offer<'_>) {
        for address in self.addresses {
            assert!(self.ask(address, host, offer).is_err(), "{host} at {address}");
        }
    }
}

/// Returns the address of a published port.
fn published(mesh: &Mesh, end: &str) -> SocketAddr {
    let output = mesh.output();
    let line = output.lines().find(|line| line.ends_with(end)).unwrap_or_else(|| panic!("{end}: {output}"));
    line.split_whitespace().nth(1).unwrap().split("//").last().unwrap().parse().unwrap()
}

#[test]
fn servers_have_their_tls_settings() {
    let (servers, clients, others) = (issuer("servers"), issuer("clients"), issuer("others"));
    let web = {
        let names = ["newer", "older", "several", "optional", "roots", "names", "pins", "keys"];
        let names = names.into_iter().chain(["generic", "generic-mutual", "generic-beside"]);
        let names: Vec<String> = names.map(|name| format!("{name}.example")).collect();
        let key = KeyPair::generate().unwrap();
        let chain = CertificateParams::new(names).unwrap().signed_by(&key, &servers).unwrap();
        let entries = [chain.pem(), key.serialize_pem(), clients.pem()];
        let with =
            |names: [&'static str; 3]| std::array::from_fn::<_, 3, _>(|at| (names[at], entries[at].clone()));
        let generic = with(["cert", "key", "cacert"]);
        // The roots of the last Secret precede those beside the certificate.
        secret("web", &with(["tls.crt", "tls.key", "ca.crt"]))
            + &secret("generic", &generic)
            + &secret("generic-beside", &generic)
            + &secret("generic-beside-cacert", &[("cacert", others.pem())])
    };
    let both = of_both_kinds(&servers, "kinds.example");
    let of_both = both
        .each_ref()
        .map(|(name, of)| secret(name, &[("tls.crt", of.chain.pem()), ("tls.key", of.key.serialize_pem())]));
    let roots = secret("roots", &[("ca.crt", others.pem())]);
    let (known, named, stranger) =
        (member(&clients, "client"), member(&clients, "member"), member(&others, "member"));
    let pin: String = sha256(named.chain.der()).iter().map(|byte| format!("{byte:02x}")).collect();
    let spki = base64(&sha256(&named.key.subject_public_key_info()));
    let rules = RULES.replace("PIN", &pin).replace("SPKI", &spki);
    let setup = mesh_with(&[rules, web, roots, of_both.concat()].join(""), &["shop/edge-envoy"]);
    let mesh = setup.with(&["-p", "0:edge-skysail:443", "-p", "0:edge-envoy:443"]).ready();
    let edges = Edges::of(&mesh, &servers);
    let without = Offer::default();
    let with = |member| Offer { member: Some(member), ..without };
    let old = Offer { versions: Some(&OLD), ..without };

    for spoken in edges.accept("newer.example", without) {
        assert_eq!(spoken.version, Some(ProtocolVersion::TLSv1_3));
    }
    edges.refuse("newer.example", old);
    for spoken in edges.accept("older.example", without) {
        assert_eq!(spoken.version, Some(ProtocolVersion::TLSv1_2));
        assert_eq!(spoken.suite, Some(CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384));
        assert_eq!(spoken.group, Some(NamedGroup::secp384r1));
    }
    edges.accept("several.example", without);
    edges.accept("optional.example", without);
    edges.accept("optional.example", with(&known));
    edges.refuse("optional.example", with(&stranger));
    edges.accept("roots.example", with(&stranger));
    edges.refuse("roots.example", with(&known));
    for host in ["names.example", "pins.example", "keys.example"] {
        edges.accept(host, with(&named));
        edges.refuse(host, with(&known));
        edges.refuse(host, without);
    }
    edges.present("kinds.example", &both);
    edges.accept("generic.example", without);
    for (host, accepted, refused) in
        [("generic-mutual.example", &known, &stranger), ("generic-beside.example", &stranger, &known)]
    {
        edges.accept(host, with(accepted));
        edges.refuse(host, with(refused));
        edges.refuse(host, without);
    }
}
