//! The fuzz targets as functions, so that tests can run them without a fuzzer.
//!
//! Each function accepts any bytes and panics on an error. A target that checks more than "no panic" documents
//! the check.

mod compile;
mod http1;
mod jwt;
mod route;

use std::{
    str::from_utf8,
    sync::LazyLock,
    time::{Duration, SystemTime},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use skysail_core::SpiffeId;
use skysail_http::{
    head::{RequestHead, ResponseHead},
    http2::{Http2Options, fuzzing as http_fuzzing},
    proxy_protocol::{self as proxy_headers, Addresses, ProxyVersion},
};
use skysail_identity::{Authority, Csr, Peer, Refusal, Verifier, jwks::KeySet};
use skysail_policy::{
    config::{
        http::{ClientCertDetails, Codec, EscapedSlashes, HttpManager, Routes, ServerHeader, Underscores},
        listener::Direction,
        trace::RequestIdUse,
    },
    format as formats,
    path::{Normalization, normalize},
    peer,
    record::{Context, Record},
};
use skysail_proxy::fuzzing::{self, Resource};

pub use compile::compile;
pub use http1::{http1_request, http1_response};
pub use jwt::jwt;
pub use route::route;

/// A fuzz target.
pub type Target = fn(&[u8]);

/// All targets, by the names of their programs and of their seed directories.
pub const TARGETS: [(&str, Target); 20] = [
    ("certificate", certificate),
    ("compile", compile),
    ("csr", csr),
    ("discovery", discovery),
    ("dns", dns),
    ("format", format),
    ("hpack", hpack),
    ("http1_request", http1_request),
    ("http1_response", http1_response),
    ("http2", http2),
    ("inspect", inspect),
    ("jwt", jwt),
    ("node", node),
    ("path", path),
    ("peer", peer),
    ("proxy_protocol", proxy_protocol),
    ("route", route),
    ("token", token),
    ("xds", xds),
    ("yaml", yaml),
];

/// HPACK header blocks: decoding, encoding and decoding again returns the same fields.
pub fn hpack(data: &[u8]) {
    let [read, again] = http_fuzzing::hpack(data);
    assert_eq!(read, again);
}

/// An HTTP/2 connection, client or server by the first byte: the result does not depend on how the bytes are
/// split.
pub fn http2(data: &[u8]) {
    let [end, piece, bytes @ ..] = data else { return };
    let server = end % 2 == 0;
    let whole = http_fuzzing::http2(server, bytes, usize::MAX);
    let pieces = http_fuzzing::http2(server, bytes, usize::from(*piece));
    assert_eq!(whole, pieces);
}

/// First bytes of a connection: a verdict does not change with more bytes, unless they complete a line or
/// record, and does not depend on how the bytes are split.
pub fn inspect(data: &[u8]) {
    let whole = fuzzing::inspect(data);
    assert_eq!(fuzzing::inspect_in_pieces(data), whole);
    for end in (0..data.len()).rev().take(64) {
        let part = fuzzing::inspect(&data[..end]);
        // The verdict on TLS is final from its first record on.
        if let (Some(part), Some(whole)) = (&part[0], &whole[0]) {
            assert_eq!(part, whole, "TLS at {end}");
        }
        assert!(part[0].is_none() || whole[0].is_some(), "TLS was known at {end}");
        assert!(part[1].is_none() || whole[1].is_some(), "HTTP was known at {end}");
    }
}

/// Peer metadata: the header, and the preamble of TCP connections, whose length does not exceed the input.
pub fn peer(data: &[u8]) {
    let _ = peer::decode(data);
    if let peer::greeting::FirstMessage::Complete(length, _) = peer::greeting::read(data) {
        assert!(length <= data.len());
    }
}

/// Returns `None` while more bytes are needed; otherwise whether the bytes begin with a PROXY header, with its
/// length and addresses.
fn proxy_header(bytes: &[u8]) -> Option<Option<(usize, Option<Addresses>)>> {
    match proxy_headers::parse(bytes) {
        proxy_headers::ParsedHeader::Incomplete => None,
        proxy_headers::ParsedHeader::Complete(_, length, ends) => Some(Some((length, ends))),
        proxy_headers::ParsedHeader::Absent | proxy_headers::ParsedHeader::Invalid => Some(None),
    }
}

/// PROXY protocol headers: decided as soon as they are complete, without requesting more bytes than a header
/// can have. An encoded header has the same addresses when decoded again.
pub fn proxy_protocol(data: &[u8]) {
    let whole = proxy_header(data);
    assert!(whole.is_some() || data.len() < 16 + (1 << 16), "more bytes are requested than a header has");
    if let Some(Some((length, ends))) = whole {
        assert!(length <= data.len());
        assert_eq!(proxy_header(&data[..length]), whole);
        assert!((0..length).rev().take(64).all(|end| proxy_header(&data[..end]).is_none()));
        for version in [ProxyVersion::V1, ProxyVersion::V2] {
            let again = proxy_headers::write(version, ends);
            let Some(Some((written, named))) = proxy_header(&again) else { panic!("{again:?}") };
            let ip = |ends: Addresses| {
                [ends.source, ends.destination].map(|end| (end.ip().to_canonical(), end.port()))
            };
            assert_eq!((written, named.map(ip)), (again.len(), ends.map(ip)));
        }
    }
    // Further bytes do not turn other data into a header.
    if whole == Some(None) {
        assert_eq!(proxy_header(&[data, b"\r\n"].concat()), Some(None));
    }
}

/// User configuration: the line of every finding exists.
pub fn yaml(data: &[u8]) {
    let Ok(text) = from_utf8(data) else { return };
    let parsed = skysail_model::parse(text, "fuzz.yaml");
    // A single CR also ends a line (YAML 1.2, 5.4), and the end of a truncated text counts as a line.
    let lines = text.bytes().filter(|b| matches!(b, b'\n' | b'\r')).count() + 2;
    for diagnostic in &parsed.diagnostics {
        assert!(diagnostic.line as usize <= lines, "line {} of {lines}: {diagnostic:?}", diagnostic.line);
    }
}

/// A proxy's node: ID, a line feed, metadata in JSON.
pub fn node(data: &[u8]) {
    let Ok(text) = from_utf8(data) else { return };
    let (id, metadata) = text.split_once('\n').unwrap_or((text, "null"));
    let metadata = serde_json::from_str(metadata).unwrap_or_default();
    if let Ok(node) = skysail_model::ProxyNode::parse(id, metadata, Default::default()) {
        assert!(!node.view.namespace.is_empty());
    }
}

/// Texts with `%OPERATORS%`, parsed and evaluated: JSON logs are valid JSON.
pub fn format(data: &[u8]) {
    let Ok(text) = from_utf8(data) else { return };
    let Ok(format) = fuzzing::format(text) else { return };
    let record = Record::new(Direction::Inbound, SystemTime::UNIX_EPOCH);
    let request = RequestHead::build("GET", "/a?b=c", "d:80", &[("x", "\u{e4}\u{20ac}"), ("y", "z")]);
    let response = ResponseHead::build(200, &[("x", "y")]);
    let context = Context { record: &record, request: Some(&request), response: Some(&response) };
    formats::write(&format, &context, b"-", &mut Vec::new());
    let mut json = Vec::new();
    formats::write_json(&format, &context, &mut json);
    let read: Result<serde_json::Value, _> = serde_json::from_slice(&json);
    assert!(read.is_ok(), "{}", String::from_utf8_lossy(&json));
}

/// Resources of a control plane and bootstrap files; the first byte selects the kind.
pub fn xds(data: &[u8]) {
    use Resource::{Bootstrap, Cluster, Endpoints, Listener, Routes};
    let [kind, body @ ..] = data else { return };
    let kinds = [Cluster, Listener, Routes, Endpoints, Bootstrap];
    let kind = kinds[usize::from(*kind) % kinds.len()];
    let lenient = fuzzing::translate(kind, body, false);
    let strict = fuzzing::translate(kind, body, true);
    assert!(lenient || !strict, "a {kind:?} is taken strictly and not leniently");
}

/// Path normalization is idempotent and removes dot segments, even after unescaping once more.
pub fn path(data: &[u8]) {
    let Ok(text) = from_utf8(data) else { return };
    // The codec refuses other characters.
    let path: String = text.chars().filter(|c| !c.is_ascii_control() && *c != ' ').collect();
    let path = format!("/{path}");
    let (before, query) = path.split_at(path.find('?').unwrap_or(path.len()));
    for escaped_slashes in [EscapedSlashes::Keep, EscapedSlashes::UnescapeAndForward] {
        let manager = manager(escaped_slashes);
        let mut head = RequestHead::build("GET", &path, "a", &[]);
        if normalize(&manager, &mut head) == Normalization::Reject {
            continue;
        }
        let once = head.path().to_owned();
        assert!(once.starts_with('/') && once.ends_with(query), "{before:?} with {query:?} became {once:?}");
        assert_eq!(normalize(&manager, &mut head), Normalization::Continue, "{path:?}, twice");
        assert_eq!(head.path(), once, "{path:?}, twice");
        let plain = once.as_bytes()[..once.len() - query.len()].to_vec();
        assert!(!has_dot_segments(&plain), "{path:?} became {once:?}");
        // Slashes that stay escaped may be next to dots; a setting changes this.
        if !once.to_ascii_lowercase().contains("%2f") && !once.to_ascii_lowercase().contains("%5c") {
            assert!(!has_dot_segments(&unescape(&plain)), "{path:?} became {once:?}");
        }
    }
}

fn has_dot_segments(path: &[u8]) -> bool {
    path.split(|b| *b == b'/').any(|segment| segment == b"." || segment == b"..")
}

/// Decodes every `%XX`, as servers do with a path.
fn unescape(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = path;
    while let [byte, after @ ..] = rest {
        let digits =
            (*byte == b'%').then(|| after.get(..2).and_then(|digits| from_utf8(digits).ok())).flatten();
        let digits = digits.filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(plain) => (out.push(plain), rest = &after[2..]),
            None => (out.push(*byte), rest = after),
        };
    }
    out
}

/// Returns a connection manager as istiod configures it, with this treatment of escaped slashes.
fn manager(escaped_slashes: EscapedSlashes) -> HttpManager {
    HttpManager {
        stat_prefix: "fuzz".into(),
        codec: Codec::Auto,
        routes: Routes::Named("80".into()),
        filters: Vec::new(),
        local_replies: Vec::new(),
        processes_responses: false,
        mutates_responses: false,
        stats: None,
        metadata_exchange: None,
        istio_alpn: false,
        host_cache: None,
        upgrades: Vec::new(),
        server: ServerHeader::PassThrough,
        generate_request_id: false,
        preserve_request_id: false,
        request_id_in_response: false,
        request_id: RequestIdUse::default(),
        tracing: None,
        client_cert: ClientCertDetails::default(),
        use_remote_address: false,
        xff_trusted_hops: 0,
        skip_xff_append: false,
        append_forwarded_port: false,
        internal: Vec::new(),
        normalize_path: true,
        merge_slashes: false,
        escaped_slashes,
        accept_http10: false,
        default_host: None,
        max_head: 60 * 1024,
        max_requests_per_connection: None,
        max_connection_duration: None,
        max_headers: 100,
        keep_case: false,
        http2: Http2Options::new(100),
        idle_timeout: None,
        stream_idle_timeout: None,
        max_stream_duration: None,
        underscores: Underscores::Allow,
        request_headers_timeout: None,
        request_timeout: None,
        drain_timeout: Duration::ZERO,
        access_logs: Vec::new(),
    }
}

/// Service account tokens: only tokens that the issuer signed are accepted.
pub fn token(data: &[u8]) {
    static VERIFIER: LazyLock<Verifier> = LazyLock::new(|| {
        Verifier::from_pem(TOKEN_KEY, "istio-ca").unwrap_or_else(|error| panic!("the key: {error}"))
    });
    let Ok(text) = from_utf8(data) else { return };
    // Also with the input as a key set.
    if let Ok(keys) = KeySet::parse(data) {
        let _ = Verifier::new(keys, "istio-ca", &["kubernetes/serviceaccount"]).verify(SOME_TOKEN.trim());
    }
    if let Ok(account) = VERIFIER.verify(text) {
        // Of the seeds, all signed by one issuer, only this account's is valid.
        assert_eq!((&*account.namespace, &*account.name), ("default", "reviews"));
    }
}

const SOME_TOKEN: &str = include_str!("../seeds/token/good");
const TOKEN_KEY: &[u8] = include_bytes!("../seeds/token.pub.pem");

/// Signing requests, in PEM or DER: an accepted request names only the caller, and the certificate has its key.
pub fn csr(data: &[u8]) {
    static AUTHORITY: LazyLock<Authority> =
        LazyLock::new(|| Authority::ephemeral().unwrap_or_else(|error| panic!("no authority: {error}")));
    let text = match from_utf8(data) {
        Ok(text) if text.contains("-----") => text.to_owned(),
        _ => {
            let encoded = BASE64_STANDARD.encode(data);
            format!("-----BEGIN CERTIFICATE REQUEST-----\n{encoded}\n-----END CERTIFICATE REQUEST-----\n")
        }
    };
    let id = SpiffeId::new("cluster.local", "default", "reviews");
    let stranger = SpiffeId::new("cluster.local", "default", "somebody-else");
    let csr = match Csr::from_pem(&text) {
        Ok(csr) => csr,
        Err(refusal) => {
            assert!(refusal.index() < Refusal::REASONS.len());
            return;
        }
    };
    // A request with a name is only for that identity.
    let taken = csr.names_only(&id, &[]).is_ok();
    assert!(!taken || csr.names_only(&stranger, &[]).is_err() || !csr.names_anything());
    let signed = AUTHORITY.issue(&csr, &id, Duration::from_secs(60), None);
    let signed = signed.unwrap_or_else(|error| panic!("{error}"));
    let chain = skysail_identity::identity::certificates(signed.chain[0].as_bytes(), "leaf");
    assert_eq!(chain.unwrap_or_else(|error| panic!("{error}")).len(), 1);
}

/// Certificates and signing requests of peers: the certificate has the identity that the authority was given,
/// whatever the request contains.
pub fn certificate(data: &[u8]) {
    static AUTHORITY: LazyLock<Authority> =
        LazyLock::new(|| Authority::ephemeral().unwrap_or_else(|error| panic!("no authority: {error}")));
    let _ = Peer::from_der(&data.into());
    let Ok(text) = from_utf8(data) else { return };
    let id = SpiffeId::new("cluster.local", "default", "reviews");
    let Ok(signed) = AUTHORITY.sign(text, &id, Duration::from_secs(60)) else { return };
    let leaf = skysail_identity::identity::certificates(signed.chain[0].as_bytes(), "leaf");
    let leaf = leaf.unwrap_or_else(|error| panic!("{error}"));
    let peer = Peer::from_der(&leaf[0]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(peer, Peer { uris: vec![id.to_string()], spiffe: Some(id), ..Peer::default() });
}

/// Discovery requests, valid ones and arbitrary bytes, while resources change: a client that follows the
/// protocol finally has what it subscribed to.
pub fn discovery(data: &[u8]) {
    skysail_xds::server::fuzzing::stream(data);
}

/// Queries to the sandbox's DNS server: a response has a valid size and does not itself cause a response.
pub fn dns(data: &[u8]) {
    if let Some(answer) = skysail_sandbox::fuzzing::dns(data) {
        assert!(skysail_sandbox::fuzzing::dns(&answer).is_none());
    }
}
