//! Acceptance of certificates and TLS negotiation: every configuration meets every peer, in Envoy and in the
//! sidecar, and both must decide alike.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends with the first thing that goes wrong"
)]

#[path = "support/either.rs"]
mod either;
#[path = "support/envoy.rs"]
mod envoy;
#[path = "support/pki.rs"]
mod pki;
#[path = "support/program.rs"]
mod program;
mod support;
#[path = "support/tls_config.rs"]
mod tls_config;

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use either::Either;
use pki::{Ca, Certificate, Leaf};
use program::Program;
use rcgen::{ExtendedKeyUsagePurpose, KeyUsagePurpose, SanType};
use rustls::{CipherSuite, ClientConfig, HandshakeKind, NamedGroup, client::Resumption};
use serde_json::{Value, json};
use skysail_identity::{Live, TlsSpec, tls::Version};
use support::{Client, within};
use tls_config::{bootstrap, inline, listener, own, socket, typed};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};

fn cluster(name: &str, port: u16, tls: &Value) -> Value {
    json!({
        "name": name,
        "type": "STATIC",
        "transport_socket": typed("transport_sockets.tls.v3.UpstreamTlsContext", tls),
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": socket(port)}}]}],
        },
    })
}

/// Returns trust bundles that are bound to their trust domains.
fn spiffe(domains: &[(&str, &Ca)]) -> Value {
    let domains: Vec<_> =
        domains.iter().map(|(name, ca)| json!({"name": name, "trust_bundle": inline(&ca.pem)})).collect();
    let mut validator =
        typed("transport_sockets.tls.v3.SPIFFECertValidatorConfig", &json!({"trust_domains": domains}));
    validator["name"] = "envoy.tls.cert_validator.spiffe".into();
    json!({"custom_validator_config": validator})
}

/// Sends a request; returns false if the server closes the connection.
async fn is_answered(mut stream: TlsStream<TcpStream>) -> bool {
    answers(&mut stream).await
}

/// Sends a request on a connection that stays open.
async fn answers(stream: &mut TlsStream<TcpStream>) -> bool {
    if stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.is_err() {
        return false;
    }
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match within(stream.read_u8()).await {
            Ok(byte) => head.push(byte),
            Err(_) => return false,
        }
    }
    head.starts_with(b"HTTP/1.1 200 ")
}

async fn connect(
    config: &Arc<ClientConfig>,
    to: SocketAddr,
    name: &'static str,
) -> Option<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(to).await.unwrap();
    within(TlsConnector::from(Arc::clone(config)).connect(name.try_into().unwrap(), stream)).await.ok()
}

/// Authorities and peers of these tests.
struct World {
    west: Ca,
    east: Ca,
    middle: Ca,
    server: Certificate,
    peers: Vec<(&'static str, Certificate)>,
}

impl World {
    fn new() -> Self {
        let (west, east) = (Ca::root("west"), Ca::root("east"));
        let middle = west.intermediate("middle");
        let lowest = middle.intermediate("lowest");
        let ip = |text: &str| SanType::IpAddress(text.parse().unwrap());
        let dns = |text: &str| SanType::DnsName(text.try_into().unwrap());
        let mail = SanType::Rfc822Name("front@example.com".try_into().unwrap());
        let wildcards = ["*.example.com", "pre*.partial.example", "*.Upper.Example", "xn--*.puny.example"];
        let front = ["spiffe://west/ns/shop/sa/front"];
        let stock = ["spiffe://east/ns/shop/sa/stock"];
        let mut named = Leaf::uris(2, &front);
        named.0.subject_alt_names.extend([ip("10.0.0.1"), ip("2001:db8::1"), dns("front.example"), mail]);
        let usage =
            |usages: Vec<KeyUsagePurpose>| Leaf::uris(7, &front).change(|leaf| leaf.key_usages = usages);
        let purpose = |purpose: ExtendedKeyUsagePurpose| {
            Leaf::uris(8, &front).change(|leaf| leaf.extended_key_usages = vec![purpose])
        };
        let peers = vec![
            ("plain", west.sign(Leaf::uris(3, &front))),
            ("named", west.sign(named)),
            ("wildcards", west.sign(Leaf::new(4, wildcards.map(dns).into()))),
            ("by middle", middle.sign(Leaf::uris(5, &front))),
            ("by lowest", lowest.sign(Leaf::uris(5, &front))),
            ("of nobody", west.sign(Leaf::new(6, vec![]))),
            ("revoked", west.sign(Leaf::uris(66, &front))),
            ("revoked by middle", middle.sign(Leaf::uris(66, &front))),
            ("may encipher", west.sign(usage(vec![KeyUsagePurpose::KeyEncipherment]))),
            (
                "may sign all",
                west.sign(usage(vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::CrlSign])),
            ),
            ("of servers", west.sign(purpose(ExtendedKeyUsagePurpose::ServerAuth))),
            ("of clients", west.sign(purpose(ExtendedKeyUsagePurpose::ClientAuth))),
            (
                "expired",
                west.sign(Leaf::uris(9, &front).change(|leaf| {
                    leaf.not_after = (std::time::SystemTime::now() - Duration::from_secs(60)).into();
                })),
            ),
            ("of east", east.sign(Leaf::uris(3, &stock))),
            ("west by east", east.sign(Leaf::uris(3, &front))),
            ("east by west", west.sign(Leaf::uris(3, &stock))),
            ("east, then west, by east", east.sign(Leaf::uris(3, &[stock[0], front[0]]))),
            ("west, then east, by east", east.sign(Leaf::uris(3, &[front[0], stock[0]]))),
            ("west, then east, by west", west.sign(Leaf::uris(3, &[front[0], stock[0]]))),
            ("self-signed", self_signed()),
        ];
        let server = west.sign(Leaf::new(1, vec![dns("server.example"), dns("*.server.example")]));
        Self { west, east, middle, server, peers }
    }

    fn peer(&self, name: &str) -> &Certificate {
        &self.peers.iter().find(|peer| peer.0 == name).unwrap().1
    }

    /// Returns validation contexts by name.
    fn contexts(&self) -> Vec<(String, Value)> {
        let (west, middle) = (&self.west, &self.middle);
        let ca = |more: Value| {
            let mut context = json!({"trusted_ca": inline(&west.pem)});
            context.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            context
        };
        let lists = |lists: &[String]| inline(&lists.concat());
        let both = [west.crl(&[66]), middle.crl(&[66])];
        let crl = |lists_of: &[String]| ca(json!({"crl": lists(lists_of)}));
        let leaf =
            |lists_of: &[String]| ca(json!({"crl": lists(lists_of), "only_verify_leaf_cert_crl": true}));
        let hour = Duration::from_hours(1);
        let (hash, key) = self.pins("plain");
        let zero = STANDARD.encode([0; 32]);
        let mut contexts = vec![
            ("trusted", ca(json!({}))),
            ("trusted, old and new", json!({"trusted_ca": lists(&[west.pem.clone(), self.east.pem.clone()])})),
            ("anchored in the middle", json!({"trusted_ca": inline(&middle.pem)})),
            ("revocation", crl(&both)),
            ("revocation by west", crl(&both[..1])),
            ("revocation by middle", crl(&both[1..])),
            ("revocation by east", crl(&[self.east.crl(&[66])])),
            ("revocation of middle", crl(&[west.crl(&[1]), middle.crl(&[])])),
            ("revocation ended", crl(&[west.crl_until(&[], hour / 2)])),
            ("revocation of leaves", leaf(&both)),
            ("revocation of leaves by west", leaf(&both[..1])),
            ("revocation of leaves by middle", leaf(&both[1..])),
            ("revocation with roots", json!({"trusted_ca": lists(&[west.pem.clone(), west.crl(&[66])])})),
            ("hash", ca(json!({"verify_certificate_hash": [hash]}))),
            ("key", ca(json!({"verify_certificate_spki": [key]}))),
            ("hash or key", ca(json!({"verify_certificate_hash": ["00".repeat(32)], "verify_certificate_spki": [key]}))),
            ("other key", ca(json!({"verify_certificate_spki": [zero]}))),
            ("key alone", json!({"verify_certificate_spki": [key]})),
            ("other hash alone", json!({"verify_certificate_hash": ["00".repeat(32)]})),
            ("key and name", ca(json!({
                "verify_certificate_spki": [key],
                "match_typed_subject_alt_names": [{"san_type": "URI", "matcher": {"suffix": "/sa/other"}}],
            }))),
            ("depth 1", ca(json!({"max_verify_depth": 1}))),
            ("depth 2", ca(json!({"max_verify_depth": 2}))),
            ("depth 3", ca(json!({"max_verify_depth": 3}))),
            ("older names", ca(json!({"match_subject_alt_names": [{"exact": "front.example"}, {"exact": "a.example.com"}]}))),
            ("older names beside newer", ca(json!({
                "match_subject_alt_names": [{"prefix": "spiffe://"}],
                "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": "nobody"}}],
            }))),
            ("bundle of west", spiffe(&[("west", west)])),
            ("bundles", spiffe(&[("west", west), ("east", &self.east)])),
            ("bundles and names", {
                let mut context = spiffe(&[("west", west), ("east", &self.east)]);
                let names = json!([
                    {"san_type": "DNS", "matcher": {"exact": "a.example.com"}},
                    {"san_type": "URI", "matcher": {"prefix": "spiffe://west/"}},
                ]);
                context["match_typed_subject_alt_names"] = names;
                context
            }),
        ]
        .into_iter()
        .map(|(name, context)| (name.to_owned(), context))
        .chain([self.pinned()])
        .collect::<Vec<_>>();
        for (kind, matcher) in [
            ("URI", json!({"exact": "spiffe://west/ns/shop/sa/front"})),
            ("URI", json!({"exact": "SPIFFE://west/ns/shop/sa/front"})),
            ("URI", json!({"exact": "SPIFFE://west/ns/shop/sa/front", "ignore_case": true})),
            ("URI", json!({"prefix": "spiffe://west/"})),
            ("URI", json!({"prefix": "ffe://"})),
            ("URI", json!({"suffix": "/sa/front"})),
            ("URI", json!({"contains": "/ns/shop/"})),
            ("URI", json!({"safe_regex": {"regex": "spiffe://west/.*"}})),
            ("URI", json!({"safe_regex": {"regex": "spiffe://west/"}})),
            ("DNS", json!({"exact": "front.example"})),
            ("DNS", json!({"exact": "FRONT.Example"})),
            ("DNS", json!({"exact": "a.example.com"})),
            ("DNS", json!({"exact": "a.b.example.com"})),
            ("DNS", json!({"exact": "example.com"})),
            ("DNS", json!({"exact": ".example.com"})),
            ("DNS", json!({"exact": "*.example.com"})),
            ("DNS", json!({"exact": "prefix.partial.example"})),
            ("DNS", json!({"exact": "pre.partial.example"})),
            ("DNS", json!({"exact": "other.partial.example"})),
            ("DNS", json!({"exact": "a.upper.example"})),
            ("DNS", json!({"exact": "xn--a.puny.example"})),
            ("DNS", json!({"suffix": ".example.com"})),
            ("DNS", json!({"suffix": ".upper.example"})),
            ("DNS", json!({"suffix": ".upper.example", "ignore_case": true})),
            ("DNS", json!({"prefix": "spiffe"})),
            ("EMAIL", json!({"exact": "front@example.com"})),
            ("EMAIL", json!({"suffix": "@example.com"})),
            ("EMAIL", json!({"suffix": ".example"})),
            ("IP_ADDRESS", json!({"exact": "10.0.0.1"})),
            ("IP_ADDRESS", json!({"exact": "2001:db8::1"})),
            ("IP_ADDRESS", json!({"prefix": "10."})),
            ("IP_ADDRESS", json!({"exact": "10.0.0.2"})),
        ] {
            let names = json!({"match_typed_subject_alt_names": [{"san_type": kind, "matcher": matcher}]});
            contexts.push((format!("{kind} {matcher}"), ca(names)));
        }
        contexts
    }

    /// Returns a context that fingerprints of valid and other certificates alone decide.
    fn pinned(&self) -> (String, Value) {
        let peers = ["plain", "may encipher", "expired", "of clients", "self-signed"];
        let hashes = peers.map(|peer| self.pins(peer).0);
        ("hash alone".to_owned(), json!({"verify_certificate_hash": hashes}))
    }

    /// Returns the fingerprints of a peer's certificate and of its key.
    fn pins(&self, peer: &str) -> (String, String) {
        let identity = self.peer(peer).identity();
        let (_, leaf) = x509_parser::parse_x509_certificate(&identity.chain()[0]).unwrap();
        let sha256 = |bytes: &[u8]| {
            let suite = rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256.tls13().unwrap();
            suite.common.hash_provider.hash(bytes).as_ref().to_vec()
        };
        let hash = sha256(&identity.chain()[0]).iter().map(|byte| format!("{byte:02X}")).collect::<Vec<_>>();
        (hash.join(":"), STANDARD.encode(sha256(leaf.public_key().raw)))
    }
}

fn self_signed() -> Certificate {
    let made = rcgen::generate_simple_self_signed(["front.example".to_owned()]).unwrap();
    Certificate { chain: made.cert.pem(), key: made.signing_key.serialize_pem() }
}

/// Outcomes by configuration and peer.
type Outcomes = BTreeMap<(String, String), String>;

/// Peers that Envoy accepts and the sidecar refuses: prefix of the context, and the peer.
const STRICTER: &[(&str, &str)] = &[
    // A wildcard matches at least one character (RFC 6125, section 6.4.3).
    ("DNS {\"exact\":\".example.com\"}", "wildcards"),
    // Envoy's SPIFFE validator ignores extendedKeyUsage.
    ("bundle", "of clients"),
    ("bundle", "of servers"),
    // Envoy selects the bundle by the first URI, and matches names against all URIs.
    ("bundle", "east, then west, by east"),
    ("bundle", "west, then east, by west"),
    // Envoy 1.40 documents this limit but does not enforce it.
    ("depth 1", "by middle"),
    ("depth 1", "revoked by middle"),
    ("depth 1", "by lowest"),
    ("depth 2", "by lowest"),
];

/// Fails with the differences, except for the intended ones.
fn compare(envoy: &Outcomes, ours: &Outcomes) {
    assert_eq!(envoy.len(), ours.len());
    let mut different = Vec::new();
    for ((context, peer), envoy) in envoy {
        let ours = &ours[&(context.clone(), peer.clone())];
        let stricter = STRICTER.iter().any(|(begin, who)| context.starts_with(begin) && who == peer);
        let meant = stricter && ["accepted", "200"].contains(&envoy.as_str());
        if envoy != ours && !meant {
            different.push(format!("{context}: {peer}: Envoy {envoy}, ours {ours}"));
        }
    }
    assert!(different.is_empty(), "{different:#?}");
}

/// Each context with and without `require_client_certificate`, with each client and with one without a
/// certificate.
#[tokio::test]
async fn clients_are_accepted_as_by_envoy() {
    let world = World::new();
    let mut listeners = Vec::new();
    for (name, context) in world.contexts() {
        for required in [true, false] {
            let tls = json!({
                "require_client_certificate": required,
                "common_tls_context": {"tls_certificates": own(&world.server), "validation_context": context},
            });
            listeners.push(listener(&format!("{name} {required}"), Some(&tls), &[]));
        }
    }
    let clients = world.peers.iter().map(|(name, certificate)| {
        let identities = vec![Live::new(certificate.identity())];
        (*name, TlsSpec { identities, ..TlsSpec::default() }.client().unwrap())
    });
    let mut clients: Vec<_> = clients.collect();
    clients.push(("without", TlsSpec::default().client().unwrap()));
    let mut outcomes = Vec::new();
    for proxy in Either::both(&bootstrap(&listeners, &[])).await {
        let mut outcome = Outcomes::new();
        for listener in &listeners {
            let name = listener["name"].as_str().unwrap();
            let address = proxy.listener(name).await;
            for (client, config) in &clients {
                let stream = connect(config, address, "server.example").await;
                let accepted = match stream {
                    Some(stream) => is_answered(stream).await,
                    None => false,
                };
                let accepted = if accepted { "accepted" } else { "refused" };
                outcome.insert((name.to_owned(), (*client).to_owned()), accepted.to_owned());
            }
        }
        outcomes.push(outcome);
    }
    compare(&outcomes[0], &outcomes[1]);
    let ours =
        |context: &str, client: &str| outcomes[1][&(context.to_owned(), client.to_owned())] == "accepted";
    assert!(
        ours("trusted true", "plain") && !ours("trusted true", "without") && ours("trusted false", "without")
    );
    assert!(!ours("URI {\"prefix\":\"spiffe://west/\"} false", "without"), "names need a certificate");
    assert!(ours("revocation true", "plain") && !ours("revocation true", "revoked"));
    assert!(ours("bundles true", "of east") && ours("bundles true", "plain"));
    for forged in ["west by east", "east by west", "east, then west, by east", "west, then east, by east"] {
        assert!(!ours("bundles true", forged), "{forged}");
    }
}

/// Each context with each server.
#[tokio::test]
async fn servers_are_accepted_as_by_envoy() {
    let world = World::new();
    let (mut pairs, mut clusters) = (Vec::new(), Vec::new());
    for (peer, certificate) in &world.peers {
        let spec = TlsSpec { identities: vec![Live::new(certificate.identity())], ..TlsSpec::default() };
        let port = https(TlsAcceptor::from(spec.server().unwrap())).await;
        for (context, validation) in world.contexts() {
            let tls = json!({"common_tls_context": {"validation_context": validation}});
            clusters.push(cluster(&format!("{context}/{peer}"), port, &tls));
            pairs.push((context, (*peer).to_owned()));
        }
    }
    let listener = listener("out", None, &clusters);
    let mut outcomes = Vec::new();
    for proxy in Either::both(&bootstrap(&[listener], &clusters)).await {
        let mut client = Client::new(TcpStream::connect(proxy.listener("out").await).await.unwrap());
        let mut outcome = Outcomes::new();
        for (index, pair) in pairs.iter().enumerate() {
            client.send(&format!("GET / HTTP/1.1\r\nhost: h{index}\r\n\r\n")).await;
            let (head, _) = client.message().await;
            let status = head.split(' ').nth(1).unwrap().to_owned();
            if pair.0 == "hash alone" {
                // A session that began with an expired certificate must not be resumed and refused then.
                client.send(&format!("GET / HTTP/1.1\r\nhost: h{index}\r\n\r\n")).await;
                let (head, _) = client.message().await;
                assert_eq!(head.split(' ').nth(1), Some(&*status), "{pair:?}");
            }
            outcome.insert(pair.clone(), status);
        }
        outcomes.push(outcome);
    }
    compare(&outcomes[0], &outcomes[1]);
    let ours = |context: &str, peer: &str| outcomes[1][&(context.to_owned(), peer.to_owned())] == "200";
    assert!(
        ours("bundles", "of east") && !ours("bundles", "west by east") && !ours("bundles", "east by west")
    );
    assert!(ours("key", "plain") && !ours("key", "named") && !ours("revocation", "revoked by middle"));
}

/// Starts a server that answers 200 after the handshake.
async fn https(acceptor: TlsAcceptor) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                let mut head = Vec::new();
                while let Ok(byte) = stream.read_u8().await {
                    head.push(byte);
                    if head.ends_with(b"\r\n\r\n") {
                        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
                        let _ = stream.write_all(answer).await;
                        let _ = stream.shutdown().await;
                        return;
                    }
                }
            });
        }
    });
    port
}

/// Versions, cipher suites, groups, sessions and the choice among certificates.
#[tokio::test]
async fn connections_are_negotiated_as_by_envoy() {
    let world = World::new();
    let dns = |name: &str| SanType::DnsName(name.try_into().unwrap());
    let other = world.west.sign(Leaf::new(2, vec![dns("other.example"), dns("*.wild.example")]));
    let certificates = [own(&world.server), own(&other)].map(|list| list[0].clone());
    let with = |params: Value, more: Value| {
        let mut tls = json!({"common_tls_context": {"tls_certificates": certificates, "tls_params": params}});
        tls.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        tls
    };
    let params = |params: Value| with(params, json!({}));
    let (aes128, aes256, chacha) =
        ("ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384", "ECDHE-ECDSA-CHACHA20-POLY1305");
    let contexts = [
        ("default", params(json!({}))),
        ("only 1.2", params(json!({"tls_maximum_protocol_version": "TLSv1_2"}))),
        ("only 1.3", params(json!({"tls_minimum_protocol_version": "TLSv1_3"}))),
        ("Istio's", params(json!({"cipher_suites": [aes256, aes128, "AES256-GCM-SHA384"]}))),
        ("128 first", params(json!({"cipher_suites": [aes128, aes256]}))),
        ("joined", params(json!({"cipher_suites": [format!("{aes256}:{aes128}")]}))),
        ("grouped", params(json!({"cipher_suites": [format!("[{aes128}]"), aes256]}))),
        ("ChaCha20", params(json!({"cipher_suites": [chacha]}))),
        (
            "client's order",
            with(json!({"cipher_suites": [aes256, aes128]}), json!({"prefer_client_ciphers": true})),
        ),
        ("P-384", params(json!({"ecdh_curves": ["P-384"]}))),
        ("P-256 or X25519", params(json!({"ecdh_curves": ["P-256", "X25519"]}))),
        ("no tickets", with(json!({}), json!({"disable_stateless_session_resumption": true}))),
        ("no cache", with(json!({}), json!({"disable_stateful_session_resumption": true}))),
    ];
    let listeners: Vec<_> = contexts.iter().map(|(name, tls)| listener(name, Some(tls), &[])).collect();
    let (suite128, suite256) = (
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
        CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    );
    let old = TlsSpec { max_version: Some(Version::Tls12), ..TlsSpec::default() };
    let clients = [
        ("1.3", TlsSpec::default(), "server.example"),
        ("1.2", old.clone(), "server.example"),
        ("1.2, 128 first", TlsSpec { suites: vec![suite128, suite256], ..old.clone() }, "server.example"),
        ("1.2, 256 first", TlsSpec { suites: vec![suite256, suite128], ..old.clone() }, "server.example"),
        ("1.2, 256 only", TlsSpec { suites: vec![suite256], ..old.clone() }, "server.example"),
        ("P-384", TlsSpec { groups: vec![NamedGroup::secp384r1], ..TlsSpec::default() }, "server.example"),
        ("X25519", TlsSpec { groups: vec![NamedGroup::X25519], ..TlsSpec::default() }, "server.example"),
        ("other", TlsSpec::default(), "other.example"),
        ("wild", TlsSpec::default(), "a.wild.example"),
        ("stranger", TlsSpec::default(), "stranger.example"),
    ];
    let mut outcomes = Vec::new();
    for proxy in Either::both(&bootstrap(&listeners, &[])).await {
        let mut outcome = Outcomes::new();
        for (context, _) in &contexts {
            let address = proxy.listener(context).await;
            for (client, spec, name) in &clients {
                // Without `ecdh_curves` the sidecar also supports P-384. Envoy also resumes TLS 1.2 sessions by
                // their IDs.
                let group_only = !spec.groups.is_empty() && !context.starts_with("P-");
                if group_only || (*context == "no tickets" && client.starts_with("1.2")) {
                    continue;
                }
                let found = negotiated(spec, address, name).await.unwrap_or_else(|| "refused".to_owned());
                outcome.insert(((*context).to_owned(), (*client).to_owned()), found);
            }
        }
        outcomes.push(outcome);
    }
    compare(&outcomes[0], &outcomes[1]);
    let ours = |context: &str, client: &str| outcomes[1][&(context.to_owned(), client.to_owned())].as_str();
    assert_eq!(ours("only 1.3", "1.2"), "refused");
    assert_eq!((ours("P-384", "X25519"), ours("P-256 or X25519", "P-384")), ("refused", "refused"));
    assert_eq!(ours("ChaCha20", "1.2, 256 only"), "refused");
    assert!(ours("default", "wild").contains("other.example"), "{}", ours("default", "wild"));
}

/// Returns what two connections negotiate: version, cipher suite below TLS 1.3, the server's first name, and
/// whether the second resumes the first.
async fn negotiated(spec: &TlsSpec, to: SocketAddr, name: &'static str) -> Option<String> {
    let mut config = (*spec.client().unwrap()).clone();
    config.resumption = Resumption::in_memory_sessions(8);
    let config = Arc::new(config);
    let mut first = None;
    for _ in 0..2 {
        let stream = connect(&config, to, name).await?;
        let session = stream.get_ref().1;
        let version = session.protocol_version().unwrap();
        let suite = session.negotiated_cipher_suite().unwrap();
        let suite = if suite.tls13().is_some() { "any".to_owned() } else { format!("{:?}", suite.suite()) };
        let certificate = skysail_identity::Peer::from_der(&session.peer_certificates().unwrap()[0]).unwrap();
        let resumed = session.handshake_kind() == Some(HandshakeKind::Resumed);
        // The ticket arrives after the handshake.
        if !is_answered(stream).await {
            return None;
        }
        match first {
            None => first = Some(format!("{version:?} {suite} {}", certificate.dns[0])),
            Some(first) => return Some(format!("{first} resumed: {resumed}")),
        }
    }
    None
}

/// A list in a file is watched, and ends connections and sessions of revoked peers.
#[tokio::test]
async fn revocation_takes_effect_while_the_proxy_runs() {
    let world = World::new();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("crl.pem");
    let put = |crl: &str| {
        std::fs::write(folder.path().join("new"), crl).unwrap();
        std::fs::rename(folder.path().join("new"), &file).unwrap();
    };
    put(&world.west.crl(&[]));
    let context = json!({"trusted_ca": inline(&world.west.pem), "crl": {"filename": file}});
    let tls = json!({
        "require_client_certificate": true,
        "common_tls_context": {"tls_certificates": own(&world.server), "validation_context": context},
    });
    let mut bootstrap: Value =
        serde_json::from_str(&bootstrap(&[listener("in", Some(&tls), &[])], &[])).unwrap();
    bootstrap["layered_runtime"] =
        json!({"layers": [{"name": "test", "static_layer": {"skysail.admission.drain_ms": 1}}]});
    let proxy = Program::start(folder.path(), &bootstrap.to_string()).await;
    let address = proxy.listener("in").await;
    let client = |peer: &str| {
        let identities = vec![Live::new(world.peer(peer).identity())];
        let mut config = (*TlsSpec { identities, ..TlsSpec::default() }.client().unwrap()).clone();
        config.resumption = Resumption::in_memory_sessions(8);
        Arc::new(config)
    };
    let (revoked, plain) = (client("revoked"), client("plain"));
    let call = async |config| {
        let stream = connect(config, address, "server.example").await?;
        let resumed = stream.get_ref().1.handshake_kind() == Some(HandshakeKind::Resumed);
        is_answered(stream).await.then_some(resumed)
    };
    for config in [&revoked, &plain] {
        assert_eq!(call(config).await, Some(false));
        assert_eq!(call(config).await, Some(true));
    }
    let hold = async |config| connect(config, address, "server.example").await.unwrap();
    let (mut of_revoked, mut of_plain) = (hold(&revoked).await, hold(&plain).await);
    assert!(answers(&mut of_revoked).await && answers(&mut of_plain).await);
    put(&world.west.crl(&[66]));
    assert_eq!(within(of_revoked.read(&mut [0])).await.unwrap_or(0), 0, "an open connection ends");
    assert!(answers(&mut of_plain).await);
    within(async { while call(&revoked).await.is_some() {} }).await;
    assert_eq!(call(&plain).await, Some(false), "a session from before the change");
    assert_eq!(call(&revoked).await, None);
    // Invalid content changes nothing.
    put("no list");
    assert!(call(&plain).await.is_some());
    assert_eq!(call(&revoked).await, None);
}
