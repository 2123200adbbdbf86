//! The upgrade from HTTP/1.1 to HTTP/2 by `upgrade: h2c` (RFC 7540, section 3.2).
//!
//! RFC 9113 has removed it and Envoy ignores it, but clients such as curl still request it. It is never
//! forwarded. The proxy ignores an upgrade with any defect, and answers the request in HTTP/1.1.
//!
//! Only outbound listeners accept it. On other listeners a proxy in front might forward the upgrade without
//! understanding it, and would not check the requests that follow on the connection.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};

use crate::worker::downstream::Downstream;
use skysail_http::{head::RequestHead, http1::Framing, wire::Wire};
use skysail_policy::config::{HttpManager, http::Codec, listener::Direction};

/// A request that becomes the first stream of HTTP/2.
pub(crate) struct UpgradedRequest {
    pub(crate) head: RequestHead,
    /// The client's settings, as the payload of a SETTINGS frame.
    pub(crate) settings: Vec<u8>,
}

/// The response before the first frame.
pub(crate) const SWITCHING_PROTOCOLS: &[u8] =
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n";

/// Returns the settings of a client that requests HTTP/2, if the upgrade is accepted.
pub(crate) fn settings(
    manager: &HttpManager,
    downstream: &Downstream,
    head: &RequestHead,
    framing: Framing,
) -> Option<Vec<u8>> {
    let is_plain = matches!(&downstream.wire, Wire::Http1(stream) if stream.is_plain());
    let is_outbound = downstream.origin.listener.direction == Direction::Outbound;
    if manager.codec != Codec::Auto
        || !is_plain
        || !is_outbound
        || framing != Framing::None
        || head.method() == "CONNECT"
    {
        return None;
    }
    let only = |name| {
        let mut values = head.header_values(name);
        values.next().filter(|_| values.next().is_none())
    };
    let tokens = head.header_values("connection").flat_map(|value| value.split(|b| *b == b','));
    let mut tokens = tokens.map(<[u8]>::trim_ascii);
    let is_listed = tokens.any(|token| token.eq_ignore_ascii_case(b"http2-settings"));
    let is_requested = only("upgrade").is_some_and(|name| name.eq_ignore_ascii_case(b"h2c"));
    let settings = BASE64.decode(only("http2-settings").filter(|_| is_listed && is_requested)?).ok()?;
    settings.len().is_multiple_of(6).then_some(settings)
}
