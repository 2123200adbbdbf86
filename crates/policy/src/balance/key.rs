//! Hash keys: parts of a request. Requests with the same value go to the same endpoint.

use std::{fmt::Write as _, net::SocketAddr};

use super::hash;
use crate::config::route::{HashCookie, HashKey, HashPolicy};
use skysail_http::head::RequestHead;

/// Addresses of a request's connection.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    /// Address of the client, by `x-forwarded-for` where trusted.
    pub client: std::net::IpAddr,
    /// Address of the downstream peer.
    pub remote: SocketAddr,
    /// Local address of the downstream connection.
    pub local: SocketAddr,
}

/// Returns the hash of a request; `None` if it has none of the parts. A client without the cookie gets one: its
/// `set-cookie` value is added to `cookies`.
pub fn of(
    policies: &[HashPolicy],
    head: &RequestHead,
    origin: Origin,
    cookies: &mut Vec<String>,
) -> Option<u64> {
    let mut hash = None;
    for policy in policies {
        let more = match &policy.key {
            HashKey::Header(name) => header(head, name),
            HashKey::Cookie(wanted) => cookie(head, wanted, origin, cookies),
            HashKey::Query(name) => query(head, name),
            HashKey::SourceIp => Some(hash::of(origin.client.to_string().as_bytes())),
        };
        if let Some(more) = more {
            hash = Some(hash::combine(hash, more));
        }
        if policy.terminal && hash.is_some() {
            break;
        }
    }
    hash
}

fn header(head: &RequestHead, name: &str) -> Option<u64> {
    if let Some(value) = head.pseudo_header(name) {
        return Some(hash::of(value.as_bytes()));
    }
    let mut values: Vec<_> = head.header_values(name).collect();
    if values.is_empty() { None } else { Some(hash::of_values(&mut values)) }
}

fn query(head: &RequestHead, name: &str) -> Option<u64> {
    let mut pairs = head.query()?.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.find(|(known, _)| *known == name).map(|(_, value)| hash::of(value.as_bytes()))
}

fn cookie(head: &RequestHead, wanted: &HashCookie, origin: Origin, cookies: &mut Vec<String>) -> Option<u64> {
    match head.cookie(&wanted.name).filter(|value| !value.is_empty()) {
        Some(value) => Some(hash::of(value)),
        None => {
            let ttl = wanted.ttl?;
            // The value is the same for all requests of a connection, because several may arrive before the first
            // response.
            let value = hash::of(format!("{}{}", origin.remote, origin.local).as_bytes());
            let mut text = format!("{}=\"{value:016x}\"", wanted.name);
            // Writing into memory cannot fail.
            if ttl.as_secs() > 0 {
                let _ = write!(text, "; Max-Age={}", ttl.as_secs());
            }
            if !wanted.path.is_empty() {
                let _ = write!(text, "; Path={}", wanted.path);
            }
            for (name, value) in &wanted.attributes {
                let _ = write!(text, "; {name}");
                if !value.is_empty() {
                    let _ = write!(text, "={value}");
                }
            }
            text.push_str("; HttpOnly");
            cookies.push(text);
            Some(hash::of(format!("{value:016x}").as_bytes()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn policy(key: HashKey) -> HashPolicy {
        HashPolicy { key, terminal: false }
    }

    fn origin() -> Origin {
        let local = SocketAddr::from(([127, 0, 0, 1], 18080));
        let remote = SocketAddr::from(([127, 0, 0, 1], 60808));
        Origin { client: remote.ip(), remote, local }
    }

    fn of_head(policies: &[HashPolicy], path: &str, fields: &[(&str, &str)]) -> (Option<u64>, Vec<String>) {
        let mut cookies = Vec::new();
        let head = RequestHead::build("GET", path, "a", fields);
        (of(policies, &head, origin(), &mut cookies), cookies)
    }

    #[test]
    fn keys_are_hashed_and_combined() {
        let (header, query) = (HashKey::Header("x-key".into()), HashKey::Query("q".into()));
        let both = [policy(header.clone()), policy(query.clone())];
        let (a, b) = (hash::of(b"a"), hash::of(b"b"));
        assert_eq!(of_head(&both, "/", &[]).0, None);
        assert_eq!(of_head(&both, "/", &[("x-key", "a")]).0, Some(a));
        assert_eq!(of_head(&both, "/?x=1&q=b&q=c", &[]).0, Some(b));
        assert_eq!(of_head(&both, "/?q=b", &[("x-key", "a")]).0, Some(a.rotate_left(1) ^ b));
        // A duplicate key does not cancel itself out.
        assert_ne!(of_head(&[both[0].clone(), both[0].clone()], "/", &[("x-key", "a")]).0, Some(0));
        let last = [HashPolicy { terminal: true, ..policy(header) }, policy(query)];
        assert_eq!(of_head(&last, "/?q=b", &[("x-key", "a")]).0, Some(a));
        assert_eq!(of_head(&last, "/?q=b", &[]).0, Some(b));
        let address = [policy(HashKey::SourceIp)];
        assert_eq!(of_head(&address, "/", &[]).0, Some(hash::of(b"127.0.0.1")));
    }

    #[test]
    fn a_client_without_the_cookie_gets_one() {
        let cookie = |ttl, attributes| {
            let (name, path) = ("user".into(), "/p".into());
            [policy(HashKey::Cookie(Box::new(HashCookie { name, ttl, path, attributes })))]
        };
        let minute = cookie(
            Some(Duration::from_secs(60)),
            vec![("SameSite".into(), "Strict".into()), ("Secure".into(), "".into())],
        );
        // Envoy's response to a client at this address.
        let expected = "user=\"96f6fe2be96e3e15\"; Max-Age=60; Path=/p; SameSite=Strict; Secure; HttpOnly";
        let (hash, cookies) = of_head(&minute, "/", &[("cookie", "other=1")]);
        assert_eq!((hash, &*cookies), (Some(hash::of(b"96f6fe2be96e3e15")), &[expected.to_owned()][..]));
        // A client with the cookie has the same hash.
        let fields = [("cookie", "a=b"), ("cookie", "c=d; user=\"96f6fe2be96e3e15\"; e")];
        assert_eq!(of_head(&minute, "/", &fields), (hash, Vec::new()));
        let session = cookie(Some(Duration::ZERO), Vec::new());
        assert_eq!(of_head(&session, "/", &[]).1, ["user=\"96f6fe2be96e3e15\"; Path=/p; HttpOnly"]);
        assert_eq!(of_head(&cookie(None, Vec::new()), "/", &[]), (None, Vec::new()));
    }
}
