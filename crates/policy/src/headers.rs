//! Headers that are added, changed and taken away: configured operations, and what every hop does to the
//! `x-forwarded-*` family and `x-request-id`.

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

/// Applies operations to a request.
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

/// Applies operations to an answer.
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

/// A header that comes to a head.
struct Addition<'a> {
    name: &'a str,
    value: Vec<u8>,
    overwrites: bool,
}

/// What is to be added to these headers, in the order in which it is: as in Envoy all values are made of what is there
/// before any of them is, and those that overwrite come first.
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
    // Names in certificates may hold anything; in a head, a line's end would begin another field.
    value.retain(|b| !b.is_ascii_control() || *b == b'\t');
    value
}

/// What a connection adds to each of its requests.
#[derive(Clone, Copy, Debug)]
pub struct Hop<'a> {
    /// The other end's address.
    pub source: IpAddr,
    /// What stands for it in `x-forwarded-for`, where it is on this machine.
    pub own: fn() -> IpAddr,
    /// Whether it came by TLS.
    pub tls: bool,
    /// Whether it is known by a certificate that was checked.
    pub certified: bool,
    /// Its element of `x-forwarded-client-cert`: [`crate::peer::Peer::forwarded_cert`].
    pub forwarded_cert: Option<&'a str>,
}

/// What only clients inside may say: how requests are to be tried, and for how long.
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
/// What clients outside may not say of themselves, where this is the first proxy.
const EDGE: [&str; 5] = [
    "x-envoy-decorator-operation",
    "x-envoy-downstream-service-cluster",
    "x-envoy-downstream-service-node",
    "x-envoy-original-host",
    "x-envoy-original-path",
];

/// Brings `x-forwarded-for`, `x-forwarded-proto`, `x-forwarded-client-cert` and `x-request-id` up to date, takes away what
/// only clients inside may say, and says who the client is. To be called once, before routing.
pub fn receive(
    manager: &HttpManager,
    hop: Hop<'_>,
    head: &mut RequestHead,
    dice: &mut fastrand::Rng,
) -> IpAddr {
    let (client, alone) = client_address(manager, hop.source, head);
    if manager.use_remote_address {
        if !manager.skip_xff_append {
            let is_here = hop.source == Ipv4Addr::LOCALHOST || hop.source == Ipv6Addr::LOCALHOST;
            let source = if is_here { (hop.own)() } else { hop.source };
            append_to_list(head, "x-forwarded-for", source.to_string().as_bytes());
        }
        if manager.xff_trusted_hops == 0 {
            // Nobody in front is trusted to have said how the client came.
            head.remove("x-forwarded-proto");
        }
    }
    set_scheme(manager, hop.tls, head);
    if head.has("referer") && !has_one_url(head.header_values("referer")) {
        head.remove("referer");
    }
    // The span name of the hop before, which ends here.
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
        head.set("x-request-id", &request_id(dice));
    }
    client
}

/// Whether it is one URL, whole or in part.
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

/// Says how the client came, unless a proxy in front has, and takes the scheme of a request of HTTP/1 from that.
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
    // In HTTP/2 clients say it themselves. In HTTP/1 a whole URL says it, to where it is not known better.
    if secure && head.version != Version::Http2 {
        head.set_scheme(Scheme::Https);
    } else if manager.use_remote_address && head.version != Version::Http2 {
        head.set_scheme(Scheme::Http);
    }
}

/// Who the client is: the other end, or the address that trusted proxies in front wrote down. Also whether no other proxy
/// was on the way, as far as is known.
fn client_address(manager: &HttpManager, source: IpAddr, head: &RequestHead) -> (IpAddr, bool) {
    let hops = manager.xff_trusted_hops as usize;
    if manager.use_remote_address {
        // The last entry is what the proxy in front saw; each further hop goes one back.
        let said = hops.checked_sub(1).and_then(|from_end| nth_from_end(head, from_end));
        return (said.map_or(source, |(address, _)| address), !head.has("x-forwarded-for"));
    }
    nth_from_end(head, hops).map_or((source, false), |(address, first)| (address, first && hops == 0))
}

/// An address of `x-forwarded-for`, and whether it is the first there.
fn nth_from_end(head: &RequestHead, index: usize) -> Option<(IpAddr, bool)> {
    let entries = || head.header_values("x-forwarded-for").flat_map(|value| value.split(|b| *b == b','));
    let place = entries().count().checked_sub(index + 1)?;
    let address = std::str::from_utf8(entries().nth(place)?).ok()?.trim().parse().ok()?;
    Some((address, place == 0))
}

/// Adds to the list that a header is, and makes one field of several. Allocates only if there is one already.
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

/// Every byte as two hexadecimal digits.
static HEX: [[u8; 2]; 256] = {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let (mut table, mut at) = ([[0; 2]; 256], 0);
    while at < 256 {
        table[at] = [DIGITS[at >> 4], DIGITS[at & 0xf]];
        at += 1;
    }
    table
};

/// A random UUID (RFC 9562, version 4) as text.
pub fn request_id(dice: &mut fastrand::Rng) -> [u8; 36] {
    let bits = dice.u128(..) & !(0xf << 76) | 0x4 << 76;
    let bits = bits & !(0x3 << 62) | 0x2 << 62;
    let (mut text, mut at) = ([b'-'; 36], 0);
    for (index, byte) in bits.to_be_bytes().into_iter().enumerate() {
        at += usize::from(matches!(index, 4 | 6 | 8 | 10));
        text[at..at + 2].copy_from_slice(&HEX[usize::from(byte)]);
        at += 2;
    }
    text
}
