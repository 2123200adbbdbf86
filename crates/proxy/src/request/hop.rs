//! Changes that every HTTP hop makes to heads. It removes the fields that concern one connection, and adds
//! `date` and `server` to responses.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::LazyLock,
    time::Instant,
};

use crate::worker::Worker;
use skysail_http::{
    head::{Headers, Names, RequestHead, ResponseHead},
    http1::HeadLimits,
};
use skysail_policy::config::{
    HttpManager,
    http::{ServerHeader, Underscores},
};

/// Returns the limits of a request's head.
pub(crate) fn limits(manager: &HttpManager) -> HeadLimits {
    let HttpManager { max_head, max_headers, keep_case, .. } = *manager;
    let max_headers = u32::try_from(max_headers).unwrap_or(u32::MAX);
    HeadLimits { max_head, max_headers, keep_case }
}

/// Applies the policy for field names with underscores to a request's head, before the first decision about it. Returns
/// whether the request is refused.
pub(crate) fn refuses_underscores(manager: &HttpManager, head: &mut RequestHead) -> bool {
    match manager.underscores {
        Underscores::Allow => false,
        Underscores::Reject => head.iter().any(|(name, _)| name.contains(&b'_')),
        Underscores::Drop => {
            head.remove_if(|name, _| name.contains(&b'_'));
            false
        }
    }
}

/// Fields that concern one connection only, even if `connection` does not list them.
const HOP_BY_HOP: Names = Names::of(&[
    "connection",
    "http2-settings",
    "keep-alive",
    "proxy-connection",
    "te",
    "transfer-encoding",
    "upgrade",
]);

/// Fields that only the sidecar sets, because they frame a message or concern one connection.
pub(crate) const OWN_FIELDS: [&str; 7] =
    ["connection", "content-length", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade"];

/// Removes the fields that concern one connection only, and those that `connection` lists (RFC 9110, section 7.6.1).
/// `te: trailers` stays, because trailers are forwarded. The writer of a message sets the fields that frame it.
pub(crate) fn remove_connection_fields(headers: &mut Headers, keep_upgrade: bool) {
    if headers.has("connection") {
        let named: Vec<Vec<u8>> = headers
            .header_values("connection")
            .flat_map(|value| value.split(|b| *b == b','))
            .map(|token| token.trim_ascii().to_ascii_lowercase())
            .filter(|token| !matches!(&**token, b"" | b"close" | b"keep-alive" | b"upgrade" | b"te"))
            .collect();
        if !named.is_empty() {
            headers.remove_if(|name, _| named.iter().any(|token| **token == *name));
        }
    }
    if !headers.may_have(HOP_BY_HOP) {
        return;
    }
    headers.remove_if(|name, value| match name {
        b"connection" | b"http2-settings" | b"keep-alive" | b"proxy-connection" | b"transfer-encoding" => {
            true
        }
        b"upgrade" => !keep_upgrade,
        b"te" => !value.eq_ignore_ascii_case(b"trailers"),
        _ => false,
    });
}

/// Sets `date` and `server` in a response.
pub(crate) fn finish_response(worker: &Worker, manager: &HttpManager, head: &mut ResponseHead, now: Instant) {
    if !head.has("date") {
        worker.with_date(now, |date| head.append("date", date.as_bytes()));
    }
    match &manager.server {
        ServerHeader::Overwrite(name) => head.set("server", name.as_bytes()),
        ServerHeader::AppendIfAbsent(name) if !head.has("server") => head.append("server", name.as_bytes()),
        _ => {}
    }
}

/// Returns this machine's address for `x-forwarded-for`: the first IPv4 address that is not 127.0.0.1.
pub(crate) fn own_address() -> IpAddr {
    static OWN: LazyLock<IpAddr> = LazyLock::new(|| {
        let all = nix::ifaddrs::getifaddrs().into_iter().flatten();
        let mut addresses = all.filter_map(|interface| Some(interface.address?.as_sockaddr_in()?.ip()));
        let first = addresses.find(|address| *address != Ipv4Addr::LOCALHOST);
        first.unwrap_or(Ipv4Addr::LOCALHOST).into()
    });
    *OWN
}

/// Returns whether a request with this method may be sent twice (RFC 9110, section 9.2.2).
pub(crate) fn is_idempotent(method: &str) -> bool {
    matches!(method, "GET" | "HEAD" | "OPTIONS" | "TRACE" | "PUT" | "DELETE")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_fields_are_removed() {
        let mut head = RequestHead::build(
            "GET",
            "/",
            "a",
            &[
                ("connection", "X-Own, close"),
                ("x-own", "1"),
                ("keep-alive", "5"),
                ("te", "gzip"),
                ("upgrade", "h2c"),
                ("http2-settings", "AAMAAABk"),
                ("x-other", "2"),
            ],
        );
        remove_connection_fields(&mut head, false);
        let names: Vec<_> = head.iter().map(|(name, _)| String::from_utf8_lossy(name).into_owned()).collect();
        assert_eq!(names, ["x-other"]);
        head.set_number("n", 0);
        head.set_number("m", 1_234_567_890);
        assert_eq!(head.header("n"), Some(&b"0"[..]));
        assert_eq!(head.header("m"), Some(&b"1234567890"[..]));
    }
}
