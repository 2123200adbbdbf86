//! Heads: those of `h2` (crate `http`) and ours.

use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version as HttpVersion,
    uri::{Authority, PathAndQuery, Scheme as HttpScheme},
};

use crate::{
    head::{Headers, RequestHead, ResponseHead, Scheme, Version, as_authority},
    http1::{Framing, Limits, Malformed},
};

/// Takes over a request's head.
///
/// # Errors
/// More fields than allowed, or no authority that could be one.
pub(crate) fn request_head(
    parts: &http::request::Parts,
    limits: &Limits,
    head: &mut RequestHead,
) -> Result<(), Malformed> {
    head.clear();
    head.version = Version::Http2;
    head.set_method(parts.method.as_str());
    head.set_path(parts.uri.path_and_query().map_or("", PathAndQuery::as_str));
    if parts.uri.scheme() == Some(&HttpScheme::HTTPS) {
        head.set_scheme(Scheme::Https);
    }
    headers(&parts.headers, head);
    if head.len() > limits.max_headers {
        return Err(Malformed::new(431, "http2.too_many_headers"));
    }
    // It stands for the field `host`, whatever that says (RFC 9113, section 8.3.1).
    let authority = match parts.uri.authority() {
        Some(authority) => Some(authority.as_str().as_bytes()),
        None => parts.headers.get("host").map(HeaderValue::as_bytes),
    };
    let authority = authority.ok_or(Malformed::new(400, "http2.missing_host_header"))?;
    let authority = as_authority(authority).ok_or(Malformed::new(400, "http2.invalid_authority"))?;
    head.set_authority(authority);
    head.remove("host");
    join_cookies(head);
    Ok(())
}

/// How a request's body is framed where the next hop is HTTP/1.1.
pub(crate) fn request_framing(head: &RequestHead, end: bool) -> Framing {
    if end { Framing::None } else { content_length(head).map_or(Framing::Chunked, Framing::Length) }
}

/// Takes over an answer's head, and says how its body is framed where the next hop is HTTP/1.1.
pub(super) fn response_head(
    parts: &http::response::Parts,
    method: &str,
    end: bool,
    head: &mut ResponseHead,
) -> Framing {
    head.clear();
    head.version = Version::Http2;
    head.set_status(parts.status.as_u16());
    headers(&parts.headers, head);
    let silent = method == "HEAD" || matches!(head.status(), 100..=199 | 204 | 304);
    if end || silent { Framing::None } else { content_length(head).map_or(Framing::Chunked, Framing::Length) }
}

/// Takes over fields.
pub(super) fn headers(from: &HeaderMap, to: &mut Headers) {
    for (name, value) in from {
        to.append(name.as_str(), value.as_bytes());
    }
}

/// A request's head for `h2`; `None` if it has a method, authority or path that HTTP/2 cannot carry.
pub(super) fn to_request(head: &RequestHead) -> Option<Request<()>> {
    let method = Method::from_bytes(head.method().as_bytes()).ok()?;
    let mut uri = http::uri::Parts::default();
    uri.authority = Some(Authority::try_from(head.authority()).ok()?);
    if method != Method::CONNECT {
        uri.scheme = Some(match head.scheme() {
            "https" => HttpScheme::HTTPS,
            _ => HttpScheme::HTTP,
        });
        uri.path_and_query = Some(PathAndQuery::try_from(head.path()).ok()?);
    }
    let mut request = Request::new(());
    *request.method_mut() = method;
    *request.uri_mut() = Uri::from_parts(uri).ok()?;
    *request.version_mut() = HttpVersion::HTTP_2;
    *request.headers_mut() = to_headers(head)?;
    Some(request)
}

/// An answer's head for `h2`.
pub(super) fn to_response(head: &ResponseHead) -> Option<Response<()>> {
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::from_u16(head.status()).ok()?;
    *response.version_mut() = HttpVersion::HTTP_2;
    *response.headers_mut() = to_headers(head)?;
    Some(response)
}

/// Fields for `h2`, without those that only HTTP/1 has (RFC 9113, section 8.2.2). `None` if a name or value is none.
pub(super) fn to_headers(from: &Headers) -> Option<HeaderMap> {
    let mut to = HeaderMap::with_capacity(from.len());
    for (name, value) in from.iter() {
        if matches!(
            name,
            b"connection" | b"keep-alive" | b"proxy-connection" | b"transfer-encoding" | b"upgrade"
        ) {
            continue;
        }
        to.append(HeaderName::from_bytes(name).ok()?, HeaderValue::from_bytes(value).ok()?);
    }
    Some(to)
}

fn content_length(headers: &Headers) -> Option<u64> {
    std::str::from_utf8(headers.header("content-length")?).ok()?.parse().ok()
}

/// Clients may send every cookie as a field of its own; outside of HTTP/2 there may be one only.
/// Source: RFC 9113, section 8.2.3.
fn join_cookies(head: &mut RequestHead) {
    if head.header_values("cookie").nth(1).is_some() {
        let joined = head.header_values("cookie").collect::<Vec<_>>().join(&b"; "[..]);
        head.set("cookie", &joined);
    }
}
