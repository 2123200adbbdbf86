//! From HTTP/1.1 to HTTP/2 on the same connection: `upgrade: h2c` (RFC 7540, section 3.2). RFC 9113 has dropped it and Envoy
//! passes it over, but clients such as curl still ask. It is never passed on, and what is not wholly in order is passed over:
//! the request is then answered in HTTP/1.1.
//!
//! Only the workload's own client gets it. A proxy in front of other listeners may pass such a request on without knowing what
//! it does, and would then check none of what follows on the connection.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};

use crate::worker::downstream::Downstream;
use skysail_http::{head::RequestHead, http1::Framing, wire::Wire};
use skysail_policy::config::{HttpManager, http::Codec, listener::Direction};

/// What goes on as the first stream of HTTP/2.
pub(crate) struct Begun {
    pub(crate) head: RequestHead,
    /// The client's settings, as in a frame.
    pub(crate) settings: Vec<u8>,
}

/// What is said before the first frame.
pub(crate) const SWITCHED: &[u8] =
    b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: h2c\r\n\r\n";

/// The settings of a client that asks for HTTP/2, if it may have it.
pub(crate) fn settings(
    manager: &HttpManager,
    downstream: &Downstream,
    head: &RequestHead,
    framing: Framing,
) -> Option<Vec<u8>> {
    let is_plain = matches!(&downstream.wire, Wire::Http1(stream) if stream.is_plain());
    let is_own = downstream.origin.listener.direction == Direction::Outbound;
    if manager.codec != Codec::Auto
        || !is_plain
        || !is_own
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
    let is_named = tokens.any(|token| token.eq_ignore_ascii_case(b"http2-settings"));
    let is_wanted = only("upgrade").is_some_and(|name| name.eq_ignore_ascii_case(b"h2c"));
    let settings = BASE64.decode(only("http2-settings").filter(|_| is_named && is_wanted)?).ok()?;
    settings.len().is_multiple_of(6).then_some(settings)
}
