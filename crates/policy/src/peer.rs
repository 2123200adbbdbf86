//! Who is at the other end of a connection: names from its certificate, and Istio's peer metadata.
//!
//! Everything here is worked out once per connection; a request only reads it. Istio exchanges metadata as two
//! headers, `x-envoy-peer-metadata` (base64 of a `google.protobuf.Struct`) and `x-envoy-peer-metadata-id` (the
//! node id). Our own are encoded when the proxy starts.

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
/// Larger metadata are not looked at: a peer may be anybody.
const MAX_METADATA: usize = 16 * 1024;
/// Longer label values are dropped: no name in Kubernetes is longer than 253 bytes, and each series has them.
const MAX_LABEL: usize = 256;

/// Where the workload's controller is named in Istio's metadata.
const OWNER_PREFIX: &str = "kubernetes://apis/apps/v1/namespaces/";
const CANONICAL_NAME: &str = "service.istio.io/canonical-name";
const CANONICAL_REVISION: &str = "service.istio.io/canonical-revision";

/// What is known of the other end of a connection.
#[derive(Debug, Default)]
pub struct Peer {
    /// Whether the connection is TLS at all.
    pub tls: bool,
    /// Its certificate; `None` without one. Checked by the handshake.
    pub certificate: Option<Rc<Certificate>>,
    /// The first URI name of our own certificate on this connection.
    pub local_principal: Option<Arc<str>>,
    workload: RefCell<Option<Arc<Workload>>>,
    /// What the metrics of this worker know it by; 0 until they have seen it.
    pub series: Cell<u32>,
}

/// A peer's certificate. The connections of one peer share it.
#[derive(Debug)]
pub struct Certificate {
    /// The names in it.
    pub names: skysail_identity::Peer,
    /// Its SHA-256 in lower-case hexadecimal digits.
    pub fingerprint: Box<str>,
    /// The first of its URI names.
    pub principal: Option<Arc<str>>,
    der: Box<[u8]>,
    /// The certificates that came with it and lead to a root.
    issuers: Box<[CertificateDer<'static>]>,
    /// Until when it is valid, once somebody has asked.
    not_after: OnceCell<Option<SystemTime>>,
    /// When it was last checked again ([`Self::is_trusted`]), by which TLS context, and with what result.
    checked: Cell<Option<(u64, usize, bool)>>,
}

/// How many are kept though no connection has them any more: a peer may come back.
const KEPT: usize = 56;

thread_local! {
    /// Those of a worker's connections, by a hash of their bytes.
    static KNOWN: RefCell<Map<u64, Rc<Certificate>>> = RefCell::default();
}

impl Certificate {
    /// The certificate of a connection whose handshake has succeeded, leaf first; `None` if its names cannot be read.
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

    /// A certificate (DER) and what it says.
    pub fn new(der: &[u8], names: skysail_identity::Peer) -> Self {
        let principal = names.uris.first().map(|uri| Arc::from(uri.as_str()));
        let (issuers, not_after, checked) = (Box::default(), OnceCell::new(), Cell::new(None));
        Self { names, fingerprint: sha256(der), principal, der: der.into(), issuers, not_after, checked }
    }

    /// Whether `check` still accepts it and its issuers, after trust has changed as many times as `distrusted`
    /// says. All connections that have it share the result of a TLS context (`context`, its address).
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

    /// Until when it is valid.
    pub fn not_after(&self) -> Option<SystemTime> {
        let read = || skysail_identity::not_after(&CertificateDer::from(&*self.der)).ok();
        *self.not_after.get_or_init(read)
    }
}

impl Peer {
    /// The other end of a connection without TLS.
    pub fn plain() -> Self {
        Self::default()
    }

    /// The other end of a TLS connection.
    pub fn secured(certificate: Option<Rc<Certificate>>, local_principal: Option<Arc<str>>) -> Self {
        Self { tls: true, certificate, local_principal, ..Self::default() }
    }

    /// Returns the other end of a connection whose handshakes are complete. `local_principal` is the first URI name of our
    /// certificate.
    pub fn of(agreed: Option<&CommonState>, local_principal: Option<Arc<str>>) -> Self {
        let Some(agreed) = agreed else { return Self::plain() };
        Self::secured(agreed.peer_certificates().and_then(Certificate::of), local_principal)
    }

    /// The names in its certificate.
    pub fn names(&self) -> Option<&skysail_identity::Peer> {
        self.certificate.as_ref().map(|certificate| &certificate.names)
    }

    /// The first URI name of its certificate.
    pub fn principal(&self) -> Option<&Arc<str>> {
        self.certificate.as_ref()?.principal.as_ref()
    }

    /// Who it says it is.
    pub fn workload(&self) -> Option<Arc<Workload>> {
        self.workload.borrow().clone()
    }

    /// Takes down who it is: from its metadata, or from the endpoint that was dialled.
    pub fn set_workload(&self, workload: Option<Arc<Workload>>) {
        let mut known = self.workload.borrow_mut();
        // A peer that repeats itself with each request is still the same to the metrics.
        let same = match (&*known, &workload) {
            (Some(known), Some(workload)) => Arc::ptr_eq(known, workload),
            (known, workload) => known.is_none() && workload.is_none(),
        };
        if !same {
            *known = workload;
            self.series.set(0);
        }
    }

    /// Its certificate as PEM, escaped as in a URL.
    pub fn certificate_pem(&self) -> Option<String> {
        self.certificate.as_ref().map(|certificate| url_encoded_pem(&certificate.der))
    }

    /// Its element of `x-forwarded-client-cert`; `None` if it showed no certificate. To be made once per
    /// connection.
    pub fn forwarded_cert(&self, details: ClientCertDetails) -> Option<String> {
        let Certificate { names, fingerprint, der, .. } = &**self.certificate.as_ref()?;
        let mut text = String::new();
        if let Some(local) = &self.local_principal {
            let _ = write!(text, "By={local};");
        }
        let _ = write!(text, "Hash={fingerprint}");
        if details.cert {
            let _ = write!(text, ";Cert=\"{}\"", url_encoded_pem(der));
        }
        if details.subject {
            let _ = write!(text, ";Subject=\"{}\"", names.subject.replace('"', "\\\""));
        }
        if details.uri {
            // The key is there even without a value, as Envoy has it.
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
        // Names in certificates may hold anything; a line's end would begin another header.
        text.retain(|c| !c.is_control());
        Some(text)
    }
}

/// A value with a character that separates values is put in quotes.
fn quoted(value: &str) -> String {
    if value.contains([',', ';', '=', '"']) {
        format!("\"{}\"", value.replace('"', "\\\""))
    } else {
        value.to_owned()
    }
}

/// A certificate as PEM, with the characters escaped that mean something in URLs.
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

/// This proxy's own workload: what it tells peers and how its metrics call it.
#[derive(Clone, Debug, Default)]
pub struct LocalWorkload {
    /// `sidecar~10.0.0.1~pod.ns~ns.svc.cluster.local`.
    pub node_id: Arc<str>,
    /// `app.ns`, the node's cluster.
    pub node_cluster: Arc<str>,
    /// How metrics call it.
    pub workload: Arc<Workload>,
    /// What peers are told: base64 text.
    pub metadata: Arc<str>,
    /// The same as the first bytes of a TCP connection.
    pub greeting: Arc<[u8]>,
    /// Its version, for `istio_build`.
    pub version: Arc<str>,
    /// Its first address.
    pub address: Option<IpAddr>,
    /// The zone it is in; empty if that is not known.
    pub zone: Arc<str>,
}

impl LocalWorkload {
    /// From the node's id, cluster and metadata (a `google.protobuf.Struct`), in the form Istio's agent gives them.
    pub fn new(node_id: &str, node_cluster: &str, metadata: &impl prost::Message) -> Self {
        // Of the two types generated for it, this one keeps its keys in order.
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

/// What a peer gets to know of a node: the same keys as from Istio's filter, sorted, so that equal workloads
/// give equal text (peers remember it).
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

/// Reads a peer's metadata header; `None` if it is not what Istio sends.
pub fn decode(header: &[u8]) -> Option<Workload> {
    if header.len() > MAX_METADATA {
        return None;
    }
    let bytes = STANDARD.decode(header).ok()?;
    Some(workload_of(&Struct::decode(&*bytes).ok()?))
}

/// Peers seen by one worker, so that the same metadata are decoded once and kept once.
#[derive(Debug, Default)]
pub struct PeerCache {
    known: RefCell<WorkloadCache>,
}

/// By header; `None` for one that could not be read.
type WorkloadCache = HashMap<Box<[u8]>, Option<Arc<Workload>>>;

impl PeerCache {
    /// The most peers remembered; then all are forgotten.
    const MOST: usize = 1024;

    /// Who sent this metadata header.
    pub fn workload(&self, header: &[u8]) -> Option<Arc<Workload>> {
        if header.len() > MAX_METADATA {
            return None;
        }
        let mut known = self.known.borrow_mut();
        if let Some(workload) = known.get(header) {
            return workload.clone();
        }
        if known.len() >= Self::MOST {
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

/// What metrics, logs and pages show of a value that a peer has chosen: nothing if it is too long, and no control
/// characters, which terminals obey.
fn label(value: Option<&str>) -> Arc<str> {
    match value.filter(|text| text.len() <= MAX_LABEL).unwrap_or_default() {
        text if text.contains(char::is_control) => text.replace(char::is_control, "_").into(),
        text => text.into(),
    }
}

/// `kubernetes://apis/apps/v1/namespaces/default/deployments/reviews-v1` names `reviews-v1`.
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
    fn metadata_come_back_as_the_workload() {
        let local =
            LocalWorkload::new("sidecar~10.0.0.7~a.b~b.svc.cluster.local", "reviews.default", &node());
        assert_eq!(local.address, Some("10.0.0.7".parse().unwrap()));
        let workload = decode(local.metadata.as_bytes()).unwrap();
        assert_eq!(workload, *local.workload);
        let greeting = greeting::read(&local.greeting);
        assert_eq!(greeting, greeting::Greeting::Complete(local.greeting.len(), Some(workload.clone())));
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
    fn the_cache_keeps_one_of_each() {
        let local = LocalWorkload::new("", "", &node());
        let cache = PeerCache::default();
        let one = cache.workload(local.metadata.as_bytes()).unwrap();
        let two = cache.workload(local.metadata.as_bytes()).unwrap();
        assert!(Arc::ptr_eq(&one, &two));
        assert_eq!(cache.workload(b"not base64!"), None);
        assert_eq!(cache.workload(&vec![b'A'; MAX_METADATA + 4]), None);
    }

    #[test]
    fn connections_share_what_a_certificate_says() {
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
        // A peer may come back, but not all can be waited for.
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
        assert_eq!(Peer::plain().forwarded_cert(details), None);
        let names = skysail_identity::Peer { subject: "CN=a\r\nx: y\0".into(), ..Default::default() };
        let odd = Peer::secured(Some(Rc::new(Certificate::new(b"certificate", names))), None)
            .forwarded_cert(details)
            .unwrap();
        assert!(odd.ends_with(";Subject=\"CN=ax: y\";URI="), "{odd}");
    }

    proptest! {
        #[test]
        fn any_header_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
            let _ = decode(STANDARD.encode(&bytes).as_bytes());
        }
    }
}
