//! Header operations: the configured ones, and those that every hop applies to `x-forwarded-*` and `x-request-id`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{
    config::{
        http::{Format, ForwardClientCert, HttpManager},
        route::{AppendAction, HeaderOp},
    },
    format,
    record::{Context, Record},
};
use skysail_http::head::{Headers, Names, RequestHead, ResponseHead, Scheme, Version};

#[cfg(test)]
mod tests;

/// Applies header operations to a request.
pub fn apply_request(ops: &[HeaderOp], head: &mut RequestHead, record: &Record<'_>) {
    remove(ops, head);
    let additions = additions(ops, head, &Context { record, request: Some(head), response: None });
    for Addition { name, value, overwrites } in additions {
        if overwrites {
            head.set(name, &value);
        } else {
            head.append(name, &value);
        }
    }
}

/// Applies header operations to a response.
pub fn apply_response(
    ops: &[HeaderOp],
    head: &mut ResponseHead,
    request: Option<&RequestHead>,
    record: &Record<'_>,
) {
    remove(ops, head);
    for Addition { name, value, overwrites } in
        additions(ops, head, &Context { record, request, response: Some(head) })
    {
        if overwrites {
            head.set(name, &value);
        } else {
            head.append(name, &value);
        }
    }
}

fn remove(ops: &[HeaderOp], headers: &mut Headers) {
    for op in ops {
        if let HeaderOp::Remove(name) = op {
            headers.remove(name);
        }
    }
}

/// A header to add.
struct Addition<'a> {
    name: &'a str,
    value: Vec<u8>,
    overwrites: bool,
}

/// Returns the headers to add, in order. As in Envoy, all values are computed before the first header is added, and
/// headers that overwrite come first.
fn additions<'a>(ops: &'a [HeaderOp], headers: &Headers, context: &Context<'_>) -> Vec<Addition<'a>> {
    let mut additions = Vec::new();
    for op in ops {
        let HeaderOp::Add { name, value: format, action, keep_empty } = op else { continue };
        let is_there = headers.has(name);
        let wanted = match action {
            AppendAction::Append | AppendAction::Overwrite => true,
            AppendAction::AddIfAbsent => !is_there,
            AppendAction::OverwriteIfExists => is_there,
        };
        if !wanted {
            continue;
        }
        let value = value_of(format, context);
        if *keep_empty || !value.is_empty() {
            let overwrites = matches!(action, AppendAction::Overwrite | AppendAction::OverwriteIfExists);
            additions.push(Addition { name, value, overwrites });
        }
    }
    additions.sort_by_key(|addition| !addition.overwrites);
    additions
}

fn value_of(format: &Format, context: &Context<'_>) -> Vec<u8> {
    let mut value = Vec::new();
    format::write(format, context, b"", &mut value);
    // Names in certificates may contain any character. A line break in a head would begin another field.
    value.retain(|b| !b.is_ascii_control() || *b == b'\t');
    value
}

/// Properties of a downstream connection that its requests receive as headers.
#[derive(Clone, Copy, Debug)]
pub struct Hop<'a> {
    /// Address of the peer.
    pub source: IpAddr,
    /// Address that replaces a loopback `source` in `x-forwarded-for`.
    pub own: fn() -> IpAddr,
    /// Port of the connection's local address.
    pub local_port: u16,
    /// The connection is TLS.
    pub tls: bool,
    /// The peer has a verified certificate.
    pub certified: bool,
    /// Element of `x-forwarded-client-cert` for the peer: [`crate::peer::Peer::forwarded_cert`].
    pub forwarded_cert: Option<&'a str>,
}

/// Headers that only internal clients may set: retries, timeouts, tracing.
const INTERNAL: [&str; 14] = [
    "x-envoy-retriable-status-codes",
    "x-envoy-retriable-header-names",
    "x-envoy-retry-on",
    "x-envoy-retry-grpc-on",
    "x-envoy-max-retries",
    "x-envoy-upstream-alt-stat-name",
    "x-envoy-upstream-rq-timeout-ms",
    "x-envoy-upstream-rq-per-try-timeout-ms",
    "x-envoy-upstream-rq-timeout-alt-response",
    "x-envoy-expected-rq-timeout-ms",
    "x-envoy-force-trace",
    "x-envoy-ip-tags",
    "x-envoy-original-url",
    "x-envoy-hedge-on-per-try-timeout",
];
/// Headers that external clients may not set if this is the first proxy.
const EDGE: [&str; 5] = [
    "x-envoy-decorator-operation",
    "x-envoy-downstream-service-cluster",
    "x-envoy-downstream-service-node",
    "x-envoy-original-host",
    "x-envoy-original-path",
];

/// Updates `x-forwarded-for`, `x-forwarded-proto`, `x-forwarded-port`, `x-forwarded-client-cert` and `x-request-id`,
/// removes headers that only internal clients may set, and returns the address of the client. Call it once, before
/// routing.
pub fn receive(
    manager: &HttpManager,
    hop: Hop<'_>,
    head: &mut RequestHead,
    rng: &mut fastrand::Rng,
) -> IpAddr {
    let (client, alone) = client_address(manager, hop.source, head);
    if manager.use_remote_address {
        if !manager.skip_xff_append {
            let is_here = hop.source == Ipv4Addr::LOCALHOST || hop.source == Ipv6Addr::LOCALHOST;
            let source = if is_here { (hop.own)() } else { hop.source };
            append_to_list(head, "x-forwarded-for", source.to_string().as_bytes());
        }
        if manager.xff_trusted_hops == 0 {
            // No trusted proxy can have set it.
            head.remove("x-forwarded-proto");
        }
        if manager.append_forwarded_port && (manager.xff_trusted_hops == 0 || !head.has("x-forwarded-port")) {
            head.set_number("x-forwarded-port", hop.local_port.into());
        }
    }
    set_scheme(manager, hop.tls, head);
    if head.has("referer") && !has_one_url(head.header_values("referer")) {
        head.remove("referer");
    }
    // The header holds the span name of the previous hop. It must not reach the next one.
    if manager.tracing.is_none() {
        head.remove("x-envoy-decorator-operation");
    }
    head.remove("x-envoy-internal");
    let internal = alone && manager.internal.iter().any(|range| range.contains(client));
    let edge = manager.use_remote_address && !internal;
    if internal {
        head.append("x-envoy-internal", b"true");
    } else {
        head.remove_any(&INTERNAL, Names::ENVOY);
    }
    if edge {
        head.remove_any(&EDGE, Names::ENVOY);
        head.set("x-envoy-external-address", client.to_string().as_bytes());
    }
    forward_client_cert(manager.client_cert.forward, hop, head);
    if manager.generate_request_id && (!head.has("x-request-id") || (edge && !manager.preserve_request_id)) {
        head.set("x-request-id", &request_id(rng));
    }
    client
}

/// Returns whether the values are one URL, absolute or relative.
fn has_one_url<'a>(mut values: impl Iterator<Item = &'a [u8]>) -> bool {
    let first = values.next().unwrap_or_default();
    let is_whole = match memchr::memmem::find(first, b"://") {
        Some(end) => {
            let (scheme, host) = (&first[..end], &first[end + 3..]);
            !scheme.is_empty()
                && scheme.iter().all(u8::is_ascii_alphabetic)
                && !matches!(host, [] | [b'/', ..])
        }
        None => !first.contains(&b':'),
    };
    is_whole && first.iter().all(u8::is_ascii_graphic) && values.next().is_none()
}

/// Sets `x-forwarded-proto` unless a proxy in front has set it, and derives the scheme of an HTTP/1 request from it.
fn set_scheme(manager: &HttpManager, tls: bool, head: &mut RequestHead) {
    let secure = match head.header("x-forwarded-proto") {
        Some(b"https") => true,
        Some(b"http") => false,
        Some(_) => tls,
        None => {
            head.append("x-forwarded-proto", if tls { b"https" } else { b"http" });
            tls
        }
    };
    // HTTP/2 clients send the scheme. An HTTP/1 request with an absolute URL has one, which counts if nothing more
    // reliable is known.
    if secure && head.version != Version::Http2 {
        head.set_scheme(Scheme::Https);
    } else if manager.use_remote_address && head.version != Version::Http2 {
        head.set_scheme(Scheme::Http);
    }
}

/// Returns the address of the client: the peer, or the entry of `x-forwarded-for` that a trusted proxy wrote. Also
/// returns whether no other proxy is known to be on the path.
fn client_address(manager: &HttpManager, source: IpAddr, head: &RequestHead) -> (IpAddr, bool) {
    let hops = manager.xff_trusted_hops as usize;
    if manager.use_remote_address {
        // A trusted proxy in front wrote the last entry; each further trusted hop goes back by one.
        let hop = hops.checked_sub(1).and_then(|from_end| nth_from_end(head, from_end));
        return (hop.map_or(source, |(address, _)| address), !head.has("x-forwarded-for"));
    }
    nth_from_end(head, hops).map_or((source, false), |(address, first)| (address, first && hops == 0))
}

/// Returns an address of `x-forwarded-for`, and whether it is the first entry.
fn nth_from_end(head: &RequestHead, index: usize) -> Option<(IpAddr, bool)> {
    let entries = || head.header_values("x-forwarded-for").flat_map(|value| value.split(|b| *b == b','));
    let place = entries().count().checked_sub(index + 1)?;
    let address = std::str::from_utf8(entries().nth(place)?).ok()?.trim().parse().ok()?;
    Some((address, place == 0))
}

/// Appends the authority of a request to `x-forwarded-host`, unless it is the last element. As in Envoy, empty elements
/// do not count, and spaces belong to elements.
pub fn append_forwarded_host(head: &mut RequestHead) {
    const NAME: &str = "x-forwarded-host";
    let elements = head.header_values(NAME).flat_map(|list| list.split(|byte| *byte == b','));
    let last = elements.filter(|element| !element.is_empty()).last();
    if last != Some(head.authority().as_bytes()) {
        let host = head.authority().to_owned();
        append_to_list(head, NAME, host.as_bytes());
    }
}

/// Appends an element to a list header and merges its fields. Allocates only if the header exists.
fn append_to_list(head: &mut RequestHead, name: &str, element: &[u8]) {
    if !head.has(name) {
        return head.append(name, element);
    }
    let mut value = head.header_values(name).collect::<Vec<_>>().join(&b","[..]);
    if !value.is_empty() {
        value.push(b',');
    }
    value.extend_from_slice(element);
    head.set(name, &value);
}

fn forward_client_cert(mode: ForwardClientCert, hop: Hop<'_>, head: &mut RequestHead) {
    const NAME: &str = "x-forwarded-client-cert";
    match (mode, hop.certified) {
        (ForwardClientCert::AlwaysForwardOnly, _) | (ForwardClientCert::ForwardOnly, true) => {}
        (ForwardClientCert::Sanitize, _) | (_, false) => _ = head.remove(NAME),
        (ForwardClientCert::SanitizeSet, true) => match hop.forwarded_cert {
            Some(element) => head.set(NAME, element.as_bytes()),
            None => _ = head.remove(NAME),
        },
        (ForwardClientCert::AppendForward, true) => {
            let Some(element) = hop.forwarded_cert else { return };
            append_to_list(head, NAME, element.as_bytes());
        }
    }
}

/// Two hexadecimal digits for each byte.
static HEX: [[u8; 2]; 256] = {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let (mut table, mut at) = ([[0; 2]; 256], 0);
    while at < 256 {
        table[at] = [DIGITS[at >> 4], DIGITS[at & 0xf]];
        at += 1;
    }
    table
};

/// Returns a random UUID (RFC 9562, version 4) as text.
pub fn request_id(rng: &mut fastrand::Rng) -> [u8; 36] {
    let bits = rng.u128(..) & !(0xf << 76) | 0x4 << 76;
    let bits = bits & !(0x3 << 62) | 0x2 << 62;
    let (mut text, mut at) = ([b'-'; 36], 0);
    for (index, byte) in bits.to_be_bytes().into_iter().enumerate() {
        at += usize::from(matches!(index, 4 | 6 | 8 | 10));
        text[at..at + 2].copy_from_slice(&HEX[usize::from(byte)]);
        at += 2;
    }
    text
}
