//! Calls to the other services: their addresses, and the headers that are propagated from hop to hop.

use std::{str::FromStr, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, header},
};
use hyper_util::{
    client::legacy::{Client as HyperClient, connect::HttpConnector},
    rt::TokioExecutor,
};

/// Propagated headers. They keep a trace complete and let a header match apply to every hop.
const PROPAGATED_HEADERS: [HeaderName; 11] = [
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
    HeaderName::from_static("b3"),
    HeaderName::from_static("x-b3-traceid"),
    HeaderName::from_static("x-b3-spanid"),
    HeaderName::from_static("x-b3-parentspanid"),
    HeaderName::from_static("x-b3-sampled"),
    HeaderName::from_static("x-b3-flags"),
    HeaderName::from_static("x-canary"),
    header::AUTHORIZATION,
];
/// Timeout of a call.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum size of a response's body in bytes.
const MAX_ANSWER: usize = 4 << 20;

/// Address of another service: `http://HOST:PORT`.
#[derive(Clone, Debug)]
pub(crate) struct Peer(String);

impl FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let uri: Uri = text.parse().map_err(|error| format!("{text}: {error}"))?;
        match (uri.scheme_str(), uri.authority(), uri.path()) {
            (Some("http"), Some(authority), "/" | "") => Ok(Self(format!("http://{authority}"))),
            _ => Err(format!("{text}: expected http://HOST:PORT")),
        }
    }
}

/// Pooled connections to other services. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Client(HyperClient<HttpConnector, Body>);

/// Response to a call.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Client {
    pub(crate) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(Duration::from_secs(3)));
        Self(HyperClient::builder(TokioExecutor::new()).build(connector))
    }

    /// Sends a call with these headers. `fields` are the form in the body; without any, the body is empty.
    pub(crate) async fn call(
        &self,
        method: Method,
        peer: &Peer,
        path: &str,
        headers: HeaderMap,
        fields: &[(&str, &str)],
    ) -> Result<Answer, String> {
        let kind = (!fields.is_empty()).then_some("application/x-www-form-urlencoded");
        self.send(method, peer, path, headers, kind, form(fields)).await
    }

    /// Sends a call with a JSON body.
    pub(crate) async fn post_json(
        &self,
        peer: &Peer,
        path: &str,
        headers: HeaderMap,
        json: Bytes,
    ) -> Result<Answer, String> {
        self.send(Method::POST, peer, path, headers, Some("application/json"), Body::from(json)).await
    }

    async fn send(
        &self,
        method: Method,
        peer: &Peer,
        path: &str,
        headers: HeaderMap,
        kind: Option<&'static str>,
        body: Body,
    ) -> Result<Answer, String> {
        let at = |error: &dyn std::fmt::Display| format!("{method} {}{path}: {error}", peer.0);
        let mut request = Request::builder()
            .method(&method)
            .uri(format!("{}{path}", peer.0))
            .body(body)
            .map_err(|e| at(&e))?;
        *request.headers_mut() = headers;
        if let Some(kind) = kind {
            request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        }
        let exchange = async {
            let (head, body) = self.0.request(request).await.map_err(|e| at(&Chain(&e)))?.into_parts();
            let body = axum::body::to_bytes(Body::new(body), MAX_ANSWER).await.map_err(|e| at(&e))?;
            Ok(Answer { status: head.status, headers: head.headers, body })
        };
        tokio::time::timeout(PATIENCE, exchange).await.map_err(|_| at(&"no answer within 10 s"))?
    }
}

/// Returns the headers of a request that are propagated to further calls.
pub(crate) fn propagated_headers(incoming: &HeaderMap) -> HeaderMap {
    let mut outgoing = HeaderMap::new();
    for name in PROPAGATED_HEADERS {
        if let Some(value) = incoming.get(&name) {
            outgoing.insert(name, value.clone());
        }
    }
    outgoing
}

fn form(fields: &[(&str, &str)]) -> Body {
    let pairs: Vec<String> = fields.iter().map(|(name, value)| format!("{name}={}", escape(value))).collect();
    Body::from(pairs.join("&"))
}

/// Percent-encodes everything but the unreserved characters of RFC 3986.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

/// Formats an error with its causes.
struct Chain<'a>(&'a dyn std::error::Error);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_origins_are_peers() {
        assert_eq!("http://flight.airline:9080/".parse::<Peer>().unwrap().0, "http://flight.airline:9080");
        for wrong in ["https://flight:9080", "flight:9080", "http://flight:9080/path", ""] {
            assert!(wrong.parse::<Peer>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn forms_are_escaped() {
        assert_eq!(escape("uid0@email.com &=+ü"), "uid0%40email.com%20%26%3D%2B%C3%BC");
    }

    #[test]
    fn only_listed_headers_are_propagated() {
        let mut incoming = HeaderMap::new();
        incoming.insert("x-request-id", HeaderValue::from_static("1"));
        incoming.insert("x-canary", HeaderValue::from_static("always"));
        incoming.insert("content-length", HeaderValue::from_static("10"));
        let outgoing = propagated_headers(&incoming);
        assert_eq!(outgoing.len(), 2);
        assert_eq!(outgoing["x-canary"], "always");
    }
}
