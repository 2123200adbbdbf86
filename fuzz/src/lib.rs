//! What the fuzz targets do with their bytes, as functions, so that a test can do the same without a fuzzer.
//!
//! Each function takes any bytes, panics if something is wrong, and else says nothing. Those that check more than
//! "no panic" say what they check.

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
    proxy_protocol::{self as proxy_headers, Ends, ProxyVersion},
};
use skysail_identity::{Authority, Csr, Peer, Refusal, Verifier, jwks::KeySet};
use skysail_policy::{
    config::{
        http::{ClientCertDetails, Codec, EscapedSlashes, HttpManager, Routes, ServerHeader},
        listener::Direction,
        trace::RequestIdUse,
    },
    format as formats,
    path::{Normalization, normalize},
    peer,
    record::{Context, Record},
};
use skysail_proxy::fuzzing::{self, Resource};

pub use http1::{http1_request, http1_response};
pub use jwt::jwt;
pub use route::route;

/// What a target does.
pub type Target = fn(&[u8]);

/// All targets, by the names of their programs and of their folders of seeds.
pub const TARGETS: [(&str, Target); 19] = [
    ("certificate", certificate),
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

/// Header blocks of HTTP/2: what is read means the same once it is written anew.
pub fn hpack(data: &[u8]) {
    let [read, again] = http_fuzzing::hpack(data);
    assert_eq!(read, again);
}

/// A connection of HTTP/2, at the end that the first byte says: its bytes mean the same in any pieces.
pub fn http2(data: &[u8]) {
    let [end, piece, bytes @ ..] = data else { return };
    let server = end % 2 == 0;
    let whole = http_fuzzing::http2(server, bytes, usize::MAX);
    let pieces = http_fuzzing::http2(server, bytes, usize::from(*piece));
    assert_eq!(whole, pieces);
}

/// What a connection begins with: once something is known, more bytes do not change it, unless they complete a
/// line or record. In how many pieces they come makes no difference.
pub fn inspect(data: &[u8]) {
    let whole = fuzzing::inspect(data);
    assert_eq!(fuzzing::inspect_in_pieces(data), whole);
    for end in (0..data.len()).rev().take(64) {
        let part = fuzzing::inspect(&data[..end]);
        // TLS is known or broken from its record on.
        if let (Some(part), Some(whole)) = (&part[0], &whole[0]) {
            assert_eq!(part, whole, "TLS at {end}");
        }
        assert!(part[0].is_none() || whole[0].is_some(), "TLS was known at {end}");
        assert!(part[1].is_none() || whole[1].is_some(), "HTTP was known at {end}");
    }
}

/// Peer metadata: the header, and the greeting of TCP connections, which takes no more than there is.
pub fn peer(data: &[u8]) {
    let _ = peer::decode(data);
    if let peer::greeting::Greeting::Complete(length, _) = peer::greeting::read(data) {
        assert!(length <= data.len());
    }
}

/// Returns what a connection's first bytes are: `None` while more are needed, else whether they are a PROXY header, with its
/// length and addresses.
fn proxy_header(bytes: &[u8]) -> Option<Option<(usize, Option<Ends>)>> {
    match proxy_headers::look(bytes) {
        proxy_headers::Look::More => None,
        proxy_headers::Look::Header(_, length, ends) => Some(Some((length, ends))),
        proxy_headers::Look::Absent | proxy_headers::Look::Broken => Some(None),
    }
}

/// Headers of the PROXY protocol: known as soon as they are whole, and no more is asked for than one can have. Whom a
/// header names it names again once it is written anew.
pub fn proxy_protocol(data: &[u8]) {
    let whole = proxy_header(data);
    assert!(whole.is_some() || data.len() < 16 + (1 << 16), "more than a header is asked for");
    if let Some(Some((length, ends))) = whole {
        assert!(length <= data.len());
        assert_eq!(proxy_header(&data[..length]), whole);
        assert!((0..length).rev().take(64).all(|end| proxy_header(&data[..end]).is_none()));
        for version in [ProxyVersion::V1, ProxyVersion::V2] {
            let again = proxy_headers::write(version, ends);
            let Some(Some((written, named))) = proxy_header(&again) else { panic!("{again:?}") };
            let ip =
                |ends: Ends| [ends.source, ends.destination].map(|end| (end.ip().to_canonical(), end.port()));
            assert_eq!((written, named.map(ip)), (again.len(), ends.map(ip)));
        }
    }
    // What is no header stays none.
    if whole == Some(None) {
        assert_eq!(proxy_header(&[data, b"\r\n"].concat()), Some(None));
    }
}

/// Configuration as people write it: every finding has a line that is there.
pub fn yaml(data: &[u8]) {
    let Ok(text) = from_utf8(data) else { return };
    let parsed = skysail_model::parse(text, "fuzz.yaml");
    // A bare CR ends a line, too (YAML 1.2, 5.4), and the end of a text that is cut off counts as a line.
    let lines = text.bytes().filter(|b| matches!(b, b'\n' | b'\r')).count() + 2;
    for diagnostic in &parsed.diagnostics {
        assert!(diagnostic.line as usize <= lines, "line {} of {lines}: {diagnostic:?}", diagnostic.line);
    }
}

/// What a proxy says of itself to the control plane: id, a line feed, metadata in JSON.
pub fn node(data: &[u8]) {
    let Ok(text) = from_utf8(data) else { return };
    let (id, metadata) = text.split_once('\n').unwrap_or((text, "null"));
    let metadata = serde_json::from_str(metadata).unwrap_or_default();
    if let Ok(node) = skysail_model::ProxyNode::parse(id, metadata, Default::default()) {
        assert!(!node.view.namespace.is_empty());
    }
}

/// Texts with `%OPERATORS%`, read and evaluated: what is written as JSON is JSON.
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

/// Resources from a control plane, and bootstrap files: the first byte says which.
pub fn xds(data: &[u8]) {
    use Resource::{Bootstrap, Cluster, Endpoints, Listener, Routes};
    let [kind, body @ ..] = data else { return };
    let kinds = [Cluster, Listener, Routes, Endpoints, Bootstrap];
    let kind = kinds[usize::from(*kind) % kinds.len()];
    let lenient = fuzzing::translate(kind, body, false);
    let strict = fuzzing::translate(kind, body, true);
    assert!(lenient || !strict, "a {kind:?} is taken strictly and not leniently");
}

/// Paths in normal form: they stay as they are, and have no dot segments, even after escapes are read once more.
pub fn path(data: &[u8]) {
    let Ok(text) = from_utf8(data) else { return };
    // Others never get past the codec.
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
        assert_eq!(normalize(&manager, &mut head), Normalization::Go, "{path:?}, twice");
        assert_eq!(head.path(), once, "{path:?}, twice");
        let plain = once.as_bytes()[..once.len() - query.len()].to_vec();
        assert!(!has_dot_segments(&plain), "{path:?} became {once:?}");
        // Slashes that stay escaped may stand beside dots; the setting for them is there for those who mind.
        if !once.to_ascii_lowercase().contains("%2f") && !once.to_ascii_lowercase().contains("%5c") {
            assert!(!has_dot_segments(&unescape(&plain)), "{path:?} became {once:?}");
        }
    }
}

fn has_dot_segments(path: &[u8]) -> bool {
    path.split(|b| *b == b'/').any(|segment| segment == b"." || segment == b"..")
}

/// Every `%XX` as the byte it stands for, as servers read a path.
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

/// A manager as istiod asks for it, with this treatment of slashes.
fn manager(escaped_slashes: EscapedSlashes) -> HttpManager {
    HttpManager {
        stat_prefix: "fuzz".into(),
        codec: Codec::Auto,
        routes: Routes::Named("80".into()),
        filters: Vec::new(),
        stats: None,
        metadata_exchange: None,
        istio_alpn: false,
        upgrades: Vec::new(),
        server: ServerHeader::PassThrough,
        generate_request_id: false,
        preserve_request_id: false,
        request_id: RequestIdUse::default(),
        tracing: None,
        client_cert: ClientCertDetails::default(),
        use_remote_address: false,
        xff_trusted_hops: 0,
        skip_xff_append: false,
        internal: Vec::new(),
        normalize_path: true,
        merge_slashes: false,
        escaped_slashes,
        accept_http10: false,
        default_host: None,
        max_head: 60 * 1024,
        max_requests_per_connection: None,
        max_headers: 100,
        http2: Http2Options::new(100),
        idle_timeout: None,
        stream_idle_timeout: None,
        request_headers_timeout: None,
        request_timeout: None,
        drain_timeout: Duration::ZERO,
        access_logs: Vec::new(),
    }
}

/// Service account tokens: nothing but what the issuer signed is taken.
pub fn token(data: &[u8]) {
    static VERIFIER: LazyLock<Verifier> = LazyLock::new(|| {
        Verifier::from_pem(TOKEN_KEY, "istio-ca").unwrap_or_else(|error| panic!("the key: {error}"))
    });
    let Ok(text) = from_utf8(data) else { return };
    // With a key set as well, whatever that is.
    if let Ok(keys) = KeySet::parse(data) {
        let _ = Verifier::new(keys, "istio-ca", &["kubernetes/serviceaccount"]).verify(SOME_TOKEN.trim());
    }
    if let Ok(account) = VERIFIER.verify(text) {
        // Of the seeds, which one issuer has signed, this account's alone is good.
        assert_eq!((&*account.namespace, &*account.name), ("default", "reviews"));
    }
}

const SOME_TOKEN: &str = include_str!("../seeds/token/good");
const TOKEN_KEY: &[u8] = include_bytes!("../seeds/token.pub.pem");

/// Signing requests, in PEM or DER: one that is taken names nobody but the caller, and is for a key that the certificate then has.
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
    // A request that names somebody is for that one alone.
    let taken = csr.names_only(&id, &[]).is_ok();
    assert!(!taken || csr.names_only(&stranger, &[]).is_err() || !csr.names_anything());
    let signed = AUTHORITY.issue(&csr, &id, Duration::from_secs(60), None);
    let signed = signed.unwrap_or_else(|error| panic!("{error}"));
    let chain = skysail_identity::identity::certificates(signed.chain[0].as_bytes(), "leaf");
    assert_eq!(chain.unwrap_or_else(|error| panic!("{error}")).len(), 1);
}

/// Certificates and signing requests as peers send them: whatever a request says, the certificate is for whom the
/// authority was told.
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

/// Requests of the discovery protocol, good ones and bytes, while resources change: a client that keeps to the protocol has what it
/// asked for in the end.
pub fn discovery(data: &[u8]) {
    skysail_xds::server::fuzzing::stream(data);
}

/// Questions to the sandbox's DNS server: an answer fits, and gets no answer itself.
pub fn dns(data: &[u8]) {
    if let Some(answer) = skysail_sandbox::fuzzing::dns(data) {
        assert!(skysail_sandbox::fuzzing::dns(&answer).is_none());
    }
}
