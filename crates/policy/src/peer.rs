//! The peer of a connection: names from its certificate, and Istio's peer metadata.
//!
//! The proxy computes these values once per connection; a request only reads them. Istio exchanges metadata
//! in two headers: `x-envoy-peer-metadata` (base64 of a `google.protobuf.Struct`) and
//! `x-envoy-peer-metadata-id` (the node id). The metadata of this proxy are encoded at the start.

pub mod greeting;

use std::{
    cell::{Cell, OnceCell, RefCell},
    collections::{BTreeMap, HashMap},
    fmt::Write as _,
    hash::BuildHasher as _,
    net::IpAddr,
    rc::Rc,
    sync::Arc,
    time::SystemTime,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use prost::Message as _;
use prost_types::{Struct, Value, value::Kind};
use rustls::{CommonState, pki_types::CertificateDer};

use crate::config::{cluster::Workload, http::ClientCertDetails};
use skysail_http::map::Map;

/// Header with the metadata.
pub const METADATA: &str = "x-envoy-peer-metadata";
/// Header with the node id.
pub const METADATA_ID: &str = "x-envoy-peer-metadata-id";
/// Maximum size of metadata. Larger metadata are ignored, because any client may send them.
const MAX_METADATA: usize = 16 * 1024;
/// Maximum length of a label value; longer ones are dropped. A Kubernetes name has at most 253 bytes, and
/// each metric series stores its values.
const MAX_LABEL: usize = 256;

/// Prefix of the workload's controller in Istio's metadata.
const OWNER_PREFIX: &str = "kubernetes://apis/apps/v1/namespaces/";
const CANONICAL_NAME: &str = "service.istio.io/canonical-name";
const CANONICAL_REVISION: &str = "service.istio.io/canonical-revision";

/// The peer of a connection.
#[derive(Debug, Default)]
pub struct Peer {
    /// The connection is TLS.
    pub tls: bool,
    /// Certificate of the peer, verified by the handshake; `None` without one.
    pub certificate: Option<Rc<Certificate>>,
    /// First URI name of this proxy's certificate on the connection.
    pub local_principal: Option<Arc<str>>,
    workload: RefCell<Option<Arc<Workload>>>,
    /// Index of the peer in the metrics of this worker; 0 until it is known there.
    pub series: Cell<u32>,
}

/// A certificate. All connections of a worker with the same certificate share it.
#[derive(Debug)]
pub struct Certificate {
    /// Names in the certificate.
    pub names: skysail_identity::Peer,
    /// SHA-256 of the certificate in lower-case hexadecimal digits.
    pub fingerprint: Box<str>,
    /// First URI name.
    pub principal: Option<Arc<str>>,
    der: Box<[u8]>,
    /// Certificates of the chain between this one and a root.
    issuers: Box<[CertificateDer<'static>]>,
    /// End of validity, parsed on first use.
    not_after: OnceCell<Option<SystemTime>>,
    /// Last check of trust ([`Self::is_trusted`]): number of trust changes, TLS context, result.
    checked: Cell<Option<(u64, usize, bool)>>,
}

/// Number of certificates that the cache keeps without a connection, because a peer may connect again.
const KEPT: usize = 56;

thread_local! {
    /// Certificates of a worker's connections, by a hash of their DER.
    static KNOWN: RefCell<Map<u64, Rc<Certificate>>> = RefCell::default();
}

impl Certificate {
    /// Returns the certificate of a connection after its handshake, leaf first; `None` if its names cannot be parsed.
    pub fn of(chain: &[CertificateDer<'_>]) -> Option<Rc<Self>> {
        let (der, issuers) = chain.split_first()?;
        KNOWN.with_borrow_mut(|known| {
            let hash = known.hasher().hash_one(&**der);
            if let Some(one) = known.get(&hash).filter(|one| *one.der == **der) {
                return Some(one.clone());
            }
            let names = skysail_identity::Peer::from_der(der).ok()?;
            let issuers = issuers.iter().map(|issuer| issuer.clone().into_owned()).collect();
            let one = Rc::new(Self { issuers, ..Self::new(der, names) });
            if known.len() == known.capacity() {
                known.retain(|_, certificate| Rc::strong_count(certificate) > 1);
                known.reserve(KEPT);
            }
            known.insert(hash, one.clone());
            Some(one)
        })
    }

    /// Returns a certificate (DER) with its names.
    pub fn new(der: &[u8], names: skysail_identity::Peer) -> Self {
        let principal = names.uris.first().map(|uri| Arc::from(uri.as_str()));
        let (issuers, not_after, checked) = (Box::default(), OnceCell::new(), Cell::new(None));
        Self { names, fingerprint: sha256(der), principal, der: der.into(), issuers, not_after, checked }
    }

    /// Returns whether `check` still accepts the certificate and its issuers. `distrusted` counts the changes of
    /// trust. The connections of a TLS context (`context`, its address) share the result.
    pub fn is_trusted(
        &self,
        distrusted: u64,
        context: usize,
        check: impl FnOnce(&[CertificateDer<'_>]) -> bool,
    ) -> bool {
        if distrusted == 0 {
            return true;
        }
        if let Some((at, by, trusted)) = self.checked.get()
            && (at, by) == (distrusted, context)
        {
            return trusted;
        }
        let mut chain = vec![CertificateDer::from(&*self.der)];
        for issuer in &self.issuers {
            chain.push(issuer.clone());
        }
        let trusted = check(&chain);
        self.checked.set(Some((distrusted, context, trusted)));
        trusted
    }

    /// Returns the end of validity.
    pub fn not_after(&self) -> Option<SystemTime> {
        let read = || skysail_identity::not_after(&CertificateDer::from(&*self.der)).ok();
        *self.not_after.get_or_init(read)
    }
}

impl Peer {
    /// Returns the peer of a connection without TLS.
    pub fn plain() -> Self {
        Self::default()
    }

    /// Returns the peer of a TLS connection.
    pub fn secured(certificate: Option<Rc<Certificate>>, local_principal: Option<Arc<str>>) -> Self {
        Self { tls: true, certificate, local_principal, ..Self::default() }
    }

    /// Returns the peer of a connection after its handshakes. `local_principal` is the first URI name of this proxy's
    /// certificate.
    pub fn of(agreed: Option<&CommonState>, local_principal: Option<Arc<str>>) -> Self {
        let Some(agreed) = agreed else { return Self::plain() };
        Self::secured(agreed.peer_certificates().and_then(Certificate::of), local_principal)
    }

    /// Returns the names in the certificate.
    pub fn names(&self) -> Option<&skysail_identity::Peer> {
        self.certificate.as_ref().map(|certificate| &certificate.names)
    }

    /// Returns the first URI name of the certificate.
    pub fn principal(&self) -> Option<&Arc<str>> {
        self.certificate.as_ref()?.principal.as_ref()
    }

    /// Returns the workload, by the peer's metadata.
    pub fn workload(&self) -> Option<Arc<Workload>> {
        self.workload.borrow().clone()
    }

    /// Sets the workload: from the peer's metadata, or from the endpoint.
    pub fn set_workload(&self, workload: Option<Arc<Workload>>) {
        let mut known = self.workload.borrow_mut();
        // A peer that sends the same metadata with each request keeps its index in the metrics.
        let same = match (&*known, &workload) {
            (Some(known), Some(workload)) => Arc::ptr_eq(known, workload),
            (known, workload) => known.is_none() && workload.is_none(),
        };
        if !same {
            *known = workload;
            self.series.set(0);
        }
    }

    /// Returns the certificate as URL-encoded PEM.
    pub fn certificate_pem(&self) -> Option<String> {
        self.certificate.as_ref().map(|certificate| url_encoded_pem(&certificate.der))
    }

    /// Returns the element of `x-forwarded-client-cert`; `None` without a certificate. Call it once per connection.
    pub fn forwarded_cert(&self, details: ClientCertDetails) -> Option<String> {
        let Certificate { names, fingerprint, der, issuers, .. } = &**self.certificate.as_ref()?;
        let mut text = String::new();
        if let Some(local) = &self.local_principal {
            let _ = write!(text, "By={local};");
        }
        let _ = write!(text, "Hash={fingerprint}");
        if details.cert {
            let _ = write!(text, ";Cert=\"{}\"", url_encoded_pem(der));
        }
        if details.chain {
            let issuers: String = issuers.iter().map(|issuer| url_encoded_pem(issuer)).collect();
            let _ = write!(text, ";Chain=\"{}{issuers}\"", url_encoded_pem(der));
        }
        if details.subject {
            let _ = write!(text, ";Subject=\"{}\"", names.subject.replace('"', "\\\""));
        }
        if details.uri {
            // The key is present even without a value, as in Envoy.
            if names.uris.is_empty() {
                text.push_str(";URI=");
            }
            for uri in &names.uris {
                let _ = write!(text, ";URI={}", quoted(uri));
            }
        }
        if details.dns {
            for name in &names.dns {
                let _ = write!(text, ";DNS={}", quoted(name));
            }
        }
        // Names in certificates may contain any character. A line break would begin another header.
        text.retain(|c| !c.is_control());
        Some(text)
    }
}

/// Quotes a value that contains a separator.
fn quoted(value: &str) -> String {
    if value.contains([',', ';', '=', '"']) {
        format!("\"{}\"", value.replace('"', "\\\""))
    } else {
        value.to_owned()
    }
}

/// Returns a certificate as PEM, with URL escapes.
fn url_encoded_pem(der: &[u8]) -> String {
    let base64 = STANDARD.encode(der);
    let mut text = String::from("-----BEGIN CERTIFICATE-----");
    for (index, c) in base64.chars().enumerate() {
        if index % 64 == 0 {
            text.push('\n');
        }
        text.push(c);
    }
    text.push_str("\n-----END CERTIFICATE-----\n");
    let mut encoded = String::with_capacity(text.len() + text.len() / 8);
    for c in text.chars() {
        match c {
            '\n' => encoded.push_str("%0A"),
            ' ' => encoded.push_str("%20"),
            '+' => encoded.push_str("%2B"),
            '/' => encoded.push_str("%2F"),
            '=' => encoded.push_str("%3D"),
            c => encoded.push(c),
        }
    }
    encoded
}

fn sha256(bytes: &[u8]) -> Box<str> {
    use rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256 as SUITE;
    let mut text = String::with_capacity(64);
    if let Some(suite) = SUITE.tls13() {
        for byte in suite.common.hash_provider.hash(bytes).as_ref() {
            let _ = write!(text, "{byte:02x}");
        }
    }
    text.into()
}

/// The workload of this proxy, as peers and metrics see it.
#[derive(Clone, Debug, Default)]
pub struct LocalWorkload {
    /// Node id, such as `sidecar~10.0.0.1~pod.ns~ns.svc.cluster.local`.
    pub node_id: Arc<str>,
    /// Cluster of the node, such as `app.ns`.
    pub node_cluster: Arc<str>,
    /// Workload for metrics.
    pub workload: Arc<Workload>,
    /// Metadata for peers, in base64.
    pub metadata: Arc<str>,
    /// Metadata for peers as the first message of a TCP connection.
    pub greeting: Arc<[u8]>,
    /// Version, for `istio_build`.
    pub version: Arc<str>,
    /// First IP address.
    pub address: Option<IpAddr>,
    /// Zone; empty if unknown.
    pub zone: Arc<str>,
}

impl LocalWorkload {
    /// Builds the workload from the node's id, cluster and metadata (a `google.protobuf.Struct`), as Istio's agent
    /// sends them.
    pub fn new(node_id: &str, node_cluster: &str, metadata: &impl prost::Message) -> Self {
        // Of the two generated types, this one keeps its keys sorted.
        let metadata = &Struct::decode(&*metadata.encode_to_vec()).unwrap_or_default();
        let address = node_id.split('~').nth(1).and_then(|ip| ip.parse().ok());
        let shared = shared(metadata);
        let version = string(&metadata.fields, "ISTIO_VERSION").unwrap_or("unknown");
        Self {
            node_id: node_id.into(),
            node_cluster: node_cluster.into(),
            workload: Arc::new(workload_of(metadata)),
            metadata: STANDARD.encode(shared.encode_to_vec()).into(),
            greeting: greeting::write(node_id, shared).into(),
            version: version.into(),
            address,
            zone: "".into(),
        }
    }
}

/// Returns the metadata for peers. The keys are those of Istio's filter. They are sorted, so that equal
/// workloads send equal bytes, by which peers cache them.
fn shared(metadata: &Struct) -> Struct {
    const KEPT: [&str; 5] = ["NAME", "NAMESPACE", "WORKLOAD_NAME", "CLUSTER_ID", "OWNER"];
    const LABELS: [&str; 6] = [
        CANONICAL_NAME,
        CANONICAL_REVISION,
        "app",
        "app.kubernetes.io/name",
        "version",
        "app.kubernetes.io/version",
    ];
    let mut fields: BTreeMap<String, Value> = BTreeMap::new();
    for key in KEPT {
        if let Some(text) = string(&metadata.fields, key).filter(|text| !text.is_empty()) {
            fields.insert(key.to_owned(), text_value(text));
        }
    }
    let labels = labels(metadata).map(|labels| {
        let kept =
            LABELS.iter().filter_map(|key| Some(((*key).to_owned(), text_value(string(labels, key)?))));
        kept.collect::<BTreeMap<_, _>>()
    });
    let labels = Struct { fields: labels.unwrap_or_default() };
    fields.insert("LABELS".to_owned(), Value { kind: Some(Kind::StructValue(labels)) });
    Struct { fields }
}

/// Parses a peer's metadata header; returns `None` if it is invalid.
pub fn decode(header: &[u8]) -> Option<Workload> {
    if header.len() > MAX_METADATA {
        return None;
    }
    let bytes = STANDARD.decode(header).ok()?;
    Some(workload_of(&Struct::decode(&*bytes).ok()?))
}

/// Cache of a worker's peers: equal metadata are decoded and stored once.
#[derive(Debug, Default)]
pub struct PeerCache {
    known: RefCell<WorkloadCache>,
}

/// Workloads by header; `None` for an invalid header.
type WorkloadCache = HashMap<Box<[u8]>, Option<Arc<Workload>>>;

impl PeerCache {
    /// Maximum number of peers; at the limit the cache is cleared.
    const MAX: usize = 1024;

    /// Returns the workload of a metadata header.
    pub fn workload(&self, header: &[u8]) -> Option<Arc<Workload>> {
        if header.len() > MAX_METADATA {
            return None;
        }
        let mut known = self.known.borrow_mut();
        if let Some(workload) = known.get(header) {
            return workload.clone();
        }
        if known.len() >= Self::MAX {
            known.clear();
        }
        let workload = decode(header).map(Arc::new);
        known.insert(header.into(), workload.clone());
        workload
    }
}

fn workload_of(metadata: &Struct) -> Workload {
    let fields = &metadata.fields;
    let empty = BTreeMap::new();
    let labels = labels(metadata).unwrap_or(&empty);
    let first = |keys: &[&str]| label(keys.iter().find_map(|key| string(labels, key)));
    let name = match label(string(fields, "WORKLOAD_NAME")) {
        name if name.is_empty() => label(string(fields, "OWNER").and_then(owner_name)),
        name => name,
    };
    Workload {
        name,
        namespace: label(string(fields, "NAMESPACE")),
        canonical_name: first(&[CANONICAL_NAME]),
        canonical_revision: first(&[CANONICAL_REVISION]),
        cluster: label(string(fields, "CLUSTER_ID")),
        app: first(&["app.kubernetes.io/name", "app"]),
        version: first(&["app.kubernetes.io/version", "version"]),
    }
}

/// Returns a value of the peer for metrics, logs and pages. Replaces control characters, because terminals
/// interpret them. Returns an empty text if the value is too long.
fn label(value: Option<&str>) -> Arc<str> {
    match value.filter(|text| text.len() <= MAX_LABEL).unwrap_or_default() {
        text if text.contains(char::is_control) => text.replace(char::is_control, "_").into(),
        text => text.into(),
    }
}

/// Returns the name in an owner: `kubernetes://apis/apps/v1/namespaces/default/deployments/reviews-v1` yields
/// `reviews-v1`.
fn owner_name(owner: &str) -> Option<&str> {
    owner.strip_prefix(OWNER_PREFIX)?.rsplit('/').next()
}

fn labels(metadata: &Struct) -> Option<&BTreeMap<String, Value>> {
    match metadata.fields.get("LABELS")?.kind.as_ref()? {
        Kind::StructValue(labels) => Some(&labels.fields),
        _ => None,
    }
}

fn string<'a>(fields: &'a BTreeMap<String, Value>, key: &str) -> Option<&'a str> {
    match fields.get(key)?.kind.as_ref()? {
        Kind::StringValue(text) => Some(text),
        _ => None,
    }
}

fn text_value(text: &str) -> Value {
    Value { kind: Some(Kind::StringValue(text.to_owned())) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use skysail_core::SpiffeId;
    use skysail_identity::{Authority, KeyAndCsr};

    use super::*;

    fn node() -> Struct {
        let labels = [
            ("app", "reviews"),
            (CANONICAL_NAME, "reviews"),
            (CANONICAL_REVISION, "v1"),
            ("version", "v1"),
            ("x", "y"),
        ];
        let labels =
            Struct { fields: labels.iter().map(|(k, v)| ((*k).to_owned(), text_value(v))).collect() };
        let texts = [
            ("NAME", "reviews-v1-abc"),
            ("NAMESPACE", "default"),
            ("WORKLOAD_NAME", "reviews-v1"),
            ("CLUSTER_ID", "Kubernetes"),
            ("OWNER", "kubernetes://apis/apps/v1/namespaces/default/deployments/reviews-v1"),
            ("ISTIO_VERSION", "1.32.0"),
            ("SERVICE_ACCOUNT", "secret"),
        ];
        let mut fields: BTreeMap<_, _> =
            texts.iter().map(|(k, v)| ((*k).to_owned(), text_value(v))).collect();
        fields.insert("LABELS".into(), Value { kind: Some(Kind::StructValue(labels)) });
        Struct { fields }
    }

    #[test]
    fn encoded_metadata_decode_to_the_workload() {
        let local =
            LocalWorkload::new("sidecar~10.0.0.7~a.b~b.svc.cluster.local", "reviews.default", &node());
        assert_eq!(local.address, Some("10.0.0.7".parse().unwrap()));
        let workload = decode(local.metadata.as_bytes()).unwrap();
        assert_eq!(workload, *local.workload);
        let greeting = greeting::read(&local.greeting);
        assert_eq!(greeting, greeting::FirstMessage::Complete(local.greeting.len(), Some(workload.clone())));
        let expected = Workload {
            name: "reviews-v1".into(),
            namespace: "default".into(),
            canonical_name: "reviews".into(),
            canonical_revision: "v1".into(),
            cluster: "Kubernetes".into(),
            app: "reviews".into(),
            version: "v1".into(),
        };
        assert_eq!(workload, expected);
        let sent = Struct::decode(&*STANDARD.decode(&*local.metadata).unwrap()).unwrap();
        let keys: Vec<_> = sent.fields.keys().map(String::as_str).collect();
        assert_eq!(keys, ["CLUSTER_ID", "LABELS", "NAME", "NAMESPACE", "OWNER", "WORKLOAD_NAME"]);
        assert_eq!(labels(&sent).unwrap().len(), 4);
    }

    #[test]
    fn values_of_peers_are_short_and_have_no_control_characters() {
        let workload = |name: &str, owner: &str| {
            let texts = [("WORKLOAD_NAME", name), ("OWNER", owner), ("NAMESPACE", "a\x1b[2Jb\r\nc\u{9b}d")];
            let fields = texts.iter().map(|(k, v)| ((*k).to_owned(), text_value(v))).collect();
            decode(STANDARD.encode(Struct { fields }.encode_to_vec()).as_bytes()).unwrap()
        };
        assert_eq!(&*workload("a", "").namespace, "a_[2Jb__c_d");
        let long = "x".repeat(MAX_LABEL);
        let owner = format!("{OWNER_PREFIX}default/deployments/{long}");
        assert_eq!(*workload(&long, "").name, long);
        assert_eq!(*workload("", &owner).name, long);
        assert_eq!(&*workload(&format!("{long}x"), "").name, "");
        assert_eq!(&*workload("", &format!("{owner}x")).name, "");
    }

    #[test]
    fn equal_metadata_share_a_workload() {
        let local = LocalWorkload::new("", "", &node());
        let cache = PeerCache::default();
        let one = cache.workload(local.metadata.as_bytes()).unwrap();
        let two = cache.workload(local.metadata.as_bytes()).unwrap();
        assert!(Arc::ptr_eq(&one, &two));
        assert_eq!(cache.workload(b"not base64!"), None);
        assert_eq!(cache.workload(&vec![b'A'; MAX_METADATA + 4]), None);
    }

    #[test]
    fn connections_share_a_certificate() {
        let authority = Authority::ephemeral().unwrap();
        let id = SpiffeId::new("cluster.local", "default", "a");
        let another = || {
            let request = KeyAndCsr::generate(Some(&id)).unwrap();
            let signed = authority.sign(&request.csr_pem, &id, Duration::from_hours(1)).unwrap();
            [request.finish(signed.pem().as_bytes()).unwrap().chain()[0].clone()]
        };
        let (der, stays) = (another(), another());
        let (one, used) = (Certificate::of(&der).unwrap(), Certificate::of(&stays).unwrap());
        assert!(Rc::ptr_eq(&one, &Certificate::of(&der).unwrap()));
        assert!(Certificate::of(&[CertificateDer::from(vec![0; 9])]).is_none());
        // The cache keeps a limited number of unused certificates.
        let left = Rc::downgrade(&one);
        drop(one);
        assert!(left.upgrade().is_some());
        for _ in 0..KEPT {
            Certificate::of(&another()).unwrap();
        }
        assert!(left.upgrade().is_none());
        assert!(Rc::ptr_eq(&used, &Certificate::of(&stays).unwrap()));
    }

    #[test]
    fn forwarded_cert_is_written_as_envoy_does() {
        let names = skysail_identity::Peer {
            uris: vec!["spiffe://cluster.local/ns/a/sa/b".into()],
            dns: vec!["b.a".into()],
            ..Default::default()
        };
        let local = Some(Arc::from("spiffe://cluster.local/ns/c/sa/d"));
        let peer = Peer::secured(Some(Rc::new(Certificate::new(b"certificate", names))), local);
        let details = ClientCertDetails { subject: true, dns: true, uri: true, ..Default::default() };
        assert_eq!(
            peer.forwarded_cert(details).unwrap(),
            "By=spiffe://cluster.local/ns/c/sa/d;\
             Hash=03d66dd08835c1ca3f128cceacd1f31ac94163096b20f445ae84285bc0832d72;\
             Subject=\"\";URI=spiffe://cluster.local/ns/a/sa/b;DNS=b.a"
        );
        let with_cert = peer.forwarded_cert(ClientCertDetails { cert: true, ..Default::default() }).unwrap();
        assert!(with_cert.ends_with(
            ";Cert=\"-----BEGIN%20CERTIFICATE-----%0AY2VydGlmaWNhdGU%3D%0A-----END%20CERTIFICATE-----%0A\""
        ));
        let mut certificate = Certificate::new(b"certificate", skysail_identity::Peer::default());
        certificate.issuers = [CertificateDer::from(b"issuer".to_vec())].into();
        let with_chain = Peer::secured(Some(Rc::new(certificate)), None);
        let with_chain =
            with_chain.forwarded_cert(ClientCertDetails { chain: true, ..Default::default() }).unwrap();
        assert!(
            with_chain.ends_with(
                ";Chain=\"-----BEGIN%20CERTIFICATE-----%0AY2VydGlmaWNhdGU%3D%0A-----END%20CERTIFICATE-----%0A\
                 -----BEGIN%20CERTIFICATE-----%0AaXNzdWVy%0A-----END%20CERTIFICATE-----%0A\""
            ),
            "{with_chain}"
        );
        assert_eq!(Peer::plain().forwarded_cert(details), None);
        let names = skysail_identity::Peer { subject: "CN=a\r\nx: y\0".into(), ..Default::default() };
        let odd = Peer::secured(Some(Rc::new(Certificate::new(b"certificate", names))), None)
            .forwarded_cert(details)
            .unwrap();
        assert!(odd.ends_with(";Subject=\"CN=ax: y\";URI="), "{odd}");
    }

    proptest! {
        #[test]
        fn any_header_is_handled(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
            let _ = decode(STANDARD.encode(&bytes).as_bytes());
        }
    }
}
