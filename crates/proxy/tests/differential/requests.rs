//! Requests at random, of few words, so that they often meet what the configuration is about.

use fastrand::Rng;

use crate::{
    configuration::{HEADERS, HOSTS, VALUES, one},
    tokens::TOKENS,
};

const METHODS: [&str; 6] = ["GET", "GET", "POST", "PUT", "DELETE", "OPTIONS"];
/// What paths are put together of.
const PIECES: [&str; 20] = [
    "/a", "/b", "/ab", "/A", "/a", "/b", "/", "//", "/.", "/..", "/%61", "/a%2Fb", "/a%2fb", "/%2e%2e",
    "/a%5Cb", "/a b", "/a.b", "/42", "/a;x", "\\a",
];
const QUERIES: [&str; 8] = ["", "", "", "?", "?a=b", "?a", "?b=a&a=b", "?a=%62#f"];

/// The bytes of a request that every server understands, though it may refuse it.
pub(crate) fn request(rng: &mut Rng) -> String {
    let method = one(rng, &METHODS);
    let mut path: String = (0..rng.usize(1..4)).map(|_| one(rng, &PIECES)).collect();
    path.push_str(one(rng, &QUERIES));
    let path = path.replace(' ', "+");
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", host(rng));
    let mut has_type = false;
    for _ in 0..rng.usize(0..4) {
        let name = one(rng, &HEADERS);
        // Envoy joins those of the headers it knows that come twice.
        if name == "content-type" && std::mem::replace(&mut has_type, true) {
            continue;
        }
        head.push_str(&format!("{name}: {}\r\n", one(rng, &VALUES)));
    }
    if rng.u8(0..4) == 0 {
        head.push_str(&format!("x-host: {}\r\n", host(rng)));
    }
    if rng.u8(0..3) == 0 {
        let token = &TOKENS.all[if rng.bool() { 0 } else { rng.usize(..TOKENS.all.len()) }];
        let place = one(
            rng,
            &[
                "authorization: Bearer ",
                "authorization: Bearer ",
                "authorization: ",
                "x-token: T-",
                "cookie: a=b; token=",
            ],
        );
        head.push_str(&format!("{place}{token}\r\n"));
    }
    if rng.u8(0..8) == 0 {
        head.push_str("origin: http://a.example\r\n");
        if rng.bool() {
            head.push_str("access-control-request-method: GET\r\n");
        }
    }
    let mut body = String::new();
    if matches!(method, "POST" | "PUT") {
        // Now and then more than is kept.
        body = if rng.u8(..30) == 0 { "body".repeat(17_500) } else { "body".to_owned() };
        head.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    format!("{head}\r\n{body}")
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
