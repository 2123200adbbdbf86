//! Headers that are added, changed and taken away: configured operations, and what every hop does to the
//! `x-forwarded-*` family and `x-request-id`.

use std::net::IpAddr;

use crate::{
    config::{
        http::{Format, ForwardClientCert, HttpManager},
        route::{AppendAction, HeaderOp},
    },
    head::{self, Headers, RequestHead, ResponseHead, Scheme, Version},
    telemetry::{Context, Record, format},
};

#[cfg(test)]
mod tests;

/// Applies operations to a request.
pub fn apply_request(ops: &[HeaderOp], head: &mut RequestHead, record: &Record<'_>) {
    remove(ops, head);
    let additions = additions(ops, head, &Context { record, request: Some(head), response: None });
    for Addition { name, value, overwrites } in additions {
        match name {
            ":authority" | "host" => {
                // A value from the request may be anything; the server must not get what is no host.
                if let Some(authority) = head::as_authority(&value) {
                    head.set_authority(authority);
                }
            }
            ":path" => {
                if !value.is_empty() {
                    head.set_path(&without_spaces(&value));
                }
            }
            name if overwrites => head.set(name, &value),
            name => head.append(name, &value),
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
        // A request always has these, though not among its fields.
        let stands_apart = context.response.is_none() && matches!(&**name, ":authority" | "host" | ":path");
        let is_there = stands_apart || headers.has(name);
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

/// A space in a request's line would end the target there.
fn without_spaces(value: &[u8]) -> String {
    String::from_utf8_lossy(value).replace([' ', '\t'], "%20")
}

/// What a connection adds to each of its requests.
#[derive(Clone, Copy, Debug)]
pub struct Hop<'a> {
    /// The other end's address.
    pub source: IpAddr,
    /// Whether it came by TLS.
    pub tls: bool,
    /// Whether it is known by a certificate that was checked.
    pub certified: bool,
    /// Its element of `x-forwarded-client-cert`: [`crate::peer::Peer::forwarded_cert`].
    pub forwarded_cert: Option<&'a str>,
}

/// Brings `x-forwarded-for`, `x-forwarded-proto`, `x-forwarded-client-cert` and `x-request-id` up to date and
/// says who the client is. To be called once, before routing.
pub fn receive(
    manager: &HttpManager,
    hop: Hop<'_>,
    head: &mut RequestHead,
    dice: &mut fastrand::Rng,
) -> IpAddr {
    let client = client_address(manager, hop.source, head);
    if manager.use_remote_address {
        append_to_list(head, "x-forwarded-for", hop.source.to_string().as_bytes());
        if manager.xff_trusted_hops == 0 {
            // Nobody in front is trusted to have said how the client came.
            head.remove("x-forwarded-proto");
        }
    }
    let scheme = match head.header("x-forwarded-proto") {
        Some(b"https") => Scheme::Https,
        Some(b"http") => Scheme::Http,
        said => {
            let nothing = said.is_none();
            let scheme = if hop.tls { Scheme::Https } else { Scheme::Http };
            if nothing {
                head.append("x-forwarded-proto", if hop.tls { b"https" } else { b"http" });
            }
            scheme
        }
    };
    // In HTTP/2 the client says it itself, and in HTTP/1 if it sends the whole of a URL.
    if head.version != Version::Http2 && scheme == Scheme::Https {
        head.set_scheme(scheme);
    }
    // The span name of the hop before, which ends here.
    head.remove("x-envoy-decorator-operation");
    forward_client_cert(manager.client_cert.forward, hop, head);
    if manager.generate_request_id && !head.has("x-request-id") {
        head.append("x-request-id", &request_id(dice));
    }
    client
}

/// Who the client is: the other end, or the address that trusted proxies in front wrote down.
fn client_address(manager: &HttpManager, source: IpAddr, head: &RequestHead) -> IpAddr {
    let hops = manager.xff_trusted_hops as usize;
    let from_end = match (manager.use_remote_address, hops) {
        (true, 0) => return source,
        // The last entry is what the proxy in front saw; each further hop goes one back.
        (true, hops) => hops - 1,
        (false, hops) => hops,
    };
    nth_from_end(head, from_end).unwrap_or(source)
}

fn nth_from_end(head: &RequestHead, index: usize) -> Option<IpAddr> {
    let entries = || head.header_values("x-forwarded-for").flat_map(|value| value.split(|b| *b == b','));
    let entry = entries().nth(entries().count().checked_sub(index + 1)?)?;
    std::str::from_utf8(entry).ok()?.trim().parse().ok()
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
