//! Random requests with a small vocabulary, so that they often match the configuration.

use fastrand::Rng;

use crate::{
    random::{HEADERS, HOSTS, RULED, VALUES, one, rarely},
    request::{Body, Request, Version},
    tokens::TOKENS,
};

const METHODS: [&str; 7] = ["GET", "GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"];
/// Fields in which clients and preceding proxies describe themselves.
const HOPS: [(&str, &[&str]); 15] = [
    (
        "x-forwarded-for",
        &["10.0.0.1", "1.2.3.4", "10.0.0.1, 1.2.3.4", "1.1.1.1,10.0.0.2,3.3.3.3", "no", "::1"],
    ),
    ("x-forwarded-for", &["10.0.0.1", "10.0.0.1", "127.0.0.1", "", "10.0.0.1:80", "10.0.0.1,"]),
    ("x-forwarded-proto", &["http", "https", "wss"]),
    ("x-envoy-internal", &["true"]),
    ("x-envoy-external-address", &["1.1.1.1"]),
    ("x-envoy-upstream-rq-timeout-ms", &["5000", "no", "0"]),
    ("x-envoy-expected-rq-timeout-ms", &["5000"]),
    ("x-envoy-original-path", &["/original"]),
    ("x-envoy-original-host", &["original"]),
    ("x-forwarded-host", &["original", "a.example", "original,a.example", "original, a.example"]),
    ("x-envoy-attempt-count", &["7"]),
    ("x-envoy-downstream-service-cluster", &["me"]),
    ("x-envoy-ip-tags", &["a"]),
    (
        "referer",
        &["http://a/b", "/a", "a", "ftp://a", "https:///b", "http://a b/", "about:blank", "", "http://a?b"],
    ),
    ("x-request-id", &["6a9a4a4c-7d1a-4d1c-9f3a-000000000000"]),
];
/// Behaviours of servers.
const BEHAVIOURS: [&str; 13] = [
    "nameless",
    "chunked",
    "trailers",
    "204",
    "304",
    "404",
    "503",
    "empty",
    "bare",
    "old",
    "grpc0",
    "grpc14",
    "grpc-late",
];
/// Components of paths.
const PIECES: [&str; 22] = [
    "/a", "/b", "/ab", "/A", "/a", "/b", "/", "//", "/.", "/..", "/..;", "/.;a", "/%61", "/a%2Fb", "/a%2fb",
    "/%2e%2e", "/a%5Cb", "/a b", "/a.b", "/42", "/a;x", "\\a",
];
const QUERIES: [&str; 9] = ["", "", "", "?", "?a=b", "?a", "?b=a&a=b", "?a=%62#f", "?a=a&a=b&a"];

/// Returns a request that every server can parse, although it may refuse it.
pub(crate) fn request(rng: &mut Rng) -> Request {
    let method = one(rng, &METHODS);
    let mut path: String = (0..rng.usize(1..4)).map(|_| one(rng, &PIECES)).collect();
    path.push_str(one(rng, &QUERIES));
    let version = version(rng, &path);
    let mut request = Request::new(version, method, path.replace(' ', "+"), host(rng));
    for _ in 0..rng.usize(0..4) {
        let name = one(rng, &HEADERS);
        if name == RULED && request.fields.iter().any(|(other, _)| other == name) {
            continue;
        }
        request.field(name, one(rng, &VALUES));
    }
    if rarely(rng, 4) {
        request.field("x-host", host(rng));
    }
    if rarely(rng, 3) {
        let token = &TOKENS.all[if rng.bool() { 0 } else { rng.usize(..TOKENS.all.len()) }];
        match rng.u8(..5) {
            0 | 1 => request.field("authorization", format!("Bearer {token}").trim_end()),
            2 => request.field("authorization", &**token),
            3 => request.field("x-token", format!("T-{token}")),
            _ => request.field("cookie", format!("a=b; token={token}")),
        }
    }
    if rarely(rng, 8) {
        request.field("origin", "http://a.example");
        if rng.bool() {
            request.field("access-control-request-method", "GET");
        }
    }
    for _ in 0..rng.usize(..3) {
        let (name, values) = HOPS[rng.usize(..HOPS.len())];
        if name != "referer" || !request.fields.iter().any(|(other, _)| other == name) {
            request.field(name, one(rng, values));
        }
    }
    if rarely(rng, 6) {
        request.field("te", one(rng, &["trailers", "trailers", "gzip"]));
    }
    if version == Version::Http11 && method == "GET" && rarely(rng, 12) {
        request.field("connection", one(rng, &["upgrade", "Upgrade"]));
        for _ in 0..rng.usize(1..3) {
            request.field("upgrade", one(rng, &["websocket", "WebSocket", "h2c", "other", "h2c, websocket"]));
        }
    }
    if version == Version::Http2 && rarely(rng, 6) {
        request.field("cookie", "c=d");
        request.field("cookie", "e");
    }
    let way = one(rng, &BEHAVIOURS);
    if rarely(rng, 3) && !request.asks_for_websocket() {
        request.field("x-serve", way);
    }
    if matches!(method, "POST" | "PUT") {
        request.body = body(rng, version);
    }
    request
}

fn version(rng: &mut Rng, path: &str) -> Version {
    match rng.u8(..8) {
        0 => Version::Http10,
        // The client supports no other requests.
        1 | 2 if path.starts_with('/') && !path.contains('#') => Version::Http2,
        _ => Version::Http11,
    }
}

fn body(rng: &mut Rng, version: Version) -> Body {
    match rng.u8(..4) {
        0 if version != Version::Http10 => {
            let trailers = if rng.bool() { vec![("x-late", "yes"), ("x-a", "late")] } else { Vec::new() };
            Body::Pieces(["bo", "dy", "!"][..rng.usize(..4)].to_vec(), trailers)
        }
        1 => Body::Whole(String::new()),
        // Occasionally larger than the buffer.
        _ if rarely(rng, 30) => Body::Whole("body".repeat(17_500)),
        _ => Body::Whole("body".to_owned()),
    }
}

fn host(rng: &mut Rng) -> String {
    let host = one(rng, &HOSTS).replace('*', "x");
    match rng.u8(0..6) {
        0 => format!("{host}:80"),
        1 => format!("{host}:8080"),
        2 => host.to_uppercase(),
        _ => host,
    }
}
